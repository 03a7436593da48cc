"""Run the program in processes that tests can kill, stop and starve, and compare the files of two runs.

The processes are forked from a server that has imported everything (`tests/support/fork_server.py`). Each is a real
process with its own command line, folder, environment, standard output and signals, and starts in a fraction of a second.
"""

import csv
import importlib
import io
import itertools
import json
import logging
import os
import pkgutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.fork_server import Forked
from tests.support.spawned import free_port
from tests.support.waiting import PATIENCE_S

# Callbacks that take time and have no part in what a run learns.
QUIET = [
    *("callbacks.throughput.calibrate=false", "+callbacks.throughput.flops_per_sample=1", "callbacks.progress=null"),
    "callbacks.device=null",
]
# 20 steps in 2 epochs, the last batch of each a short one; shuffled, with dropout, under one-cycle.
SMALL = [
    *("data=copy_memory", "data.delay=2", "data.num_train=76", "data.num_val=16", "data.num_test=16"),
    *("data.batch_size=8", "model=stacked_lstm", "model.hidden_size=8", "trainer.max_epochs=2"),
    "trainer.accelerator=cpu",
    *QUIET,
]
EVERY_4 = "callbacks.checkpoint.every_n_steps=4"

Fault = tuple[str, int, Callable[[], None]]  # (dotted name of a function, n, what happens before its n-th call)


def kill_9() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Run:
    """One run of the program, `python train.py …`, in its own process and working directory.

    `module` is the program, as for `python -m`; `environ` are additional variables. A `server` (fork_server.py) is that
    of another Python.
    """

    def __init__(
        self,
        folder: Path,
        *words: str,
        faults: Any = (),
        module: str = "batchscope.train",
        environ: Any = (),
        server: Any = None,
    ):
        self.folder = folder
        self.process = Forked.start(_program, folder, module, words, list(faults), dict(environ), server=server)

    def end(self, timeout: float = PATIENCE_S) -> int:
        """Wait for the end; returns the exit code, or minus the number of the signal."""
        return self.process.end(timeout)

    @property
    def said(self) -> str:
        return (self.folder / "stdout").read_text()

    @property
    def complained(self) -> str:
        return (self.folder / "stderr").read_text()


def run(folder: Path, *overrides: str, code: int | None = None, **how: Any) -> Run:
    """A run that has ended, with this exit code if one is given; other arguments as Run."""
    done = Run(folder, *overrides, **how)
    assert code in (done.end(), None), done.complained or done.said
    return done


def ranks(folder: Path, *overrides: str, faults: dict[int, list[Fault]] | None = None, **environ: str) -> list[Run]:
    """The two processes of one run, as torchrun starts them, each in its own folder below `folder`; the run's is `out`.

    In the command line `{rank}` is the number of the process; `resume=…` gets no other options. `faults` are by rank.
    """
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TORCHELASTIC_RUN_ID": "test"}
    environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    new = ["trainer=ddp", "trainer.devices=2", f"hydra.run.dir={folder / 'out'}"]
    options = [*(new if not overrides[0].startswith("resume=") else []), *overrides]
    both = []
    for rank in "01":
        own = environ | {"RANK": rank, "LOCAL_RANK": rank}
        words = [word.replace("{rank}", rank) for word in options]
        both.append(Run(folder / rank, *words, faults=(faults or {}).get(int(rank), ()), environ=own))
    return both


def _program(folder: Path, module: str, words: tuple[str, ...], faults: list[Fault], environ: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    os.environ |= environ
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout, sys.stderr = (io.TextIOWrapper(os.fdopen(n, "wb"), write_through=True) for n in (1, 2))
    for name in ("lightning", "lightning.pytorch"):  # its messages went to the error stream of the process that forked
        for handler in logging.getLogger(name).handlers:
            if type(handler) is logging.StreamHandler:  # pytest's is of a file, and Hydra would close its stream
                handler.setStream(sys.stderr)
    sys.argv = ["train.py", *words]
    torch.set_num_threads(1)
    for what, count, action in faults:
        _at_call(what, count, action)
    importlib.import_module(module).main()


def _at_call(what: str, count: int, action: Callable[[], None]) -> None:
    """Make something happen before the n-th call of a function or method."""
    place, _, name = what.rpartition(".")
    owner = pkgutil.resolve_name(place)
    inner, calls = getattr(owner, name), itertools.count(1)

    def counted(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == count:
            action()
        return inner(*args, **kwargs)

    setattr(owner, name, counted)


def record(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "run.json").read_text())


def last(run_dir: Path) -> dict[str, Any]:
    return torch.load(run_dir / "checkpoints" / "last.ckpt", weights_only=True)


def curves(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """TensorBoard's losses and metrics: `(step, value)` by key, without times and rates; an equal point twice is one.

    A resumed run repeats the validation that followed its checkpoint.
    """
    (folder,) = {path.parent for path in run_dir.glob("*/events.*")}
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    keys = [key for key in events.Tags()["scalars"] if key.startswith(("train/", "val/", "test/"))]
    return {key: [*dict.fromkeys((e.step, e.value) for e in events.Scalars(key))] for key in keys}


def table(run_dir: Path) -> list[dict[str, str]]:
    """The losses and metrics of the CSV file, by row, without times and rates."""
    rows = csv.DictReader((run_dir / "csv" / "metrics.csv").read_text().splitlines())
    kept = [{k: v for k, v in row.items() if "/" not in k or "loss" in k or "acc" in k} for row in rows]
    return [row for row in kept if any(v for k, v in row.items() if "/" in k)]


def results(run_dir: Path) -> dict[str, Any]:
    """All that must be equal in two runs of the same training."""
    checkpoint, facts, best = last(run_dir), record(run_dir), run_dir / "checkpoints" / "best.ckpt"
    return {
        "weights": checkpoint["state_dict"],
        **{key: checkpoint[key] for key in ("optimizer_states", "lr_schedulers")},
        "random": checkpoint["loop_state"]["random"],
        "best": torch.load(best, weights_only=True)["state_dict"] if best.exists() else None,
        **{key: facts[key] for key in ("metrics", "steps", "epochs")},
        "curves": curves(run_dir),
        "table": table(run_dir),
    }


def assert_alike(one: Any, other: Any, where: str = "") -> None:
    """Equal in every bit."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_alike(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), f"{where}: {len(one)} and {len(other)}"
        for index, pair in enumerate(zip(one, other, strict=True)):
            assert_alike(*pair, f"{where}[{index}]")
    else:
        assert one == other, f"{where}: {one} and {other}"
