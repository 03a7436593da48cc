"""What a run says of itself: in the terminal, in TensorBoard, and what of Lightning's messages it leaves."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from runs import SMALL, kill_9, record, run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from batchscope.summary import hold_batch
from batchscope.sweep import write_report


@pytest.fixture(scope="module")
def oversize(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose batches shall hold more samples than there are."""
    folder = tmp_path_factory.mktemp("oversize")
    line = ["data.batch_size=200", "optimizer.lr_scaling=linear", "optimizer.reference_batch_size=76"]
    done = run(folder, *SMALL, *line, "hydra.run.dir=out")
    assert done.end() == 0, done.complained
    return folder


def test_a_batch_larger_than_the_training_set_is_said_before_the_first_step(tmp_path: Path) -> None:
    first_step = ("batchscope.task.Task.training_step", 1, kill_9)
    killed = run(tmp_path, *SMALL, "data.batch_size=200", faults=[first_step])
    (line,) = [line for line in killed.complained.splitlines() if "data.batch_size" in line]
    assert line == (
        "warning: data.batch_size: got 200, and copy-memory has 76 training samples: every step takes all of them"
    )


def test_several_processes_share_the_training_set(capsys: pytest.CaptureFixture[str]) -> None:
    data = SimpleNamespace(name="mnist", batch_size=64)
    assert hold_batch(data, train_samples=101, processes=2, first=True) == {"batch_size": 51, "global_batch_size": 101}
    assert data.batch_size == 51
    assert "got 64 for each of 2 processes, and mnist has 101 training samples" in capsys.readouterr().err


def test_a_batch_that_the_training_set_can_fill_stays_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    data = SimpleNamespace(name="mnist", batch_size=50)
    assert hold_batch(data, train_samples=101, processes=2, first=True) == {}
    assert (data.batch_size, capsys.readouterr().err) == (50, "")


def test_it_is_labelled_as_what_it_held_wherever_it_is_named(oversize: Path) -> None:
    found = record(oversize / "out")
    assert (found["batch_size"], found["global_batch_size"], found["throughput"]["batch_size"]) == (76, 76, 76)
    assert found["name"] == "stacked-lstm-copy-memory-bs76"
    assert found["config"]["data"]["batch_size"] == 200  # what was asked for
    said = (oversize / "stdout").read_text()
    assert "· batch 76 ·" in said and "trained  stacked-lstm-copy-memory-bs76:" in said
    (folder,) = {path.parent for path in (oversize / "out").glob("*/events.*")}
    assert folder.name == "stacked-lstm-copy-memory-bs76"
    metadata = EventAccumulator(str(folder)).Reload().SummaryMetadata("_hparams_/session_start_info")
    hparams = plugin_data_pb2.HParamsPluginData.FromString(metadata.plugin_data.content).session_start_info.hparams
    assert hparams["data.batch_size"].number_value == 76
    report = write_report([oversize / "out"], oversize / "report")
    assert report.headlines[0].split("samples/s at ")[1].startswith("batch size 76.")


def test_the_learning_rate_is_scaled_to_what_the_batch_held(oversize: Path) -> None:
    found = record(oversize / "out")
    assert found["learning_rate"] == found["config"]["optimizer"]["lr"]


def test_the_rate_of_a_run_is_one_number_in_the_record_the_report_and_hparams(oversize: Path) -> None:
    throughput = record(oversize / "out")["throughput"]
    assert throughput["samples_per_sec"] == pytest.approx(76e3 / throughput["step_ms_median"])
    report = write_report([oversize / "out"], oversize / "report")
    assert report.sweep.runs[0].samples_per_sec == throughput["samples_per_sec"]
    (folder,) = {path.parent for path in (oversize / "out").glob("*/events.*")}
    events = EventAccumulator(str(folder)).Reload()
    for key in ("samples_per_sec", "step_ms_median"):
        assert events.Scalars(f"summary/{key}")[-1].value == pytest.approx(throughput[key])
