"""Steps are written to TensorBoard and CSV at their own numbers, in order, behind what was logged before."""

import contextlib
import csv
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from batchscope.callbacks import _step_writer
from batchscope.callbacks._exclusions import add_exclusion, remove_exclusion
from batchscope.callbacks._step_writer import write_steps
from batchscope.checkpointing.csv_logger import AtomicCSVLogger


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


def read(logger: CSVLogger) -> list[dict[str, str]]:
    with (Path(logger.log_dir) / "metrics.csv").open(newline="") as file:
        return [{key: value for key, value in row.items() if value} for row in csv.DictReader(file)]


@pytest.mark.parametrize("kind", [CSVLogger, AtomicCSVLogger])
def test_rows_of_a_csv_file_keep_their_order_and_their_columns(tmp_path: Path, kind: type[CSVLogger]) -> None:
    logger = kind(tmp_path, name="", version="")
    trainer = FakeTrainer(is_global_zero=True, loggers=[logger])
    write_steps(trainer, [(1, {"b": 1.5, "a": 0.1}), (2, {"b": 2.5, "a": 0.2}), (2, {"c": 7.0})])
    assert len(read(logger)) == 3  # without a call of save()
    write_steps(trainer, [(3, {"a": 0.3})])
    logger.log_metrics({"a": 0.35, "d": 9.0}, 3)
    write_steps(trainer, [(4, {"c": float("nan"), "a": 0.4})])
    assert read(logger) == [
        {"step": "1", "a": "0.1", "b": "1.5"},
        {"step": "2", "a": "0.2", "b": "2.5"},
        {"step": "2", "c": "7"},
        {"step": "3", "a": "0.3"},
        {"step": "3", "a": "0.35", "d": "9.0"},
        {"step": "4", "a": "0.4", "c": "nan"},
    ]


def test_every_float32_is_told_from_its_neighbours(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="", version="")
    numbers = numpy.random.default_rng(0).normal(0, 100, 1000).astype(numpy.float32)
    rows = [(step, {"a": float(number)}) for step, number in enumerate(numbers)]
    for part in (rows[:10], rows[10:]):  # the first rows bring the column
        write_steps(FakeTrainer(is_global_zero=True, loggers=[logger]), part)
    assert [numpy.float32(row["a"]) for row in read(logger)] == numbers.tolist()


def test_the_prefix_of_a_logger_is_in_its_columns(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="", version="", prefix="mine")
    for step in (1, 2):
        write_steps(FakeTrainer(is_global_zero=True, loggers=[logger]), [(step, {"a": 1.0})])
    assert read(logger) == [{"step": "1", "mine-a": "1"}, {"step": "2", "mine-a": "1"}]


@pytest.mark.parametrize("fast", [True, False])
def test_the_prefix_of_a_logger_is_in_its_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast: bool) -> None:
    logger = TensorBoardLogger(tmp_path, name="", version="", prefix="mine")
    if not fast:
        monkeypatch.setattr(_step_writer, "append_to_event_file", lambda *_: False)
    write_steps(FakeTrainer(is_global_zero=True, loggers=[logger]), [(1, {"a": 1.0})])
    logger.experiment.flush()
    assert EventAccumulator(str(tmp_path)).Reload().Tags()["scalars"] == ["mine-a"]


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_a_logger_that_overrides_log_metrics_is_asked_for_every_step(tmp_path: Path, kind: Any) -> None:
    class Own(kind):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            seen.append((step, metrics))

    seen: list[Any] = []
    write_steps(FakeTrainer(is_global_zero=True, loggers=[Own(tmp_path)]), [(1, {"a": 1.0}), (2, {"a": 2.0})])
    assert seen == [(1, {"a": 1.0}), (2, {"a": 2.0})]


def test_events_follow_those_that_were_logged_before(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, name="", version="")
    trainer = FakeTrainer(is_global_zero=True, loggers=[logger])
    for step in range(1, 60, 2):
        logger.log_metrics({"a": float(step)}, step)
        write_steps(trainer, [(step + 1, {"a": step + 1.0})])
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("a")  # in the files without a call of flush()
    assert [(event.step, event.value) for event in events] == [(i, i) for i in range(1, 61)]


@contextlib.contextmanager
def room_for(path: Path, number: int) -> Iterator[None]:
    """Within, the file may grow by so many bytes, as on a disk that is nearly full."""
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + number, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_a_disk_that_is_full_leaves_no_half_of_a_row(tmp_path: Path, kind: Any) -> None:
    logger = kind(tmp_path, name="", version="")
    trainer = FakeTrainer(is_global_zero=True, loggers=[logger])
    write_steps(trainer, [(1, {"a": 1.0})])
    (path,) = (*tmp_path.glob("events*"), *tmp_path.glob("*.csv"))
    before = path.read_bytes()
    with room_for(path, 11), pytest.raises(OSError, match="too large"):
        write_steps(trainer, [(step, {"a": float(step)}) for step in range(2, 20)])
    assert path.read_bytes() == before
    write_steps(trainer, [(20, {"a": 20.0})])  # there is room again
    if kind is CSVLogger:
        assert [row["a"] for row in read(logger)] == ["1", "20"]
    else:
        assert [event.value for event in EventAccumulator(str(tmp_path)).Reload().Scalars("a")] == [1, 20]


def test_a_writer_of_another_kind_gets_event_by_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = TensorBoardLogger(tmp_path, name="", version="")
    monkeypatch.setattr(_step_writer, "append_to_event_file", lambda *_: False)
    write_steps(FakeTrainer(is_global_zero=True, loggers=[logger]), [(1, {"a": 1.0}), (2, {"a": 2.0})])
    logger.experiment.flush()
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("a")
    assert [(event.step, event.value) for event in events] == [(1, 1.0), (2, 2.0)]


def test_what_is_no_number_for_tensorboard_is_infinite(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, name="", version="")
    write_steps(FakeTrainer(is_global_zero=True, loggers=[logger]), [(1, {"a": 1e300})])
    assert EventAccumulator(str(tmp_path)).Reload().Scalars("a")[0].value == float("inf")


def test_writing_happens_within_the_exclusion(tmp_path: Path) -> None:
    heard: list[str] = []

    class Listening(CSVLogger):
        def log_metrics(self, *_: Any, **__: Any) -> None:
            heard.append("written")

    @contextlib.contextmanager
    def exclusion(part: str) -> Iterator[None]:
        heard.append(f"{part} begins")
        yield
        heard.append("ends")

    trainer = FakeTrainer(is_global_zero=True, loggers=[Listening(tmp_path)])
    add_exclusion(trainer, exclusion)
    write_steps(trainer, [(1, {"a": 1.0})])
    write_steps(trainer, [])
    remove_exclusion(trainer, exclusion)
    write_steps(trainer, [(2, {"a": 1.0})])
    assert heard == ["writing begins", "written", "ends", "written"]


def test_without_details_tensorboard_has_what_people_look_at_first_and_csv_has_all(tmp_path: Path) -> None:
    loggers = [
        TensorBoardLogger(tmp_path / "tb", name="", version=""),
        CSVLogger(tmp_path / "csv", name="", version=""),
    ]
    row = {"time/step_ms": 3.0, "time/forward_ms": 1.0, "throughput/flops_per_sec": 2.0, "of/ones_own": 4.0}
    write_steps(
        FakeTrainer(is_global_zero=True, loggers=loggers), [(1, row), (2, {"host/cpu_pct": 5.0})], details=False
    )
    loggers[0].experiment.flush()
    shown = EventAccumulator(str(tmp_path / "tb")).Reload().Tags()["scalars"]
    assert set(shown) == {"time/step_ms", "of/ones_own"}
    assert [set(line) - {"step"} for line in read(loggers[1])] == [set(row), {"host/cpu_pct"}]
