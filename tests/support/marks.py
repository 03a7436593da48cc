"""Marks of tests of what not every system has, by the system that the tests pretend to be on (systems.py)."""

import pytest

from tests.support.systems import SYSTEM

LINUX = pytest.mark.skipif(SYSTEM != "linux", reason="Linux alone has it")
POSIX = pytest.mark.skipif(SYSTEM == "windows", reason="Windows does not have it")
