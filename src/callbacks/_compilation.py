"""What torch.compile did in a fit, and the time that it took, which is in no step and no rate."""

import contextlib
import time
from collections.abc import Callable
from typing import Any

from lightning import LightningModule, Trainer

from .._torch import compilations, watch_compilation
from ..records.formatting import count, significant
from ._recording import is_compiled_module
from ._timer import pause


class Compilation:
    """Excludes the time in which torch.compile compiles from the steps and the rates of whoever times them.

    The module, or a part of it, has to be compiled by `torch.compile` before training starts; otherwise nothing is watched.
    `facts` has the seconds, the graphs that were compiled, and the graph breaks.

    Args:
        trainer, module: of the fit that begins.
    """

    def __init__(self, trainer: Trainer, module: LightningModule):
        self.facts: dict[str, Any] = {}
        self._end_watch: Callable[[], None] | None = None
        if not is_compiled_module(module):
            return
        before, began, seconds = compilations(), 0.0, 0.0
        excluded = contextlib.ExitStack()

        def start() -> None:
            nonlocal began
            began = time.perf_counter()
            excluded.enter_context(pause(trainer))

        def end() -> None:
            nonlocal seconds
            excluded.close()
            seconds += time.perf_counter() - began
            counts = {key: number - before[key] for key, number in compilations().items()}
            self.facts = {"seconds": round(seconds, 3), **counts}

        self._end_watch = watch_compilation(start, end)

    def stop(self) -> None:
        """Watch no more."""
        if self._end_watch is not None:
            self._end_watch()
            self._end_watch = None

    def lines(self) -> list[str]:
        """What was compiled, and for how long."""
        if not self.facts:
            return []
        words = {key: key.rstrip("s").replace("_", " ") for key in ("graphs", "graph_breaks")}
        graphs, breaks = (count(self.facts[key], word) for key, word in words.items())
        taken = significant(self.facts["seconds"])
        return [f"compiled {graphs} with {breaks} in {taken} s, which are in no rate"]
