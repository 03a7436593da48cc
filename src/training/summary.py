"""What a run says of itself in words: its name, its first and last lines in the terminal, its row in HPARAMS."""

import logging
import os
import re
import shlex
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.loggers import TensorBoardLogger

from .. import ranks
from ..callbacks.learning_rate import LearningRateWatch
from ..callbacks.nonfinite import StopOnNonFinite
from ..callbacks.throughput import ThroughputMonitor
from ..options.command_lines import evaluate_command
from ..options.purpose import PLACES, purpose_of
from ..options.tree import flatten
from ..options.types import Purpose

# What Lightning says to everybody and these runs answer already, or need not know.
_NOISE = (
    ".*does not have many workers.*",
    ".*is smaller than the logging interval.*",
    ".*Checkpoint directory .* exists and is not empty.*",
    ".*`isinstance\\(treespec, LeafSpec\\)` is deprecated.*",
    ".*Experiment logs directory .* exists and is not empty.*",
    ".*callbacks used to create the checkpoint need to be provided.*",
)

# Options that choose nothing would fill the HPARAMS tab.
_NOT_CHOICES = (*PLACES, Purpose.OBSERVATION)


# The parts of Lightning that say only what a user has asked for: a profile, a learning rate found, a verbose callback.
_ASKED_FOR = ("profilers", "tuner", "callbacks")


def quiet_libraries() -> None:
    """Leave Lightning's warnings and, in the first process, what was asked for; but not its greetings."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.WARNING)
    if ranks.current().rank == 0:
        for part in _ASKED_FOR:
            logging.getLogger(f"lightning.pytorch.{part}").setLevel(logging.INFO)
        shared = logging.getLogger("lightning.pytorch.utilities.rank_zero")  # most parts speak through this one
        shared.addFilter(_was_asked_for)
        shared.setLevel(logging.INFO)
    for handler in logging.getLogger("lightning").handlers:  # beside another handler it would say everything twice
        handler.setLevel(logging.WARNING)
    for pattern in _NOISE:
        warnings.filterwarnings("ignore", pattern)


def _was_asked_for(message: logging.LogRecord) -> bool:
    """Whether a message of Lightning's shared logger is of such a part; that `trainer.max_time` is over is not news."""
    file = Path(message.pathname)
    return message.levelno >= logging.WARNING or (file.parent.name in _ASKED_FOR and file.stem != "timer")


def run_name(config: dict[str, Any], choices: Mapping[str, str], dataset: str, batch_size: int | None = None) -> str:
    """A name to read in TensorBoard: `cnn-mnist-bs512`, with the data that the run really trains on.

    Args:
        config: of the run.
        choices: its config groups.
        dataset: its name.
        batch_size: where a batch holds another number of samples than the configuration asks for.
    """
    model = str(choices.get("model", "model"))
    if model == "torchvision":
        model = config["model"]["name"]
    name = f"{model}-{dataset}-bs{batch_size or config['data']['batch_size']}".replace("_", "-")
    return re.sub(r"[^\w.+-]+|\.\.+", "-", name)[:100]  # it is a folder's name, too: nothing in it leads elsewhere


def named_loggers(loggers: dict[str, Any] | None, name: str) -> dict[str, Any]:
    """The logger nodes, those that keep a folder by name given the run's."""
    nodes = {key: dict(node) for key, node in (loggers or {}).items() if node}
    for node in nodes.values():
        if node["_target_"].endswith("TensorBoardLogger"):
            node.setdefault("name", name)
    return nodes


def hold_batch(data: Any, train_samples: int, processes: int, first: bool) -> dict[str, int]:
    """Lower a batch size that the training set cannot fill to what a batch will hold, and say so.

    The batches stay the same; the learning rate's scaling and every label then go by what they hold.

    Args:
        data: a datamodule with a `batch_size`, of one process.
        train_samples: of the whole training set.
        processes: that share it.
        first: whether this process speaks for all.

    Returns:
        What the record says of it; nothing where the set is large enough.
    """
    asked, most = data.batch_size, -(-train_samples // processes)
    if asked <= most:
        return {}
    data.batch_size = most
    each = f" for each of {processes} processes" if processes > 1 else ""
    if first:
        print(
            f"warning: data.batch_size: got {asked:,}{each}, and {data.name} has {train_samples:,} training samples: "
            "every step takes all of them",
            file=sys.stderr,
            flush=True,
        )
    return {"batch_size": most, "global_batch_size": train_samples}


def metrics(trainer: lightning.Trainer) -> dict[str, float]:
    """Lightning's metrics as plain numbers, and those of a validation before the run was resumed."""
    before = getattr(trainer.checkpoint_callback, "metrics", {})
    return {**before, **{key: float(value) for key, value in trainer.callback_metrics.items()}}


def throughput(callbacks: list[lightning.Callback]) -> dict[str, Any]:
    """What the run's ThroughputMonitor summed up; empty without one."""
    return next((c.summary for c in callbacks if isinstance(c, ThroughputMonitor)), {})


def skipped(callbacks: list[lightning.Callback]) -> dict[str, int | None]:
    """How many updates of the whole run were left out because a number was not finite; None for none.

    Nothing where nobody has counted.
    """
    counts = [callback.skipped for callback in callbacks if isinstance(callback, StopOnNonFinite)]
    return {"skipped_steps": sum(counts) or None} if counts else {}


def learning_rate(trainer: lightning.Trainer, watch: LearningRateWatch) -> dict[str, Any]:
    """For the record: the learning rate that a run trained with, under a schedule its peak, and who changed it; None if
    nobody did."""
    lr = trainer.optimizers[0].defaults["lr"] if watch.last is None else watch.last
    return {"learning_rate": lr, "learning_rate_changed": watch.changed or None}


def checkpoints(trainer: lightning.Trainer, run_dir: Path) -> dict[str, str]:
    """The checkpoints that a run has kept, as paths within its folder; what it did not keep is left out."""
    callback = trainer.checkpoint_callback
    paths = {kind: getattr(callback, f"{kind}_model_path", "") for kind in ("best", "last")}
    return {kind: os.path.relpath(path, run_dir) for kind, path in paths.items() if path}


def log_hyperparameters(trainer: lightning.Trainer, record: Mapping[str, Any]) -> None:
    """One row in TensorBoard's HPARAMS tab: what was chosen, what came of it, and how fast."""
    config = record["config"]
    chosen = {section: config[section] for section in ("model", "data", "optimizer", "trainer")}
    named = [(key, value) for key, value in flatten(chosen) if purpose_of(key, config) not in _NOT_CHOICES]
    row = {
        key: value if isinstance(value, int | float | str) else str(value)
        for key, value in named
        if value is not None and key != "data.seed" and not key.endswith("_target_")
    }
    row |= {"model": record["choices"].get("model", ""), "dataset": record["dataset"]["name"], "seed": config["seed"]}
    row["data.batch_size"] = record.get("batch_size", config["data"]["batch_size"])  # what a batch held
    speed = {key: record["throughput"].get(key) for key in ("samples_per_sec", "step_ms_median", "mfu")}
    # Names and a step of their own: a curve that goes back to step 0 is cut there by TensorBoard. Sorted, because it
    # shows the first metric only until more are ticked: test/acc, or test/loss.
    metrics = dict(sorted(record["metrics"].items()))
    metrics |= {f"summary/{key}": value for key, value in speed.items() if value is not None}
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.log_hyperparams(row, metrics, step=trainer.global_step)
            logger.save()


def print_start(record: Mapping[str, Any], dataset: str) -> None:
    """What is trained on what."""
    model, hardware = record["model"], record["hardware"]
    where = hardware["device"] + (f" ({hardware['device_name']})" if hardware["device_name"] else "")
    print(f"{model['class']} ({model['parameters']:,} parameters) on {dataset}, {where}", flush=True)


def print_end(record: Mapping[str, Any]) -> None:
    """How well it went, where the result is, and how to go on."""
    metrics, best = record["metrics"], record["checkpoints"].get("best")
    test = {key.removeprefix("test/"): value for key, value in metrics.items() if key.startswith("test/")}
    done = f"{_count(record['epochs'], 'epoch')}, {_count(record['steps'], 'step')}"
    before = record["resumed"][-1]["step"] if record.get("resumed") else 0
    timed = f", the last {record['steps'] - before:,} of them" if before else ""
    print(f"\ntrained  {record['name']}: {done}{timed} in {record['fit_seconds']:.1f} s")
    if record.get("learning_rate_changed"):
        print(_rate_changed(record))
    if test:
        print("tested   " + ", ".join(f"{key} {value:.4f}" for key, value in sorted(test.items())))
    if best:
        path = os.path.join(record["config"]["run_dir"], best)
        print(f"kept     {path}")
        print(f"again    {evaluate_command(record['config'], path)}")
    run_dir = Path(record["config"]["run_dir"])
    logs = run_dir.parts[0] if run_dir.parts[0] not in ("..", run_dir.anchor) else run_dir
    if any(run_dir.rglob("events.out.tfevents.*")):
        print(f"look     tensorboard --logdir {shlex.quote(str(logs))}", flush=True)


def _rate_changed(record: Mapping[str, Any]) -> str:
    changed, schedule = record["learning_rate_changed"], record["config"]["optimizer"].get("schedule", "constant")
    line = (
        f"changed  the learning rate, by a callback, in {changed['steps']:,} of {_count(record['steps'], 'step')}: "
        f"in step {changed['first_step']:,} to {changed['to']:.3g} instead of {changed['from']:.3g}"
    )
    kept = schedule != "constant" and changed["steps"] < record["steps"]
    return f"{line}; in the others optimizer.schedule={schedule} set it" if kept else line


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"
