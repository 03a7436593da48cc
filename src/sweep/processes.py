"""The processes of the runs that are going on, and what signals do to them."""

import contextlib
import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, Self

from ..checkpointing.signals import forces_exit, handled_signals, redirect_closed_terminals, terminal_streams
from ..errors import UserError
from .fork_server import ForkServer
from .process import LAUNCHER_SIGNALS, Job, Process, end_group, is_one_process


class Processes:
    """The processes that run now. A signal that ends this process ends them first, so that they save their checkpoints.

    A context manager: its exit waits for them, and then raises SystemExit if a signal has come. An exception ends the
    runs, too.
    """

    def __init__(self, server: ForkServer | None = None):
        self._server = server
        self._running: list[Process] = []
        self._stopped_by: int | None = None
        self._stopped_at = 0.0

    def start(self, job: Job, output: tuple[int, int] = (1, 2), visited: bool = False) -> Process:
        """Start a run. Raises UserError if it cannot be."""
        server = self._server if is_one_process(job.config) else None  # Lightning's other ranks are new Pythons
        process = Process(job, server, output, visited)
        self._running.append(process)
        if self._stopped_by is not None:  # while it was started
            process.interrupt(self._stopped_by)
        return process

    def __enter__(self) -> Self:
        self._signals = self._forwarded_signals()
        self._signals.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            for process in self._running if error is not None else ():
                process.interrupt(signal.SIGTERM)
            for process in self._running:
                with contextlib.suppress(UserError):  # one record that cannot be written leaves no other run behind
                    process.wait()
        finally:
            self._signals.__exit__(None, None, None)
        if self._stopped_by is not None:
            raise SystemExit(128 + self._stopped_by)

    @contextlib.contextmanager
    def _forwarded_signals(self) -> Iterator[None]:
        """Forward signals that end this process to the runs.

        A signal that a launcher acts on, as submitit has SLURM requeue the job, reaches the launcher's handler once the
        runs have ended.
        """
        if threading.current_thread() is not threading.main_thread():  # Python allows handlers in the main thread alone
            yield
            return
        self._terminals = terminal_streams()
        found = {number: signal.getsignal(number) for number in (*handled_signals(), *LAUNCHER_SIGNALS)}
        before = {number: handler for number, handler in found.items() if handler is not None}
        for number in handled_signals():
            signal.signal(number, self._stop)
        for number in LAUNCHER_SIGNALS:
            handler = before.get(number)
            if callable(handler):
                signal.signal(number, functools.partial(self._stop_before, handler))
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Ask the runs to end; a second signal kills them."""
        redirect_closed_terminals(self._terminals)
        if self._stopped_by is None:
            self._stopped_by, self._stopped_at = number, time.monotonic()
            for process in self._running:
                process.interrupt(number)
        elif forces_exit(number, time.monotonic() - self._stopped_at):
            for process in self._running:
                if not process.ended:
                    end_group(process.pid)

    def _stop_before(
        self, handler: Callable[[int, FrameType | None], Any], number: int, frame: FrameType | None
    ) -> None:
        """End the runs, then call the launcher's handler."""
        self._stopped_by = self._stopped_by or number
        for process in self._running:
            process.interrupt(signal.SIGTERM)
        for process in self._running:
            with contextlib.suppress(ChildProcessError):  # it has just ended by itself
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        handler(number, frame)
