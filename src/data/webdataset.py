"""WebDatasetModule: shards in the format of the webdataset library, tar files in which files of one name are a sample.

The library comes with `pip install batchscope[webdataset]`. Its grouping of files is used, and none of its decoders:
they unpickle `.pkl`, `.pyd` and `.pth`, and its URLs may be commands.
"""

import importlib.util
import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor
from typing_extensions import override

from ..errors import UserError
from .stream import StreamDataModule

_BLOCK = tarfile.BLOCKSIZE


class WebDatasetModule(StreamDataModule):
    """A dataset in tar files of the webdataset format. A raw sample is a dict: suffix → bytes.

    `0001.png` and `0001.cls` are one sample: `{"__key__": "0001", "png": …, "cls": …}`. A subclass makes `(x, y)` of it in
    `decode`, with `image`, `number` and `array`, or with a decoder of its own. Arguments as StreamDataModule.
    """

    @override
    def check(self) -> None:
        if importlib.util.find_spec("webdataset") is None:
            raise UserError(f"data: {type(self).__name__} needs webdataset: pip install 'batchscope[webdataset]'")

    @override
    def read(self, shard: Path) -> Iterator[dict[str, Any]]:
        from webdataset.tariterators import group_by_keys  # importing it takes a part of a second

        for sample in group_by_keys(_files(shard)):
            yield {suffix: content for suffix, content in sample.items() if suffix != "__url__"}

    @staticmethod
    def image(content: bytes) -> Tensor:
        """A PNG, JPEG or other image as `(C, H, W)` float32 in [0, 1]."""
        with Image.open(io.BytesIO(content)) as picture:
            return pil_to_tensor(picture.convert("L" if picture.mode in ("1", "L") else "RGB")).float().div_(255)

    @staticmethod
    def number(content: bytes) -> float:
        """A number that is written as text, as `.cls` files have it."""
        text = content.decode("ascii").strip()
        return int(text) if text.lstrip("+-").isdigit() else float(text)

    @staticmethod
    def array(content: bytes) -> Tensor:
        """An `.npy` file as a tensor; one that holds Python objects is refused."""
        return torch.from_numpy(numpy.load(io.BytesIO(content), allow_pickle=False))


def _files(shard: Path) -> Iterator[dict[str, Any]]:
    """The files of a tar archive, as webdataset groups them; ReadError if the archive does not end where it should.

    tarfile takes a header that it cannot read, and the end of the file, for the end of the archive.
    """
    with tarfile.open(shard) as archive:
        for member in archive:
            if member.isreg() and not member.name.startswith("__"):
                content = archive.extractfile(member)
                assert content is not None, "a regular file has a content"
                yield {"fname": member.name, "data": content.read(), "__url__": str(shard)}
            cast(Any, archive).members = []  # which would grow by every file
        assert archive.fileobj is not None, "an open archive has a file"
        archive.fileobj.seek(archive.offset)
        if archive.fileobj.read(_BLOCK) != bytes(_BLOCK):
            raise tarfile.ReadError(f"it is damaged or truncated at byte {archive.offset:,}")
