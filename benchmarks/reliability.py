"""What fault tolerance costs, and whether a resumed run is bit-identical.

    python benchmarks/reliability.py --root ../shared/data
    python benchmarks/reliability.py --only kills --kills 50 --seed 1

Three parts. `checkpoint` times a checkpoint of SimpleCNN, from the device to the flushed disk, and gives its share of
training at the default interval. `finite` times the check of the loss and all gradients: steps of one training
alternate, with the check and without. `kills` kills a run by kill -9 at a random time after its first checkpoint and
resumes it, until it finishes; then it compares the run, bit by bit, with one that was never stopped, and starts the next
one, until `--kills` is reached. `--only` keeps the results of the other parts.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from harness import RESULTS, ROOT, arguments, machine, median, middle_half, rows, write_result
from lightning import Callback, Trainer

from batchscope.callbacks.nonfinite import StopOnNonFinite
from batchscope.checkpointing.callback import Checkpoints
from batchscope.checkpointing.checkpoint_file import AtomicCheckpointIO, load_checkpoint
from batchscope.errors import UserError
from batchscope.hardware.host_memory import keep_freed_memory
from batchscope.options.compose import check_command_line
from batchscope.training.build import build
from batchscope.training.task import Task

sys.path.insert(0, str(ROOT))
WARM_UP = 20  # steps with the check and as many without, which are not counted
EVERY_MINUTES = 5  # the default of callbacks.checkpoint
# Some seconds of training: shuffled, with dropout, under one-cycle, and a validation in mid-epoch.
KILLED = [
    *("data=copy_memory", "data.delay=10", "data.num_train=4000", "data.num_val=200", "data.num_test=200"),
    *("data.batch_size=32", "model=stacked_lstm", "model.hidden_size=16", "trainer.max_epochs=3"),
    *("trainer.val_check_interval=50", "trainer.accelerator=cpu", "callbacks.throughput.calibrate=false"),
    *("callbacks.progress=null", "callbacks.prediction_images=null", "callbacks.checkpoint.every_minutes=0.01"),
]


class Timed(Checkpoints):
    """Times every save."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.seconds: list[float] = []

    def save(self, trainer: Trainer) -> None:
        started = time.perf_counter()
        super().save(trainer)
        self.seconds.append(time.perf_counter() - started)


class EveryOther(StopOnNonFinite):
    """Checks every second step only, and times each step."""

    def __init__(self) -> None:
        super().__init__()
        self.ms: dict[bool, list[float]] = {True: [], False: []}
        self.look_ms: list[float] = []
        self.looks = True

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.looks = not self.looks
        self.started = time.perf_counter()

    def on_before_optimizer_step(self, *arguments: Any) -> None:
        if self.looks:
            started = time.perf_counter()
            super().on_before_optimizer_step(*arguments)
            self.look_ms.append(1e3 * (time.perf_counter() - started))

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()
        self.ms[self.looks].append(1e3 * (time.perf_counter() - self.started))


def fit(root: str, steps: int, *callbacks: Callback) -> None:
    """Train the SimpleCNN on MNIST at batch 128, with nothing but these callbacks."""
    line = [f"data.root={root}", "data.batch_size=128", f"trainer.max_steps={steps}", "trainer.max_epochs=-1"]
    config = check_command_line(line, multirun=False)[0]
    keep_freed_memory()
    data = build(config["data"], "data")
    data.prepare_data()
    model = build(config["model"], "model", spec=data.spec)
    task = Task(model, data.spec, build(config["optimizer"], "optimizer"))
    quiet = {"logger": False, "enable_progress_bar": False, "limit_val_batches": 0}
    options = {k: v for k, v in config["trainer"].items() if k not in (*quiet, "_target_", "enable_checkpointing")}
    checkpoints = any(isinstance(callback, Checkpoints) for callback in callbacks)
    trainer = Trainer(
        **options, **quiet, callbacks=list(callbacks), enable_checkpointing=checkpoints, plugins=[AtomicCheckpointIO()]
    )
    trainer.fit(task, datamodule=data)


def time_checkpoints(root: str, count: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        timed = Timed(dirpath=folder, every_n_steps=5)
        fit(root, 5 * count, timed)
        size = (Path(folder) / "last.ckpt").stat().st_size
    seconds = timed.seconds[1:]
    return {"ms": 1e3 * median(seconds), "spread_ms": middle_half([1e3 * s for s in seconds]), "bytes": size}


def time_finite(root: str, steps: int) -> dict[str, Any]:
    every_other = EveryOther()
    fit(root, steps, every_other)
    with_it, without = (times[WARM_UP:] for times in (every_other.ms[True], every_other.ms[False]))
    pairs = [a / b for a, b in zip(with_it, without, strict=False)]
    look = median(every_other.look_ms[WARM_UP:])
    return {
        "look_ms": look,
        "share": look / median(without),
        "with_ms": median(with_it),
        "without_ms": median(without),
        "ratio": median(pairs),
        "pairs": len(pairs),
    }


def kill_and_resume(kills: int, seed: int) -> dict[str, Any]:
    from tests.support.runs import assert_alike, record, results

    dice, done, finished, kept = random.Random(seed), 0, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        line = _command(*KILLED, "hydra.run.dir=whole")
        subprocess.run(line, cwd=place, env=_alone(), check=True, capture_output=True)
        want, seconds = results(place / "whole"), record(place / "whole")["fit_seconds"]
        while done < kills:
            run_dir, line = place / f"run{finished}", [*KILLED, f"hydra.run.dir=run{finished}"]
            while _killed(place, line, run_dir, dice.uniform(0, seconds / 2) if done < kills else None):
                done += 1
                print(f"{done} kills, the last checkpoint has {_trained(run_dir):,} steps", flush=True)
                line = [f"resume={run_dir.name}"] if (run_dir / "run.json").exists() else line
            assert_alike(results(run_dir), want)
            finished += 1
            kept += sum(entry["step"] > 0 for entry in record(run_dir).get("resumed", []))
            print(f"{done} kills, {finished} runs are bit-identical", flush=True)
        steps = len(want["curves"]["train/loss"])
    return {"kills": done, "resumed_in_training": kept, "runs": finished, "steps": steps, "seconds_unstopped": seconds}


def _trained(run_dir: Path) -> int:
    """The steps in the run's last checkpoint."""
    try:
        return load_checkpoint(run_dir / "checkpoints" / "last.ckpt")["global_step"]
    except UserError:
        return 0


def _killed(place: Path, line: list[str], run_dir: Path, after: float | None) -> bool:
    """Whether the process was killed, `after` seconds from its first checkpoint, before it finished."""
    process = subprocess.Popen(
        _command(*line), cwd=place, env=_alone(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    last, started = run_dir / "checkpoints" / "last.ckpt", time.time()
    while process.poll() is None and not (last.exists() and last.stat().st_mtime > started):
        time.sleep(0.01)
    try:
        process.wait(timeout=after)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()
        return True
    assert process.returncode == 0, process.stderr.read().decode()
    return False


def _command(*line: str) -> list[str]:
    return [sys.executable, str(ROOT / "train.py"), *line]


def _alone() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def table(data: dict[str, Any]) -> str:
    """One row per part that has been measured."""
    lines = []
    if found := data.get("checkpoint"):
        share = found["ms"] / (60e3 * EVERY_MINUTES)
        said = f"{found['ms']:.1f} ms ({found['spread_ms']}), {share:.4%} of the training at one in {EVERY_MINUTES} minutes"
        lines.append([f"a checkpoint of the SimpleCNN, {found['bytes']:,} bytes", said])
    if found := data.get("finite"):
        said = f"{1e3 * found['look_ms']:.0f} µs, {found['share']:.2%} of a step of {found['without_ms']:.2f} ms; "
        said += f"steps with it took {found['ratio']:.4f} of those without ({found['pairs']} pairs)"
        lines.append(["checking the loss and the gradients, SimpleCNN at batch 128", said])
    if found := data.get("kills"):
        what = (
            f"{found['kills']} times kill -9 at a random moment and resume, {found['resumed_in_training']} of them in "
        )
        said = f"all {found['runs']} runs of {found['steps']} steps are bit-identical to one that was never stopped"
        lines.append([f"{what}the middle of training", said])
    return rows(["what", "measured"], lines, words=2)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=("checkpoint", "finite", "kills"))
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    count, steps, kills = (2, 2 * WARM_UP + 4, 1) if args.smallest else (40, 400, args.kills)
    parts = {
        "checkpoint": lambda: time_checkpoints(args.root, count),
        "finite": lambda: time_finite(args.root, steps),
        "kills": lambda: kill_and_resume(kills, args.seed),
    }
    before = RESULTS / "reliability.json"
    data = json.loads(before.read_text()) if args.only and before.exists() and not args.smallest else {}
    for part in [args.only] if args.only else parts:
        data[part] = {**parts[part](), "machine": machine()}
    data["machine"] = " and ".join(dict.fromkeys(data[part]["machine"] for part in parts if part in data))
    write_result("reliability", table(data), data, args)


if __name__ == "__main__":
    main()
