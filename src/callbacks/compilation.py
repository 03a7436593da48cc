"""CompilationWatch: what torch.compile did in a fit, and the time that it took, which is in no step and no rate."""

import contextlib
import time
from collections.abc import Callable
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from .._torch import compilations, watch_compilation
from ..records.formatting import count, significant
from ._never_raise import never_raise
from ._recording import is_compiled_module
from ._timer import pause


class CompilationWatch(Callback):
    """Excludes the time in which torch.compile compiles from the steps and the rates of whoever times them.

    The module, or a part of it, has to be compiled by `torch.compile` before training starts; otherwise nothing is watched.
    After the fit `facts` has the seconds, the graphs that were compiled, and the graph breaks.
    """

    observes_only = True

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self._end_watch: Callable[[], None] | None = None

    def record_facts(self) -> dict[str, Any]:
        """For the run's record: the facts, as `compilation`; None where nothing was compiled."""
        return {"compilation": self.facts or None}

    def detail_lines(self) -> list[str]:
        """For the details of a run: what was compiled, and for how long."""
        if not self.facts:
            return []
        graphs, breaks = (
            count(self.facts[key], key.rstrip("s").replace("_", " ")) for key in ("graphs", "graph_breaks")
        )
        taken = significant(self.facts["seconds"])
        return [
            f"compiled {graphs} with {breaks} in {taken} s, which are in no rate; only whole training batches run it"
        ]

    @override
    @never_raise
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.disable()
        self.facts = {}
        if not is_compiled_module(pl_module):
            return
        before, began = compilations(), 0.0
        excluded, self._seconds = contextlib.ExitStack(), 0.0

        def start() -> None:
            nonlocal began
            began = time.perf_counter()
            excluded.enter_context(pause(trainer))

        def end() -> None:
            excluded.close()
            self._seconds += time.perf_counter() - began
            counts = {key: number - before[key] for key, number in compilations().items()}
            self.facts = {"seconds": round(self._seconds, 3), **counts}

        self._end_watch = watch_compilation(start, end)

    @override
    @never_raise
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.disable()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.disable()

    def disable(self) -> None:
        """Watch no more in this fit."""
        if self._end_watch is not None:
            self._end_watch()
            self._end_watch = None
