"""PredictionImages draws the classes that test steps return, and is silent about all other steps."""

import warnings
from types import SimpleNamespace

import lightning
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader

from batchscope.callbacks.prediction_images import PredictionImages, _as_image
from tests.support.third_party_modules import Stranger

N, LONG, NONE = 4, torch.long, set()
BOTH = {"test/samples", "test/confusion"}
CLASSES, ANSWERS = torch.tensor([0, 1, 2, 2]), torch.eye(3)[[0, 1, 2, 1]]
ANY = torch.rand(N, 5, 2)


def drawn(folder, batch, outputs, **options) -> tuple[set[str], PredictionImages]:
    """The images of a test of one batch; the callback warns of nothing."""
    callback, module = PredictionImages(**options), Stranger()
    module.test_step = lambda batch, batch_idx: outputs
    logger = TensorBoardLogger(folder, name="", version="")
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(accelerator="cpu", logger=logger, callbacks=[callback], **quiet)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.test(module, DataLoader([0], collate_fn=lambda _: batch), verbose=False)
    assert not [each for each in said if "PredictionImages" in str(each.message)]
    return set(EventAccumulator(str(folder)).Reload().Tags()["images"]), callback


def answer(output=ANSWERS, target=CLASSES):
    return {"output": output, "target": target}


ROWS = {
    "gray images": (torch.rand(N, 1, 28, 28), answer(), BOTH),
    "color images in bf16": (torch.rand(N, 3, 8, 8).bfloat16(), answer(ANSWERS.bfloat16()), BOTH),
    "sequences": (torch.rand(N, 28, 28), answer(), BOTH),
    "numbers": (torch.rand(N), answer(), BOTH),
    "videos": (torch.rand(N, 1, 2, 3, 4), answer(), BOTH),
    "a pair": ((ANY, CLASSES), answer(), BOTH),
    "a dict": ({4: ANY, "y": CLASSES}, answer(), BOTH),
    "texts": (["a text"] * N, answer(), NONE),
    "values": (ANY, answer(torch.rand(N, 1), torch.rand(N)), NONE),
    "a class for each step": (ANY, answer(torch.rand(N, 5, 3), torch.zeros(N, 5, dtype=LONG)), NONE),
    "classes of which some are left out": (ANY, answer(ANSWERS, torch.tensor([0, 1, -100, 2])), BOTH),
    "several labels": (ANY, answer(torch.rand(N, 3), torch.ones(N, 3)), NONE),
    "one logit": (ANY, answer(torch.rand(N, 1), torch.ones(N, dtype=LONG)), NONE),
    "a class for each pixel of no image": (ANY, answer(torch.rand(N, 3, 8, 8), torch.zeros(N, 8, 8, dtype=LONG)), NONE),
    "images as answers": (ANY, answer(torch.rand(N, 1, 8, 8), torch.rand(N, 1, 8, 8)), NONE),
    "no tensors": (ANY, answer([1, 2], {"boxes": 3}), NONE),
    "one number": (ANY, answer(torch.tensor(1.0), torch.tensor(1.0)), NONE),
    "a loss alone": (ANY, {"loss": torch.ones(())}, NONE),
    "a tensor alone": (ANY, torch.ones(4), NONE),
}


@pytest.mark.parametrize(("batch", "outputs", "images"), ROWS.values(), ids=ROWS)
def test_an_answer_is_drawn_by_its_shape_or_not_at_all(batch, outputs, images, tmp_path) -> None:
    assert drawn(tmp_path, batch, outputs)[0] == images


@pytest.mark.parametrize("spec", [None, SimpleNamespace(mean=(0.5,) * 3, std=(0.2,) * 3)])
def test_an_image_of_bytes_keeps_its_colours(spec) -> None:
    pixels = torch.tensor([0, 51, 255], dtype=torch.uint8)
    assert _as_image(pixels.view(3, 1, 1), spec).flatten().tolist() == pytest.approx([0, 0.2, 1])


def test_classes_of_pixels_are_drawn_as_masks(tmp_path) -> None:
    target = torch.randint(3, (N, 8, 8)).where(torch.rand(N, 8, 8) > 0.2, -100)
    images, callback = drawn(tmp_path, (torch.rand(N, 1, 8, 8), None), answer(torch.rand(N, 3, 8, 8), target))
    assert images == BOTH
    assert callback.confusion.sum() == (target != -100).sum()


def test_the_confusion_matrix_has_true_rows_and_predicted_columns_and_mistakes_are_drawn_first(tmp_path) -> None:
    _, callback = drawn(tmp_path, ANY, answer(), num_samples=2)
    assert callback.confusion.tolist() == [[1, 0, 0], [0, 1, 0], [0, 1, 1]]
    assert [(one.answer, one.target) for one in callback.samples] == [(1, 2), (0, 0)]
