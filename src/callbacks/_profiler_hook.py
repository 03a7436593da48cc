"""Hear through a trainer's profiler when the parts of a step begin and end, in any Lightning project."""

import contextlib
from collections.abc import Callable, Container, Iterator
from functools import lru_cache
from typing import Any

from lightning import Trainer
from lightning.pytorch.profilers import PassThroughProfiler, Profiler

from .._lightning import profiler_of

Listener = Callable[[str], None]
_METHODS = ("start", "stop", "profile")


class ProfilerHook:
    """Takes the place of three methods of a trainer's profiler, which it calls, until `detach`.

    The listeners get the last part of the name of an action: `training_step` of `[Strategy]….training_step`.
    """

    def __init__(self, trainer: Trainer, actions: Container[str], started: Listener, stopped: Listener):
        self._profiler = profiler = profiler_of(trainer)
        self._actions, self._started, self._stopped = actions, started, stopped
        self._start, self._stop, self._profile, own = profiler.start, profiler.stop, profiler.profile, vars(profiler)
        self._before = {name: own[name] for name in _METHODS if name in own}  # of another hook
        self._last = ""  # the action of the last `start`
        # Lightning announces some 130 actions a step, of which about ten are heard; a user may count in names of theirs.
        is_lightnings = type(profiler).profile is Profiler.profile
        hooked = (self._hear_start, self._hear_stop, lru_cache(1000)(self._context) if is_lightnings else self._around)
        own.update(zip(_METHODS, hooked, strict=True))

    def detach(self) -> None:
        """Hear no more, and give the profiler its own methods back."""
        self._actions, own = (), vars(self._profiler)
        # A hook below this one may have ended first.
        while isinstance(hook := getattr(own.get("start"), "__self__", None), ProfilerHook) and not hook._actions:
            for name in _METHODS:
                del own[name]
            own.update(hook._before)

    def _hear_start(self, action_name: str) -> None:
        self._start(action_name)
        self._last = action_name
        self._tell(self._started, action_name)

    def _hear_stop(self, action_name: str) -> None:
        self._tell(self._stopped, action_name)
        self._stop(action_name)

    def _tell(self, listener: Listener, action_name: str) -> None:
        name = action_name.rpartition(".")[2]
        if name in self._actions:
            listener(name)

    @contextlib.contextmanager
    def _around(self, action_name: str) -> Iterator[Any]:
        """A `profile` of the profiler's own, which may call `start` and `stop`, as Lightning's does, or not."""
        self._last = ""
        with self._profile(action_name) as given:
            is_told = self._last == action_name
            if not is_told:
                self._tell(self._started, action_name)
            try:
                yield given
            finally:
                if not is_told:
                    self._tell(self._stopped, action_name)

    def _context(self, action_name: str) -> Any:
        is_alone = type(self._profiler) is PassThroughProfiler and not self._before
        is_heard = action_name.rpartition(".")[2] in self._actions
        return _Action(self, action_name) if is_heard or not is_alone else contextlib.nullcontext(action_name)


class _Action:
    """The context of one action, which is used again whenever Lightning announces it."""

    def __init__(self, hook: ProfilerHook, action_name: str):
        self._hook, self._action = hook, action_name

    def __enter__(self) -> str:
        self._hook._hear_start(self._action)
        return self._action

    def __exit__(self, *error: object) -> None:
        self._hook._hear_stop(self._action)
