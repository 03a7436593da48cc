"""What the server imports that runs are forked from (process.py). In any other process this file does nothing.

The server is `multiprocessing.forkserver`. It has imported torch, Lightning and this package, and has computed nothing. A
forked run starts without its imports, and is a process as any other: it computes with its own threads, random numbers and
CUDA context, which the server does not have.
"""

import atexit
import gc
import importlib
import os

from .._imports import quick_imports
from .._system import lead_session

IS_SERVER = "BATCHSCOPE_FORK_SERVER"  # in the environment of the server alone, until it has imported this file
# What every run imports: its program, and what libraries import when they are first used.
_IMPORTED = (
    "batchscope.training.run",
    "batchscope.callbacks._measurement",
    "torch._dynamo",
    "torch.utils.tensorboard",
    "tensorboard.plugins.hparams",
)


def _prepare() -> None:
    lead_session()  # what ends the sweep's processes, as a terminal that closes does, leaves the server to the runs
    atexit.register(_leave, os.getpid())
    from ..options import groups
    from .job import hide_slurm

    hide_slurm()  # before Lightning is imported
    with quick_imports(leave=False):  # the runs print what they end with
        for name in _IMPORTED:
            importlib.import_module(name)
    groups.known_nodes()  # kept once it is read
    gc.collect()  # the garbage of the imports is not copied into every run
    gc.freeze()  # nor is what is imported, by a collection that marks every object


def _leave(server: int) -> None:
    """End the server at once: to take apart what torch consists of takes seconds, and prints what is left of it."""
    if os.getpid() == server:
        os._exit(0)


if os.environ.pop(IS_SERVER, None):
    _prepare()
