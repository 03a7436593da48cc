"""An explanation of a training step: what each operation of each module costs, and what this device could do.

`batchscope explain` writes it as `explain.json`, whose content the callback OperationProfiler has; tables are made of it alone.
Times are seconds and traffic is bytes, of one step (one update of the weights).
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

    The seconds are measured: of the calls on a CPU, of the kernels on a GPU. There are no dims.
    """

    calls: float = 0.0
    floor_seconds: float = 0.0  # what the calibrated device takes at least

    @property
    def place(self) -> str:
        """Where the operation belongs in tables: `optimizer`, its module, or the LightningModule's own code."""
        return "optimizer" if self.part == "optimizer" else self.module or "own code"

    @property
    def of_floor(self) -> float | None:
        """Floor ÷ measured time; None without either."""
        return self.floor_seconds / self.seconds if self.seconds > 0 and self.floor_seconds > 0 else None


def add_up(costs: Iterable[Cost], key: Callable[[Cost], Any]) -> list[Cost]:
    """Costs added up by a key, the longest first."""
    return sorted(
        merge(costs, key).values(), key=lambda cost: (-cost.seconds, -cost.floor_seconds, cost.module, cost.name)
    )


@dataclass(frozen=True)
class Explanation:
    """A training step, taken apart.

    On a CPU the seconds of an operation are those of its call. On a GPU they are those of its kernels.
    """

    title: str  # `cnn · mnist`, or the module's class
    device: str  # `cpu`, `cuda`, `mps`
    device_name: str
    precision: str
    batch_size: int | None  # samples of a batch on this device
    step_seconds: float  # with nothing else measured
    between_seconds: float  # of it, between two batches: data, transfer, callbacks; on a CPU without their operations
    steps: int  # that `step_seconds` is of
    is_timed: bool  # whether the operations have seconds
    operations: Sequence[Cost]
    threads: int | None = None
    waiting_seconds: float = 0.0  # of `between_seconds`, for the loader
    bottleneck: Mapping[str, Any] | None = None  # kind, share, certainty, evidence; None where the run itself has one
    idle_share: float | None = None  # of the step, in which no kernel ran
    trace_steps: int = 0  # in the trace; 0 without one
    notes: Sequence[str] = field(default_factory=list)  # what is missing, and why

    @property
    def total(self) -> Cost:
        """All operations together."""
        return reduce(Cost.plus, self.operations, Cost("", "", "", "other"))

    @property
    def outside_seconds(self) -> float:
        """The time of a step in no operation, nor between batches."""
        return max(0.0, self.step_seconds - self.between_seconds - self.total.seconds)

    def modules(self, most: int) -> list[Cost]:
        """The costs by module, those of the optimizer as one; with more rows than `most`, of modules that contain others."""
        deepest = max((cost.module.count(".") + 1 for cost in self.operations), default=1)
        for levels in range(deepest, 0, -1):
            shortened = [replace(cost, module=".".join(cost.module.split(".")[:levels])) for cost in self.operations]
            rows = add_up([replace(cost, module=cost.place, name="") for cost in shortened], attrgetter("module"))
            if len(rows) <= most:
                break
        return rows

    def costliest(self) -> list[Cost]:
        """The ten operations that take longest, each in its module and its part of the step."""
        return add_up(self.operations, attrgetter("name", "module", "part", "dtype"))[:10]

    def to_dict(self) -> dict[str, Any]:
        """Plain containers."""
        return {"schema": SCHEMA, **asdict(self), "outside_seconds": self.outside_seconds}
