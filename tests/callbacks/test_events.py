"""The events of Lightning's loop for a batch, in their order."""

import lightning
import pytest
from torch.utils.data import DataLoader

from batchscope._lightning import resume_after_last_batch
from batchscope.callbacks._events import FitListener, LoopEvents
from batchscope.callbacks._fit_time import FitTimer
from batchscope.callbacks._timer import HostClock, StepTimer
from tests.callbacks.support import stranger
from tests.support.third_party_modules import Asking, Stranger, loader, train


class PartLog(StepTimer):
    """A timer that logs the parts that begin and end."""

    def __init__(self, events) -> None:
        super().__init__(HostClock())
        self.events = events

    def enter(self, part: str) -> None:
        self.events.append(f"+{part}")
        super().enter(part)

    def leave(self, part: str) -> None:
        self.events.append(f"-{part}")
        super().leave(part)


class EventLog(FitListener):
    """A listener that logs every event."""

    def __init__(self, events) -> None:
        super().__init__(PartLog(events), FitTimer())
        self.events = events

    def begin_batch(self) -> None:
        self.events.append("begin")
        super().begin_batch()

    def count_batch(self, trainer, batch) -> None:
        self.events.append(len(batch[0]))

    def begin_training(self) -> None:
        self.events.append("train")

    def end_batch(self, trainer) -> None:
        self.events.append("end")
        super().end_batch(trainer)

    def flush(self, trainer) -> None:
        self.events.append("interrupted")


class EventCallback(LoopEvents):
    """A callback that listens during a whole fit."""

    def __init__(self) -> None:
        self.events = []

    def on_train_start(self, trainer, pl_module) -> None:
        self.listen(trainer, EventLog(self.events))

    def on_train_end(self, trainer, pl_module) -> None:
        self.stop_listening()

    def disable(self) -> None:
        self.events.append("disabled")


def events_of(module, **options) -> str:
    callback = EventCallback()
    train(module, callback, **{"max_epochs": 1, "num_sanity_val_steps": 0, "data": loader(4, 4), **options})
    return " ".join(map(str, callback.events))


STEP = "train +optimizer +forward -forward +backward -backward -optimizer end"
HOOK = "+data_wait -data_wait"  # hooks of a user around the copy count as preparation of data
COPY = f"{HOOK} +transfer {HOOK} -transfer"
BATCH = f"begin +data_wait -data_wait {COPY} 4 {STEP}"


def test_a_batch_is_asked_for_copied_counted_and_trained() -> None:
    assert events_of(Stranger(), data=loader(8, 4)) == f"{BATCH} {BATCH} interrupted"


def test_a_step_that_asks_for_its_batch_begins_with_its_training_and_counts_it_when_it_is_over() -> None:
    step = STEP.replace("+forward", "+forward +data_wait -data_wait").replace("end", "4 end")
    assert events_of(Asking()) == f"begin {step} interrupted"


class ByHand(Stranger):
    """Optimises by hand; the closure, if there is one, runs the forward and the backward pass."""

    automatic_optimization = False

    def __init__(self, has_closure: bool) -> None:
        super().__init__()
        self.has_closure = has_closure

    def training_step(self, batch, batch_idx: int) -> None:
        def closure() -> None:
            self.manual_backward(super(ByHand, self).training_step(batch, batch_idx))

        if not self.has_closure:
            closure()
        self.optimizers().step(closure if self.has_closure else None)


@pytest.mark.parametrize("has_closure", [True, False])
def test_an_update_by_hand_is_what_follows_its_closure(has_closure: bool) -> None:
    step = "train +forward +backward -backward +optimizer -optimizer -forward end"
    assert events_of(ByHand(has_closure)) == f"{BATCH.replace(STEP, step)} interrupted"


def test_a_validation_is_a_pause_also_between_two_batches_of_an_update() -> None:
    data = loader(8, 4), loader(4, 4)
    events = events_of(Stranger(), data=data, accumulate_grad_batches=2, val_check_interval=1)
    first, second, *_ = events.split("interrupted")
    assert first.endswith("end +pause ") and second.startswith(f" {COPY} -pause begin ")
    assert second.endswith("end +pause +pause ")  # the gradients are cleared before the validation begins


def test_a_resumed_fit_that_begins_with_a_validation_waits_for_its_first_batch_until_after_it(tmp_path) -> None:
    options = {"max_epochs": 1, "val_check_interval": 2, "num_sanity_val_steps": 0, "limit_val_batches": 2}
    path, events, waits = tmp_path / "2.ckpt", EventCallback(), []
    saves = stranger(on_validation_start=lambda module: module.trainer.save_checkpoint(path))
    train(saves, data=(loader(12), loader()), **options)

    def waiting(_) -> None:
        waits.append(events._listener.fit_time.is_waiting)

    trainer = lightning.Trainer(accelerator="cpu", default_root_dir=tmp_path, callbacks=[events], **options)
    resume_after_last_batch(trainer, lambda: None)
    module = stranger(validation_step=waiting, training_step=waiting)
    trainer.fit(module, loader(12), loader(), ckpt_path=path)
    assert waits == [True, True, False]


def test_a_batch_that_is_none_is_not_counted() -> None:
    batch = next(iter(loader(4, 4)))
    batches = DataLoader([batch, None, batch], batch_size=None, collate_fn=lambda batch: batch)
    events = events_of(Stranger(), data=batches).split()
    assert (events.count("4"), events.count("disabled")) == (2, 0)


def test_a_callback_that_a_module_adds_when_the_fit_begins_is_told_of_its_batches() -> None:
    callback = EventCallback()
    module = stranger(on_fit_start=lambda module: module.trainer.callbacks.append(callback))
    train(module, max_epochs=1, num_sanity_val_steps=0, data=loader(4, 4))
    assert " ".join(map(str, callback.events)) == f"{BATCH} interrupted"
