"""docs/data.md: its examples run as they stand, and what they define can be trained."""

import re
from pathlib import Path
from typing import Any

import lightning
import pytest

from batchscope.data.plain import described, lightning_of
from batchscope.models import MLP, LSTMCellModel
from batchscope.training.optimizer import Optimizer
from batchscope.training.task import Task

PAGE = Path(__file__).parents[1] / "docs" / "data.md"


@pytest.fixture(scope="module")
def defined() -> dict[str, Any]:
    """What the examples define, one after the other."""
    examples = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(examples) == 5
    namespace: dict[str, Any] = {"__name__": "data"}
    for number, example in enumerate(examples, start=1):
        exec(compile(example, f"docs/data.md, example {number}", "exec"), namespace)  # noqa: S102 - our own documentation
    return namespace


@pytest.mark.parametrize("name", ["Stripes", "NoisyData", "Files", "Sums", "Plain"])
def test_the_data_of_every_example_are_trained_and_tested(name: str, defined: dict[str, Any]) -> None:
    arguments = {"root": defined["folder"]} if name == "Files" else {}
    arguments |= {} if name in ("Stripes", "Plain") else {"num_workers": 0}
    data = described(defined[name](batch_size=32, **arguments))
    model = LSTMCellModel(data.spec, 8) if data.spec.kind == "sequence" else MLP(data.spec, [8])
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(max_steps=4, accelerator="cpu", **quiet)
    task = Task(model, data.spec, Optimizer(lr=1e-3))
    trainer.fit(task, datamodule=lightning_of(data))
    trainer.test(task, datamodule=lightning_of(data), verbose=False)
    assert trainer.global_step == 4
    assert "test/loss" in trainer.callback_metrics


def test_the_page_names_every_test_of_its_promises() -> None:
    for path in re.findall(r"`((?:data|checkpointing)/test_\w+\.py)`", PAGE.read_text(encoding="utf-8")):
        assert (PAGE.parents[1] / "tests" / path).is_file(), path
