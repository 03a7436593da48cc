"""Plans: which runs there are.

A plan is a generator. It yields jobs to the loop (loop.py), and receives the record of each: of a run that was done, that
an earlier sweep in the same folder has done, or that was refused (`refused`, with the `error`). Runs of one yield that can
wait are visited side by side; others follow each other.
"""

import copy
import sys
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from .._system import relative
from ..errors import UserError
from ..options.check import check_config
from ..options.compose import choices_in, without_hydra
from ..options.groups import to_plain
from ..options.overrides import as_override
from ..records.rates import RATE, why_no_rate
from ..records.values import at

LOG = "log.txt"  # in a run's folder
Record = dict[str, Any]


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
        environ: variables for its process.
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
    environ: Mapping[str, str] = field(default_factory=dict)
    seconds: float | None = None
    composition: DictConfig | None = None

    @classmethod
    def composed(
        cls, run_dir: Path, composition: DictConfig, hydra: Any, title: str, config: dict[str, Any] | None = None
    ) -> Self:
        """A run as Hydra has composed it; `hydra` is Hydra's section, which may be elsewhere than in the composition.

        `config` is its configuration, where that is checked already.
        """
        facts = {"choices": choices_in(hydra), "overrides": list(hydra.overrides.task)}
        checked = config or check_config(without_hydra(composition))
        return cls(run_dir, checked, facts, title, composition=composition)

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

    def rate(self, record: Record) -> float:
        """The rate in samples/s that the run's record has. UserError without one: RunFailed where the run did not finish."""
        if record["status"] != "finished":
            raise RunFailed.of(self, record)
        if not (rate := at(record, f"throughput.{RATE}")):
            place = relative(self.run_dir)
            raise UserError(f"search: needs the rate of a run, and {place} has none: {why_no_rate(record)}")
        return rate


Plan = Generator[Sequence[Job], list[Record], None]


class Search:
    """What `search` may be in a configuration, one file each: it decides which runs there are. Hydra starts it as one job."""

    def check(self, config: Mapping[str, Any], typed: set[str]) -> None:
        """Raise UserError, before any run is begun, for a checked configuration and typed options that it cannot work with."""

    def plan(self, job: Job) -> Plan:
        """The runs, in folders below the job's own."""
        raise NotImplementedError


def search_of(config: Mapping[str, Any]) -> Search | None:
    """The search that a checked configuration asks for; None if it asks for none."""
    return instantiate(config["search"], _convert_="all")


class RunFailed(UserError):
    """A run has ended without a result, and has said why."""

    @classmethod
    def of(cls, job: Job, record: Record) -> Self:
        """That of a run with such a record."""
        error = cls(f"{job.run_dir}: {record.get('error') or record['status']}")
        error.reported = True
        return error
