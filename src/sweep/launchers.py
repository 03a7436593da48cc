"""Hydra's launchers, which start a sweep's runs here or elsewhere: what they need is checked before any run starts.

A `launcher` is the node `hydra.launcher`, resolved.
"""

import importlib.util
import shutil
from collections.abc import Mapping
from typing import Any

from ..errors import UserError

_EXTRAS = {"hydra_submitit_launcher": "slurm", "hydra_ray_launcher": "ray"}  # plugin → the extra that installs it
_SLURM = ("sbatch", "srun", "scontrol", "sacct")  # all that submitit calls


def runs_here(launcher: Mapping[str, Any]) -> bool:
    """Whether runs see this machine's devices; a machine that submits jobs often has none."""
    name = launcher["_target_"].rpartition(".")[2]
    is_local_ray = name == "RayLauncher" and not launcher["ray"]["init"].get("address")
    return is_local_ray or name in ("BasicLauncher", "JoblibLauncher", "LocalLauncher")


def is_basic(launcher: Mapping[str, Any]) -> bool:
    """Whether the runs are started by this process, one after the other."""
    return launcher["_target_"].endswith(".BasicLauncher")


def check_launcher(launcher: Mapping[str, Any]) -> None:
    """Raise UserError if a launcher's plugin or SLURM is missing here, or a run would have more tasks than one."""
    parts = launcher["_target_"].split(".")
    plugin = parts[1] if parts[0] == "hydra_plugins" else None
    if plugin in _EXTRAS and not _is_installed(f"hydra_plugins.{plugin}"):
        raise UserError(f"hydra/launcher: {plugin} is not installed; pip install 'batchscope[{_EXTRAS[plugin]}]'")
    missing = [program for program in _SLURM if not shutil.which(program)] if parts[-1] == "SlurmLauncher" else []
    if missing:
        raise UserError(
            f"hydra/launcher: submitit_slurm needs {', '.join(missing)}, which this machine does not have; start the "
            "sweep where jobs can be submitted, or take submitit_local"
        )
    for option in ("nodes", "tasks_per_node"):
        if launcher.get(option, 1) != 1:
            raise UserError(
                f"hydra.launcher.{option}: got {launcher[option]}, takes 1: a run of a sweep has one task, and starts "
                "its processes itself; a run on several nodes is a separate job (distributed.md in the documentation)"
            )


def is_job_error(error: BaseException) -> bool:
    """Whether a launcher raised this exception about a job, for example one that was cancelled; it is no bug."""
    return type(error).__module__.partition(".")[0] in ("submitit", "ray")


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package is not installed either
        return False
