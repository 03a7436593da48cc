"""The results of a run: facts for its record, its first and last lines in the terminal, its row in HPARAMS.

A callback adds to these by methods:

- `record_facts() -> dict[str, Any]` is merged into run.json when training has ended; None removes a fact.
- `unread_options() -> dict[str, str]` returns, at the end, the callback's options that have changed nothing, and why. A
  warning and `unread` in run.json name those that were typed. A Task and its network may have the same method.
- `summary_lines() -> list[str]` is printed among the run's last lines.
- `detail_lines() -> list[str]` is printed after the summary lines if the user wants details (`-v`).
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
from ..options.purpose import NON_FACTOR_PURPOSES, purpose_of
from ..options.tree import flatten
from ..records.correct import write_correct
from ..records.formatting import count, duration
from ..records.learning_rate import rate_words
from ..records.metrics import card, metric, staged
from ..records.operations import write_operations
from ..records.step_times import write_step_times
from ..records.terminal import block, has_words, is_verbose, row, say


def last_metrics(trainer: Trainer) -> dict[str, float]:
    """Return Lightning's metrics as plain numbers, and those of a validation before the run was resumed."""
    return {**getattr(trainer.checkpoint_callback, "metrics", {}), **metrics_now(trainer)}


def metrics_now(trainer: Trainer) -> dict[str, float]:
    """Return Lightning's metrics alone: after a test, those of the test."""
    return {key: float(value) for key, value in trainer.callback_metrics.items()}


def full_epochs(trainer: Trainer) -> int:
    """Return the number of epochs that were trained to their end; Lightning counts an epoch that `max_time` cuts, too."""
    return max(0, trainer.current_epoch - (not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch))


def evaluated_samples(trainer: Trainer, data: Data) -> dict[str, int]:
    """Return the number of samples behind `val/*` and `test/*`, without a split of unknown size."""
    samples_by_split: dict[str, int] = {}
    loops: list[tuple[Split, Any, Sequence[float]]] = [
        ("val", trainer.val_dataloaders, trainer.num_val_batches),
        ("test", trainer.test_dataloaders, trainer.num_test_batches),
    ]
    for split, loaders, batches in loops:
        loader, *other_loaders = tree_leaves(loaders) or [None]  # a LightningModule may have a list of loaders
        length = None if other_loaders else sized_len(loader)
        if not length or not (samples := data.num_samples(split)):
            continue
        if sum(batches) >= length:  # Lightning's limits may leave fewer
            samples_by_split[split] = samples
        elif size := getattr(getattr(loader, "batch_sampler", None), "batch_size", None):
            samples_by_split[split] = min(samples, int(sum(batches)) * size * trainer.world_size)
    return samples_by_split


def checkpoint_paths(trainer: Trainer, run_dir: Path) -> dict[str, str]:
    """Return the paths of the best and the last checkpoint within the run's folder, if they were kept."""
    paths = {kind: getattr(trainer.checkpoint_callback, f"{kind}_model_path", "") for kind in ("best", "last")}
    return {kind: relative(path, run_dir) for kind, path in paths.items() if path}


def callback_facts(trainer: Trainer) -> dict[str, Any]:
    """Return the callbacks' facts for the record, and the learning rate: a schedule's peak, else the last update's."""
    facts: dict[str, Any] = {}
    if len(trainer.optimizers) == 1:  # a LightningModule may have no optimizer or several
        facts["learning_rate"] = _learning_rate(trainer.optimizers[0], bool(trainer.lr_scheduler_configs))
    facts["throughput"] = {"missing": {"bottleneck": "callbacks.throughput is left out"}}
    for callback in callbacks_of(trainer):
        if hasattr(callback, "record_facts"):
            facts |= callback.record_facts()
    return facts


def unread_options(trainer: Trainer, record: Mapping[str, Any]) -> dict[str, str]:
    """Return the typed options of the module, its network and the callbacks that have changed nothing, and why."""
    owners: dict[str, Any] = {
        f"{option}.": part for part in callbacks_of(trainer) if (option := getattr(part, "batchscope_option", None))
    }
    owners[""] = trainer.lightning_module
    owners["model."] = getattr(trainer.lightning_module, "model", None)  # the network of a Task
    typed = {word.lstrip("+").partition("=")[0] for word in record["overrides"]}
    unread = {prefix: owner.unread_options() for prefix, owner in owners.items() if hasattr(owner, "unread_options")}
    reasons = {f"{prefix}{key}": reason for prefix, options in unread.items() for key, reason in options.items()}
    return {option: reason for option, reason in reasons.items() if option in typed}


def _learning_rate(optimizer: Optimizer, is_scheduled: bool) -> float | None:
    """Return the rate of the last update or, under a schedule, the peak; None for an optimizer without a rate or with several."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    if is_scheduled:  # OneCycleLR stores its peak; most other schedules fall from the group's initial rate
        peak_keys, default = ("max_lr", "initial_lr"), optimizer.defaults.get("lr")
        rates = [next((group[key] for key in peak_keys if key in group), default) for group in optimizer.param_groups]
    return None if rates[0] is None or any(rate != rates[0] for rate in rates) else float(rates[0])


def parameters(model: nn.Module) -> int:
    """Return the number of a model's parameters, trained and frozen; 0 before the first batch of lazy layers."""
    tensors = list(model.parameters())
    return 0 if any(map(is_lazy, tensors)) else sum(tensor.numel() for tensor in tensors)


def write_steps(trainer: Trainer, run_dir: Path) -> None:
    """Write a run's step times, measurements and operations beside its record; warn if that fails."""
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


def write_test_correct(trainer: Trainer, masks: Sequence[Tensor], run_dir: Path) -> None:
    """Write which test samples all ranks predicted correctly; write nothing if the test skipped samples.

    `masks` are those of this rank, `(B,)` for each batch. A sampler that does not shuffle takes the batches in the stored
    order, and gives each rank in turn a part of each batch.
    """
    sampler = getattr(trainer.test_dataloaders, "batch_sampler", None)
    if not isinstance(sampler, DeterministicBatchSampler) or sampler.shuffle:
        return
    masks_by_rank = gather([mask.cpu().numpy() for mask in masks], trainer.world_size)
    parts = [part for batch_parts in zip(*masks_by_rank, strict=False) for part in batch_parts]
    if not trainer.is_global_zero or sum(map(len, parts)) != sampler.num_samples:
        return
    try:
        write_correct(run_dir, numpy.concatenate(parts))
    except WriteError as error:
        warn(str(error))


def memory_facts(trainer: Trainer) -> dict[str, Any]:
    """Return a ThroughputMonitor's facts so far about a step's memory, even if the run fails; empty without a monitor."""
    monitor = callback_of(trainer, ThroughputMonitor)
    return monitor.memory() if monitor else {}


def log_hyperparameters(trainer: Trainer, record: Mapping[str, Any]) -> None:
    """Log the configuration to W&B, and to TensorBoard a row of HPARAMS with the results, and the summary."""
    config = record["config"]
    sections = {key: config[key] for key in (*SECTIONS, "compile", "channels_last") if key in config}
    options = [(key, value) for key, value in flatten(sections) if purpose_of(key, config) not in NON_FACTOR_PURPOSES]
    options = [(key, value) for key, value in options if key != "data.seed" or value != config["seed"]]
    row = {key: v if isinstance(v, int | float | str) else str(v) for key, v in options if v is not None}
    row |= {
        "model": record["choices"].get("model") or record["model"]["class"],
        "dataset": record["dataset"]["name"],
        "seed": config["seed"],
    }
    row |= {"global_batch_size": record["global_batch_size"]} if "global_batch_size" in record else {}
    row |= {"init": config["init"]} if config.get("init") else {}
    if record.get("lr_scaling") and "learning_rate" in record:  # as scaled to the update
        row["learning_rate"] = record["learning_rate"]
    row["data.batch_size"] = record.get("batch_size", config["data"].get("batch_size", "unknown"))  # the real size
    speed = {key: record["throughput"].get(key) for key in ("samples_per_sec", "step_ms_median", "mfu")}
    # Names other than those of the curves, at the last step: TensorBoard cuts a curve that goes back to step 0. TensorBoard
    # selects the first five metrics, so accuracies and speeds come before losses.
    quality = dict(sorted(record["metrics"].items()))
    metrics = {key: value for key, value in quality.items() if metric(key).higher_is_better}
    metrics |= {f"summary/{key}": value for key, value in speed.items() if value is not None}
    metrics |= quality  # adds the losses
    for logger in loggers_of_rank(trainer):
        if isinstance(logger, WandbLogger):
            logger.log_hyperparams(row)
        if isinstance(logger, TensorBoardLogger):
            cards = {card(key): value for key, value in metrics.items()} if isinstance(logger, TensorBoard) else metrics
            logger.log_hyperparams(_shown_columns(row, record), cards, step=trainer.global_step)
            if "title" in record["throughput"]:  # the summary is complete
                text = "\n".join([*headline(record["throughput"]), *details(record["throughput"])])
                logger.experiment.add_text("summary", f"```\n{text}\n```", trainer.global_step)  # keeps the columns
            logger.save()


_DEFAULT_COLUMNS = ("model", "data.batch_size", "learning_rate")  # of HPARAMS
_QUOTING = str.maketrans("", "", "'\"\\+")  # the characters by which an override differs from what was typed in a shell


def _shown_columns(row: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns by which users tell runs apart: defaults, and options that vary in a sweep or were typed.

    The dataset is a column if it was chosen, or replaces a dataset that could not be downloaded. More columns would hide the
    metrics. An override that the sweep's command lacks is one of several values there, or was typed at a resume.
    """
    typed = {word.lstrip("+~").partition("=")[0]: word for word in record["overrides"]}
    command = f" {record['command']} ".translate(_QUOTING)
    is_resumed = record.get("resumed") and not {"-m", "--multirun"} & {*command.split()}
    varied = {key for key, word in typed.items() if not is_resumed and f" {word} ".translate(_QUOTING) not in command}
    shown = {*_DEFAULT_COLUMNS, *(varied or typed)}
    if "data" in shown or row["dataset"].replace("-", "_") != record["choices"].get("data"):  # data=copy_memory
        shown.add("dataset")
    return {key: value for key, value in row.items() if key in shown}


def print_start(record: Mapping[str, Any], dataset: str) -> None:
    """Print the model, its size, the dataset and the device."""
    if not has_words():
        return
    model, hardware = record["model"], record["hardware"]
    device = hardware["device"] + (f" ({hardware['device_name']})" if hardware["device_name"] else "")
    size = f" ({model['parameters']:,} parameters)" if model["parameters"] else ""  # layers may be made in the fit
    say(f"{model['class']}{size} on {dataset}, {device}")


def print_summary(trainer: Trainer, record: Mapping[str, Any], run_dir: Path) -> None:
    """Print the last lines of a run: its speed, its last metrics and its folder; with `-v` the details, too."""
    if not has_words():
        return
    rows = _callback_lines(trainer, "summary_lines", headline, record)
    if "title" not in record["throughput"]:
        rows.insert(0, record["name"])
    run_dir = Path(relative(run_dir))
    rows += [row("rate", words)] if (words := rate_words(record)) else []
    rows += [row("result", _result(record)), row("files", str(run_dir))]
    say(f"\n{block(rows)}")
    if is_verbose():
        lines = _callback_lines(trainer, "detail_lines", details, record)
        commands = "\n".join(_checkpoint_rows(trainer, record, run_dir))  # not wrapped, to be copied
        say(f"\n{block(lines, indent=2)}\n\n{commands}")


def _callback_lines(
    trainer: Trainer, method: str, words: Callable[[Mapping[str, Any]], list[str]], record: Mapping[str, Any]
) -> list[str]:
    """Return the lines of the callbacks' `method`, the monitor's first, because its first line is the heading.

    If the monitors have measured no fit in this process, `words` makes their lines of the record of an earlier fit.
    """
    callbacks = [callback for callback in callbacks_of(trainer) if hasattr(callback, method)]
    monitors = [callback for callback in callbacks if isinstance(callback, ThroughputMonitor)]
    others = [callback for callback in callbacks if not isinstance(callback, ThroughputMonitor)]
    is_earlier_fit = "title" in record["throughput"] and all("title" not in monitor.summary for monitor in monitors)
    if is_earlier_fit:
        lines = words(record["throughput"]) if any(monitor.verbose for monitor in monitors) else []
    else:
        lines = [line for monitor in monitors for line in getattr(monitor, method)()]
    return [*lines, *(line for callback in others for line in getattr(callback, method)())]


def _result(record: Mapping[str, Any]) -> str:
    """Return the last metrics of the test or of the last validation, without losses if possible: `test acc 98.9 % in 47 s`."""
    logged = record["metrics"]
    by_stage = [{k: n for k, n in logged.items() if staged(k).startswith(stage)} for stage in ("test/", "val/")]
    metrics = by_stage[0] or by_stage[1]
    without_losses = {key: value for key, value in metrics.items() if not key.endswith(("/loss", "_loss"))}
    words = [
        f"{key.replace('/', ' ').replace('_', ' ')} {metric(staged(key)).text(value)}"
        for key, value in sorted((without_losses or metrics).items())
    ]
    epochs = [(record["epochs"], "epoch")] if record["epochs"] > 0 else []  # none if `max_time` ends the first one
    words = words or [count(number, unit) for number, unit in (*epochs, (record["steps"], "step"))]
    return f"{', '.join(words)} in {duration(record['fit_seconds'])}"


def _checkpoint_rows(trainer: Trainer, record: Mapping[str, Any], run_dir: Path) -> list[str]:
    """Return the row of the checkpoint that was kept, and that of the command to test it, if the module has a test."""
    checkpoints = record["checkpoints"]
    checkpoint = checkpoints.get("best") or checkpoints.get("last")  # a run without a validation has no best checkpoint
    if not checkpoint:
        return []
    path = os.path.join(run_dir, checkpoint)
    test_rows = [row("again", evaluate_command(record["config"], path))]
    return [row("kept", path), *(test_rows if is_overridden("test_step", trainer.lightning_module) else [])]
