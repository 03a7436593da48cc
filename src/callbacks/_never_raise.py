"""Measuring must not end a training: a hook that fails gives up, with one warning, and the run goes on."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Protocol

from lightning.pytorch.utilities import rank_zero_warn


class Disables(Protocol):
    """A callback that measures."""

    def disable(self) -> None:
        """Measure no more in this fit; release what is held."""


def never_raise(hook: Callable[..., None]) -> Callable[..., None]:
    """Decorate a callback's hook: whatever it raises becomes one warning and the callback's `disable`."""

    @functools.wraps(hook)
    def guarded(self: Disables, *args: Any, **kwargs: Any) -> None:
        try:
            hook(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - a measurement must not end a run
            self.disable()
            with contextlib.suppress(Warning):  # where warnings are errors
                rank_zero_warn(f"{type(self).__name__} stopped measuring: {type(error).__name__}: {error}")

    return guarded
