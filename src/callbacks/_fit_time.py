"""FitTimer: where the wall time of a fit goes besides its steps, and with what each epoch begins."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from lightning import Trainer
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset

from ..records.course import FIRST_BATCH, OTHER, START_UP, STEPS, VALIDATION
from ._setting import own_config

Read = Callable[[], float]
_WHOLE = 0.9  # of the most batches of an epoch: the last epoch of a fit may have fewer
_NOTICEABLE = 0.05  # of an epoch


@dataclass(frozen=True)
class FitTime:
    """Where the wall time of a fit has gone on one rank, in seconds. Epochs are whole ones after the first."""

    # By the names in records/course.py; they add up to the fit.
    parts_s: Mapping[str, float] = field(default_factory=dict)
    epoch_s: float | None = None  # of the median epoch, with its validation; None without one
    first_batch_s: float | None = None  # with which it begins
    starting_s: float = 0.0  # of these, at least, in which it starts workers that another option would keep
    keep_workers: str = ""  # that option
    of_data_wait: float = 0.0  # the share of all waits for data that is for these first batches

    @property
    def starts_workers(self) -> bool:
        """Whether a noticeable part of an epoch is starting workers."""
        return bool(self.epoch_s and self.keep_workers and self.starting_s >= _NOTICEABLE * self.epoch_s)


@dataclass(slots=True)
class _Epoch:
    began: float
    began_cpu: float
    first_batch_s: float | None = None  # None before it has come
    idle_s: float = 0.0  # of it, in which this thread did not compute
    in_step_s: float = 0.0  # of it, in which a step lasted: the loader starts its workers before
    validation_s: float = 0.0
    batches: int = 0


class FitTimer:
    """Is told what happens in a fit, by the host's clock; it begins with its construction.

    Args:
        clock: the time.
        cpu: the time in which this thread has computed.
    """

    def __init__(self, clock: Read = time.perf_counter, cpu: Read = time.thread_time):
        self._clock, self._cpu = clock, cpu
        self._began = clock()
        self._asked = self._validation_began = self._began
        self._start_up_s: float | None = None
        self._validation_s = 0.0
        self._epochs: list[_Epoch] = []
        self.validations: list[tuple[float, float]] = []  # the beginning and the length of each

    @property
    def is_waiting(self) -> bool:
        """Whether the first batch of an epoch has not come yet."""
        return bool(self._epochs) and self._epochs[-1].first_batch_s is None

    def begin_epoch(self) -> None:
        """The loader is asked for its batches."""
        self._epochs.append(_Epoch(self._clock(), self._cpu()))

    def ask(self) -> None:
        """A batch is asked for, with which a step begins."""
        if self.is_waiting:
            self._asked = self._clock()
        elif self._epochs and not self._epochs[-1].batches:
            # Of a loader without a length Lightning has fetched the first batch ahead: that wait is in no step.
            self._epochs[-1].in_step_s = 0.0

    def receive(self) -> None:
        """The first batch has come."""
        now, epoch = self._clock(), self._epochs[-1]
        waited_s = now - epoch.began - epoch.validation_s  # a resumed epoch may begin with a validation
        epoch.first_batch_s, epoch.in_step_s = waited_s, min(now - self._asked, waited_s)
        epoch.idle_s = waited_s - (self._cpu() - epoch.began_cpu)
        if self._start_up_s is None:
            self._start_up_s = now - self._began - self._validation_s

    def end_batch(self) -> None:
        """A batch was trained."""
        if self._epochs:
            self._epochs[-1].batches += 1

    def begin_validation(self) -> None:
        """A validation begins."""
        self._validation_began = self._clock()

    def end_validation(self) -> None:
        """It ends."""
        seconds = self._clock() - self._validation_began
        self._validation_s += seconds
        self.validations.append((self._validation_began, seconds))
        if self._epochs:
            self._epochs[-1].validation_s += seconds

    def result(self, trainer: Trainer, steps_s: float, data_wait_s: float) -> FitTime:
        """At the end of the fit, given the seconds of all steps, and of the waits for data in those that count."""
        now = self._clock()
        later = [epoch for epoch in self._epochs[1:] if epoch.first_batch_s is not None]
        begun = [epoch for epoch in self._epochs if epoch.first_batch_s is not None]
        in_step_s = sum(epoch.in_step_s for epoch in later)
        parts = {
            START_UP: now - self._began - self._validation_s if self._start_up_s is None else self._start_up_s,
            STEPS: max(0.0, steps_s - sum(epoch.in_step_s for epoch in begun)),
            VALIDATION: self._validation_s,
            FIRST_BATCH: sum(epoch.first_batch_s or 0.0 for epoch in later),
        }
        parts[OTHER] = max(0.0, now - self._began - sum(parts.values()))
        most = max((epoch.batches for epoch in self._epochs), default=0)
        ends = [epoch.began for epoch in self._epochs[1:]] + [now]
        lengths = [*zip(self._epochs, ends, strict=True)][1:]
        whole = [
            (epoch, end - epoch.began)
            for epoch, end in lengths
            if epoch.first_batch_s is not None and epoch.batches >= _WHOLE * most
        ]
        if not whole:
            return FitTime(parts)
        workers, option = started_workers(trainer)
        return FitTime(
            parts,
            epoch_s=statistics.median(seconds for _, seconds in whole),
            first_batch_s=statistics.median(epoch.first_batch_s or 0.0 for epoch, _ in whole),
            starting_s=statistics.median(_starting_s(epoch, seconds, workers) for epoch, seconds in whole),
            keep_workers=option,
            of_data_wait=min(1.0, in_step_s / data_wait_s) if data_wait_s > 0 else 0.0,
        )


def _starting_s(epoch: _Epoch, seconds: float, workers: int) -> float:
    """Of the wait for an epoch's first batch at least so much was for starting workers, and not for loading it.

    Each worker has loaded a batch so many `rounds` times more while the epoch lasted, so a batch takes no longer than the
    rest of the epoch divided by these. What this thread computes, such as the order of the samples, starts no worker.
    """
    rounds = (epoch.batches - 1) // workers if workers else 0
    if not rounds or epoch.first_batch_s is None:
        return 0.0
    load_s = (seconds - epoch.first_batch_s - epoch.validation_s) / rounds
    return max(0.0, epoch.idle_s - load_s)


def started_workers(trainer: Trainer) -> tuple[int, str]:
    """How many workers a DataLoader starts anew in each epoch, and the option that keeps them; 0 where none does, or would.

    A stream begins anew in each epoch in workers that are kept, too, and a loader may be made anew.
    """
    loaders = [each for each in tree_leaves(trainer.train_dataloader) if isinstance(each, DataLoader)]
    is_stream = any(isinstance(loader.dataset, IterableDataset) for loader in loaders)
    if is_stream or cast(Any, trainer).reload_dataloaders_every_n_epochs:
        return 0, ""
    workers = max((loader.num_workers for loader in loaders if not loader.persistent_workers), default=0)
    config: Mapping[str, Any] = own_config(trainer.lightning_module) or {}
    is_option = "persistent_workers" in config.get("data", {})
    option = "data.persistent_workers=true" if is_option else "DataLoader(persistent_workers=True)"
    return workers, option if workers else ""
