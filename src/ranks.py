"""What the environment says of this process, read before torch is imported: its rank.

On one machine Lightning starts the other ranks itself. On several, torchrun or SLURM's srun starts all of them, and each
reads the command line.
"""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Rank:
    """This process among the processes of its run.

    Attributes:
        launcher: `torchrun` or `srun`, which has started all ranks; empty if Lightning starts the others.
        rank: rank 0 prints and writes for all.
        world_size: how many processes the launcher has started; 1 without a launcher.
    """

    launcher: str
    rank: int
    world_size: int


def current() -> Rank:
    """This process by its environment. torchrun comes first, as in Lightning: srun may have started torchrun."""
    environ = os.environ
    if "TORCHELASTIC_RUN_ID" in environ:
        return Rank("torchrun", int(environ.get("RANK", 0)), int(environ.get("WORLD_SIZE", 1)))
    if "SLURM_NTASKS" in environ and environ.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        return Rank("srun", int(environ.get("SLURM_PROCID", 0)), int(environ["SLURM_NTASKS"]))
    return Rank("", int(environ.get("LOCAL_RANK", 0)), 1)
