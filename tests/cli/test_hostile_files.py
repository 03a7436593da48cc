"""Files from strangers: a command refuses a file that is no record or checkpoint in one line, and runs no code from it.

A row is a file and a command that reads it. What a valid record may decide stands
in tests/options/test_trust.py. `FUZZ_SECONDS=600 pytest -k nodes` plants hostile nodes for longer than the default tests;
`FUZZ_SEED` repeats a run that found something: the seed stands in the failure.
"""

import copy
import json
import os
import zipfile
from pathlib import Path

import pytest
import torch
from lightning import LightningModule

from batchscope.checkpointing import resume
from batchscope.checkpointing.checkpoint_file import write_checkpoint
from batchscope.checkpointing.resume_point import find_resume_point
from batchscope.cli.evaluate import evaluate
from batchscope.records.run_record import read
from tests.support.command_lines import answer, composed, refusal
from tests.support.fuzzing import budget, refused
from tests.support.synthetic_runs import write_run

# --- records ---------------------------------------------------------------------------------------------------------

INTERRUPTED = '{"schema": 3, "status": "interrupted", "config": %s}'
RECORDS = {
    "nothing": None,
    "torn": '{"schema": 3, "sta',
    "zeros": "\0" * 1000,
    "a list": "[]",
    "without an end": '{"a":' * 100_000,
    "of another schema": '{"schema": 99}',
    "no configuration": INTERRUPTED % 7,
    "a link to itself": Path("run.json"),
    "a configuration of one target": INTERRUPTED % '{"model": {"_target_": "os.system"}}',
}
ROWS = [(kind, reader) for kind in RECORDS for reader in ("train resume=x", "explain x", "report x")]
ROWS += [(kind, reader) for kind in ("nothing", "zeros") for reader in ("compare a x", "choose x")]
ROWS.remove(("a configuration of one target", "report x"))  # it reads no configuration that could run code


@pytest.mark.parametrize(("kind", "reader"), ROWS)
def test_what_is_no_record_is_one_line(kind, reader, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(Path("a"), 64, 10.0)
    Path("x").mkdir()
    if isinstance(RECORDS[kind], Path):
        Path("x/run.json").symlink_to(RECORDS[kind])
    elif RECORDS[kind] is not None:
        Path("x/run.json").write_text(RECORDS[kind])
    result = answer(*reader.split())
    assert (result.code, result.out, result.err.count("\n")) == (1, "", 1), result
    assert result.err.startswith("error: ") and ("x" in result.err or "is missing" in result.err)
    assert not Path("outputs").exists()


# --- checkpoints -----------------------------------------------------------------------------------------------------

FEW = [f"data.num_{split}=4" for split in ("train", "val", "test")]
CONFIG = composed("data=adding", "model=rnn_cell", *FEW)
GOOD = {"state_dict": {"weight": torch.arange(1000.0)}, "batchscope": {"name": "a", "config": CONFIG}}
NOT_WHOLE, MORE = "a.ckpt is not a whole checkpoint", "a.ckpt holds more than tensors and plain values"
NOT_OURS, CONFIRM = "a.ckpt is not a checkpoint that batchscope wrote", "in a.ckpt"


class Payload:
    """An object whose unpickling leaves a file."""

    def __reduce__(self):
        return (Path.touch, (Path("ran"),))


def written(**changed):
    """A whole checkpoint with other values."""
    return lambda path: write_checkpoint({**GOOD, **changed}, path)


def cut(share):
    return lambda path: (write_checkpoint(GOOD, path), os.truncate(path, int(share * path.stat().st_size)))


def with_node(section, **node):
    return written(batchscope={"name": "a", "config": {**CONFIG, section: CONFIG[section] | node}})


RUNS = {"_target_": "pathlib.Path.touch", "_args_": [{"_target_": "pathlib.Path", "_args_": ["ran"]}]}
# Defect → a function that writes the file, and the error of a command that reads weights.
CHECKPOINTS = {
    "empty": (lambda path: path.touch(), NOT_WHOLE),
    "zeros": (lambda path: path.write_bytes(bytes(5000)), NOT_WHOLE),
    **{f"{share} of it": (cut(share), NOT_WHOLE) for share in (0.0001, 0.5, 0.99999)},
    "another archive": (lambda path: zipfile.ZipFile(path, "w").close(), "a.ckpt"),
    "another program's": (lambda path: torch.save({"state_dict": {}}, path), NOT_OURS),
    "a payload": (lambda path: torch.save({**GOOD, "x": Payload()}, path), MORE),
    **{
        f"provenance {provenance}": (written(batchscope=provenance), NOT_OURS)
        for provenance in (None, [], {}, {"config": None, "name": "a"})
    },
    **{f"named {name!r}": (written(batchscope={"config": CONFIG, "name": name}), NOT_OURS) for name in (5, "\x1b[2J")},
    **{
        f"weights {weights}": (written(state_dict=weights), NOT_OURS)
        for weights in (None, [], {"a": "b"}, {5: 5}, {"weight": 3})
    },
    "sparse weights": (written(state_dict={"weight": torch.eye(2).to_sparse()}), NOT_OURS),
    "a sparse extra state": (written(state_dict={"a._extra_state": [torch.eye(2).to_sparse()]}), NOT_OURS),
    "weights of no device": (written(state_dict={"weight": torch.eye(2, device="meta")}), NOT_OURS),
    "a model that runs": (with_node("model", **RUNS), CONFIRM),
    "a place": (with_node("trainer", model_registry="x"), CONFIRM),
}  # fmt: skip
READ = [(kind, "evaluate ckpt=a.ckpt") for kind in CHECKPOINTS]
# A resumed run has its configuration from its record.
READ += [(kind, "resume") for kind, (_, message) in CHECKPOINTS.items() if message != CONFIRM]
OTHER_READERS = ["predict ckpt=a.ckpt input=a.png", "export ckpt=a.ckpt", "latency ckpt=a.ckpt"]
READ += [(kind, reader) for kind in ("a payload", "a model that runs") for reader in OTHER_READERS]


@pytest.mark.parametrize(("kind", "reader"), READ)
def test_what_is_no_checkpoint_is_one_line_and_nothing_of_it_runs(kind, reader, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # the environment allows pickles
    write, message = CHECKPOINTS[kind]
    write(Path("a.ckpt"))
    Path("a.png").touch()
    if reader == "resume":
        Path("checkpoints").mkdir()
        Path("a.ckpt").rename("checkpoints/last.ckpt")
        assert "last.ckpt" in refusal(find_resume_point, LightningModule(), tmp_path)
    else:
        result = answer(*reader.split())
        assert (result.code, result.out, result.err.count("\n")) == (1, "", 1), result
        assert message in result.err
    assert {path.name for path in tmp_path.iterdir()} <= {"a.ckpt", "checkpoints", "last.ckpt", "a.png"}


# --- hostile nodes, planted where real configurations have others ----------------------------------------------------


LINES = (
    ["data=digits", "model=torchvision", "trainer=ddp"],
    ["data=sequential_mnist", "model=stacked_lstm", "optimizer=sgd", "+trainer.max_time={hours:1}"],
    ["experiment=time_to_target", "target=0.9", "search.sizes=[3]"],
)
SECTIONS = ("model", "data", "task", "optimizer", "trainer", "callbacks", "logger", "search")
TARGETS = ["pathlib.Path.touch", "os.system", "torch.optim.AdamW", "batchscope.records.run_record.RunRecord", 5, None]


def nodes(node, path=""):
    """All dicts in the sections of a configuration, with their names."""
    if not isinstance(node, dict):
        return []
    below = [pair for key, value in node.items() for pair in nodes(value, f"{path}.{key}" if path else key)]
    return [(node, path), *below] if path.partition(".")[0] in SECTIONS else below


def test_hostile_nodes_in_records_and_checkpoints_are_refused_and_nothing_of_them_runs(tmp_path, monkeypatch):
    """No configuration with a hostile node may be accepted."""
    monkeypatch.chdir(tmp_path)
    configs = [composed(*line) for line in LINES]
    Path("out").mkdir()
    for dice in budget("hostile configuration"):
        config = copy.deepcopy(dice.choice(configs))
        node, path = dice.choice(nodes(config))
        target = {"_target_": dice.choice(TARGETS), "self": {"_target_": "pathlib.Path", "_args_": ["ran"]}}
        hidden = dice.choice((target, [1, target], {"a": target}, {"_target": [target]}))
        present = dice.choice([key for key in node if not key.startswith("_")] or ["kwargs"])
        option = dice.choice(("_partial_", "_args_", "kwargs", "a b", present))
        planted = dice.choice(({option: hidden}, {"_target_": dice.choice(TARGETS)}, {present: "x${oc.env:HOME}"}))
        node |= planted
        Path("out/run.json").write_text(json.dumps({"status": "interrupted", "config": config, "choices": {}}))
        refused(lambda: resume.config_to_resume(read(Path("out")), Path("out"), []), (path, planted))
        write_checkpoint({"state_dict": {}, "batchscope": {"config": config, "name": "a"}}, Path("a.ckpt"))
        refused(lambda: evaluate(Path("a.ckpt"), []), (path, planted))  # at the latest because it has no weights
        assert {file.name for file in tmp_path.rglob("*")} <= {"out", "run.json", ".lock", "a.ckpt"}, (path, planted)
