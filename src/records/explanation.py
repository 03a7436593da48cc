"""An explanation of a training step: what each operation of each module costs, and what this device could do.

`batchscope explain` writes it to `explain.json`; the callback OperationProfiler has the same content. Tables are made from it alone.
Times are in seconds and traffic is in bytes, for one step (one update of the weights).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from operator import attrgetter
from typing import Any

from .operations import OperationRow, merge

SCHEMA = 5
FILE = "explain.json"
TRACE = "trace.json.gz"


@dataclass(frozen=True)
class Cost(OperationRow):
    """What the calls of one operation in one module cost in a step, or the sum over several operations.

    `seconds` are measured: those of the calls on a CPU, those of the kernels on a GPU. `dims` is empty.
    """

    calls: float = 0.0
    floor_seconds: float = 0.0  # a lower bound, from the device's calibration

    @property
    def place(self) -> str:
        """Return the row of the operation in tables: `optimizer`, its module, or the LightningModule's own code."""
        return "optimizer" if self.part == "optimizer" else self.module or "own code"

    @property
    def of_floor(self) -> float | None:
        """Return floor ÷ measured time; None if either is missing."""
        return self.floor_seconds / self.seconds if self.seconds > 0 and self.floor_seconds > 0 else None


def add_up(costs: Iterable[Cost], key: Callable[[Cost], Any]) -> list[Cost]:
    """Add up costs by a key, and sort the sums: the longest first."""
    return sorted(
        merge(costs, key).values(), key=lambda cost: (-cost.seconds, -cost.floor_seconds, cost.module, cost.name)
    )


@dataclass(frozen=True)
class Explanation:
    """A training step, taken apart.

    On a CPU the seconds of an operation are those of its calls, on a GPU those of its kernels.
    """

    title: str  # `cnn · mnist`, or the module's class
    device: str  # `cpu`, `cuda`, `mps`
    device_name: str
    precision: str
    batch_size: int | None  # samples of a batch on this device
    step_seconds: float  # of a step in which nothing else is measured
    between_seconds: float  # of a step, between batches: data, transfer, callbacks; on a CPU without their operations
    steps: int  # from which `step_seconds` is measured
    is_timed: bool  # whether the operations have seconds
    operations: Sequence[Cost]
    threads: int | None = None
    waiting_seconds: float = 0.0  # of `between_seconds`, waiting for the loader
    bottleneck: Mapping[str, Any] | None = None  # kind, share, certainty, evidence; None if the run itself has one
    idle_share: float | None = None  # the share of the step in which no kernel ran
    trace_steps: int = 0  # steps in the trace; 0 without a trace
    notes: Sequence[str] = field(default_factory=list)  # what is missing, and why

    @property
    def total(self) -> Cost:
        """Return the sum of all operations."""
        return reduce(Cost.plus, self.operations, Cost("", "", "", "other"))

    @property
    def outside_seconds(self) -> float:
        """Return the time of a step that is in no operation and not between batches."""
        return max(0.0, self.step_seconds - self.between_seconds - self.total.seconds)

    def modules(self, most: int) -> list[Cost]:
        """Return the costs by module, the optimizer as one row; submodules are merged until there are at most `most` rows."""
        depth = max((cost.module.count(".") + 1 for cost in self.operations), default=1)
        for levels in range(depth, 0, -1):
            costs = [replace(cost, module=".".join(cost.module.split(".")[:levels])) for cost in self.operations]
            rows = add_up([replace(cost, module=cost.place, name="") for cost in costs], attrgetter("module"))
            if len(rows) <= most:
                break
        return rows

    def costliest(self) -> list[Cost]:
        """Return the ten operations that take longest, each by its module and its part of the step."""
        return add_up(self.operations, attrgetter("name", "module", "part", "dtype"))[:10]

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation in plain containers."""
        return {"schema": SCHEMA, **asdict(self), "outside_seconds": self.outside_seconds}
