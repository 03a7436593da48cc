"""Whether the launched processes are those that `trainer` asks for: checked before torch is imported."""

import os
from collections.abc import Mapping
from typing import Any

from ..errors import UserError
from ..ranks import current


def check_processes(
    trainer: Mapping[str, Any], multirun: bool = False, environ: Mapping[str, str] = os.environ
) -> None:
    """Raise UserError unless as many processes were started as a trainer has devices, on as many machines.

    A strategy that leaves this process without what was trained is refused. `trainer` has its checked options; `multirun` says
    whether it is that of a sweep's run.
    """
    strategy: Any = trainer.get("strategy")
    if isinstance(strategy, Mapping):
        strategy = f"ddp_{strategy.get('start_method', 'popen')}"
    if str(strategy).startswith(("ddp_fork", "ddp_notebook", "ddp_spawn")):
        raise UserError(
            f"trainer.strategy: {strategy} trains in processes whose results do not come back to this one; write ddp"
        )
    devices, nodes, rank = trainer.get("devices", "auto"), trainer.get("num_nodes", 1), current(environ)
    started, alone = f"{rank.launcher} has started {rank.world_size} processes", "write batchscope train -m … alone"
    if rank.launcher == "srun":  # or sbatch alone, which says the same of a process that srun has not started
        started, alone = f"this job of SLURM has {rank.world_size} tasks", "take a job of one task (--ntasks=1)"
    if rank.launcher and multirun and rank.world_size > 1:
        raise UserError(f"a sweep starts the processes of its runs itself, and {started}; {alone}")
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
