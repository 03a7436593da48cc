"""`batchscope train`: the command line is checked completely, then Hydra starts one run or a sweep of runs.

Torch takes seconds to import, and is imported after the command line has been checked.
"""

import contextlib
import errno
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, read_write
from omegaconf.errors import OmegaConfBaseException

from .. import _hydra, ranks
from ..checkpointing import resume
from ..distributed import launch, rendezvous
from ..errors import UserError, exit_on_user_error, report, reraise_in_hydra, warn
from ..files import LOCK, NO_SPACE, WriteError, new_folder, why
from ..options.check import check_config
from ..options.command_lines import train_command
from ..options.compose import CommandLine, check_command_line, check_composition, compose_command_line
from ..options.compositions import compose
from ..options.groups import CONFIGS
from ..options.overrides import accept_null_groups
from ..records.read import refuse_used
from ..sweep import launchers
from ..sweep.runner import Job, SweepRunner, run_sweep
from ..sweep.search import is_diagnosis
from .arguments import is_for_show, is_resume, parse_arguments

# (config, run_dir, choices, overrides) → the optimized metric
Train = Callable[[dict[str, Any], Path, dict[str, str], list[str]], float | None]


def main() -> None:
    """The program: run what the command line in `sys.argv` asks for."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler reads it when torch is imported
    exit_on_user_error(lambda: run_command(_train))


def _train(*run: Any) -> float | None:
    from ..training.run import train

    return train(*run)


def run_command(train: Train) -> None:
    """Call `train` for the run that the command line asks for, or start a sweep of runs, or show help.

    Raises:
        UserError: for a mistake in the command line, before anything is written; or one that only a run could find.
        SystemExit: 1 if a run of a sweep failed, for another reason than memory; 129, 130 or 143 if a signal ended it.
    """
    args = parse_arguments()
    overrides = args.overrides
    reraise_in_hydra()
    if is_for_show(args):
        if not args.shell_completion and not args.hydra_help:
            check_composition(overrides)
        _show(args.hydra_help)
    elif is_resume(args):
        if args.multirun:
            raise UserError(
                "resume: takes a single run; a sweep is resumed by its own command and hydra.sweep.dir=<its folder>"
            )
        _resume(train, overrides)
    elif args.multirun:
        line = compose_command_line(overrides, True)
        _warn_of_idle_workers(overrides, line.configs)
        if any(map(is_diagnosis, line.configs)):
            raise UserError(
                "experiment=diagnose: tries changes of one run, and -m is for several; write "
                f"{train_command('experiment=diagnose …')} without -m"
            )
        _start_sweep(line)
    else:
        line = compose_command_line(overrides, False)
        if is_diagnosis(line.configs[0]):  # for Hydra, a sweep of one job
            sys.argv.insert(1, "--multirun")
            _start_sweep(compose_command_line(overrides, True))
            return
        _check_devices(line.configs)
        _warn_of_idle_workers(overrides, line.configs)
        if ranks.current().launcher and ranks.current().rank:
            run = rendezvous.receive()  # the first rank has chosen the folder
            (config,) = check_command_line(overrides, False, run_dir=run["run_dir"])
            train(config, Path(run["run_dir"]), run["choices"], overrides)
        else:
            _run_one(train, line)


def _warn_of_idle_workers(overrides: list[str], configs: list[dict[str, Any]]) -> None:
    """Warn of workers that a command line asks for, and that no run starts: other programs have no other loader."""
    pipelines = {config["data"].get("pipeline", "workers") for config in configs}
    if any(word.startswith("data.num_workers=") for word in overrides) and "workers" not in pipelines:
        warn(
            f"data.num_workers: has no effect with data.pipeline={min(pipelines)}; write data.pipeline=workers with it"
        )


def _show(hydra_help: bool) -> None:
    if hydra_help:  # Hydra's own help refuses options of this program
        sys.argv[1:] = ["--hydra-help"]
    logging.raiseExceptions = False  # --info prints log records; `exit_on_user_error` deals with a closed pipe
    try:
        _start_hydra(lambda config: None)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise UserError(str(error).strip().partition("\n")[0]) from error


def _start_hydra(job: Job) -> None:
    """Have Hydra do what `sys.argv` says: call the job, or call it for each run of a sweep, or print something."""
    _hydra.take_mode_from_flags()
    try:
        with _hydra.composed_by(compose):
            hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="train")(job)()
    except OSError as error:  # of a folder or file that Hydra makes itself
        if error.errno not in (*NO_SPACE, errno.EACCES, errno.EROFS):
            raise
        raise WriteError(f"{error.filename or 'the folder of the run'}: {why(error)}") from error


def _check_devices(configs: list[dict[str, Any]], multirun: bool = False, here: bool = True) -> None:
    """See that every run has its devices, if it runs on this machine; torch is imported only for `gpu` and the like."""
    wanted = []
    for trainer in (config["trainer"] for config in configs):
        launch.check_processes(trainer, multirun)
        devices = (trainer.get("accelerator", "auto"), trainer.get("devices", "auto"))
        if here and devices[0] not in ("auto", "cpu") and devices not in wanted:
            wanted.append(devices)
    for devices in wanted:
        from ..hardware.devices import check_accelerator

        check_accelerator(*devices)
    if not multirun:
        rendezvous.use_own_rendezvous_store()


def _run_one(train: Train, line: CommandLine) -> None:
    if line.configs[0]["search"]:
        raise UserError(f"search: takes several runs; write {train_command('-m …')}")
    mistakes, begun = [], []

    def job(config: DictConfig) -> float | None:
        hydra_config: Any = HydraConfig.get()
        run_dir = Path(hydra_config.runtime.output_dir)
        begun.append(run_dir)
        try:
            if not ranks.current().rank:  # the other ranks find the first one's record
                if not line.folder_chosen:
                    run_dir = _new_folder(run_dir, "hydra.run.dir")
                    with read_write(hydra_config):  # Lightning passes this folder to the ranks that it starts
                        hydra_config.run.dir = str(run_dir)
                refuse_used(run_dir)
            config.run_dir = os.path.relpath(run_dir)
            plain, choices = check_config(config), dict(hydra_config.runtime.choices)
            rendezvous.publish({"run_dir": plain["run_dir"], "choices": choices})
            return train(plain, run_dir, choices, list(hydra_config.overrides.task))
        except UserError as error:  # Hydra would add its own lines to an exception
            report(error)
            _remove_empty(run_dir)
            mistakes.append(error)
            return None

    try:
        _start_hydra(job)
    except OSError as error:
        if begun:
            raise
        raise _refused(line.folder, "hydra.run.dir", error) from error
    if mistakes:
        raise mistakes[0]


def _start_sweep(line: CommandLine) -> None:
    """Check what a sweep needs, and run it."""
    launchers.check_launcher(line.launcher)
    _check_devices(line.configs, multirun=True, here=launchers.runs_here(line.launcher))
    _run_sweep(line)


def _run_sweep(line: CommandLine) -> None:
    sweep_dir = line.folder if line.folder_chosen else _new_folder(line.folder, "hydra.sweep.dir")
    runner = SweepRunner
    if any(map(is_diagnosis, line.configs)):
        from ..sweep.diagnose import DiagnosisRunner as runner  # brings matplotlib, which takes a second to import
    run_sweep(sweep_dir, line.configs, line.labels, line.launcher, _start_hydra, runner)


def _resume(train: Train, overrides: list[str]) -> None:
    run_dir, others = resume.find(overrides)
    record = resume.recorded(run_dir)
    known = _config_of_new_run(others, run_dir) if others else None
    if known is not None and resume.is_same(known, resume.recorded_config(record, run_dir)):
        others = []  # they are those that the run was started with, which a requeued job repeats
    config = resume.configuration(record, run_dir, others, known)
    if record.get("status") == "finished" and not resume.continues_training(config, record):
        print(resume.nothing_to_resume(run_dir, record), flush=True)
        return
    _check_devices([config])
    train(config, run_dir, record.get("choices", {}), [*record.get("overrides", []), *others])


def _config_of_new_run(overrides: list[str], run_dir: Path) -> dict[str, Any] | None:
    """The configuration of the run that options would start in a folder; None if they would start none."""
    with contextlib.suppress(UserError):
        overrides = accept_null_groups(overrides)
        return check_command_line(overrides, False, run_dir=os.path.relpath(run_dir))[0]
    return None


def _new_folder(folder: Path, option: str) -> Path:
    """A folder that is named by the time; another one if something else was started in the same second."""
    try:
        return new_folder(folder)
    except OSError as error:
        raise _refused(folder, option, error) from error


def _refused(folder: Path, option: str, error: OSError) -> WriteError:
    return WriteError(f"{option}: {folder} cannot be written: {why(error)}")


def _remove_empty(folder: Path) -> None:
    """Remove the folders that Hydra made for a run that never began, up to the working directory."""
    here = Path.cwd()
    with contextlib.suppress(OSError):  # not empty: the run had begun, or other runs are beside it
        if os.listdir(folder) == [LOCK]:
            (folder / LOCK).unlink()
        folder.rmdir()
        for parent in folder.parents:
            if parent == here or here not in parent.parents:
                break
            parent.rmdir()
