"""Hear through a trainer's profiler when the parts of a step begin and end, in any Lightning project."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, cast

from lightning import Trainer
from lightning.pytorch.profilers import PassThroughProfiler

from .._lightning import profiler_of, skip_empty_hooks

Listeners = tuple[Callable[[], None], Callable[[], None]]  # of the begin and of the end of an action


class ProfilerHook:
    """Takes the place of a trainer's profiler, which it calls, until `detach`.

    The actions have the last part of their names: `training_step` of `[Strategy]….training_step`.
    """

    _profiler: Any = None  # the trainer's own; None of a copy that is being made

    def __init__(self, trainer: Trainer, actions: Mapping[str, Listeners]):
        self._trainer, self._profiler = cast(Any, trainer), profiler_of(trainer)
        self._actions = actions
        # Lightning announces some 20 actions a step and 6 for each callback, of which about ten are heard. Of a profiler that makes
        # nothing of them the contexts are used again; a user may count in names of theirs.
        is_silent = type(self._profiler) is PassThroughProfiler
        self._context = lru_cache(1000)(self._told) if is_silent else self._around
        self._call_all_hooks = skip_empty_hooks(trainer) if is_silent else lambda: None
        self._trainer.profiler = self

    def __getattr__(self, name: str) -> Any:
        """What else a profiler has."""
        return getattr(self._profiler, name)

    def detach(self) -> None:
        """Hear no more, and give the trainer its own profiler back."""
        self._call_all_hooks()
        self._actions, self._context = {}, self._around
        # A hook below this one may have ended first.
        while isinstance(hook := profiler_of(self._trainer), ProfilerHook) and not hook._actions:
            self._trainer.profiler = hook._profiler

    def start(self, action_name: str) -> None:
        """As a profiler has it."""
        self._profiler.start(action_name)
        if listeners := self._listeners(action_name):
            listeners[0]()

    def stop(self, action_name: str) -> None:
        """As a profiler has it."""
        if listeners := self._listeners(action_name):
            listeners[1]()
        self._profiler.stop(action_name)

    def profile(self, action_name: str) -> contextlib.AbstractContextManager[Any]:
        """As a profiler has it."""
        return self._context(action_name)

    def _listeners(self, action_name: str) -> Listeners | None:
        return self._actions.get(action_name.rpartition(".")[2])

    @contextlib.contextmanager
    def _around(self, action_name: str) -> Iterator[Any]:
        with self._profiler.profile(action_name) as given, self._told(action_name):
            yield given

    def _told(self, action_name: str) -> contextlib.AbstractContextManager[Any]:
        listeners = self._listeners(action_name)
        return _Heard(action_name, listeners) if listeners else contextlib.nullcontext(action_name)


class _Heard:
    """The context of a heard action: a generator for each of them would take 15 µs of a step."""

    def __init__(self, action_name: str, listeners: Listeners):
        self._action = action_name
        self._started, self._stopped = listeners

    def __enter__(self) -> str:
        self._started()
        return self._action

    def __exit__(self, *error: object) -> None:
        self._stopped()
