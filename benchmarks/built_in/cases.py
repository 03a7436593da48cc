"""The built-in causes, by name."""

from .case import Case
from .device import COMPUTE, MEMORY
from .process import HOST, INPUT, MIXED
from .scattered import SCATTERED
from .strangers import STRANGE

CASES: dict[str, Case] = COMPUTE | MEMORY | HOST | INPUT | MIXED | SCATTERED | STRANGE
