"""Records of earlier versions are read as this version would have written them."""

import json
from pathlib import Path
from typing import Any

import pytest

from batchscope.analysis import write_report
from batchscope.analysis.read import find
from batchscope.records.formatting import significant
from batchscope.records.read import optimized, read
from batchscope.records.upgrade import SCHEMA, upgraded

SCHEMAS = Path(__file__).parent / "schemas"


def schema_1(**facts: Any) -> dict[str, Any]:
    """A record as it was: a mean rate of 31 samples/s beside a median step of 171 ms with eight samples."""
    throughput = {
        "batch_size": 8,
        "samples_per_sec": 31.0,
        "samples_per_sec_median": 46.0,
        "step_ms": 260.0,
        "step_ms_median": 171.0,
        "step_ms_p10": 170.0,
        "step_ms_p90": 400.0,
        "flops_per_sec": 31e6,
        "mfu": 0.031,
    }
    config = {"data": {"batch_size": 8}, "trainer": {"accumulate_grad_batches": 1}}
    return {"schema": 1, "status": "finished", "config": config, "throughput": throughput, **facts}


def written(folder: Path, record: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(record))
    return folder


def test_an_older_record_is_read_with_the_one_rate_of_today(tmp_path: Path) -> None:
    throughput = read(written(tmp_path / "0", schema_1()))["throughput"]
    assert throughput["samples_per_sec"] == pytest.approx(8 / 0.171)
    assert throughput["samples_per_sec_mean"] == 31
    assert "samples_per_sec_median" not in throughput
    assert (throughput["step_ms"], throughput["step_ms_median"]) == (260, 171)


def test_what_follows_the_rate_follows_it_in_an_older_record_too() -> None:
    throughput = upgraded(schema_1())["throughput"]
    assert throughput["flops_per_sec"] == pytest.approx(1e6 * throughput["samples_per_sec"])
    assert throughput["mfu"] == pytest.approx(1e-3 * throughput["samples_per_sec"])


def test_a_report_of_an_older_record_says_the_same_rate(tmp_path: Path) -> None:
    written(tmp_path / "0", schema_1())
    (run,) = find([tmp_path]).runs
    assert (run.values["samples_per_sec"], run.values["samples_per_sec_mean"]) == (pytest.approx(8 / 0.171), 31)
    assert run.values["samples_per_sec_p90"] == pytest.approx(8 / 0.170)


def test_an_older_record_of_several_processes_and_accumulated_batches_counts_all_samples() -> None:
    config = {"data": {"batch_size": 8}, "trainer": {"accumulate_grad_batches": 4}}
    throughput = upgraded(schema_1(config=config, processes=2))["throughput"]
    assert throughput["samples_per_sec"] == pytest.approx(8 * 4 * 2 / 0.171)


@pytest.mark.parametrize(("held", "size"), [(9, 8), (7, 7), (None, 8)])
def test_an_older_records_batch_is_what_it_held_but_for_the_last_one_of_an_epoch(held: int | None, size: int) -> None:
    record = schema_1()
    record["throughput"]["batch_size"] = held
    assert upgraded(record)["throughput"]["batch_size"] == size


def test_a_sweeper_that_asked_an_older_version_for_the_median_rate_gets_it(tmp_path: Path) -> None:
    record = schema_1()
    record["config"]["optimized_metric"] = "samples_per_sec_median"
    assert optimized(read(written(tmp_path / "0", record))) == pytest.approx(8 / 0.171)


@pytest.mark.parametrize("schema", [SCHEMA, SCHEMA + 1, None, [1], "1"])
def test_a_record_of_no_older_schema_is_read_as_it_is(schema: Any) -> None:
    record = {"schema": schema, "throughput": {"samples_per_sec": 1.0, "limiter": {}}}
    assert upgraded(record) is record


def test_the_limiter_of_schema_2_is_the_bottleneck() -> None:
    limiter = {"kind": "host", "share": 0.5, "advice": "Raise it.", "predicted_knee": 64}
    record = upgraded({"schema": 2, "throughput": {"mfu": 0.1, "limiter": limiter}})
    assert record == {"schema": SCHEMA, "throughput": {"mfu": 0.1, "bottleneck": limiter}}


@pytest.mark.parametrize("schema", [1, 2])
def test_a_run_of_an_earlier_version_can_be_reported(schema: int, tmp_path: Path) -> None:
    """The files are the records of real runs of those versions."""
    old = json.loads((SCHEMAS / f"schema_{schema}.json").read_text(encoding="utf-8"))
    written(tmp_path / "0", old)
    record = read(tmp_path / "0")
    assert record["schema"] == SCHEMA
    report = write_report([tmp_path], tmp_path / "report")
    rate = 1e3 * 8 / old["throughput"]["step_ms_median"]
    assert report.text.startswith("1 run: 1 finished")
    assert f"One run only: {significant(rate)} samples/s at batch size 8." in report.text


@pytest.mark.parametrize("value", [None, "fast", [1], True, float("nan"), float("inf"), -1, 0, 10**400])
@pytest.mark.parametrize("key", ["batch_size", "samples_per_sec", "step_ms_median", "mfu"])
def test_a_value_of_the_wrong_kind_in_an_older_record_is_no_number(key: str, value: Any) -> None:
    record = schema_1(config={})
    record["throughput"][key] = value
    throughput = upgraded(record)["throughput"]
    for rate in ("samples_per_sec", "samples_per_sec_mean"):
        assert 0 < throughput.get(rate, 1.0) < 1e6


@pytest.mark.parametrize("part", ["config", "throughput"])
@pytest.mark.parametrize("value", [None, 3, "text", []])
def test_a_part_of_the_wrong_kind_in_an_older_record_is_left_to_its_reader(part: str, value: Any) -> None:
    assert upgraded(schema_1(**{part: value}))[part] == value
