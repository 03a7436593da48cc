"""PredictionImages draws the classes that test steps return, and is silent about all other steps."""

import warnings
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader

from batchscope.callbacks.prediction_images import PredictionImages, Sample, draw_masks
from tests.support.third_party_modules import Stranger

BOTH = {"test/samples", "test/confusion"}
CLASSES, ANSWERS = torch.tensor([0, 1, 2, 2]), torch.eye(3)[[0, 1, 2, 1]]


class Answering(Stranger):
    """Returns what it was given."""

    def __init__(self, outputs: Any):
        super().__init__()
        self.outputs = outputs

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return self.outputs


def drawn(tmp_path: Path, batch: Any, outputs: Any, **options: Any) -> tuple[set[str], PredictionImages]:
    """The images of a test of one batch; the callback warns of nothing."""
    callback = PredictionImages(**options)
    logger = TensorBoardLogger(tmp_path, name="", version="")
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(accelerator="cpu", logger=logger, callbacks=[callback], **quiet)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.test(Answering(outputs), DataLoader([0], collate_fn=lambda _: batch), verbose=False)
    assert not [each for each in said if "PredictionImages" in str(each.message)]
    return set(EventAccumulator(str(tmp_path)).Reload().Tags()["images"]), callback


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 8, 8), (28, 28), (16, 1), (7,), (), (1, 2, 3, 4)], ids=str)
def test_classes_of_any_input_give_samples_and_a_confusion_matrix(shape, dtype: torch.dtype, tmp_path: Path) -> None:
    outputs = {"output": ANSWERS.to(dtype), "target": CLASSES}
    assert drawn(tmp_path, (torch.rand(4, *shape).to(dtype), CLASSES), outputs)[0] == BOTH


N, LONG = 4, torch.long
KNOWN = {
    "values": (torch.rand(N, 1), torch.rand(N), set()),
    "a class for each step": (torch.rand(N, 5, 3), torch.zeros(N, 5, dtype=LONG), set()),
    "classes of which some are left out": (ANSWERS, torch.tensor([0, 1, -100, 2]), BOTH),
    "several labels": (torch.rand(N, 3), torch.ones(N, 3), set()),
    "one logit": (torch.rand(N, 1), torch.ones(N, dtype=LONG), set()),
    "a class for each pixel": (torch.rand(N, 3, 8, 8), torch.zeros(N, 8, 8, dtype=LONG), set()),
    "images": (torch.rand(N, 1, 8, 8), torch.rand(N, 1, 8, 8), set()),
    "no tensors": ([1, 2], {"boxes": 3}, set()),
    "one number": (torch.tensor(1.0), torch.tensor(1.0), set()),
}


def test_classes_of_pixels_are_drawn_as_masks(tmp_path: Path) -> None:
    target = torch.randint(-1, 3, (N, 8, 8)).where(torch.rand(N, 8, 8) > 0.2, -100).clamp(min=-100)
    outputs = {"output": torch.rand(N, 3, 8, 8), "target": target.where(target != -1, 0)}
    images, callback = drawn(tmp_path, (torch.rand(N, 1, 8, 8), None), outputs)
    assert images == BOTH
    assert callback.confusion is not None and callback.confusion.sum() == (target != -100).sum()


@pytest.mark.parametrize(("samples", "rows"), [(3, 1), (8, 1), (11, 2)])
def test_every_sample_has_its_masks(samples: int, rows: int) -> None:
    mask = torch.zeros(4, 4, dtype=LONG)
    axes = draw_masks([Sample(torch.rand(1, 4, 4), mask, mask)] * samples, None).axes
    assert sum(len(one.images) for one in axes) == 3 * samples
    assert [one.get_ylabel() for one in axes if one.get_ylabel()] == ["image", "true", "predicted"] * rows


@pytest.mark.parametrize("kind", KNOWN)
def test_an_answer_is_drawn_by_its_shape_or_not_at_all(kind: str, tmp_path: Path) -> None:
    output, target, images = KNOWN[kind]
    assert drawn(tmp_path, (torch.rand(N, 5, 2), None), {"output": output, "target": target})[0] == images


@pytest.mark.parametrize(
    ("batch", "images"),
    [({4: torch.rand(N, 5), "y": CLASSES}, BOTH), (torch.rand(N, 5), BOTH), (["a text"] * N, set())],
    ids=["a dict", "a tensor", "texts"],
)
def test_the_input_is_the_first_tensor_of_any_batch(batch: Any, images: set[str], tmp_path: Path) -> None:
    assert drawn(tmp_path, batch, {"output": ANSWERS, "target": CLASSES})[0] == images


@pytest.mark.parametrize("outputs", [None, {"loss": torch.ones(())}, torch.ones(4)], ids=str)
def test_a_step_that_returns_no_answer_is_left_alone(outputs: Any, tmp_path: Path) -> None:
    assert drawn(tmp_path, (torch.rand(N, 5), CLASSES), outputs)[0] == set()


def test_the_confusion_matrix_has_true_rows_and_predicted_columns_and_mistakes_are_drawn_first(tmp_path: Path) -> None:
    _, callback = drawn(tmp_path, torch.rand(N, 5), {"output": ANSWERS, "target": CLASSES}, num_samples=2)
    assert callback.confusion is not None
    assert callback.confusion.tolist() == [[1, 0, 0], [0, 1, 0], [0, 1, 1]]
    assert [(one.answer, one.target) for one in callback.samples] == [(1, 2), (0, 0)]
