"""Plans: which runs there are.

A plan is a generator. It yields jobs to the loop (loop.py), and receives the record of each: of a run that was done, that
an earlier sweep in the same folder has done, or that was refused (`refused`, with the `error`). Timed runs of one yield are
visited side by side; others follow each other.

| plan | is of | in |
| --- | --- | --- |
| `grow_batch` | `experiment=find_batch_size` | grow_batch.py |
| `time_to_target` | `experiment=time_to_target` | time_to_target.py |
| `diagnose` | `experiment=diagnose` | diagnose.py |
| `sizes_for_choose` | `batchscope choose` | sizes.py |
| `a_b` | `batchscope compare --rerun` | rerun.py |
"""

import sys
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..errors import UserError


@dataclass(frozen=True, eq=False)
class Job:
    """A run that is to be done.

    Attributes:
        run_dir: its folder.
        config: checked.
        facts: for its record; `choices` and `overrides`, and whatever else a plan wants to find there again.
        title: what is printed on it; empty if the plan says all.
        log: the file that gets its output; None if its output is the sweep's own.
        python: that runs it.
        seconds: of visits, where it is visited beside others; None for as long as its configuration and the answer ask.
    """

    run_dir: Path
    config: dict[str, Any]
    facts: dict[str, Any]
    title: str = ""
    log: Path | None = None
    python: str = sys.executable
    seconds: float | None = None


Record = dict[str, Any]
T = TypeVar("T")
Plan = Generator[Sequence[Job], list[Record], T]


class RunFailed(UserError):
    """A run has ended without a result, and has said why."""

    def __init__(self, message: str):
        super().__init__(message)
        self.reported = True


def is_one_process(config: Mapping[str, Any]) -> bool:
    """Whether a run is a single process: Lightning starts the other ranks as new Pythons."""
    trainer = config["trainer"]
    return trainer.get("num_nodes", 1) == 1 and str(trainer.get("devices", "auto")) == "1"
