"""Plans: which runs there are.

A plan is a generator. It yields jobs to the loop (loop.py), and receives the record of each: of a run that was done, that
an earlier sweep in the same folder has done, or that was refused (`refused`, with the `error`). Runs of one yield that can
wait are visited side by side; others follow each other.
"""

import copy
import sys
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from omegaconf import DictConfig, OmegaConf

from ..errors import UserError
from ..options.check import check_config
from ..options.compose import without_hydra
from ..options.groups import to_plain
from ..options.overrides import as_override

LOG = "log.txt"  # in a run's folder


@dataclass(frozen=True, eq=False)
class Job:
    """A run that is to be done.

    Attributes:
        run_dir: its folder.
        config: checked.
        facts: for its record; `choices` and `overrides`, and whatever else a plan wants to find there again.
        title: what is printed on it.
        forks: whether it may be forked from the server; otherwise it is a new Python.
        python: that runs it.
        seconds: of visits, where it is visited beside others; None for as long as its configuration and the answer ask.
        composition: what Hydra has composed, in which options may follow others (`${data.batch_size}`); None where only `config`
            is known.
    """

    run_dir: Path
    config: dict[str, Any]
    facts: dict[str, Any]
    title: str
    forks: bool = True
    python: str = sys.executable
    seconds: float | None = None
    composition: DictConfig | None = None

    def below(self, name: str, options: Mapping[str, Any], title: str, **facts: Any) -> "Job":
        """The same run with other options, by their full names, in a folder below; `facts` are added to its record."""
        changed = OmegaConf.create(self.config) if self.composition is None else copy.deepcopy(self.composition)
        for option, value in options.items():
            OmegaConf.update(changed, option, value, force_add=True)
        words = [*self.facts["overrides"], *(as_override(*option) for option in options.items())]
        return replace(
            self,
            run_dir=self.run_dir / name,
            config=check_config(without_hydra(changed)) if self.composition else to_plain(changed),
            composition=self.composition and changed,
            facts={**self.facts, "overrides": words, **facts},
            title=title,
        )


Record = dict[str, Any]
Plan = Generator[Sequence[Job], list[Record], None]


class RunFailed(UserError):
    """A run has ended without a result, and has said why."""

    def __init__(self, message: str, exit_code: int = 1):
        super().__init__(message, exit_code)
        self.reported = True

    @classmethod
    def of(cls, job: Job, record: Record) -> Self:
        """That of a run with such a record."""
        return cls(f"{job.run_dir}: {record.get('error') or record['status']}")
