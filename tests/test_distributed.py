"""Two real processes train as one: `trainer=ddp` on this machine's CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_two_processes_leave_one_record_of_both(tmp_path: Path) -> None:
    small = ["data=adding", "data.num_train=64", "data.num_val=16", "data.num_test=16", "data.batch_size=4"]
    quiet = ["callbacks.throughput.calibrate=false", "callbacks.progress=null", "trainer.max_epochs=1"]
    options = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "model=rnn_cell", "hydra.run.dir=out"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *options, *small, *quiet],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained  ") == 1
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert record["status"] == "finished"
    assert record["steps"] == 8  # 64 samples, 4 in each of two processes
    throughput = record["throughput"]
    assert throughput["processes"] == 2
    assert throughput["slowest_step_ms"] >= throughput["fastest_step_ms"]
    assert len(list((tmp_path / "out").glob("rnn-cell-*"))) == 1
