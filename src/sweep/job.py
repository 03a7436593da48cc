"""One run of a sweep, in the process that the sweep started for it: python -m batchscope.sweep.job <digest> <run folder>

The folder's run.json says what to do. The digest is that of the configuration on the sweep's command line; whatever
else a file says is not trusted. The sweep, or the launcher's job that it is in, holds the other end of standard input.
When the sweep ends in any way, that end closes, and the run stops.

With --serve it is the process that runs are forked from (fork_server.py).
"""

import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

from ..checkpointing import resume
from ..errors import UserError, exit_on_user_error
from ..records.read import read
from ..records.run_record import close, ended_as, reason
from ..records.terminal import leave_words_to_sweep
from . import fork_server
from .process import exit_on_signals


def main() -> None:
    """The program."""
    _hide_slurm()  # before Lightning is imported
    if sys.argv[1] == fork_server.SERVE:
        fork_server.serve()
    exit_on_signals()  # until the run has its own way to stop
    leave_words_to_sweep()
    threading.Thread(target=_stop_with_the_sweep, daemon=True).start()
    known, run_dir = sys.argv[1:]
    exit_on_user_error(lambda: run_planned(Path(run_dir), known))


def run_planned(run_dir: Path, known: str | None = None) -> None:
    """Train as the folder's record plans, or resume a run that was killed or interrupted.

    `known` is the digest of the configuration that the sweep has checked. An exception that ends the run is also in
    its record.
    """
    record = read(run_dir)
    try:
        config = resume.configuration(record, run_dir, [], known)
        if record.get("status") == "planned":
            config["resume"] = None
        from ..training.run import train  # torch takes seconds to import; signals are handled by now

        train(config, run_dir, record.get("choices", {}), record.get("overrides", []))
    except Exception as error:
        with contextlib.suppress(UserError), resume.lock_run_dir(run_dir):  # unless another process does this run
            if read(run_dir).get("status") == "planned":  # it ended before it wrote its own record
                close(run_dir, ended_as(error), reason(error))
        raise


def _hide_slurm() -> None:
    """Within a SLURM job: the job's task is the process that started this one, and handles SLURM's signals.

    Lightning starts the run's other ranks itself; it would otherwise take the job's tasks for them.
    """
    os.environ.pop("SLURM_NTASKS", None)
    warnings.filterwarnings("ignore", "The `srun` command is available")
    if hasattr(signal, "SIGUSR2"):
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # some clusters send it to all processes of a job


def _stop_with_the_sweep() -> None:
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def exit_without_teardown(program: Callable[[], None]) -> None:
    """Run a program and end the process at once: Python takes two seconds to destroy what torch and Lightning consist of.

    What other modules do at the exit is done before.
    """
    code: str | int | None = 1

    def leave() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        logging.shutdown()
        os._exit(code if isinstance(code, int) else int(code is not None))

    atexit.register(leave)  # the first that is registered is called last
    try:
        program()
        code = 0
    except SystemExit as stop:
        code = stop.code
        raise


if __name__ == "__main__":
    exit_without_teardown(main)
