"""Work that callbacks do within a step, and that whoever times the steps excludes from the step."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary

from lightning import Trainer

from ._stopwatch import PAUSE, WRITING

Exclusion = Callable[[str], AbstractContextManager[Any]]

_exclusions: WeakKeyDictionary[Trainer, list[Exclusion]] = WeakKeyDictionary()


def add_exclusion(trainer: Trainer, exclusion: Exclusion) -> None:
    """Have every `writing(trainer)` and `measuring(trainer)` happen within `exclusion(WRITING)` or `exclusion(PAUSE)`."""
    remove_exclusion(trainer, exclusion)  # it may remain from a fit that ended early
    _exclusions.setdefault(trainer, []).append(exclusion)


def remove_exclusion(trainer: Trainer, exclusion: Exclusion) -> None:
    """Undo `add_exclusion`, if it was called."""
    with contextlib.suppress(KeyError, ValueError):
        _exclusions[trainer].remove(exclusion)


def writing(trainer: Trainer) -> AbstractContextManager[None]:
    """The time in which a callback computes and writes many steps at once. May be nested.

    Otherwise every hundredth step would be longer than the others.
    """
    return _excluded(trainer, WRITING)


def measuring(trainer: Trainer) -> AbstractContextManager[None]:
    """The time of work that is done once, such as compiling. It is excluded from the fit's rate, too.

    Otherwise the first step would be longer than the others, and a short fit slower than a long one.
    """
    return _excluded(trainer, PAUSE)


@contextlib.contextmanager
def _excluded(trainer: Trainer, part: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for exclusion in _exclusions.get(trainer, ()):
            stack.enter_context(exclusion(part))
        yield
