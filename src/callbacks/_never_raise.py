"""Keep a failing measurement from ending a training: its callback is disabled with one warning."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from ..errors import UserError, in_one_line


class ArgumentError(UserError):
    """A user's argument cannot be used: this error passes `never_raise`, and ends the run."""


def never_raise(hook: Callable[..., None]) -> Callable[..., None]:
    """Decorate a callback's hook: an exception in it becomes one warning and a call of the callback's `disable`.

    The callback's attribute `failure` then describes the exception. `ArgumentError` is raised.
    """

    @functools.wraps(hook)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            hook(self, *args, **kwargs)
        except ArgumentError:
            raise
        except Exception as error:  # noqa: BLE001 - a measurement must not end a run
            self.disable()
            failure = in_one_line(error)
            self.failure = getattr(self, "failure", None) or failure  # the first failure causes the others
            with contextlib.suppress(Warning):  # where warnings are errors
                rank_zero_warn(f"{type(self).__name__} stopped measuring: {failure}")

    return guarded
