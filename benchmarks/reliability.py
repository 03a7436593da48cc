"""Whether a run that is killed and resumed is bit-identical to one that was never stopped.

    python benchmarks/reliability.py

A run is killed by kill -9 at a random time after its first checkpoint and resumed, until it finishes. It is compared, bit by
bit, with one that was never stopped; and the next one starts, until there were 50 kills.
"""

import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import ROOT, arguments, write_result

sys.path.insert(0, str(ROOT))
KILLS = 50
# Some seconds of training: shuffled, with dropout, under one-cycle, and a validation in mid-epoch.
KILLED = [
    *("data=copy_memory", "data.delay=10", "data.num_train=4000", "data.num_val=200", "data.num_test=200"),
    *("data.batch_size=32", "model=stacked_lstm", "model.hidden_size=16", "trainer.max_epochs=3"),
    *("trainer.val_check_interval=50", "trainer.accelerator=cpu", "callbacks.throughput.calibrate=false"),
    *("callbacks.progress=null", "callbacks.checkpoint.every_minutes=0.01"),
]


def kill_and_resume(kills: int) -> dict[str, Any]:
    from tests.support.runs import assert_alike, record, results

    dice, done, finished, kept = random.Random(0), 0, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        assert not killed(place, [*KILLED, "hydra.run.dir=whole"], place / "whole", None)
        want, seconds = results(place / "whole"), record(place / "whole")["fit_seconds"]
        while done < kills:
            run_dir, line = place / f"run{finished}", [*KILLED, f"hydra.run.dir=run{finished}"]
            while killed(place, line, run_dir, dice.uniform(0, seconds / 2) if done < kills else None):
                done += 1
                line = [f"resume={run_dir.name}"] if (run_dir / "run.json").exists() else line
            assert_alike(results(run_dir), want)
            finished += 1
            kept += sum(entry["step"] > 0 for entry in record(run_dir).get("resumed", []))
            print(f"{done} kills, {finished} runs are bit-identical", flush=True)
        steps = len(want["curves"]["train/loss"])
    return {"kills": done, "resumed_in_training": kept, "runs": finished, "steps": steps, "seconds_unstopped": seconds}


def killed(place: Path, line: list[str], run_dir: Path, after: float | None) -> bool:
    """Whether the run was killed, `after` seconds from its first checkpoint, before it finished."""
    command, alone = [sys.executable, str(ROOT / "train.py"), *line], {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=place, env=alone, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    last, started = run_dir / "checkpoints" / "last.ckpt", time.time()
    while process.poll() is None and not (last.exists() and last.stat().st_mtime > started):
        time.sleep(0.01)
    try:
        said = process.communicate(timeout=after)[1]
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return True
    assert process.returncode == 0, said.decode()
    return False


def main() -> None:
    args = arguments(__doc__).parse_args()
    found = kill_and_resume(1 if args.smallest else KILLS)
    text = f"{found['kills']} times kill -9 at a random moment and resume, {found['resumed_in_training']} of them in the middle"
    text += f" of training: all {found['runs']} runs of {found['steps']} steps are bit-identical to one that was never stopped."
    write_result("reliability", text, {"kills": found}, args)


if __name__ == "__main__":
    main()
