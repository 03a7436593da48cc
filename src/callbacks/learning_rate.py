"""LearningRateWatch: whether something else than the optimizer and its schedule sets the learning rate."""

import math
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback

from ._never_raise import never_raise


class LearningRateWatch(Callback):
    """Compares the learning rate of every update with the schedule's, or with the optimizer's own without a schedule.

    A learning-rate finder and other callbacks write to the optimizer's parameter groups. The optimizer's first group is
    read, which is a number of the host; one that is a tensor on a device is left alone. The count is of the whole run: it
    is kept in checkpoints.

    Attributes:
        changed: of the updates at another rate than expected: how many (`steps`), the number of the first one
            (`first_step`), its rate (`to`) and the expected one (`from`); empty for none.
        last: the rate of the last update if it was such a one, else None.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self.changed: dict[str, Any] = {}
        self.last: float | None = None
        self._schedulers: dict[int, Any] = {}
        self._active = False

    def setup(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        """Begin anew; what a checkpoint holds comes after this."""
        if stage == "fit":
            self._reset()

    @never_raise
    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Keep the schedules as they are now: a callback may put another in their place."""
        self._schedulers = {id(c.scheduler.optimizer): c.scheduler for c in trainer.lr_scheduler_configs}
        self._active = True

    @never_raise
    def on_before_optimizer_step(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """The last moment at which a callback can change the rate of an update."""
        lr = optimizer.param_groups[0].get("lr") if self._active else None
        if not isinstance(lr, float | int):
            return
        scheduler = self._schedulers.get(id(optimizer))
        expected = scheduler.get_last_lr()[0] if scheduler else optimizer.defaults["lr"]
        self.last = None if lr == expected else lr
        if lr != expected:
            self.changed = self.changed or {
                "steps": 0,
                "first_step": trainer.global_step + 1,
                "from": expected,
                "to": lr,
            }
            self.changed["steps"] += 1

    def state_dict(self) -> dict[str, int | float]:
        """The count so far; numbers alone, by which a checkpoint is checked before it is restored."""
        known = self.changed or {"steps": 0, "first_step": 0, "from": 0.0, "to": 0.0}
        return {**known, "last": math.nan if self.last is None else self.last}

    def load_state_dict(self, state_dict: dict[str, int | float]) -> None:
        """The count goes on in a resumed run."""
        changed = {key: state_dict[key] for key in ("steps", "first_step", "from", "to")}
        last = state_dict["last"]
        self.last = None if math.isnan(last) else last
        self.changed = changed if changed["steps"] else {}

    def disable(self) -> None:
        """Watch no more in this fit."""
        self._active = False
