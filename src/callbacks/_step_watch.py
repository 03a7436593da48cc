"""Record the operations of a few training steps, in the run itself, as the evidence for its bottleneck."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median

from lightning import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from .._lightning import compiler_context
from .._torch import any_mode, end_mode, has_compiled, is_compiled
from ..errors import in_one_line
from ..hardware.operations import Operation, OperationRecorder

FIRST, LAST = 2, 4  # the updates that are watched: the first one pays for one-time work
AGAIN = 16  # the first update at which it is asked whether the steps have changed
CHANGED = 1.5  # a factor between the time of a step then and now
_PLAIN = 5  # steps in a row that are compared
Range = tuple[float, float]  # seconds of the shortest of these, and of the longest but one


class StepWatch:
    """Watches the updates `FIRST` to `LAST` of a fit. A watched step is slower, and no rate is read from it.

    Steps may change: sequences grow, layers are unfrozen. At the updates 16, 32, 64, … the last steps that were not
    watched are compared with those right after the last watch. If they differ by `CHANGED`, this update and the next one
    are watched, too. Of all watches the one counts after which steps took most nearly as long as the fit's median step.

    A compiled module is not watched, because torch.compile runs nothing compiled under a recorder. Nor is a module whose
    parameters are sharded.
    """

    def __init__(self, wanted: bool):
        self._wanted = wanted
        self._recorder = OperationRecorder()
        self._watches = self._active = self._is_compiled = False
        self._update = 0  # the last that was watched
        self._begun = 0  # the last that was begun
        self._last = LAST  # of the present watch
        self._moments: deque[float] = deque(maxlen=_PLAIN + 1)  # at which the last plain updates began
        self._done: list[tuple[Range | None, Sequence[Operation]]] = []  # earlier watches, and the steps after each
        self._after: Range | None = None  # the steps after the present watch
        self._watched_at = 0.0  # the moment at which its last update began
        self._longest = 0.0  # seconds that this update took

    def attach(
        self, trainer: Trainer, module: LightningModule, cache_bytes: int | None, part: Callable[[], str]
    ) -> None:
        """Forget an earlier fit, and prepare for the trainer's."""
        self._new_recorder = lambda: OperationRecorder(module, cache_bytes, part)
        self._recorder = self._new_recorder()
        self._watches = self._wanted and can_be_watched(trainer, module)
        self._is_compiled = self._wanted and is_compiled_module(module)
        self._update = self._begun = 0
        self._last, self._after = LAST, None
        self._moments.clear()
        self._done.clear()

    @property
    def last(self) -> int:
        """The last update that is watched; 0 if none is."""
        return LAST if self._watches else 0

    @property
    def active(self) -> bool:
        """Whether operations are being recorded."""
        return self._active

    def start(self, update: int) -> None:
        """Begin to record a batch, if it is of an update that is watched; the first update is 1."""
        if not self._watches or self._active:
            return
        if update > self._last:
            self._follow(update)
        if not FIRST <= update <= self._last or has_compiled():
            return
        if any_mode():  # of another callback, which may end within the step, and would end this one instead
            return
        if update != self._update:
            self._recorder.next_step()
            self._update, self._watched_at = update, time.perf_counter()
        self._recorder.__enter__()
        self._active = True

    def _follow(self, update: int) -> None:
        """Note when a plain update begins, and begin another watch where the steps have changed."""
        if update == self._begun:  # another batch of it
            return
        self._begun = update
        if not self._moments:
            self._longest = time.perf_counter() - self._watched_at
        self._moments.append(time.perf_counter())
        if len(self._moments) <= _PLAIN or (self._after is not None and (update < AGAIN or update & (update - 1))):
            return
        taken = sorted(end - start for start, end in pairwise(self._moments))
        if self._after is None:
            # A watched step is slower than it would be. One that was shorter than those after it did less.
            self._after = (min(taken[0], self._longest), min(taken[-2], self._longest))
        elif _apart(_factor(median(taken), self._after)) > CHANGED:
            self._done.append((self._after, self._recorder.operations()))
            self._recorder, self._after, self._last = self._new_recorder(), None, update + 1
            self._moments.clear()

    def stop(self) -> None:
        """End the recording of a batch, also where the step has left modes of its own behind."""
        if self._active:
            self._active = False
            end_mode(self._recorder)

    @property
    def reason(self) -> str | None:
        """Why nothing was recorded; None where something was."""
        if self._recorder.error is not None:
            return in_one_line(self._recorder.error)
        if any(self._recorder.steps) or self._done:
            return None
        if not self._wanted:
            return "record_operations=False"
        if self._is_compiled:
            return "torch.compile runs nothing compiled under a recorder"
        if not self._watches:
            return "the parameters are sharded"
        if has_compiled():
            return "this process has used torch.compile"
        return f"recording begins with update {FIRST}"

    def operations(self, step_s: float | None = None) -> tuple[Sequence[Operation], float]:
        """The operations of a step, and by which factor a step of so many seconds took longer than those after the watch.

        There are none where no step was watched, or where the recorder failed. The factor is 1 where it is not known.
        """
        watches = [*self._done, (self._after, self._recorder.operations())]
        known = [(_factor(step_s, after), found) for after, found in watches if step_s and after and found]
        if not known:
            return watches[-1][1], 1.0
        factor, operations = min(known, key=lambda each: _apart(each[0]))
        return operations, factor


def _factor(seconds: float, steps: Range) -> float:
    """By which factor a step is longer than the longest of these, or shorter than the shortest; 1 between them."""
    shortest, longest = steps
    return seconds / min(max(seconds, shortest), longest)


def _apart(factor: float) -> float:
    """The same for a factor and its inverse: at least 1."""
    return max(factor, 1 / factor)


def can_be_watched(trainer: Trainer, module: LightningModule) -> bool:
    """Whether a recorder sees the operations that would run without it: neither compiled nor sharded ones."""
    return type(trainer.strategy) in (SingleDeviceStrategy, DDPStrategy) and not is_compiled_module(module)


def is_compiled_module(module: LightningModule) -> bool:
    """Whether torch.compile has compiled a module or a part of it."""
    return compiler_context(module) is not None or any(map(is_compiled, module.modules()))
