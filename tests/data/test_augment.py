"""Augment: what a change of an image is, and that it depends on (seed, epoch, position) alone."""

from typing import Any

import lightning
import pytest
import torch
from torch import Tensor

from batchscope.data.augment import Augment, moved
from batchscope.data.datamodule import TensorDataModule
from batchscope.data.plain import described
from batchscope.data.spec import DataSpec
from batchscope.errors import UserError
from tests.support.command_lines import composed, refusal

IMAGE = torch.arange(2 * 5 * 5, dtype=torch.float32).view(1, 2, 5, 5)
RANDOM = torch.rand(200, 1, 6, 6, generator=torch.Generator().manual_seed(0))


def with_numbers(augment: Augment, numbers: list[float], x: Tensor = IMAGE) -> Tensor:
    return moved(x, augment.maps(torch.tensor([numbers]), *x.shape[2:]))


HALF, LEAST, MOST = 0.5, 0.0, 1 - 1e-6


def test_a_shift_by_one_pixel_is_a_shift_by_one_pixel() -> None:
    right_down = with_numbers(Augment(shift=1), [MOST, MOST, HALF, HALF, HALF, HALF])
    torch.testing.assert_close(right_down[..., 1:, 1:], IMAGE[..., :-1, :-1])
    left_up = with_numbers(Augment(shift=1), [LEAST, LEAST, HALF, HALF, HALF, HALF])
    torch.testing.assert_close(left_up[..., :-1, :-1], IMAGE[..., 1:, 1:])
    torch.testing.assert_close(with_numbers(Augment(shift=1), [HALF] * 6), IMAGE)


def test_what_comes_in_at_an_edge_repeats_it() -> None:
    right = with_numbers(Augment(shift=1), [MOST, HALF, HALF, HALF, HALF, HALF])
    torch.testing.assert_close(right[..., 0], IMAGE[..., 0])


def test_the_edge_is_what_grid_sample_calls_border() -> None:
    augment = Augment(shift=3, rotation=40, crop=2, flip=True)
    maps = augment.maps(augment.numbers(0, 0, 0, len(RANDOM)), 6, 6)
    grid = torch.nn.functional.affine_grid(maps, list(RANDOM.shape), align_corners=False)
    border = torch.nn.functional.grid_sample(RANDOM, grid, padding_mode="border", align_corners=False)
    torch.testing.assert_close(moved(RANDOM, maps), border)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_places_are_computed_precisely_for_every_type_of_image(dtype: torch.dtype) -> None:
    large = torch.rand(1, 1, 256, 256).to(dtype)
    turned = with_numbers(Augment(rotation=180), [HALF, HALF, 1.0, HALF, HALF, HALF], large)
    assert turned.dtype == dtype
    torch.testing.assert_close(turned, large.flip(2, 3), atol=0.01, rtol=0)


@pytest.mark.parametrize(("number", "quarters"), [(1.0, 1), (0.0, -1)])
def test_a_rotation_by_90_degrees_is_one(number: float, quarters: int) -> None:
    turned = with_numbers(Augment(rotation=90), [HALF, HALF, number, HALF, HALF, HALF])
    torch.testing.assert_close(turned, torch.rot90(IMAGE, quarters, (2, 3)))


def test_a_rotation_of_an_image_that_is_not_square_turns_around_its_middle() -> None:
    x = torch.rand(1, 1, 4, 8)
    turned = with_numbers(Augment(rotation=180), [HALF, HALF, 1.0, HALF, HALF, HALF], x)
    torch.testing.assert_close(turned, x.flip(2, 3))
    quarter = with_numbers(Augment(rotation=90), [HALF, HALF, 1.0, HALF, HALF, HALF], x)
    torch.testing.assert_close(quarter[..., 2:6], torch.rot90(x[..., 2:6], 1, (2, 3)))


def test_a_flip_exchanges_left_and_right() -> None:
    torch.testing.assert_close(with_numbers(Augment(flip=True), [HALF] * 5 + [0.4]), IMAGE.flip(3))
    torch.testing.assert_close(with_numbers(Augment(flip=True), [HALF] * 5 + [0.6]), IMAGE)


@pytest.mark.parametrize(("number", "first"), [(LEAST, 0), (MOST, 2)])
def test_a_crop_is_a_window_stretched_to_the_image(number: float, first: int) -> None:
    cropped = with_numbers(Augment(crop=2), [HALF, HALF, HALF, number, number, HALF])
    window = IMAGE[..., first : first + 3, first : first + 3]
    # Of 5 places in a window of 3 pixels the middle one is a pixel's middle.
    torch.testing.assert_close(cropped[..., 2, 2], window[..., 1, 1])
    reference = torch.nn.functional.interpolate(window, (5, 5), mode="bilinear")
    torch.testing.assert_close(cropped[..., 1:4, 1:4], reference[..., 1:4, 1:4])


def test_nothing_asked_for_changes_nothing() -> None:
    assert not Augment().is_on
    torch.testing.assert_close(with_numbers(Augment(), [0.9] * 6), IMAGE)


def test_the_numbers_depend_on_seed_epoch_and_position_alone() -> None:
    augment = Augment(shift=2)
    whole = augment.numbers(0, 1, 0, 10_000)
    assert torch.equal(augment.numbers(0, 1, 4_090, 12), whole[4_090:4_102])
    assert torch.equal(Augment().numbers(0, 1, 9_999, 1), whole[9_999:])
    assert not torch.equal(augment.numbers(0, 2, 0, 12), whole[:12])
    assert not torch.equal(augment.numbers(1, 1, 0, 12), whole[:12])
    assert len(torch.unique(whole)) > 59_000
    assert 0 <= whole.min() <= whole.max() < 1


def test_every_change_occurs_and_none_goes_further() -> None:
    x = torch.zeros(4_000, 1, 9, 9)
    x[:, :, 4, 4] = 1
    places = Augment(shift=2)(x, 0, 0, 0).flatten(1).argmax(1)
    found = {(int(place) // 9 - 4, int(place) % 9 - 4) for place in places}
    assert found == {(down, right) for down in range(-2, 3) for right in range(-2, 3)}


class Pictures(TensorDataModule):
    kind, name = "image", "pictures"
    spec = DataSpec("image", (1, 6, 6), "class", 2)

    def load(self, split: str) -> tuple[Tensor, Tensor]:
        return RANDOM.clone(), torch.arange(200) % 2


class Seen(lightning.LightningModule):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.trained, self.validated = [], []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.trained.append(batch[0])
        return self.weight * 1.0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(data: Any, epochs: int = 1) -> Seen:
    seen, quiet = Seen(), {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "num_sanity_val_steps": 0}
    trainer = lightning.Trainer(max_epochs=epochs, accelerator="cpu", **quiet)
    trainer.fit(seen, datamodule=data)
    return seen


def test_training_alone_is_augmented_and_no_batch_size_or_worker_changes_how() -> None:
    plain = fit(Pictures(batch_size=200))
    seen = fit(Pictures(batch_size=200, augment=Augment(shift=2, rotation=10, flip=True)))
    assert not torch.equal(torch.cat(seen.trained), torch.cat(plain.trained))
    assert torch.equal(torch.cat(seen.validated), RANDOM)
    how = {"batch_size": 7, "pipeline": "workers", "num_workers": 1}
    small = fit(Pictures(**how, augment=Augment(shift=2, rotation=10, flip=True)))
    torch.testing.assert_close(torch.cat(small.trained), torch.cat(seen.trained))


def test_a_datamodules_own_hook_still_runs() -> None:
    class Own(Pictures):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [batch[0] + 100, batch[1]]

    seen = fit(Own(batch_size=200, augment=Augment(shift=1)))
    assert torch.cat(seen.trained).min() >= 100


@pytest.mark.parametrize("option", ["shift", "crop"])
def test_more_pixels_than_an_image_has_are_refused_in_one_line(option: str) -> None:
    height, width = Pictures(batch_size=8).spec.input_shape[1:]
    said = f"data.augment.{option}: got 999, takes less than {min(height, width)}: the images of pictures have "
    with pytest.raises(UserError, match=f"^{said}{height}×{width} pixels$"):
        described(Pictures(batch_size=8, augment=Augment(**{option: 999})))


def test_sequences_are_refused_in_one_line() -> None:
    class Rows(Pictures):
        kind = "sequence"
        spec = DataSpec("sequence", (6, 6), "class", 2)

    with pytest.raises(UserError, match="^data.augment: takes images, and pictures has sequence data$"):
        described(Rows(augment=Augment(shift=1)))
    described(Rows(augment=Augment()))


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("data.augment.shift=-1", "data.augment.shift: got -1, takes a whole number of at least 0."),
        ("data.augment.rotation=200", "data.augment.rotation: got 200, takes a number from 0 to 180."),
        ("data.augment.rotate=5", "data.augment.rotate: no such option. Did you mean 'rotation'?"),
    ],
)
def test_a_wrong_option_is_one_line(option: str, said: str) -> None:
    assert refusal(composed, option).startswith(said)
