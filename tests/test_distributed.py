"""Two real processes train as one: `trainer=ddp` on this machine's CPU."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from runs import assert_alike, results

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


def started(folder: Path, *words: str) -> subprocess.Popen[str]:
    """Two processes that train as one for some seconds, some seconds after they have begun to."""
    small = ["data=copy_memory", "data.delay=2", "data.num_train=2000", "data.num_val=16", "data.num_test=16"]
    model = ["data.batch_size=4", "model=stacked_lstm", "model.hidden_size=8", "callbacks.checkpoint.every_n_steps=50"]
    quiet = ["callbacks.throughput.calibrate=false", "callbacks.progress=null", "callbacks.pictures=null"]
    options = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "trainer.max_epochs=2"]
    line = words or (*options, *small, *model, *quiet, f"hydra.run.dir={folder.name}")
    return subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *line],
        cwd=folder.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def wait_for(path: Path, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def unstopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unstopped") / "out"
    process = started(folder)
    assert process.wait(timeout=120) == 0, process.communicate()
    return folder


@pytest.mark.slow
def test_sigterm_to_the_first_of_two_processes_ends_both_and_the_run_is_resumed_exactly(
    tmp_path: Path, unstopped: Path
) -> None:
    process = started(tmp_path / "out")
    wait_for(tmp_path / "out" / "checkpoints" / "last.ckpt")
    process.terminate()
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 143
    assert said.count("resume   python train.py resume=out") == 1
    assert json.loads((tmp_path / "out" / "run.json").read_text())["status"] == "interrupted"
    assert started(tmp_path / "out", "resume=out").wait(timeout=120) == 0
    assert_alike(results(tmp_path / "out"), results(unstopped))


@pytest.mark.slow
def test_when_one_process_dies_the_other_ends_within_a_minute_and_the_run_is_resumed_exactly(
    tmp_path: Path, unstopped: Path
) -> None:
    process = started(tmp_path / "out")
    wait_for(tmp_path / "out" / "checkpoints" / "last.ckpt")
    (other,) = [p for p in psutil.Process(process.pid).children() if "train.py" in " ".join(p.cmdline())]
    other.kill()
    complained = process.communicate(timeout=60)[1]
    assert process.returncode != 0
    assert complained.strip()
    assert started(tmp_path / "out", "resume=out").wait(timeout=120) == 0
    assert_alike(results(tmp_path / "out"), results(unstopped))
