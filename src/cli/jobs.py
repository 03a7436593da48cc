"""Who calls for the runs of a sweep: this process, or the sweeper and launcher of Hydra that the command line names."""

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from .. import _hydra
from ..errors import UserError
from ..files import WriteError, why
from ..options.compose import CommandLine, search_path
from ..options.groups import CONFIGS
from ..options.overrides import as_override, parse, text_of
from ..options.signatures import class_attribute
from ..records.metrics import metric, staged
from ..records.values import at
from ..sweep import launchers
from ..sweep.runner import SweepRunner


def start_jobs(line: CommandLine, overrides: list[str], sweep_dir: Path, sweep: SweepRunner) -> None:
    """Give a sweep its runs.

    Those that are known beforehand and run here are done as they were composed and checked. Hydra composes the others,
    and may call for them in other processes.

    Raises:
        WriteError: if a folder cannot be made.
    """
    try:
        if line.labels and launchers.is_basic(line.launcher):
            sweep.run_list(line.compositions)
        else:
            words = [*map(text_of, parse(overrides)), *search_path(), as_override("hydra.sweep.dir", str(sweep_dir))]
            _hydra.multirun(CONFIGS, words, sweep.run_job)
    except OSError as error:
        if error.filename is None or not Path(error.filename).absolute().is_relative_to(sweep_dir.absolute()):
            raise
        raise WriteError(f"hydra.sweep.dir: {error.filename} cannot be written: {why(error)}") from error


def words_of_search(sweeper: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """What a sweeper that searches is told beside the command line: its metric, and which way that gets better.

    The metric is then among the overrides of each run, by which a report knows that it is the one to compare. Nothing
    is said to a sweeper of a list or without a direction, nor of a search that returns no metric of a run.

    Args:
        sweeper: the node `hydra.sweeper`; a direction that somebody has set is a text or a list, and not an enum.
        config: of its runs.

    Raises:
        UserError: where there is no metric, or nobody says which way it gets better.
    """
    if "direction" not in sweeper or config["search"]:
        return []
    name = config["optimized_metric"]
    if name is None:
        raise UserError("optimized_metric: got null, and hydra/sweeper searches for its best value")
    words = [as_override("optimized_metric", name)]
    if isinstance(sweeper["direction"], Enum):
        own = at(config, f"task.metrics.{staged(name).rpartition('/')[2]}._target_")
        rises = class_attribute(own, "higher_is_better") if own else None
        rises = metric(staged(name)).higher_is_better if rises is None else rises
        if rises is None:
            raise UserError(
                f"hydra.sweeper.direction: nobody says which way {name} gets better; write minimize or maximize"
            )
        words.append(f"hydra.sweeper.direction={'maximize' if rises else 'minimize'}")
    return words
