"""A run in a process of its own, so that no memory, cache, thread count or seed passes from one run to the next."""

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
from ..records.run_record import close_open
from ..records.status import Status

_GONE_S = 5
# By one of these SLURM tells submitit that the time of its job is up.
_LAUNCHERS = tuple(getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name))
# By one of these a process ends itself, through a mistake in its code.
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS)
_running: subprocess.Popen | None = None
_stopped_by: int | None = None
_stopped_at = 0.0
_terminals: list[int] = []


def listen() -> None:
    """From now on Ctrl-C, SIGTERM and SIGHUP end the sweep: the run that is going on is told, and may write what it has.

    A second one ends that run at once. Afterwards the exception SystemExit, with 128 more than the signal's number, is
    on its way.
    """
    global _terminals
    _terminals = terminal_streams()
    for number in handled_signals():
        signal.signal(number, _stop)


def _stop(number: int, _: Any) -> None:
    global _stopped_by, _stopped_at
    redirect_closed_terminals(_terminals)
    if _running is None:
        raise SystemExit(128 + number)
    if _stopped_by is None:
        _stopped_by, _stopped_at = number, time.monotonic()
        _running.send_signal(number)
    elif forces_exit(number, time.monotonic() - _stopped_at):
        _end_group(_running.pid)


@contextlib.contextmanager
def _in_good_order() -> Iterator[None]:
    """Whatever ends this process meanwhile ends the run first, which so keeps a checkpoint.

    In a sweep's own process `listen` has seen to it; a launcher's job is a process that has not listened. A signal
    that the launcher acts on, as submitit has SLURM start the job again, is the launcher's once the run has ended.
    """
    if threading.current_thread() is not threading.main_thread():  # which alone may listen
        yield
        return
    found = {number: signal.getsignal(number) for number in (*handled_signals(), *_LAUNCHERS)}
    before = {number: handler for number, handler in found.items() if handler is not None}
    listen()
    for number in _LAUNCHERS:
        if callable(before.get(number)):
            signal.signal(number, functools.partial(_stop_first, before[number]))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop_first(then: Callable[[int, FrameType | None], Any], number: int, frame: FrameType | None) -> None:
    """End the run that is going on, then do what the launcher does at this signal."""
    global _stopped_by
    if _running is not None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):  # it has just ended by itself
            if _stopped_by is None:
                _stopped_by = number
                _running.send_signal(signal.SIGTERM)
            # Not `_running.wait()`, which the handler has interrupted and which holds a lock.
            os.waitid(os.P_PID, _running.pid, os.WEXITED | os.WNOWAIT)
    then(number, frame)


def run_in_subprocess(run_dir: Path, digest: str) -> dict[str, Any]:
    """Do the run that a folder's record plans, and wait for its end.

    Args:
        run_dir: the run's.
        digest: of the configuration that was checked for it (see trust.py).

    Returns:
        The record, which says how the run ended even if its process could not.

    Raises:
        SystemExit: once the run has ended, if this process was told to stop meanwhile.
    """
    global _running
    kills = _kills_for_memory()
    # The pipe is how the run notices that this process is gone, however that came about (see job.py). A session of
    # its own: Ctrl-C reaches it through this process alone, and all that it starts can be ended with it.
    line = [sys.executable, "-m", "batchscope.sweep.job", digest, str(run_dir)]
    with _in_good_order():
        _running = subprocess.Popen(line, stdin=subprocess.PIPE, start_new_session=True)
        try:
            code = _running.wait()
        finally:
            _end_group(_running.pid)
            _wait_for_group(_running.pid)
            _running = None
    after = _kills_for_memory()
    # Where another process holds the folder, the run is going on in that one.
    with contextlib.suppress(UserError), lock_run_dir(run_dir):
        close_open(run_dir, *_how_it_ended(code, out_of_memory=None not in (kills, after) and after > kills))
    if _stopped_by is not None:
        raise SystemExit(128 + _stopped_by)
    return read(run_dir)


def _how_it_ended(code: int, out_of_memory: bool) -> tuple[Status, str]:
    """Status and reason of a run that did not come to write them."""
    if _stopped_by is not None:
        return "interrupted", f"stopped by {signal.Signals(_stopped_by).name}"
    if code - 128 in STOPPING:
        return "interrupted", f"stopped by {signal.Signals(code - 128).name}"
    if code == -signal.SIGKILL and out_of_memory:
        return "out_of_memory", "the system ran out of memory and killed the run"
    if code < 0:
        return "failed" if -code in _CRASHES else "killed", f"killed by {_name(-code)}"
    return "failed", f"ended with exit code {code} and said no more"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # one of those for real time
        return f"signal {number}"


def _end_group(leader: int) -> None:
    """End all that is left of a run: workers, other ranks."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # all gone; macOS says the latter of zombies
        os.killpg(leader, signal.SIGKILL)


def _wait_for_group(leader: int) -> None:
    """Until nothing of a run is left that could hold a device's memory, as long as that can reasonably take."""
    deadline = time.monotonic() + _GONE_S
    with contextlib.suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < deadline:
            os.killpg(leader, 0)
            time.sleep(0.02)


def _kills_for_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """How often Linux has killed a process of this one's control group for want of memory.

    None where that says nothing about a run: there is no such group (of version 2), or others than this process and
    those it has started are in it.
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
