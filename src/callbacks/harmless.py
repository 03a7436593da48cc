"""Measuring must not end a training: a hook that fails gives up, with one warning, and the run goes on."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Protocol

from lightning.pytorch.utilities import rank_zero_warn


class GivesUp(Protocol):
    """A callback that measures."""

    def give_up(self) -> None:
        """Measure no more in this fit; release what is held."""


def harmless(hook: Callable[..., None]) -> Callable[..., None]:
    """Decorate a callback's hook: whatever it raises becomes one warning and the callback's `give_up`."""

    @functools.wraps(hook)
    def guarded(self: GivesUp, *args: Any, **kwargs: Any) -> None:
        try:
            hook(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - a measurement must not end a run
            self.give_up()
            with contextlib.suppress(Warning):  # where warnings are errors
                rank_zero_warn(f"{type(self).__name__} stopped measuring: {type(error).__name__}: {error}")

    return guarded
