"""What limits a run: where the time of a step goes, and which resource is at its end there.

A step is divided into shares of its wall time, and what has the largest share limits it.

1. **Waiting for data** is `input`, **copying to the device** is `transfer`. When the device's busy share is known they
   count only as far as it idles: what happens behind its back costs nothing.
2. **What is left of the idle time**, when the busy share is known, is `host`: the device waits for launches, or these
   are too small to fill it. Otherwise, on CPU and CUDA, the time outside forward, backward and optimizer is `host`. On
   a CPU so is the time that issuing the step's operations takes, if their number is known: `OP_COST` times the latency
   of a small one for each, but never the time that the arithmetic needs at the peak.
3. **The work itself** (the busy time; else forward, backward and optimizer) is put down to
   a. `compute`, if it reaches `COMPUTE_MFU` of the measured peak. (An optimizer step that is timed apart is then
      `memory`: it passes over the weights and computes next to nothing.)
   b. `host`, on a GPU, if issuing the operations takes `ISSUE_BOUND` of the step and no less than
      moving its bytes: the gaps between kernels look busy to the events that bracket them.
   c. when the step's bytes are known: `memory` or `compute`, whichever is the larger fraction of what was measured;
      `host`, if neither reaches `UNFILLED`: the operations are too small to fill the device.
   d. when they are not: `memory`, if the operations are known to be issued faster than that, or if the fraction of
      the peak is between `UNFILLED` and `COMPUTE_MFU`; below that `host`, if the work takes no longer than
      `FLOOR_MS`, which a few hundred operations take however little they do.

None is the answer rather than a guess
- without both MFU and busy share, unless one of data wait, transfer and other is more than `MAJORITY` of the step, on
  CPU or CUDA: there, one part follows the other and none hides behind another;
- when the largest share is work that cannot be put down to anything: a busy device of unknown MFU whose bytes are
  unknown too, or a long step far below the peak of which neither operations nor bytes are known.

What cannot be told: 3d's `memory` is by elimination. The peak is that of one large multiplication, of which small
models reach half at best. Bytes that are counted without caches overstate `memory`. Threads that wait for a processor
that others use look like `memory`, too.
"""

import math
from dataclasses import dataclass, fields
from typing import Literal

Kind = Literal["input", "transfer", "host", "memory", "compute"]

COMPUTE_MFU = 0.3  # well-fed convolutions and matrix products reach 25 to 70 % of a measured peak
UNFILLED = 0.1  # below this fraction of peak and bandwidth the device's resources are not what is short
OP_COST = 3.0  # an operation of a small model's step, autograd and all, in latencies of the smallest operation
ISSUE_BOUND = 0.7
FLOOR_MS = 5.0  # Lightning's loop and a few hundred operations: 1 to 5 ms
MAJORITY = 0.5


@dataclass(frozen=True)
class StepParts:
    """Where the wall time of an average step goes, in ms; the parts add up to the step.

    On CUDA they are times in the stream, by events; otherwise the host's, which on MPS runs ahead of the device.
    """

    data_wait: float = 0.0
    transfer: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0
    other: float = 0.0

    @property
    def step(self) -> float:
        """The wall time of the step in ms."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class Bottleneck:
    """What limits a run.

    Attributes:
        kind: `input`, `transfer`, `host` (launches and the framework), `memory` (bandwidth) or `compute`.
        share: of the step's wall time that says so, 0 to 1.
        advice: one sentence that says what was seen and which options may help.
    """

    kind: Kind
    share: float
    advice: str


def limiter(
    parts: StepParts,
    device: str = "cpu",
    busy: float | None = None,
    flops_per_sec: float | None = None,
    peak_flops_per_sec: float | None = None,
    launch_us: float | None = None,
    ops_per_step: float | None = None,
    copy_bytes_per_sec: float | None = None,
    bytes_per_step: float | None = None,
    batch_size: int | None = None,
    faster_precision: str | None = None,
) -> Bottleneck | None:
    """What limits a run, by the rule above; None where that cannot be told.

    Args:
        parts: of the average training step; warm-up and validation left out.
        device: torch's type of the device: `cpu`, `cuda`, `mps`.
        busy: share of the device that computes, averaged over the step; copies are not a part of it. SM activity
            is such a share, NVML's utilisation, which any kernel makes 100 %, is not. None on a CPU.
        flops_per_sec: achieved over the whole step.
        peak_flops_per_sec: measured on this device at this precision.
        launch_us: the time it takes to issue one of the smallest operations, many in a row.
        ops_per_step: operations of forward, backward and optimizer.
        copy_bytes_per_sec: measured bandwidth of the device's memory, read and write counted.
        bytes_per_step: estimated traffic of a step with that memory.
        batch_size: of one device, for the advice.
        faster_precision: one at which this device was measured to be faster than at the run's, for the advice.
    """
    step = parts.step
    if not math.isfinite(step) or step <= 0 or any(getattr(parts, field.name) < 0 for field in fields(parts)):
        return None
    if device == "cpu":
        busy = None
    mfu = _ratio(flops_per_sec, peak_flops_per_sec)
    issuing = _ratio(_product(launch_us, ops_per_step), step * 1000 / OP_COST)
    moved = _ratio(bytes_per_step, _product(copy_bytes_per_sec, step / 1000))
    in_order = device in ("cpu", "cuda")  # elsewhere the host's times run ahead of the device's
    if not in_order and busy is None and mfu is not None and mfu >= COMPUTE_MFU:
        busy = 1.0  # whatever the host seemed to wait for, the device was at work
    certain = in_order and max(parts.data_wait, parts.transfer, parts.other) > MAJORITY * step
    if mfu is None and busy is None and not certain:
        return None

    shares, work, computing = _divide(parts, in_order, busy)
    if device == "cpu" and issuing is not None:
        launching = min(issuing, max(work - (mfu or 0.0), 0.0))
        shares["host"] += launching
        work -= launching
        issuing = 0.0  # is taken out of the work
    reached = _ratio(mfu, computing)
    kind = _kind_of_work(reached, issuing, moved, work, work * step)
    if kind == "compute":
        shares["compute"] = min(computing, work)
        shares["memory"] = work - shares["compute"]
    elif kind is not None:
        shares[kind] = shares.get(kind, 0.0) + work
    limiting = max(shares, key=shares.__getitem__)
    if kind is None and work > shares[limiting]:
        return None
    share = min(shares[limiting], 1.0)
    return Bottleneck(limiting, share, _advice(limiting, share, device, reached, batch_size, faster_precision))


def _divide(parts: StepParts, in_order: bool, busy: float | None) -> tuple[dict[Kind, float], float, float]:
    """The shares of input, transfer and host; that of the work, which may be anything yet; that of its arithmetic."""
    waiting, copying, other = (ms / parts.step for ms in (parts.data_wait, parts.transfer, parts.other))
    if busy is not None:
        work = min(max(busy, 0.0), 1.0)
        waiting = min(waiting, 1 - work)
        copying = min(copying, 1 - work - waiting)
        return {"input": waiting, "transfer": copying, "host": 1 - work - waiting - copying}, work, work
    if not in_order:  # the host may wait for the device in any part, so none is the host's for certain
        work = 1 - waiting - copying
        return {"input": waiting, "transfer": copying, "host": 0.0}, work, work
    work = (parts.forward + parts.backward + parts.optimizer) / parts.step
    computing = (parts.forward + parts.backward) / parts.step
    return {"input": waiting, "transfer": copying, "host": other}, work, computing


def _kind_of_work(
    reached: float | None, issuing: float | None, moved: float | None, work: float, work_ms: float
) -> Kind | None:
    """What the work is limited by; None if that cannot be told.

    Args:
        reached: fraction of the peak while computing.
        issuing: share of the step that issuing its operations takes.
        moved: share of the step that moving its bytes takes at least.
        work: share of the step that is work.
        work_ms: its duration.
    """
    if work <= 0:
        return None
    if reached is not None and reached >= COMPUTE_MFU:
        return "compute"
    if issuing is not None and issuing >= max(ISSUE_BOUND, moved or 0.0):
        return "host"
    if moved is not None:
        if reached is None:
            return "memory" if moved / work >= COMPUTE_MFU else None
        if max(moved / work, reached) < UNFILLED:
            return "host"
        return "memory" if moved / work >= reached else "compute"
    if reached is None:
        return None
    if issuing is not None or reached >= UNFILLED:
        return "memory"
    return "host" if work_ms <= FLOOR_MS else None


def _advice(
    kind: Kind, share: float, device: str, reached: float | None, batch_size: int | None, precision: str | None
) -> str:
    """One sentence: what was seen, and the options that may help."""
    cpu = device == "cpu"
    seen = f"{share:.0%} of a step"
    peak = "" if reached is None else f" at {_percent(reached)} of the measured peak"
    now = "" if batch_size is None else f" (now {batch_size})"
    if kind == "input":
        faster = "data.pipeline=memory" if cpu else "data.pipeline=device or memory"
        return f"{seen} is waiting for data: take {faster}, or raise data.num_workers where data.pipeline=workers."
    if kind == "transfer":
        return (
            f"{seen} is copying batches to the device: data.pipeline=device keeps the data there, and "
            f"data.pipeline=memory copies a batch ahead."
        )
    if kind == "host":
        other = "" if cpu else ", or try trainer.accelerator=cpu, which may be as fast at this size"
        return f"{seen} is launching small operations and framework overhead: raise data.batch_size{now}{other}."
    if kind == "memory":
        lower = f"trainer.precision={precision} moves half of it, and " if precision else ""
        other = "trainer.accelerator=gpu has more bandwidth, and " if cpu else lower
        return (
            f"{seen} is moving data through memory{peak}: {other}a larger data.batch_size{now} helps as long as the "
            f"weights are most of it."
        )
    more = f"trainer.precision={precision}, or more trainer.devices," if precision else "more trainer.devices"
    faster = "trainer.accelerator=gpu" if cpu else more
    return f"{seen} is arithmetic{peak}: {faster} is the way to go faster, a larger data.batch_size{now} is not."


def _percent(fraction: float) -> str:
    return f"{fraction:.0%}" if fraction >= 0.1 else f"{fraction:.1%}"


def _product(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a * b


def _ratio(a: float | None, b: float | None) -> float | None:
    """`a / b`, or None where one is unknown or the ratio has no meaning."""
    if a is None or b is None or not (math.isfinite(a) and math.isfinite(b)) or a < 0 or b <= 0:
        return None
    return a / b
