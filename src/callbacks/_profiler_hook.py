"""Hear through a trainer's profiler when the parts of a step begin and end, in any Lightning project."""

import contextlib
from collections.abc import Callable, Container, Iterator
from functools import lru_cache
from typing import Any, cast

from lightning import Trainer
from lightning.pytorch.profilers import PassThroughProfiler

from .._lightning import profiler_of

Listener = Callable[[str], None]


class ProfilerHook:
    """Takes the place of a trainer's profiler, which it calls, until `detach`.

    The listeners get the last part of the name of an action: `training_step` of `[Strategy]….training_step`.
    """

    _profiler: Any = None  # the trainer's own; None of a copy that is being made

    def __init__(self, trainer: Trainer, actions: Container[str], started: Listener, stopped: Listener):
        self._trainer, self._profiler = cast(Any, trainer), profiler_of(trainer)
        self._actions, self._started, self._stopped = actions, started, stopped
        # Lightning announces some 130 actions a step, of which about ten are heard; a user may count in names of theirs.
        self._silence = lru_cache(1000)(self._silent)
        self._trainer.profiler = self

    def __getattr__(self, name: str) -> Any:
        """What else a profiler has."""
        return getattr(self._profiler, name)

    def detach(self) -> None:
        """Hear no more, and give the trainer its own profiler back."""
        self._actions = ()
        # A hook below this one may have ended first.
        while isinstance(hook := profiler_of(self._trainer), ProfilerHook) and not hook._actions:
            self._trainer.profiler = hook._profiler

    def start(self, action_name: str) -> None:
        """As a profiler has it."""
        self._profiler.start(action_name)
        self._tell(self._started, action_name)

    def stop(self, action_name: str) -> None:
        """As a profiler has it."""
        self._tell(self._stopped, action_name)
        self._profiler.stop(action_name)

    def profile(self, action_name: str) -> contextlib.AbstractContextManager[Any]:
        """As a profiler has it."""
        return self._silence(action_name) or self._around(action_name)

    def _silent(self, action_name: str) -> contextlib.AbstractContextManager[Any] | None:
        """The context of an action in which nobody has anything to do, which is used again; None of any other."""
        is_alone = type(self._profiler) is PassThroughProfiler
        is_heard = action_name.rpartition(".")[2] in self._actions
        return contextlib.nullcontext(action_name) if is_alone and not is_heard else None

    @contextlib.contextmanager
    def _around(self, action_name: str) -> Iterator[Any]:
        with self._profiler.profile(action_name) as given:
            self._tell(self._started, action_name)
            try:
                yield given
            finally:
                self._tell(self._stopped, action_name)

    def _tell(self, listener: Listener, action_name: str) -> None:
        name = action_name.rpartition(".")[2]
        if name in self._actions:
            listener(name)
