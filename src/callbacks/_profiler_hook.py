"""Observe through a trainer's profiler when the parts of a step begin and end, in any Lightning project."""

import contextlib
from collections.abc import Callable, Container
from typing import Any, Self

from lightning import Trainer
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from typing_extensions import override

from .._lightning import profiler_of, set_profiler

Listener = Callable[[str], None]
_NOTHING = contextlib.nullcontext()


class ProfilerHook(Profiler):
    """Stands in for a trainer's profiler, calls the listeners, and forwards every call to that profiler.

    The listeners get the last part of an action's name: `training_step` of `[Strategy]….training_step`.
    """

    def __init__(self, inner: Profiler, actions: Container[str], started: Listener, stopped: Listener):
        super().__init__(getattr(inner, "dirpath", None), getattr(inner, "filename", None))
        self._inner = inner
        self._forward = not isinstance(inner, PassThroughProfiler)
        self._actions = actions
        self._started = started
        self._stopped = stopped
        self._spans: dict[str, _Span | None] = {}  # by action name; None for an action without listeners
        self._is_attached = True

    def __getattr__(self, name: str) -> Any:
        """What a user's profiler has beyond Lightning's interface."""
        if name == "_inner":  # before `__init__`, as in a copy
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __del__(self) -> None:
        """Do nothing: Lightning's own would tear down the trainer's profiler, which is still in use."""

    @classmethod
    def attach(cls, trainer: Trainer, actions: Container[str], started: Listener, stopped: Listener) -> Self:
        """Call the listeners with an action's name when it begins and ends, until `detach`."""
        hook = cls(profiler_of(trainer), actions, started, stopped)
        set_profiler(trainer, hook)
        return hook

    def detach(self, trainer: Trainer) -> None:
        """Call the listeners no more. A hook below one that was attached later forwards until that one is detached."""
        self._is_attached, self._actions = False, ()
        self._spans.clear()
        profiler = profiler_of(trainer)
        while isinstance(profiler, ProfilerHook) and not profiler._is_attached:
            profiler = profiler._inner
        set_profiler(trainer, profiler)

    @override
    def profile(self, action_name: str) -> Any:
        if self._forward:
            return super().profile(action_name)
        return self._span(action_name) or _NOTHING  # a few dozen times a step: as cheap as can be

    @override
    def start(self, action_name: str) -> None:
        if self._forward:
            self._inner.start(action_name)
        if span := self._span(action_name):
            span.__enter__()

    @override
    def stop(self, action_name: str) -> None:
        if span := self._span(action_name):
            span.__exit__()
        if self._forward:
            self._inner.stop(action_name)

    def _span(self, action_name: str) -> "_Span | None":
        try:
            return self._spans[action_name]
        except KeyError:
            name = action_name.rpartition(".")[2]
            span = _Span(name, self._started, self._stopped) if name in self._actions else None
            return self._spans.setdefault(action_name, span)

    @override
    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        self._inner.setup(stage, local_rank, log_dir)

    @override
    def teardown(self, stage: str | None) -> None:
        self._inner.teardown(stage)

    @override
    def summary(self) -> str:
        return self._inner.summary()

    @override
    def describe(self) -> None:
        self._inner.describe()


class _Span:
    """An action as a context manager. It has no state, so one object serves every step."""

    __slots__ = ("_name", "_started", "_stopped")

    def __init__(self, name: str, started: Listener, stopped: Listener):
        self._name = name
        self._started = started
        self._stopped = stopped

    def __enter__(self) -> None:
        self._started(self._name)

    def __exit__(self, *_: object) -> None:
        self._stopped(self._name)
