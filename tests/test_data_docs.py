"""docs/data.md: its examples run as they stand, what they define can be trained, and files of data run nothing."""

import importlib.util
import pickle
import re
from pathlib import Path
from typing import Any

import lightning
import pytest

from batchscope.data.plain import described, lightning_of
from batchscope.models import MLP, LSTMCellModel
from batchscope.training.optimizer import Optimizer
from batchscope.training.task import Task
from tests.support.own_data import MaskedMean

PAGE = Path(__file__).parents[1] / "docs" / "data.md"
LIBRARIES = {"Streamed": "torchdata", "Shards": "webdataset"}  # which an example needs beside the project's own
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def defined() -> dict[str, Any]:
    """What the examples define, one after the other; those of a library that is not installed are left out."""
    examples = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(examples) == 7
    missing = [library for library in LIBRARIES.values() if importlib.util.find_spec(library) is None]
    namespace: dict[str, Any] = {"__name__": "data"}
    for number, example in enumerate(examples, start=1):
        if not any(f"import {library}" in example or f"from {library}" in example for library in missing):
            exec(compile(example, f"docs/data.md, example {number}", "exec"), namespace)  # noqa: S102 - our own documentation
    return namespace


def example(name: str, defined: dict[str, Any], **arguments: Any) -> Any:
    if name in LIBRARIES:
        pytest.importorskip(LIBRARIES[name], reason=f"{LIBRARIES[name]} is not installed")
        arguments = {"root": defined["files" if name == "Streamed" else "tars"], **arguments}
    return defined[name](batch_size=32, **arguments)


@pytest.mark.parametrize("name", ["Stripes", "NoisyData", "Longest", "Sums", "Plain", "Streamed", "Shards"])
def test_the_data_of_every_example_are_trained_and_tested(name: str, defined: dict[str, Any]) -> None:
    data = described(example(name, defined, **({"num_workers": 0} if name in ("NoisyData", "Longest", "Sums") else {})))
    models = {"Sums": LSTMCellModel, "Longest": MaskedMean}
    model = models[name](data.spec, 8) if name in models else MLP(data.spec, [8])
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(max_steps=4, accelerator="cpu", **quiet)
    task = Task(model, data.spec, Optimizer(lr=1e-3))
    trainer.fit(task, datamodule=lightning_of(data))
    trainer.test(task, datamodule=lightning_of(data), verbose=False)
    assert trainer.global_step == 4
    assert "test/loss" in trainer.callback_metrics


@pytest.mark.parametrize("name", ["Streamed", "Shards"])
def test_an_epoch_has_every_sample_once(name: str, defined: dict[str, Any]) -> None:
    batches = list(example(name, defined).train_dataloader())
    labels = [int(y) for _, labels in batches for y in labels]
    assert sorted(labels) == [0] * (len(labels) // 2) + [1] * (len(labels) // 2)
    assert len(labels) == {"Streamed": 192, "Shards": 128}[name]
    assert all((x.flatten(1).mean(1) == y).all() for x, y in batches)


def test_a_stream_goes_on_where_it_was(defined: dict[str, Any]) -> None:
    whole = example("Streamed", defined).train_dataloader()
    expected = [x for _ in range(2) for x, _ in whole]
    stopped = example("Streamed", defined).train_dataloader()
    batches = iter(stopped)
    for _ in range(4):
        next(batches)
    again = example("Streamed", defined).train_dataloader()
    again.load_state_dict(stopped.state_dict())
    rest = [x for _ in range(2) for x, _ in again]
    assert len(rest) == len(expected) - 4
    assert all((one == other).all() for one, other in zip(rest, expected[4:], strict=True))


def test_a_shard_unpickles_nothing_and_no_name_is_a_command(defined: dict[str, Any], tmp_path, monkeypatch) -> None:
    webdataset = pytest.importorskip("webdataset", reason="webdataset is not installed")

    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "unpickled",))

    monkeypatch.chdir(tmp_path)
    folder = Path("pipe:touch executed; cat ")
    folder.mkdir()
    (tar,) = defined["tars"].glob("train-0.tar")
    picture = next(iter(webdataset.WebDataset(str(tar), shardshuffle=False)))["png"]
    with (folder / "train-0.tar").open("wb") as file, webdataset.TarWriter(file, encoder=False) as writer:
        hostile = dict.fromkeys(("pkl", "pyd", "pth"), pickle.dumps(Evil()))
        writer.write({"__key__": "0001", "png": picture, "cls": b"1", **hostile})
    ((x, y),) = example("Shards", defined, root=folder).train_dataloader()
    assert (len(x), y.tolist()) == (1, [1])
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_the_page_names_every_test_of_its_promises() -> None:
    for path in re.findall(r"`((?:data|checkpointing)/test_\w+\.py)`", PAGE.read_text(encoding="utf-8")):
        assert (PAGE.parents[1] / "tests" / path).is_file(), path
