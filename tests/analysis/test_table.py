"""A row a run: complete as CSV and JSON, readable as Markdown and text, and nothing unknown is a number."""

import csv
import io

import pytest

from batchscope.analysis import table
from batchscope.analysis.read import find
from batchscope.analysis.recommend import Analysis, recommend
from batchscope.analysis.text_table import to_text
from batchscope.records.formatting import percent
from batchscope.records.metrics import FRACTION, METRICS, Metric
from tests.support.synthetic_runs import serial, write_run, write_sweep


def test_a_row_holds_what_is_known_and_leaves_out_the_rest(tmp_path):
    write_run(tmp_path / "0", 64, 10.0, metrics={"test/acc": 0.98})
    (row,) = table.rows(find([tmp_path]))
    assert row["samples_per_sec"] == 6400
    assert row["forward_ms_mean"] == 3.0
    assert row["test/acc"] == 0.98
    unknown = {"processor_time_pct", "utilization_pct", "mfu", "memory_peak_gib", "joules_per_sample", "reason"}
    assert not unknown & set(row)


def test_runs_that_failed_have_a_row_and_a_reason(tmp_path):
    write_sweep(tmp_path, [32, 64], serial(4, 0.1), metrics={"test/acc": 0.98})
    write_run(tmp_path / "2", 128, status="out_of_memory", error="OutOfMemoryError: CUDA out of memory. Tried")
    write_run(tmp_path / "3", 256, status="failed", error="ValueError: a|b\nc " + 200 * "x")
    write_run(tmp_path / "4", 512, status="running")
    sweep = find([tmp_path])
    reasons = [row.get("reason", "") for row in table.rows(sweep)]
    assert reasons[:3] == ["", "", "out of memory"]
    assert reasons[3].startswith("ValueError: a|b c xxx")
    assert reasons[4] == "still running, or killed"
    lines = table.to_markdown(sweep).splitlines()
    assert len(lines) == 2 + 5
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1


def test_csv_has_every_column_and_empty_cells(tmp_path):
    write_run(tmp_path / "0", 64, 10.0, throughput={"mfu": 0.25})
    write_run(tmp_path / "1", 128, status="failed", error="ValueError: no")
    first, second = csv.DictReader(io.StringIO(table.to_csv(find([tmp_path]))))
    assert (first["mfu"], second["mfu"], second["samples_per_sec"]) == ("0.25", "", "")
    assert list(first).index("batch_size") < list(first).index("mfu") < list(first).index("status")


def test_columns_that_no_run_has_are_not_shown(tmp_path):
    write_sweep(tmp_path, [32, 64], serial(4, 0.1))
    header = to_text(find([tmp_path]), 300).splitlines()[0]
    assert "samples/s" in header
    assert not any(word in header for word in ("kernel", "processor", "MFU", "GiB", "test/", "why"))


def test_the_text_is_aligned(tmp_path):
    write_sweep(tmp_path, [32, 1024], serial(4, 0.1))
    lines = to_text(find([tmp_path]), 300).splitlines()
    assert len({len(line) for line in lines}) == 1


def test_an_accuracy_is_shown_and_a_loss_only_of_runs_without_one(tmp_path):
    write_run(tmp_path / "0", metrics={"test/acc": 0.98, "test/loss": 0.1})
    assert table.shown_metrics(find([tmp_path])) == ["test/acc"]
    write_run(tmp_path / "1", model="lstm_cell", metrics={"test/loss": 0.1})
    assert table.shown_metrics(find([tmp_path])) == ["test/acc", "test/loss"]


def test_a_metric_that_a_task_adds_is_a_column_and_is_compared_once_its_direction_is_declared(tmp_path, monkeypatch):
    write_run(tmp_path / "0", 64, 8.0, metrics={"test/f1": 0.9, "test/loss": 0.1})
    write_run(tmp_path / "1", 512, 34.0, metrics={"test/f1": 0.7, "test/loss": 0.1})
    sweep = find([tmp_path])
    assert table.rows(sweep)[0]["test/f1"] == 0.9
    assert "test/f1" in to_text(sweep, 300).splitlines()[0]
    (group,) = sweep.groups
    assert recommend(Analysis(group), table.shown_metrics(sweep)).costs == ""
    monkeypatch.setitem(
        METRICS, "test/f1", Metric("test/f1", FRACTION, "F1 score", higher_is_better=True, text=percent)
    )
    costs = recommend(Analysis(group), table.shown_metrics(sweep)).costs
    assert costs == "it costs accuracy: test/f1 70 % where 64, 1.88× slower per sample, reaches 90 %"


def test_without_a_test_the_validation_tells_how_good_the_runs_became(tmp_path):
    write_run(tmp_path / "0", metrics={"val/loss": 0.1, "val/acc": 0.98, "train/loss": 0.2})
    assert table.shown_metrics(find([tmp_path])) == ["val/acc"]


def test_an_option_that_is_null_is_shown(tmp_path):
    write_run(tmp_path / "0", 64, 10.0, options={"trainer.gradient_clip_val": None})
    write_run(tmp_path / "1", 64, 10.0, options={"trainer.gradient_clip_val": 0.5})
    shown = [line.split()[1] for line in to_text(find([tmp_path]), 300).splitlines()]
    assert shown == ["gradient_clip_val", "null", "0.5"]


def test_runs_of_several_processes_show_the_batch_of_all_and_how_far_apart_the_processes_are(tmp_path):
    write_run(tmp_path / "0", 64, 10.0, options={"trainer.devices": 1})
    several = {"processes": 2, "slowest_step_ms": 10.5, "fastest_step_ms": 9.5}
    write_run(tmp_path / "1", 64, 10.0, options={"trainer.devices": 2}, throughput=several)
    sweep = find([tmp_path])
    alone, both = table.rows(sweep)
    assert not {"processes", "global_batch_size", "slowest_step_ms_mean"} & set(alone)
    assert (both["processes"], both["batch_size"], both["global_batch_size"]) == (2, 64, 128)
    assert both["samples_per_sec"] == 2 * alone["samples_per_sec"]
    shown = to_text(sweep, 200).splitlines()
    assert "global" in shown[0]
    assert "9.50–10.5" in shown[2]


def test_how_well_a_rate_is_known_is_shown_instead_of_the_spread_of_its_steps(tmp_path):
    write_run(tmp_path / "0", 64, 10.0)
    write_run(tmp_path / "1", 128, 20.0, throughput={"step_ms_interval": [19.0, 20.8]})
    sweep = find([tmp_path])
    text = to_text(sweep, 300)
    assert "± %" in text
    assert "5.3" in text.splitlines()[2]
    assert "p10–p90" not in text
    assert table.rows(sweep)[1]["samples_per_sec_high"] == pytest.approx(6400 * 20 / 19)
