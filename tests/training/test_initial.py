"""`init=<file>`: weights of any wrapper are taken by name; what does not match is one line."""

import argparse
import io
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from batchscope.checkpointing.resume import config_to_resume
from batchscope.checkpointing.resume_point import check_resumable
from batchscope.cli.arguments import refuse_missing
from batchscope.cli.evaluate import evaluate
from batchscope.training.initial import start_from
from tests.checkpointing.support import OUT, STEP
from tests.support.command_lines import answer, composed, refusal
from tests.support.runs import SMALL, assert_alike, kill_9, record, results, run
from tests.training.support import completed


def net(seed: int, classes: int = 3) -> nn.ModuleDict:
    """An encoder with buffers, and a head."""
    torch.manual_seed(seed)
    return nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), "head": nn.Linear(8, classes)})


def renamed(prefix: str, state: dict[str, Any]) -> dict[str, Any]:
    return {prefix + name: value for name, value in state.items()}


WEIGHTS, ENCODER = net(1).state_dict(), net(1)["encoder"].state_dict()
WHOLE = [
    WEIGHTS,
    {"state_dict": renamed("model.", WEIGHTS), "epoch": 3},  # Lightning and this program write this
    {"model_state_dict": renamed("_orig_mod.", WEIGHTS), "optimizer": {}},  # compiled
    {"state_dict": renamed("model._orig_mod.module.", WEIGHTS)},
]


@pytest.mark.parametrize("held", WHOLE)
def test_weights_are_taken_by_their_names_without_wrappers(held: Any, tmp_path: Path) -> None:
    torch.save(held, tmp_path / "w.ckpt")
    start_from(model := net(2), tmp_path / "w.ckpt")
    assert all(value.equal(WEIGHTS[name]) for name, value in model.state_dict().items())


def test_of_a_checkpoint_of_a_task_a_network_takes_no_weights_of_the_loss(tmp_path: Path) -> None:
    state = renamed("model.", WEIGHTS) | {"loss_function.weight": torch.ones(3)}
    torch.save({"state_dict": state, "batchscope": {}}, tmp_path / "w.ckpt")
    start_from(net(2), tmp_path / "w.ckpt")
    torch.save({"state_dict": state}, tmp_path / "w.ckpt")  # of another program
    assert 'Unexpected key(s) in state_dict: "loss_function.weight"' in refusal(start_from, net(2), tmp_path / "w.ckpt")


def damaged() -> bytes:
    file = io.BytesIO()
    torch.save(WEIGHTS, file)
    data = bytearray(file.getvalue())
    data[data.index(WEIGHTS["head.bias"].numpy().tobytes())] ^= 1
    return bytes(data)


NO_WEIGHTS = "init: w.pt holds no weights that can be read without running code; torch.save(module.state_dict()"


@pytest.mark.parametrize(
    ("held", "said"),
    [
        (b"not weights", NO_WEIGHTS),
        (damaged(), "init: w.pt is damaged: the checksum of"),
        ({"hyper_parameters": argparse.Namespace(lr=1)}, NO_WEIGHTS),
        ({"epoch": 3}, "init: w.pt holds no weights: neither a checkpoint nor a state_dict"),
        (ENCODER, 'init: w.pt does not fit ModuleDict: Missing key(s) in state_dict: "encoder.0.weight"'),
        (WEIGHTS | {"extra": torch.ones(3)}, 'init: w.pt does not fit ModuleDict: Unexpected key(s) in state_dict: "extra".'),
        (net(0, 7).state_dict(), "init: w.pt does not fit ModuleDict: size mismatch for head.weight: copying a param with shape torch.Size([7, 8])"),
    ],
)  # fmt: skip
def test_what_does_not_match_is_one_line(held: Any, said: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("w.pt").write_bytes(held) if isinstance(held, bytes) else torch.save(held, "w.pt")
    assert refusal(start_from, net(2), Path("w.pt")).startswith(said)


def test_a_file_that_is_gone_is_said_to_be_none(tmp_path: Path) -> None:
    assert refusal(start_from, net(2), tmp_path / "w.pt") == f"init: got '{tmp_path}/w.pt', which is not a file"


def test_a_file_of_safetensors_is_answered_with_how_to_convert_it(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    message = refusal(start_from, net(2), tmp_path / "w.safetensors")
    assert "; torch.save(safetensors.torch.load_file(this), file) makes such a file of it" in message


# --- in a run --------------------------------------------------------------------------------------------------------

NEW = [*SMALL, "seed=3", "callbacks.checkpoint.every_n_steps=1", "init=w.ckpt", OUT]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that starts from the weights of another run, `w.ckpt`."""
    folder = tmp_path_factory.mktemp("initial")
    completed(folder, *SMALL, "trainer.max_epochs=1", "hydra.run.dir=first")
    (folder / "first" / "checkpoints" / "last.ckpt").rename(folder / "w.ckpt")
    completed(folder, *NEW)
    return folder


def test_what_came_of_a_run_needs_the_file_no_more(whole: Path, tmp_path: Path) -> None:
    for name in ("best", "last"):
        checkpoint = shutil.copy(whole / "out" / "checkpoints" / f"{name}.ckpt", tmp_path)
        assert "test/loss" in evaluate(Path(checkpoint), ["trainer.accelerator=cpu"])[1]


@pytest.mark.parametrize(
    "stop", [pytest.param(6, marks=pytest.mark.slow), 1], ids=["with a checkpoint", "before the first one"]
)
def test_a_resumed_run_reads_the_file_only_where_it_starts_again(
    whole: Path, stop: int, tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "w.ckpt").write_bytes((whole / "w.ckpt").read_bytes())
    assert run(tmp_path, *NEW, faults=[(STEP, stop, kill_9)]).end() == -9
    if stop == 6:
        (tmp_path / "w.ckpt").unlink()
        completed(tmp_path, "resume=out")
    else:
        monkeypatch.chdir(tmp_path)
        message = refusal(config_to_resume, record(Path("out")), Path("out"), [])
        assert message.startswith("init: is 'w.ckpt' in out/run.json, and a file alone does not decide that")
        completed(tmp_path, "resume=out", "init=w.ckpt")
    assert_alike(results(tmp_path / "out"), results(whole / "out"))


def test_a_mistake_is_one_line(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(whole)
    message = "error: init: got 'first', which is not a file; write init=first/checkpoints/best.ckpt\n"
    assert answer("train", *SMALL, "init=first") == (1, "", message)


@pytest.mark.parametrize("name", ["epoch=1-step=8.ckpt", "lr=0.1, c.ckpt"])
def test_the_advised_word_names_a_file_of_any_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).touch()
    for line in (refusal(refuse_missing, "init", Path("x.ckpt")), refusal(check_resumable, {}, Path(name))):
        (word,) = shlex.split(line.partition("; write " if "; write " in line else "; ")[2].partition(" starts")[0])
        assert composed(word)["init"] == name
