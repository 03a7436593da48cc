"""What augmenting a batch costs, and what every worker's reading of all raw samples costs beside decoding.

    python benchmarks/data.py --rounds 5

Augmentation: batches of 28×28 and 3×32×32 images on the CPU, one thread, all four changes at once and single ones, beside
a training step of SimpleCNN on the same batch. Reading: tar files of 2,000 PNG images as WebDatasetModule reads them
(needs the extra `webdataset`), raw samples alone and decoded.
"""

import argparse
import io
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from harness import median, write_result
from PIL import Image
from torch import nn

from batchscope.data import Augment, DataSpec, WebDatasetModule
from batchscope.models import SimpleCNN

CHANGES = {
    "shift": {"shift": 2},
    "rotation": {"rotation": 10},
    "all four": {"shift": 2, "rotation": 10, "crop": 3, "flip": True},
}
SAMPLES = 2_000


def seconds(work: Callable[[], Any], least: float = 0.3) -> float:
    """The time of one call, after one that warms up."""
    work()
    calls, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < least:
        work()
        calls += 1
    return elapsed / calls


def step(shape: tuple[int, ...], batch_size: int) -> Callable[[], Any]:
    model = SimpleCNN(DataSpec("image", shape, "class", 10)).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.rand(batch_size, *shape).to(memory_format=torch.channels_last)
    y = torch.zeros(batch_size, dtype=torch.long)

    def run() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return run


def augmenting(rounds: int) -> list[str]:
    rows = ["| images | batch | change | ms | of a SimpleCNN step |", "| --- | ---: | --- | ---: | ---: |"]
    for shape in ((1, 28, 28), (3, 32, 32)):
        for batch_size in (128, 512):
            x = torch.rand(batch_size, *shape)
            whole = median([seconds(step(shape, batch_size)) for _ in range(rounds)])
            for name, options in CHANGES.items():
                augment = Augment(**options)
                taken = median([seconds(lambda a=augment, x=x: a(x, 0, 0, 0)) for _ in range(rounds)])
                size = "×".join(map(str, shape))
                rows.append(f"| {size} | {batch_size} | {name} | {1e3 * taken:.2f} | {100 * taken / whole:.1f} % |")
    return rows


class Pictures(WebDatasetModule):
    """PNG images in one tar file."""

    kind, name = "image", "pictures"

    def decode(self, raw: Any) -> Any:
        return self.image(raw["png"]), self.number(raw["cls"])


def write_shard(file: Path, side: int) -> None:
    random = numpy.random.default_rng(0)
    with tarfile.open(file, "w") as archive:
        for sample in range(SAMPLES):
            small = Image.fromarray(random.integers(0, 256, (side // 4, side // 4, 3), dtype=numpy.uint8))
            buffer = io.BytesIO()
            small.resize((side, side)).save(buffer, "PNG")
            for suffix, content in (("png", buffer.getvalue()), ("cls", b"0")):
                member = tarfile.TarInfo(f"{sample:06}.{suffix}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def reading(rounds: int) -> list[str]:
    rows = ["| images | KiB each | µs to read | µs to decode | read ÷ decode |", "| --- | ---: | ---: | ---: | ---: |"]
    data = Pictures()
    for side in (28, 64, 224):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "train-0.tar")
            write_shard(file, side)
            raws = list(data.read(file))
            read = median([seconds(lambda f=file: sum(1 for _ in data.read(f))) for _ in range(rounds)]) / SAMPLES
            few = raws[:200]
            decode = median([seconds(lambda few=few: [data.decode(raw) for raw in few]) for _ in range(rounds)]) / 200
            kib = file.stat().st_size / SAMPLES / 1024
        rows.append(f"| 3×{side}×{side} | {kib:.1f} | {1e6 * read:.0f} | {1e6 * decode:.0f} | {read / decode:.2f} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    tables = {"augment": augmenting(rounds), "read": reading(rounds)}
    write_result("data", "\n\n".join("\n".join(rows) for rows in tables.values()), tables)


if __name__ == "__main__":
    main()
