"""What the tests of this room share: runs that end well, and what TensorBoard has of a run."""

from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from tests.support.runs import Run, run


def completed(folder: Path, *words: str, **how: Any) -> Run:
    """A run that has ended without an error; arguments as Run."""
    done = run(folder, *words, **how)
    assert done.end() == 0, done.complained
    return done


def tensorboard(run_dir: Path) -> EventAccumulator:
    (folder,) = {path.parent for path in run_dir.glob("*/events.*")}
    return EventAccumulator(str(folder)).Reload()


def hparams(events: EventAccumulator, key: str = "session_start_info") -> Any:
    """The options of a run as TensorBoard compares them, or its `experiment`: the metrics."""
    content = events.SummaryMetadata(f"_hparams_/{key}").plugin_data.content
    return getattr(plugin_data_pb2.HParamsPluginData.FromString(content), key)
