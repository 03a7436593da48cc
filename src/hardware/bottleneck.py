"""The bottleneck of a run: the resource that limits its step time.

The step is divided into shares of its wall time, and the largest share names the bottleneck.

1. **Waiting for data** is `input`, **copying to the device** is `transfer`. Where the device's busy share is known, both
   count only up to the device's idle time: overlapped work is free.
2. **The rest of the idle time**, where the busy share is known, is `host`: the device waits for launches. Elsewhere, on
   CPU and CUDA, the time outside forward, backward and optimizer is `host`. On a CPU `host` also gets the time that
   issuing the step's operations takes, if their number is known: `OP_COST` launch latencies each, but never the time
   that the arithmetic needs at the peak.
3. **The work itself** (the busy time, or else forward, backward and optimizer) is
   a. `compute`, if it reaches `COMPUTE_MFU` of the measured peak. A separately timed optimizer is then `memory`: it
      passes over the weights and computes almost nothing.
   b. `host`, on a GPU, if issuing the operations takes `ISSUE_BOUND` of the step and at least as long as moving its
      bytes: events count the gaps between kernels as busy.
   c. where the step's bytes are known: `memory` or `compute`, whichever reaches the larger fraction of its measured
      roof; `host` if neither reaches `UNFILLED`, because such operations are too small to fill the device.
   d. where the bytes are not known: `memory`, if the operations are known to be issued in less time than in (b), or if
      the fraction of the peak is between `UNFILLED` and `COMPUTE_MFU`; below that `host`, if the work takes at most
      `FLOOR_MS`, which a few hundred operations take however small they are.

The answer is None
- without both MFU and busy share, unless one of data wait, transfer and other is more than `MAJORITY` of the step on CPU
  or CUDA, where the parts follow one another and none hides behind another;
- where the largest share is work of an unknown kind: a busy device of unknown MFU and unknown bytes, or a long step far
  below the peak whose operations and bytes are unknown.

Limits of the rule: the `memory` of 3d is a conclusion by elimination. The peak is that of one large product, of which
small models reach half at best. Bytes that are counted without caches overstate `memory`. Threads that wait for a
processor which other processes use look like `memory`, too.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ..records.formatting import percent
from ..records.step_parts import PARTS

Kind = Literal["input", "transfer", "host", "memory", "compute"]

COMPUTE_MFU = 0.3  # well-fed convolutions and matrix products reach 25 to 70 % of a measured peak
UNFILLED = 0.1  # below this fraction of both roofs neither resource is short
OP_COST = 3.0  # an operation of a small model's step with its autograd, in latencies of the smallest operation
ISSUE_BOUND = 0.7
FLOOR_MS = 5.0  # Lightning's loop and a few hundred operations take 1 to 5 ms
MAJORITY = 0.5


@dataclass(frozen=True)
class Bottleneck:
    """What limits a run.

    Attributes:
        kind: `input`, `transfer`, `host` (launches and the framework), `memory` (bandwidth) or `compute`.
        share: of the step's wall time that is spent on it, 0 to 1.
        advice: one sentence with what was seen and the options that may help.
    """

    kind: Kind
    share: float
    advice: str


def find_bottleneck(
    parts: Mapping[str, float],
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
    """What limits a run, by the rule above; None where the rule gives no answer.

    Args:
        parts: ms of each part (`records.step_parts.PARTS`) of the average training step, warm-up and validation left
            out; a missing part is 0. On CUDA they are times in the stream, elsewhere the host's.
        device: torch's type of the device: `cpu`, `cuda`, `mps`.
        busy: share of the step in which the device computes, copies left out. SM activity is such a share. NVML's
            utilisation is not: any kernel makes it 100 %. None on a CPU.
        flops_per_sec: achieved over the whole step.
        peak_flops_per_sec: measured on this device at this precision.
        launch_us: time to issue one of the smallest operations, many in a row.
        ops_per_step: operations of forward, backward and optimizer.
        copy_bytes_per_sec: measured bandwidth of the device's memory, reads and writes both counted.
        bytes_per_step: estimated memory traffic of a step.
        batch_size: of one device, for the advice.
        faster_precision: one at which this device was measured to be faster than at the run's, for the advice.
    """
    parts = {part: parts.get(part, 0.0) for part in PARTS}
    step = sum(parts.values())
    if not math.isfinite(step) or step <= 0 or min(parts.values()) < 0:
        return None
    if device == "cpu":
        busy = None
    mfu = _ratio(flops_per_sec, peak_flops_per_sec)
    issuing = _ratio(_product(launch_us, ops_per_step), step * 1000 / OP_COST)
    moved = _ratio(bytes_per_step, _product(copy_bytes_per_sec, step / 1000))
    in_order = device in ("cpu", "cuda")  # elsewhere the host's times run ahead of the device's
    if not in_order and busy is None and mfu is not None and mfu >= COMPUTE_MFU:
        busy = 1.0  # the device was at work, whatever the host seemed to wait for
    certain = in_order and max(parts["data_wait"], parts["transfer"], parts["other"]) > MAJORITY * step
    if mfu is None and busy is None and not certain:
        return None

    shares, work, computing = _divide({part: ms / step for part, ms in parts.items()}, in_order, busy)
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
    largest = max(shares, key=shares.__getitem__)
    if kind is None and work > shares[largest]:
        return None
    share = min(shares[largest], 1.0)
    return Bottleneck(largest, share, _advice(largest, share, device, reached, batch_size, faster_precision))


def _divide(parts: Mapping[str, float], in_order: bool, busy: float | None) -> tuple[dict[Kind, float], float, float]:
    """Shares of the step: input, transfer and host; the work, whose kind is open; the arithmetic in the work."""
    waiting, copying, other = parts["data_wait"], parts["transfer"], parts["other"]
    if busy is not None:
        work = computing = min(max(busy, 0.0), 1.0)
        waiting = min(waiting, 1 - work)
        copying = min(copying, 1 - work - waiting)
        other = 1 - work - waiting - copying
    elif not in_order:  # the host may wait for the device in any part, so no part is certainly the host's
        other = 0.0
        work = computing = 1 - waiting - copying
    else:
        computing = parts["forward"] + parts["backward"]
        work = computing + parts["optimizer"]
    return {"input": waiting, "transfer": copying, "host": other}, work, computing


def _kind_of_work(
    reached: float | None, issuing: float | None, moved: float | None, work: float, work_ms: float
) -> Kind | None:
    """Step 3 of the rule; None where the kind is unknown.

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
    cpu = device == "cpu"
    seen = f"{percent(share)} of a step"
    peak = "" if reached is None else f" at {percent(reached, 0 if reached >= 0.1 else 1)} of the measured peak"
    now = "" if batch_size is None else f" (now {batch_size})"
    if kind == "input":
        faster = "data.pipeline=memory" if cpu else "data.pipeline=device or memory"
        return f"{seen} is waiting for data: take {faster}, or raise data.num_workers where data.pipeline=workers."
    if kind == "transfer":
        return (
            f"{seen} is copying batches to the device: data.pipeline=device keeps the data there, and "
            f"data.pipeline=memory prefetches a batch."
        )
    if kind == "host":
        other = "" if cpu else ", or try trainer.accelerator=cpu, which may be as fast at this size"
        return f"{seen} is launching small operations and framework overhead: raise data.batch_size{now}{other}."
    if kind == "memory":
        lower = f"trainer.precision={precision} moves half as many bytes, and " if precision else ""
        other = "trainer.accelerator=gpu has more bandwidth, and " if cpu else lower
        return (
            f"{seen} is moving data through memory{peak}: {other}a larger data.batch_size{now} helps as long as the "
            f"weights are most of the data."
        )
    more = f"trainer.precision={precision}, or more trainer.devices," if precision else "more trainer.devices"
    faster = "trainer.accelerator=gpu" if cpu else more
    return f"{seen} is arithmetic{peak}: {faster} is the way to go faster, a larger data.batch_size{now} is not."


def _product(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a * b


def _ratio(a: float | None, b: float | None) -> float | None:
    """`a / b`; None where a value is unknown or the ratio has no meaning."""
    if a is None or b is None or not (math.isfinite(a) and math.isfinite(b)) or a < 0 or b <= 0:
        return None
    return a / b
