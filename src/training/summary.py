"""What is left of a run: facts for its record, its first and last lines in the terminal, its row in HPARAMS.

A callback adds to these by methods:

- `record_facts() -> dict[str, Any]` is merged into run.json when training has ended; None takes a fact back.
- `unread_options() -> dict[str, str]` has, at the end, those of its options that have changed nothing, and why. A
  warning and `unread` in run.json say so of those that were typed. A Task and its network have the same method.
- `summary_lines() -> list[str]` is printed among the run's last lines.
- `detail_lines() -> list[str]` is printed after them where details are wanted (`-v`).
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
from lightning import Trainer
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from .._lightning import callback_of, callbacks_of, loggers_of_rank
from .._system import relative
from ..callbacks._measured import write_measured
from ..callbacks._run_words import details, headline
from ..callbacks.tensorboard import TensorBoard
from ..callbacks.throughput import ThroughputMonitor
from ..data.base import Split
from ..data.order import DeterministicBatchSampler
from ..data.plain import Data
from ..distributed.gather import gather
from ..errors import warn
from ..files import WriteError
from ..options.command_lines import evaluate_command
from ..options.groups import SECTIONS
from ..options.purpose import CHOOSES_NOTHING, purpose_of
from ..options.tree import flatten
from ..records.correct import write_correct
from ..records.formatting import count, duration
from ..records.learning_rate import rate_words
from ..records.metrics import card, metric, staged
from ..records.operations import write_operations
from ..records.step_times import write_step_times
from ..records.terminal import block, has_words, is_verbose, row, say


def last_metrics(trainer: Trainer) -> dict[str, float]:
    """Lightning's metrics as plain numbers, and those of a validation before the run was resumed."""
    return {**getattr(trainer.checkpoint_callback, "metrics", {}), **metrics_now(trainer)}


def metrics_now(trainer: Trainer) -> dict[str, float]:
    """Lightning's metrics alone: after a test, those of the test."""
    return {key: float(value) for key, value in trainer.callback_metrics.items()}


def whole_epochs(trainer: Trainer) -> int:
    """The epochs that were trained to their end. Lightning counts the one that a timed run stops in, too."""
    return max(0, trainer.current_epoch - (not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch))


def evaluated_samples(trainer: Trainer, data: Data) -> dict[str, int]:
    """How many samples `val/*` and `test/*` are of; a split whose size nobody knows is left out."""
    found: dict[str, int] = {}
    loops: list[tuple[Split, Any, Sequence[float]]] = [
        ("val", trainer.val_dataloaders, trainer.num_val_batches),
        ("test", trainer.test_dataloaders, trainer.num_test_batches),
    ]
    for split, loaders, batches in loops:
        loader, *others = tree_leaves(loaders) or [None]  # a LightningModule may have a list of them
        length = None if others else sized_len(loader)
        if not length or not (samples := data.num_samples(split)):
            continue
        if sum(batches) >= length:  # Lightning's limits may leave less
            found[split] = samples
        elif size := getattr(getattr(loader, "batch_sampler", None), "batch_size", None):
            found[split] = min(samples, int(sum(batches)) * size * trainer.world_size)
    return found


def checkpoint_paths(trainer: Trainer, run_dir: Path) -> dict[str, str]:
    """The best and the last checkpoint, as paths within the run's folder; one that was not kept is left out."""
    paths = {kind: getattr(trainer.checkpoint_callback, f"{kind}_model_path", "") for kind in ("best", "last")}
    return {kind: relative(path, run_dir) for kind, path in paths.items() if path}


def callback_facts(trainer: Trainer) -> dict[str, Any]:
    """What the callbacks have for the record, and the learning rate: a schedule's peak, else the last update's."""
    facts: dict[str, Any] = {}
    if len(trainer.optimizers) == 1:  # a LightningModule of one's own may have none or several
        facts["learning_rate"] = _learning_rate(trainer.optimizers[0], bool(trainer.lr_scheduler_configs))
    facts["throughput"] = {"missing": {"bottleneck": "callbacks.throughput is left out"}}
    for callback in callbacks_of(trainer):
        if hasattr(callback, "record_facts"):
            facts |= callback.record_facts()
    return facts


def unread_options(trainer: Trainer, record: Mapping[str, Any]) -> dict[str, str]:
    """The options of a run's command line that have changed nothing, and why: of the module, its network and the callbacks."""
    owners: dict[str, Any] = {
        f"{option}.": part for part in callbacks_of(trainer) if (option := getattr(part, "batchscope_option", None))
    }
    owners[""] = trainer.lightning_module
    owners["model."] = getattr(trainer.lightning_module, "model", None)  # the network of a Task
    said = {place: owner.unread_options() for place, owner in owners.items() if hasattr(owner, "unread_options")}
    typed = {word.lstrip("+").partition("=")[0] for word in record["overrides"]}
    unread = {f"{place}{option}": why for place, options in said.items() for option, why in options.items()}
    return {option: why for option, why in unread.items() if option in typed}


def _learning_rate(optimizer: Optimizer, is_scheduled: bool) -> float | None:
    """The rate of the last update or, under a schedule, its peak; None for an optimizer that has no rate, or several."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    if is_scheduled:  # OneCycleLR says its peak, and most others fall from the rate that the group was given
        known, default = ("max_lr", "initial_lr"), optimizer.defaults.get("lr")
        rates = [next((group[key] for key in known if key in group), default) for group in optimizer.param_groups]
    return None if rates[0] is None or any(rate != rates[0] for rate in rates) else float(rates[0])


def parameters(model: nn.Module) -> int:
    """How many numbers a model has to train, or has frozen; 0 before its first batch where it has lazy layers."""
    found = list(model.parameters())
    return 0 if any(map(is_lazy, found)) else sum(each.numel() for each in found)


def write_steps(trainer: Trainer, run_dir: Path) -> None:
    """Write a run's step times, what was measured, and the operations beside its record; a warning where that fails."""
    monitor = callback_of(trainer, ThroughputMonitor)
    if monitor is None or not trainer.is_global_zero:
        return
    times, measured, operations = monitor.step_times(), monitor.measured, monitor.operations
    try:
        if times is not None:
            write_step_times(run_dir, times)
        if measured is not None:
            write_measured(run_dir, measured, monitor.calibration)
        if operations is not None:
            write_operations(run_dir, operations)
    except WriteError as error:
        warn(str(error))


def write_tested(trainer: Trainer, right: Sequence[Tensor], run_dir: Path) -> None:
    """Write which test samples were answered right, on all ranks together; nothing where the test left some out.

    `right` are those of this rank, `(B,)` for each batch. A sampler that does not shuffle takes the batches in the
    stored order, and gives each rank a part of each in its turn.
    """
    sampler = getattr(trainer.test_dataloaders, "batch_sampler", None)
    if not isinstance(sampler, DeterministicBatchSampler) or sampler.shuffle:
        return
    ranks = gather([of_batch.cpu().numpy() for of_batch in right], trainer.world_size)
    parts = [part for of_batch in zip(*ranks, strict=False) for part in of_batch]
    if not trainer.is_global_zero or sum(map(len, parts)) != sampler.num_samples:
        return
    try:
        write_correct(run_dir, numpy.concatenate(parts))
    except WriteError as error:
        warn(str(error))


def memory_facts(trainer: Trainer) -> dict[str, Any]:
    """What a ThroughputMonitor knows so far of a step's memory, also of a run that fails; empty without one."""
    monitor = callback_of(trainer, ThroughputMonitor)
    return monitor.memory() if monitor else {}


def log_hyperparameters(trainer: Trainer, record: Mapping[str, Any]) -> None:
    """The configuration at W&B; in TensorBoard a row of HPARAMS, with the results, and the summary."""
    config = record["config"]
    chosen = {key: config[key] for key in (*SECTIONS, "compile", "channels_last") if key in config}
    named = [(key, value) for key, value in flatten(chosen) if purpose_of(key, config) not in CHOOSES_NOTHING]
    named = [(key, value) for key, value in named if key != "data.seed" or value != config["seed"]]
    row = {k: v if isinstance(v, int | float | str) else str(v) for k, v in named if v is not None}
    row |= {
        "model": record["choices"].get("model") or record["model"]["class"],
        "dataset": record["dataset"]["name"],
        "seed": config["seed"],
    }
    row |= {"global_batch_size": record["global_batch_size"]} if "global_batch_size" in record else {}
    row |= {"init": config["init"]} if config.get("init") else {}
    if record.get("lr_scaling") and "learning_rate" in record:  # as scaled to the update
        row["learning_rate"] = record["learning_rate"]
    row["data.batch_size"] = record.get("batch_size", config["data"].get("batch_size", "unknown"))  # what a batch held
    speed = {key: record["throughput"].get(key) for key in ("samples_per_sec", "step_ms_median", "mfu")}
    # Not the names of the curves, and the last step: TensorBoard cuts a curve that goes back to step 0. It ticks the first
    # five metrics, so accuracies and speeds come before losses.
    of_quality = record["metrics"]
    keys = sorted(of_quality)
    metrics = {key: of_quality[key] for key in keys if metric(key).higher_is_better}
    metrics |= {f"summary/{key}": value for key, value in speed.items() if value is not None}
    metrics |= {key: of_quality[key] for key in keys}  # losses
    for logger in loggers_of_rank(trainer):
        if isinstance(logger, WandbLogger):
            logger.log_hyperparams(row)
        if isinstance(logger, TensorBoardLogger):
            named = {card(key): value for key, value in metrics.items()} if isinstance(logger, TensorBoard) else metrics
            logger.log_hyperparams(_told_apart(row, record), named, step=trainer.global_step)
            if "title" in record["throughput"]:  # a summary that is complete
                text = "\n".join([*headline(record["throughput"]), *details(record["throughput"])])
                logger.experiment.add_text("summary", f"```\n{text}\n```", trainer.global_step)  # as it is aligned
            logger.save()


_ALWAYS = ("model", "data.batch_size", "learning_rate")  # columns of HPARAMS
_SPELLING = str.maketrans("", "", "'\"\\+")  # by which a word of a record differs from what was typed in a shell


def _told_apart(row: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """The options by which people tell runs apart: a few that every run has, and those that vary in a sweep or were typed.

    The dataset is one of them if it was chosen, or stands in for the one that could not be had. More columns would hide the
    metrics. A word of a run that its sweep's command does not have is one of several values, or was typed at a resume.
    """
    typed = {word.lstrip("+~").partition("=")[0]: word for word in record["overrides"]}
    command = f" {record['command']} ".translate(_SPELLING)
    is_resumed = record.get("resumed") and not {"-m", "--multirun"} & {*command.split()}
    varied = {o for o, word in typed.items() if not is_resumed and f" {word} ".translate(_SPELLING) not in command}
    shown = {*_ALWAYS, *(varied or typed)}
    if "data" in shown or row["dataset"].replace("-", "_") != record["choices"].get("data"):  # data=copy_memory
        shown.add("dataset")
    return {key: value for key, value in row.items() if key in shown}


def print_start(record: Mapping[str, Any], dataset: str) -> None:
    """What is trained on what."""
    if not has_words():
        return
    model, hardware = record["model"], record["hardware"]
    device = hardware["device"] + (f" ({hardware['device_name']})" if hardware["device_name"] else "")
    size = f" ({model['parameters']:,} parameters)" if model["parameters"] else ""  # layers may be made in the fit
    say(f"{model['class']}{size} on {dataset}, {device}")


def print_summary(trainer: Trainer, record: Mapping[str, Any], run_dir: Path) -> None:
    """What every run ends with: what it cost, how well it went, and where it is; with `-v` the details, too."""
    if not has_words():
        return
    rows = _lines_of(trainer, "summary_lines", headline, record)
    if "title" not in record["throughput"]:
        rows.insert(0, record["name"])
    run_dir = Path(relative(run_dir))
    rows += [row("rate", words)] if (words := rate_words(record)) else []
    rows += [row("result", _result(record)), row("files", str(run_dir))]
    say(f"\n{block(rows)}")
    if is_verbose():
        found = _lines_of(trainer, "detail_lines", details, record)
        commands = "\n".join(_commands(trainer, record, run_dir))  # not wrapped, to be copied
        say(f"\n{block(found, indent=2)}\n\n{commands}")


def _lines_of(
    trainer: Trainer, method: str, words: Callable[[Mapping[str, Any]], list[str]], record: Mapping[str, Any]
) -> list[str]:
    """What the callbacks have to say, the monitor first, whose first line is the heading.

    Of a fit that a resumed run had done before, the record has the words.
    """
    speak = [one for one in callbacks_of(trainer) if hasattr(one, method)]
    monitors = [one for one in speak if isinstance(one, ThroughputMonitor)]
    is_of_before = "title" in record["throughput"] and all("title" not in one.summary for one in monitors)
    lines = words(record["throughput"]) if is_of_before and any(one.verbose for one in monitors) else []
    monitors = [] if is_of_before else monitors
    others = [one for one in speak if not isinstance(one, ThroughputMonitor)]
    return [*lines, *(line for one in (*monitors, *others) for line in getattr(one, method)())]


def _result(record: Mapping[str, Any]) -> str:
    """The last metrics, `test acc 98.9 % in 47 s`: of the test or the last validation, and accuracies if there are any."""
    metrics = record["metrics"]
    by_stage = [{key: n for key, n in metrics.items() if staged(key).startswith(stage)} for stage in ("test/", "val/")]
    found = by_stage[0] or by_stage[1]
    better = {key: value for key, value in found.items() if not key.endswith(("/loss", "_loss"))}
    words = [
        f"{key.replace('/', ' ').replace('_', ' ')} {metric(staged(key)).text(value)}"
        for key, value in sorted((better or found).items())
    ]
    trained = [(record["epochs"], "epoch")] if record["epochs"] > 0 else []  # a timed run ends within the first one
    words = words or [count(number, unit) for number, unit in (*trained, (record["steps"], "step"))]
    return f"{', '.join(words)} in {duration(record['fit_seconds'])}"


def _commands(trainer: Trainer, record: Mapping[str, Any], run_dir: Path) -> list[str]:
    """The checkpoint that was kept, and the command that evaluates it, where there is a test."""
    checkpoints = record["checkpoints"]
    kept = checkpoints.get("best") or checkpoints.get("last")  # a run without a validation has no best one
    if not kept:
        return []
    path = os.path.join(run_dir, kept)
    again = [row("again", evaluate_command(record["config"], path))]
    return [row("kept", path), *(again if is_overridden("test_step", trainer.lightning_module) else [])]
