"""Whatever is typed, and whatever lies in a file: one line that says what is wrong, and nothing written.

`FUZZ_SECONDS=600 python -m pytest tests/test_fuzz.py` goes on for longer than the few seconds of the default tests;
`FUZZ_SEED` repeats a run that found something: the seed stands in the failure.
"""

import io
import json
import random
from pathlib import Path

import pytest
import torch
from fuzzing import budget, damage, refused_or_fine

from batchscope.checkpoint import load_checkpoint, write_checkpoint
from batchscope.config import check_command_line
from batchscope.evaluate import evaluate
from batchscope.record import read
from batchscope.recovery import resume
from batchscope.recovery.resumed_fit import newest_good

KEYS = (
    *("model", "data", "optimizer", "trainer", "callbacks", "logger", "experiment", "seed", "test", "resume", "search"),
    *("data.batch_size", "data.pipeline", "data.root", "model.hidden_size", "optimizer.lr", "trainer.max_epochs"),
    *(
        "model._target_",
        "callbacks.checkpoint",
        "callbacks.checkpoint.every_minutes",
        "hydra.run.dir",
        "run_dir",
        "",
        ".",
    ),
    *("data..batch_size", "a.b.c", "data@x", "+data.batch_size", "++seed", "~model", "~callbacks.progress", "hydra"),
)
VALUES = (
    *(
        "",
        "null",
        "true",
        "-1",
        "0",
        "1",
        "1e999",
        "nan",
        "inf",
        "99999999999999999999",
        "cnn",
        "mnist",
        "adamw",
        "../../x",
    ),
    *(
        "/etc/passwd",
        "${run_dir}",
        "${oc.env:HOME}",
        "${nowhere}",
        "${",
        "[1,2",
        "{a:1}",
        "[]",
        "'",
        '"',
        "\\",
        "a,b",
        "é☃",
    ),
    *(
        "os.system",
        "builtins.open",
        "torch.load",
        "shutil.copy",
        "range(3)",
        "choice(1,2)",
        "x" * 5000,
        "\x00",
        "\n",
        "=",
        "%s",
    ),
)


def test_random_command_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for dice in budget("command line"):
        words = [f"{dice.choice(KEYS)}={dice.choice(VALUES)}" for _ in range(dice.randint(1, 3))]
        if dice.random() < 0.2:
            words[0] = "".join(chr(dice.randrange(1, 0x250)) for _ in range(dice.randint(1, 30)))
        refused_or_fine(lambda words=words: check_command_line(words, multirun=False), words)
    assert list(tmp_path.iterdir()) == []


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
        refused_or_fine(lambda: newest_good(tmp_path), "a damaged checkpoint")
        refused_or_fine(lambda: evaluate(path, []), "a damaged checkpoint")
    assert list(tmp_path.iterdir()) == [path]


def test_random_bytes_as_a_record(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    config = check_command_line(["data=adding", "model=rnn_cell"], multirun=False)[0]
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
    for dice in budget("yaml"):
        (folder / "mine.yaml").write_bytes(damage(good, dice))
        refused_or_fine(
            lambda: check_command_line(["model=mine"], multirun=False, config_dir=str(tmp_path)),
            (folder / "mine.yaml").read_bytes(),
        )
