"""`logger=`: what each choice writes, and the interval at which the curves are written."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.utilities import _scan_checkpoints

from batchscope.checkpointing.callback import Checkpoints
from batchscope.options import check
from batchscope.options.signatures import is_installed
from batchscope.training.build import NoLogger, build_callbacks, build_loggers
from tests.checkpointing.support import OUT, STEP, terminate
from tests.support.command_lines import composed, refusal
from tests.support.runs import EVERY_4, SMALL, record, run, table
from tests.support.third_party_modules import Memory, Stranger, loader, train
from tests.training.support import completed

needs_wandb = pytest.mark.skipif(not is_installed("wandb"), reason="needs wandb: pip install 'batchscope[wandb]'")


def test_a_timed_run_takes_the_words_of_a_training_and_keeps_no_checkpoint() -> None:
    words = ["callbacks.checkpoint.monitor=val/acc", "callbacks.checkpoint.every_n_steps=5", "optimizer.warmup=0.1"]
    for experiment in ("throughput", "diagnose", "find_batch_size"):
        callbacks, switches = build_callbacks(composed(f"experiment={experiment}", *words))
        assert not switches["enable_checkpointing"]
        assert not any(isinstance(callback, Checkpoints) for callback in callbacks)


def test_each_logger_may_stand_alone_and_has_the_steps_that_are_asked_for(tmp_path: Path) -> None:
    """TensorBoard's steps are in test_run.py."""
    for name, kind in {"tensorboard": "TensorBoard", "csv": "StepFile"}.items():
        (logger,) = build_loggers(composed(f"logger=[none,{name}]"), tmp_path, "cnn", "1")
        assert type(logger).__name__.startswith(kind)
    completed(tmp_path, *SMALL, "logger=[none,csv]", "trainer.log_every_n_steps=5", OUT)
    assert [int(row["step"]) for row in table(tmp_path / "out") if row["train/loss"]] == [5, 10, 15, 20]
    assert not list((tmp_path / "out").glob("*/events.*"))


def test_a_run_without_loggers_and_callbacks_is_tested(tmp_path: Path) -> None:
    words = [word for word in SMALL if "callbacks" not in word]
    completed(tmp_path, *words, "logger=none", "callbacks=none", OUT)
    assert "test/loss" in record(tmp_path / "out")["metrics"]
    assert {path.name for path in (tmp_path / "out").iterdir()} <= {"run.json", ".lock"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], [1, 1]),
        (["trainer.log_every_n_steps=0"], [0, 0]),
        (["trainer.log_every_n_steps=10", "callbacks.curves.every_n_steps=3"], [3, 10]),
    ],
)
def test_curves_have_the_trainers_interval_unless_they_have_their_own(words: list[str], expected: list[int]) -> None:
    callbacks = {type(callback).__name__: callback for callback in build_callbacks(composed(*words))[0]}
    assert [callbacks[name].every_n_steps for name in ("TrainCurves", "ThroughputMonitor")] == expected


def test_where_nothing_is_logged_a_logger_has_the_folders_of_lightnings_own() -> None:
    logger = NoLogger("here")
    assert (logger.save_dir, logger.root_dir, logger.log_dir) == ("here", "here", "here")


def test_two_callbacks_for_checkpoints_are_refused() -> None:
    config = composed()
    config["callbacks"]["second"] = {**config["callbacks"]["checkpoint"], "monitor": "val/acc"}
    message = "callbacks: got 2 Checkpoints, takes one: both would write last.ckpt"
    assert refusal(build_callbacks, config) == message


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "is_installed", lambda package: False)
    message = "logger.wandb: wandb is not installed; pip install 'batchscope[wandb]'"
    assert refusal(composed, "logger=wandb") == message


def test_a_logger_that_has_to_be_given_a_folder_gets_that_of_the_run(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    kind = "_target_: lightning.pytorch.loggers.CSVLogger"
    words = ["logger=none", f"+logger.mine={{{kind}}}", f"+logger.theirs={{{kind}, save_dir: there}}"]
    loggers = build_loggers(composed(*words), tmp_path / "out", "cnn", "1")
    assert [Path(logger.save_dir) for logger in loggers] == [Path("out"), Path("there")]


class Open(TensorBoardLogger):
    """Passes its arguments on."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)


class Closed(CSVLogger):
    """Has a folder of its own."""

    def __init__(self) -> None:
        super().__init__("mine")


def test_a_logger_of_ones_own_gets_the_runs_folder_where_it_takes_one(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = [f"+logger.{name.lower()}={{_target_: {__name__}.{name}}}" for name in ("Open", "Closed")]
    loggers = build_loggers(composed("logger=none", *words), Path("~/out"), "cnn", "1")
    assert [Path(logger.save_dir) for logger in loggers] == [Path("~/out"), Path("mine")]
    assert Path(loggers[0].log_dir).resolve().is_relative_to(tmp_path)


def test_a_logger_that_is_added_is_the_one_that_a_module_asks_for(tmp_path: Path) -> None:
    config = composed(f"+logger.mine={{_target_: {Memory.__module__}.Memory}}")
    assert isinstance(build_loggers(config, tmp_path, "cnn", "1")[0], Memory)


class Uploads(Memory):
    """Keeps the checkpoint callback, as W&B's logger with `log_model=true` does to upload at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.scores: list[float | None] = []  # of `last.ckpt`, each time

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        assert checkpoint_callback.save_top_k != -1  # with -1, W&B's logger uploads every checkpoint at once
        self.scores.append(checkpoint_callback.current_score)
        self.callback = checkpoint_callback


def test_loggers_hear_of_the_last_and_the_best_checkpoint(tmp_path: Path) -> None:
    train(
        Stranger(),
        Checkpoints(),
        data=(loader(), loader()),
        logger=(logger := Uploads()),
        enable_checkpointing=True,
        default_root_dir=tmp_path,
    )
    scores = {Path(path).name: score for _, path, score, _ in _scan_checkpoints(logger.callback, {})}
    assert scores == {"last.ckpt": logger.callback.metrics["val/loss"], "best.ckpt": logger.callback.best_model_score}
    assert logger.scores[::2] == [None, None]  # a checkpoint that was just saved has no validation yet


@needs_wandb
def test_a_resumed_run_continues_the_same_run_at_wandb(tmp_path: Path) -> None:
    wandb = ["logger=wandb", "logger.wandb.offline=true"]
    assert run(tmp_path, *SMALL, EVERY_4, *wandb, OUT, faults=[(STEP, 15, terminate)]).end() == 143
    typed = ["logger.wandb._target_=lightning.pytorch.loggers.WandbLogger", "logger.wandb.offline=true"]
    completed(tmp_path, "resume=out", *typed)
    folders = {path.name.rpartition("-")[2] for path in (tmp_path / "out" / "wandb").glob("offline-run-*")}
    assert folders == {record(tmp_path / "out")["id"]}
    assert not list(tmp_path.glob("wandb"))
