"""One run, from top to bottom: seed, data, callbacks, trainer, model, fit, test, record."""

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from .._lightning import (
    Hooks,
    callbacks_of,
    forget_averages,
    has_started_run,
    is_fast_dev_run,
    logged_step,
    loggers_of_rank,
)
from .._system import command_line, keep_freed_memory
from ..callbacks._setting import count_epoch_samples
from ..callbacks._visits import Visitor, make_visits, non_training_seconds, waiting_seconds
from ..checkpointing.callback import CHECKPOINTS, Checkpoints
from ..checkpointing.checkpoint_file import AtomicCheckpointIO, makes_layers
from ..checkpointing.graceful_shutdown import GracefulShutdown
from ..checkpointing.resume import lock_run_dir
from ..checkpointing.resume_point import ResumePoint, find_resume_point
from ..data.base import DataModule, Split
from ..data.plain import Data, PlainData, has_test, lightning_datamodule, set_up_for_fit
from ..distributed.agreement import abort_waiting, check_agreement, end_together, record_lost_ranks
from ..distributed.rendezvous import prepare_once
from ..errors import UnfitError, UserError, show_tracebacks, warn
from ..hardware.devices import check_accelerator, cores_and_threads, describe
from ..options.check import refuse_kinds
from ..options.command_lines import evaluate_command
from ..options.groups import DEFAULT_DATA, SECTIONS
from ..options.overrides import options_and_groups
from ..options.purpose import lightning_module_of, why_module_ignores, with_speed_of
from ..records import correct
from ..records.formatting import count
from ..records.read import optimized_value
from ..records.run_record import RunRecord, record_missing_end, versions
from ..records.values import at, positive, table
from . import summary
from .build import (
    NoLogger,
    build_callbacks,
    build_data,
    build_loggers,
    build_model,
    build_trainer,
    lightning_module,
    loader_switches,
    refuse_own_loaders,
    run_name,
)
from .failures import explain_failures
from .initial import start_from, weights_in
from .quiet import quiet_libraries
from .task import Task


def train(
    config: dict[str, Any],
    run_dir: Path,
    choices: dict[str, str],
    overrides: list[str],
    visitor: Visitor | None = None,
) -> float | None:
    """Train, test and record one model; Ctrl-C, SIGTERM and the like end it after a checkpoint.

    With `resume` in the checked configuration, the run in `run_dir` is resumed. `choices` maps each config group to the
    chosen config; a `visitor` decides when the run trains. Returns the metric named by `optimized_metric`.
    """
    if choices.get("debug"):
        show_tracebacks()
    with GracefulShutdown(lambda number: record_missing_end(run_dir, "interrupted", f"signal {number}")) as shutdown:
        set_up_process(config)
        run = _Run(config, run_dir, choices, shutdown, visitor)
        _refuse_unread(run.model, config, overrides, choices)
        with run.recorded(overrides) as record:
            prepare_once(run.data.prepare_data, run.trainer, lightning_datamodule(run.data).prepare_data_per_node)
            run.load_data(record.facts["id"])
            run.begin(record)
            run.fit(record)
            run.test(record)
            run.warn_of_unread_options(record)
            summary.log_hyperparameters(run.trainer, record.facts)
    if run.trainer.is_global_zero:
        summary.print_summary(run.trainer, record.facts, run_dir)
    return optimized_value(record.facts)


def set_up_process(config: dict[str, Any]) -> None:
    """Set up the process: messages, denormal numbers (below 1e-38), freed memory, the seed.

    UserError for a device or a precision that this machine does not have.
    """
    quiet_libraries()
    torch.set_flush_denormal(True)  # before any thread starts, because threads inherit the mode
    keep_freed_memory()
    lightning.seed_everything(config["seed"], workers=True, verbose=False)
    check_accelerator(config)


def _refuse_unread(model: nn.Module, config: dict[str, Any], overrides: list[str], choices: dict[str, str]) -> None:
    """Raise UserError for options of a Task, if the built model turns out to be a LightningModule, which reads none of them.

    A run does not use a module's own loaders either: they are refused unless the user has named other data.
    """
    if isinstance(model, LightningModule) and not lightning_module_of(config):
        for option in sorted(set.union(*options_and_groups(overrides))):
            if reason := why_module_ignores(type(model).__name__, option, config):
                raise UserError(f"{option}: {reason}")
    if choices.get("data") == DEFAULT_DATA and "data" not in options_and_groups(overrides)[1]:
        refuse_own_loaders(model)


class _Run:
    """The parts of a run, in the order in which they can be built: the trainer, which refuses some values, before any
    download; the run's name after the data, which determine the batch size.
    """

    def __init__(
        self,
        config: dict[str, Any],
        run_dir: Path,
        choices: dict[str, str],
        shutdown: GracefulShutdown,
        visitor: Visitor | None = None,
    ) -> None:
        self.run_dir = run_dir
        self.data = build_data(config)
        callbacks, switches = build_callbacks(config)
        # The run's facts in every checkpoint, in plain containers, so that a checkpoint can be used by its path alone.
        self.provenance: dict[str, Any] = {}
        first_hooks = Hooks(setup=self._check_agreement, on_exception=abort_waiting)
        callbacks = [first_hooks, *callbacks, *make_visits(callbacks, visitor), shutdown]
        sampler_switch = loader_switches(config, self.data)
        self._has_distributed_sampler = sampler_switch["use_distributed_sampler"]
        self.trainer = build_trainer(config, run_dir, callbacks, **switches, **sampler_switch)
        checkpoint_io = self.trainer.strategy.checkpoint_io
        if isinstance(checkpoint_io, AtomicCheckpointIO):  # a callback would miss a ModelCheckpoint of weights alone
            checkpoint_io.provenance = self._checkpoint_provenance
        self.model: nn.Module = build_model(config, self.data)
        self.config = config
        groups = (group for group in SECTIONS if group in self.config)
        self.choices = {group: choices[group] for group in groups if choices.get(group)}
        if not config.get("resume"):
            self._load_initial_weights()
        self.resume_point: ResumePoint | None = None
        self._fit_started, self._earlier_s = time.perf_counter(), 0.0  # `_earlier_s`: of the run's earlier processes

    def _checkpoint_provenance(self) -> dict[str, Any]:
        dtype = {"dtype": self.module.input_dtype} if isinstance(self.module, Task) else {}
        return self.provenance | dtype | {"fit_seconds": self._fit_seconds()}

    def _fit_seconds(self) -> float:
        """Return the training time of the run, over all its processes, without waits."""
        current_s = time.perf_counter() - self._fit_started - non_training_seconds(callbacks_of(self.trainer))
        return round(self._earlier_s + current_s, 3)

    def _load_initial_weights(self) -> None:
        """Load the weights that `init` names; if a module makes layers in a hook, after Lightning has called the hook."""
        if path := self.config["init"]:
            load = partial(start_from, self.model, Path(path))
            if isinstance(self.model, LightningModule) and makes_layers(self.model):
                weights_in(Path(path), self.model)  # refuses a file without weights before the run begins
                callbacks_of(self.trainer).insert(0, Hooks(on_fit_start=lambda trainer, module: load()))
            else:
                load()

    @contextlib.contextmanager
    def recorded(self, overrides: list[str]) -> Iterator[RunRecord]:
        """Lock the run's folder, record how the run ends, and end the other ranks with this one."""
        device, is_first_rank = self.trainer.strategy.root_device, self.trainer.is_global_zero
        folder_option = "resume" if self.config.get("resume") else "hydra.run.dir"
        model = {
            "class": type(self.model).__name__,
            "parameters": summary.parameters(self.model),
            "lightning_module": isinstance(self.model, LightningModule),
        }
        with explain_failures(self.config, self.run_dir, self.trainer):  # the GPU may be full
            hardware = describe(device)
        with (
            lock_run_dir(self.run_dir, enabled=is_first_rank, option=folder_option),
            RunRecord(
                self.run_dir,
                enabled=is_first_rank,
                command=command_line(["batchscope", "train", *sys.argv[1:]]),
                overrides=overrides,
                choices=self.choices,
                config=self.config,
                hardware=hardware,
                processes=self.trainer.world_size,
                model=model,
            ) as record,
            end_together(self.trainer),
            explain_failures(self.config, self.run_dir, self.trainer),
        ):
            has_failed = True
            try:
                yield record
                has_failed = False
            except BaseException as error:
                record.facts |= {"memory": memory} if (memory := summary.memory_facts(self.trainer)) else {}
                if not self.config.get("resume") and not isinstance(error, UserError):
                    record.begin_unless_begun()  # a new run that ended while its data were loaded
                raise
            finally:  # a forked process exits without W&B's exit handler, and would lose the last points
                for logger in loggers_of_rank(self.trainer):
                    if isinstance(logger, WandbLogger) and has_started_run(logger):
                        logger.experiment.finish(exit_code=int(has_failed))

    def load_data(self, run_id: str) -> None:
        """Load the training data, and name the run, its loggers and its checkpoints after the data."""
        set_up_for_fit(self.data, self.model, self.trainer)
        _refuse_few_samples(self.data, self.trainer)
        samples = self.data.num_samples("train")
        fingerprint = self.data.fingerprint
        is_plain_on_ranks = isinstance(self.data, PlainData) and self.trainer.world_size > 1
        if is_plain_on_ranks and not self._has_distributed_sampler:  # both may be those of the part that a rank gets
            samples, fingerprint = None, "unknown"
        self.dataset = {"name": self.data.name, "fingerprint": fingerprint, "train_samples": samples}
        batches = self.trainer.accumulate_grad_batches
        self.batch_sizes = limit_batch_size(self.data, samples, self.trainer.world_size, batches)
        self.name = run_name(self.config, self.choices, self.data.name, self.data.batch_size)
        is_dev_run = is_fast_dev_run(self.trainer)
        loggers: list[Logger] = [] if is_dev_run else build_loggers(self.config, self.run_dir, self.name, run_id)
        if not loggers and (is_dev_run or "until_known" in (self.config["callbacks"] or {})):
            loggers = [NoLogger(self.trainer.default_root_dir)]  # a module may use its logger
            self.trainer.enable_autolog_hparams = False
        self.trainer.loggers = loggers
        facts = {"config": self.config, "choices": self.choices, "name": self.name, "run": run_id}
        spec = None if self.data.spec is None else asdict(self.data.spec)
        self.provenance = facts | {"dataset": self.data.name, "fingerprint": fingerprint, "spec": spec}
        self.module = lightning_module(self.model, self.data, self.config, self.provenance)
        if isinstance(self.module, Task):
            self.module.prepare(self.trainer, self.data.batch_size, self.batch_sizes.get("global_batch_size"))
        for callback in self.trainer.checkpoint_callbacks:
            if isinstance(callback, Checkpoints):
                callback.check(self.module)

    def _check_agreement(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        """Check that all ranks have equal data and versions, in the first hook after the process group exists.

        By then the module has added its callbacks: UserError for a callback of a class that a new run refuses.
        """
        if stage == "fit":
            for callback in () if self.config.get("resume") else callbacks_of(trainer):
                kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(callback).__mro__}
                refuse_kinds("model: configure_callbacks", kinds.__contains__)
            steps = self.resume_point.steps if self.resume_point else 0
            data = {f"dataset.{key}": self.dataset[key] for key in ("fingerprint", "train_samples")}
            check_agreement({"steps": steps, **data, **versions()}, trainer)
            record_lost_ranks(trainer)

    def begin(self, record: RunRecord) -> None:
        """Begin the record, after checking that the run can start or be resumed; no file is changed before."""
        if self.config.get("resume"):
            self.resume_point = find_resume_point(self.module, self.run_dir)
            self.resume_point.check(self.trainer, self.dataset["fingerprint"], self.config)
            if not self.resume_point.path:
                self._load_initial_weights()
        if self.trainer.is_global_zero:
            summary.print_start(record.facts, self.data.name)
        record.facts |= {"name": self.name, "dataset": self.dataset, **self.batch_sizes}
        record.begin(self.resume_point.facts(self.run_dir) if self.resume_point else None)
        for callback in self.trainer.checkpoint_callbacks:
            if isinstance(callback, Checkpoints):  # a run without a checkpoint in its record may start anew
                callback.on_first_save = partial(record.add, checkpoints={"last": f"{CHECKPOINTS}/last.ckpt"})

    def fit(self, record: RunRecord) -> None:
        """Train, and record the results."""
        checkpoint = None
        if self.resume_point is not None:
            self.resume_point.prepare(self.trainer, self.data)
            if isinstance(self.data, PlainData) and self.resume_point.is_within_epoch:
                self.data.warn_of_lost_batches()
            checkpoint = self.resume_point.path
            if checkpoint:  # else all steps are trained again
                recorded_s = positive(record.facts.get("fit_seconds")) or 0.0  # a killed process has not recorded it
                self._earlier_s = max(recorded_s, self.resume_point.fit_seconds)
        self._fit_started = time.perf_counter()
        try:
            self.trainer.fit(
                self.module, datamodule=lightning_datamodule(self.data), ckpt_path=checkpoint, weights_only=True
            )
        except BaseException:
            record.facts["hardware"] |= cores_and_threads()
            record.facts["fit_seconds"] = self._fit_seconds()
            record.facts["waiting_seconds"] = round(waiting_seconds(callbacks_of(self.trainer)), 3)
            raise
        fit_s = self._fit_seconds()
        loop = self.trainer.fit_loop
        was_loader_read = loop.max_batches == 0 or loop.epoch_progress.total.ready  # a stream has no length beforehand
        if was_loader_read and not loop.epoch_loop.batch_progress.total.ready:
            reason = "it has no samples, or drop_last=True leaves out a batch that they do not fill"
            raise UnfitError(f"data: the training loader of {self.data.name} has no batch to train on: {reason}")
        self._record_fit(record, fit_s)

    def _record_fit(self, record: RunRecord, fit_s: float) -> None:
        """Record the results of a fit that has taken `fit_s` seconds, over all processes of the run."""
        facts: dict[str, Any] = {
            "model": record.facts["model"] | {"parameters": summary.parameters(self.model)},
            "epochs": summary.full_epochs(self.trainer),
            "steps": logged_step(self.trainer),
            "checkpoints": summary.checkpoint_paths(self.trainer, self.run_dir),
            "metrics": summary.last_metrics(self.trainer),
            "evaluated": summary.evaluated_samples(self.trainer, self.data),
            "sample_means": self.module.sample_means if isinstance(self.module, Task) else None,
        }
        if self.dataset["train_samples"] is None and (samples := count_epoch_samples(self.trainer)):
            facts["dataset"] = {**self.dataset, "train_samples": samples}
        has_trained = self.resume_point is None or self.trainer.global_step > self.resume_point.steps
        if has_trained:  # earlier metrics are of other weights, but those of a validation that none has followed stay
            evaluated = table(record.facts.get("evaluated"))
            record.facts |= {"metrics": {}, "evaluated": {split: n for split, n in evaluated.items() if split == "val"}}
        if not has_trained and record.before.get("status") == "finished":  # the user has changed the length
            limits = "trainer.max_epochs, max_steps, max_time or a callback, such as early stopping"
            warn(f"resume: nothing was trained: what had ended the run ends it still: {limits}")
        if is_new := has_trained or "throughput" not in record.facts:
            facts["lr_scaling"] = self.module.lr_scaling if isinstance(self.module, Task) else None
        facts["fit_seconds"] = fit_s if is_new else self._earlier_s
        waited_s = waiting_seconds(callbacks_of(self.trainer))  # for visits, and for a quiet machine
        facts["waiting_seconds"] = round(waited_s, 3) or None
        callback_facts, before = summary.callback_facts(self.trainer), record.before
        keeps_rates = _has_rate(before) and not (has_trained and _has_rate(callback_facts))  # few steps give no rate
        if keeps_rates:
            facts |= {key: before[key] for key in ("hardware", "versions") if key in before}
            facts["config"] = with_speed_of(self.config, table(before.get("config")))
        else:
            facts = {**callback_facts, "hardware": record.facts["hardware"] | cores_and_threads(), **facts}
        record.add(**facts)
        if not keeps_rates:
            summary.write_steps(self.trainer, self.run_dir)

    def test(self, record: RunRecord) -> None:
        """Test the best checkpoint, or the last weights if no checkpoint is the best."""
        if not (self.config["test"] and is_overridden("test_step", self.module)):
            return
        has_test_set = has_test(self.data)
        samples = self.data.num_samples("test") if isinstance(self.data, DataModule) and has_test_set else None
        if samples == 0 or not has_test_set:
            warn(f"test: {self.data.name} has no test set, and nothing is tested")
            return
        obstacle, ranks = "", self.trainer.world_size
        if isinstance(self.trainer.strategy, FSDPStrategy):
            obstacle = "FSDP cannot test a module that it has sharded for training"
        elif samples is not None and samples < ranks:
            obstacle = f"{ranks} processes cannot share {count(samples, 'test sample')} of {self.data.name}"
        paths = summary.checkpoint_paths(self.trainer, self.run_dir)
        if obstacle:
            path = paths.get("best") or paths.get("last")
            advice = f"; write {evaluate_command(self.config, str(self.run_dir / path))}" if path else ""
            warn(f"test: {obstacle}{advice}")
            return
        if self.trainer.is_global_zero:
            with contextlib.suppress(OSError):  # the file of an earlier test, which may have had more samples
                (self.run_dir / correct.FILE).unlink()
        forget_averages(self.trainer)
        best = "best" if "best" in paths else None
        self.trainer.test(
            self.module, datamodule=lightning_datamodule(self.data), ckpt_path=best, verbose=False, weights_only=True
        )
        record.add(metrics={**record.facts["metrics"], **summary.metrics_now(self.trainer)})
        record.add(evaluated={**record.facts["evaluated"], **summary.evaluated_samples(self.trainer, self.data)})
        if isinstance(self.module, Task):
            summary.write_test_correct(self.trainer, self.module.test_correct, self.run_dir)

    def warn_of_unread_options(self, record: RunRecord) -> None:
        """Warn of options of the command line that have changed nothing, which only the run could find out."""
        unread = summary.unread_options(self.trainer, record.facts)
        for option, reason in unread.items():
            warn(f"{option}: had no effect: {reason}")
        record.add(unread=unread or None)  # None removes those of an earlier process


def _has_rate(facts: Mapping[str, Any]) -> bool:
    return at(facts, "throughput.step_ms_median") is not None


def _refuse_few_samples(data: Data, trainer: lightning.Trainer) -> None:
    """Raise UserError if a split of the fit has fewer samples than there are processes."""
    if not isinstance(data, DataModule):
        return
    splits: tuple[Split, ...] = ("train", "val") if trainer.limit_val_batches else ("train",)
    for split in splits:
        if data.num_samples(split):
            data.check_ranks(split, trainer.world_size)


def limit_batch_size(data: Data, train_samples: int | None, world_size: int, batches: int = 1) -> dict[str, int]:
    """Lower the batch size of a rank, with a warning, to the samples that a batch gets if the training set cannot fill it.

    The batches themselves do not change: the lowered size is for the learning rate and for labels. Returns the batch sizes
    for the record: the samples of an update, which takes `batches` of every rank, and the lowered batch size of one rank.
    """
    batch_size = data.batch_size
    if batch_size is None:
        return {}
    update_size = batch_size * world_size * batches
    if train_samples is None or batch_size <= -(-train_samples // world_size):
        if train_samples is not None and update_size > train_samples and batches > 1:
            warn(f"an update of {update_size:,} samples takes all {train_samples:,} training samples of {data.name}")
        return {"global_batch_size": min(update_size, train_samples or update_size)}
    data.batch_size = samples_per_rank = -(-train_samples // world_size)
    rank_words = f" for each of {world_size} processes" if world_size > 1 else ""
    warn(
        f"data.batch_size: got {batch_size:,}{rank_words}, and {data.name} has {train_samples:,} training samples: every "
        "step takes all of them"
    )
    return {"batch_size": samples_per_rank, "global_batch_size": train_samples}
