"""Plans: which runs a sweep does.

A plan is a generator. It yields jobs to the loop (loop.py), and receives a record for each: of a run that was done now,
or by an earlier sweep in the same folder, or that was refused (status `refused`, with the `error`). Of the jobs of one
yield, runs that can wait are visited side by side; the others run one after the other.
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
        run_dir: the run's folder.
        config: the checked configuration.
        record_fields: for the run's record, beside the configuration: `choices`, `overrides`, and what a plan adds.
        title: names the run in the terminal.
        may_fork: whether the run may be forked from the server; otherwise a new Python is started.
        python: the interpreter of the run.
        environ: environment variables for the run's process.
        seconds: of all visits, if the run is visited beside others; None if the configuration and the answer decide.
        composition: what Hydra has composed, in which options may refer to others (`${data.batch_size}`); None if only
            `config` is known.
    """

    run_dir: Path
    config: dict[str, Any]
    record_fields: dict[str, Any]
    title: str
    may_fork: bool = True
    python: str = sys.executable
    environ: Mapping[str, str] = field(default_factory=dict)
    seconds: float | None = None
    composition: DictConfig | None = None

    @classmethod
    def composed(
        cls, run_dir: Path, composition: DictConfig, hydra: Any, title: str, config: dict[str, Any] | None = None
    ) -> Self:
        """Return the job of a composition by Hydra.

        `hydra` is Hydra's section, which may be outside of the composition; `config` is the checked configuration.
        """
        record_fields = {"choices": choices_in(hydra), "overrides": list(hydra.overrides.task)}
        checked = config or check_config(without_hydra(composition))
        return cls(run_dir, checked, record_fields, title, composition=composition)

    def below(self, name: str, options: Mapping[str, Any], title: str, **record_fields: Any) -> "Job":
        """Return the same run with other options, by their full names, in a subfolder; `record_fields` are added."""
        changed = OmegaConf.create(self.config) if self.composition is None else copy.deepcopy(self.composition)
        for option, value in options.items():
            OmegaConf.update(changed, option, value, force_add=True)
        overrides = [*self.record_fields["overrides"], *(as_override(*option) for option in options.items())]
        return replace(
            self,
            run_dir=self.run_dir / name,
            config=check_config(without_hydra(changed)) if self.composition else to_plain(changed),
            composition=self.composition and changed,
            record_fields={**self.record_fields, "overrides": overrides, **record_fields},
            title=title,
        )

    def rate(self, record: Record) -> float:
        """Return the rate in samples/s of the run's record. UserError without one; RunFailed if the run failed."""
        if record["status"] != "finished":
            raise RunFailed.from_record(self, record)
        if not (rate := at(record, f"throughput.{RATE}")):
            path = relative(self.run_dir)
            raise UserError(f"search: needs the rate of a run, and {path} has none: {why_no_rate(record)}")
        return rate


Plan = Generator[Sequence[Job], list[Record], None]


class Search:
    """The base class of `search` in a configuration: it decides which runs follow. Hydra starts a search as one job."""

    def check(self, config: Mapping[str, Any], typed: set[str]) -> None:
        """Raise UserError, before any run, if the search cannot work with a checked configuration and typed options."""

    def plan(self, job: Job) -> Plan:
        """Yield the runs, in subfolders of the job's folder."""
        raise NotImplementedError


def build_search(config: Mapping[str, Any]) -> Search | None:
    """Return the search of a checked configuration, or None."""
    return instantiate(config["search"], _convert_="all")


class RunFailed(UserError):
    """A run has ended without a result, and has printed why."""

    @classmethod
    def from_record(cls, job: Job, record: Record) -> Self:
        """Return the error of a job whose run has left this record."""
        error = cls(f"{job.run_dir}: {record.get('error') or record['status']}")
        error.reported = True
        return error
