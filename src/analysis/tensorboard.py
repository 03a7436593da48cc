"""A sweep's groups in TensorBoard, a run each, with the batch size where a training run has its step."""

import re
import struct
from pathlib import Path

from .recommend import Analysis

# Medians over repeated runs; units as in sweep.csv: 1/s, %, fraction, GiB, ms.
SCALARS = {
    "sweep/samples_per_sec": lambda run: run.samples_per_sec,
    "sweep/utilization_pct": lambda run: run.busy_pct,
    "sweep/mfu": lambda run: run.mfu,
    "sweep/memory_peak_gib": lambda run: run.memory_peak_gib,
    "sweep/step_ms_median": lambda run: run.step_ms_median,
}


def write(analyses: list[Analysis], plots: list[Path], folder: Path) -> str:
    """Write one run a group, and the plots as images into `<folder>/plots`, in place of what an earlier report left.

    TensorBoard's own writer does it: it needs no torch.

    Returns:
        A note if TensorBoard is missing; else an empty string.
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

    for name, analysis in _named(analyses).items():
        scalars = {tag: analysis.group.medians(of) for tag, of in SCALARS.items()}
        events = [
            (size, [Summary.Value(tag=tag, simple_value=v[size]) for tag, v in scalars.items() if size in v])
            for size in analysis.group.sizes
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


def _named(analyses: list[Analysis]) -> dict[str, Analysis]:
    """Folder names: the labels in letters that every file system takes, numbered where they would be the same."""
    found: dict[str, Analysis] = {}
    for analysis in analyses:
        name = base = re.sub(r"[^\w.+-]+", "-", analysis.group.label).strip("-.")[:100] or "group"
        number = 2
        while name in found:
            name, number = f"{base}-{number}", number + 1
        found[name] = analysis
    return found
