"""Which of a run's processes this one is, as the environment says it: before torch is imported.

On one machine Lightning starts the other processes itself. On several, torchrun or SLURM's srun starts all of them, and
each reads the command line.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Rank:
    """This process among those of its run.

    Attributes:
        launcher: what started them all, `torchrun` or `srun`; empty if Lightning starts the others, or has.
        rank: 0 for the first one, which speaks and writes for all.
        world_size: how many the launcher has started; 1 without one.
    """

    launcher: str
    rank: int
    world_size: int


def current(environ: Mapping[str, str] = os.environ) -> Rank:
    """As the environment has it; torchrun comes first, for it may be started by srun, as Lightning sees it, too."""
    if "TORCHELASTIC_RUN_ID" in environ:
        return Rank("torchrun", int(environ.get("RANK", 0)), int(environ.get("WORLD_SIZE", 1)))
    if "SLURM_NTASKS" in environ and environ.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        return Rank("srun", int(environ.get("SLURM_PROCID", 0)), int(environ["SLURM_NTASKS"]))
    return Rank("", int(environ.get("LOCAL_RANK", 0)), 1)
