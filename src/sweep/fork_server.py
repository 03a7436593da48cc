"""The imports of the server that runs are forked from (process.py). In any other process this file does nothing.

The server is `multiprocessing.forkserver`. It has imported torch, Lightning and this package, and has computed nothing.
A forked run needs no imports any more, and is a process like any other: it has threads, random numbers and a CUDA
context of its own; the server has none.
"""

import atexit
import gc
import importlib
import os

from .._imports import quick_imports
from .._system import lead_session

IS_SERVER = "BATCHSCOPE_FORK_SERVER"  # an environment variable of the server alone, until it has imported this file
# What every run imports: its program, and what libraries import when they are first used.
_IMPORTED = (
    "batchscope.training.run",
    "batchscope.callbacks._measurement",
    "torch._dynamo",
    "torch.utils.tensorboard",
    "tensorboard.plugins.hparams",
)


def _prepare() -> None:
    lead_session()  # a signal to the sweep's process group, such as from a closed terminal, spares the server
    atexit.register(_exit_server, os.getpid())
    from ..options import groups
    from .job import hide_slurm

    hide_slurm()  # before Lightning is imported
    with quick_imports(leave=False):  # `leave` would also silence the runs' last lines on standard error
        for name in _IMPORTED:
            importlib.import_module(name)
    groups.nodes_of_configs()  # cached once it is read
    gc.collect()  # so that no run gets a copy of the garbage of the imports
    gc.freeze()  # so that no collection of a run marks the imported objects, which would copy their pages


def _exit_server(server_pid: int) -> None:
    """Exit the server at once: the regular teardown of torch takes seconds, and prints what is left."""
    if os.getpid() == server_pid:
        os._exit(0)


if os.environ.pop(IS_SERVER, None):
    _prepare()
