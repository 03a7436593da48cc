"""A logger that refuses a step before the last one gets every row of a fit: those of callbacks, and Lightning's own."""

import contextlib

import pytest
import torch

from batchscope.callbacks import _in_order
from batchscope.callbacks.curves import TrainCurves
from batchscope.callbacks.device import DeviceMonitor
from batchscope.callbacks.memory import MemoryMonitor
from batchscope.callbacks.noise_scale import NoiseScaleMonitor
from batchscope.hardware import telemetry
from batchscope.hardware.telemetry import RSS
from tests.callbacks.support import monitoring
from tests.support.third_party_modules import Memory, Ordered, Stranger, loader, train


class Logging(Stranger):
    """Logs a number of its own at every seventh step and of every epoch, and may break in a step."""

    def __init__(self, breaks: int | None = None) -> None:
        super().__init__()
        self.breaks = breaks

    def training_step(self, batch, batch_idx: int) -> torch.Tensor:
        if self.global_step == self.breaks:
            raise ConnectionError("the user's own")
        loss = super().training_step(batch, batch_idx)
        self.log("own", loss.detach(), on_step=True, on_epoch=True)
        return loss


class ByHand(Logging):
    """Steps its optimizer in every second batch, so that Lightning, which logs by batches, counts twice as far."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()
        return loss.detach()


def fitted(module: Stranger) -> Ordered:
    """What is logged of two epochs of 120 batches, with four validations."""
    seen = [TrainCurves(), DeviceMonitor(0.02), monitoring(record_operations=True), MemoryMonitor()]
    seen += [NoiseScaleMonitor(2)]
    options = {"max_epochs": 2, "val_check_interval": 50, "log_every_n_steps": 7}
    with contextlib.suppress(ConnectionError):
        train(module, *seen, data=(loader(480), loader(8)), logger=(logger := Ordered()), **options)
    assert "log_metrics" not in vars(logger)  # its own again
    steps = [step for step, _ in logger.rows]
    assert steps == sorted(set(steps))  # one row a step
    return logger


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "MIN_INTERVAL_S", 0.02)  # so that a short run has samples


def test_every_row_is_written_and_none_behind_a_later_one() -> None:
    logger = fitted(Logging())
    assert logger.steps("train/loss") == list(range(1, 241))
    assert logger.steps("time/step_ms") == list(range(5, 241))
    assert logger.steps("val/loss") == [49, 99, 169, 219]  # as Lightning counts, from 0
    assert logger.steps("own_epoch") == [119, 239]
    assert len(logger.steps("own_step")) == 34
    assert logger.steps(RSS)
    assert any({"train/loss", "time/step_ms", "own_step"} <= row.keys() for _, row in logger.rows)


def test_a_fit_that_breaks_has_the_rows_up_to_its_last_step() -> None:
    logger = fitted(Logging(breaks=130))
    assert logger.steps("train/loss") == list(range(1, 131))
    assert logger.steps("val/loss") == [49, 99]


def test_steps_that_lightning_counts_otherwise_are_in_order_too() -> None:
    logger = fitted(ByHand())
    assert logger.steps("train/loss") == list(range(1, 121))
    assert logger.steps("val/loss") == [49, 99, 169, 219]


def test_no_more_rows_wait_than_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_in_order, "_MOST", 5)
    train(Logging(), TrainCurves(), data=loader(80), logger=(logger := Memory()), log_every_n_steps=1)
    assert [step for step, _ in logger.rows[:6]] == list(range(6))
    assert all("train/loss" not in row for _, row in logger.rows[:6])  # which is written at the end of the epoch
    assert logger.steps("own_step") == list(range(40))
    assert logger.steps("train/loss") == list(range(1, 41))


class Broken(Ordered):
    """Takes no row of a callback."""

    tries = 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.tries += 1
        raise ConnectionError("no network")


def test_a_logger_that_fails_is_tried_once_in_a_fit_with_one_warning() -> None:
    seen = [TrainCurves(), DeviceMonitor(0.02), monitoring(), NoiseScaleMonitor(2)]
    for _ in range(2):
        logger = Broken()
        with pytest.warns(UserWarning) as caught:
            train(Stranger(), *seen, data=loader(480), max_epochs=1, logger=logger)
        assert len([one for one in caught if "Broken gets no more curves" in str(one.message)]) == logger.tries == 1
