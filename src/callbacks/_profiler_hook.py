"""Observe through a trainer's profiler when the parts of a step begin and end, in any Lightning project."""

import contextlib
from collections.abc import Callable, Container
from contextlib import AbstractContextManager
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
        self._actions = actions
        self._started = started
        self._stopped = stopped
        # Lightning announces some 130 actions a step, of which a step has seven parts, and most trainers have no profiler.
        self._is_alone = type(inner) is PassThroughProfiler
        self._names: dict[str, str] = {}  # an action's full name → its last part, empty for one that nobody listens to

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
        """Call the listeners no more, and give the trainer its profiler back."""
        self._actions = ()
        self._names.clear()
        # A hook below this one may have ended first.
        while isinstance(hook := profiler_of(trainer), ProfilerHook) and not hook._actions:
            set_profiler(trainer, hook._inner)

    @override
    def profile(self, action_name: str) -> AbstractContextManager[Any]:
        if self._is_alone and not self._name(action_name):
            return _NOTHING
        return super().profile(action_name)

    @override
    def start(self, action_name: str) -> None:
        self._inner.start(action_name)
        if name := self._name(action_name):
            self._started(name)

    @override
    def stop(self, action_name: str) -> None:
        if name := self._name(action_name):
            self._stopped(name)
        self._inner.stop(action_name)

    def _name(self, action_name: str) -> str:
        name = self._names.get(action_name)
        if name is None:
            last = action_name.rpartition(".")[2]
            name = self._names[action_name] = last if last in self._actions else ""
        return name

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
