"""Whether `trainer`'s devices, machines and strategy fit the launched processes: checked before torch is imported."""

import os
import re
from collections.abc import Mapping
from typing import Any

from ..errors import UserError, did_you_mean
from ..ranks import Rank, current

_DEVICES = re.compile(r"auto|-1|[1-9]\d*|\d+,(\d+(,\d+)*)?")  # what Lightning takes as one word
# Lightning's strategies by name that a command can start, beside those of DeepSpeed, of which there are several.
STRATEGIES = (
    *("auto", "single_device", "ddp", "ddp_find_unused_parameters_false", "ddp_find_unused_parameters_true"),
    *("fsdp", "fsdp_cpu_offload"),
)


def check_processes(
    trainer: Mapping[str, Any], multirun: bool = False, environ: Mapping[str, str] = os.environ
) -> None:
    """Raise UserError unless a trainer can have its devices and machines, as far as that is known without torch.

    `trainer` has its checked options; `multirun` says whether it is that of a sweep's run.
    """
    devices, nodes = trainer.get("devices", "auto"), trainer.get("num_nodes", 1)
    _check_devices(devices, trainer.get("accelerator", "auto"))
    if not isinstance(nodes, int) or isinstance(nodes, bool) or nodes < 1:
        raise UserError(f"trainer.num_nodes: got {nodes!r}, takes a whole number of at least 1")
    strategy = trainer.get("strategy", "auto")
    if isinstance(strategy, str) and strategy not in STRATEGIES and not strategy.startswith("deepspeed"):
        near = did_you_mean(strategy, STRATEGIES)
        raise UserError(f"trainer.strategy: got {strategy}, takes {', '.join(STRATEGIES)}.{near}")
    rank = current(environ)
    if rank.launcher:
        _check_launcher(rank, devices, nodes, multirun, environ)
    elif nodes > 1:
        raise UserError(
            f"trainer.num_nodes: got {nodes}, and nothing has started this on {nodes} machines; on each of them "
            f"write torchrun --nnodes={nodes} … -m batchscope.train, or srun (distributed.md in the documentation)"
        )


def _check_devices(devices: Any, accelerator: Any) -> None:
    indices = isinstance(devices, list) and devices and all(type(one) is int and one >= 0 for one in devices)
    if not indices and (isinstance(devices, bool | list) or not _DEVICES.fullmatch(str(devices))):
        near = did_you_mean(str(devices), ["auto"])
        raise UserError(
            f"trainer.devices: got {devices!r}, takes a number of devices (at least 1), auto, or a list of GPUs: "
            f"[0,1].{near}"
        )
    if accelerator == "cpu" and (indices or "," in str(devices) or str(devices) == "-1"):
        raise UserError(f"trainer.devices: got {devices!r}, takes a number of processes on the CPU")


def _check_launcher(rank: Rank, devices: Any, nodes: int, multirun: bool, environ: Mapping[str, str]) -> None:
    """Compare the processes that torchrun or srun has started with those that the options ask for."""
    if multirun and rank.world_size > 1:
        raise UserError(
            f"a sweep starts the processes of its runs itself, and {rank.launcher} has started {rank.world_size}; write "
            "batchscope train -m … alone"
        )
    if rank.launcher == "srun" and rank.world_size > 1:
        if not {"SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"} & environ.keys():
            raise UserError(
                f"SLURM has given this job {rank.world_size} tasks, and srun has not started them; write "
                "srun batchscope train …"
            )
        if "SLURM_NTASKS_PER_NODE" not in environ:
            raise UserError(
                f"srun has started {rank.world_size} tasks, and Lightning has to know how many there are per machine; "
                "write --ntasks-per-node=<trainer.devices>"
            )
    wanted = devices * nodes if isinstance(devices, int) and devices > 0 else None
    if wanted is not None and wanted != rank.world_size:
        raise UserError(
            f"trainer.devices: {devices} on each of {nodes} machine{'s'[: nodes > 1]} make {wanted} "
            f"process{'es' if wanted > 1 else ''}, and {rank.launcher} has started {rank.world_size}; write "
            f"trainer=ddp trainer.devices=<processes per machine> trainer.num_nodes=<machines>"
        )
