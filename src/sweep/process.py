"""The processes of runs, so that no memory, cache, thread count or seed passes from one run to the next.

On Linux a run is forked from the standard library's server, which has imported all that a run needs (fork_server.py). A run
of several ranks, of a launcher or of another Python is a new Python, and so is every run on another system. A socket to it
carries what the run shall do, and the visits of a run that waits for them; the run answers the same way. A signal to the
sweep ends the runs first.
"""

import contextlib
import functools
import importlib
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, Self

from hydra.core.utils import env_override

from .. import _system
from .._system import STOPPING
from ..checkpointing.resume import lock_run_dir
from ..checkpointing.signals import forces_exit, handled_signals, redirect_closed_terminals, terminal_streams
from ..errors import UserError
from ..files import why
from ..options.ranks import ranks_asked
from ..records.run_record import Status, close_open
from .fork_server import IS_SERVER
from .plans import Job

PROGRAM = "batchscope.sweep.job"  # of a run
PRELOADED = ["batchscope.sweep.fork_server"]
_GROUP_TIMEOUT_S = 5
# SLURM sends one of these to submitit when the time of its job is up.
LAUNCHER_SIGNALS = _system.signals_named("SIGUSR1", "SIGUSR2")


class Process:
    """The process of one run: the leader of a group, of which nothing is left once it was waited for.

    It has just been started, and waits for visits if it is `visited`. `output` has the descriptors of its standard output
    and standard error. UserError if it cannot be started.

    Attributes:
        job: the run.
        program: its process, which leads a group.
        ended: whether it was waited for.
    """

    def __init__(self, job: Job, output: tuple[int, int] = (1, 2), visited: bool = False):
        self.job = job
        self.ended = False
        self._stopped_by: int | None = None
        with env_override(dict(job.environ)):
            self.program = _forked(job, output) or _new_python(job, output)
        self._answers = self.program.connection.makefile("rb")
        asked = {"config": job.config, "choices": job.facts["choices"], "overrides": job.facts["overrides"]}
        self.tell(json.dumps({**asked, "visited": visited}))

    def ask(self, line: str) -> Mapping[str, Any] | None:
        """Write a line to the run and wait for its answer; None if it ends instead."""
        return self.answer() if self.tell(line) else None

    def answer(self) -> Mapping[str, Any] | None:
        """Wait for the run's next line; None if it ends instead."""
        with contextlib.suppress(OSError):
            self.program.await_word()
            if (line := self._answers.readline()).endswith(b"\n"):
                return json.loads(line)
        return None

    def tell(self, line: str) -> bool:
        """Write a line to the run; whether it could be written."""
        try:
            self.program.connection.sendall(line.encode() + b"\n")
        except OSError:  # the run has ended
            return False
        return True

    def interrupt(self, number: int) -> None:
        """Send a signal that asks the run to end, once, and let it wait for no more visits."""
        if not self.ended and self._stopped_by is None:
            self._stopped_by = number
            if not self.program.send_signal(number):
                self.tell(f"signal {number}")
        self.tell("end")

    def wait(self) -> None:
        """Wait until nothing of the group is left, and record how the run ended, unless it did."""
        if self.ended:
            return
        try:
            code = self.program.wait()
        finally:
            self.program.end_group(_GROUP_TIMEOUT_S)
        self.ended = True
        self._answers.close()
        self.program.connection.close()
        # Where another process holds the folder, that process does the run.
        with contextlib.suppress(UserError), lock_run_dir(self.job.run_dir):
            close_open(self.job.run_dir, *_how_it_ended(self._stopped_by, code))


class Processes:
    """The processes that run now, as a context manager that waits for them at its end.

    An exception ends them first, and so does a signal that ends this process, so that they save their checkpoints.
    SystemExit follows a signal, once they have ended.
    """

    def __init__(self) -> None:
        self._running: list[Process] = []
        self.stopped_by: int | None = None  # a signal
        self._stopped_at = 0.0

    def add(self, start: Callable[[], Process]) -> Process:
        """Start a process; SystemExit if a signal has asked this one to stop."""
        self.exit_if_stopped()
        process = start()
        self._running.append(process)
        if self.stopped_by is not None:  # while it was started
            process.interrupt(self.stopped_by)
        return process

    def exit_if_stopped(self) -> None:
        """Raise SystemExit if a signal has asked this process to stop."""
        if self.stopped_by is not None:
            raise SystemExit(128 + self.stopped_by)

    def __enter__(self) -> Self:
        """Forward signals that end this process to the runs.

        A signal that a launcher acts on, as submitit has SLURM requeue the job, reaches the launcher's handler once the
        runs have ended.
        """
        handlers: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():  # Python allows handlers there alone
            self._terminals = terminal_streams()
            handlers = dict.fromkeys(handled_signals(), self._stop)
            for number in LAUNCHER_SIGNALS:
                if callable(handler := signal.getsignal(number)):
                    handlers[number] = functools.partial(self._stop_before, handler)
        self._before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is not None:
                self._interrupt(signal.SIGTERM)
            for process in self._running:
                with contextlib.suppress(UserError):  # one record that cannot be written leaves no other run behind
                    process.wait()
        finally:
            for number, handler in self._before.items():
                if handler is not None:  # one that C code has set cannot be set again
                    signal.signal(number, handler)
            self.exit_if_stopped()

    def _interrupt(self, number: int) -> None:
        for process in self._running:
            process.interrupt(number)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Ask the runs to end; a second Ctrl-C or SIGTERM, more than 0.3 s later, kills them."""
        redirect_closed_terminals(self._terminals)
        if self.stopped_by is None:
            self.stopped_by, self._stopped_at = number, time.monotonic()
            self._interrupt(number)
        elif forces_exit(number, time.monotonic() - self._stopped_at):
            for process in self._running:
                if not process.ended:
                    process.program.end_group()

    def _stop_before(
        self, handler: Callable[[int, FrameType | None], Any], number: int, frame: FrameType | None
    ) -> None:
        """End the runs, then call the launcher's handler. The runs of launchers are new Pythons, children of this one."""
        self.stopped_by = self.stopped_by or number
        self._interrupt(signal.SIGTERM)
        for process in self._running:
            if not process.ended:
                process.program.await_end()
        handler(number, frame)


def start_server() -> bool:
    """Have the server that runs are forked from import; whether there can be one. It ends with this process."""
    with contextlib.suppress(OSError, EOFError):  # it has ended, or TMPDIR is too long for a socket or takes none
        _system.start_fork_server(PRELOADED, IS_SERVER)
        return _system.CAN_FORK
    return False


def _forked(job: Job, output: tuple[int, int]) -> _system.Program | None:
    """A run that is forked from the server; None where it is to be a new Python."""
    if not (job.forks and ranks_asked(job.config) == 1 and start_server()):
        return None
    try:
        return _system.fork(_run_forked, (PROGRAM, str(job.run_dir)), output)
    except (OSError, EOFError):  # the server has ended
        return None


def _run_forked(program: str, run_dir: str) -> None:
    sys.argv = [program, run_dir]
    importlib.import_module(program).main()


def _new_python(job: Job, output: tuple[int, int]) -> _system.Program:
    command = [job.python, "-P", "-m", PROGRAM, str(job.run_dir)]
    try:
        return _system.start_program(command, output)
    except OSError as error:
        raise UserError(f"{command[0]} cannot be started: {why(error)}") from error


def _how_it_ended(stopped_by: int | None, code: int) -> tuple[Status, str]:
    """Status and reason of a run that did not write them itself, by its exit code or minus the signal that killed it."""
    if stopped_by is None and code - 128 in (*STOPPING, *LAUNCHER_SIGNALS):
        stopped_by = code - 128
    number = stopped_by or -code
    name = signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"
    if stopped_by is not None:
        return "interrupted", f"stopped by {name}"
    if name == "SIGKILL":
        return "killed", "killed by SIGKILL, as the system does where it runs out of memory"
    if code < 0:  # any other signal, as SIGSEGV, is a bug in native code
        return "killed" if -code in STOPPING else "failed", f"killed by {name}"
    if code == _system.SERVER_LOST:
        return "killed", "ended without a word"
    return "failed", f"ended with exit code {code} and said no more"
