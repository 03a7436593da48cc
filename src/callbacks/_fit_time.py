"""FitTimer: divides the wall time of a fit, and times what an epoch needs before its first batch."""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from lightning import Trainer
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset

from ..records.course import FIRST_BATCH, OTHER, START_UP, STEPS, VALIDATION
from ._training_program import program_config

Clock = Callable[[], float]
_WHOLE = 0.9  # of the batches of the longest epoch: a shorter epoch, which the end of a fit may have cut, is left out
_NOTICEABLE = 0.05  # of the time of an epoch


@dataclass(slots=True)
class _Epoch:
    began: float
    began_cpu: float
    seconds: float = math.nan  # until the next epoch begins, or the fit ends
    first_batch_s: float = math.nan  # the wait for the first batch
    idle_s: float = 0.0  # the part of this wait in which this thread did not compute
    in_step_s: float = 0.0  # the part of this wait that lies in a step: the loader starts its workers before the step
    validation_s: float = 0.0
    batches: int = 0

    def starting_s(self, workers: int) -> float:
        """Return a lower bound of the time to start workers within the wait for the first batch.

        In the rest of the epoch each worker loads `rounds` more batches, so a batch takes no longer than that time ÷ `rounds`.
        What this thread computes during the wait, such as the order of the samples, does not count as starting workers.
        """
        rounds = (self.batches - 1) // workers if workers else 0
        load_s = (self.seconds - self.first_batch_s - self.validation_s) / rounds if rounds else math.inf
        return max(0.0, self.idle_s - load_s)


class FitTimer:
    """Divides the wall time of a fit, by the host's clock; its methods are called at the events of the fit.

    Args:
        began: when the fit began; None for now.
        clock: returns the time in seconds.
        cpu: returns the CPU time of this thread in seconds.
    """

    def __init__(self, began: float | None = None, clock: Clock = time.perf_counter, cpu: Clock = time.thread_time):
        self._clock, self._cpu = clock, cpu
        self._start = self._request_time = clock() if began is None else began
        self._start_up_s = math.nan  # until the first batch has come
        self._epochs: list[_Epoch] = []
        self.is_waiting = False  # whether the fit waits for the first batch of an epoch
        self.validations: list[tuple[float, float]] = []  # the start and the length of each

    def begin_epoch(self) -> None:
        """An epoch begins: the loader's iterator is requested."""
        now = self._clock()
        if self._epochs:
            self._epochs[-1].seconds = now - self._epochs[-1].began
        self._epochs.append(_Epoch(now, self._cpu()))
        self.is_waiting = True

    def request_batch(self) -> None:
        """A step begins with the request for its batch."""
        if self.is_waiting:
            self._request_time = self._clock()
        elif self._epochs and not self._epochs[-1].batches:
            # Lightning prefetches the first batch of a loader without a length, so this wait is in no step.
            self._epochs[-1].in_step_s = 0.0

    def receive_first_batch(self) -> None:
        """The first batch of an epoch has come."""
        now, epoch, self.is_waiting = self._clock(), self._epochs[-1], False
        waited_s = now - epoch.began - epoch.validation_s  # a resumed epoch may begin with a validation
        epoch.first_batch_s, epoch.in_step_s = waited_s, min(now - self._request_time, waited_s)
        epoch.idle_s = waited_s - (self._cpu() - epoch.began_cpu)
        if math.isnan(self._start_up_s):
            self._start_up_s = now - self._start - self._validation_s

    def end_batch(self) -> None:
        """A batch was trained."""
        if self._epochs:
            self._epochs[-1].batches += 1

    def begin_validation(self) -> None:
        """A validation begins."""
        self._validation_began = self._clock()

    def end_validation(self) -> None:
        """The validation ends."""
        seconds = self._clock() - self._validation_began
        self.validations.append((self._validation_began, seconds))
        if self._epochs:
            self._epochs[-1].validation_s += seconds

    @property
    def _validation_s(self) -> float:
        return sum(seconds for _, seconds in self.validations)

    def result(self, trainer: Trainer, steps_s: float) -> dict[str, Any]:
        """Return the facts for the run's summary at the end of the fit, given the seconds of all steps.

        `fit_parts_s` has the seconds of rank 0 by the names in records/course.py; they add up to the fit. `epoch` has medians over the
        whole epochs after the first, if there are any: their `seconds`, with validation, and the wait `first_batch_s`. Where
        starting workers takes a noticeable part of them, it also has `starting_workers_s` and the `advice` to keep the workers.
        """
        now = self._clock()
        if self._epochs:
            self._epochs[-1].seconds = now - self._epochs[-1].began
        with_batches = [epoch for epoch in self._epochs if not math.isnan(epoch.first_batch_s)]
        later_epochs = [epoch for epoch in with_batches if epoch is not self._epochs[0]]
        parts = {
            START_UP: now - self._start - self._validation_s if math.isnan(self._start_up_s) else self._start_up_s,
            STEPS: max(0.0, steps_s - sum(epoch.in_step_s for epoch in with_batches)),
            VALIDATION: self._validation_s,
            FIRST_BATCH: sum(epoch.first_batch_s for epoch in later_epochs),
        }
        parts[OTHER] = max(0.0, now - self._start - sum(parts.values()))
        most_batches = max((epoch.batches for epoch in self._epochs), default=0)
        whole_epochs = [epoch for epoch in later_epochs if epoch.batches >= _WHOLE * most_batches]
        if not whole_epochs:
            return {"fit_parts_s": parts}
        workers, option = started_workers(trainer)
        medians: dict[str, Any] = {"seconds": statistics.median(epoch.seconds for epoch in whole_epochs)}
        medians["first_batch_s"] = statistics.median(epoch.first_batch_s for epoch in whole_epochs)
        starting_s = statistics.median(epoch.starting_s(workers) for epoch in whole_epochs)
        if option and starting_s >= _NOTICEABLE * medians["seconds"]:
            medians |= {"starting_workers_s": starting_s, "advice": option}
        return {"fit_parts_s": parts, "epoch": medians}


def started_workers(trainer: Trainer) -> tuple[int, str]:
    """Return how many workers a DataLoader starts in each epoch, and the option that keeps them; 0 where none can be kept.

    A stream restarts in each epoch even in persistent workers, and `reload_dataloaders_every_n_epochs` makes new loaders.
    """
    loaders = [loader for loader in tree_leaves(trainer.train_dataloader) if isinstance(loader, DataLoader)]
    is_stream = any(isinstance(loader.dataset, IterableDataset) for loader in loaders)
    workers = max((loader.num_workers for loader in loaders if not loader.persistent_workers), default=0)
    if not workers or is_stream or cast(Any, trainer).reload_dataloaders_every_n_epochs:
        return 0, ""
    config: Mapping[str, Any] = program_config(trainer.lightning_module) or {}
    is_option = "persistent_workers" in config.get("data", {})
    return workers, "data.persistent_workers=true" if is_option else "DataLoader(persistent_workers=True)"
