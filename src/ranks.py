"""The rank of this process, read from the environment before torch is imported.

On one machine Lightning starts the other ranks itself. On several machines torchrun or SLURM's srun starts all ranks, and
each rank reads the command line.
"""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Rank:
    """This process among the processes of its run.

    Attributes:
        launcher: `torchrun` or `srun`, which has started all ranks; empty if Lightning starts the other ranks.
        rank: rank 0 prints and writes for all.
        world_size: the number of processes that the launcher has started; 1 without a launcher.
    """

    launcher: str
    rank: int
    world_size: int


def current_rank() -> Rank:
    """Return this process's rank. torchrun takes precedence, as in Lightning: srun may have started torchrun."""
    environ = os.environ
    if "TORCHELASTIC_RUN_ID" in environ:
        return Rank("torchrun", int(environ.get("RANK", 0)), int(environ.get("WORLD_SIZE", 1)))
    if "SLURM_NTASKS" in environ and environ.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        return Rank("srun", int(environ.get("SLURM_PROCID", 0)), int(environ["SLURM_NTASKS"]))
    return Rank("", int(environ.get("LOCAL_RANK", 0)), 1)
