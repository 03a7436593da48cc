"""A constant global batch: runs of any batch size make the same updates, and everything sees the accumulated update."""

from pathlib import Path

import pytest

from batchscope.analysis.report import analyse
from batchscope.training.build import build_trainer
from tests.support.command_lines import composed, refusal
from tests.support.runs import SMALL, record, results, run

PLAIN = ["model.dropout=0", "optimizer=sgd", "optimizer.lr_scaling=linear", "optimizer.reference_batch_size=32"]
PLAIN += ["callbacks.throughput.warmup_steps=1", "callbacks.throughput.record_operations=false"]  # two steps are few


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one update and two batch sizes, with the order of samples of one seed; and of an update of all samples."""
    folder = tmp_path_factory.mktemp("constant")
    for size, update in ((4, 16), (16, 16), (8, 160)):
        line = [f"global_batch_size={update}", f"data.batch_size={size}", f"hydra.run.dir=out/{size}"]
        done = run(folder, *SMALL, *PLAIN, *line)
        assert done.end() == 0, done.complained
    return folder / "out"


def test_runs_of_any_batch_size_make_the_same_updates(runs: Path) -> None:
    whole, parts = results(runs / "16"), results(runs / "4")
    for name, weight in whole["weights"].items():  # the last update of each epoch has 12 samples: 3 batches of 4
        assert weight.sub(parts["weights"][name]).abs().max() < 0.05, name


@pytest.mark.parametrize(("size", "updates", "update"), [(4, 5, 16), (16, 5, 16), (8, 1, 76)])
def test_schedule_learning_rate_and_record_are_those_of_the_update(runs: Path, size, updates, update) -> None:
    found = record(runs / str(size))
    assert (found["steps"], found["global_batch_size"]) == (2 * updates, update)  # of 76 samples
    assert found["learning_rate"] == pytest.approx(found["config"]["optimizer"]["lr"] * update / 32)
    assert found["throughput"]["batch_size"] == size


def test_a_report_shows_the_update(runs: Path) -> None:
    report = analyse([runs])
    shown = dict(zip(report.frame["batch_size"], report.frame["global_batch_size"], strict=True))
    assert (shown[4], shown[8]) == (16, 76)
    assert [run.values["samples_seen"] for run in report.sweep.runs] == [152] * 3


def test_it_does_not_change_on_resume(runs: Path) -> None:
    refused = run(runs.parent, "resume=out/16", "trainer.max_time=null", "global_batch_size=32")
    assert refused.end() == 1
    assert "resume: global_batch_size is 16 in the run, and 32 would change the result" in refused.complained


def test_the_ranks_that_the_machine_has_are_counted() -> None:
    two = [
        "trainer=ddp",
        "trainer.accelerator=cpu",
        "trainer.devices='2'",
        "global_batch_size=24",
    ]  # the text of a number
    said = refusal(build_trainer, composed("data.batch_size=8", *two), Path(), [], {})
    assert said.startswith(
        "global_batch_size: got 24, takes a multiple of 16 (data.batch_size=8 on 2 devices), such as 32"
    )
