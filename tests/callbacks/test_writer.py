"""Steps are written to TensorBoard and CSV under their own numbers, in order, after the rows that were logged before."""

import csv
import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from batchscope.callbacks._timer import StepTimer, add_timer
from batchscope.callbacks._writer import POINTS, StepWriter
from batchscope.callbacks.step_file import StepFile, read_rows
from batchscope.callbacks.tensorboard import TensorBoard
from batchscope.records.step_parts import PARTS
from tests.support.third_party_modules import Memory


def writer(*loggers, rank: int = 0, step: int = 0) -> StepWriter:
    return StepWriter(Mock(is_global_zero=rank == 0, loggers=list(loggers), global_step=step))


def both_loggers(folder: Path) -> tuple[StepFile, TensorBoardLogger]:
    return StepFile(str(folder)), TensorBoardLogger(folder, name="tb", version="")


def points(folder: Path, tag: str = "a") -> list[tuple[int, float]]:
    """The points (step, value) in TensorBoard's files, without a call of flush()."""
    files = [EventAccumulator(str(file), size_guidance={"scalars": 0}).Reload() for file in folder.glob("events*")]
    return sorted((event.step, event.value) for file in files for event in file.Scalars(tag))


def read(logger: StepFile) -> list[dict[str, str]]:
    """The rows of the file, without a call of save()."""
    with logger.path.open(newline="") as file:
        return [{key: value for key, value in row.items() if value} for row in csv.DictReader(file)]


def test_the_time_of_an_event_leaves_out_what_its_run_has_waited(tmp_path: Path) -> None:
    logger = TensorBoard(tmp_path, name="tb", version="")
    logger.log_metrics({"b": 1.0}, 1)
    logger.waited_s = 1000.0
    logger.log_metrics({"b": 2.0}, 2)
    writer(logger).write([(3, {"b": 3.0})])
    logger.save()
    (file,) = (tmp_path / "tb").glob("events*")
    first, *others = [event.wall_time for event in EventAccumulator(str(file)).Reload().Scalars("b")]
    assert [round((time - first) / 1000) for time in others] == [-1, -1]


def test_other_ranks_write_nothing() -> None:
    memory = Memory()
    for rank, rows in ((1, []), (0, [(1, {"a": 1.0})])):
        writer(memory, rank=rank).write([(1, {"a": 1.0})])
        assert memory.rows == rows


def test_rows_of_a_csv_file_keep_their_order_and_their_columns(tmp_path: Path) -> None:
    logger = StepFile(str(tmp_path))
    writing = writer(logger)
    writing.write([(1, {"b": 1.5, "a": 0.1}), (2, {"b": 2.5, "a": 0.2}), (2, {"c": 7.0})])
    assert len(read(logger)) == 3
    writing.write([(3, {"a": 0.3})])
    logger.log_metrics({"a": 0.35, "d": 9.0}, 3)
    writing.write([(4, {"c": float("nan"), "a": 0.4})])
    assert read(logger) == [
        {"step": "1", "a": "0.1", "b": "1.5"},
        {"step": "2", "a": "0.2", "b": "2.5"},
        {"step": "2", "c": "7"},
        {"step": "3", "a": "0.3"},
        {"step": "3", "a": "0.35", "d": "9"},
        {"step": "4", "a": "0.4", "c": "nan"},
    ]


def test_every_float32_is_told_from_its_neighbours(tmp_path: Path) -> None:
    logger = StepFile(str(tmp_path))
    numbers = numpy.random.default_rng(0).normal(0, 100, 1000).astype(numpy.float32)
    rows = [(step, {"a": float(number)}) for step, number in enumerate(numbers)]
    for part in (rows[:10], rows[10:]):  # the first rows add the column
        writer(logger).write(part)
    assert [numpy.float32(row["a"]) for row in read(logger)] == numbers.tolist()


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_a_logger_that_overrides_log_metrics_is_asked_for_every_step_in_a_pause(tmp_path: Path, kind) -> None:
    class Own(kind):
        def log_metrics(self, metrics, step: int | None = None) -> None:
            calls.append((step, metrics, timer.part))

    calls = []
    timer, writing = StepTimer(SimpleNamespace(mark=lambda: 0.0, parts=PARTS)), writer(Own(tmp_path))
    add_timer(writing._trainer, timer)
    writing.write([(1, {"a": 1.0}), (2000, {"a": 2.0}), (2001, {"a": 3.0})])
    assert calls == [(1, {"a": 1.0}, "pause"), (2000, {"a": 2.0}, "pause"), (2001, {"a": 3.0}, "pause")]
    assert timer.part == "other"


def test_our_logger_renames_what_stands_behind_and_gets_few_points_as_lightnings(tmp_path: Path) -> None:
    logger = TensorBoard(tmp_path, name="", version="")
    writer(logger).write([(step, {"throughput/mfu": 1.0, "time/step_ms": 1.0}) for step in range(1, 4001)])
    logger.log_metrics({"val/loss": 1.0, "epoch": 0}, 4000)
    logger.experiment.flush()
    assert len(points(tmp_path, "throughput/mfu")) == len(points(tmp_path, "· time/step_ms")) < 2.1 * POINTS
    assert points(tmp_path, "val/loss") == [(4000, 1.0)] and points(tmp_path, "· epoch") == [(4000, 0.0)]


def test_events_follow_those_that_were_logged_before_also_where_the_file_was_closed(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, name="", version="")
    writing = writer(logger)
    for step in range(1, 60, 2):
        logger.log_metrics({"a": float(step)}, step)
        writing.write([(step + 1, {"a": step + 1.0})])
    assert points(tmp_path) == [(i, i) for i in range(1, 61)]
    logger.experiment.close()
    writing.write([(61, {"a": 1e300})])
    logger.experiment.flush()
    assert points(tmp_path)[-1] == (61, float("inf"))  # float32 cannot represent 1e300


def test_a_long_run_has_few_points_in_tensorboard_and_every_step_in_csv_also_where_it_is_resumed(tmp_path) -> None:
    steps = numpy.arange(1, 10_001)

    def run(name: str, *parts) -> list[int]:
        for part in parts:
            file, board = both_loggers(tmp_path / name)
            writing = writer(file, board, step=int(part[0]) - 1)
            for chunk in numpy.split(part, 50):
                writing.write([(step, {"a": float(step)}) for step in chunk.tolist()])
            board.experiment.close()
        assert [row["step"] for row in read(file)] == [str(step) for step in steps]
        return [step for step, _ in points(tmp_path / name / "tb")]

    steps_shown = run("whole", steps)
    assert steps_shown[:POINTS] == list(range(1, POINTS + 1))
    assert POINTS < len(steps_shown) < 4 * POINTS
    assert max(numpy.diff(steps_shown)) == 16
    assert run("resumed", steps[:5000], steps[5000:]) == steps_shown


def test_mlflow_gets_the_steps_that_tensorboard_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(MLFlowLogger, "log_metrics", lambda self, metrics, step: calls.append((step, metrics)))
    writer(MLFlowLogger.__new__(MLFlowLogger)).write([(step, {"a": float(step)}) for step in range(1, 10_001)])
    assert calls[:POINTS] == [(step, {"a": step}) for step in range(1, POINTS + 1)]
    assert POINTS < len(calls) < 4 * POINTS


def test_a_logger_that_fails_gets_nothing_more_with_one_warning(tmp_path: Path) -> None:
    class Broken(CSVLogger):
        def log_metrics(self, *_, **__) -> None:
            raise ConnectionError("no network")

    broken, good = Broken(tmp_path / "broken"), StepFile(str(tmp_path))
    writing = writer(broken, good)
    with pytest.warns(UserWarning, match="Broken gets no more curves: ConnectionError: no network"):
        writing.write([(1, {"a": 1.0})])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        writing.write([(2, {"a": 1.0})])
    assert [row["step"] for row in read(good)] == ["1", "2"]


def test_the_file_has_what_a_module_logs_by_itself_whatever_it_is(tmp_path: Path) -> None:
    logger = StepFile(str(tmp_path))
    logger.log_metrics({"tokens": 12_345_678_901, "loss": torch.tensor(0.25), "said": 'a, "b"', "parts": {"a": 1}}, 3)
    (row,) = read(logger)
    assert row == {"step": "3", "tokens": "12345678901", "loss": "0.25", "said": 'a, "b"', "parts": "{'a': 1}"}


def test_a_logger_that_hands_everything_on_gets_the_curves(tmp_path: Path) -> None:
    class Handing:
        def __init__(self, inner: StepFile):
            self.inner = inner

        def __getattr__(self, name: str):
            return getattr(self.inner, name)

    logger = StepFile(str(tmp_path))
    writer(Handing(logger)).write([(1, {"a": 0.5})])
    assert read(logger) == [{"step": "1", "a": "0.5"}]


@pytest.mark.parametrize(("head", "read"), [("a\n1\n", (["a"], [{"a": "1"}])), ("", ([], []))])
def test_of_a_damaged_file_the_rows_before_are_read(head: str, read, tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text(f'{head}"{"x" * csv.field_size_limit()}\n3\n')
    assert read_rows(tmp_path / "metrics.csv") == read
