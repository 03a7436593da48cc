"""Records of TensorBoard's event files are byte for byte those of TensorBoard's own writer."""

import io
from pathlib import Path

import numpy
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from batchscope.callbacks._event_records import event_records

NOW = 1_795_000_000.123456


def by_tensorboard(keys: list[str], steps: list[int], values: numpy.ndarray) -> bytes:
    file = io.BytesIO()
    writer = RecordWriter(file)
    for step, row in zip(steps, values, strict=True):
        scalars = [Summary.Value(tag=key, simple_value=value) for key, value in zip(keys, row, strict=True)]
        writer.write(Event(wall_time=NOW, step=step, summary=Summary(value=scalars)).SerializeToString())
    return file.getvalue()


@pytest.mark.parametrize("steps", [[1], [126, 127, 128, 129], [16383, 16384, 16385], [2**31, 2**40], [5, 3, 5]])
@pytest.mark.parametrize("keys", [["a"], ["time/step_ms", "größe", "x" * 200], [f"device/{i}" for i in range(30)]])
def test_records_are_those_of_tensorboards_own_writer(steps: list[int], keys: list[str]) -> None:
    values = numpy.random.default_rng(0).normal(0, 1e3, (len(steps), len(keys))).astype(numpy.float32)
    assert event_records(keys, steps, values, NOW) == by_tensorboard(keys, steps, values)


def test_numbers_that_are_no_numbers_are_written_as_they_are() -> None:
    values = numpy.array([[0.0, -0.0, numpy.inf, -numpy.inf, numpy.nan]], numpy.float32)
    keys = list("abcde")
    assert event_records(keys, [7], values, NOW) == by_tensorboard(keys, [7], values)


def test_a_file_that_ends_anywhere_is_read_up_to_its_last_whole_record(tmp_path: Path) -> None:
    """As a process that is killed in the middle of a write leaves it."""
    records = event_records(["a"], [1, 2, 3], numpy.ones((3, 1), numpy.float32), NOW)
    size = len(records) // 3
    for end in range(2 * size, 3 * size):
        file = tmp_path / f"events.out.tfevents.{end}"
        file.write_bytes(records[:end])
        assert [event.step for event in EventAccumulator(str(file)).Reload().Scalars("a")] == [1, 2]


def test_step_0_has_a_number_too() -> None:
    record = event_records(["a"], [0], numpy.ones((1, 1), numpy.float32), NOW)
    event = Event.FromString(record[12:-4])
    assert (event.step, event.summary.value[0].simple_value) == (0, 1.0)


def test_the_order_of_the_values_in_memory_is_no_matter() -> None:
    values = numpy.arange(6, dtype=numpy.float32).reshape(3, 2)
    keys, steps = ["a", "b"], [1, 2, 3]
    assert event_records(keys, steps, numpy.asfortranarray(values), NOW) == by_tensorboard(keys, steps, values)
