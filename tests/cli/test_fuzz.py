"""Whatever lies in a file: one line that says what is wrong, and nothing written.

`FUZZ_SECONDS=600 python -m pytest tests/cli/test_fuzz.py` runs for longer than the few seconds of the default tests;
`FUZZ_SEED` repeats a run that found something: the seed stands in the failure.
"""

import copy
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from batchscope.checkpointing import resume
from batchscope.checkpointing.checkpoint_file import load_checkpoint, write_checkpoint
from batchscope.checkpointing.resume_point import find_resume_point
from batchscope.cli.evaluate import evaluate
from batchscope.records.run_record import read
from tests.support.command_lines import composed
from tests.support.fuzzing import budget, damage, refused, refused_or_fine


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path()


def test_random_bytes_as_a_checkpoint(here: Path) -> None:
    path = here / "last.ckpt"
    whole = {"state_dict": {"w": torch.zeros(50)}, "batchscope": {"config": {}, "name": "a"}, "position": {"steps": 1}}
    write_checkpoint(whole, path)
    torch.save(whole, buffer := io.BytesIO())
    good = path.read_bytes(), buffer.getvalue()
    for dice in budget("checkpoint"):
        path.write_bytes(damage(dice.choice(good), dice))
        for reader in (lambda: load_checkpoint(path), lambda: find_resume_point(here), lambda: evaluate(path, [])):
            refused_or_fine(reader, "a damaged checkpoint")
    assert list(here.iterdir()) == [path]


def test_random_bytes_as_a_record(here: Path) -> None:
    path = here / "run.json"
    config = composed("data=adding", "model=rnn_cell")
    good = json.dumps({"status": "interrupted", "config": config, "choices": {}}).encode()
    for dice in budget("record"):
        path.write_bytes(damage(good, dice))
        refused_or_fine(lambda: resume.configuration(read(here), here, []), path.read_bytes())
    assert list(here.iterdir()) == [path]


LINES = (
    ["data=digits", "model=torchvision", "trainer=fsdp"],
    ["data=sequential_mnist", "model=stacked_lstm", "optimizer=sgd", "+trainer.max_time={hours:1}"],
    ["experiment=diagnose", "search.batch_factors=[3]"],
)
SECTIONS = ("model", "data", "task", "optimizer", "trainer", "callbacks", "logger", "search")
TARGETS = ["pathlib.Path.touch", "os.system", "torch.optim.AdamW", "batchscope.records.run_record.RunRecord", 5, None]


def nodes(node: Any, path: str = "") -> list[tuple[dict, str]]:
    """All dicts in the sections of a configuration, with their names."""
    if not isinstance(node, dict):
        return []
    below = [pair for key, value in node.items() for pair in nodes(value, f"{path}.{key}" if path else key)]
    return [(node, path), *below] if path.partition(".")[0] in SECTIONS else below


def test_hostile_nodes_in_records_and_checkpoints_are_refused_and_nothing_of_them_runs(here: Path) -> None:
    """Here "fine" is no answer."""
    configs = [composed(*line, run_dir="out") for line in LINES]
    Path("out").mkdir()
    for dice in budget("hostile configuration"):
        config = copy.deepcopy(dice.choice(configs))
        node, path = dice.choice(nodes(config))
        target: Any = {"_target_": dice.choice(TARGETS), "self": {"_target_": "pathlib.Path", "_args_": ["ran"]}}
        hidden = dice.choice((target, [1, target], {"a": target}, {"_target": [target]}))
        known = dice.choice([key for key in node if not key.startswith("_")] or ["kwargs"])
        option, text = (
            dice.choice(("_partial_", "kwargs", "a b", known)),
            dice.choice(("${oc.env:HOME}", "${nowhere}/x")),
        )
        planted = dice.choice(
            ({option: hidden}, {"_args_": [hidden]}, {"_target_": dice.choice(TARGETS)}, {known: text})
        )
        node |= planted
        Path("out/run.json").write_text(json.dumps({"status": "interrupted", "config": config, "choices": {}}))
        refused(lambda: resume.configuration(read(Path("out")), Path("out"), []), (path, planted))
        write_checkpoint({"state_dict": {}, "batchscope": {"config": config, "name": "a"}}, Path("a.ckpt"))
        refused(lambda: evaluate(Path("a.ckpt"), []), (path, planted))  # at the latest because it has no weights
        assert {one.name for one in here.rglob("*")} <= {"out", "run.json", ".lock", "a.ckpt"}, (path, planted)
