"""A sweep in TensorBoard: a run for each group, with the batch size in place of the step, and the plots as cards."""

import io
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..files import write_bytes
from ..records.rates import RATE
from .groups import Group
from .plots import Picture
from .table import BUSY

REPORT = "report"  # the run that has text and plots
_LONGEST = 40  # characters of a name
_EVENTS = re.compile(r"events\.out\.tfevents\.\d+")  # TensorBoard's own writers add the host's name


def write(
    groups: Sequence[Group], metrics: Sequence[str], pictures: Mapping[str, Picture], text: str, folder: Path
) -> str:
    """Write a run for each group, and into `<folder>/report` the text and the plots; an earlier report's are removed.

    The events have the time at which the sweep ended. Returns a note if TensorBoard is missing, else an empty string.
    TensorBoard's own writer needs no torch.

    Args:
        groups: the groups.
        metrics: those of quality, the most telling one first.
        pictures: the plots, by name.
        text: what the report says, as Markdown.
        folder: where the runs lie.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError as error:
        return f"nothing for TensorBoard: {error}"
    when = max((run.ended for group in groups for run in group.runs), default=0.0)

    def add(run: str, events: list[tuple[int, list[Summary.Value]]]) -> None:
        data = io.BytesIO()
        records = RecordWriter(data)  # EventFileWriter's thread prints a traceback where the disk is full
        records.write(Event(wall_time=when, file_version="brain.Event:2").SerializeToString())
        for step, values in events:
            records.write(Event(wall_time=when, step=step, summary=Summary(value=values)).SerializeToString())
        (folder / run).mkdir(parents=True, exist_ok=True)
        write_bytes(folder / run / f"events.out.tfevents.{when:.0f}", data.getvalue())

    _remove_earlier(folder)
    for name, group in _named(groups).items():
        scalars = _scalars(group, metrics)
        events = [
            (size, [Summary.Value(tag=f"sweep/{tag}", simple_value=v[size]) for tag, v in scalars.items() if size in v])
            for size in group.sizes
        ]
        if scalars:
            add(name, events)
    said = TensorProto(dtype="DT_STRING", string_val=[text.encode()])
    values = [Summary.Value(tag="sweep/report", metadata=create_summary_metadata("", ""), tensor=said)]
    for name, picture in pictures.items():
        width, height = struct.unpack(">II", picture.png[16:24])  # of the PNG's header
        image = Summary.Image(encoded_image_string=picture.png, width=width, height=height, colorspace=4)
        values.append(Summary.Value(tag=f"sweep/{name}", image=image))
    add(REPORT, [(0, values)])
    return ""


def _scalars(group: Group, metrics: Sequence[str]) -> dict[str, dict[int, float]]:
    """Numbers by batch size; one that has a single value or is constant is left out."""
    names = ("mfu", *BUSY, "memory_peak_gib", *metrics[:1])
    found = {RATE: {size: group.rates.rate(size) for size in group.sizes}}
    found |= {name: group.medians(name) for name in names}
    return {name: values for name, values in found.items() if len(set(values.values())) > 1}


def _remove_earlier(folder: Path) -> None:
    """Remove the events that an earlier report wrote, and the folders that are empty then."""
    for path in [*folder.glob("*/events.out.tfevents.*")]:
        if _EVENTS.fullmatch(path.name) and path.is_file():
            path.unlink()
            if not any(path.parent.iterdir()):
                path.parent.rmdir()


def _named(groups: Sequence[Group]) -> dict[str, Group]:
    """The groups by the names of their folders: labels in letters that every file system takes, made unique.

    TensorBoard breaks a name at hyphens, and shows a few letters a line.
    """
    found: dict[str, Group] = {}
    for group in groups:
        name = base = re.sub(r"[\W_]+", "_", group.label).strip("_")[:_LONGEST] or "group"
        number = 2
        while name in (*found, REPORT):
            name, number = f"{base}_{number}", number + 1
        found[name] = group
    return found
