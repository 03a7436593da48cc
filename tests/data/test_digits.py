"""Digits rendered on this machine: deterministic, varied, legible, and cached once."""

import errno
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from batchscope.data import digits
from batchscope.data.digits import Digits, cached_digits, render_digits


@pytest.fixture(scope="module")
def rendered() -> tuple[Tensor, Tensor]:
    return render_digits(3_000, seed=0)


# --- the images ------------------------------------------------------------------------------------------------------


def test_the_seed_alone_decides_which_digits_are_rendered(rendered: tuple[Tensor, Tensor]) -> None:
    assert all(map(torch.equal, render_digits(100, seed=7), render_digits(100, seed=7)))
    assert not torch.equal(render_digits(100, seed=7)[0], render_digits(100, seed=8)[0])
    assert [(x.shape[1:], x.dtype) for x in rendered] == [((1, 28, 28), torch.uint8), ((), torch.int64)]
    assert rendered[1].bincount(minlength=10).min() > 240  # of 300


def test_rendering_draws_no_random_numbers_from_the_model() -> None:
    before = torch.get_rng_state()
    render_digits(10, seed=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_more_digits_than_fit_in_one_chunk_are_all_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "_CHUNK", 64)
    images, _ = render_digits(150, seed=0)
    assert (images.flatten(start_dim=1).amax(dim=1) > 100).all()


def test_the_background_is_black_and_the_strokes_are_bright(rendered: tuple[Tensor, Tensor]) -> None:
    pixels = rendered[0].flatten(start_dim=1)
    assert (pixels.float().quantile(0.5, dim=1) < 40).all()  # more than half of every image, but for some noise
    assert (pixels.amax(dim=1) > 150).all()


def test_digits_are_centred_and_not_cut_off(rendered: tuple[Tensor, Tensor]) -> None:
    bright = (rendered[0][:, 0] > 127).float()
    edges = torch.cat([bright[:, [0, -1]], bright[:, :, [0, -1]].transpose(1, 2)], dim=1)
    assert edges.flatten(start_dim=1).any(dim=1).float().mean() < 0.02
    places = torch.arange(28.0)
    for dim in (1, 2):
        centre = (bright.sum(dim=dim) * places).sum(dim=1) / bright.sum(dim=(1, 2))
        assert abs(centre.mean() - 13.5) < 1
        assert (centre - 13.5).abs().max() < 6


def test_no_two_digits_are_drawn_alike(rendered: tuple[Tensor, Tensor]) -> None:
    x = F.normalize(rendered[0].float().flatten(start_dim=1), dim=1)
    assert (x @ x.T).fill_diagonal_(0).max() < 0.99


def test_a_digit_can_be_told_by_its_nearest_neighbour() -> None:
    """Legible, in a number: without any training, most digits are most like one of the same class."""
    (known, known_labels), (images, labels) = render_digits(4_000, seed=1), render_digits(500, seed=2)
    known, images = (F.normalize(x.float().flatten(start_dim=1), dim=1) for x in (known, images))
    assert (known_labels[(images @ known.T).argmax(dim=1)] == labels).float().mean() > 0.8


# --- the cache -------------------------------------------------------------------------------------------------------


def cache_of(root: Path) -> Path:
    (file,) = (root / "digits").iterdir()  # and no temporary file beside it
    return file


def test_rendered_digits_are_cached_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, expected = cached_digits(tmp_path, 20, seed=3), render_digits(20, seed=3)
    written = cache_of(tmp_path).stat().st_mtime_ns
    monkeypatch.setattr(digits, "render_digits", None)  # not to be called again
    second = cached_digits(tmp_path, 20, seed=3)
    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, first, expected))
    assert cache_of(tmp_path).stat().st_mtime_ns == written


class Payload:
    def __reduce__(self) -> tuple:
        return (Path.touch, (Path("ran"),))


@pytest.mark.parametrize(
    "content",
    [
        b"PK\x03\x04 torn",
        {"a": 1},
        Payload(),
        render_digits(10, seed=3),
        (torch.zeros(20, 1, 28, 28), torch.zeros(20, dtype=torch.int64)),
        (torch.zeros(20, 1, 28, 28, dtype=torch.uint8), torch.zeros(20)),
    ],
    ids=["no archive", "other data", "code", "fewer", "other pixels", "other labels"],
)
def test_a_cache_of_anything_else_is_rendered_again_and_no_code_in_it_runs(
    content: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    expected = cached_digits(tmp_path, 20, seed=3)
    file = cache_of(tmp_path)
    file.write_bytes(content) if isinstance(content, bytes) else torch.save(content, file)
    assert all(map(torch.equal, cached_digits(tmp_path, 20, seed=3), expected))
    assert not (tmp_path / "ran").exists()


def test_a_root_that_cannot_be_written_to_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    images, _ = cached_digits(tmp_path / "file" / "data", 20, seed=3)
    assert torch.equal(images, render_digits(20, seed=3)[0])


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "no space left"), RuntimeError("PytorchStreamWriter failed")])
def test_a_full_disk_leaves_no_torn_cache(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(_: object, file: BinaryIO) -> None:
        file.write(b"half")
        raise error

    monkeypatch.setattr(torch, "save", half)
    images, _ = cached_digits(tmp_path, 20, seed=3)
    assert len(images) == 20
    assert list((tmp_path / "digits").iterdir()) == []


# --- the dataset -----------------------------------------------------------------------------------------------------


def test_pixels_are_served_between_minus_1_and_1(tmp_path: Path) -> None:
    data = Digits(root=str(tmp_path), num_train=50, num_val=10, num_test=10)
    data.setup("fit")
    x, _ = data.tensors("train")
    assert x.min() == -1
    assert 0.5 < x.max() <= 1
