"""One run of a sweep, in the process that the sweep started for it (process.py): python -m batchscope.sweep.job <run folder>

The sweep, or the launcher's job that it is in, holds the other end of a connection. The first line that it writes is the
checked configuration; a configuration in a file is not read. The next lines are the sweep's visits (callbacks/_visits.py),
and what the run answers goes back the same way. When the sweep ends in any way, its end closes, and the run stops.
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
from ..records.run_record import close, ended_as, reason
from ..records.terminal import leave_words_to_sweep

_ASKED = "BATCHSCOPE_JOB"  # in the environment: the first line, for the ranks that Lightning starts after it was read


def main() -> None:
    """The program."""
    hide_slurm()  # before Lightning is imported
    exit_on_signals()  # until the run has its own way to stop
    leave_words_to_sweep()
    exit_on_user_error(_run)


def _run() -> None:
    run_dir = Path(sys.argv[1])
    if asked := os.environ.get(_ASKED):  # the first rank hears the sweep, and ends the others
        run_planned(run_dir, json.loads(asked))
    else:
        sweep = SweepConnection()
        run_planned(run_dir, json.loads(sweep.hear()), sweep)


class SweepConnection:
    """The connection to the sweep, as a `Visitor`.

    No standard input is left to programs that the run starts: they would take the sweep's words, or outlive the run.
    """

    def __init__(self) -> None:
        self._connection, self._lines = connection_to_starter(), queue.SimpleQueue[bytes]()
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        """Keep what the sweep writes, and stop the run with the sweep."""
        with contextlib.suppress(OSError), self._connection.makefile("rb") as lines:
            for line in lines:
                if line.startswith(b"signal "):  # where the system has none between processes
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


def run_planned(run_dir: Path, asked: dict[str, Any] | None, sweep: SweepConnection | None = None) -> None:
    """Train, or resume a run that was killed or interrupted; an exception that ends the run is also in its record.

    The sweep has `asked` for a `config`, `choices`, `overrides`, and whether the run is `visited`; None if it is gone.
    """
    if asked is None:
        return
    before = read(run_dir)
    try:
        config = check_config(asked["config"])  # again: the Python that started this one may be another version's
        if "resume" not in asked:
            asked["resume"] = None if before.get("status") == "planned" else str(run_dir)
        if ranks_asked(config) != 1:
            os.environ |= {_ASKED: json.dumps(asked), "PYTHONSAFEPATH": "1"}  # as this process was started
        from ..training.run import train  # torch takes seconds to import; signals are handled by now

        visitor = sweep if asked["visited"] else None
        train({**config, "resume": asked["resume"]}, run_dir, asked["choices"], asked["overrides"], visitor)
    except Exception as error:
        with contextlib.suppress(UserError), resume.lock_run_dir(run_dir):  # unless another process does this run
            # It ended before it wrote its own record. One that had begun earlier can be resumed. A further rank finds the record
            # `running`, and leaves it to the first one.
            if before.get("status") != "running" and read(run_dir) == before:
                close(run_dir, ended_as(error) if before.get("status") == "planned" else "interrupted", reason(error))
        if isinstance(error, UserError):  # the sweep says it, from the record
            with contextlib.suppress(UserError):
                error.reported = read(run_dir).get("error") == reason(error)
        raise


def hide_slurm() -> None:
    """Within a SLURM job: the job's task is the process that started this one, and handles SLURM's signals.

    Lightning starts the run's other ranks itself; it would otherwise take the job's tasks for them.
    """
    os.environ.pop("SLURM_NTASKS", None)
    warnings.filterwarnings("ignore", "The `srun` command is available")
    for number in signals_named("SIGUSR2"):  # some clusters send it to all processes of a job
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    main()
