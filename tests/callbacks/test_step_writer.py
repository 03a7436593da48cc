"""Steps are written to TensorBoard at their own numbers, also by a writer that an earlier fit has closed."""

from pathlib import Path
from types import SimpleNamespace

from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from batchscope.callbacks._step_writer import write_steps


class FakeTrainer(SimpleNamespace):
    """A trainer as far as writing goes; unlike a SimpleNamespace it can be referred to weakly."""

    __slots__ = ("__weakref__",)
    __hash__ = object.__hash__


def test_a_writer_that_was_closed_is_opened_again(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, name="", version="")
    trainer = FakeTrainer(is_global_zero=True, loggers=[logger])
    write_steps(trainer, [(1, {"a": 1.0, "b": 2.0})])
    logger.experiment.close()
    write_steps(trainer, [(2, {"a": 3.0})])
    write_steps(trainer, [(5, {"a": 4.0})])
    logger.experiment.flush()
    events = [e for file in sorted(tmp_path.glob("events*")) for e in EventAccumulator(str(file)).Reload().Scalars("a")]
    assert sorted((event.step, event.value) for event in events) == [(1, 1.0), (2, 3.0), (5, 4.0)]


def test_other_ranks_write_nothing() -> None:
    write_steps(FakeTrainer(is_global_zero=False, loggers=[object()]), [(1, {"a": 1.0})])
