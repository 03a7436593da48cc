"""Whatever is typed, and whatever lies in a file: one line that says what is wrong, and nothing written.

`FUZZ_SECONDS=600 python -m pytest tests/test_fuzz.py` runs for longer than the few seconds of the default tests;
`FUZZ_SEED` repeats a run that found something: the seed stands in the failure.
"""

import copy
import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from batchscope.checkpointing import resume
from batchscope.checkpointing.checkpoint_file import load_checkpoint, write_checkpoint
from batchscope.checkpointing.resume_point import find_resume_point
from batchscope.cli.evaluate import evaluate
from batchscope.options import compositions
from batchscope.options.compose import check_command_line
from batchscope.options.groups import use_config_dir
from batchscope.records.run_record import read
from tests.support.fuzzing import budget, damage, refused, refused_or_fine

KEYS = (
    *(
        "model",
        "data",
        "task",
        "optimizer",
        "trainer",
        "callbacks",
        "logger",
        "experiment",
        "seed",
        "test",
        "resume",
        "search",
    ),
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
        refused_or_fine(lambda: find_resume_point(tmp_path), "a damaged checkpoint")
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
    (folder / "mine.yaml").write_bytes(good)
    use_config_dir(str(tmp_path))
    for dice in budget("yaml"):
        (folder / "mine.yaml").write_bytes(damage(good, dice))
        compositions._pickled.cache_clear()
        refused_or_fine(
            lambda: check_command_line(["model=mine"], multirun=False),
            (folder / "mine.yaml").read_bytes(),
        )


@pytest.mark.slow
def test_a_yaml_file_without_an_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    deep = "[" * 2000 + "]" * 2000
    (tmp_path / "model" / "mine.yaml").write_text(f"_target_: batchscope.models.mlp.MLP\na: {deep}\n")
    use_config_dir(str(tmp_path))
    refused(lambda: check_command_line(["model=mine"], multirun=False), "deep")


# --- hostile values, planted where real configurations have others ---------------------------------------------------
# Here "fine" is no answer: every one is refused, nothing of it runs, and nothing is written.

LINES = (
    ["data=adding", "model=rnn_cell"],
    ["data=digits", "model=torchvision", "trainer=fsdp"],
    ["data=sequential_mnist", "model=stacked_lstm", "optimizer=sgd", "+trainer.max_time={hours:1}"],
    ["experiment=find_batch_size", "+trainer.check_val_every_n_epoch=2"],
    ["experiment=diagnose", "search.batch_factors=[3]"],
)
SECTIONS = ("model", "data", "task", "optimizer", "trainer", "callbacks", "logger", "search")


def payloads(canary: Path) -> list[dict[str, Any]]:
    """Nodes that would leave the canary, or build what nobody has asked for, if they were built."""
    return [
        {"_target_": "torch.hub.load", "repo_or_dir": str(canary.parent / "repo"), "model": "f", "source": "local"},
        {"_target_": "torch.load", "f": str(canary.parent / "payload.pt"), "weights_only": False},
        {"_target_": "pathlib.Path.touch", "self": str(canary)},
        {"_target_": "os.system", "command": f"touch {canary}"},
        {"_target_": "builtins.open", "file": str(canary), "mode": "w"},
        {"_target_": "lightning.pytorch.cli.LightningCLI"},
        {"_target_": "lightning.pytorch.profilers.PyTorchProfiler", "dirpath": str(canary.parent)},
        {
            "_target_": "batchscope.checkpointing.checkpoint_file.write_checkpoint",
            "checkpoint": {},
            "path": str(canary),
        },
        {"_target_": "batchscope.records.run_record.RunRecord", "run_dir": str(canary.parent)},
        {"_target_": "torch.optim.AdamW"},
        {"_target_": 5},
        {"_target_": None},
    ]


def nodes(node: Any, path: str = "") -> list[tuple[dict, str]]:
    """All dicts of a configuration with their names."""
    if not isinstance(node, dict):
        return []
    below = [pair for key, value in node.items() for pair in nodes(value, f"{path}.{key}" if path else key)]
    return [(node, path), *below] if path.partition(".")[0] in SECTIONS else below


def plant(config: dict[str, Any], canary: Path, dice: random.Random) -> str:
    """Put something hostile into a random place of a configuration; returns what and where."""
    node, path = dice.choice(nodes(config))
    payload: Any = copy.deepcopy(dice.choice(payloads(canary)))
    for _ in range(dice.randrange(3)):  # hidden below lists and dicts
        payload = dice.choice(([payload], [1, payload], {"a": payload}, {"": payload}, {"_target": payload}))
    taken = [key for key in node if not key.startswith("_")]
    key = dice.choice(["_args_", "_partial_", "_recursive_", "_convert_", "kwargs", "a b", "5", *taken])
    kind = dice.randrange(4)
    if kind == 0:
        node[key] = payload
    elif kind == 1:
        node["_args_"] = [payload]
    elif kind == 2:
        key = "_target_"
        node[key] = dice.choice([one["_target_"] for one in payloads(canary)])
    else:
        node[key] = dice.choice(("${oc.env:HOME}", "${nowhere}/x", "x${oc.env:PATH}"))
    return f"{path}.{key}: {node.get(key)!r} and _args_ {node.get('_args_')!r}"


def misplace(config: dict[str, Any], outside: Path, dice: random.Random) -> str:
    """Have a configuration write or read somewhere else, or fetch something; returns where."""
    away = dice.choice((str(outside), "elsewhere/x", "s3://bucket/x", "/"))
    if dice.random() < 0.7:  # what some reader of a path replaces, hidden among what is harmless
        parts = [dice.choice(("out", "deep", "x", ".", "")) for _ in range(dice.randrange(5))]
        odd = dice.choice(
            ("..", "../..", "~", "~root", "$HOME", "x$PWD", "file:", "ftp://127.0.0.1:1", "::", "a::file:")
        )
        parts.insert(dice.randint(0, len(parts)), odd)
        away = "/".join(dice.choice(([], ["out"], ["out", "deep"])) + parts)
    places = {
        "callbacks.checkpoint": ["dirpath"],
        "logger.csv": ["save_dir", "root_dir"],
        "logger.tensorboard": ["save_dir", "sub_dir", "log_dir", "filename_suffix"],
        "trainer": ["default_root_dir", "model_registry"],
        "data": ["root"] if "root" in config["data"] else [],
        "model": ["weights"] if "weights" in config["model"] else [],
    }
    if not config["callbacks"]["checkpoint"]:
        del places["callbacks.checkpoint"]
    path, key = dice.choice([(path, key) for path, keys in places.items() for key in keys])
    node = config
    for part in path.split("."):
        node = node[part]
    node[key] = away
    return f"{path}.{key}: {away!r}"


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is there if anything of a payload has run; the working directory is an empty one beside it."""
    canary = tmp_path / "ran"

    class Payload:
        def __reduce__(self) -> tuple:
            return (Path.touch, (canary,))

    torch.save(Payload(), tmp_path / "payload.pt")
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo" / "hubconf.py").write_text(f"open({str(canary)!r}, 'w')\ndef f(): pass\n")
    (tmp_path / "here" / "out" / "a" / "b").mkdir(parents=True)
    (tmp_path / "here" / "out" / "deep").symlink_to("a/b")
    monkeypatch.chdir(tmp_path / "here")
    return canary


@pytest.fixture(scope="module")
def configs() -> list[dict[str, Any]]:
    """Real configurations of runs in the folder `out`."""
    return [check_command_line([*line, "run_dir=out"], multirun=False)[0] for line in LINES]


def nothing_happened(canary: Path) -> bool:
    """Neither has the payload run, nor has anything been written but the file to read and the run's own lock."""
    written = {path.name for path in canary.parent.rglob("*")} - {"run.json", "a.ckpt", ".lock"}
    return written == {"payload.pt", "repo", "hubconf.py", "here", "out", "a", "b", "deep"}


@pytest.mark.parametrize("way", [plant, misplace])
def test_hostile_records_are_refused(
    way: Callable[..., str], canary: Path, configs: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchscope.training.run.train", lambda *_: pytest.fail("the run has begun"))
    path = Path("out/run.json")
    for dice in budget(f"hostile record {way.__name__}"):
        config = copy.deepcopy(dice.choice(configs))
        what = way(config, canary if way is plant else canary.parent / "elsewhere", dice)
        status = dice.choice(("planned", "interrupted", "running", "finished"))
        path.write_text(json.dumps({"status": status, "config": config, "choices": {}}))
        refused(lambda: resume.configuration(read(Path("out")), Path("out"), []), what)
        assert nothing_happened(canary), what


def test_hostile_checkpoints_are_refused_or_evaluated_without_what_is_hostile(
    canary: Path, configs: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[dict[str, Any]] = []
    monkeypatch.setattr("batchscope.cli.evaluate._test", lambda config, *_: (built.append(config) or "", {}))
    path = Path("a.ckpt")
    for dice in budget("hostile checkpoint"):
        config = copy.deepcopy(dice.choice(configs))
        targets = {node.get("_target_") for node, _ in nodes(config)}
        what = plant(config, canary, dice)
        write_checkpoint({"state_dict": {}, "batchscope": {"config": config, "name": "a"}}, path)
        refused_or_fine(lambda: evaluate(path, []), what)
        while built:  # an evaluation takes no callback, logger or search from a checkpoint
            left = nodes(built.pop())
            assert {node.get("_target_") for node, _ in left} <= targets, what
            assert not any({"_args_", "_partial_", "_recursive_", "_convert_"} & node.keys() for node, _ in left), what
        assert nothing_happened(canary), what
