"""A sweep in TensorBoard: a run for each group, with the batch size in place of the step."""

import re
import struct
from pathlib import Path

from ..records.metrics import RUN_METRICS
from .groups import Group

# Medians over repeated runs, in the units of sweep.csv.
SCALARS = [name for name, declared in RUN_METRICS.items() if declared.heading and "batch_size" not in name]


def write(groups: list[Group], plots: list[Path], folder: Path) -> str:
    """Write a run for each group, and the plots as images into `<folder>/plots`; those of an earlier report are removed.

    Returns a note if TensorBoard is missing, else an empty string. TensorBoard's own writer needs no torch.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError as error:
        return f"nothing for TensorBoard: {error}"

    def add(run: str, events: list[tuple[int, list[Summary.Value]]]) -> None:
        for old in (folder / run).glob("events.out.tfevents.*"):
            old.unlink()
        writer = EventFileWriter(str(folder / run))
        for step, values in events:
            writer.add_event(Event(step=step, summary=Summary(value=values)))
        writer.close()

    for name, group in _named(groups).items():
        scalars = {f"sweep/{key}": group.medians(key) for key in SCALARS}
        events = [
            (size, [Summary.Value(tag=tag, simple_value=v[size]) for tag, v in scalars.items() if size in v])
            for size in group.sizes
        ]
        if events:
            add(name, events)
    images = []
    for plot in plots:
        png = plot.read_bytes()
        width, height = struct.unpack(">II", png[16:24])  # of the PNG's header
        image = Summary.Image(encoded_image_string=png, width=width, height=height, colorspace=4)
        images.append(Summary.Value(tag=f"sweep/{plot.stem}", image=image))
    if images:
        add("plots", [(0, images)])
    return ""


def _named(groups: list[Group]) -> dict[str, Group]:
    """The groups by the names of their folders: labels in letters that every file system takes, made unique."""
    found: dict[str, Group] = {}
    for group in groups:
        name = base = re.sub(r"[^\w.+-]+", "-", group.label).strip("-.")[:100] or "group"
        number = 2
        while name in found:
            name, number = f"{base}-{number}", number + 1
        found[name] = group
    return found
