"""`init=<file>`: weights of any wrapper are taken by name, in whole or below a prefix; what does not match is one line."""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from batchscope.errors import UserError
from batchscope.training.initial import line, start_from
from tests.support.runs import SMALL, assert_alike, kill_9, results, run


class Net(nn.Module):
    """An encoder with buffers, and a head."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
        self.head = nn.Linear(8, classes)


def random_net(seed: int, classes: int = 3) -> Net:
    torch.manual_seed(seed)
    return Net(classes)


def renamed(prefix: str, state: dict[str, Any]) -> dict[str, Any]:
    return {prefix + name: value for name, value in state.items()}


OTHER = random_net(1).state_dict()
ENCODER = random_net(1).encoder.state_dict()


@pytest.mark.parametrize(
    "held",
    [
        OTHER,
        {"state_dict": renamed("model.", OTHER), "epoch": 3},  # of Lightning, and of this program
        renamed("module.", OTHER),
        {"model_state_dict": renamed("_orig_mod.", OTHER), "optimizer": {}},
        {"state_dict": renamed("model._orig_mod.module.", OTHER)},
    ],
    ids=["a state_dict", "a checkpoint", "parallel", "compiled", "all of them"],
)
def test_all_weights_are_taken_whatever_wrapped_them(held: dict[str, Any], tmp_path: Path) -> None:
    torch.save(held, tmp_path / "best.ckpt")
    net = random_net(2)
    assert line(start_from(net, tmp_path / "best.ckpt")) == "9 of 9 tensors from best.ckpt"
    assert all(value.equal(OTHER[name]) for name, value in net.state_dict().items())


WHOLE, OF_ENCODER = (
    [OTHER, renamed("model.", OTHER), renamed("encoder.", ENCODER)],
    ["encoder.", ["encoder"], "model.encoder."],
)
BELOW = [(held, prefix) for held in WHOLE for prefix in (*OF_ENCODER, ["encoder.0.", "encoder.1."])]


@pytest.mark.parametrize(("held", "prefix"), BELOW + [(ENCODER, prefix) for prefix in OF_ENCODER])
def test_below_a_prefix_parameters_and_buffers_are_taken(held: Any, prefix: Any, tmp_path: Path) -> None:
    torch.save(held, tmp_path / "w.pt")
    net = random_net(2, classes=7)
    head = net.head.weight.clone()
    assert line(start_from(net, tmp_path / "w.pt", prefix)).startswith("7 of 9 tensors from w.pt (encoder")
    assert all(value.equal(ENCODER[name]) for name, value in net.encoder.state_dict().items())
    assert net.head.weight.equal(head)


@pytest.mark.parametrize(
    ("held", "prefix", "said"),
    [
        ("not weights", None, "holds no weights that can be read without running code; torch.save(module.state_dict()"),
        ({"hyper_parameters": argparse.Namespace(lr=1)}, None, "holds no weights that can be read without running code"),
        ({"epoch": 3}, None, "holds no weights: neither a checkpoint nor a state_dict"),
        (ENCODER, None, 'w.pt does not fit Net: Missing key(s) in state_dict: "encoder.0.weight"'),
        (OTHER | {"extra": torch.ones(3)}, None, 'Unexpected key(s) in state_dict: "extra".; init_prefix=… takes a part of it'),
        (OTHER, "enkoder.", "init_prefix: got 'enkoder.', and Net has encoder, head. Did you mean 'encoder'?"),
        ({"encoder.0.weight": torch.ones(8, 4)}, "encoder.", 'Missing key(s) in state_dict: "encoder.0.bias"'),
        (random_net(0, 7).state_dict(), None, "size mismatch for head.weight: copying a param with shape torch.Size([7, 8])"),
    ],
)  # fmt: skip
def test_what_does_not_match_is_one_line(
    held: Any, prefix: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("w.pt").write_text(held) if isinstance(held, str) else torch.save(held, "w.pt")
    with pytest.raises(UserError, match=re.escape(said)):
        start_from(random_net(2), Path("w.pt"), prefix)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    torch.save(OTHER, tmp_path / "w.pt")
    data = bytearray((tmp_path / "w.pt").read_bytes())
    data[data.index(OTHER["head.bias"].numpy().tobytes())] ^= 1
    (tmp_path / "w.pt").write_bytes(data)
    with pytest.raises(UserError, match="init: .* is damaged: the checksum of"):
        start_from(random_net(2), tmp_path / "w.pt")


# --- in a run --------------------------------------------------------------------------------------------------------

EACH, STEP = "callbacks.checkpoint.every_n_steps=1", "batchscope.training.task.Task.training_step"
NEW = [*SMALL, "seed=3", EACH, "init=w.ckpt", "hydra.run.dir=out"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that starts from the weights of another, `w.ckpt`."""
    folder = tmp_path_factory.mktemp("initial")
    assert run(folder, *SMALL, "trainer.max_epochs=1", "hydra.run.dir=first").end() == 0
    (folder / "first" / "checkpoints" / "last.ckpt").rename(folder / "w.ckpt")
    done = run(folder, *NEW)
    assert done.end() == 0, done.complained
    return folder


def test_a_run_says_what_it_starts_from_in_a_line_and_in_its_record(whole: Path) -> None:
    said = (whole / "stdout").read_text()
    tensors = json.loads((whole / "out/run.json").read_text())["init"]["tensors"]
    assert f"init    {tensors} of {tensors} tensors from w.ckpt\n" in said


@pytest.mark.parametrize("stop", [6, 1], ids=["with a checkpoint", "before the first one"])
def test_a_resumed_run_reads_the_file_only_where_it_starts_again(whole: Path, stop: int, tmp_path: Path) -> None:
    (tmp_path / "w.ckpt").write_bytes((whole / "w.ckpt").read_bytes())
    assert run(tmp_path, *NEW, faults=[(STEP, stop, kill_9)]).end() == -9
    again = ["resume=out"]
    if stop == 6:
        (tmp_path / "w.ckpt").unlink()
    else:
        refused = run(tmp_path, "resume=out")
        assert refused.end() == 1
        assert "init: is 'w.ckpt' in out/run.json; repeat init=w.ckpt: places are not taken" in refused.complained
        again += ["init=w.ckpt"]
    done = run(tmp_path, *again)
    assert done.end() == 0, done.complained
    assert_alike(results(tmp_path / "out"), results(whole / "out"))


def test_what_came_of_it_needs_the_file_no_more(whole: Path) -> None:
    (whole / "w.ckpt").rename(whole / "elsewhere.ckpt")
    try:
        done = run(whole, "ckpt=out/checkpoints/best.ckpt", module="batchscope.cli.evaluate")
        assert done.end() == 0, done.complained
    finally:
        (whole / "elsewhere.ckpt").rename(whole / "w.ckpt")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["init=nowhere.ckpt"], "init: got 'nowhere.ckpt', which is not a file"),
        (["init=first"], "init: got 'first', which is not a file; write init=first/checkpoints/best.ckpt"),
        (["init=w.ckpt", "model.hidden_size=5"], "init: w.ckpt does not fit"),
        (["init_prefix=cells."], "init_prefix: got 'cells.', and there is no init=<file> to take it from"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(whole: Path, words: list[str], said: str) -> None:
    before = {*whole.iterdir()}
    refused = run(whole, *SMALL, *words, "hydra.run.dir=refused")
    assert refused.end() == 1
    assert said in refused.complained and refused.complained.count("\n") == 1
    assert {*whole.iterdir()} == before
