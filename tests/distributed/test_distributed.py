"""Two real ranks train as one process would: `trainer=ddp` and `trainer=fsdp` on this machine's CPU."""

import json
import time
from pathlib import Path

import psutil
import pytest
import torch

from tests.support.runs import assert_alike, results
from tests.support.spawned import TRAIN, Ended, end, spawn


@pytest.mark.slow
def test_two_processes_leave_one_record_of_both(tmp_path: Path) -> None:
    small = ["data=adding", "data.num_train=64", "data.num_val=16", "data.num_test=16", "data.batch_size=4"]
    quiet = ["callbacks.throughput.calibrate=false", "callbacks.progress=null", "trainer.max_epochs=1"]
    done = train(tmp_path, "trainer=ddp", "trainer.devices=2", "model=rnn_cell", "hydra.run.dir=out", *small, *quiet)
    assert done.code == 0, done.err
    assert done.out.count(" parameters) on ") == done.out.count("\nresult  ") == 1
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert record["status"] == "finished"
    assert record["steps"] == 8  # 64 samples, 4 in each of two processes
    assert record["processes"] == 2
    assert record["global_batch_size"] == 8
    throughput = record["throughput"]
    assert throughput["slowest_step_ms"] >= throughput["fastest_step_ms"]
    assert throughput["slowest_process"] in (0, 1)
    # Both ranks' samples, in the time of this rank's steps.
    assert throughput["samples_per_sec"] == pytest.approx(8e3 / throughput["step_ms_median"])
    assert throughput["samples_per_sec_mean"] == pytest.approx(2 * throughput["samples"] / throughput["seconds"])
    assert len(list((tmp_path / "out").glob("rnn-cell-*"))) == 1


def train(folder: Path, *words: str) -> Ended:
    """Run `python train.py …` on the CPU to its end."""
    return end(spawn(folder, TRAIN, "trainer.accelerator=cpu", *words))


# 21 samples in batches of 8: the last batch holds 5, which two ranks cannot share evenly. There is one sample for
# validation, so that one of two ranks has none.
UNEVEN = [
    *("data=adding", "data.num_train=21", "data.num_val=1", "data.num_test=17", "data.sequence_length=8"),
    *("model=rnn_cell", "model.hidden_size=8", "optimizer=sgd", "trainer.max_epochs=2", "callbacks.device=null"),
    *("callbacks.throughput=null", "callbacks.progress=null", "callbacks.prediction_images=null"),
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process with batches of 8."""
    folder = tmp_path_factory.mktemp("alone")
    done = train(folder, *UNEVEN, "data.batch_size=8", "hydra.run.dir=out")
    assert done.code == 0, done.err
    return folder / "out"


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", ["memory", "device", "workers"])
def test_two_processes_train_and_measure_what_one_does_with_twice_the_batch(pipeline, tmp_path, alone):
    options = ["trainer=ddp", "trainer.devices=2", "data.batch_size=4", f"data.pipeline={pipeline}"]
    done = train(tmp_path, *UNEVEN, *options, "hydra.run.dir=out")
    assert done.code == 0, done.err
    assert_close(tmp_path / "out", alone)


def assert_close(one: Path, other: Path) -> None:
    """Weights, losses and metrics agree up to the rounding of sums in another order."""
    found, expected = results(one), results(other)
    assert found["steps"] == expected["steps"] == 6
    assert found["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, rtol=1e-5, atol=1e-6)
    assert found["metrics"].keys() == expected["metrics"].keys() == {"val/loss", "test/loss"}
    for key, value in expected["metrics"].items():
        assert found["metrics"][key] == pytest.approx(value, rel=1e-6, abs=1e-7)
    for key, steps in expected["curves"].items():
        assert found["curves"][key] == [(step, pytest.approx(value, rel=1e-5, abs=1e-6)) for step, value in steps]


@pytest.mark.slow
def test_a_sharded_model_trains_as_a_whole_one_and_its_checkpoint_is_evaluated_alone(tmp_path, alone: Path) -> None:
    options = ["trainer=fsdp", "trainer.devices=2", "data.batch_size=4", "hydra.run.dir=out"]
    done = train(tmp_path, *UNEVEN, *options)
    assert done.code == 0, done.err
    assert_close(tmp_path / "out", alone)
    evaluated = end(spawn(tmp_path, "-m", "batchscope", "evaluate", "ckpt=out/checkpoints/best.ckpt"))
    expected = json.loads((alone / "run.json").read_text())["metrics"]["test/loss"]
    assert float(evaluated.out.split()[-1]) == pytest.approx(expected, abs=2e-6)


@pytest.mark.slow
def test_a_sharded_model_is_resumed_from_its_checkpoint(tmp_path: Path) -> None:
    options = ["trainer=fsdp", "trainer.devices=2", "data.batch_size=4", "optimizer.schedule=constant"]
    longer = train(tmp_path, *UNEVEN, *options, "hydra.run.dir=longer", "trainer.max_epochs=2")
    first = train(tmp_path, *UNEVEN, *options, "hydra.run.dir=out", "trainer.max_epochs=1")
    second = train(tmp_path, "resume=out", "trainer.max_epochs=2")
    assert [done.code for done in (longer, first, second)] == [0, 0, 0], second.err
    assert_alike(results(tmp_path / "out")["weights"], results(tmp_path / "longer")["weights"])


@pytest.mark.slow
def test_fewer_training_samples_than_ranks_are_one_line(tmp_path: Path) -> None:
    options = ["trainer=ddp", "trainer.devices=2", "data.num_train=1", "hydra.run.dir=out"]
    done = train(tmp_path, *[word for word in UNEVEN if not word.startswith("data.num_train")], *options)
    assert done.code == 1
    lines = [line for line in done.err.splitlines() if "error: " in line]
    assert lines == ["error: trainer.devices: 2 processes, and adding has 1 training samples"]


@pytest.mark.slow
def test_a_sweep_starts_a_run_when_every_process_of_the_one_before_has_gone(tmp_path: Path) -> None:
    small = ["data=adding", "data.num_train=400", "data.num_val=16", "data.num_test=16", "model=rnn_cell"]
    quiet = ["callbacks.throughput.calibrate=false", "callbacks.progress=null", "data.pipeline=workers"]
    line = ["-m", "trainer=ddp", "trainer.devices=2", "data.batch_size=4,8", "hydra.sweep.dir=out", *small, *quiet]
    sweep = spawn(tmp_path, TRAIN, *line, "trainer.accelerator=cpu")
    most, parent = {0: 0, 1: 0}, psutil.Process(sweep.pid)
    while sweep.poll() is None:
        runs = [run_of(process) for process in parent.children(recursive=True)]
        for run in {run for run in runs if run is not None}:
            most[run] = max(most[run], runs.count(run))
        assert not {0, 1} <= set(runs), "the runs overlap"
        time.sleep(0.02)
    complained = sweep.communicate()[1]
    assert sweep.returncode == 0, complained
    assert all(count >= 2 for count in most.values())  # both processes of each run have been seen
    records = [json.loads((tmp_path / "out" / str(run) / "run.json").read_text()) for run in (0, 1)]
    assert [record["status"] for record in records] == ["finished", "finished"]
    assert [record["global_batch_size"] for record in records] == [8, 16]
    assert not [process for process in psutil.process_iter() if "out/0" in command(process) and tmp_path == at(process)]


def run_of(process: psutil.Process) -> int | None:
    """The number of the run that a process of a sweep belongs to."""
    words = command(process).split()
    return int(words[-1].rpartition("/")[2]) if "batchscope.sweep.job" in words else None


def command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def at(process: psutil.Process) -> Path | None:
    try:
        return Path(process.cwd())
    except psutil.Error:
        return None
