"""Import everything that a run imports, so that a process forked afterwards starts in a fraction of a second.

Nothing here may compute with tensors: a forked process does not inherit the threads of a product.
"""

import importlib
import pkgutil

import fsspec.implementations.local  # noqa: F401
import tensorboard.backend.event_processing.event_accumulator  # noqa: F401
from hydra._internal.hydra import Hydra  # noqa: F401
from hydra.core.override_parser.overrides_parser import OverridesParser
from torch.utils.tensorboard.writer import SummaryWriter  # noqa: F401

import batchscope

for _module in pkgutil.walk_packages(batchscope.__path__, "batchscope."):
    if not _module.name.endswith("__main__"):
        importlib.import_module(_module.name)
OverridesParser.create().parse_override("key=value")
importlib.import_module("tests.support.runs")
