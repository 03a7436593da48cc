"""A run that is killed at any moment and resumed ends bit-identical to one that was never stopped."""

import contextlib
from pathlib import Path

import psutil
import pytest

from batchscope.options.groups import choices_of
from tests.checkpointing.support import (
    OUT,
    STEP,
    TEST,
    VALIDATION,
    everything,
)
from tests.support.runs import EVERY_4, SMALL, assert_alike, kill_9, record, results, run
from tests.support.waiting import wait_until

# The record is written twice before the first step, and every atomic write flushes a file and its folder.
# Steps 1 to 10 are the first epoch, 11 to 20 the second; every epoch has one validation of one batch.
MOMENTS = {
    "before the first checkpoint": (STEP, 3, kill_9),
    "in mid-epoch": (STEP, 7, kill_9),
    "on an epoch's last batch": (STEP, 10, kill_9),
    "between an epoch's end and its validation": (VALIDATION, 1, kill_9),
    "between a validation and the best checkpoint": ("batchscope.checkpointing.callback.link_checkpoint", 1, kill_9),
    "between two epochs": (STEP, 11, kill_9),
    "while a checkpoint is written": ("batchscope.files.os.fsync", 7, kill_9),
    "between a checkpoint and its name": ("batchscope.files.os.replace", 4, kill_9),
    "in the last validation": (VALIDATION, 2, kill_9),
    "in the test": (TEST, 1, kill_9),
}


# The other moments are slow tests: these two take the ways of a torn checkpoint and of an epoch that is over.
QUICK = ("while a checkpoint is written", "between an epoch's end and its validation")


def killed_and_resumed(folder: Path, *overrides: str, faults: list) -> Path:
    """The folder of a run that was killed by each fault in turn, resumed each time, and then finished."""
    line = [*SMALL, EVERY_4, OUT, *overrides]
    for fault in faults:
        assert run(folder, *line, faults=[fault]).end() == -9
        assert record(folder / "out")["status"] == "running"
        line = ["resume=out"]
    done = run(folder, *line)
    assert done.end() == 0, done.complained
    return folder / "out"


@pytest.mark.parametrize(
    "moment", [pytest.param(m, marks=() if m in QUICK else pytest.mark.slow, id=m) for m in MOMENTS]
)
def test_a_run_killed_at_any_moment_ends_as_one_that_never_stopped(
    moment: str, unstopped: Path, tmp_path: Path
) -> None:
    assert_alike(results(killed_and_resumed(tmp_path, faults=[MOMENTS[moment]])), results(unstopped))


def test_a_run_may_be_killed_twice_in_one_epoch(unstopped: Path, tmp_path: Path) -> None:
    # The resumed process begins after step 4 and is killed in step 10, after the checkpoint of step 8.
    run_dir = killed_and_resumed(tmp_path, faults=[(STEP, 6, kill_9), (STEP, 6, kill_9)])
    assert_alike(results(run_dir), results(unstopped))
    assert [entry["step"] for entry in record(run_dir)["resumed"]] == [4, 8]
    assert record(run_dir)["started"] <= record(run_dir)["resumed"][0]["at"]


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["in mid-epoch", "on an epoch's last batch", "between two epochs"])
@pytest.mark.parametrize("pipeline", ["device", "workers"])
def test_every_pipeline_is_resumed_exactly_and_all_train_the_same(
    pipeline: str, moment: str, unstopped: Path, tmp_path: Path
) -> None:
    run_dir = killed_and_resumed(tmp_path, f"data.pipeline={pipeline}", faults=[MOMENTS[moment]])
    assert_alike(results(run_dir), results(unstopped))


def kill_9_beside_workers() -> None:
    Path("workers").write_text(str(len([p for p in psutil.process_iter() if _stands_in(p, Path.cwd())]) - 1))
    kill_9()


def _stands_in(process: psutil.Process, folder: Path) -> bool:
    with contextlib.suppress(psutil.Error):
        return Path(process.cwd()) == folder
    return False


@pytest.mark.slow
def test_the_workers_of_a_killed_run_end_with_it(tmp_path: Path) -> None:
    done = run(tmp_path, *SMALL, "data.pipeline=workers", faults=[(STEP, 7, kill_9_beside_workers)])
    assert done.end() == -9
    assert int((tmp_path / "workers").read_text()) >= 2
    wait_until(lambda: not any(_stands_in(p, tmp_path) for p in psutil.process_iter()), "a worker outlives its run")


@pytest.mark.slow
@pytest.mark.parametrize("model", choices_of("model"))
def test_every_model_is_resumed_exactly(model: str, tmp_path: Path) -> None:
    images = ["data=digits", f"data.root={tmp_path}", "data.num_train=76", "data.num_val=16", "data.num_test=16"]
    line = [*[o for o in SMALL if not o.startswith(("model", "data"))], *images, "data.batch_size=8", f"model={model}"]
    options = [EVERY_4, OUT, "+callbacks.throughput.flops_per_sample=null"]  # counting FLOPs must not draw a number
    whole, killed = (tmp_path / name for name in ("whole", "killed"))
    line = [o for o in line if "flops_per_sample" not in o]
    assert run(whole, *line, *options).end() == 0
    assert run(killed, *line, *options, faults=[(STEP, 16, kill_9)]).end() == -9
    assert run(killed, "resume=out", f"data.root={tmp_path}").end() == 0
    assert_alike(results(killed / "out"), results(whole / "out"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["trainer.val_check_interval=5"],
        ["+trainer.check_val_every_n_epoch=2"],
        ["trainer.accumulate_grad_batches=3"],
        ["trainer.limit_train_batches=7"],
        ["trainer.max_steps=7"],
        ["trainer.gradient_clip_val=0.1", "optimizer=sgd"],
        ["optimizer.schedule=constant", "trainer.limit_val_batches=0"],
        ["trainer.precision=bf16-mixed"],
    ],
    ids=lambda options: " ".join(options),
)
def test_every_kind_of_training_is_resumed_exactly(options: list[str], tmp_path: Path) -> None:
    whole, killed = (tmp_path / name for name in ("whole", "killed"))
    each = "callbacks.checkpoint.every_n_steps=1"
    assert run(whole, *SMALL, *options, each, OUT).end() == 0
    assert run(killed, *SMALL, *options, each, OUT, faults=[(STEP, 6, kill_9)]).end() == -9
    done = run(killed, "resume=out")
    assert done.end() == 0, done.complained
    ours, theirs = results(killed / "out"), results(whole / "out")
    assert_alike(ours, theirs)


def test_a_resume_that_dies_while_it_restores_loses_no_curves(killed: Path, unstopped: Path) -> None:
    before = {
        path: data
        for path, data in everything(killed / "out").items()
        if path.suffix == ".csv" or "events" in path.name
    }
    restore = "lightning.pytorch.trainer.connectors.checkpoint_connector._CheckpointConnector.restore_training_state"
    assert run(killed, "resume=out", faults=[(restore, 1, _end_badly)]).end() == 1
    assert before.items() <= everything(killed / "out").items()
    assert record(killed / "out")["status"] == "failed"
    assert run(killed, "resume=out").end() == 0
    assert_alike(results(killed / "out"), results(unstopped))


def _end_badly() -> None:
    raise RuntimeError("the device is gone")
