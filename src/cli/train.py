"""`batchscope train`: the command line is composed and checked, then one run or a sweep of runs starts.

Torch takes seconds to import, and is imported after the command line has been checked.
"""

import contextlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from hydra.core.utils import configure_log, env_override

from .. import ranks
from .._imports import quick_imports
from .._system import may_have_mps, relative, signals_named
from ..checkpointing import resume
from ..checkpointing.signals import exit_on_signals
from ..distributed import rendezvous
from ..errors import Interrupted, UnfitError, UserError, in_one_line, warn
from ..files import LOCK, Locked, as_write_error, lock, new_folder, unlock_folder
from ..options.compose import CommandLine, check_command_line, choices_in, compose, compose_command_line
from ..options.overrides import options_and_groups
from ..records.read import read, refuse_used
from ..sweep.plans import build_search
from .arguments import parse_arguments, refuse_missing, show

_LOCAL_LAUNCHERS = ("BasicLauncher", "JoblibLauncher", "LocalLauncher")  # a machine that submits jobs may have no GPU
# Hydra's launcher plugins that configs/hydra/launcher has, each with the extra that installs it.
_EXTRAS = {"hydra_plugins.hydra_submitit_launcher": "slurm", "hydra_plugins.hydra_ray_launcher": "ray"}


def main() -> None:
    """The program: do the run that the command line in `sys.argv` asks for, or start a sweep of runs, or show help.

    Raises:
        UserError: for a mistake in the command line, before anything is written, or one that only a run can find.
        SystemExit: 1 if a run of a sweep failed for another reason than memory; 129, 130 or 143 if a signal ended it.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler reads it when torch is imported
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # or the other ranks print stack frames when a rank is lost
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
    """Check what depends on more than one configuration or on this machine, and start the run or the sweep."""
    line, (typed, groups) = compose_command_line(overrides, multirun), options_and_groups(overrides)
    for path in {config["init"] for config in line.configs} - {None}:
        refuse_missing("init", Path(path))
    search = next(filter(None, map(build_search, line.configs)), None)
    if search and multirun:
        raise UserError(
            "search: finds its runs by itself; write one command for each value, batchscope train … without -m"
        )
    params = () if multirun else line.compositions[0].hydra.sweeper.get("params") or ()
    if untyped := [key for key in params if key not in typed | groups]:
        instead = "hydra.sweeper.params=null" if search else "batchscope train -m …"
        raise UserError(f"{untyped[0]}: has several values in a config; write {instead}")
    if "hydra.run.dir" in typed and (search or multirun):
        raise UserError("hydra.run.dir: is the folder of a single run; for a sweep write hydra.sweep.dir=…")
    if search:
        search.check(line.configs[0], typed)
        line = compose_command_line(overrides, True)  # a sweep of one job
    if "timing" in typed and not (search or multirun):
        raise UserError("timing: has no effect on a single run; write batchscope train -m …")
    if "optimized_metric" in typed and (line.labels or not multirun):
        instead = "write batchscope train -m hydra/sweeper=optuna …"
        raise UserError(f"optimized_metric: is for a sweeper that searches; {instead}")
    if line.folder.name == "last":
        option = "hydra.sweep.dir" if search or multirun else "hydra.run.dir"
        raise UserError(f"{option}: got '{line.folder}', and 'last' stands for the newest folder; choose another name")
    if search or multirun:
        _run_sweep(line)
    else:
        _run_one(line)


def _check_devices(configs: list[dict[str, Any]], multirun: bool = False, runs_here: bool = True) -> None:
    """Check that each run has its processes, and if it runs here its devices; a CPU run imports no torch."""
    for config in configs:
        _check_processes(config["trainer"], multirun)
        accelerator = config["trainer"].get("accelerator", "auto")
        if runs_here and accelerator != "cpu" and (accelerator != "auto" or may_have_mps()):
            from ..hardware.devices import check_accelerator

            check_accelerator(config)


def _check_processes(trainer: Mapping[str, Any], multirun: bool = False) -> None:
    """Raise UserError unless as many processes were started as `trainer`, its checked options, has devices and machines.

    Refuse a strategy that trains in processes whose results do not come back. `multirun` says whether this is a run of a sweep.
    """
    strategy: Any = trainer.get("strategy")
    if isinstance(strategy, Mapping):
        strategy = f"ddp_{strategy.get('start_method', 'popen')}"
    if str(strategy).startswith(("ddp_fork", "ddp_notebook", "ddp_spawn")):
        raise UserError(
            f"trainer.strategy: {strategy} trains in processes whose results do not come back to this one; write ddp"
        )
    devices, nodes, rank = trainer.get("devices", "auto"), trainer.get("num_nodes", 1), ranks.current_rank()
    started, instead = f"{rank.launcher} has started {rank.world_size} processes", "write batchscope train -m … alone"
    if rank.launcher == "srun":  # or sbatch without srun, which sets the same variables
        started, instead = f"this job of SLURM has {rank.world_size} tasks", "take a job of one task (--ntasks=1)"
    if rank.launcher and multirun and rank.world_size > 1:
        raise UserError(f"a sweep starts the processes of its runs itself, and {started}; {instead}")
    if rank.launcher and isinstance(devices, int) and devices > 0 and devices * nodes != rank.world_size:
        raise UserError(
            f"trainer.devices: got {devices} with trainer.num_nodes={nodes}, and {started}; "
            "write trainer=ddp trainer.devices=<of a machine> trainer.num_nodes=<machines>"
            + (", started by srun, or take a job of one task (--ntasks=1)" if rank.launcher == "srun" else "")
        )
    if not rank.launcher and nodes > 1:
        raise UserError(
            f"trainer.num_nodes: got {nodes}, and nothing has started this on {nodes} machines; on each of them "
            f"write torchrun --nnodes={nodes} … -m batchscope.train, or srun (distributed.md in the documentation)"
        )


def _run_one(line: CommandLine) -> None:
    (composition,) = line.compositions
    hydra = composition.hydra
    _check_devices(line.configs)
    choices, overrides = choices_in(hydra), list(hydra.overrides.task)
    exit_on_signals()  # until the run handles signals itself
    with _run_folder(line) as run_dir, env_override(dict(hydra.job.env_set)):
        try:
            configure_log(hydra.job_logging, hydra.verbose)  # for `logging` in the user's code
        except Exception as error:  # from OmegaConf, logging.config or a class that it names
            raise UserError(f"hydra.job_logging, hydra.verbose: {in_one_line(error)}; leave them out") from error
        _train(line.configs[0], run_dir, choices, overrides)


def _train(config: dict[str, Any], run_dir: Path, choices: dict[str, str], overrides: list[str]) -> None:
    """Train with the first rank's configuration, which the other ranks get by a rendezvous."""
    config, folder, *rest = rendezvous.decide_in_first_rank(
        "run", lambda: [config, relative(run_dir), choices, overrides]
    )
    with quick_imports():
        from ..training.run import train
    train(config, Path(folder), *rest)


@contextlib.contextmanager
def _run_folder(line: CommandLine) -> Iterator[Path]:
    """Yield the folder of a new run, which rank 0 chooses and makes.

    After a mistake or a signal that ends the run before it begins, or a mistake in its first batch, remove the new folders.
    If another process trains in the folder, keep everything.
    """
    run_dir = line.folder
    if ranks.current_rank().rank:
        yield run_dir
        return
    is_new = not (line.is_folder_chosen and os.path.exists(run_dir))
    new_parents = [folder for folder in run_dir.parents if not os.path.exists(folder)]
    with as_write_error("hydra.run.dir", run_dir):
        if line.is_folder_chosen:
            run_dir.mkdir(parents=True, exist_ok=True)
        else:
            run_dir = new_folder(run_dir)
    refuse_used(run_dir)
    try:
        yield run_dir
    except (UserError, Interrupted) as error:
        with contextlib.suppress(Locked, OSError), lock(run_dir / LOCK):  # OSError: a parent has other runs
            is_unused = {*os.listdir(run_dir)} <= {LOCK}  # the run has not begun
            unlock_folder(run_dir)
            if is_new and (is_unused or (isinstance(error, UnfitError) and not any(run_dir.rglob("*.ckpt")))):
                shutil.rmtree(run_dir)
                for folder in new_parents:
                    folder.rmdir()
            elif is_unused:
                (run_dir / LOCK).unlink(missing_ok=True)
            if is_unused and isinstance(error, Interrupted):
                print(f"{error}: the run had not begun", file=sys.stderr, flush=True)
        raise


def _run_sweep(line: CommandLine) -> None:
    """Check the launcher, the devices and the sweeper of a sweep, and run it."""
    target = line.launcher["_target_"]
    _check_launcher(target)
    _check_devices(line.configs, multirun=True, runs_here=target.rpartition(".")[2] in _LOCAL_LAUNCHERS)
    if isinstance(line.compositions[0].hydra.sweeper.get("direction"), Enum):  # the default: not set
        direction = "as optimized_metric gets better"
        raise UserError(f"hydra.sweeper.direction: is not set; write minimize or maximize, {direction}")
    from ..sweep.runner import run_sweep  # brings scipy and pandas, which take a second to import

    with as_write_error("hydra.sweep.dir", line.folder):
        sweep_dir = line.folder if line.is_folder_chosen else new_folder(line.folder)
    run_sweep(line, sweep_dir)


def _check_launcher(target: str) -> None:
    """Raise UserError for a launcher of a plugin that is not installed, or that cannot start a run here.

    The plugin's choice in our configs composes without the plugin.
    """
    package = ".".join(target.split(".")[:2])
    if package not in _EXTRAS:
        return
    with contextlib.suppress(ModuleNotFoundError):  # no plugin of Hydra is installed
        if importlib.util.find_spec(package):
            if _EXTRAS[package] == "slurm" and not signals_named("SIGUSR2"):
                raise UserError("hydra/launcher: submitit does not run on Windows; write hydra/launcher=basic")
            if target.endswith("SlurmLauncher") and shutil.which("srun") is None:
                raise UserError("hydra/launcher: no SLURM is here (no program srun); write hydra/launcher=basic")
            return
    name = package.partition(".")[2]
    raise UserError(f"hydra/launcher: {name} is not installed; pip install 'batchscope[{_EXTRAS[package]}]'")


def _resume(overrides: list[str]) -> None:
    run_dir, changes = resume.split_resume_override(overrides)
    record = read(run_dir)
    as_new: dict[str, Any] | None = None
    if changes:
        with contextlib.suppress(UserError):  # they would start no run
            (as_new,) = check_command_line(changes, False)
    if as_new is not None and resume.is_same_config(as_new, resume.recorded_config(record, run_dir)):
        changes = []  # the run was started with them; a requeued job repeats its command line
    config = resume.config_to_resume(record, run_dir, changes, as_new)
    if record.get("status") == "finished" and not resume.continues_training(config, record):
        print(resume.nothing_to_resume(run_dir, record, config), flush=True)
        return
    _check_devices([config])
    if "hydra.job.env_set" in str(record.get("command")):
        warn("resume: hydra.job.env_set is not set again; set its variables in the environment")
    hydra = compose([]).hydra
    configure_log(hydra.job_logging, hydra.verbose)
    _train(config, run_dir, record.get("choices", {}), [*record.get("overrides", []), *changes])
