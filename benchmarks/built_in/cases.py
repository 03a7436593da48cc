"""The built-in causes, by name."""

from .case import Case
from .device import COMPUTE, MEMORY
from .process import HOST, INPUT, MIXED

CASES: dict[str, Case] = COMPUTE | MEMORY | HOST | INPUT | MIXED
