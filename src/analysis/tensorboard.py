"""Write a sweep for TensorBoard: a run for each group, with the batch size in place of the step."""

import io
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from ..files import write_bytes
from ..records.metrics import card
from ..records.rates import RATE
from .anonymous import anonymise
from .groups import Group
from .table import BUSY

_LONGEST = 40  # characters of a name
_EVENTS = re.compile(r"events\.out\.tfevents\.\d+")  # TensorBoard's own writers add the host's name


def write(groups: Sequence[Group], tables: Sequence[pd.DataFrame], folder: Path) -> None:
    """Write the scalars of each group that has any, by TensorBoard's own record writer; remove those of an earlier report."""
    for path in [*folder.glob("*/events.out.tfevents.*")]:
        if _EVENTS.fullmatch(path.name) and path.is_file():
            path.unlink()
            if not any(path.parent.iterdir()):
                path.parent.rmdir()
    when = time.time()
    names: set[str] = set()
    for group, sizes in zip(groups, tables, strict=True):
        if scalars := _scalars(sizes):
            # Characters that every file system takes; TensorBoard breaks a name at hyphens.
            name = re.sub(r"[\W_]+", "_", anonymise(group.label)).strip("_")[:_LONGEST] or "group"
            while name.casefold() in names:  # macOS and Windows take `CNN` and `cnn` for one folder
                name += f"_{group.number + 1}"
            names.add(name.casefold())
            (folder / name).mkdir(parents=True, exist_ok=True)
            write_bytes(folder / name / f"events.out.tfevents.{when:.0f}", _events(scalars, when))


def _scalars(sizes: pd.DataFrame) -> dict[str, dict[int, float]]:
    """Return the numbers by batch size; a number with a single value, or a constant one, is left out."""
    metrics = [str(name) for name in sizes if f"{name}_sd" in sizes]
    names = [name for name in (RATE, "mfu", *BUSY, "memory_peak_gib", *metrics) if name in sizes]
    scalars = {name: {int(str(size)): float(value) for size, value in sizes[name].dropna().items()} for name in names}
    return {name: values for name, values in scalars.items() if len(set(values.values())) > 1}


def _events(scalars: Mapping[str, Mapping[int, float]], when: float) -> bytes:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    data = io.BytesIO()
    records = RecordWriter(data)  # EventFileWriter's thread prints a traceback where the disk is full
    records.write(Event(wall_time=when, file_version="brain.Event:2").SerializeToString())
    for tag, values in scalars.items():
        for size, value in values.items():
            summary = Summary(value=[Summary.Value(tag=card(f"sweep/{tag}"), simple_value=value)])
            records.write(Event(wall_time=when, step=size, summary=summary).SerializeToString())
    return data.getvalue()
