"""The parts of `gpu.py`: what each is called, and what its items return. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Part:
    """Items are functions of the module `gpu_parts.<name>`, which take a Setting and return a Result."""

    number: int
    name: str
    items: tuple[str, ...]
    limit_s: float = 480.0


@dataclass(frozen=True)
class Setting:
    """How an item runs."""

    device: str  # `cuda`; `cpu` in a rehearsal
    root: str  # where MNIST lies
    out: Path  # the folder of the results
    work: Path  # the folder of runs and sweeps
    small: bool  # a rehearsal: as little as possible, on the CPU

    @property
    def accelerator(self) -> str:
        """The device as `trainer.accelerator` takes it."""
        return "cpu" if self.device == "cpu" else "gpu"

    def data(self, samples: int = 0) -> list[str]:
        """The options of the dataset; in a rehearsal so many rendered digits, at least 256."""
        if not self.small:
            return ["data=mnist", f"data.root={self.root}"]
        few = [f"data.num_train={max(256, samples)}", "data.num_val=64", "data.num_test=64"]
        return ["data=digits", *few, f"data.root={self.work / 'data'}"]


@dataclass(frozen=True)
class Result:
    """What an item found: a table in Markdown, its numbers, and the claims with whether each holds."""

    table: str
    data: Any = None
    claims: Mapping[str, bool] = field(default_factory=dict)


PARTS = [
    Part(1, "gpu_tests", ("tests", "waiting")),
    Part(2, "calibration", ("roofs", "mfu")),
    Part(3, "sweeps", ("run", "batch_sizes", "out_of_memory")),
    Part(4, "loops", ("batch_4096", "batch_64", "readings")),
    Part(5, "recurrence", ("against_cudnn", "graphs", "roofline", "memory")),
    Part(6, "causes_here", ("causes", "choose", "kernels")),
    Part(7, "hardware_here", ("hardware",)),
]
