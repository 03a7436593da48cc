"""Augment: what a change of an image is, and that it depends on (seed, epoch, position) alone."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from batchscope.data.augment import Augment, warp_images
from batchscope.data.spec import PADDING, DataSpec
from tests.data.support import InMemory, Recorder
from tests.support.third_party_modules import train

IMAGE = torch.arange(2 * 5 * 5, dtype=torch.float32).view(1, 2, 5, 5)
RANDOM = torch.rand(200, 1, 6, 6, generator=torch.Generator().manual_seed(0))
LEAST, MOST = 0.0, 1 - 1e-6
NUMBERS = {"right": 0.5, "down": 0.5, "angle": 0.5, "left": 0.5, "top": 0.5, "flip": 0.5}


def changed(x: Tensor, augment: Augment, **numbers: float) -> Tensor:
    """Change an image by the random numbers of one sample, which default to 0.5."""
    return warp_images(x, augment.affine_maps(torch.tensor([[*(NUMBERS | numbers).values()]]), *x.shape[2:]))


# an image, options, random numbers, and the expected image; pixels from beyond an edge repeat the edge
CHANGES: dict[str, tuple[Tensor, dict[str, Any], dict[str, float], Tensor]] = {
    "nothing": (IMAGE, {}, dict.fromkeys(NUMBERS, 0.9), IMAGE),
    "no shift": (IMAGE, {"shift": 1}, {}, IMAGE),
    "right": (IMAGE, {"shift": 1}, {"right": MOST}, F.pad(IMAGE, (1, 0, 0, 0), "replicate")[..., :5]),
    "left": (IMAGE, {"shift": 1}, {"right": LEAST}, F.pad(IMAGE, (0, 1, 0, 0), "replicate")[..., 1:]),
    "2 pixels down": (IMAGE, {"shift": 2}, {"down": MOST}, F.pad(IMAGE, (0, 0, 2, 0), "replicate")[..., :5, :]),
    "2 pixels up": (IMAGE, {"shift": 2}, {"down": LEAST}, F.pad(IMAGE, (0, 0, 0, 2), "replicate")[..., 2:, :]),
    "90 degrees": (IMAGE, {"rotation": 90}, {"angle": 1.0}, IMAGE.rot90(1, (2, 3))),
    "-90 degrees": (IMAGE, {"rotation": 90}, {"angle": 0.0}, IMAGE.rot90(-1, (2, 3))),
    "flipped": (IMAGE, {"flip": True}, {"flip": 0.4}, IMAGE.flip(3)),
    "not flipped": (IMAGE, {"flip": True}, {"flip": 0.6}, IMAGE),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_what_its_name_says(name: str) -> None:
    x, options, numbers, expected = CHANGES[name]
    assert Augment(**options).is_on is bool(options)
    torch.testing.assert_close(changed(x, Augment(**options), **numbers), expected)


def test_whole_numbers_are_rounded_and_stay_as_they_are_where_nothing_moves() -> None:
    image = torch.arange(256).to(torch.uint8).view(1, 1, 16, 16)
    assert torch.equal(changed(image, Augment(shift=1)), image)
    assert torch.equal(changed(image, Augment(shift=1), right=MOST)[..., 1:], image[..., :-1])


def test_a_rotation_of_a_wide_image_is_around_its_middle() -> None:
    wide = torch.rand(1, 1, 4, 8)
    turned = changed(wide, Augment(rotation=90), angle=1.0)
    torch.testing.assert_close(turned[..., 2:6], torch.rot90(wide[..., 2:6], 1, (2, 3)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_places_are_computed_precisely_for_every_type_of_image(dtype: torch.dtype) -> None:
    large = torch.rand(1, 1, 256, 256).to(dtype)
    turned = changed(large, Augment(rotation=180), angle=1.0)
    torch.testing.assert_close(turned, large.flip(2, 3), atol=0.01, rtol=0)


@pytest.mark.parametrize(("number", "first"), [(LEAST, 0), (MOST, 2)])
def test_a_crop_is_a_window_stretched_to_the_image(number: float, first: int) -> None:
    for left, top in ((first, 1), (1, first), (first, first)):
        numbers = {"left": 0.5 if left == 1 else number, "top": 0.5 if top == 1 else number}
        window = IMAGE[..., top : top + 3, left : left + 3]
        expected = F.interpolate(window, (5, 5), mode="bilinear")
        torch.testing.assert_close(changed(IMAGE, Augment(crop=2), **numbers)[..., 1:4, 1:4], expected[..., 1:4, 1:4])


def test_the_edge_is_what_grid_sample_calls_border() -> None:
    augment = Augment(shift=3, rotation=40, crop=2, flip=True)
    maps = augment.affine_maps(augment.random_numbers(0, 0, 0, len(RANDOM)), 6, 6)
    grid = F.affine_grid(maps, list(RANDOM.shape), align_corners=False)
    border = F.grid_sample(RANDOM, grid, padding_mode="border", align_corners=False)
    torch.testing.assert_close(warp_images(RANDOM, maps), border)


def test_the_numbers_depend_on_seed_epoch_and_position_alone() -> None:
    augment = Augment(shift=2)
    undivided = augment.random_numbers(0, 1, 0, 10_000)
    assert torch.equal(augment.random_numbers(0, 1, 4_090, 12), undivided[4_090:4_102])
    assert torch.equal(Augment().random_numbers(0, 1, 9_999, 1), undivided[9_999:])
    assert not torch.equal(augment.random_numbers(0, 2, 0, 12), undivided[:12])
    assert not torch.equal(augment.random_numbers(1, 1, 0, 12), undivided[:12])
    assert len(torch.unique(undivided)) > 59_000
    assert 0 <= undivided.min() <= undivided.max() < 1


class OwnHook(InMemory):
    """A datamodule that changes its batches itself."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + 100, batch[1]]


AUGMENT = Augment(shift=2, rotation=10, flip=True)


class InModule(Recorder):
    """A module that changes its batches itself."""

    on_after_batch_transfer = OwnHook.on_after_batch_transfer


def fed(kind: type[InMemory] = InMemory, module: type[Recorder] = Recorder, **options: Any) -> tuple[Tensor, Tensor]:
    """Return the images that a module gets in two epochs of training, and in a validation."""
    pictures = (RANDOM.clone(), torch.arange(200) % 2)
    recorder, data = module(), kind(pictures, DataSpec("image", (1, 6, 6), "class", 2), **options)
    train(recorder, data=data, num_sanity_val_steps=0)
    images = [batch[0] for batches in recorder.trained.values() for batch in batches]
    return torch.cat(images), torch.cat([batch[0] for batch in recorder.validated[: len(recorder.validated) // 2]])


def test_every_image_of_a_sample_and_the_classes_of_its_pixels_are_moved_as_one() -> None:
    spec = DataSpec("image", (1, 6, 6), "class_per_pixel", 200, fields=("left", "depth", "age", "y"))
    number = torch.arange(200)
    y = number[:, None, None].expand(200, 6, 6).clone()
    y[:, :3] = PADDING
    data = InMemory((y[:, None].float(), y[:, None].float(), number.float(), y), spec, augment=AUGMENT, batch_size=200)
    train(recorder := Recorder(), data=data, num_sanity_val_steps=0)
    left, depth, age, labels = recorder.trained[0][0]
    assert torch.equal(left, depth) and torch.equal(labels.amax((1, 2)).float(), age)
    assert not torch.equal(labels == PADDING, (y == PADDING)[age.long()])  # they have moved
    pixels, ages = left[:, 0], age[:, None, None]
    pure = ((pixels - ages).abs() < 1e-3) | ((pixels - PADDING).abs() < 1e-3)  # between both, interpolated
    assert torch.equal(pixels[pure].round(), labels[pure].float()) and pure.float().mean() > 0.6


def test_no_label_of_a_pixel_lies_between_two() -> None:
    labels = (RANDOM.median() < RANDOM).float().expand(200, 2, 6, 6).clone()
    spec = DataSpec("image", (1, 6, 6), "multilabel_per_pixel", 2)
    train(recorder := Recorder(), data=InMemory((labels[:, :1], labels), spec, augment=AUGMENT), num_sanity_val_steps=0)
    images, moved_labels = recorder.trained[0][0]
    assert ((images > 0) & (images < 1)).any()
    assert moved_labels.unique().tolist() == [0, 1]


def test_the_spec_is_not_made_anew_at_each_batch() -> None:
    made: list[int] = []

    class Making(InMemory):
        spec = property(lambda _: made.append(1) or DataSpec("image", (1, 6, 6), "class", 2), lambda _, spec: None)

    def number(batch_size: int) -> int:
        made.clear()
        fed(Making, augment=AUGMENT, batch_size=batch_size)
        return len(made)

    assert number(20) == number(200)


def test_a_batch_that_is_an_image_alone_stays_one() -> None:
    class Alone(InMemory):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch[0]

    data = Alone((RANDOM.clone(),), DataSpec("image", (1, 6, 6), "input"), augment=AUGMENT)
    recorder = Recorder()
    train(recorder, data=data, num_sanity_val_steps=0, max_epochs=1)
    assert all(isinstance(batch, Tensor) for batch in recorder.trained[0])
    assert not torch.equal(torch.cat(recorder.trained[0]), torch.cat(recorder.validated))


def test_training_alone_is_augmented_and_no_batch_size_or_worker_changes_how() -> None:
    plain = fed()[0].split(200)
    expected = torch.cat([warp_images(x, AUGMENT.draw_maps(x, 0, epoch, 0)) for epoch, x in enumerate(plain)])
    trained, validated = fed(augment=AUGMENT, batch_size=200)
    assert torch.equal(trained, expected)
    assert torch.equal(validated, RANDOM)
    trained, _ = fed(augment=AUGMENT, batch_size=7, pipeline="workers", num_workers=1)
    torch.testing.assert_close(trained, expected)
    trained, _ = fed(OwnHook, augment=AUGMENT)
    torch.testing.assert_close(trained, expected + 100)


@pytest.mark.filterwarnings("ignore:You have overridden")
def test_a_module_changes_the_batches_of_each_stage_unless_the_data_do_so_themselves() -> None:
    plain, changed = (fed(module=module, augment=AUGMENT) for module in (Recorder, InModule))
    assert torch.equal(torch.cat(changed), torch.cat(plain) + 100)
    assert torch.equal(torch.cat(fed(OwnHook, InModule, augment=AUGMENT)), torch.cat(fed(OwnHook, augment=AUGMENT)))
