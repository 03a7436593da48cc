"""Another process that holds a lock."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE, RUN_DIR = "batchscope.files.lock", "batchscope.checkpointing.resume.lock_run_dir"
# A program of a path and the name of a lock.
HOLD = """
import importlib, pathlib, sys
module, _, name = sys.argv[2].rpartition(".")
with getattr(importlib.import_module(module), name)(pathlib.Path(sys.argv[1])):
    print(1, flush=True)
    input()
"""


@contextlib.contextmanager
def held(path: Path, by: str = FILE, program: str = HOLD, **how: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds the lock until the context ends, or until it is killed."""
    line, pipe = [sys.executable, "-c", program, str(path), by], subprocess.PIPE
    with subprocess.Popen(line, stdin=pipe, stdout=pipe, **how) as other:
        assert other.stdout is not None and other.stdout.readline() == b"1\n"
        yield other
        other.communicate(b"\n")
