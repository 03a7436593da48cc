"""One run of a sweep, in the process that the sweep started for it (process.py): python -m batchscope.sweep.job <run folder>

A socket connects the run with the sweep, or with the launcher's job. The sweep first sends a request with the checked
configuration; a configuration in a file is not read. Then it sends visits (callbacks/_visits.py), and the run answers.
When the sweep ends in any way, its end of the socket closes, and the run stops.
"""

import contextlib
import json
import os
import queue
import signal
import sys
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._system import connection_to_starter, signal_self, signals_named
from ..checkpointing import resume
from ..checkpointing.signals import exit_on_signals
from ..errors import UserError, exit_on_user_error
from ..options.check import check_config
from ..options.ranks import ranks_asked
from ..records.read import read
from ..records.run_record import ended_as, error_text, record_end
from ..records.terminal import leave_words_to_sweep

_REQUEST = "BATCHSCOPE_JOB"  # the environment variable with the request, for the ranks that Lightning starts


def main() -> None:
    """Do the run in the folder that the command line names."""
    hide_slurm()  # before Lightning is imported
    exit_on_signals()  # until the run handles signals itself
    leave_words_to_sweep()
    exit_on_user_error(_run)


def _run() -> None:
    run_dir = Path(sys.argv[1])
    if request := os.environ.get(_REQUEST):  # a further rank; the first rank has the connection, and ends the others
        run_planned(run_dir, json.loads(request))
    else:
        sweep = SweepConnection()
        run_planned(run_dir, json.loads(sweep.hear()), sweep)


class SweepConnection:
    """The connection to the sweep, as a `Visitor`.

    It empties standard input: programs that the run starts would read the sweep's lines from it, or outlive the run.
    """

    def __init__(self) -> None:
        self._connection, self._lines = connection_to_starter(), queue.SimpleQueue[bytes]()
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        """Queue the lines from the sweep, and stop the run when the sweep ends."""
        with contextlib.suppress(OSError), self._connection.makefile("rb") as lines:
            for line in lines:
                if line.startswith(b"signal "):  # from a system without signals between processes
                    signal_self(int(line.split()[1]))
                else:
                    self._lines.put(line)
        self._lines.put(b"null")
        signal_self(signal.SIGTERM)

    def hear(self) -> str:
        """See Visitor."""
        return self._lines.get().decode().strip()

    def tell(self, facts: Mapping[str, Any]) -> None:
        """See Visitor."""
        self._connection.sendall(json.dumps(facts).encode() + b"\n")


def run_planned(run_dir: Path, request: dict[str, Any] | None, sweep: SweepConnection | None = None) -> None:
    """Train, or resume a run that was killed or interrupted; an exception that ends the run is also in its record.

    `request` has `config`, `choices`, `overrides`, and whether the run is `visited`; it is None if the sweep has ended.
    """
    if request is None:
        return
    old_record = read(run_dir)
    try:
        config = check_config(request["config"])  # again: the sweep may run another version of this package
        if "resume" not in request:
            request["resume"] = None if old_record.get("status") == "planned" else str(run_dir)
        if ranks_asked(config) != 1:
            os.environ |= {_REQUEST: json.dumps(request), "PYTHONSAFEPATH": "1"}  # as `-P` for this process
        from ..training.run import train  # torch takes seconds to import; signals are handled by now

        visitor = sweep if request["visited"] else None
        train({**config, "resume": request["resume"]}, run_dir, request["choices"], request["overrides"], visitor)
    except Exception as error:
        with contextlib.suppress(UserError), resume.lock_run_dir(run_dir):  # unless another process does this run
            # The run ended before it wrote its record. A run that had begun earlier can be resumed. A further rank
            # finds the status `running`, and leaves the record to the first rank.
            old_status = old_record.get("status")
            if old_status != "running" and read(run_dir) == old_record:
                record_end(run_dir, ended_as(error) if old_status == "planned" else "interrupted", error_text(error))
        if isinstance(error, UserError):  # the sweep prints the error from the record
            with contextlib.suppress(UserError):
                error.reported = read(run_dir).get("error") == error_text(error)
        raise


def hide_slurm() -> None:
    """Hide a SLURM job from Lightning: the job's task is the sweep's process, which handles SLURM's signals.

    Lightning starts the run's other ranks itself. Otherwise it would take the job's tasks for these ranks.
    """
    os.environ.pop("SLURM_NTASKS", None)
    warnings.filterwarnings("ignore", "The `srun` command is available")
    for number in signals_named("SIGUSR2"):  # some clusters send this signal to all processes of a job
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    main()
