"""Keep a failing measurement from ending a training: its callback is disabled with one warning."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Protocol

from lightning.pytorch.utilities import rank_zero_warn


class SupportsDisable(Protocol):
    """A callback that measures."""

    def disable(self) -> None:
        """Measure no more in this fit, and release what is held."""


def never_raise(hook: Callable[..., None]) -> Callable[..., None]:
    """Decorate a callback's hook: an exception in it becomes one warning and a call of the callback's `disable`."""

    @functools.wraps(hook)
    def guarded(self: SupportsDisable, *args: Any, **kwargs: Any) -> None:
        try:
            hook(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - a measurement must not end a run
            self.disable()
            with contextlib.suppress(Warning):  # where warnings are errors
                rank_zero_warn(f"{type(self).__name__} stopped measuring: {type(error).__name__}: {error}")

    return guarded
