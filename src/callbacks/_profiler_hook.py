"""Learn from a trainer's profiler when the parts of a step begin and end, in any Lightning project."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, cast

from lightning import Trainer
from lightning.pytorch.profilers import PassThroughProfiler

from .._lightning import profiler_of, skip_empty_hooks

Listeners = tuple[Callable[[], None], Callable[[], None]]  # called at the start and at the end of an action


class ProfilerHook:
    """Replaces a trainer's profiler until `detach`, and forwards every call to it.

    Actions are keyed by the last part of their names: `training_step` for `[Strategy]….training_step`.
    """

    _profiler: Any = None  # the trainer's own; None while a copy is being made

    def __init__(self, trainer: Trainer, actions: Mapping[str, Listeners]):
        self._trainer, self._profiler = cast(Any, trainer), profiler_of(trainer)
        self._actions = actions
        # Lightning profiles some 20 actions a step and 6 for each callback, of which about ten have listeners. With a
        # profiler that ignores actions the contexts are cached. The cache is bounded: a user's action names may have counters.
        is_silent = type(self._profiler) is PassThroughProfiler
        self._context = lru_cache(1000)(self._listener_context) if is_silent else self._profile_and_listen
        self._call_all_hooks = skip_empty_hooks(trainer) if is_silent else lambda: None
        self._trainer.profiler = self

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the trainer's own profiler."""
        return getattr(self._profiler, name)

    def detach(self) -> None:
        """Stop listening, and restore the trainer's own profiler."""
        self._call_all_hooks()
        self._actions, self._context = {}, self._profile_and_listen
        # A hook that this one replaced may have been detached earlier.
        while isinstance(hook := profiler_of(self._trainer), ProfilerHook) and not hook._actions:
            self._trainer.profiler = hook._profiler

    def start(self, action_name: str) -> None:
        """Start an action, as `Profiler.start` does."""
        self._profiler.start(action_name)
        if listeners := self._find_listeners(action_name):
            listeners[0]()

    def stop(self, action_name: str) -> None:
        """Stop an action, as `Profiler.stop` does."""
        if listeners := self._find_listeners(action_name):
            listeners[1]()
        self._profiler.stop(action_name)

    def profile(self, action_name: str) -> contextlib.AbstractContextManager[Any]:
        """Return the context of an action, as `Profiler.profile` does."""
        return self._context(action_name)

    def _find_listeners(self, action_name: str) -> Listeners | None:
        return self._actions.get(action_name.rpartition(".")[2])

    @contextlib.contextmanager
    def _profile_and_listen(self, action_name: str) -> Iterator[Any]:
        with self._profiler.profile(action_name) as value, self._listener_context(action_name):
            yield value

    def _listener_context(self, action_name: str) -> contextlib.AbstractContextManager[Any]:
        listeners = self._find_listeners(action_name)
        return _ListenerContext(action_name, listeners) if listeners else contextlib.nullcontext(action_name)


class _ListenerContext:
    """Calls an action's listeners; a generator-based context would take 15 µs of a step."""

    def __init__(self, action_name: str, listeners: Listeners):
        self._action_name = action_name
        self._on_start, self._on_stop = listeners

    def __enter__(self) -> str:
        self._on_start()
        return self._action_name

    def __exit__(self, *error: object) -> None:
        self._on_stop()
