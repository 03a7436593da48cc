"""LearningRateWatch: whether anything but the optimizer and its schedule sets the learning rate."""

import math
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from ..records.formatting import count
from ._never_raise import never_raise


class LearningRateWatch(Callback):
    """Compares the learning rate of every update with the schedule's, or without a schedule with the optimizer's own.

    A learning-rate finder and other callbacks write to the optimizer's parameter groups. The first group is read if its
    rate is a number of the host; a tensor on a device is not read. Checkpoints keep the count for the whole run.

    Attributes:
        changed: of the updates at an unexpected rate: how many (`steps`), the number of the first one (`first_step`),
            its rate (`to`) and the expected one (`from`); empty if there is none.
        last: the rate of the last update if it was unexpected, else None.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self.changed: dict[str, Any] = {}
        self.last: float | None = None
        self._schedulers: dict[int, Any] = {}
        self._steps = 0
        self._active = False

    def record_facts(self) -> dict[str, Any]:
        """For the run's record: what was changed, and the rate of the last update if it was changed."""
        last = {} if self.last is None else {"learning_rate": self.last}
        return {"learning_rate_changed": self.changed or None, **last}

    def summary_lines(self) -> list[str]:
        """For the run's last lines: what was changed."""
        changed = self.changed
        if not changed:
            return []
        kept = [type(scheduler).__name__ for scheduler in self._schedulers.values() if changed["steps"] < self._steps]
        return [
            f"changed the learning rate, by a callback, in {changed['steps']:,} of {count(self._steps, 'step')}: in "
            f"step {changed['first_step']:,} to {changed['to']:.3g} instead of {changed['from']:.3g}"
            + (f"; in the others {kept[0]} set it" if kept else "")
        ]

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":  # what a checkpoint holds is restored after this
            self._reset()

    @override
    @never_raise
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The schedules as they are now: a callback may put another in their place.
        self._schedulers = {id(c.scheduler.optimizer): c.scheduler for c in trainer.lr_scheduler_configs}
        self._active = True

    @override
    @never_raise
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        # This hook is the last moment at which a callback can change the rate of an update.
        lr = optimizer.param_groups[0].get("lr") if self._active else None
        if not isinstance(lr, float | int):
            return
        scheduler = self._schedulers.get(id(optimizer))
        expected = scheduler.get_last_lr()[0] if scheduler else optimizer.defaults["lr"]
        self.last = None if lr == expected else lr
        if lr != expected:
            first = {"steps": 0, "first_step": trainer.global_step + 1, "from": expected, "to": lr}
            self.changed = self.changed or first
            self.changed["steps"] += 1

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps = trainer.global_step

    @override
    def state_dict(self) -> dict[str, int | float]:
        # Numbers alone: a checkpoint is checked against them before it is restored.
        known = self.changed or {"steps": 0, "first_step": 0, "from": 0.0, "to": 0.0}
        return {**known, "last": math.nan if self.last is None else self.last}

    @override
    def load_state_dict(self, state_dict: dict[str, int | float]) -> None:
        changed = {key: state_dict[key] for key in ("steps", "first_step", "from", "to")}
        self.changed = changed if changed["steps"] else {}
        self.last = None if math.isnan(state_dict["last"]) else state_dict["last"]

    def disable(self) -> None:
        """Watch no more in this fit."""
        self._active = False
