"""From train.py's command line to its runs: everything is checked first, then Hydra runs one job or a sweep of them."""

import argparse
import contextlib
import errno
import logging
import os
import re
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
from ..errors import UserError, did_you_mean, refuse_in_one_line, report, reraise_in_hydra
from ..files import LOCK, NO_SPACE, WriteError, new_folder, why
from ..options import trust
from ..options.check import check_config
from ..options.compose import CommandLine, check_command_line, check_composition, compose_command_line
from ..options.groups import CONFIGS, GROUPS
from ..options.overrides import accept_null_groups, as_override
from ..options.purpose import TOP_LEVEL
from ..records.read import refuse_used
from ..sweep import folder, launchers, process
from ..sweep.runner import RunFailed, SweepRunner

_REFUSED_FLAGS = {
    "config-path": "the configuration is this program's own; --config-dir=<folder> adds YAML files of yours to it",
    "config-name": "the configuration is always train.yaml; experiment=<name> lays another over it",
    "experimental-rerun": "a pickle can run code, and is not loaded; resume=<run folder> goes on with a run",
}

# (config, run_dir, choices, overrides) → the optimized metric
Train = Callable[[dict[str, Any], Path, dict[str, str], list[str]], float | None]


def main() -> None:
    """Run what the command line in `sys.argv` asks for: one run, a sweep, or help."""
    run(_train)


def _train(*job: Any) -> float | None:
    from ..training.run import train  # torch, which takes seconds, after the command line has been checked

    return train(*job)


def run(train: Train) -> None:
    """Run `train` for every job that the command line asks for.

    Raises:
        UserError: for a mistake in the command line, before anything is written; or one that only a run could find.
        SystemExit: 1 if a run of a sweep failed, for another reason than memory; 129, 130 or 143 if a signal ended it.
    """
    args = _arguments()
    reraise_in_hydra()
    if args.help or args.hydra_help or args.cfg or args.info or args.shell_completion:
        _show(args)
        return
    if _resumes(args):
        _resume(train, args.overrides, args.multirun, args.config_dir)
        return
    line = compose_command_line(args.overrides, args.multirun, args.config_dir)
    if args.multirun:
        launchers.check(line.launcher)
        _check_devices(line.configs, multirun=True, here=launchers.runs_here(line.launcher))
        _run_sweep(line)
        return
    _check_devices(line.configs)
    if ranks.current().launcher and ranks.current().rank:
        _join(train, args.overrides, args.config_dir)
    else:
        _run_one(train, line)


def _arguments() -> argparse.Namespace:
    """The command line, flags and options in any order; `sys.argv` gets the flags first.

    Hydra and the processes that Lightning starts read `sys.argv` again, and know no other order.

    Raises:
        UserError: for a flag that there is not, or that this program does not take.
    """
    parser = _hydra.args_parser()
    refuse_in_one_line(parser)
    args, unknown = parser.parse_known_intermixed_args()
    if unknown:
        raise UserError(_unknown_flag(unknown[0], parser.format_usage()), exit_code=2)
    _check_flags(args)
    args.overrides = [re.sub(r"^\+{1,2}resume=", "resume=", word) for word in args.overrides]
    if not args.shell_completion and not _resumes(args):  # a folder to resume is a path as it is, not Hydra's grammar
        args.overrides = accept_null_groups(args.overrides)
    flags = [(f"--{name.replace('_', '-')}", value) for name, value in vars(args).items() if name != "overrides"]
    words = [flag if value is True else f"{flag}={value}" for flag, value in flags if value not in (None, False)]
    sys.argv[1:] = [*words, *args.overrides]
    return args


def _check_flags(args: argparse.Namespace) -> None:
    """Refuse the flags that this program does not take, and those that do not go together."""
    for flag, instead in _REFUSED_FLAGS.items():
        if getattr(args, flag.replace("-", "_")) is not None:
            raise UserError(f"--{flag}: {instead}")
    commands = [f"--{name}" for name in ("run", "multirun", "cfg", "info") if getattr(args, name)]
    commands += ["--shell-completion"] if args.shell_completion else []
    if len(commands) > 1:
        raise UserError(f"{' and '.join(commands)}: only one of them at a time", exit_code=2)
    if args.resolve and not (args.cfg or args.help):
        raise UserError("--resolve: belongs to --cfg or --help", exit_code=2)
    if args.package and not args.cfg:
        raise UserError("--package: belongs to --cfg", exit_code=2)


def _resumes(args: argparse.Namespace) -> bool:
    return any(word.startswith("resume=") for word in args.overrides)


def _unknown_flag(word: str, usage: str) -> str:
    """What to write instead of a flag that there is not: many programs take options with dashes in front."""
    name, _, value = word.lstrip("-").partition("=")
    near = did_you_mean(f"--{name}", re.findall(r"--[a-z-]+", usage))
    if near and name not in (*GROUPS, *TOP_LEVEL):
        return f"{word}: no such flag.{near}"
    return f"{word}: no such flag. Options are written without dashes: {name}={value or '<value>'}"


def _show(args: argparse.Namespace) -> None:
    """Help, the composed configuration and the like: all that starts no run."""
    if args.shell_completion:
        _check_completion(args.overrides)
    elif args.hydra_help:  # of Hydra alone, which has no part in this program's options
        sys.argv[1:] = ["--hydra-help"]
    else:
        check_composition(args.overrides, args.config_dir)
    logging.raiseExceptions = False  # Hydra's --info is log lines; `exit_on_user_error` deals with a closed pipe
    try:
        _start_hydra(lambda config: None)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise UserError(str(error).strip().partition("\n")[0]) from error


def _check_completion(words: list[str]) -> None:
    """Hydra's own words after --shell-completion; `query` comes from the shell, with what has been typed so far."""
    command, _, shell = words[0].partition("=") if len(words) == 1 else ("", "", "")
    known = command in ("install", "uninstall", "query") and shell in ("bash", "fish", "zsh")
    if not known or (command == "query" and "COMP_LINE" not in os.environ):
        raise UserError(
            "--shell-completion: takes install=bash, install=zsh, install=fish, or uninstall=…", exit_code=2
        )


def _start_hydra(task: Callable[[DictConfig], float | None]) -> None:
    try:
        hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="train")(task)()
    except OSError as error:  # of a folder or file that Hydra makes itself
        if error.errno not in (*NO_SPACE, errno.EACCES, errno.EROFS):
            raise
        raise WriteError(f"{error.filename or 'the folder of the run'}: {why(error)}") from error


def _check_devices(configs: list[dict[str, Any]], multirun: bool = False, here: bool = True) -> None:
    """Before the first run of a sweep, see that every run has its devices, if it runs here; only `gpu` and the like need
    torch for it."""
    wanted = []
    for trainer in (config["trainer"] for config in configs):
        launch.check_processes(trainer, multirun)
        pair = (trainer.get("accelerator", "auto"), trainer.get("devices", "auto"))
        if here and pair not in wanted:
            wanted.append(pair)
    for accelerator, devices in wanted:
        if accelerator not in ("auto", "cpu"):
            from ..hardware.devices import check_accelerator

            check_accelerator(accelerator, devices)
    if not multirun:
        rendezvous.use_own_rendezvous_store()


def _resume(train: Train, overrides: list[str], multirun: bool, config_dir: str | None) -> None:
    """Go on with a run, in its folder: as its record says, with the options that are to change."""
    if multirun:
        raise UserError("resume: takes a single run; a sweep goes on with hydra.sweep.dir=<its folder>")
    run_dir, others = resume.find(overrides)
    record = resume.recorded(run_dir)
    known = _digest_of_new_run(others, config_dir, run_dir) if others else None
    if known == trust.digest(resume.recorded_config(record, run_dir)):
        others = []  # they are those that the run was started with, which a requeued job says again
    config = resume.configuration(record, run_dir, others, known)
    if record.get("status") == "finished" and not resume.continues_training(config, record):
        print(f"{run_dir} has finished; there is nothing to resume", flush=True)
        return
    _check_devices([config])
    train(config, run_dir, record.get("choices", {}), [*record.get("overrides", []), *others])


def _digest_of_new_run(overrides: list[str], config_dir: str | None, run_dir: Path) -> str | None:
    """The digest of the run that options would start in a folder; None if they would start none."""
    with contextlib.suppress(UserError):
        said = accept_null_groups(overrides)
        (config,) = check_command_line(said, False, config_dir, run_dir=os.path.relpath(run_dir))
        return trust.digest(config)
    return None


def _run_one(train: Train, line: CommandLine) -> None:
    """One run, in this process."""
    if line.configs[0]["search"]:
        raise UserError("search: takes several runs; write python train.py -m …")
    mistakes = []

    def job(config: DictConfig) -> float | None:
        here = HydraConfig.get()
        run_dir = Path(here.runtime.output_dir)
        try:
            if not ranks.current().rank:  # the other processes of a run find the first one's record
                if not line.folder_chosen:
                    run_dir = _new_folder(run_dir, "hydra.run.dir")
                    with read_write(here):  # where Lightning looks for it when it starts other processes
                        here.run.dir = str(run_dir)
                refuse_used(run_dir)
            config.run_dir = os.path.relpath(run_dir)
            plain, choices = check_config(config), dict(here.runtime.choices)
            rendezvous.publish({"run_dir": plain["run_dir"], "choices": choices})
            return train(plain, run_dir, choices, list(here.overrides.task))
        except UserError as error:  # Hydra would print lines of its own around an exception
            report(error)
            _remove_empty(run_dir)
            mistakes.append(error)
            return None

    _start_hydra(job)
    if mistakes:
        raise mistakes[0]


def _join(train: Train, overrides: list[str], config_dir: str | None) -> None:
    """One of the other processes that torchrun or srun has started: the folder is the first one's, whatever the clock."""
    run = rendezvous.receive()
    (config,) = check_command_line(overrides, False, config_dir, run_dir=run["run_dir"])
    train(config, Path(run["run_dir"]), run["choices"], overrides)


def _run_sweep(line: CommandLine) -> None:
    """Several runs, each in a process of its own, and the report on them."""
    place = line.folder
    folder.refuse_other(place, line.configs if line.labels else [])
    if not line.folder_chosen:
        place = _new_folder(place, "hydra.sweep.dir")
    sweep = SweepRunner(place, line.labels)
    process.listen()
    # The folder as it was checked: by a clock it could be another one by now.
    sys.argv.append(as_override("hydra.sweep.dir", str(place)))
    _hydra.quiet_launcher()  # the sweep names each run itself
    said = launchers.output_folder(line.launcher)
    if said:
        print(f"the runs are jobs, and say what they do in {said}", flush=True)
    with folder.lock_sweep_dir(place):
        try:
            with contextlib.suppress(RunFailed):  # it has been told, and is in the table
                _start_hydra(sweep.run_job)
        except (SystemExit, WriteError):
            sweep.report()
            sweep.say_what_is_left()
            raise
        except Exception as error:
            if not launchers.gave_up(error):
                raise
            sweep.report()
            sweep.say_what_is_left()
            raise UserError(f"hydra/launcher: {str(error).strip().partition(chr(10))[0]}") from error
        sweep.report()
    if sweep.exit_code:
        sys.exit(sweep.exit_code)


def _new_folder(folder: Path, option: str) -> Path:
    """A folder that is called by the time: something else may have been started in the same second."""
    try:
        return new_folder(folder)
    except OSError as error:
        raise WriteError(f"{option}: {folder} cannot be written: {why(error)}") from error


def _remove_empty(folder: Path) -> None:
    """Remove the folders that Hydra made for a run that never began, up to the one that the user stands in."""
    here = Path.cwd()
    with contextlib.suppress(OSError):  # not empty: the run had begun, or others live beside it
        if os.listdir(folder) == [LOCK]:
            (folder / LOCK).unlink()
        folder.rmdir()
        for parent in folder.parents:
            if parent == here or here not in parent.parents:
                break
            parent.rmdir()
