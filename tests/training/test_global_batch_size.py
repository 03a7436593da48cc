"""A constant global batch: runs of any batch size make the same updates, and everything sees the accumulated update."""

import json
from pathlib import Path
from typing import Any

import pytest

from batchscope.analysis.report import analyse
from tests.support.runs import SMALL, record, results, run

PLAIN = ["model.dropout=0", "optimizer=sgd", "optimizer.lr_scaling=linear", "optimizer.reference_batch_size=32"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one update and three batch sizes, with the order of samples of one seed."""
    folder = tmp_path_factory.mktemp("constant")
    for size in (4, 8, 16):
        done = run(
            folder, *SMALL, *PLAIN, "global_batch_size=16", f"data.batch_size={size}", f"hydra.run.dir=out/{size}"
        )
        assert done.end() == 0, done.complained
    return folder / "out"


def test_runs_of_any_batch_size_make_the_same_updates(runs: Path) -> None:
    whole, parts = results(runs / "16"), results(runs / "4")
    for name, weight in whole["weights"].items():  # the last update of each epoch has 12 samples: 3 batches of 4
        assert weight.sub(parts["weights"][name]).abs().max() < 0.05, name


@pytest.mark.parametrize("size", [4, 8, 16])
def test_schedule_learning_rate_and_record_are_those_of_the_update(runs: Path, size: int) -> None:
    found = record(runs / str(size))
    assert (found["steps"], found["global_batch_size"]) == (2 * 5, 16)  # of 76 samples
    assert found["learning_rate"] == pytest.approx(found["config"]["optimizer"]["lr"] * 16 / 32)
    assert found["throughput"]["batch_size"] == size


def test_an_update_of_more_than_the_training_set_is_one_of_all_its_batches(runs: Path) -> None:
    for asked in (80, 160):  # 76 samples: 10 batches of 8
        done = run(
            runs.parent, *SMALL, *PLAIN, "data.batch_size=8", f"global_batch_size={asked}", f"hydra.run.dir=out{asked}"
        )
        assert done.end() == 0, done.complained
    enough, more = (record(runs.parent / f"out{asked}") for asked in (80, 160))
    assert more["learning_rate"] == enough["learning_rate"] and more["steps"] == enough["steps"]
    assert more["learning_rate"] == pytest.approx(more["config"]["optimizer"]["lr"] * more["global_batch_size"] / 32)
    weights = [results(runs.parent / f"out{asked}")["weights"] for asked in (80, 160)]
    assert all(weight.equal(weights[1][name]) for name, weight in weights[0].items())


def test_a_report_shows_the_update(runs: Path) -> None:
    report = analyse([runs])
    assert list(report.frame["global_batch_size"].dropna()) == [
        16,
        16,
    ]  # where it is another number than the batch size
    assert [run.values["samples_seen"] for run in report.sweep.runs] == [152] * 3


def test_it_does_not_change_on_resume(runs: Path) -> None:
    before = json.loads((runs / "16" / "run.json").read_text())
    refused = run(runs.parent, "resume=out/16", "trainer.max_time=null", "global_batch_size=32")
    assert refused.end() == 1
    assert "resume: global_batch_size is 16 in the run, and 32 would change the result" in refused.complained
    assert json.loads((runs / "16" / "run.json").read_text()) == before


def test_the_ranks_that_the_machine_has_are_counted_before_anything_is_written(tmp_path: Path) -> None:
    two: list[Any] = ["trainer=ddp", "trainer.devices='2'", "global_batch_size=24"]  # the text of a number
    refused = run(tmp_path, *SMALL, *two, "hydra.run.dir=out")
    assert refused.end() == 1
    assert "global_batch_size: got 24, takes a multiple of 16 (data.batch_size=8 on 2 devices)" in refused.complained
    assert not (tmp_path / "out").exists()
