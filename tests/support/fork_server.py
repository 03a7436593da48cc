"""A process that has imported everything, collected the tests and computed nothing, from which tests fork processes.

pytest forks it when it has collected the tests: torch, Lightning, this project and the tests are imported once for the
tests themselves and for the processes that they start. A process that has computed with several threads, or has used a
GPU, cannot be forked; the tests have done neither when they are collected.
"""

import contextlib
import multiprocessing
import os
import pickle
import time
import warnings
from collections.abc import Callable
from multiprocessing import connection
from typing import Any, Self

_fork = multiprocessing.get_context("fork") if "fork" in multiprocessing.get_all_start_methods() else None
_server: connection.Connection | None = None
_server_pid = 0


class Forked:
    """A process that calls a function, which is importable by its name."""

    def __init__(self, pid: int):
        self.pid = pid

    @classmethod
    def start(cls, what: Callable[..., None], *args: Any) -> Self:
        return cls(_answer(pickle.dumps((what, args))))

    def end(self, timeout: float) -> int:
        """Wait for the end; returns the exit code, or minus the number of the signal."""
        deadline = time.monotonic() + timeout
        while (code := _answer(self.pid)) is None:
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


def _answer(request: bytes | int) -> Any:
    assert _server is not None, "the fork server starts when tests have been collected"
    _server.send(request)
    return _server.recv()


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
