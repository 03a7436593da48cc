"""The program in a new Python, as a user starts it: slower than a fork, and nothing of the tests is in it."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.support.command_lines import Answer as Ended
from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
TRAIN = str(ROOT / "train.py")


def spawn(folder: Path, *words: str, python: str = sys.executable, **environ: str) -> subprocess.Popen[str]:
    """Start `python <words>` in a folder."""
    known = {**os.environ, "OMP_NUM_THREADS": "1", **environ}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([python, *words] if python else [*words], cwd=folder, env=known, **streams)


def end(process: subprocess.Popen[str]) -> Ended:
    """Wait for its end."""
    out, err = process.communicate(timeout=PATIENCE_S)
    return Ended(process.returncode, out, err)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
