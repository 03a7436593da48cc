"""What several devices bring: measured by runs that differ in nothing else, and predicted from a step and a link.

A step of n devices is the step of one, and the exchange of its gradients by a ring: each device sends and receives
2 (n − 1) pieces of an n-th of the gradients (P. Patarasuk, X. Yuan: Bandwidth optimal all-reduce algorithms for clusters
of workstations, JPDC 69, 2009, where it is also shown that no algorithm sends less).

    exchange = 2 (n − 1) / n · bytes / bandwidth + 2 (n − 1) · latency

Nothing of it is taken to be hidden behind the backward pass: models whose gradients fit into DDP's bucket of 25 MB have
nothing to hide it behind. For larger ones the prediction is the worst that can be.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from .runs import SEED, Run, number

DEVICES, NODES = "trainer.devices", "trainer.num_nodes"
# Settings that follow from the number of devices, or do not count beside it.
_ALONG = (DEVICES, NODES, SEED, "trainer.strategy", "trainer", "threads")
HALF = 0.5  # of what the devices could do: beyond that most of what is added is lost


# --- predicted --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Link:
    """What connects devices: what one of them sends to the next in a second, and how long nothing at all takes."""

    bytes_per_sec: float
    latency_ms: float


@dataclass(frozen=True)
class Prediction:
    """A step of several devices.

    Attributes:
        devices: how many.
        batch_size: of each of them.
        step_ms: of all of them together.
        communication_ms: what of it is the exchange.
        efficiency: samples/s as a share of `devices` times those of one device with the batch that it would have.
    """

    devices: int
    batch_size: float
    step_ms: float
    communication_ms: float
    efficiency: float


def ring_ms(gradient_bytes: float, devices: int, link: Link) -> float:
    """Time of an all-reduce by a ring; nothing for one device."""
    sent = 2 * (devices - 1) / devices * gradient_bytes
    return 1e3 * sent / link.bytes_per_sec + 2 * (devices - 1) * link.latency_ms


def predict(
    step_ms: Callable[[float], float],
    gradient_bytes: float,
    devices: int,
    link: Link,
    *,
    per_device: float | None = None,
    in_all: float | None = None,
) -> Prediction | None:
    """A step of several devices whose batch is fixed for each of them, or for all of them together.

    Args:
        step_ms: time of a step of one device at a batch size.
        gradient_bytes: of one device.
        devices: how many.
        link: between them.
        per_device: samples of each device (weak scaling), or
        in_all: samples of all devices (strong scaling).

    Returns:
        None where a device would have less than one sample.
    """
    alone = in_all if per_device is None else per_device
    share = in_all / devices if per_device is None else per_device
    if share < 1:
        return None
    exchange = ring_ms(gradient_bytes, devices, link)
    step = step_ms(share) + exchange
    return Prediction(devices, share, step, exchange, (share / step) / (alone / step_ms(alone)))


def worthwhile(predict_for: Callable[[int], Prediction | None], most: int = 2**20) -> int:
    """The largest power of two up to which doubling the devices keeps them at least half used."""
    devices = 1
    while devices < most:
        found = predict_for(2 * devices)
        if found is None or found.efficiency < HALF:
            break
        devices *= 2
    return devices


def batches_to_accumulate(step_ms: float, communication_ms: float, efficiency: float) -> int:
    """How many batches between two exchanges bring a run to an efficiency (`trainer.accumulate_grad_batches`).

    With k of them a share k · step / (k · step + communication) of the time is arithmetic.
    """
    wanted = efficiency / (1 - efficiency) * communication_ms / step_ms
    return max(1, int(-(-wanted // 1)))


# --- measured ---------------------------------------------------------------------------------------------------------


def devices_of(run: Run) -> int:
    """How many devices a run trained on, by what it measured; 1 where it does not say."""
    return round(number(run.throughput.get("processes")) or 1)


def communication_share(run: Run) -> float | None:
    """Of a step, what it only waited for the gradients of others; None where that was not measured."""
    ms, step = number(run.throughput.get("communication_ms")), number(run.throughput.get("step_ms"))
    return ms / step if ms is not None and step else None


def efficiencies(runs: list[Run]) -> dict[str, float]:
    """For every run on several devices its samples/s as a share of `devices` × those of one, by the run's name.

    The one device is of runs with the same settings otherwise, batch size for each device included; of several that
    differ in the seed alone, their median. A run without such a partner is left out.
    """
    single: dict[str, list[float]] = {}
    for run in runs:
        if run.samples_per_sec and devices_of(run) == 1:
            single.setdefault(_alike(run), []).append(run.samples_per_sec)
    found = {}
    for run in runs:
        rate, alone = run.samples_per_sec, single.get(_alike(run))
        if rate and alone and devices_of(run) > 1:
            found[run.name] = rate / (devices_of(run) * statistics.median(alone))
    return found


def _alike(run: Run) -> str:
    return repr(sorted((key, repr(value)) for key, value in run.settings.items() if key not in _ALONG))


def headlines(runs: list[Run]) -> list[str]:
    """One line for every number of devices of every model and batch size that also ran on one."""
    reached = efficiencies(runs)
    lines = []
    for run in runs:
        if run.name not in reached:
            continue
        devices, efficiency = devices_of(run), reached[run.name]
        batch = "?" if run.batch_size is None else f"{run.batch_size:,}"
        line = (
            f"{run.settings.get('model', 'model')}: {devices} devices with {batch} samples each do "
            f"{devices * efficiency:.2f}× the samples/s of one, {efficiency:.0%} of {devices}×"
        )
        share = communication_share(run)
        if share is not None:
            line += f"; {share:.0%} of their step only waits for gradients"
        lines.append(f"{line}.")
    return lines


def doubts(runs: list[Run]) -> list[str]:
    """What makes a comparison of devices unfair: on a CPU processes share the cores out among themselves."""
    reached = efficiencies(runs)
    notes = []
    for run in runs:
        alone = {r.settings.get("threads") for r in runs if _alike(r) == _alike(run) and devices_of(r) == 1}
        threads = run.settings.get("threads")
        if run.name in reached and threads is not None and alone != {threads}:
            before = " or ".join(map(str, sorted(filter(None, alone))))
            notes.append(
                f"{run.name}: each of its processes had {threads} thread{'s'[: threads > 1]}, and the run on one "
                f"device had {before}"
            )
    return notes
