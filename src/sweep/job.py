"""One run of a sweep, in the process that the sweep started for it: python -m batchscope.sweep.job <digest> <run folder>

The folder's run.json says what to do. The digest is that of the configuration which the sweep's command line has said;
what else a file says is not trusted. The sweep, or the launcher's job that it is in, holds the other end of standard
input: when it closes, whatever has become of the sweep, the run is told to stop.
"""

import contextlib
import os
import signal
import sys
import threading
import warnings
from pathlib import Path

from ..checkpointing import resume
from ..checkpointing.signals import handled_signals
from ..errors import UserError, exit_on_user_error
from ..records.read import read
from ..records.run_record import close
from ..records.status import ended_as, reason
from ..training.run import train


def main() -> None:
    """The program."""
    for number in handled_signals():  # until the run has its own way to stop
        signal.signal(number, lambda got, _: sys.exit(128 + got))
    _leave_to_slurm_what_is_slurms()
    threading.Thread(target=_stop_with_the_sweep, daemon=True).start()
    known, run_dir = sys.argv[1:]
    exit_on_user_error(lambda: do(Path(run_dir), known))


def do(run_dir: Path, known: str | None = None) -> None:
    """Train as the folder's record plans, or go on where a run was killed or interrupted.

    Args:
        run_dir: the run's.
        known: the digest of the configuration that the sweep has checked.

    Raises:
        UserError, or whatever else ends the run; its record says so, too.
    """
    record = read(run_dir)
    try:
        config = resume.configuration(record, run_dir, [], known)
        if record.get("status") == "planned":
            config["resume"] = None
        train(config, run_dir, record.get("choices", {}), record.get("overrides", []))
    except Exception as error:
        with contextlib.suppress(UserError), resume.lock_run_dir(run_dir):  # held: it is another process's run
            if read(run_dir).get("status") == "planned":  # it did not come as far as keeping a record of its own
                close(run_dir, ended_as(error), reason(error))
        raise


def _leave_to_slurm_what_is_slurms() -> None:
    """In a job of SLURM: its task is the process that has started this one, and deals with its signals.

    The run's own processes are then for Lightning to start, which otherwise takes the job's tasks for them.
    """
    os.environ.pop("SLURM_NTASKS", None)
    warnings.filterwarnings("ignore", "The `srun` command is available")
    if hasattr(signal, "SIGUSR2"):
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # some clusters send it to all processes of a job


def _stop_with_the_sweep() -> None:
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
