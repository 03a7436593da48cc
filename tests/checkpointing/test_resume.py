"""`resume=`: which run is resumed, which options may change, from which checkpoint; a refused resume changes nothing."""

import json
import shutil
import subprocess
from collections.abc import Callable
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import torch

from batchscope.checkpointing import resume
from batchscope.checkpointing.checkpoint_file import load_checkpoint
from batchscope.checkpointing.validate import check_resumable
from batchscope.training.build import build, build_optimizer
from batchscope.training.task import Task
from tests.checkpointing.support import OUT, STEP, TEST, change, of_another_model, other_data, terminate
from tests.support.command_lines import refusal
from tests.support.runs import EVERY_4, SMALL, curves, kill_9, record, run


def test_a_run_that_was_stopped_in_its_test_keeps_what_its_training_has_measured(tmp_path: Path) -> None:
    assert run(tmp_path, *SMALL, OUT, faults=[(TEST, 1, terminate)]).end() == 143
    before = record(tmp_path / "out")
    assert before["throughput"]["step_ms_median"] > 0
    with resume.lock_run_dir(tmp_path / "out"):
        done = run(tmp_path, "resume=out")
    assert done.end() == 1
    assert done.complained.splitlines() == ["error: resume: out is being trained right now"]
    assert run(tmp_path, "resume=out").end() == 0
    after = record(tmp_path / "out")
    assert "test/loss" in after["metrics"]
    assert all(after[key] == before[key] for key in ("throughput", "fit_seconds"))


def written(folder: Path, facts: dict[str, Any], **changed: Any) -> None:
    """Write a record with some facts changed."""
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({**facts, **changed}))


OVER = "there is nothing to resume"
RANK_1 = {"LOCAL_RANK": "1", "BATCHSCOPE_RUN_DIR": "outputs/runs/mine"}


def test_a_finished_run_says_so_and_last_is_the_newest_or_that_of_the_first_rank(unstopped, tmp_path) -> None:
    facts, runs = record(unstopped), tmp_path / "outputs" / "runs"
    for name, started in (("latest", "2026-01-02"), ("mine", "2026-01-01")):
        written(runs / name, facts, started=started)
    facts["config"]["trainer"]["max_time"] = {"hours": 1}
    written(tmp_path / "timed", facts)
    said = {
        "timed": f"timed has finished; {OVER}; a longer trainer.max_time, or trainer.max_time=null, may continue it\n",
        "last": f"outputs/runs/latest has finished; {OVER}\n",
    }
    for name, line in said.items():
        done = run(tmp_path, f"resume={name}")
        assert (done.end(), done.said) == (0, line), done.complained
    assert record(tmp_path / "timed") == facts
    assert run(tmp_path, "resume=last", environ=RANK_1).said == f"outputs/runs/mine has finished; {OVER}\n"


MAY_CHANGE = [
    *("trainer.accelerator=auto", "data.pipeline=device", "callbacks.curves.every_n_steps=2", "callbacks.device=null"),
    *("logger.csv=null", "test=false", "callbacks.checkpoint.every_minutes=1", "callbacks.nonfinite.action=skip"),
    *("+trainer.profiler=simple", "++trainer.max_time={hours:1}", "logger=null", "~callbacks.curves"),
]
MAY_NOT = {
    "model=lstm_cell": "resume: model.",
    "model.dropout=0.1": "resume: model.dropout is 0.5 in the run, and 0.1 would change the result",
    "data.num_train=80": "resume: data.num_train is 76 in the run, and 80 would change the result",
    "data.batch_size=16": "resume: data.batch_size is 8",
    "seed=1": "resume: seed is 0 in the run, and 1 would change the result",
    "optimizer.lr=1": "resume: optimizer.lr is 0.004",
    "trainer.precision=bf16-mixed": "resume: trainer.precision is 32-true",
    "trainer.devices=2": "resume: trainer.devices is 1",
    "callbacks.checkpoint.monitor=val/acc": "resume: callbacks.checkpoint.monitor is val/loss",
    "trainer.max_epochs=3": "resume: trainer.max_epochs is 2 in the run, and 3 would change the learning rate: optimizer.schedule=one_cycle ends",
    "modle=cnn": "modle: no such option. Did you mean 'model'?",
}


@pytest.mark.parametrize("option", [*MAY_CHANGE, *MAY_NOT])
def test_where_and_how_a_run_is_trained_and_watched_may_change_and_what_changes_the_result_may_not(option, interrupted):
    resumed = (record(interrupted / "out"), interrupted / "out", [option])
    if option in MAY_CHANGE:
        assert resume.configuration(*resumed)["resume"] == str(interrupted / "out")
    else:
        assert MAY_NOT[option] in refusal(resume.configuration, *resumed)


def test_a_lightning_module_whose_schedule_is_its_own_may_train_longer(interrupted: Path) -> None:
    facts = record(interrupted / "out")
    facts["model"]["lightning_module"] = True
    longer = resume.configuration(facts, interrupted / "out", ["trainer.max_epochs=3"])
    assert longer["trainer"]["max_epochs"] == 3


# --- the last valid checkpoint ---------------------------------------------------------------------------------------

CHECKPOINTS = Path("out", "checkpoints")
LAST, BEST = CHECKPOINTS / "last.ckpt", CHECKPOINTS / "best.ckpt"


def refuses(folder: Path, said: str, *options: str, faults: list | None = None) -> str:
    """Resuming `out` in the folder is refused in one line that begins so, and nothing is changed."""

    def everything() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in (folder / "out").rglob("*") if path.is_file()}

    before = everything()
    done = run(folder, "resume=out", *options, faults=faults or [])
    assert done.end() == 1, done.said
    (line,) = done.complained.splitlines()
    assert line.startswith(f"error: {said}"), line
    assert everything() == before
    return line


GONE = "resume: the run has written checkpoints/last.ckpt, and it is gone; put it back, or start another run"
INVALID = "resume: no checkpoint is valid, and nothing was changed: "
# What is done to the checkpoints, by a shell, and what is said.
REFUSALS = {
    ": > last.ckpt; : > best.ckpt": f"{INVALID}{LAST} is not a whole checkpoint (0 bytes)",
    ": > last.ckpt; ln -f last.ckpt best.ckpt": f"{INVALID}{LAST} is not a whole checkpoint (0 bytes)",  # read once
    "rm *": GONE,
    "mv $PWD ../unmounted": GONE,
    "rm -r $PWD; touch $PWD": f"resume: {CHECKPOINTS} cannot be read, and nothing was changed: Not a directory",
    ": other data": "resume: the data have changed: their fingerprint is 0123456789abcdef, and was ",
}


@pytest.mark.parametrize("how", REFUSALS)
def test_a_run_that_cannot_continue_is_one_line_and_nothing_is_trained_or_changed(how: str, killed: Path) -> None:
    subprocess.run(how, shell=True, cwd=killed / CHECKPOINTS, check=True)
    setup = "batchscope.data.datamodule.TensorDataModule.setup"
    line = refuses(killed, REFUSALS[how], faults=[(setup, 1, other_data)] if how == ": other data" else [])
    assert (str(BEST) in line) is (how.count(": >") == 2)


def test_a_finished_run_is_made_longer_not_shorter_and_its_best_checkpoint_stays_in_its_record(tmp_path: Path) -> None:
    done = run(tmp_path, *SMALL, EVERY_4, OUT, "optimizer.schedule=constant")
    assert done.end() == 0, done.complained
    for refused in ("trainer.max_epochs=1", "trainer.max_steps=15"):
        refuses(tmp_path, refused.replace("=", ": got "), refused)
    assert run(tmp_path, "resume=out", "trainer.max_epochs=3", faults=[(STEP, 6, kill_9)]).end() == -9
    kept = {kind: f"checkpoints/{kind}.ckpt" for kind in ("best", "last")}
    assert record(tmp_path / "out")["checkpoints"] == kept
    (tmp_path / BEST).unlink()  # the best of what follows is kept
    assert run(tmp_path, "resume=out", "trainer.max_epochs=3").end() == 0
    assert record(tmp_path / "out")["checkpoints"] == kept


@pytest.mark.slow
def test_checkpoints_may_lie_elsewhere_but_not_where_another_run_has_its_own(tmp_path: Path, unstopped: Path) -> None:
    elsewhere = f"callbacks.checkpoint.dirpath={tmp_path / 'scratch'}"
    assert run(tmp_path, *SMALL, EVERY_4, OUT, elsewhere, faults=[(STEP, 10, kill_9)]).end() == -9
    shutil.move(tmp_path / "out", tmp_path / "moved")
    done = run(tmp_path / "from", "resume=../moved", elsewhere)
    assert done.end() == 0, done.complained
    assert [entry["step"] for entry in record(tmp_path / "moved")["resumed"]] == [8]
    assert curves(tmp_path / "moved") == curves(unstopped)
    for folder in (OUT, "hydra.run.dir=theirs"):
        assert run(tmp_path, *SMALL, EVERY_4, folder, elsewhere, faults=[(STEP, 10, kill_9)]).end() == -9
    refuses(tmp_path, INVALID, elsewhere)


# --- a checkpoint whose bytes are intact ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fresh(interrupted: Path) -> Task:
    """The task of the run, not yet used."""
    config = record(interrupted / "out")["config"]
    data = build(config["data"], "data")
    return Task(build(config["model"], "model", spec=data.spec), data.spec, build_optimizer(config["optimizer"]))


def setting(value: object, *path: str | int) -> Callable[[dict], None]:
    """Change the value at a path."""
    return lambda checkpoint: reduce(getitem, path[:-1], checkpoint).__setitem__(path[-1], value)


def without(*path: str | int) -> Callable[[dict], None]:
    """Remove the entry at a path."""
    return lambda checkpoint: reduce(getitem, path[:-1], checkpoint).__delitem__(path[-1])


COMPLEX = setting(torch.zeros(9, dtype=torch.complex64), "state_dict", "model.head.bias")
BATCHES = ("loops", "fit_loop", "epoch_loop.batch_progress", "current", "ready")
MISFITS: list[tuple[Callable[[dict], None], str]] = [
    (of_another_model, "its weights are of another model: model.head.bias is (7,) there and (9,) here"),
    (COMPLEX, "its weights are of another model: model.head.bias is of torch.complex64"),
    (without("loop_state"), "KeyError: 'loop_state'"),
    (without("loop_state", "random"), "KeyError: 'random'"),
    (setting([], "loop_state"), "TypeError: "),
    (setting([], "loop_state", "random"), "loop_state.random and loop_state.gradients are not those of all"),
    (setting({"csv/metrics.csv": -3}, "loop_state", "log_positions"), "its counters hold -3, which is no count"),
    (setting("7", "epoch"), "its counters hold 7, which is no count"),
    (setting(-5, *BATCHES), "its counters hold -5, which is no count"),
    (setting(True, "global_step"), "its counters hold True, which is no count"),
]


@pytest.mark.parametrize(("how", "said"), MISFITS, ids=[said[:60] for _, said in MISFITS])
def test_what_does_not_fit_the_run_is_found_before_anything_is_restored(how, said, interrupted, fresh):
    path = interrupted / LAST
    checkpoint = load_checkpoint(path)
    check_resumable(checkpoint, path, fresh)
    how(checkpoint)
    assert f"{path} cannot be resumed from: {said}" in refusal(check_resumable, checkpoint, path, fresh)


@pytest.mark.parametrize(
    "how",
    [
        setting([], "callbacks", "Checkpoints", "best"),
        pytest.param(without("optimizer_states"), marks=pytest.mark.slow),
        pytest.param(setting([{"torch": torch.zeros(3)}], "loop_state", "random"), marks=pytest.mark.slow),
    ],
    ids=["a callback's state", "no state of the optimizer", "a random state"],
)
def test_what_cannot_be_restored_is_one_line(how: Callable[[dict], None], killed: Path) -> None:
    change(killed / LAST, how)
    done = run(killed, "resume=out")
    assert done.end() == 1
    (line,) = done.complained.splitlines()
    assert line.startswith(f"error: resume: {LAST} cannot be resumed from: ")
    assert record(killed / "out")["status"] == "failed"


def test_a_metric_that_would_command_the_terminal_is_not_restored(killed: Path) -> None:
    change(killed / LAST, setting(1.0, "callbacks", "Checkpoints", "metrics", "test/\x1b]0;x"))
    done = run(killed, "resume=out", "test=false")
    assert (done.end(), done.complained) == (0, "")
    assert not any("\x1b" in key for key in record(killed / "out")["metrics"])
