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
from ..callbacks._setting import samples_of_epoch
from ..callbacks._visits import Visitor, seconds_beside, seconds_waited, visits_of
from ..checkpointing.callback import CHECKPOINTS, Checkpoints
from ..checkpointing.checkpoint_file import AtomicCheckpointIO, makes_layers
from ..checkpointing.graceful_shutdown import GracefulShutdown
from ..checkpointing.resume import lock_run_dir
from ..checkpointing.resume_point import ResumePoint, find_resume_point
from ..data.base import DataModule, Split
from ..data.plain import Data, PlainData, has_test, lightning_of, set_up_for_fit
from ..distributed.agreement import abort_waiting, check_agreement, end_together, record_lost_ranks
from ..distributed.rendezvous import prepare_once
from ..errors import UnfitError, UserError, show_tracebacks, warn
from ..hardware.devices import check_accelerator, cores_and_threads, describe
from ..options.check import refuse_kinds
from ..options.command_lines import evaluate_command
from ..options.groups import DEFAULT_DATA, SECTIONS
from ..options.overrides import set_by
from ..options.purpose import lightning_module_of, unread_by, with_speed_of
from ..records import correct
from ..records.formatting import count
from ..records.read import optimized
from ..records.run_record import RunRecord, close_open, versions
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

    With `resume` in the checked configuration, the run that `run_dir` holds is resumed. `choices` are the options taken
    from each config group; a `visitor` says when the run trains. Returns the metric named by `optimized_metric`.
    """
    if choices.get("debug"):
        show_tracebacks()
    with GracefulShutdown(lambda number: close_open(run_dir, "interrupted", f"signal {number}")) as shutdown:
        set_up_process(config)
        run = _Run(config, run_dir, choices, shutdown, visitor)
        _refuse_unread(run.model, config, overrides, choices)
        with run.recorded(overrides) as record:
            prepare_once(run.data.prepare_data, run.trainer, lightning_of(run.data).prepare_data_per_node)
            run.load_data(record.facts["id"])
            run.begin(record)
            run.fit(record)
            run.test(record)
            run.tell_unread(record)
            summary.log_hyperparameters(run.trainer, record.facts)
    if run.trainer.is_global_zero:
        summary.print_summary(run.trainer, record.facts, run_dir)
    return optimized(record.facts)


def set_up_process(config: dict[str, Any]) -> None:
    """Set what holds for the whole process: messages, numbers below 1e-38, freed memory, the seed.

    UserError for a device or a precision that this machine does not have.
    """
    quiet_libraries()
    torch.set_flush_denormal(True)  # before any thread is started, which inherits it
    keep_freed_memory()
    lightning.seed_everything(config["seed"], workers=True, verbose=False)
    check_accelerator(config)


def _refuse_unread(model: nn.Module, config: dict[str, Any], overrides: list[str], choices: dict[str, str]) -> None:
    """Raise UserError for what a LightningModule does not read, where only building it shows what it is: options of a Task.

    Its own loaders are not read either, which is refused where nobody has named other data.
    """
    if isinstance(model, LightningModule) and not lightning_module_of(config):
        for option in sorted(set.union(*set_by(overrides))):
            if why := unread_by(type(model).__name__, option, config):
                raise UserError(f"{option}: {why}")
    if choices.get("data") == DEFAULT_DATA and "data" not in set_by(overrides)[1]:
        refuse_own_loaders(model)


class _Run:
    """The parts of a run, in the order in which they become known: the trainer, which refuses some values, before any
    download; the run's name after the data, which say how many samples a batch holds.
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
        # What every checkpoint is of, by which it can be used by its path alone, in plain containers.
        self.provenance: dict[str, Any] = {}
        ours = [*visits_of(callbacks, visitor), shutdown]
        callbacks = [Hooks(setup=self._check_agreement, on_exception=abort_waiting), *callbacks, *ours]
        loading = loader_switches(config, self.data)
        self._has_distributed_sampler = loading["use_distributed_sampler"]
        self.trainer = build_trainer(config, run_dir, callbacks, **switches, **loading)
        io = self.trainer.strategy.checkpoint_io
        if isinstance(io, AtomicCheckpointIO):  # no callback is asked where a ModelCheckpoint saves weights alone
            io.provenance = self._provenance
        self.model: nn.Module = build_model(config, self.data)
        self.config = config
        named = (group for group in SECTIONS if group in self.config)
        self.choices = {group: choices[group] for group in named if choices.get(group)}
        if not config.get("resume"):
            self._start_from_weights()
        self.resume_point: ResumePoint | None = None
        self._fit_started, self._before_s = time.perf_counter(), 0.0

    def _provenance(self) -> dict[str, Any]:
        known = {"dtype": self.module.input_dtype} if isinstance(self.module, Task) else {}
        return self.provenance | known | {"fit_seconds": self._fit_seconds()}

    def _fit_seconds(self) -> float:
        """How long the run has trained, in all its processes, without what it has waited for."""
        here_s = time.perf_counter() - self._fit_started - seconds_beside(callbacks_of(self.trainer))
        return round(self._before_s + here_s, 3)

    def _start_from_weights(self) -> None:
        """Load the weights that `init` names; into layers that a module makes in a hook, once Lightning has called it."""
        if path := self.config["init"]:
            start = partial(start_from, self.model, Path(path))
            if isinstance(self.model, LightningModule) and makes_layers(self.model):
                weights_in(Path(path), self.model)  # a file that holds none is refused before the run begins
                callbacks_of(self.trainer).insert(0, Hooks(on_fit_start=lambda trainer, module: start()))
            else:
                start()

    @contextlib.contextmanager
    def recorded(self, overrides: list[str]) -> Iterator[RunRecord]:
        """Lock the run's folder, record how the run ends, and end the other ranks with this one."""
        device, first = self.trainer.strategy.root_device, self.trainer.is_global_zero
        named_by = "resume" if self.config.get("resume") else "hydra.run.dir"
        model = {
            "class": type(self.model).__name__,
            "parameters": summary.parameters(self.model),
            "lightning_module": isinstance(self.model, LightningModule),
        }
        with explain_failures(self.config, self.run_dir, self.trainer):  # the GPU may be full
            hardware = describe(device)
        with (
            lock_run_dir(self.run_dir, enabled=first, option=named_by),
            RunRecord(
                self.run_dir,
                enabled=first,
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
            failed = True
            try:
                yield record
                failed = False
            except BaseException as error:
                record.facts |= {"memory": known} if (known := summary.memory_facts(self.trainer)) else {}
                if not self.config.get("resume") and not isinstance(error, UserError):
                    record.begin_unless_begun()  # a new run that ended while its data were loaded
                raise
            finally:  # a forked process exits without W&B's exit handler, which would lose its last points
                for logger in loggers_of_rank(self.trainer):
                    if isinstance(logger, WandbLogger) and has_started_run(logger):
                        logger.experiment.finish(exit_code=int(failed))

    def load_data(self, run_id: str) -> None:
        """Load the training data, and name the run, its loggers and its checkpoints after them."""
        set_up_for_fit(self.data, self.model, self.trainer)
        _refuse_few_samples(self.data, self.trainer)
        samples = self.data.num_samples("train")
        fingerprint = self.data.fingerprint
        several = isinstance(self.data, PlainData) and self.trainer.world_size > 1
        if several and not self._has_distributed_sampler:  # data that give each rank its part may say both of that part
            samples, fingerprint = None, "unknown"
        self.dataset = {"name": self.data.name, "fingerprint": fingerprint, "train_samples": samples}
        batches = self.trainer.accumulate_grad_batches
        self.batch = limit_batch_size(self.data, samples, self.trainer.world_size, batches)
        self.name = run_name(self.config, self.choices, self.data.name, self.data.batch_size)
        tries = is_fast_dev_run(self.trainer)
        loggers: list[Logger] = [] if tries else build_loggers(self.config, self.run_dir, self.name, run_id)
        if not loggers and (tries or "until_known" in (self.config["callbacks"] or {})):
            loggers = [NoLogger(self.trainer.default_root_dir)]  # a module of one's own may ask for its logger
            self.trainer.enable_autolog_hparams = False
        self.trainer.loggers = loggers
        facts = {"config": self.config, "choices": self.choices, "name": self.name, "run": run_id}
        spec = None if self.data.spec is None else asdict(self.data.spec)
        self.provenance = facts | {"dataset": self.data.name, "fingerprint": fingerprint, "spec": spec}
        self.module = lightning_module(self.model, self.data, self.config, self.provenance)
        if isinstance(self.module, Task):
            self.module.prepare(self.trainer, self.data.batch_size, self.batch.get("global_batch_size"))
        for callback in self.trainer.checkpoint_callbacks:
            if isinstance(callback, Checkpoints):
                callback.check(self.module)

    def _check_agreement(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        """Compare what has to be the same in every rank, in the first hook after the process group has been set up.

        Callbacks that the module has added are known by then: UserError for one that no new run takes.
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
        """Begin the record, once it is known that the run can start or be resumed: until then no file is changed."""
        if self.config.get("resume"):
            self.resume_point = find_resume_point(self.module, self.run_dir)
            self.resume_point.check(self.trainer, self.dataset["fingerprint"], self.config)
            if not self.resume_point.path:
                self._start_from_weights()
        if self.trainer.is_global_zero:
            summary.print_start(record.facts, self.data.name)
        record.facts |= {"name": self.name, "dataset": self.dataset, **self.batch}
        record.begin(self.resume_point.facts(self.run_dir) if self.resume_point else None)
        for callback in self.trainer.checkpoint_callbacks:
            if isinstance(callback, Checkpoints):  # without one in the record, a run may start anew
                callback.on_first_save = partial(record.add, checkpoints={"last": f"{CHECKPOINTS}/last.ckpt"})

    def fit(self, record: RunRecord) -> None:
        """Train, and record what came of it."""
        checkpoint = None
        if self.resume_point is not None:
            self.resume_point.prepare(self.trainer, self.data)
            if isinstance(self.data, PlainData) and self.resume_point.is_within_epoch:
                self.data.warn_of_lost_batches()
            checkpoint = self.resume_point.path
            if checkpoint:  # else its steps are trained again
                recorded_s = positive(record.facts.get("fit_seconds")) or 0.0  # a killed process has recorded none
                self._before_s = max(recorded_s, self.resume_point.fit_seconds)
        self._fit_started = time.perf_counter()
        try:
            self.trainer.fit(self.module, datamodule=lightning_of(self.data), ckpt_path=checkpoint, weights_only=True)
        except BaseException:
            record.facts["hardware"] |= cores_and_threads()
            record.facts["fit_seconds"] = self._fit_seconds()
            record.facts["waiting_seconds"] = round(seconds_waited(callbacks_of(self.trainer)), 3)
            raise
        fit_s = self._fit_seconds()
        loop = self.trainer.fit_loop
        asked = loop.max_batches == 0 or loop.epoch_progress.total.ready  # of a stream nobody knows the length before
        if asked and not loop.epoch_loop.batch_progress.total.ready:
            why = "it has no samples, or drop_last=True leaves out a batch that they do not fill"
            raise UnfitError(f"data: the training loader of {self.data.name} has no batch to train on: {why}")
        self._record_fit(record, fit_s)

    def _record_fit(self, record: RunRecord, fit_s: float) -> None:
        """Record what a fit has come to, which has taken so many seconds in all processes of the run."""
        facts: dict[str, Any] = {
            "model": record.facts["model"] | {"parameters": summary.parameters(self.model)},
            "epochs": summary.whole_epochs(self.trainer),
            "steps": logged_step(self.trainer),
            "checkpoints": summary.checkpoint_paths(self.trainer, self.run_dir),
            "metrics": summary.last_metrics(self.trainer),
            "evaluated": summary.evaluated_samples(self.trainer, self.data),
            "sample_means": self.module.sample_means if isinstance(self.module, Task) else None,
        }
        if self.dataset["train_samples"] is None and (samples := samples_of_epoch(self.trainer)):
            facts["dataset"] = {**self.dataset, "train_samples": samples}
        has_trained = self.resume_point is None or self.trainer.global_step > self.resume_point.steps
        if has_trained:  # what was known is of other weights, but for a validation that none has followed
            known = table(record.facts.get("evaluated"))
            record.facts |= {"metrics": {}, "evaluated": {split: n for split, n in known.items() if split == "val"}}
        if not has_trained and record.before.get("status") == "finished":  # and another length was asked for
            ends = "trainer.max_epochs, max_steps, max_time or a callback, such as early stopping"
            warn(f"resume: nothing was trained: what had ended the run ends it still: {ends}")
        if measures := has_trained or "throughput" not in record.facts:
            facts["lr_scaling"] = self.module.lr_scaling if isinstance(self.module, Task) else None
        facts["fit_seconds"] = fit_s if measures else self._before_s
        waited_s = seconds_waited(callbacks_of(self.trainer))  # for visits, and a quiet machine
        facts["waiting_seconds"] = round(waited_s, 3) or None
        measured, before = summary.callback_facts(self.trainer), record.before
        keeps_rates = _has_rate(before) and not (has_trained and _has_rate(measured))  # as of an end with few steps
        if keeps_rates:
            facts |= {key: before[key] for key in ("hardware", "versions") if key in before}
            facts["config"] = with_speed_of(self.config, table(before.get("config")))
        else:
            facts = {**measured, "hardware": record.facts["hardware"] | cores_and_threads(), **facts}
        record.add(**facts)
        if not keeps_rates:
            summary.write_steps(self.trainer, self.run_dir)

    def test(self, record: RunRecord) -> None:
        """Test the best checkpoint; the last weights where no checkpoint is the best."""
        if not (self.config["test"] and is_overridden("test_step", self.module)):
            return
        has_one = has_test(self.data)
        few = self.data.num_samples("test") if isinstance(self.data, DataModule) and has_one else None
        if few == 0 or not has_one:
            warn(f"test: {self.data.name} has no test set, and nothing is tested")
            return
        why, ranks = "", self.trainer.world_size
        if isinstance(self.trainer.strategy, FSDPStrategy):
            why = "FSDP cannot test a module that it has sharded for training"
        elif few is not None and few < ranks:
            why = f"{ranks} processes cannot share {count(few, 'test sample')} of {self.data.name}"
        if why:
            kept = summary.checkpoint_paths(self.trainer, self.run_dir)
            name = kept.get("best") or kept.get("last")
            then = f"; write {evaluate_command(self.config, str(self.run_dir / name))}" if name else ""
            warn(f"test: {why}{then}")
            return
        if self.trainer.is_global_zero:
            with contextlib.suppress(OSError):  # of an earlier test, which may have had more samples
                (self.run_dir / correct.FILE).unlink()
        forget_averages(self.trainer)
        best = "best" if "best" in summary.checkpoint_paths(self.trainer, self.run_dir) else None
        self.trainer.test(
            self.module, datamodule=lightning_of(self.data), ckpt_path=best, verbose=False, weights_only=True
        )
        record.add(metrics={**record.facts["metrics"], **summary.metrics_now(self.trainer)})
        record.add(evaluated={**record.facts["evaluated"], **summary.evaluated_samples(self.trainer, self.data)})
        if isinstance(self.module, Task):
            summary.write_tested(self.trainer, self.module.tested_right, self.run_dir)

    def tell_unread(self, record: RunRecord) -> None:
        """Say which options of the command line have changed nothing, where only the run could find out."""
        unread = summary.unread_options(self.trainer, record.facts)
        for option, why in unread.items():
            warn(f"{option}: had no effect: {why}")
        record.add(unread=unread or None)  # not those of an earlier process


def _has_rate(facts: Mapping[str, Any]) -> bool:
    return at(facts, "throughput.step_ms_median") is not None


def _refuse_few_samples(data: Data, trainer: lightning.Trainer) -> None:
    """Raise UserError for a split of a fit that has fewer samples than there are processes."""
    if not isinstance(data, DataModule):
        return
    splits: tuple[Split, ...] = ("train", "val") if trainer.limit_val_batches else ("train",)
    for split in splits:
        if data.num_samples(split):
            data.check_ranks(split, trainer.world_size)


def limit_batch_size(data: Data, train_samples: int | None, world_size: int, batches: int = 1) -> dict[str, int]:
    """Lower a rank's batch size that the training set cannot fill to what a batch will hold, with a warning.

    Batches do not change. The lowered size is used for the learning rate and for labels. Returns the batch sizes for
    the record: the samples of an update, which takes `batches` of every rank, and the lowered batch of one rank.
    """
    asked = data.batch_size
    if asked is None:
        return {}
    update = asked * world_size * batches
    if train_samples is None or asked <= -(-train_samples // world_size):
        if train_samples is not None and update > train_samples and batches > 1:
            warn(f"an update of {update:,} samples takes all {train_samples:,} training samples of {data.name}")
        return {"global_batch_size": min(update, train_samples or update)}
    data.batch_size = held = -(-train_samples // world_size)
    each = f" for each of {world_size} processes" if world_size > 1 else ""
    warn(
        f"data.batch_size: got {asked:,}{each}, and {data.name} has {train_samples:,} training samples: every step "
        "takes all of them"
    )
    return {"batch_size": held, "global_batch_size": train_samples}
