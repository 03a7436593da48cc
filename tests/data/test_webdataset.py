"""WebDatasetModule: tar files in the format of the webdataset library, and what in them is refused."""

import io
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

from batchscope.data import webdataset
from batchscope.data.spec import DataSpec
from batchscope.data.webdataset import WebDatasetModule
from batchscope.errors import UserError

needs_webdataset = pytest.mark.skipif(
    webdataset.importlib.util.find_spec("webdataset") is None,
    reason="needs the extra: pip install batchscope[webdataset]",
)
SIZES = {"train": (10, 10), "val": (6,), "test": (6,)}


class Digits(WebDatasetModule):
    """8×8 pictures in four classes."""

    kind, name = "image", "own-tars"

    def __init__(self, root: Path, **kwargs: Any):
        super().__init__(**{"batch_size": 4, "num_workers": 0, **kwargs})
        self.root = root

    @property
    def spec(self) -> DataSpec:
        return DataSpec("image", (1, 8, 8), "class", 4)

    def shards(self, split: str) -> list[Path]:
        return list(self.root.glob(f"{split}-*.tar*"))

    def decode(self, raw: dict[str, Any]) -> Any:
        return self.image(raw["png"]), self.number(raw["cls"])


def pixels(split: str, shard: int, sample: int) -> numpy.ndarray:
    return numpy.random.default_rng((len(split), shard, sample)).integers(0, 256, (8, 8), dtype=numpy.uint8)


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


@pytest.fixture(params=["", ".gz"])
def root(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    for split, sizes in SIZES.items():
        for shard, size in enumerate(sizes):
            file = tmp_path / f"{split}-{shard}.tar{request.param}"
            with tarfile.open(file, f"w:{request.param[1:]}") as archive:
                for sample in range(size):
                    picture = io.BytesIO()
                    Image.fromarray(pixels(split, shard, sample)).save(picture, "PNG")
                    add(archive, f"{sample:04}.png", picture.getvalue())
                    add(archive, f"{sample:04}.cls", str(sample % 4).encode())
    return tmp_path


def epoch(data: WebDatasetModule) -> list[Any]:
    data.check()
    data.setup("fit")
    return list(data.train_dataloader())


@needs_webdataset
def test_pictures_and_labels_come_back(root: Path) -> None:
    data = Digits(root)
    data.setup("fit")
    ((x, y),) = data.val_dataloader()
    assert y.tolist() == [0, 1, 2, 3, 0, 1]
    stored = torch.stack([torch.from_numpy(pixels("val", 0, i)) for i in range(6)])[:, None]
    torch.testing.assert_close(x, stored / 255)


@needs_webdataset
def test_workers_change_nothing_and_a_resumed_epoch_continues(root: Path) -> None:
    whole = epoch(Digits(root, shuffle_buffer=8))
    data = Digits(root, shuffle_buffer=8, num_workers=2)
    data.resume_at(0, 2)
    resumed = epoch(data)
    assert len(resumed) == 3
    for one, other in zip(resumed, whole[2:], strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


@needs_webdataset
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("end", [512 * 5, 512 * 6, 512 * 6 + 100, 512 * 40])  # of 40 blocks and an end
def test_a_truncated_shard_is_one_line_wherever_it_ends(root: Path, end: int, workers: int) -> None:
    (shard, *_) = sorted(root.glob("train-*"))
    content = shard.read_bytes()
    shard.write_bytes(content[: end if shard.suffix == ".tar" else end % 700])
    with pytest.raises(UserError) as caught:
        epoch(Digits(root, num_workers=workers))
    assert str(caught.value).startswith(f"data: shard {shard} of own-tars cannot be read: ")
    assert "\n" not in str(caught.value)


@needs_webdataset
def test_a_damaged_header_is_one_line_and_does_not_end_the_shard(root: Path) -> None:
    (shard, *_) = sorted(root.glob("train-*"))
    if shard.suffix != ".tar":
        pytest.skip("a checksum covers all of a compressed shard")
    content = bytearray(shard.read_bytes())
    with tarfile.open(shard) as archive:
        offsets = [member.offset for member in archive]
    content[offsets[6] : offsets[6] + 512] = b"x" * 512
    shard.write_bytes(content)
    with pytest.raises(
        UserError, match=f"cannot be read: ReadError: it is damaged or truncated at byte {offsets[6]:,}"
    ):
        epoch(Digits(root))


@needs_webdataset
def test_a_file_that_is_no_archive_is_one_line(root: Path) -> None:
    (shard, *_) = sorted(root.glob("train-*"))
    shard.write_bytes(b"not an archive" * 100)
    with pytest.raises(UserError, match=f"data: shard {shard} of own-tars cannot be read: ReadError: "):
        epoch(Digits(root))


@needs_webdataset
@pytest.mark.parametrize("suffix", ["pkl", "pyd", "pth", "npy"])
def test_no_pickle_is_loaded(tmp_path: Path, suffix: str) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    buffer = io.BytesIO()
    if suffix == "npy":
        numpy.save(buffer, numpy.array([Evil()], dtype=object), allow_pickle=True)
    else:
        buffer.write(pickle.dumps(Evil()))
    for split in ("train", "val"):
        with tarfile.open(tmp_path / f"{split}-0.tar", "w") as archive:
            add(archive, f"0.{suffix}", buffer.getvalue())

    class Arrays(Digits):
        def decode(self, raw: dict[str, Any]) -> Any:
            assert isinstance(raw[suffix], bytes)
            return self.array(raw[suffix]), 0

    with pytest.raises(UserError, match="cannot be decoded: ValueError: "):
        epoch(Arrays(tmp_path))
    assert not (tmp_path / "ran").exists()


@needs_webdataset
def test_names_that_lead_elsewhere_write_nothing(tmp_path: Path) -> None:
    for split in ("train", "val"):
        with tarfile.open(tmp_path / f"{split}-0.tar", "w") as archive:
            add(archive, "../../outside/0.png", b"x")
            link = tarfile.TarInfo("1.png")
            link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
            archive.addfile(link)
    with pytest.raises(UserError, match="cannot be decoded: UnidentifiedImageError"):
        epoch(Digits(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"train-0.tar", "val-0.tar"}


def test_without_the_library_there_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webdataset.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"^data: Digits needs webdataset: pip install 'batchscope\[webdataset\]'$"):
        Digits(tmp_path).check()


@pytest.mark.parametrize(("content", "number"), [(b"7", 7), (b" -3\n", -3), (b"0.25", 0.25)])
def test_a_number_in_a_text_is_read(content: bytes, number: float) -> None:
    assert WebDatasetModule.number(content) == number


def test_colours_keep_their_channels_and_grey_has_one() -> None:
    for mode, channels in [("RGB", 3), ("RGBA", 3), ("P", 3), ("L", 1), ("1", 1)]:
        buffer = io.BytesIO()
        Image.new(mode, (5, 4)).save(buffer, "PNG")
        assert WebDatasetModule.image(buffer.getvalue()).shape == (channels, 4, 5)
