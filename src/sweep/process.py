"""Each run has a process of its own, so that no memory, cache, thread count or seed passes from one run to the next.

On Linux a run is forked from the standard library's server, which has imported all that a run needs (fork_server.py). A
run of several ranks, of a launcher, of another Python or on another system is a new Python process. Over a socket the
sweep sends the request and then the visits, and the run answers. A signal to the sweep ends the runs first.
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
from ..records.run_record import Status, record_missing_end
from .fork_server import IS_SERVER
from .plans import Job

PROGRAM = "batchscope.sweep.job"  # the module that a run's process executes
PRELOADED = ["batchscope.sweep.fork_server"]
_GROUP_TIMEOUT_S = 5
# SLURM sends one of these to submitit when the time of its job is up.
LAUNCHER_SIGNALS = _system.signals_named("SIGUSR1", "SIGUSR2")


class Process:
    """The process of one run. It leads a process group; after `wait` no process of the group is left.

    The constructor starts the process. With `visited` the run waits for visits. `output` has the descriptors of
    standard output and standard error. UserError if the process cannot be started.

    Attributes:
        job: the run.
        program: the started process.
        has_ended: whether `wait` has returned.
    """

    def __init__(self, job: Job, output: tuple[int, int] = (1, 2), visited: bool = False):
        self.job = job
        self.has_ended = False
        self._stopped_by: int | None = None
        with env_override(dict(job.environ)):
            self.program = _fork_run(job, output) or _start_python(job, output)
        self._answers = self.program.connection.makefile("rb")
        choices, overrides = job.record_fields["choices"], job.record_fields["overrides"]
        request = {"config": job.config, "choices": choices, "overrides": overrides, "visited": visited}
        self.send_line(json.dumps(request))

    def ask(self, line: str) -> Mapping[str, Any] | None:
        """Write a line to the run and wait for its answer; return None if the run ends instead."""
        return self.read_answer() if self.send_line(line) else None

    def read_answer(self) -> Mapping[str, Any] | None:
        """Wait for the run's next line and return it; return None if the run ends instead."""
        with contextlib.suppress(OSError):
            self.program.wait_for_output()
            if (line := self._answers.readline()).endswith(b"\n"):
                return json.loads(line)
        return None

    def send_line(self, line: str) -> bool:
        """Write a line to the run; return whether it could be written."""
        try:
            self.program.connection.sendall(line.encode() + b"\n")
        except OSError:  # the run has ended
            return False
        return True

    def interrupt(self, number: int) -> None:
        """Send a signal that asks the run to end, once, and end its wait for visits."""
        if not self.has_ended and self._stopped_by is None:
            self._stopped_by = number
            if not self.program.send_signal(number):
                self.send_line(f"signal {number}")
        self.send_line("end")

    def wait(self) -> None:
        """Wait until no process of the group is left, and record how the run ended, unless the run has done so."""
        if self.has_ended:
            return
        try:
            code = self.program.wait()
        finally:
            self.program.end_group(_GROUP_TIMEOUT_S)
        self.has_ended = True
        self._answers.close()
        self.program.connection.close()
        # If another process holds the folder, that process does the run.
        with contextlib.suppress(UserError), lock_run_dir(self.job.run_dir):
            record_missing_end(self.job.run_dir, *_status_and_reason(self._stopped_by, code))


class Processes:
    """A context manager that waits for the processes of runs when its block ends.

    An exception, or a signal that ends this process, ends the runs first, so that they save their checkpoints. After a
    signal the context manager raises SystemExit once the runs have ended.
    """

    def __init__(self) -> None:
        self._running: list[Process] = []
        self.stopped_by: int | None = None  # the number of a signal
        self._stopped_at = 0.0

    def add(self, start: Callable[[], Process]) -> Process:
        """Start a run's process; SystemExit if a signal has asked this process to stop."""
        self.exit_if_stopped()
        process = start()
        self._running.append(process)
        if self.stopped_by is not None:  # the signal came while the run's process was started
            process.interrupt(self.stopped_by)
        return process

    def exit_if_stopped(self) -> None:
        """Raise SystemExit if a signal has asked this process to stop."""
        if self.stopped_by is not None:
            raise SystemExit(128 + self.stopped_by)

    def __enter__(self) -> Self:
        """Forward signals that end this process to the runs.

        A signal that a launcher handles (submitit then has SLURM requeue the job) reaches the launcher's handler once
        the runs have ended.
        """
        handlers: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():  # only there Python allows handlers
            self._terminals = terminal_streams()
            handlers = dict.fromkeys(handled_signals(), self._stop)
            for number in LAUNCHER_SIGNALS:
                if callable(handler := signal.getsignal(number)):
                    handlers[number] = functools.partial(self._stop_and_call, handler)
        self._previous_handlers = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is not None:
                self._interrupt(signal.SIGTERM)
            for process in self._running:
                with contextlib.suppress(UserError):  # if a record cannot be written, the other runs are waited for
                    process.wait()
        finally:
            for number, handler in self._previous_handlers.items():
                if handler is not None:  # Python cannot restore a handler that C code has set
                    signal.signal(number, handler)
            self.exit_if_stopped()

    def _interrupt(self, number: int) -> None:
        for process in self._running:
            process.interrupt(number)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Ask the runs to end; a second Ctrl-C or SIGTERM, more than 0.3 s later, kills the runs."""
        redirect_closed_terminals(self._terminals)
        if self.stopped_by is None:
            self.stopped_by, self._stopped_at = number, time.monotonic()
            self._interrupt(number)
        elif forces_exit(number, time.monotonic() - self._stopped_at):
            for process in self._running:
                if not process.has_ended:
                    process.program.end_group()

    def _stop_and_call(
        self, handler: Callable[[int, FrameType | None], Any], number: int, frame: FrameType | None
    ) -> None:
        """End the runs, then call the launcher's handler. A launcher's runs are new Pythons, and so child processes."""
        self.stopped_by = self.stopped_by or number
        self._interrupt(signal.SIGTERM)
        for process in self._running:
            if not process.has_ended:
                process.program.wait_for_exit()
        handler(number, frame)


def start_server() -> bool:
    """Start the server that runs are forked from; return whether there is one. The server ends with this process."""
    with contextlib.suppress(OSError, EOFError):  # the server has ended, or TMPDIR cannot hold a socket
        _system.start_fork_server(PRELOADED, IS_SERVER)
        return _system.CAN_FORK
    return False


def _fork_run(job: Job, output: tuple[int, int]) -> _system.Program | None:
    """Fork a run from the server; return None if the run needs a new Python, or there is no server."""
    if not (job.may_fork and ranks_asked(job.config) == 1 and start_server()):
        return None
    try:
        return _system.fork(_run_forked, (PROGRAM, str(job.run_dir)), output)
    except (OSError, EOFError):  # the server has ended
        return None


def _run_forked(program: str, run_dir: str) -> None:
    sys.argv = [program, run_dir]
    importlib.import_module(program).main()


def _start_python(job: Job, output: tuple[int, int]) -> _system.Program:
    command = [job.python, "-P", "-m", PROGRAM, str(job.run_dir)]
    try:
        return _system.start_program(command, output)
    except OSError as error:
        raise UserError(f"{command[0]} cannot be started: {why(error)}") from error


def _status_and_reason(stopped_by: int | None, code: int) -> tuple[Status, str]:
    """Return status and reason of a run that wrote none; `code` is its exit code, or minus the killing signal."""
    if stopped_by is None and code - 128 in (*STOPPING, *LAUNCHER_SIGNALS):
        stopped_by = code - 128
    number = stopped_by or -code
    name = signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"
    if stopped_by is not None:
        return "interrupted", f"stopped by {name}"
    if name == "SIGKILL":
        return "killed", "killed by SIGKILL, as the system does where it runs out of memory"
    if code < 0:  # another signal, such as SIGSEGV, is a bug in native code
        return "killed" if -code in STOPPING else "failed", f"killed by {name}"
    if code == _system.SERVER_LOST:
        return "killed", "ended without a word"
    return "failed", f"ended with exit code {code} and said no more"
