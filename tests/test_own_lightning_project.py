"""docs/own-lightning-project.md: each example runs as it stands, in a process of its own, and says what it promises.

The page's commands do what it shows, in an empty folder, with nothing but the wheel installed.
"""

import importlib.util
import os
import re
import runpy
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from batchscope.hardware.calibration import Calibration
from batchscope.hardware.measure import identity, store
from tests.support import fabricated_mnist, wheel
from tests.support.fork_server import Forked
from tests.support.runs import assert_alike, last  # and starts the server that examples are forked from
from tests.support.transcript import Shell
from tests.support.waiting import PATIENCE_S

PAGE = Path(__file__).parents[1] / "docs" / "own-lightning-project.md"
_BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
EXAMPLES = {text[3:].partition(".py: ")[0]: text for text in _BLOCKS}  # by the name in the first line


def test_there_are_five_examples() -> None:
    assert list(EXAMPLES) == ["tutorial", "plain", "tokens", "ddp", "curves"]


@pytest.mark.slow  # ten processes that import torch
def test_the_commands_of_the_page_do_what_it_shows(tmp_path: Path) -> None:
    shell = Shell(tmp_path, wheel.Environment(tmp_path / "venv", wheel.build(tmp_path)))
    shell.folder = tmp_path / "empty"
    fabricated_mnist.write(
        shell.folder / "data", 6_000, 500, fabricated_mnist.random_pixels
    )  # as if it were downloaded
    (shell.folder / "tutorial.py").write_text(EXAMPLES["tutorial"], encoding="utf-8")
    for name, content in re.findall(r"```yaml\n# (mine/\S+)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        (shell.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (shell.folder / name).write_text(content, encoding="utf-8")
    shell.check(PAGE)
    for number in range(3):
        ours, theirs = (last(shell.folder / sweep / str(number)) for sweep in ("whole", "killed"))
        assert_alike(ours["state_dict"], theirs["state_dict"])
        assert_alike(ours["optimizer_states"], theirs["optimizer_states"])


def said_by(name: str, folder: Path) -> str:
    """What an example prints, run by a process that has imported torch."""
    (folder / f"{name}.py").write_text(EXAMPLES[name], encoding="utf-8")
    process = Forked.start(_program, str(folder), name)
    assert process.end(PATIENCE_S) == 0, (folder / "output").read_text()
    return (folder / "output").read_text()


def _program(folder: str, name: str) -> None:
    os.chdir(folder)
    os.environ["XDG_CACHE_HOME"] = folder
    torch.set_num_threads(1)
    known = identity(torch.device("cpu"))
    store(Calibration(**known, matmul_flops_per_sec={"fp32": 1e10}, memory_bytes_per_sec=1e10))
    sys.stdout = sys.stderr = Path("output").open("w", buffering=1)  # noqa: SIM115 - until the process ends
    sys.argv = [f"{name}.py"]
    runpy.run_path(f"{name}.py", run_name="__main__")


def started(name: str, folder: Path) -> str:
    """What an example prints, run as a user runs it."""
    (folder / f"{name}.py").write_text(EXAMPLES[name], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, f"{name}.py"], cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_plain_example_prints_the_summary_and_the_bottleneck(tmp_path: Path) -> None:
    said = said_by("plain", tmp_path)
    assert "Classifier · batch 32 · cpu" in said
    assert "\nstep    " in said
    assert re.search(r"\n[\d,]+ samples/s at the median step; bottleneck: \w+\n", said)


@pytest.mark.slow
def test_the_example_of_dict_batches_counts_tokens_and_memory(tmp_path: Path) -> None:
    said = said_by("tokens", tmp_path)
    assert "Tagger · batch 25 · cpu" in said
    assert "memory  " in said
    assert re.search(r"\n[\d,]+ tokens/s without padding\n", said)


@pytest.mark.slow
def test_the_example_of_two_processes_says_what_waits_for_gradients(tmp_path: Path) -> None:
    said = started("ddp", tmp_path)
    assert " · batch 2 × 32 · " in said
    assert re.search(r"\n2 ranks; \d+% of a step waits for gradients\n", said)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs wandb, which is not installed")
def test_the_example_of_wandb_keeps_every_number_at_its_step(tmp_path: Path) -> None:
    said = started("curves", tmp_path)
    assert "\nbottleneck: " in said
    rows = _wandb_rows(tmp_path)
    steps = {
        key: [int(row["trainer/global_step"]) for row in rows if key in row] for key in ("train/loss", "time/step_ms")
    }
    assert steps["train/loss"] == list(range(1, 257))
    assert steps["time/step_ms"] == list(range(10, 257, 10))


def _wandb_rows(folder: Path) -> list[dict[str, str]]:
    """What an offline run has logged, a row a call."""
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    rows = []
    for data in _log_records(file.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): item.value_json for item in items})
    return rows


def _log_records(log: bytes) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format behind W&B's header of 7 bytes."""
    at, whole, block = 7, b"", 2**15
    while at + 7 <= len(log):
        if at % block > block - 7:  # the rest of a block, too short for a record's header
            at += -at % block
            continue
        length, kind = struct.unpack_from("<HB", log, at + 4)  # behind the checksum
        whole += log[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # the whole of a record, or the last part of one
            yield whole
            whole = b""
