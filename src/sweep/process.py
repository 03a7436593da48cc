"""A run in a subprocess, so that no memory, cache, thread count or seed passes from one run to the next."""

import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from ..checkpointing.resume import lock_run_dir
from ..checkpointing.signals import STOPPING, forces_exit, handled_signals, redirect_closed_terminals, terminal_streams
from ..errors import UserError
from ..records.read import read
from ..records.run_record import Status, close_open
from .fork_server import JOB, ForkedRun, ForkServer

_GROUP_TIMEOUT_S = 5
# SLURM sends one of these to submitit when the time of its job is up.
_LAUNCHER_SIGNALS = tuple(getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name))
# A bug in native code ends its own process by one of these.
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS)


def exit_on_signals() -> None:
    """From now on Ctrl-C, SIGTERM and SIGHUP raise SystemExit, with 128 more than the signal's number."""
    opened = terminal_streams()

    def leave(number: int, frame: FrameType | None) -> None:
        redirect_closed_terminals(opened)
        raise SystemExit(128 + number)

    for number in handled_signals():
        signal.signal(number, leave)


def run_in_subprocess(
    run_dir: Path, digest: str, server: ForkServer | None = None, output: tuple[int, int] = (1, 2)
) -> dict[str, Any]:
    """Do the run that a folder's record plans, and return its record, which always says how the run ended.

    Args:
        run_dir: the run's.
        digest: of the configuration that was checked for it (see trust.py).
        server: forks the run; without one the run is a new Python.
        output: descriptors of the run's standard output and standard error.

    Raises:
        SystemExit: once the run has ended, if a signal has asked this process to stop meanwhile.
    """
    ending, process = Ending(run_dir), _RunProcess()
    ending.record(process.run([digest, str(run_dir)], server, output), process.stopped_by)
    if process.stopped_by is not None:
        raise SystemExit(128 + process.stopped_by)
    return read(run_dir)


class Ending:
    """How a run ends, for its record. Made before the run starts."""

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._kills_before = _kills_for_memory()

    def record(self, code: int, stopped_by: int | None) -> None:
        """Say in the record how the run ended, unless the run did, by its exit code and the signal that was sent to it."""
        kills = _kills_for_memory()
        out_of_memory = kills is not None and self._kills_before is not None and kills > self._kills_before
        status, reason = _how_it_ended(stopped_by, code, out_of_memory)
        # Where another process holds the folder, that process does the run.
        with contextlib.suppress(UserError), lock_run_dir(self._run_dir):
            close_open(self._run_dir, status, reason)


class _RunProcess:
    """The process of one run. Signals that end this process end the run first, so that it saves a checkpoint."""

    def __init__(self) -> None:
        self.stopped_by: int | None = None  # the signal that ended the run; None if it ended by itself
        self._stopped_at = 0.0
        self._process: subprocess.Popen[bytes] | ForkedRun | None = None
        self._terminals = terminal_streams()

    def run(self, words: list[str], server: ForkServer | None, output: tuple[int, int]) -> int:
        """Start the process and wait for its end; its exit code, or minus the number of a signal."""
        with self._forwarded_signals():
            self._process = started = (server.fork(words, output) if server else None) or _new_python(words, output)
            try:
                return started.wait()
            finally:
                end_group(started.pid)
                wait_for_group(started.pid)
                self._process = None

    @contextlib.contextmanager
    def _forwarded_signals(self) -> Iterator[None]:
        """Forward signals that end this process to the run.

        A signal that a launcher acts on, as submitit has SLURM requeue the job, reaches the launcher's handler once the
        run has ended.
        """
        if threading.current_thread() is not threading.main_thread():  # Python allows handlers in the main thread alone
            yield
            return
        found = {number: signal.getsignal(number) for number in (*handled_signals(), *_LAUNCHER_SIGNALS)}
        before = {number: handler for number, handler in found.items() if handler is not None}
        for number in handled_signals():
            signal.signal(number, self._stop)
        for number in _LAUNCHER_SIGNALS:
            handler = before.get(number)
            if callable(handler):
                signal.signal(number, functools.partial(self._stop_before, handler))
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Ask the run to end; a second signal kills it."""
        redirect_closed_terminals(self._terminals)
        if self._process is None:
            raise SystemExit(128 + number)
        if self.stopped_by is None:
            self.stopped_by, self._stopped_at = number, time.monotonic()
            self._process.send_signal(number)
        elif forces_exit(number, time.monotonic() - self._stopped_at):
            end_group(self._process.pid)

    def _stop_before(
        self, handler: Callable[[int, FrameType | None], Any], number: int, frame: FrameType | None
    ) -> None:
        """End the run, then call the launcher's handler."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):  # it has just ended by itself
                if self.stopped_by is None:
                    self.stopped_by = number
                    self._process.send_signal(signal.SIGTERM)
                # Not `Popen.wait()`: the handler has interrupted that call, which holds a lock.
                os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        handler(number, frame)


def _new_python(words: list[str], output: tuple[int, int]) -> subprocess.Popen[bytes]:
    """The process of a run.

    The pipe closes when this process ends in any way, which stops the run (see job.py). A new session keeps the
    terminal's Ctrl-C from the run, and makes a group of the run and all that it starts.
    """
    command, streams = [sys.executable, "-m", JOB, *words], (None, None) if output == (1, 2) else output
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=streams[0], stderr=streams[1], start_new_session=True
    )


def _how_it_ended(stopped_by: int | None, code: int, out_of_memory: bool) -> tuple[Status, str]:
    """Status and reason of a run that did not write them itself, by its exit code or minus the signal that killed it."""
    if stopped_by is None and code - 128 in (*STOPPING, *_LAUNCHER_SIGNALS):
        stopped_by = code - 128
    if stopped_by is not None:
        return "interrupted", f"stopped by {_signal_name(stopped_by)}"
    if code == -signal.SIGKILL and out_of_memory:
        return "out_of_memory", "the system ran out of memory and killed the run"
    if code < 0:
        return "failed" if -code in _CRASHES else "killed", f"killed by {_signal_name(-code)}"
    return "failed", f"ended with exit code {code} and said no more"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def end_group(leader: int) -> None:
    """End all that is left of a run: workers, other ranks."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # all gone; macOS says the latter of zombies
        os.killpg(leader, signal.SIGKILL)


def wait_for_group(leader: int) -> None:
    """Wait, for a few seconds at most, until nothing of a run is left that could hold a device's memory."""
    deadline = time.monotonic() + _GROUP_TIMEOUT_S
    with contextlib.suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < deadline:
            with contextlib.suppress(ChildProcessError):  # of a forked run, this process is the parent of orphans, too
                while os.waitpid(-leader, os.WNOHANG)[0]:
                    pass
            os.killpg(leader, 0)
            time.sleep(0.02)


def _kills_for_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """How often Linux has killed a process of this one's control group for want of memory.

    None where the count says nothing about a run: there is no such group (of version 2), or it holds processes other
    than this one and those that it has started.
    """
    try:
        line = next(line for line in (proc / "self/cgroup").read_text().splitlines() if line.startswith("0::/"))
        group = groups / line.removeprefix("0::/")
        members = {int(word) for word in (group / "cgroup.procs").read_text().split()}
        events = dict(line.split() for line in (group / "memory.events.local").read_text().splitlines())
        own = psutil.Process()
        ours = {own.pid, *(child.pid for child in own.children(recursive=True))}
        return int(events["oom_kill"]) if members <= ours else None
    except (OSError, StopIteration, ValueError, KeyError, psutil.Error):
        return None
