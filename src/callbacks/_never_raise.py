"""Keep a failing measurement from ending a training: its callback is disabled with one warning."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn


def never_raise(hook: Callable[..., None]) -> Callable[..., None]:
    """Decorate a callback's hook: an exception in it becomes one warning and a call of the callback's `disable`."""

    @functools.wraps(hook)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            hook(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - a measurement must not end a run
            self.disable()
            with contextlib.suppress(Warning):  # where warnings are errors
                rank_zero_warn(f"{type(self).__name__} stopped measuring: {type(error).__name__}: {error}")

    return guarded
