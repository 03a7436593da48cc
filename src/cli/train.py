"""`batchscope train`: the command line is composed and checked, then one run or a sweep of runs starts.

A run's configuration is checked again when its folder is known.

Torch takes seconds to import, and is imported after the command line has been checked.
"""

import contextlib
import importlib.util
import os
import shutil
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from hydra.core.utils import configure_log, env_override

from .. import ranks
from .._imports import quick_imports
from .._system import may_have_mps, relative, signals_named
from ..checkpointing import resume
from ..distributed import launch, rendezvous
from ..errors import UnfitError, UserError, warn
from ..files import LOCK, new_folder, writing
from ..options.compose import CommandLine, check_command_line, choices_in, compose, compose_command_line, config_in
from ..options.overrides import set_by
from ..records.read import read, refuse_used
from ..sweep.search import BatchSizeSearch, TimeToTarget, check_time_to_target, search_of
from .arguments import parse_arguments, refuse_missing, show

_HERE = ("BasicLauncher", "JoblibLauncher", "LocalLauncher")  # a machine that submits jobs may have no GPU
# Plugins of Hydra whose choices are in configs/hydra/launcher, and the extra that installs each.
_EXTRAS = {"hydra_plugins.hydra_submitit_launcher": "slurm", "hydra_plugins.hydra_ray_launcher": "ray"}


def main() -> None:
    """The program: do the run that the command line in `sys.argv` asks for, or start a sweep of runs, or show help.

    Raises:
        UserError: for a mistake in the command line, before anything is written; or one that only a run could find.
        SystemExit: 1 if a run of a sweep failed, for another reason than memory; 129, 130 or 143 if a signal ended it.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler reads it when torch is imported
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # where a rank is lost, the others would print stack frames
    args = parse_arguments()
    if args.help or args.cfg:
        show(args)
    elif not any(word.startswith("resume=") for word in args.overrides):
        _start(args.overrides, args.multirun)
    elif args.multirun:
        sweep = "a sweep is resumed by its own command and hydra.sweep.dir=<its folder>"
        raise UserError(f"resume: takes a single run; {sweep}")
    else:
        _resume(args.overrides)


def _start(overrides: list[str], multirun: bool) -> None:
    """Check what new runs need that the configuration alone does not tell, and start them."""
    line = compose_command_line(overrides, multirun)
    for path in {config["init"] for config in line.configs} - {None}:
        refuse_missing("init", Path(path))
    search = next(filter(None, map(search_of, line.configs)), None)
    if search and multirun:
        raise UserError(
            "search: finds its runs by itself; write one command for each value, batchscope train … without -m"
        )
    if isinstance(search, TimeToTarget):
        if "data.batch_size" in set_by(overrides)[0]:
            raise UserError("data.batch_size: experiment=time_to_target tries several; write search.sizes=[16,64,256]")
        check_time_to_target(line.configs[0])
    if isinstance(search, BatchSizeSearch) and "data.batch_size" in set_by(overrides)[0]:
        raise UserError("data.batch_size: experiment=find_batch_size finds it; search.start=8 is the first size")
    if search and "hydra.run.dir" in set_by(overrides)[0]:
        raise UserError("hydra.run.dir: a search is a sweep; write hydra.sweep.dir=…")
    if multirun:
        _run_sweep(line)
    elif search:
        _run_sweep(compose_command_line(overrides, True))  # a sweep of one job
    else:
        _run_one(line)


def _check_devices(configs: list[dict[str, Any]], multirun: bool = False, here: bool = True) -> None:
    """See that every run has its devices, if it runs on this machine; torch is imported only for `gpu` and the like."""
    for config in configs:
        launch.check_processes(config["trainer"], multirun)
        accelerator = config["trainer"].get("accelerator", "auto")
        if here and accelerator != "cpu" and (accelerator != "auto" or may_have_mps()):
            from ..hardware.devices import check_accelerator

            check_accelerator(config)


def _run_one(line: CommandLine) -> None:
    (composition,) = line.compositions
    hydra = composition.hydra
    given = set.union(*set_by(hydra.overrides.task))
    if several := [key for key in hydra.sweeper.get("params") or () if key not in given]:
        raise UserError(f"{several[0]}: has several values in a config; write batchscope train -m …")
    if of_sweeps := [key for key in ("timing", "optimized_metric") if key in given]:
        raise UserError(f"{of_sweeps[0]}: has no effect on a single run; write batchscope train -m …")
    _refuse_last("hydra.run.dir", line.folder)
    _check_devices(line.configs)
    choices, overrides = choices_in(hydra), list(hydra.overrides.task)
    with _run_folder(line) as run_dir, env_override(dict(hydra.job.env_set)):
        configure_log(hydra.job_logging, hydra.verbose)  # for `logging` in a user's own code
        _train(config_in(relative(run_dir), composition), run_dir, choices, overrides)


def _refuse_last(option: str, folder: Path) -> None:
    """Raise UserError for a folder that has the name of the newest one."""
    if folder.name == "last":
        raise UserError(f"{option}: got {str(folder)!r}, and 'last' stands for the newest folder; choose another name")


def _train(config: dict[str, Any], run_dir: Path, choices: dict[str, str], overrides: list[str]) -> None:
    """Train as the first rank has read the command line."""
    config, folder, *rest = rendezvous.of_first("run", lambda: [config, relative(run_dir), choices, overrides])
    with quick_imports():
        from ..training.run import train
    train(config, Path(folder), *rest)


@contextlib.contextmanager
def _run_folder(line: CommandLine) -> Iterator[Path]:
    """The folder of a new run, which rank 0 chooses and makes.

    A mistake that ends the run before it has begun, or in its first batch, leaves no folder behind that was not there
    before.
    """
    if ranks.current().rank:
        yield line.folder
        return
    made = [folder for folder in (line.folder, *line.folder.parents) if not os.path.exists(folder)]
    with writing("hydra.run.dir", line.folder):
        if line.folder_chosen:
            run_dir = line.folder
            run_dir.mkdir(parents=True, exist_ok=True)
        else:
            run_dir = new_folder(line.folder)
            made = [run_dir, *(folder for folder in made if folder != line.folder)]
    try:
        refuse_used(run_dir)
        yield run_dir
    except UserError as error:
        _remove_unused(run_dir, made, isinstance(error, UnfitError))
        raise


def _remove_unused(run_dir: Path, made: list[Path], is_unfit: bool) -> None:
    """Remove the lock of a run that never began, and the folders that were made for it, innermost first.

    With `is_unfit` the run has begun and trained nothing: its folder goes, with its record and the logs that it opened.
    """
    with contextlib.suppress(OSError):  # not empty: the run had begun, or other runs are beside it
        if is_unfit and made[:1] == [run_dir] and not any(run_dir.rglob("*.ckpt")):
            shutil.rmtree(run_dir)
            made = made[1:]
        elif os.listdir(run_dir) == [LOCK]:
            (run_dir / LOCK).unlink()
        for folder in made:
            folder.rmdir()


def _run_sweep(line: CommandLine) -> None:
    """Check what a sweep needs, and run it."""
    _refuse_last("hydra.sweep.dir", line.folder)
    target = line.launcher["_target_"]
    _check_launcher(target)
    _check_devices(line.configs, multirun=True, here=target.rpartition(".")[2] in _HERE)
    if isinstance(line.compositions[0].hydra.sweeper.get("direction"), Enum):  # nobody has set it
        direction = "as optimized_metric gets better"
        raise UserError(f"hydra.sweeper.direction: is not set; write minimize or maximize, {direction}")
    from ..sweep.runner import run_sweep  # brings scipy and pandas, which take a second to import

    with writing("hydra.sweep.dir", line.folder):
        sweep_dir = line.folder if line.folder_chosen else new_folder(line.folder)
    run_sweep(line, sweep_dir)


def _check_launcher(target: str) -> None:
    """Raise UserError for a launcher of a plugin that is not installed, or that cannot start a run here.

    A plugin's choice is ours, and composes without it.
    """
    package = ".".join(target.split(".")[:2])
    if package not in _EXTRAS:
        return
    with contextlib.suppress(ModuleNotFoundError):  # there is no plugin at all
        if importlib.util.find_spec(package):
            if _EXTRAS[package] == "slurm" and not signals_named("SIGUSR2"):
                raise UserError("hydra/launcher: submitit does not run on Windows; write hydra/launcher=basic")
            if target.endswith("SlurmLauncher") and shutil.which("srun") is None:
                raise UserError("hydra/launcher: no SLURM is here (no program srun); write hydra/launcher=basic")
            return
    name = package.partition(".")[2]
    raise UserError(f"hydra/launcher: {name} is not installed; pip install 'batchscope[{_EXTRAS[package]}]'")


def _resume(overrides: list[str]) -> None:
    run_dir, others = resume.find(overrides)
    record = read(run_dir)
    known: dict[str, Any] | None = None
    if others:
        with contextlib.suppress(UserError):  # they would start no run
            (known,) = check_command_line(others, False, run_dir=relative(run_dir))
    if known is not None and resume.is_same(known, resume.recorded_config(record, run_dir)):
        others = []  # they are those that the run was started with, which a requeued job repeats
    config = resume.configuration(record, run_dir, others, known)
    if record.get("status") == "finished" and not resume.continues_training(config, record):
        print(resume.nothing_to_resume(run_dir, record, config), flush=True)
        return
    _check_devices([config])
    if "hydra.job.env_set" in str(record.get("command")):
        warn("resume: hydra.job.env_set is not set again; set its variables in the environment")
    hydra = compose([]).hydra
    configure_log(hydra.job_logging, hydra.verbose)
    _train(config, run_dir, record.get("choices", {}), [*record.get("overrides", []), *others])
