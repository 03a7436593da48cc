"""A sweep in TensorBoard: a run for each group, with the batch size in place of the step."""

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..files import write_bytes
from ..records.rates import RATE
from ..records.read import FILE
from .groups import Group
from .table import BUSY

_FILE = "events.out.tfevents.batchscope"  # TensorBoard's own writers end the name in the time and the host
_LONGEST = 40  # characters of a name


def write(groups: Sequence[Group], metrics: Sequence[str], folder: Path) -> None:
    """Write the scalars of each group that has any; those of an earlier report are removed.

    The events have the time at which the last record was written. TensorBoard's own record writer needs no torch.
    """
    for path in [*folder.glob(f"*/{_FILE}")]:
        path.unlink()
        if not any(path.parent.iterdir()):
            path.parent.rmdir()
    when = max(((run.folder / FILE).stat().st_mtime for group in groups for run in group.runs), default=0.0)
    for group in groups:
        if scalars := _scalars(group, metrics):
            # Letters that every file system takes; TensorBoard breaks a name at hyphens.
            label = re.sub(r"[\W_]+", "_", group.label).strip("_")[:_LONGEST]
            place = folder / (f"{label}_{group.number}" if len(groups) > 1 or not label else label)
            place.mkdir(parents=True, exist_ok=True)
            write_bytes(place / _FILE, _events(scalars, when))


def _events(scalars: Mapping[str, Mapping[int, float]], when: float) -> bytes:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    data = io.BytesIO()
    records = RecordWriter(data)  # EventFileWriter's thread prints a traceback where the disk is full
    records.write(Event(wall_time=when, file_version="brain.Event:2").SerializeToString())
    for tag, values in scalars.items():
        for size, value in values.items():
            summary = Summary(value=[Summary.Value(tag=f"sweep/{tag}", simple_value=value)])
            records.write(Event(wall_time=when, step=size, summary=summary).SerializeToString())
    return data.getvalue()


def _scalars(group: Group, metrics: Sequence[str]) -> dict[str, dict[int, float]]:
    """Numbers by batch size; one that has a single value or is constant is left out."""
    found = {RATE: {size: group.rates.rate(size) for size in group.sizes}}
    found |= {name: group.medians(name) for name in ("mfu", *BUSY, "memory_peak_gib", *metrics[:1])}
    return {name: values for name, values in found.items() if len(set(values.values())) > 1}
