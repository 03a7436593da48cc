"""Hearing from Lightning's own profiler hooks when the parts of a step begin and end, in any project."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import lightning
from lightning.pytorch.profilers import PassThroughProfiler, Profiler

Listener = Callable[[str], None]
_NOTHING = contextlib.nullcontext()


class ProfilerTap(Profiler):
    """Stands in for a trainer's profiler, tells two listeners what it hears, and passes everything on.

    Args:
        inner: the profiler that the user chose.
        names: the endings of action names worth telling, `training_step` for `[Strategy]….training_step`.
        started, stopped: called with the ending.
    """

    def __init__(self, inner: Profiler, names: frozenset[str], started: Listener, stopped: Listener):
        super().__init__()
        self.inner = inner
        self._inner = None if isinstance(inner, PassThroughProfiler) else inner
        self._names = names
        self._started = started
        self._stopped = stopped
        # A few dozen action names come again at every step; those of no interest have None.
        self._spans: dict[str, _Span | None] = {}

    def profile(self, action_name: str) -> AbstractContextManager[Any]:
        """As the base class; but an action that nobody listens to, as most are, costs next to nothing."""
        if self._inner is not None:
            return super().profile(action_name)
        return self._span(action_name) or _NOTHING

    def start(self, action_name: str) -> None:
        """An action begins."""
        if self._inner is not None:
            self._inner.start(action_name)
        span = self._span(action_name)
        if span is not None:
            self._started(span.ending)

    def stop(self, action_name: str) -> None:
        """An action ends."""
        span = self._span(action_name)
        if span is not None:
            self._stopped(span.ending)
        if self._inner is not None:
            self._inner.stop(action_name)

    def _span(self, action_name: str) -> "_Span | None":
        try:
            return self._spans[action_name]
        except KeyError:
            ending = action_name.rpartition(".")[2]
            span = _Span(ending, self._started, self._stopped) if ending in self._names else None
            self._spans[action_name] = span
            return span

    def setup(self, *args: object, **kwargs: object) -> None:
        """Passed on, as all below."""
        self.inner.setup(*args, **kwargs)

    def teardown(self, *args: object, **kwargs: object) -> None:
        """Passed on."""
        self.inner.teardown(*args, **kwargs)

    def summary(self) -> str:
        """Passed on."""
        return self.inner.summary()

    def describe(self) -> None:
        """Passed on."""
        self.inner.describe()


class _Span:
    """An action as a context; it has no state of its own, so one serves every step."""

    __slots__ = ("_started", "_stopped", "ending")

    def __init__(self, ending: str, started: Listener, stopped: Listener):
        self.ending = ending
        self._started = started
        self._stopped = stopped

    def __enter__(self) -> None:
        self._started(self.ending)

    def __exit__(self, *_: object) -> None:
        self._stopped(self.ending)


def attach_profiler_hook(
    trainer: lightning.Trainer, names: frozenset[str], started: Listener, stopped: Listener
) -> None:
    """Listen to a trainer from now on."""
    trainer.profiler = ProfilerTap(trainer.profiler, names, started, stopped)


def detach_profiler_hook(trainer: lightning.Trainer) -> None:
    """Give the trainer its own profiler back."""
    if isinstance(trainer.profiler, ProfilerTap):
        trainer.profiler = trainer.profiler.inner
