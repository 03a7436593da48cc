"""The bottleneck of a run: the resource that limits its step time.

The step is divided into shares of its wall time, and the largest share names the bottleneck.

1. **Waiting for data** is `input`, **copying to the device** is `transfer`. Where the device's busy share is known, both
   count only up to the device's idle time: overlapped work is free.
2. **The rest of the idle time**, where the busy share is known, is `host`: the device waits for launches. Elsewhere, on
   CPU and CUDA, the time outside forward, backward and optimizer is `host`.
3. **The work itself** (the busy time, or else forward, backward and optimizer) is
   - `compute`, if it reaches `COMPUTE_MFU` of the measured peak. A separately timed optimizer is then `memory`: it
     passes over the weights and computes almost nothing.
   - `memory`, if the fraction of the peak is between `UNFILLED` and `COMPUTE_MFU`;
   - below that `host`, if the work takes at most `FLOOR_MS`, which a few hundred operations take however small they are.

The answer is None
- without both MFU and busy share, unless one of data wait, transfer and other is more than `MAJORITY` of the step on CPU
  or CUDA, where the parts follow one another and none hides behind another;
- where the largest share is work of an unknown kind: a busy device of unknown MFU, or a long step far below the peak.

Limits of the rule: `memory` is a conclusion by elimination. The peak is that of one large product, of which small models
reach half at best. Threads that wait for a processor which other processes use look like `memory`, too.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ..records.formatting import percent
from ..records.step_parts import PARTS

Kind = Literal["input", "transfer", "host", "memory", "compute"]

COMPUTE_MFU = 0.3  # well-fed convolutions and matrix products reach 25 to 70 % of a measured peak
UNFILLED = 0.1  # below this fraction of the peak the operations may be too small to fill the device
FLOOR_MS = 5.0  # Lightning's loop and a few hundred operations take 1 to 5 ms
MAJORITY = 0.5


@dataclass(frozen=True)
class Bottleneck:
    """What limits a run."""

    kind: Kind
    share: float  # of the step's wall time, 0 to 1
    advice: str  # one sentence with what was seen and the options that may help


def find_bottleneck(
    parts: Mapping[str, float],
    device: str = "cpu",
    busy: float | None = None,
    flops_per_sec: float | None = None,
    peak_flops_per_sec: float | None = None,
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
        batch_size: of one device, for the advice.
        faster_precision: one at which this device was measured to be faster than at the run's, for the advice.
    """
    parts = {part: parts.get(part, 0.0) for part in PARTS}
    step = sum(parts.values())
    if not math.isfinite(step) or step <= 0 or min(parts.values()) < 0:
        return None
    busy = None if device == "cpu" else busy
    mfu = _ratio(flops_per_sec, peak_flops_per_sec)
    in_order = device in ("cpu", "cuda")  # elsewhere the host's times run ahead of the device's
    if not in_order and busy is None and mfu is not None and mfu >= COMPUTE_MFU:
        busy = 1.0  # the device was at work, whatever the host seemed to wait for
    certain = in_order and max(parts["data_wait"], parts["transfer"], parts["other"]) > MAJORITY * step
    if mfu is None and busy is None and not certain:
        return None

    shares, work, computing = _divide({part: ms / step for part, ms in parts.items()}, in_order, busy)
    reached = _ratio(mfu, computing)
    kind = _kind_of_work(reached, work * step)
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


def _kind_of_work(reached: float | None, work_ms: float) -> Kind | None:
    """Step 3 of the rule, given the fraction of the peak while computing; None where the kind is unknown."""
    if work_ms <= 0 or reached is None:
        return None
    if reached >= COMPUTE_MFU:
        return "compute"
    if reached >= UNFILLED:
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


def _ratio(a: float | None, b: float | None) -> float | None:
    """`a / b`; None where a value is unknown or the ratio has no meaning."""
    if a is None or b is None or not (math.isfinite(a) and math.isfinite(b)) or a < 0 or b <= 0:
        return None
    return a / b
