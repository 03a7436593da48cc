"""From train.py's command line to its runs: everything is checked first, then Hydra runs one job or a sweep of them."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from .config import CONFIGS, check, check_command_line
from .errors import UserError, report, reraise_in_hydra
from .record import refuse_used

# (config, run_dir, choices, overrides) → the optimized metric
Train = Callable[[dict[str, Any], Path, dict[str, str], list[str]], float | None]


def run(train: Train) -> None:
    """Run `train` for every job that the command line asks for.

    Raises:
        UserError: for a mistake in the command line, before anything is written; or the first of those that only a
            run could find.
    """
    args = get_args_parser().parse_args()
    asks = (args.help, args.hydra_help, args.cfg, args.info, args.shell_completion, args.config_name, args.config_path)
    jobs = Jobs(train)
    if not any(asks):
        configs = check_command_line(args.overrides, args.multirun, args.config_dir)
        _check_devices(configs)
        jobs.expected = len(configs)
    reraise_in_hydra()
    try:
        hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="train")(jobs.run)()
    finally:
        jobs.report_sweep()
    if jobs.mistakes:
        raise jobs.mistakes[0]


def _check_devices(configs: list[dict[str, Any]]) -> None:
    """Before the first run of a sweep, see that every run has its device; only `gpu` and the like need torch for it."""
    for accelerator in {config["trainer"].get("accelerator", "auto") for config in configs} - {"auto", "cpu"}:
        from .hardware.devices import check_accelerator

        check_accelerator(accelerator)


class Jobs:
    """The runs of one command line.

    Args:
        train: what a run is.
    """

    def __init__(self, train: Train):
        self.train = train
        self.expected = 0  # how many runs the command line asks for, as far as that is known beforehand
        self.mistakes: list[UserError] = []
        self.sweep_dir: Path | None = None

    def run(self, config: DictConfig) -> float | None:
        """What Hydra calls for each run; a mistake found this late leaves no empty folder behind."""
        job = HydraConfig.get()
        run_dir = Path(job.runtime.output_dir)
        config.run_dir = os.path.relpath(run_dir)
        if job.mode == RunMode.MULTIRUN:
            self.sweep_dir = Path(job.sweep.dir)
            self._say_where(job.job.num, list(job.overrides.task))
        try:
            if os.environ.get("LOCAL_RANK", "0") == "0":  # the other processes of a run find the first one's record
                refuse_used(run_dir)
            return self.train(check(config), run_dir, dict(job.runtime.choices), list(job.overrides.task))
        except UserError as error:
            report(error)
            _remove_empty(run_dir)
            if job.mode == RunMode.MULTIRUN:  # the sweep goes on, and its launcher has to know
                raise
            self.mistakes.append(error)  # of a single run; Hydra would print lines of its own around an exception
            return None

    def _say_where(self, number: int, overrides: list[str]) -> None:
        of = f" of {self.expected}" if self.expected > number else ""
        print(f"\n— run {number + 1}{of}: {' '.join(overrides)}", flush=True)

    def report_sweep(self) -> None:
        """A sweep ends in its table and its recommendation; they can be made again from its folder."""
        if self.sweep_dir is None:
            return
        from .sweep import write_report

        with contextlib.suppress(UserError):  # no run left a record: what went wrong has been said
            print("\n" + write_report([self.sweep_dir], self.sweep_dir / "report").text, flush=True)


def _remove_empty(folder: Path) -> None:
    """Remove the folders that Hydra made for a run that never began, up to the one that the user stands in."""
    here = Path.cwd()
    with contextlib.suppress(OSError):  # not empty: the run had begun, or others live beside it
        folder.rmdir()
        for parent in folder.parents:
            if parent == here or here not in parent.parents:
                break
            parent.rmdir()
