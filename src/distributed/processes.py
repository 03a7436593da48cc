"""Whether the processes that were started are those that a run asks for, and how they agree on its folder.

Of several that torchrun or srun has started, the first one chooses the folder and tells the others.
"""

import importlib.util
import json
import os
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from ..errors import UserError, did_you_mean
from ..ranks import Rank, current

_PATIENCE = timedelta(minutes=5)  # of a process that waits for the others to be started
_DEVICES = re.compile(r"auto|-1|[1-9]\d*|\d+,(\d+(,\d+)*)?")  # as Lightning takes them in one word
# Those of Lightning's that can be named, but for DeepSpeed's, of which there are several.
STRATEGIES = (
    *("auto", "single_device", "ddp", "ddp_find_unused_parameters_false", "ddp_find_unused_parameters_true"),
    *("fsdp", "fsdp_cpu_offload"),
)
_store: Any = None  # kept, for the first process serves it to the others


def check(trainer: Mapping[str, Any], multirun: bool = False, environ: Mapping[str, str] = os.environ) -> None:
    """See that a trainer's devices and machines can be had, as far as that can be told without torch.

    Args:
        trainer: its checked options.
        multirun: whether it is that of a sweep's run.
        environ: of this process.

    Raises:
        UserError: naming the option.
    """
    devices, nodes = trainer.get("devices", "auto"), trainer.get("num_nodes", 1)
    _check_devices(devices, trainer.get("accelerator", "auto"))
    if not isinstance(nodes, int) or isinstance(nodes, bool) or nodes < 1:
        raise UserError(f"trainer.num_nodes: got {nodes!r}, takes a whole number of at least 1")
    _check_strategy(trainer, devices)
    if str(trainer.get("precision")).startswith("transformer-engine"):
        _check_package("trainer.precision", trainer["precision"], "transformer_engine")
    rank = current(environ)
    if not rank.launcher:
        if nodes > 1:
            raise UserError(
                f"trainer.num_nodes: got {nodes}, and nothing has started this on {nodes} machines; on each of them "
                f"write torchrun --nnodes={nodes} … train.py, or srun (docs/distributed.md)"
            )
        return
    if multirun and rank.world_size > 1:
        raise UserError(
            f"a sweep starts the processes of its runs itself, and {rank.launcher} has started {rank.world_size}; write "
            f"python train.py -m … alone"
        )
    if rank.launcher == "srun" and rank.world_size > 1:
        _check_srun(rank, environ)
    wanted = devices * nodes if isinstance(devices, int) and devices > 0 else None
    if wanted is not None and wanted != rank.world_size:
        raise UserError(
            f"trainer.devices: {devices} on each of {nodes} machine{'s'[: nodes > 1]} make {wanted} "
            f"process{'es' if wanted > 1 else ''}, and {rank.launcher} has started {rank.world_size}; write "
            f"trainer=ddp trainer.devices=<processes a machine> trainer.num_nodes=<machines>"
        )


def _check_devices(devices: Any, accelerator: Any) -> None:
    numbers = isinstance(devices, list) and devices and all(type(one) is int and one >= 0 for one in devices)
    if not numbers and (isinstance(devices, bool | list) or not _DEVICES.fullmatch(str(devices))):
        near = did_you_mean(str(devices), ["auto"])
        raise UserError(
            f"trainer.devices: got {devices!r}, takes how many (at least 1), auto, or a list of GPUs: [0,1].{near}"
        )
    if accelerator == "cpu" and (numbers or "," in str(devices) or str(devices) == "-1"):
        raise UserError(f"trainer.devices: got {devices!r}, takes how many processes there shall be on the CPU")


def _check_strategy(trainer: Mapping[str, Any], devices: Any) -> None:
    strategy, accelerator = trainer.get("strategy", "auto"), trainer.get("accelerator", "auto")
    name = strategy["_target_"].rpartition(".")[2] if isinstance(strategy, dict) else str(strategy)
    if isinstance(strategy, dict) and strategy.get("start_method", "popen") != "popen":
        name += f" with start_method={strategy['start_method']}"
    if re.search("spawn|fork|notebook", name):
        raise UserError(f"trainer.strategy: got {name}, which cannot start the processes of a command; write ddp")
    if re.search("xla|tpu", name.lower()):
        raise UserError(f"trainer.strategy: got {name}, and this program trains on cpu, gpu or mps")
    if name.lower().startswith("deepspeed"):
        _check_package("trainer.strategy", name, "deepspeed")
    elif not isinstance(strategy, dict) and name not in STRATEGIES:
        raise UserError(f"trainer.strategy: got {name}, takes {', '.join(STRATEGIES)}.{did_you_mean(name, STRATEGIES)}")
    if accelerator == "mps" and (name != "auto" or str(devices) not in ("1", "auto")):
        raise UserError(
            f"trainer.strategy: got {name} on {devices} devices, and mps is one device; leave trainer at mps, or write "
            f"trainer.accelerator=cpu"
        )
    if accelerator == "cpu" and (name.startswith("fsdp") or name == "FSDPStrategy"):
        raise UserError(
            f"trainer.strategy: got {name}, which needs a GPU, and trainer.accelerator is cpu; trainer=fsdp is the same "
            f"by torch's newer engine, which runs on a CPU, too"
        )


def _check_package(option: str, value: str, package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise UserError(f"{option}: got {value}, which needs the package {package}, and it is not installed")


def _check_srun(rank: Rank, environ: Mapping[str, str]) -> None:
    if not {"SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"} & environ.keys():
        raise UserError(
            f"SLURM has given this job {rank.world_size} tasks, and srun has not started them; write srun python train.py …"
        )
    if "SLURM_NTASKS_PER_NODE" not in environ:
        raise UserError(
            f"srun has started {rank.world_size} tasks, and Lightning has to know how many there are on a machine; write "
            f"--ntasks-per-node=<trainer.devices>"
        )


def publish(facts: dict[str, Any]) -> None:
    """The first process of a launcher's says something to the others; nothing is done where there are none."""
    rank = current()
    if rank.launcher and rank.world_size > 1:
        _rendezvous_store(rank).set("run", json.dumps(facts))


def receive() -> dict[str, Any]:
    """What the first process says, once it has said it.

    Raises:
        UserError: if it is not there, or ends without a word.
    """
    return json.loads(_get(_rendezvous_store(current()), "run"))


def use_own_rendezvous_store() -> None:
    """Give the processes that torchrun has started again a rendezvous store of their own.

    The store of torchrun's agent outlives an attempt: in it torch's process group finds the addresses of the processes
    that have failed, and does not start.
    """
    global _store
    rank = current()
    if rank.launcher != "torchrun" or rank.world_size == 1 or _attempt() == "0":
        return
    meeting = _rendezvous_store(rank)
    if rank.rank == 0:
        from torch.distributed import TCPStore

        own = TCPStore(
            os.environ["MASTER_ADDR"], 0, is_master=True, timeout=_PATIENCE, wait_for_workers=False, multi_tenant=True
        )
        meeting.set("port", str(own.port))
        port, _store = str(own.port), own
    else:
        port, _store = _get(meeting, "port"), None
    os.environ |= {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "False"}


def _attempt() -> str:
    """How often torchrun has started the processes again."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _get(meeting: Any, key: str) -> str:
    from torch.distributed import DistError

    try:
        return meeting.get(key).decode()
    except (DistError, RuntimeError) as error:
        raise UserError(f"the first process has not said where the run goes: {error}") from error


def _rendezvous_store(rank: Rank) -> Any:
    """Torch's own store, at the address where Lightning, too, will have the processes meet; of this attempt."""
    global _store
    from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
    from torch.distributed import PrefixStore, rendezvous

    if _store is None:
        place = TorchElasticEnvironment() if rank.launcher == "torchrun" else SLURMEnvironment()
        url = f"tcp://{place.main_address}:{place.main_port}"
        _store, *_ = next(rendezvous(url, rank.rank, rank.world_size, timeout=_PATIENCE))
    return PrefixStore(f"batchscope/{_attempt()}", _store)
