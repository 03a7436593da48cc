"""A process that has imported everything, collected the tests and computed nothing, from which tests fork processes.

pytest forks it when it has collected the tests: torch, Lightning, this project and the tests are imported once for the
tests themselves and for the processes that they start. A process that has computed with several threads, or has used a
GPU, cannot be forked; the tests have done neither when they are collected.
"""

import multiprocessing
import os
import pickle
import time
import warnings
from collections.abc import Callable
from multiprocessing import connection
from typing import Any, Self

from tests.support.waiting import PATIENCE_S

_fork = multiprocessing.get_context("fork") if "fork" in multiprocessing.get_all_start_methods() else None
_server: connection.Connection | None = None
_server_pid = 0
_exit_codes: dict[int, int] = {}


class Forked:
    """A process that calls a function, which is importable by its name."""

    def __init__(self, pid: int):
        self.pid = pid

    @classmethod
    def start(cls, what: Callable[..., None], *args: Any) -> Self:
        assert _server is not None, "the fork server starts when tests have been collected"
        _server.send_bytes(pickle.dumps((what, args)))
        return cls(_receive(None, timeout=PATIENCE_S))

    def end(self, timeout: float) -> int:
        """Wait for the end; returns the exit code, or minus the number of the signal."""
        return _receive(self.pid, timeout)


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
        _server.send_bytes(b"")
        _server = None
        os.waitpid(_server_pid, 0)


def _receive(pid: int | None, timeout: float) -> int:
    """The exit code of a process, or without `pid` the number of the one that has just been started."""
    deadline = time.monotonic() + timeout
    while pid is None or pid not in _exit_codes:
        assert _server.poll(deadline - time.monotonic()), "the process hangs"
        kind, number, code = _server.recv()
        if kind == "started":
            return number
        _exit_codes[number] = code
    return _exit_codes[pid]


def _serve(client: connection.Connection) -> None:
    """Fork a process for each request, and say which has ended and how, until the client has gone."""
    running: dict[int, multiprocessing.Process] = {}
    while True:
        sentinels = {process.sentinel: process for process in running.values()}
        for ready in connection.wait([client, *sentinels]):
            if ready is client:
                try:
                    request = client.recv_bytes()
                except EOFError:
                    return
                if not request:
                    return
                process = _fork.Process(target=_run, args=(client, request))
                process.start()
                running[process.pid] = process
                client.send(("started", process.pid, None))
            else:
                ended = sentinels[ready]
                ended.join()
                client.send(("ended", ended.pid, ended.exitcode))
                del running[ended.pid]


def _run(client: connection.Connection, request: bytes) -> None:
    client.close()
    what, args = pickle.loads(request)
    what(*args)
