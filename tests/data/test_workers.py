"""Worker processes: the same batches as without them, under every start method, at signals and when they are killed."""

import gc
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

from tests.checkpointing.support import OUT, STEP
from tests.support.own_data import MapStyle, write_config
from tests.support.runs import QUIET, last, run

SHORT = ["trainer.accelerator=cpu", "trainer.max_epochs=2", "data.batch_size=8", OUT, *QUIET]
MLP = ["model=mlp", "model.hidden_sizes=[8]"]


def line(folder: Path, name: str, *options: str) -> list[str]:
    return [f"--config-dir={write_config(folder, name)}", "data=own", *SHORT, *MLP, *options]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_every_start_method_serves_the_same(method: str) -> None:
    alone, apart = (MapStyle(batch_size=8, num_workers=workers) for workers in (0, 1))
    for data in (alone, apart):
        data.setup("fit")
    loader = apart.train_dataloader()
    loader._loader.multiprocessing_context = method
    for (x, _), (expected, _) in zip(loader, alone.train_dataloader(), strict=True):
        assert torch.equal(x, expected)


def test_the_workers_of_a_loader_that_is_garbage_in_a_cycle_end_at_once() -> None:
    data = MapStyle(batch_size=8, num_workers=1)
    data.setup("fit")
    loader = data.train_dataloader()
    next(iter(loader))
    loader.trainer = [loader]  # as a trainer, its loops and its loaders hold each other
    del loader
    begun = time.monotonic()
    gc.collect()
    assert time.monotonic() - begun < 4  # torch waits 5 s for a worker that has not been told


def test_a_worker_that_is_killed_ends_a_run_in_one_line(tmp_path: Path) -> None:
    done = run(tmp_path, *line(tmp_path, "KilledWorker", "data.num_workers=1"))
    assert done.end() == 1
    (said,) = (text for text in done.complained.splitlines() if not text.startswith("warning: "))
    assert said.startswith("error: data: DataLoader worker (pid")


def signal_all(number: int) -> None:
    """What Ctrl-C in a terminal, a closed terminal or a job manager does: the signal reaches the workers, too."""
    processes = (*psutil.Process().children(), psutil.Process())
    subprocess.run(["kill", f"-{number}", *(str(process.pid) for process in processes)], check=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes_keeps_a_checkpoint(tmp_path: Path, number: signal.Signals) -> None:
    words = line(tmp_path, "MapStyle", "data.num_workers=2")
    stopped = run(tmp_path, *words, faults=[(STEP, 13, partial(signal_all, number))])
    assert stopped.end() == 128 + number, stopped.complained
    assert last(tmp_path / "out")["global_step"] == 13
