"""PredictionImages draws what test steps return, whatever the data, and nothing for modules that return nothing."""

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from batchscope.callbacks.prediction_images import PredictionImages
from tests.support.third_party_modules import Stranger


class Answering(Stranger):
    """Returns prepared answers as its output."""

    def __init__(self, output: Tensor):
        super().__init__()
        self.output = output

    def test_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        return {"output": self.output, "target": batch[1]}


def pictures(
    tmp_path: Path, x: Tensor, y: Tensor, module: lightning.LightningModule, **options: Any
) -> PredictionImages:
    callback = PredictionImages(**options)
    trainer = lightning.Trainer(
        accelerator="cpu",
        logger=TensorBoardLogger(tmp_path, name="", version=""),
        callbacks=[callback],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.test(module, DataLoader(TensorDataset(x, y), batch_size=len(x)), verbose=False)
    return callback


def images(tmp_path: Path) -> set[str]:
    return set(EventAccumulator(str(tmp_path)).Reload().Tags()["images"])


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 8, 8), (28, 28), (16, 1), (7,), (), (1, 2, 3, 4)], ids=str)
def test_classes_give_samples_and_a_confusion_matrix(shape: tuple[int, ...], tmp_path: Path) -> None:
    y = torch.tensor([0, 1, 2, 2])
    pictures(tmp_path, torch.rand(4, *shape), y, Answering(torch.eye(3)[[0, 1, 2, 1]]))
    assert images(tmp_path) == {"test/samples", "test/confusion"}


def test_the_confusion_matrix_counts_true_rows_and_predicted_columns(tmp_path: Path) -> None:
    y = torch.tensor([0, 1, 2, 2])
    callback = pictures(tmp_path, torch.rand(4, 1, 4, 4), y, Answering(torch.eye(3)[[0, 1, 2, 1]]))
    assert callback._confusion.view(3, 3).tolist() == [[1, 0, 0], [0, 1, 0], [0, 1, 1]]


@pytest.mark.slow
def test_mistakes_are_shown_first(tmp_path: Path) -> None:
    y = torch.tensor([0, 1, 2, 2])
    callback = pictures(tmp_path, torch.rand(4, 1, 4, 4), y, Answering(torch.eye(3)[[0, 1, 2, 1]]), num_samples=2)
    assert [(int(answer), int(target)) for _, _, answer, target in callback._samples] == [(1, 2), (0, 0)]


@pytest.mark.parametrize(
    ("output", "target"),
    [(torch.rand(4, 1), torch.rand(4)), (torch.rand(4, 5, 3), torch.zeros(4, 5, dtype=torch.long))],
    ids=["value", "class_per_step"],
)
def test_values_and_classes_per_step_give_samples_alone(output: Tensor, target: Tensor, tmp_path: Path) -> None:
    pictures(tmp_path, torch.rand(4, 5, 2), target, Answering(output))
    assert images(tmp_path) == {"test/samples"}


def test_a_module_that_returns_nothing_is_left_alone(tmp_path: Path) -> None:
    class Silent(Stranger):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            return None

    pictures(tmp_path, torch.rand(4, 4), torch.zeros(4), Silent())
    assert images(tmp_path) == set()


def test_a_batch_that_cannot_be_drawn_is_one_warning_and_the_test_goes_on(tmp_path: Path) -> None:
    class Dicts(Answering):
        def test_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
            return {"output": self.output, "target": batch["y"]}

    callback = PredictionImages()
    trainer = lightning.Trainer(accelerator="cpu", logger=False, callbacks=[callback], enable_progress_bar=False)
    samples = [{"x": torch.rand(4), "y": torch.tensor(i % 3)} for i in range(6)]
    with pytest.warns(UserWarning, match="PredictionImages stopped measuring: KeyError: 0") as caught:
        trainer.test(Dicts(torch.eye(3)), DataLoader(samples, batch_size=3), verbose=False)
    assert len([w for w in caught if "PredictionImages" in str(w.message)]) == 1
