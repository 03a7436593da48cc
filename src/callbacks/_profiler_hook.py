"""Observe through a trainer's profiler when the parts of a step begin and end, in any Lightning project."""

from collections.abc import Callable, Container
from typing import Any, Self

from lightning import Trainer
from lightning.pytorch.profilers import Profiler
from typing_extensions import override

from .._lightning import profiler_of, set_profiler

Listener = Callable[[str], None]


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
        # A hook below this one may have ended first.
        while isinstance(hook := profiler_of(trainer), ProfilerHook) and not hook._actions:
            set_profiler(trainer, hook._inner)

    @override
    def start(self, action_name: str) -> None:
        self._inner.start(action_name)
        name = action_name.rpartition(".")[2]
        if name in self._actions:
            self._started(name)

    @override
    def stop(self, action_name: str) -> None:
        name = action_name.rpartition(".")[2]
        if name in self._actions:
            self._stopped(name)
        self._inner.stop(action_name)

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
