"""Digits rendered on this machine: deterministic, varied, legible, and cached once."""

import errno
import os
from pathlib import Path, PurePath
from typing import Any, BinaryIO

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from batchscope.data import digits
from batchscope.data.digits import cached_digits, render_digits
from tests.data.support import Payload


@pytest.fixture(scope="module")
def rendered() -> tuple[Tensor, Tensor]:
    """More digits than one rendered chunk holds."""
    return render_digits(4_200, seed=1)


def test_the_seed_alone_decides_which_digits_are_rendered(rendered: Any) -> None:
    before = torch.get_rng_state()
    assert all(map(torch.equal, render_digits(100, seed=7), render_digits(100, seed=7)))
    assert not torch.equal(render_digits(100, seed=7)[0], render_digits(100, seed=8)[0])
    assert torch.equal(torch.get_rng_state(), before)  # the random state of the model
    assert [(x.shape, x.dtype) for x in rendered] == [((4_200, 1, 28, 28), torch.uint8), ((4_200,), torch.int64)]
    assert rendered[1].bincount(minlength=10).min() > 350  # of 420


def test_the_fonts_come_in_one_order_on_every_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows sorts paths without regard to case."""
    drawn: list[str] = []
    monkeypatch.setattr(digits, "_glyph", lambda digit, file: drawn.append(file.name) or torch.zeros(1))
    monkeypatch.setattr(PurePath, "__lt__", lambda path, other: str(path).lower() < str(other).lower())
    digits._glyphs.__wrapped__()
    assert drawn == 10 * sorted({*drawn})


def test_digits_are_bright_on_black_centred_and_not_cut_off(rendered: Any) -> None:
    pixels = rendered[0].flatten(start_dim=1)
    assert (pixels.float().quantile(0.5, dim=1) < 40).all()  # most pixels of every image are background
    assert (pixels.amax(dim=1) > 150).all()
    bright = (rendered[0][:, 0] > 127).float()
    edges = torch.cat([bright[:, [0, -1]], bright[:, :, [0, -1]].transpose(1, 2)], dim=1)
    assert edges.flatten(start_dim=1).any(dim=1).float().mean() < 0.02
    places = torch.arange(28.0)
    for dim in (1, 2):
        centre = (bright.sum(dim=dim) * places).sum(dim=1) / bright.sum(dim=(1, 2))
        assert abs(centre.mean() - 13.5) < 1
        assert (centre - 13.5).abs().max() < 6


def test_no_two_digits_are_drawn_alike_and_each_is_told_by_its_nearest_neighbour(rendered: Any) -> None:
    """Legibility as a number: the nearest neighbour of most digits has the same class, without any training."""
    queries = render_digits(500, seed=2)
    references, x = (F.normalize(images.float().flatten(start_dim=1), dim=1) for images, _ in (rendered, queries))
    assert (x @ x.T).fill_diagonal_(0).max() < 0.99
    assert (rendered[1][(x @ references.T).argmax(dim=1)] == queries[1]).float().mean() > 0.8


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"PK\x03\x04 torn",
        {"a": 1},
        Payload(),
        render_digits(10, seed=3),
        (torch.zeros(20, 1, 28, 28), torch.zeros(20, dtype=torch.int64)),
        (torch.zeros(20, 1, 28, 28, dtype=torch.uint8), torch.zeros(20)),
    ],
    ids=["as it was", "no archive", "other data", "code", "fewer", "other pixels", "other labels"],
)
def test_digits_are_cached_and_a_cache_of_anything_else_is_rendered_again(content, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    expected = cached_digits(tmp_path, 20, seed=3)
    (file,) = (tmp_path / "digits").iterdir()
    if content is not None:
        file.write_bytes(content) if isinstance(content, bytes) else torch.save(content, file)
    written = file.stat().st_mtime_ns
    assert all(map(torch.equal, cached_digits(tmp_path, 20, seed=3), expected))
    assert all(map(torch.equal, render_digits(20, seed=3), expected))
    assert [*(tmp_path / "digits").iterdir()] == [file]  # and no temporary file beside it
    assert (file.stat().st_mtime_ns == written) is (content is None)
    assert not Path("ran").exists()


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "no space left"), RuntimeError("PytorchStreamWriter failed")])
def test_a_root_that_cannot_be_written_to_is_done_without_a_torn_cache(error, tmp_path, monkeypatch) -> None:
    def half(_: Any, file: BinaryIO) -> None:
        file.write(b"half")
        raise error

    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setattr(torch, "save", half)
    for root in (tmp_path, tmp_path / "file" / "data"):
        images, _ = cached_digits(root, 20, seed=3)
        assert torch.equal(images, render_digits(20, seed=3)[0])
    assert list((tmp_path / "digits").iterdir()) == []


def test_a_pipe_in_place_of_the_cache_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "digits").mkdir()
    os.mkfifo(tmp_path / "digits" / "v2-20-3.pt")
    assert torch.equal(cached_digits(tmp_path, 20, seed=3)[0], render_digits(20, seed=3)[0])
