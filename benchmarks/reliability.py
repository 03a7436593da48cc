"""Whether a run that is killed and resumed is bit-identical to one that was never stopped.

    python benchmarks/reliability.py

A run is killed with kill -9 at a random time after its first checkpoint and resumed, until it finishes. It is compared, bit by
bit, with a run that was never stopped. Then the next run starts, until 50 kills are done.
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

    dice, count, finished, resumed = random.Random(0), 0, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        work_dir = Path(folder)
        assert not killed(work_dir, [*KILLED, "hydra.run.dir=whole"], work_dir / "whole", None)
        expected, seconds = results(work_dir / "whole"), record(work_dir / "whole")["fit_seconds"]
        while count < kills:
            run_dir, line = work_dir / f"run{finished}", [*KILLED, f"hydra.run.dir=run{finished}"]
            while killed(work_dir, line, run_dir, dice.uniform(0, seconds / 2) if count < kills else None):
                count += 1
                line = [f"resume={run_dir.name}"] if (run_dir / "run.json").exists() else line
            assert_alike(results(run_dir), expected)
            finished += 1
            resumed += sum(entry["step"] > 0 for entry in record(run_dir).get("resumed", []))
            print(f"{count} kills, {finished} runs are bit-identical", flush=True)
    counts = {"kills": count, "resumed_in_training": resumed, "runs": finished}
    return counts | {"steps": len(expected["curves"]["train/loss"]), "seconds_unstopped": seconds}


def killed(work_dir: Path, line: list[str], run_dir: Path, after: float | None) -> bool:
    """Run train.py, and kill it `after` seconds from its first checkpoint, unless it has finished; whether it was killed."""
    command, env = [sys.executable, str(ROOT / "train.py"), *line], {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=work_dir, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    last, started = run_dir / "checkpoints" / "last.ckpt", time.time()
    while process.poll() is None and not (last.exists() and last.stat().st_mtime > started):
        time.sleep(0.01)
    try:
        stderr = process.communicate(timeout=after)[1]
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return True
    assert process.returncode == 0, stderr.decode()
    return False


def main() -> None:
    args = arguments(__doc__).parse_args()
    results = kill_and_resume(1 if args.smallest else KILLS)
    text = f"{results['kills']} times kill -9 at a random moment and resume, {results['resumed_in_training']} of them in the middle"
    text += f" of training: all {results['runs']} runs of {results['steps']} steps are bit-identical to one that was never stopped."
    write_result("reliability", text, {"kills": results}, args)


if __name__ == "__main__":
    main()
