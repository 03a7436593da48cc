"""Divide the work of a step into `host`, `memory`, `compute` (of operations with FLOPs) and `elementwise` (of the others).

On a CPU every operation of a few steps was timed. The time between the operations (Python, autograd, the framework) is
`host`. So is what an operation takes longer than its work needs at a well-used roof, up to 30 µs a call, or 100 µs of
a product: of a small operation it is nearly everything. The rest is `memory` or `compute`, by the one that needs more time at the roofs; where
both need about as much, it is divided between them. An operation without products whose traffic needs less than a fifth
of its time is `elementwise`: the cores are busy with it. One whose traffic is out of order (`access.py`) is `memory` whatever
it reaches: it waits for single cache lines. So is a copy or a sum of values that no cache holds. Page faults of the thread that
waits for the operation count as memory.

An asynchronous device does not tell how long an operation took. Where the share of the step is known in which it is busy,
the rest is `host`. Elsewhere the floors decide: if the operations need a good part of the step at the roofs, the device
limits the step, and if launching them does, the host. Otherwise only the floors themselves are known.
"""

from collections.abc import Mapping, Sequence

from .floor import Roofs, step_floor
from .operations import Operation

OVERHEAD_S = 30e-6  # of a call, at most: dispatching it, allocating its result
_PRODUCT_S = 100e-6  # the same of a product, which also picks a kernel and waits for its threads to wake
_EVEN = 2.0  # two needs are alike within this factor
_MOVES = 0.2  # of its time, by an operation without products that memory can limit; strided traffic reaches a third
_MOVES_AT_LEAST = 0.05  # the same, of an operation with products
# Operations with one instruction for each value, or none: on data that no cache holds they wait for it.
_LIGHT = (
    "clone",
    "copy",
    "_to_copy",
    "cat",
    "stack",
    "repeat",
    "flip",
    "roll",
    "zero",
    "fill",
    "zeros_like",
    "new_zeros",
)
_LIGHT += ("add", "sub", "mul", "neg", "abs", "relu", "threshold_backward", "masked_fill", "where", "lerp", "addcmul")
_SCATTERED = 0.02  # of the bandwidth, by an access out of order
_FILLS = 0.25  # of a roof: well-fed networks reach 25 to 70 %
# Of no device in particular: for machines that are not calibrated, where only the ratio between the roofs matters.
TYPICAL = Roofs(asynchronous=False, flops_per_sec={"fp32": 1e11}, bytes_per_sec=2e10, launch_s=2e-6)


def divide(
    operations: Sequence[Operation],
    roofs: Roofs | None,
    device: str,
    work: float,
    counters: Mapping[str, float | None],
) -> dict[str, float]:
    """Milliseconds of each kind among the `work`; the rest of it is not known.

    Args:
        operations: of one step.
        roofs: of the device; None if it is not calibrated.
        device: torch's type of it.
        work: milliseconds of the step without waiting for data, copies and other ranks.
        counters: milliseconds by what the device itself counts, None for what it does not: `busy`, in which it computes;
            `compute`, in which its tensor cores do; `memory`, the traffic at its highest bandwidth.
    """
    if work <= 0 or not operations:
        return {}
    if device == "cpu":
        return _measured(operations, roofs or TYPICAL, work)
    return _estimated(operations, roofs, work, counters)


def _measured(operations: Sequence[Operation], roofs: Roofs, work: float) -> dict[str, float]:
    spent = {"memory": 0.0, "compute": 0.0, "elementwise": 0.0, "host": 0.0}
    for operation in operations:
        for kind, share in share_of_kinds(operation, roofs).items():
            spent[kind] += 1e3 * operation.seconds * share
    timed = sum(spent.values())
    busy = timed - spent["host"]
    if busy > work:  # they were timed in a slower moment than the mean step
        return {kind: ms * work / timed for kind, ms in spent.items()}
    return spent | {"host": work - busy}  # timing them lengthens their calls, so their own share is not used


def recorded_excess(operations: Sequence[Operation], roofs: Roofs | None, work: float) -> float:
    """By which factor the computing and the traffic of a CPU's operations exceed the `work`, in ms; at least 1."""
    host = (each.seconds * share_of_kinds(each, roofs or TYPICAL)["host"] for each in operations)
    return max(1e3 * (sum(each.seconds for each in operations) - sum(host)) / work, 1.0)


def share_of_kinds(operation: Operation, roofs: Roofs) -> dict[str, float]:
    """How the time of a CPU's operation divides into the kinds; the shares add up to 1."""
    seconds = operation.seconds or 1e-9
    compute, memory = roofs.compute_seconds(operation) / seconds, roofs.memory_seconds(operation) / seconds
    faults = min(roofs.page_fault_s * operation.waited_faults / seconds, 1.0)
    scattered = not compute and 2 * operation.scattered_bytes > operation.cold_bytes
    waits = scattered or (_is_light(operation) and 2 * operation.cold_bytes > operation.bytes)
    explained = min(max(compute, memory) / (_SCATTERED if scattered else _FILLS) + faults, 1.0)
    host = min(1 - explained, (_PRODUCT_S if operation.flops else OVERHEAD_S) * operation.calls / seconds)
    rest, computes = 1 - host - faults, "compute" if operation.flops else "elementwise"
    if waits:  # for single lines, or for data that is hardly computed with
        shares = {"memory": 1.0}
    elif compute >= _EVEN * memory or memory < (_MOVES_AT_LEAST if compute else _MOVES) * (1 - faults):
        shares = {computes: 1.0}
    elif memory > _EVEN * compute:
        shares = {"memory": 1.0}
    else:
        shares = {"memory": memory / (memory + compute), computes: compute / (memory + compute)}
    found = {kind: rest * share for kind, share in shares.items()} | {"host": host}
    return found | {"memory": found.get("memory", 0.0) + faults}


def _is_light(operation: Operation) -> bool:
    return operation.name.removeprefix("aten.").removeprefix("_foreach_").removesuffix("_") in _LIGHT


def _estimated(
    operations: Sequence[Operation], roofs: Roofs | None, work: float, counters: Mapping[str, float | None]
) -> dict[str, float]:
    busy = counters.get("busy")
    if roofs is None:
        return {} if busy is None else {"host": work - min(busy, work)}
    floor = step_floor(operations, roofs)
    launch = 1e3 * floor.launch
    # The device's own counters see what the floors cannot: traffic of a cache that is worse than its model.
    memory = max(1e3 * floor.memory, counters.get("memory") or 0.0)
    compute = max(1e3 * floor.compute, counters.get("compute") or 0.0)
    device = memory + compute
    if busy is None and device >= _FILLS * work and device >= launch:
        busy = work
    if busy is None and launch >= _FILLS * work:
        busy = min(device / _FILLS, work - launch)
    if busy is None:
        return {"host": launch, "memory": memory, "compute": compute}
    busy = min(busy, work)
    if not device:
        return {"host": work - busy}
    return {"host": work - busy, "memory": busy * memory / device, "compute": busy * compute / device}
