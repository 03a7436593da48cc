"""Observe through a trainer's profiler when the parts of a step begin and end, in any Lightning project."""

import contextlib
from collections.abc import Callable, Container
from typing import Any, Self

from lightning import Trainer
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from typing_extensions import override

from .._lightning import profiler_of, set_profiler

Listener = Callable[[str], None]
_MOST = 1000  # names that are kept: a user may count in theirs


class _Action:
    """The context of one action, which is used again whenever Lightning announces it."""

    def __init__(self, hook: "ProfilerHook", action_name: str, heard: str):
        self._hook, self._action, self._heard = hook, action_name, heard

    def __enter__(self) -> str:
        self._hook._inner.start(self._action)
        if self._heard:
            self._hook._started(self._heard)
        return self._action

    def __exit__(self, *error: object) -> None:
        if self._heard:
            self._hook._stopped(self._heard)
        self._hook._inner.stop(self._action)


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
        # By an action's full name: Lightning announces some 130 actions a step, of which about ten are heard.
        self._contexts: dict[str, Any] = {}

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
        self._contexts.clear()
        # A hook below this one may have ended first.
        while isinstance(hook := profiler_of(trainer), ProfilerHook) and not hook._actions:
            set_profiler(trainer, hook._inner)

    @override
    def profile(self, action_name: str) -> Any:  # a context manager
        known = self._contexts.get(action_name)
        return self._add(action_name) if known is None else known

    def _add(self, action_name: str) -> Any:
        if len(self._contexts) >= _MOST:
            self._contexts.clear()
        name = action_name.rpartition(".")[2]
        is_heard, is_alone = name in self._actions, type(self._inner) is PassThroughProfiler
        context = _Action(self, action_name, name if is_heard else "")
        self._contexts[action_name] = context if is_heard or not is_alone else contextlib.nullcontext(action_name)
        return self._contexts[action_name]

    @override
    def start(self, action_name: str) -> None:
        self.profile(action_name).__enter__()

    @override
    def stop(self, action_name: str) -> None:
        self.profile(action_name).__exit__(None, None, None)

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
