"""Import everything that a run imports, and check one, so that a process forked afterwards starts at once."""

import importlib
import pkgutil

import fsspec.implementations.local  # noqa: F401
import tensorboard.backend.event_processing.event_accumulator  # noqa: F401
from hydra._internal.hydra import Hydra  # noqa: F401
from torch.utils.tensorboard.writer import SummaryWriter  # noqa: F401

import batchscope
from batchscope.options.compose import check_command_line
from batchscope.options.groups import nodes_of_configs
from tests.support import runs

for _module in pkgutil.walk_packages(batchscope.__path__, "batchscope."):
    if not _module.name.endswith("__main__"):
        importlib.import_module(_module.name)
# A process composes the same choices once, parses the source of a class once, and its grammars become faster with use.
check_command_line([*runs.SMALL, runs.EVERY_4, "hydra.run.dir='a b'", "seed=1"], multirun=False)
check_command_line([*runs.SMALL, "seed=1,2"], multirun=True)
nodes_of_configs()
