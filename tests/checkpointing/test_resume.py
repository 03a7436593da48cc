"""A run that is killed at any moment and resumed ends as one that never stopped: the same in every bit."""

import contextlib
import errno
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import lightning
import psutil
import pytest
import torch

from batchscope.checkpointing import resume
from batchscope.checkpointing.checkpoint_file import load_checkpoint, write_checkpoint
from batchscope.checkpointing.random_state import random_state, restore_random_state
from batchscope.checkpointing.validate import check_resumable
from batchscope.errors import UserError
from batchscope.options.config import check_command_line, options_of
from batchscope.options.tree import flatten
from batchscope.training.build import build, build_callbacks
from batchscope.training.task import Task
from tests.support.runs import EVERY_4, SMALL, Run, assert_alike, curves, kill_9, last, record, results, run, table

OUT = "hydra.run.dir=out"
STEP, VALIDATION, TEST = (f"batchscope.training.task.Task.{kind}_step" for kind in ("training", "validation", "test"))
# The record is written twice before the first step, and every file that is written flushes itself and its folder.
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
QUICK = ("while a checkpoint is written", "on an epoch's last batch", "between an epoch's end and its validation")


@pytest.fixture(scope="module")
def unstopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("unstopped")
    done = run(folder, *SMALL, EVERY_4, OUT)
    assert done.end() == 0, done.complained
    return folder / "out"


def killed_and_resumed(folder: Path, *overrides: str, faults: list) -> Path:
    """The run's folder, after it was killed by the first fault, resumed, killed by the next one, …, and finished."""
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
    deadline = time.monotonic() + 30
    while left := [p for p in psutil.process_iter() if _stands_in(p, tmp_path)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("model", options_of("model"))
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


def test_random_states_are_put_back_as_they_were() -> None:
    import random

    import numpy

    saved = random_state()
    drawn = (torch.rand(3).tolist(), random.random(), numpy.random.random())
    restore_random_state(saved)
    assert (torch.rand(3).tolist(), random.random(), numpy.random.random()) == drawn


# --- what a run is resumed from --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run was killed in its second epoch, so that it has a last and a best checkpoint."""
    folder = tmp_path_factory.mktemp("interrupted")
    assert run(folder, *SMALL, EVERY_4, OUT, faults=[(STEP, 18, kill_9)]).end() == -9
    return folder


@pytest.fixture
def killed(interrupted: Path, tmp_path: Path) -> Path:
    """A copy of it to break."""
    return Path(shutil.copytree(interrupted, tmp_path / "killed"))


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def test_a_run_whose_checkpoints_lie_elsewhere_goes_on_from_them(tmp_path: Path, unstopped: Path) -> None:
    elsewhere = f"callbacks.checkpoint.dirpath={tmp_path / 'scratch'}"
    assert run(tmp_path, *SMALL, EVERY_4, OUT, elsewhere, faults=[(STEP, 10, kill_9)]).end() == -9
    shutil.move(tmp_path / "out", tmp_path / "moved")
    done = run(tmp_path / "from", "resume=../moved", elsewhere)
    assert done.end() == 0, done.complained
    shutil.move(tmp_path / "moved", tmp_path / "out")
    assert [entry["step"] for entry in record(tmp_path / "out")["resumed"]] == [8]
    assert curves(tmp_path / "out") == curves(unstopped)


@pytest.mark.parametrize("name", ["cpu", "csv", "data", "min"])
def test_a_run_whose_folder_is_called_as_a_value_is_found_from_elsewhere(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (config,) = check_command_line([*SMALL, "trainer.accelerator=cpu"], multirun=False, run_dir=name)
    Path(name).mkdir()
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    found = resume.configuration({"config": config}, Path("..", name), [])
    changed = {key for key, value in flatten(found) if value != dict(flatten(config)).get(key)}
    assert changed == {"run_dir", "resume", "callbacks.checkpoint.dirpath", "logger.csv.save_dir"} | {
        "logger.tensorboard.save_dir"
    }


def test_a_checkpoint_of_another_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    elsewhere = f"callbacks.checkpoint.dirpath={tmp_path / 'scratch'}"
    for run_dir in ("mine", "theirs"):
        assert (
            run(tmp_path, *SMALL, EVERY_4, elsewhere, f"hydra.run.dir={run_dir}", faults=[(STEP, 10, kill_9)]).end()
            == -9
        )
    done = run(tmp_path, "resume=mine", elsewhere)
    assert done.end() == 1
    (line,) = done.complained.splitlines()
    assert line.endswith("/scratch/last.ckpt is of another run, which began in theirs")


def test_a_damaged_last_checkpoint_is_named_and_the_best_one_used(killed: Path, unstopped: Path) -> None:
    flip_a_bit(killed / "out" / "checkpoints" / "last.ckpt")
    done = run(killed, "resume=out")
    assert done.end() == 0
    (line,) = done.complained.splitlines()
    assert line.startswith("warning: out/checkpoints/last.ckpt is damaged")
    assert line.endswith("resuming from best.ckpt instead")
    assert_alike(results(killed / "out"), results(unstopped))


def test_without_a_good_checkpoint_nothing_is_trained_or_changed(killed: Path) -> None:
    checkpoints = killed / "out" / "checkpoints"
    flip_a_bit(checkpoints / "last.ckpt")
    (checkpoints / "best.ckpt").unlink()
    (checkpoints / "best.ckpt").write_bytes(b"")
    before = {path: path.read_bytes() for path in (killed / "out").rglob("*") if path.is_file()}
    done = run(killed, "resume=out")
    assert done.end() == 1
    (line,) = done.complained.splitlines()
    assert line.startswith("error: resume: no checkpoint is valid, and nothing was changed: out/checkpoints/")
    assert "last.ckpt is damaged" in line and "best.ckpt is not a whole checkpoint (0 bytes)" in line
    assert {path: path.read_bytes() for path in (killed / "out").rglob("*") if path.is_file()} == before


def test_what_a_killed_run_left_half_written_is_removed(killed: Path) -> None:
    half = killed / "out" / "checkpoints" / ".last.ckpt.123.tmp"
    half.write_bytes(b"half")
    run(killed, "resume=out")
    assert sorted(p.name for p in half.parent.iterdir()) == ["best.ckpt", "last.ckpt"]


def test_other_data_are_refused(killed: Path) -> None:
    # The same options, and a dataset that has become another one meanwhile.
    other = ("batchscope.data.datamodule.hashlib.blake2b", 1, _other_seed)
    done = run(killed, "resume=out", faults=[other])
    assert done.end() == 1
    (line,) = done.complained.splitlines()
    assert line.startswith("error: resume: the data have changed: their fingerprint is ")


def _other_seed() -> None:
    from batchscope.data.copy_memory import CopyMemory

    CopyMemory.fingerprint = "0123456789abcdef"


def everything(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "refused",
    [
        "another model",
        *(
            pytest.param(r, marks=pytest.mark.slow)
            for r in ("trainer.max_epochs=1", "trainer.max_steps=15", "other data")
        ),
    ],
)
def test_a_refused_resume_changes_nothing_of_a_finished_run(refused: str, tmp_path: Path) -> None:
    done = run(tmp_path, *SMALL, EVERY_4, OUT, "optimizer.schedule=constant")
    assert done.end() == 0, done.complained
    longer, faults = [refused] if refused.startswith("trainer") else ["trainer.max_epochs=3"], []
    if refused == "other data":
        faults = [("batchscope.data.datamodule.hashlib.blake2b", 1, _other_seed)]
    if refused == "another model":
        for name in ("best", "last"):
            change(tmp_path / "out" / "checkpoints" / f"{name}.ckpt", _of_another_model)
    before = everything(tmp_path / "out")
    done = run(tmp_path, "resume=out", *longer, faults=faults)
    assert done.end() == 1
    (line,) = done.complained.splitlines()
    assert line.startswith("error: ")
    assert everything(tmp_path / "out") == before


def change(path: Path, how: Callable[[dict], None]) -> None:
    checkpoint = load_checkpoint(path)
    how(checkpoint)
    write_checkpoint(checkpoint, path)


def _of_another_model(checkpoint: dict) -> None:
    checkpoint["state_dict"]["model.head.bias"] = torch.zeros(7)


def _without_a_parameters_state(checkpoint: dict) -> None:
    checkpoint["optimizer_states"][0]["param_groups"][0]["params"].pop()


def _with_a_state_of_another_shape(checkpoint: dict) -> None:
    checkpoint["optimizer_states"][0]["state"][0]["exp_avg"] = torch.zeros(3)


def _without_a_schedule(checkpoint: dict) -> None:
    checkpoint["lr_schedulers"] = []


def _with_a_strange_schedule(checkpoint: dict) -> None:
    checkpoint["lr_schedulers"][0]["last_epoch"] = "soon"


def _with_a_negative_counter(checkpoint: dict) -> None:
    checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["ready"] = -5


def _with_other_batches(checkpoint: dict) -> None:
    checkpoint["loop_state"]["batches"] += 1


def _with_a_strange_callback(checkpoint: dict) -> None:
    checkpoint["callbacks"]["Checkpoints"] = {"best": [], "metrics": {}}


def _with_a_strange_gradient(checkpoint: dict) -> None:
    checkpoint["loop_state"]["gradients"] = {"model.head.bias": torch.zeros(7)}


def test_a_checkpoint_of_another_model_is_named_and_the_best_one_used(killed: Path, unstopped: Path) -> None:
    change(killed / "out" / "checkpoints" / "last.ckpt", _of_another_model)
    done = run(killed, "resume=out")
    assert done.end() == 0, done.complained
    (line,) = done.complained.splitlines()
    assert line.startswith(
        "warning: out/checkpoints/last.ckpt cannot be resumed from: its weights are of another model: model.head.bias is "
        "(7,) there and (9,) here; resuming from best.ckpt instead"
    )
    assert_alike(results(killed / "out"), results(unstopped))


def _with_a_huge_count(checkpoint: dict) -> None:
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.automatic_optimization.optim_progress"]
    progress["optimizer"]["step"]["total"]["completed"] = 2**63


def _with_another_epoch(checkpoint: dict) -> None:
    checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["completed"] = 5


def _with_a_metric_that_commands_the_terminal(checkpoint: dict) -> None:
    checkpoint["callbacks"]["Checkpoints"]["metrics"]["test/\x1b]0;x"] = 1.0


def _with_a_metric_that_no_float_holds(checkpoint: dict) -> None:
    checkpoint["callbacks"]["Checkpoints"]["metrics"]["val/loss"] = 10**400


def _with_complex_weights(checkpoint: dict) -> None:
    checkpoint["state_dict"]["model.head.bias"] = checkpoint["state_dict"]["model.head.bias"].to(torch.complex64)


def _with_a_sparse_gradient(checkpoint: dict) -> None:
    sparse = checkpoint["state_dict"]["model.head.bias"].to_sparse()
    checkpoint["loop_state"]["gradients"] = {"model.head.bias": sparse}


def _with_a_sparse_state(checkpoint: dict) -> None:
    state = checkpoint["optimizer_states"][0]["state"][0]
    state["exp_avg"] = state["exp_avg"].to_sparse()


@pytest.fixture(scope="module")
def fresh(interrupted: Path) -> tuple[lightning.Trainer, Task]:
    """The trainer and the task of the run, not yet used."""
    config = record(interrupted / "out")["config"]
    data = build(config["data"], "data")
    task = Task(build(config["model"], "model", spec=data.spec), data.spec, build(config["optimizer"], "optimizer"))
    callbacks, flags = build_callbacks(config)
    return build(config["trainer"], "trainer", callbacks=callbacks, logger=False, **flags), task


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (_of_another_model, "its weights are of another model: model.head.bias is (7,) there and (9,) here"),
        (_without_a_parameters_state, "optimizer_states are of another optimizer: "),
        (_with_a_state_of_another_shape, "optimizer_states are of another model"),
        (_without_a_schedule, "optimizer_states has 1 entries, and lr_schedulers 0"),
        (_with_a_strange_schedule, "lr_schedulers.0.last_epoch is 'soon', not a count"),
        (_with_a_negative_counter, "loops.fit_loop.epoch_loop.batch_progress.total.ready is -5, not a count"),
        (_with_other_batches, "loops.fit_loop and loop_state do not agree on the batches of the epoch"),
        (_with_a_strange_callback, "callbacks.Checkpoints.best is [], not a number"),
        (_with_a_strange_gradient, "loop_state.gradients.model.head.bias is no gradient of the model's"),
        (_with_a_huge_count, "loops.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total."),
        (_with_another_epoch, "loops.fit_loop and loop_state do not agree on the epoch"),
        (_with_a_metric_that_commands_the_terminal, "callbacks.Checkpoints.metrics has 'test/\\x1b]0;x'"),
        (_with_a_metric_that_no_float_holds, "callbacks.Checkpoints.metrics.val/loss is 1000"),
        (_with_complex_weights, "its weights are of another model: model.head.bias is of torch.complex64"),
        (_with_a_sparse_gradient, "loop_state.gradients.model.head.bias is no gradient of the model's"),
        (_with_a_sparse_state, "optimizer_states are of another model"),
    ],
)
def test_what_does_not_fit_the_run_is_found_before_anything_is_restored(
    how: Callable[[dict], None], said: str, killed: Path, fresh: tuple[lightning.Trainer, Task]
) -> None:
    path = killed / "out" / "checkpoints" / "last.ckpt"
    check_resumable(load_checkpoint(path), path, *fresh)
    change(path, how)
    with pytest.raises(UserError) as caught:
        check_resumable(load_checkpoint(path), path, *fresh)
    assert f"{path} cannot be resumed from: {said}" in str(caught.value)


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


def test_a_run_whose_record_is_torn_is_resumed_as_its_checkpoint_says(killed: Path, unstopped: Path) -> None:
    content = '{"schema": 1, "sta'
    (killed / "out" / "run.json").write_text(content)
    done = run(killed, "resume=out")
    assert done.end() == 0, done.complained
    assert (killed / "out" / "run.json.aside").read_text() == content
    assert_alike(results(killed / "out"), results(unstopped))


@pytest.mark.slow
def test_without_its_best_checkpoint_a_run_keeps_the_best_of_what_follows(killed: Path) -> None:
    (killed / "out" / "checkpoints" / "best.ckpt").unlink()
    done = run(killed, "resume=out")
    assert done.end() == 0, done.complained
    assert record(killed / "out")["checkpoints"]["best"] == "checkpoints/best.ckpt"


def test_a_moved_run_is_resumed_where_it_is_now(killed: Path, unstopped: Path) -> None:
    (killed / "out").rename(killed / "elsewhere")
    done = run(killed, "resume=elsewhere")
    assert done.end() == 0, done.complained
    assert not (killed / "out").exists()
    assert_alike(results(killed / "elsewhere"), results(unstopped))


def test_a_run_that_is_still_going_on_is_not_resumed_by_another_process(killed: Path) -> None:
    with resume.lock_run_dir(killed / "out"):
        done = run(killed, "resume=out")
    assert done.end() == 1
    assert done.complained.splitlines() == ["error: resume: out is being trained right now"]


def test_a_finished_run_says_so(unstopped: Path) -> None:
    before = (unstopped / "run.json").read_text()
    done = run(unstopped.parent, "resume=out")
    assert done.end() == 0
    assert done.said == "out has finished; there is nothing to resume\n"
    assert (unstopped / "run.json").read_text() == before


# --- the curves, and a folder that is not as the run left it ---------------------------------------------------------


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_curves_are_kept_while_their_logger_is_off(unstopped: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(tmp_path, *SMALL, OUT, faults=[(STEP, 7, terminate)]).end() == 143
    assert run(tmp_path, "resume=out", "logger=null", faults=[(STEP, 6, terminate)]).end() == 143
    done = run(tmp_path, "resume=out", "logger=default")
    assert (done.end(), done.complained) == (0, "")
    logged = [*range(1, 8), *range(14, 21)]
    assert [step for step, _ in curves(out)["train/loss"]] == logged
    assert curves(out)["train/loss"] == [point for point in curves(unstopped)["train/loss"] if point[0] in logged]
    assert [int(row["step"]) for row in table(out) if row["train/loss"]] == logged
    assert not list(out.rglob("*.aside*"))


def test_curves_that_no_checkpoint_knows_are_set_aside(unstopped: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(tmp_path, *SMALL, EVERY_4, OUT, faults=[(STEP, 3, kill_9)]).end() == -9
    (before,) = out.glob("*/events.*")
    (out / "csv").mkdir(exist_ok=True)
    (out / "csv" / "metrics.csv").write_text("step,train/loss\n1,0.5\n")
    content = before.read_bytes()
    done = run(tmp_path, "resume=out")
    assert done.end() == 0
    (aside,) = out.glob("*/events.*.aside")
    assert aside.read_bytes() == content
    assert (out / "csv" / "metrics.csv.aside").read_text() == "step,train/loss\n1,0.5\n"
    assert sorted(line.partition("; it is now ")[2] for line in done.complained.splitlines()) == [
        "out/csv/metrics.csv.aside",
        str(aside.relative_to(tmp_path)),
    ]
    assert_alike(results(out), results(unstopped))


def refuses(folder: Path, said: str, *options: str, faults: list | None = None) -> None:
    """One line, and nothing is changed."""
    before = everything(folder / "out")
    done = run(folder, "resume=out", *options, faults=faults or [])
    assert done.end() == 1
    (line,) = done.complained.splitlines()
    assert line.startswith(f"error: resume: {said}")
    assert everything(folder / "out") == before


def test_a_run_whose_checkpoints_are_gone_is_not_begun_anew(killed: Path) -> None:
    facts = record(killed / "out")
    (killed / "out" / "run.json").write_text(json.dumps({**facts, "resumed": [{"step": 8}]}))
    (killed / "out" / "checkpoints").rename(killed / "unmounted")
    refuses(killed, "out/checkpoints holds no checkpoint, and the run has trained 8 steps; put its checkpoints back")


def test_a_checkpoint_folder_that_is_a_file_is_refused(killed: Path) -> None:
    shutil.rmtree(killed / "out" / "checkpoints")
    (killed / "out" / "checkpoints").write_text("")
    refuses(killed, "out/checkpoints cannot be read, and nothing was changed: Not a directory")


def _read_only() -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_a_checkpoint_folder_that_cannot_be_written_is_refused_before_the_curves_are_cut(killed: Path) -> None:
    fault = ("pathlib.Path.touch", 1, _read_only)
    refuses(killed, "out/checkpoints cannot be written, and nothing was changed: Read-only", faults=[fault])


@pytest.mark.parametrize("damaged", ["csv", "csv/metrics.csv", "*", pytest.param("*/events.*", marks=pytest.mark.slow)])
def test_a_damaged_place_of_the_curves_is_refused_before_the_record_says_so(damaged: str, killed: Path) -> None:
    place = next(path for path in (killed / "out").glob(damaged) if damaged != "*" or list(path.glob("events.*")))
    was_folder = place.is_dir()
    place.rename(killed / "before")
    if was_folder:
        place.write_text("")
    else:
        place.mkdir()
    refuses(killed, f"{place.relative_to(killed)} is not a {'folder' if was_folder else 'file'}, and logs are written")


# --- which run, and which options may change -------------------------------------------------------------------------


def configuration(run_dir: Path, *overrides: str) -> dict:
    return resume.configuration(record(run_dir), run_dir, list(overrides))


def refusal(run_dir: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        configuration(run_dir, *overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("model=lstm_cell", "resume: model."),
        ("model.dropout=0.1", "resume: model.dropout is 0.5 in the run, and 0.1 would change the result"),
        ("data.num_train=80", "resume: data.num_train is 76 in the run, and 80 would change the result"),
        ("data.batch_size=16", "resume: data.batch_size is 8"),
        ("seed=1", "resume: seed is 0 in the run, and 1 would change the result"),
        ("optimizer.lr=1", "resume: optimizer.lr is 0.004"),
        ("trainer.precision=bf16-mixed", "resume: trainer.precision is 32-true"),
        ("trainer.devices=2", "resume: trainer.devices is 1"),
        ("callbacks.checkpoint.monitor=val/acc", "resume: callbacks.checkpoint.monitor is val/loss"),
        ("trainer.max_epochs=3", "optimizer.schedule=one_cycle ends with the run"),
        ("modle=cnn", "modle: no such option. Did you mean 'model'?"),
    ],
)
def test_a_changed_option_that_would_change_the_result_is_refused_by_name(
    option: str, said: str, interrupted: Path
) -> None:
    assert said in refusal(interrupted / "out", option)


@pytest.mark.parametrize(
    "option",
    ["trainer.accelerator=auto", "data.pipeline=device", "callbacks.curves.every_n_steps=2", "callbacks.device=null"]
    + ["logger.csv=null", "test=false", "callbacks.checkpoint.every_minutes=1", "callbacks.nonfinite.action=skip"]
    + ["+trainer.profiler=simple", "++trainer.max_time={hours:1}", "logger=null", "~callbacks.curves"],
)
def test_where_and_how_a_run_is_trained_and_watched_may_change(option: str, interrupted: Path) -> None:
    assert configuration(interrupted / "out", option)["resume"] == str(interrupted / "out")


def test_a_run_at_a_constant_rate_can_be_made_longer(tmp_path: Path) -> None:
    constant = ["optimizer.schedule=constant", *SMALL, OUT]
    assert run(tmp_path / "long", *constant, "trainer.max_epochs=3").end() == 0
    assert run(tmp_path / "short", *constant).end() == 0
    done = run(tmp_path / "short", "resume=out", "trainer.max_epochs=3")
    assert done.end() == 0, done.complained
    assert_alike(results(tmp_path / "short" / "out"), results(tmp_path / "long" / "out"))
    assert "3 epochs, 30 steps, the last 10 of them in " in done.said


def test_last_is_the_run_that_was_started_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, started in (("b", "2026-01-02"), ("c", "2026-01-03"), ("a", "2026-01-01")):
        folder = tmp_path / "outputs" / "runs" / name
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps({"started": started}))
    assert resume.find(["resume=last", "test=false"]) == (Path("outputs/runs/c"), ["test=false"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["resume=nowhere"], "resume: got 'nowhere', which holds no run"),
        (["resume=last"], "resume: got 'last', and there is no run in outputs/runs"),
        (["resume="], "resume: takes the folder of one run, or 'last'"),
    ],
)
def test_a_run_that_is_not_there_is_refused(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=said.replace(".", r"\.")):
        resume.find(words)


def test_a_checkpoint_or_a_sweep_in_place_of_a_run_is_answered_with_what_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint = Path("sweep/0/checkpoints/last.ckpt")
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    Path("sweep/0/run.json").write_text("{}")
    with pytest.raises(UserError, match=r"takes the folder of a run, not a file in it; write resume=sweep/0$"):
        resume.find([f"resume={checkpoint}"])
    with pytest.raises(UserError, match=r"hydra\.sweep\.dir=sweep, and one run of it with resume=sweep/0$"):
        resume.find(["resume=sweep"])


def test_a_sweep_is_not_resumed_by_this(interrupted: Path) -> None:
    done = Run(interrupted, "-m", "resume=out")
    assert done.end() == 1
    assert done.complained.startswith("error: resume: takes a single run")


def test_what_is_saved_is_tensors_and_plain_values(interrupted: Path) -> None:
    def check(node: object, where: str) -> None:
        assert type(node) in (dict, list, tuple, int, float, str, bool, type(None), torch.Tensor) or hasattr(
            node, "move_to_end"
        ), f"{where} is a {type(node)}"
        children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list | tuple) else ()
        for key, child in children:
            check(child, f"{where}.{key}")

    check(last(interrupted / "out"), "checkpoint")
