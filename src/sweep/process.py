"""The processes of runs, so that no memory, cache, thread count or seed passes from one run to the next.

Every run is such a process: forked from the server where there is one, or else a new Python. A socket is its standard
input. It carries what the run shall do, and the visits of a run that waits for them; the run answers the same way. A
signal to the sweep ends the runs first.
"""

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from ..checkpointing.resume import lock_run_dir
from ..checkpointing.signals import (
    STOPPING,
    forces_exit,
    handled_signals,
    redirect_closed_terminals,
    terminal_streams,
)
from ..errors import UserError
from ..files import why
from ..records.run_record import Status, close_open
from . import fork_server
from .fork_server import ForkServer
from .plans import Job, is_one_process

_GROUP_TIMEOUT_S = 5
# SLURM sends one of these to submitit when the time of its job is up.
LAUNCHER_SIGNALS = tuple(getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name))
# A bug in native code ends its own process by one of these.
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS)


class Process:
    """The process of one run, which has just been started.

    Args:
        job: the run; its record is `planned`, or that of the run to be resumed.
        server: forks it; without one it is a new Python.
        output: descriptors of its standard output and standard error.
        visited: whether it waits for visits.

    Raises:
        UserError: if it cannot be started.
    """

    def __init__(self, job: Job, server: ForkServer | None, output: tuple[int, int] = (1, 2), visited: bool = False):
        self.job = job
        self.ended = False
        self._stopped_by: int | None = None
        self._kills_before = _kills_for_memory()
        self._connection, theirs = socket.socketpair()
        with theirs:
            words = [str(job.run_dir)]
            forked = server.fork(words, (theirs.fileno(), *output)) if server is not None else None
            self.pid = forked or _new_python(job.python, words, theirs.fileno(), output)
        self._answers = self._connection.makefile("rb")
        asked = {"config": job.config, "choices": job.facts["choices"], "overrides": job.facts["overrides"]}
        self.tell(json.dumps({**asked, "visited": visited}))

    def ask(self, line: str) -> Mapping[str, Any] | None:
        """Write a line to the run and wait for its answer; None if it ends instead."""
        return self.answer() if self.tell(line) else None

    def answer(self) -> Mapping[str, Any] | None:
        """Wait for the run's next line; None if it ends instead."""
        with contextlib.suppress(OSError):
            if (line := self._answers.readline()).endswith(b"\n"):
                return json.loads(line)
        return None

    def tell(self, line: str) -> bool:
        """Write a line to the run; whether it could be written."""
        try:
            self._connection.sendall(line.encode() + b"\n")
        except OSError:  # the run has ended
            return False
        return True

    def interrupt(self, number: int) -> None:
        """Send a signal that asks the run to end, and let it wait for no more visits."""
        if not self.ended and self._stopped_by is None:
            self._stopped_by = number
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)
            self.tell("end")

    def wait(self) -> None:
        """Wait until nothing of the run is left, and record how it ended, unless the run did."""
        if self.ended:
            return
        try:
            code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        finally:
            end_group(self.pid)
            wait_for_group(self.pid)
        self.ended = True
        self._answers.close()
        self._connection.close()
        kills = _kills_for_memory()
        out_of_memory = kills is not None and self._kills_before is not None and kills > self._kills_before
        status, reason = _how_it_ended(self._stopped_by, code, out_of_memory)
        # Where another process holds the folder, that process does the run.
        with contextlib.suppress(UserError), lock_run_dir(self.job.run_dir):
            close_open(self.job.run_dir, status, reason)


class Processes:
    """The processes that run now (see `running`)."""

    def __init__(self, server: ForkServer | None):
        self._server = server
        self._running: list[Process] = []
        self._stopped_at = 0.0
        self.stopped_by: int | None = None  # a signal

    def start(self, job: Job, output: tuple[int, int] = (1, 2), visited: bool = False) -> Process:
        """Start a run.

        Raises:
            UserError: if it cannot be started.
            SystemExit: if a signal has asked this process to stop.
        """
        if self.stopped_by is not None:
            raise SystemExit(128 + self.stopped_by)
        server = self._server if is_one_process(job.config) else None  # Lightning's other ranks are new Pythons
        process = Process(job, server, output, visited)
        self._running.append(process)
        if self.stopped_by is not None:  # while it was started
            process.interrupt(self.stopped_by)
        return process

    def interrupt(self, number: int) -> None:
        """Send all a signal that asks them to end."""
        for process in self._running:
            process.interrupt(number)

    def wait(self) -> None:
        """Wait for all."""
        for process in self._running:
            with contextlib.suppress(UserError):  # one record that cannot be written leaves no other run behind
                process.wait()

    @contextlib.contextmanager
    def forwarded_signals(self) -> Iterator[None]:
        """Forward signals that end this process to the runs.

        A signal that a launcher acts on, as submitit has SLURM requeue the job, reaches the launcher's handler once the
        runs have ended.
        """
        if threading.current_thread() is not threading.main_thread():  # Python allows handlers in the main thread alone
            yield
            return
        self._terminals = terminal_streams()
        handlers: dict[int, Any] = dict.fromkeys(handled_signals(), self._stop)
        for number in LAUNCHER_SIGNALS:
            if callable(handler := signal.getsignal(number)):
                handlers[number] = functools.partial(self._stop_before, handler)
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                if handler is not None:  # one that C code has set cannot be set again
                    signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Ask the runs to end; a second signal kills them."""
        redirect_closed_terminals(self._terminals)
        if self.stopped_by is None:
            self.stopped_by, self._stopped_at = number, time.monotonic()
            self.interrupt(number)
        elif forces_exit(number, time.monotonic() - self._stopped_at):
            for process in self._running:
                if not process.ended:
                    end_group(process.pid)

    def _stop_before(
        self, handler: Callable[[int, FrameType | None], Any], number: int, frame: FrameType | None
    ) -> None:
        """End the runs, then call the launcher's handler."""
        self.stopped_by = self.stopped_by or number
        self.interrupt(signal.SIGTERM)
        for process in self._running:
            with contextlib.suppress(ChildProcessError):  # it has just ended by itself
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        handler(number, frame)


@contextlib.contextmanager
def running(server: ForkServer | None = None) -> Iterator[Processes]:
    """Processes that are started within, and waited for at the end.

    An exception ends them first, and so does a signal that ends this process, so that they save their checkpoints.

    Raises:
        SystemExit: once they have ended, if a signal has come.
    """
    processes = Processes(server)
    try:
        with processes.forwarded_signals():
            try:
                yield processes
            except BaseException:
                processes.interrupt(signal.SIGTERM)
                raise
            finally:
                processes.wait()
    finally:
        if processes.stopped_by is not None:
            raise SystemExit(128 + processes.stopped_by)


def _new_python(python: str, words: Sequence[str], stdin: int, output: tuple[int, int]) -> int:
    """Start a run in a session of its own, which keeps the terminal's Ctrl-C from it; the number of its process."""
    streams = (None, None) if output == (1, 2) else output
    command, (out, err) = [python, "-m", fork_server.JOB, *words], streams
    try:
        started = subprocess.Popen(command, stdin=stdin, stdout=out, stderr=err, start_new_session=True)
    except OSError as error:
        raise UserError(f"{python} cannot be started: {why(error)}") from error
    started.returncode = 0  # `Process.wait` waits for it
    return started.pid


def _how_it_ended(stopped_by: int | None, code: int, out_of_memory: bool) -> tuple[Status, str]:
    """Status and reason of a run that did not write them itself, by its exit code or minus the signal that killed it."""
    if stopped_by is None and code - 128 in (*STOPPING, *LAUNCHER_SIGNALS):
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
