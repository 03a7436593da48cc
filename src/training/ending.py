"""How a run that does not finish ends for its user: one line for a failure, and how to resume what was kept."""

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lightning import Trainer

from ..errors import Interrupted, PeerLostError, UserError
from ..options.command_lines import resume_command
from ..records.read import FILE
from .failures import explained


@contextlib.contextmanager
def explain_failures(
    config: dict[str, Any],
    trainer: Trainer,
    of_first_batch: Callable[[Exception], UserError | None] = lambda error: None,
) -> Iterator[None]:
    """Turn expected failures of a trainer's run into one-line messages (UserError); the first rank prints for all.

    `of_first_batch` knows what a model raises that does not take its first batch. Any other exception, and Interrupted, is
    passed on, with what was kept and how to resume it; where another rank was lost, the same is printed.
    """
    first = trainer.is_global_zero
    try:
        yield
    except Interrupted as stop:
        if first:
            print("\n".join(["", str(stop), *_how_to_resume(config)]), flush=True)
            if stop.signal.name == "SIGUSR1" and (job := os.environ.get("SLURM_JOB_ID")):
                _requeue(job)
        raise
    except UserError:
        raise
    except Exception as error:
        if in_one_line := explained(error, config, trainer) or of_first_batch(error):
            if first and isinstance(in_one_line, PeerLostError) and (lines := _how_to_resume(config)):
                print("\n".join(["", *lines]), flush=True)
            raise in_one_line from error
        if first and (lines := _how_to_resume(config)):
            error.add_note("\n".join(["", *lines]))
        raise


def _how_to_resume(config: dict[str, Any]) -> list[str]:
    """What was kept, and the command that resumes the run, or starts it again; nothing for a run that has not begun."""
    run_dir = Path(config["run_dir"])
    if not (run_dir / FILE).exists():
        return []
    trainer, checkpoint = config["trainer"], (config["callbacks"] or {}).get("checkpoint")
    root = Path(trainer.get("default_root_dir") or run_dir)
    last = Path((checkpoint or {}).get("dirpath") or root / "checkpoints") / "last.ckpt"
    why_none = "none was due yet" if checkpoint else "callbacks.checkpoint is left out"
    if trainer.get("enable_checkpointing") is False:
        why_none = "trainer.enable_checkpointing is false"
    command = resume_command(config, run_dir)
    if last.exists():
        return [f"kept     {last}", f"resume   {command}"]
    return [f"kept     no checkpoint: {why_none}", f"restart  {command}"]  # from its first step


def _requeue(job: str) -> None:
    """Have SLURM start the job's script again, which resumes the run (docs/train.sbatch)."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array and task else job
    done = False
    with contextlib.suppress(OSError):
        done = subprocess.run(["scontrol", "requeue", job], check=False).returncode == 0
    print(f"requeue  {job}: {'asked for' if done else 'scontrol failed'}", flush=True)
