"""Whatever lies in a file: one line that says what is wrong, and nothing written.

`FUZZ_SECONDS=600 python -m pytest tests/cli/test_fuzz.py` runs for longer than the few seconds of the default tests;
`FUZZ_SEED` repeats a run that found something: the seed stands in the failure.
"""

import copy
import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from batchscope.checkpointing import resume
from batchscope.checkpointing.checkpoint_file import load_checkpoint, write_checkpoint
from batchscope.checkpointing.resume_point import find_resume_point
from batchscope.cli.evaluate import evaluate
from batchscope.options import compose
from batchscope.options.groups import use_config_dir
from batchscope.records.run_record import read
from tests.support.command_lines import composed
from tests.support.fuzzing import budget, damage, refused, refused_or_fine


def test_random_bytes_as_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    whole = {"state_dict": {"w": torch.zeros(50)}, "batchscope": {"config": {}, "name": "a"}, "position": {"steps": 1}}
    write_checkpoint(whole, path)
    good = path.read_bytes()
    buffer = io.BytesIO()
    torch.save(whole, buffer)
    for dice in budget("checkpoint"):
        path.write_bytes(damage(dice.choice((good, buffer.getvalue())), dice))
        refused_or_fine(lambda: load_checkpoint(path), "a damaged checkpoint")
        refused_or_fine(lambda: find_resume_point(tmp_path), "a damaged checkpoint")
        refused_or_fine(lambda: evaluate(path, []), "a damaged checkpoint")
    assert list(tmp_path.iterdir()) == [path]


def test_random_bytes_as_a_record(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    config = composed("data=adding", "model=rnn_cell")
    good = json.dumps({"status": "interrupted", "config": config, "choices": {}}).encode()
    for dice in budget("record"):
        path.write_bytes(damage(good, dice))
        refused_or_fine(lambda: resume.configuration(read(tmp_path), tmp_path, []), path.read_bytes())
        changed = _random_json(good, dice)
        refused_or_fine(lambda changed=changed: resume.configuration(changed, tmp_path, []), changed)
    assert list(tmp_path.iterdir()) == [path]


def _random_json(good: bytes, dice: random.Random) -> dict:
    """The record with something else in one place."""
    record = json.loads(good)
    node, key = record, "config"
    while isinstance(node.get(key), dict) and node[key] and dice.random() < 0.8:
        node, key = node[key], dice.choice(list(node[key]))
    node[key] = dice.choice((None, [], {}, "os.system", -1, {"_target_": "os.system"}, "x" * 1000, [[]], True))
    return record


def test_random_bytes_as_a_yaml_file(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    good = b"_target_: batchscope.models.mlp.MLP\nhidden_sizes: [256, 256]\ndropout: 0.0\n"
    (folder / "mine.yaml").write_bytes(good)
    use_config_dir(str(tmp_path))
    for dice in budget("yaml"):
        (folder / "mine.yaml").write_bytes(damage(good, dice))
        compose._composed.cache_clear()
        refused_or_fine(lambda: composed("model=mine"), (folder / "mine.yaml").read_bytes())


@pytest.mark.slow
def test_a_yaml_file_without_an_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    deep = "[" * 2000 + "]" * 2000
    (tmp_path / "model" / "mine.yaml").write_text(f"_target_: batchscope.models.mlp.MLP\na: {deep}\n")
    use_config_dir(str(tmp_path))
    refused(lambda: composed("model=mine"), "deep")


# --- hostile nodes, planted where real configurations have others ----------------------------------------------------
# Here "fine" is no answer: every one is refused, nothing of it runs, and nothing is written.

LINES = (
    ["data=adding", "model=rnn_cell"],
    ["data=digits", "model=torchvision", "trainer=fsdp"],
    ["data=sequential_mnist", "model=stacked_lstm", "optimizer=sgd", "+trainer.max_time={hours:1}"],
    ["experiment=find_batch_size", "+trainer.check_val_every_n_epoch=2"],
    ["experiment=diagnose", "search.batch_factors=[3]"],
)
SECTIONS = ("model", "data", "task", "optimizer", "trainer", "callbacks", "logger", "search")
TARGETS = [
    "pathlib.Path.touch",
    "os.system",
    "torch.hub.load",
    "lightning.pytorch.cli.LightningCLI",
    "torch.optim.AdamW",
]
TARGETS += ["lightning.pytorch.profilers.PyTorchProfiler", "batchscope.records.run_record.RunRecord", 5, None]


def nodes(node: Any, path: str = "") -> list[tuple[dict, str]]:
    """All dicts of a configuration with their names."""
    if not isinstance(node, dict):
        return []
    below = [pair for key, value in node.items() for pair in nodes(value, f"{path}.{key}" if path else key)]
    return [(node, path), *below] if path.partition(".")[0] in SECTIONS else below


def plant(config: dict[str, Any], dice: random.Random) -> str:
    """Put something hostile into a random place of a configuration; returns what and where."""
    node, path = dice.choice(nodes(config))
    payload: Any = {"_target_": dice.choice(TARGETS), "self": {"_target_": "pathlib.Path", "_args_": ["ran"]}}
    for _ in range(dice.randrange(3)):  # hidden below lists and dicts
        payload = dice.choice(([payload], [1, payload], {"a": payload}, {"": payload}, {"_target": payload}))
    taken = [key for key in node if not key.startswith("_")]
    key, value = dice.choice(
        [
            (dice.choice(["_partial_", "_recursive_", "_convert_", "kwargs", "a b", "5", *taken]), payload),
            ("_args_", [payload]),
            ("_target_", dice.choice(TARGETS)),
            (dice.choice(["kwargs", *taken]), dice.choice(("${oc.env:HOME}", "${nowhere}/x", "x${oc.env:PATH}"))),
        ]
    )
    node[key] = value
    return f"{path}.{key}: {value!r}"


@pytest.fixture(scope="module")
def configs() -> list[dict[str, Any]]:
    """Real configurations of runs in the folder `out`."""
    return [composed(*line, run_dir="out") for line in LINES]


def test_hostile_records_and_checkpoints_are_refused_and_nothing_of_them_runs(configs, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("out").mkdir()
    for dice in budget("hostile configuration"):
        config = copy.deepcopy(dice.choice(configs))
        what = plant(config, dice)
        status = dice.choice(("planned", "interrupted", "running", "finished"))
        Path("out/run.json").write_text(json.dumps({"status": status, "config": config, "choices": {}}))
        refused(lambda: resume.configuration(read(Path("out")), Path("out"), []), what)
        write_checkpoint({"state_dict": {}, "batchscope": {"config": config, "name": "a"}}, Path("a.ckpt"))
        refused(lambda: evaluate(Path("a.ckpt"), []), what)  # at the latest because it has no weights
        assert {path.name for path in Path().rglob("*")} <= {"out", "run.json", ".lock", "a.ckpt"}, what
