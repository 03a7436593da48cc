"""What the tests of this folder share: runs that end without an error, and their TensorBoard events."""

from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from tests.support.runs import Run, run


def completed(folder: Path, *words: str, **options: Any) -> Run:
    """A run that has ended without an error; the arguments are those of Run."""
    process = run(folder, *words, **options)
    assert process.end() == 0, process.complained
    return process


def tensorboard(run_dir: Path) -> EventAccumulator:
    (folder,) = {path.parent for path in run_dir.glob("*/events.*")}
    return EventAccumulator(str(folder)).Reload()


def hparams(events: EventAccumulator, key: str = "session_start_info") -> Any:
    """The options of a run in TensorBoard's HParams tab, or with `experiment` its metrics."""
    content = events.SummaryMetadata(f"_hparams_/{key}").plugin_data.content
    return getattr(plugin_data_pb2.HParamsPluginData.FromString(content), key)
