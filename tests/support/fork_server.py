"""A process that has imported everything, collected the tests and computed nothing, from which tests fork processes.

pytest forks it when it has collected the tests: torch, Lightning, this project and the tests are imported once for the
tests themselves and for the processes that they start. A process that has computed with several threads, or has used a
GPU, cannot be forked; the tests have done neither when they are collected. A server of another Python (`of_python`) has
what is installed there.
"""

import contextlib
import multiprocessing
import os
import pickle
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import connection
from pathlib import Path
from typing import Any, Self

from tests.support.wheel import ROOT

_fork = multiprocessing.get_context("fork") if "fork" in multiprocessing.get_all_start_methods() else None
_server: connection.Connection | None = None
_server_pid = 0


class Forked:
    """A process that calls a function, which is importable by its name."""

    def __init__(self, pid: int, server: connection.Connection | None):
        self.pid, self.server = pid, server

    @classmethod
    def start(cls, what: Callable[..., None], *args: Any, server: connection.Connection | None = None) -> Self:
        """Fork it from a server, by default the one of this Python."""
        server = server or _server
        return cls(_answer(server, pickle.dumps((what, args))), server)

    def end(self, timeout: float) -> int:
        """Wait for the end; returns the exit code, or minus the number of the signal."""
        deadline = time.monotonic() + timeout
        while (code := _answer(self.server, self.pid)) is None:
            assert time.monotonic() < deadline, "the process hangs"
        return code


def start() -> None:
    """Import what a run imports, and fork the server from this process."""
    global _server, _server_pid
    if _server is not None:
        return
    from tests.support import preload  # noqa: F401

    _server, other = multiprocessing.Pipe()
    with warnings.catch_warnings():  # pytest-xdist has a thread that reads its messages
        warnings.simplefilter("ignore", DeprecationWarning)
        _server_pid = os.fork()
    if _server_pid:
        other.close()
        return
    try:
        _server.close()
        _serve(other)
    finally:
        os._exit(0)


def stop() -> None:
    """End the server and wait for it, so that the processor time of its processes is counted as the tests'."""
    global _server
    if _server is not None:
        _server.send(None)
        _server = None
        os.waitpid(_server_pid, 0)


@contextlib.contextmanager
def of_python(python: Path, environ: Mapping[str, str]) -> Iterator[connection.Connection]:
    """A server of another Python, which has the batchscope that is installed in its environment."""
    ours, theirs = multiprocessing.Pipe()
    command = [str(python), "-m", __name__, str(theirs.fileno())]
    with subprocess.Popen(command, cwd=ROOT, env=environ, pass_fds=[theirs.fileno()]):
        theirs.close()
        with ours:  # the server ends when it is closed
            package = ours.recv()
            assert Path(package).is_relative_to(python.parents[1]), package
            yield ours


def _answer(server: connection.Connection | None, request: bytes | int) -> Any:
    assert server is not None, "the fork server starts when tests have been collected"
    server.send(request)
    return server.recv()


def _serve(client: connection.Connection) -> None:
    """Fork a process for a pickled call, and say its number; for a number, how it has ended, or None after a moment."""
    processes: dict[int, multiprocessing.Process] = {}
    with contextlib.suppress(EOFError):  # the client has gone
        while request := client.recv():
            if isinstance(request, bytes):
                process = _fork.Process(target=_run, args=(client, request))
                process.start()
                processes[process.pid] = process
                client.send(process.pid)
            else:
                processes[request].join(timeout=0.1)
                client.send(processes[request].exitcode)


def _run(client: connection.Connection, request: bytes) -> None:
    client.close()
    what, args = pickle.loads(request)
    what(*args)


if __name__ == "__main__":  # of another Python
    from tests.support import preload

    with connection.Connection(int(sys.argv[1])) as _client:
        _client.send(preload.batchscope.__file__)
        sys.path.remove(str(ROOT))  # of this checkout its processes find nothing more
        _serve(_client)
