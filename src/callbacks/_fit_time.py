"""FitTimer: where the wall time of a fit goes besides its steps, and with what each epoch begins."""

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
from ._own import own_config

Read = Callable[[], float]
_WHOLE = 0.9  # of the most batches of an epoch: the last epoch of a fit may have fewer
_NOTICEABLE = 0.05  # of an epoch


@dataclass(slots=True)
class _Epoch:
    began: float
    began_cpu: float
    seconds: float = math.nan  # before the next epoch begins
    first_batch_s: float = math.nan  # before it has come
    idle_s: float = 0.0  # of it, in which this thread did not compute
    in_step_s: float = 0.0  # of it, in which a step lasted: the loader starts its workers before
    validation_s: float = 0.0
    batches: int = 0

    def starting_s(self, workers: int) -> float:
        """Of the wait for the first batch at least so much was for starting workers, and not for loading it.

        Each worker has loaded a batch so many `rounds` times more while the epoch lasted, so a batch takes no longer than
        the rest of the epoch divided by these. What this thread computes, such as the order of the samples, starts no worker.
        """
        rounds = (self.batches - 1) // workers if workers else 0
        load_s = (self.seconds - self.first_batch_s - self.validation_s) / rounds if rounds else math.inf
        return max(0.0, self.idle_s - load_s)


class FitTimer:
    """Is told what happens in a fit, by the host's clock.

    Args:
        began: when the fit began; None for now.
        clock: the time.
        cpu: the time in which this thread has computed.
    """

    def __init__(self, began: float | None = None, clock: Read = time.perf_counter, cpu: Read = time.thread_time):
        self._clock, self._cpu = clock, cpu
        self._began = self._asked = clock() if began is None else began
        self._start_up_s = math.nan  # before the first batch has come
        self._epochs: list[_Epoch] = []
        self.is_waiting = False  # for the first batch of an epoch
        self.validations: list[tuple[float, float]] = []  # the beginning and the length of each

    def begin_epoch(self) -> None:
        """The loader is asked for its batches."""
        now = self._clock()
        if self._epochs:
            self._epochs[-1].seconds = now - self._epochs[-1].began
        self._epochs.append(_Epoch(now, self._cpu()))
        self.is_waiting = True

    def ask(self) -> None:
        """A batch is asked for, with which a step begins."""
        if self.is_waiting:
            self._asked = self._clock()
        elif self._epochs and not self._epochs[-1].batches:
            # Of a loader without a length Lightning has fetched the first batch ahead: that wait is in no step.
            self._epochs[-1].in_step_s = 0.0

    def receive(self) -> None:
        """The first batch has come."""
        now, epoch, self.is_waiting = self._clock(), self._epochs[-1], False
        waited_s = now - epoch.began - epoch.validation_s  # a resumed epoch may begin with a validation
        epoch.first_batch_s, epoch.in_step_s = waited_s, min(now - self._asked, waited_s)
        epoch.idle_s = waited_s - (self._cpu() - epoch.began_cpu)
        if math.isnan(self._start_up_s):
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
        self.validations.append((self._validation_began, seconds))
        if self._epochs:
            self._epochs[-1].validation_s += seconds

    @property
    def _validation_s(self) -> float:
        return sum(seconds for _, seconds in self.validations)

    def result(self, trainer: Trainer, steps_s: float) -> dict[str, Any]:
        """For the run's summary, at the end of the fit, given the seconds of all steps.

        `fit_parts_s` are the seconds of rank 0 by the names in records/course.py, which add up to the fit. `epoch` has medians of the
        whole epochs after the first, if there are any: their `seconds`, validation included, the `first_batch_s` with which they
        begin and, where a noticeable part of them is starting workers, `starting_workers_s` and the `advice` that keeps these.
        """
        now = self._clock()
        if self._epochs:
            self._epochs[-1].seconds = now - self._epochs[-1].began
        begun = [epoch for epoch in self._epochs if not math.isnan(epoch.first_batch_s)]
        later = [epoch for epoch in begun if epoch is not self._epochs[0]]
        parts = {
            START_UP: now - self._began - self._validation_s if math.isnan(self._start_up_s) else self._start_up_s,
            STEPS: max(0.0, steps_s - sum(epoch.in_step_s for epoch in begun)),
            VALIDATION: self._validation_s,
            FIRST_BATCH: sum(epoch.first_batch_s for epoch in later),
        }
        parts[OTHER] = max(0.0, now - self._began - sum(parts.values()))
        most = max((epoch.batches for epoch in self._epochs), default=0)
        whole = [epoch for epoch in later if epoch.batches >= _WHOLE * most]
        if not whole:
            return {"fit_parts_s": parts}
        workers, option = started_workers(trainer)
        epoch: dict[str, Any] = {"seconds": statistics.median(each.seconds for each in whole)}
        epoch["first_batch_s"] = statistics.median(each.first_batch_s for each in whole)
        starting_s = statistics.median(each.starting_s(workers) for each in whole)
        if option and starting_s >= _NOTICEABLE * epoch["seconds"]:
            epoch |= {"starting_workers_s": starting_s, "advice": option}
        return {"fit_parts_s": parts, "epoch": epoch}


def started_workers(trainer: Trainer) -> tuple[int, str]:
    """How many workers a DataLoader starts anew in each epoch, and the option that keeps them; 0 where none does, or would.

    A stream begins anew in each epoch in workers that are kept, too, and a loader may be made anew.
    """
    loaders = [each for each in tree_leaves(trainer.train_dataloader) if isinstance(each, DataLoader)]
    is_stream = any(isinstance(loader.dataset, IterableDataset) for loader in loaders)
    workers = max((loader.num_workers for loader in loaders if not loader.persistent_workers), default=0)
    if not workers or is_stream or cast(Any, trainer).reload_dataloaders_every_n_epochs:
        return 0, ""
    config: Mapping[str, Any] = own_config(trainer.lightning_module) or {}
    is_option = "persistent_workers" in config.get("data", {})
    return workers, "data.persistent_workers=true" if is_option else "DataLoader(persistent_workers=True)"
