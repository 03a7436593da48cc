"""A model of multi-device steps: the step of one device, and an all-reduce of its gradients by a ring.

Each of n devices sends and receives 2 (n − 1) pieces of an n-th of the gradients (P. Patarasuk, X. Yuan: Bandwidth optimal
all-reduce algorithms for clusters of workstations, JPDC 69, 2009, who also show that no algorithm sends less):

    exchange = 2 (n − 1) / n · bytes / bandwidth + 2 (n − 1) · latency

The model hides nothing of the exchange behind the backward pass. A model whose gradients fit into one bucket of DDP (25 MB)
has nothing to hide it behind; for a larger model the prediction is the worst case.
"""

from collections.abc import Callable
from dataclasses import dataclass

HALF = 0.5  # below this efficiency more than half of each further device is lost


@dataclass(frozen=True)
class Link:
    """The connection between two devices: bytes that a device sends in a second, and the time of an empty message."""

    bytes_per_sec: float
    latency_ms: float


@dataclass(frozen=True)
class Prediction:
    """A step of several devices.

    Attributes:
        devices: how many.
        batch_size: of each device.
        step_ms: all devices take it together.
        communication_ms: the part of the step that is the exchange.
        efficiency: samples/s as a fraction of `devices` times those of one device that trains alone.
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
    """A step of several devices, with a batch that is fixed for each device or for all devices together.

    Args:
        step_ms: from a batch size to the time of a step of one device.
        gradient_bytes: of one device.
        devices: how many.
        link: between two devices.
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
    """The largest power of two up to which doubling the devices keeps the efficiency at 50 % or more."""
    devices = 1
    while devices < most:
        found = predict_for(2 * devices)
        if found is None or found.efficiency < HALF:
            break
        devices *= 2
    return devices


def batches_to_accumulate(step_ms: float, communication_ms: float, efficiency: float) -> int:
    """The batches of a step (`trainer.accumulate_grad_batches`) with which a run reaches an efficiency.

    With k batches, a fraction k · step / (k · step + communication) of the time is arithmetic.
    """
    wanted = efficiency / (1 - efficiency) * communication_ms / step_ms
    return max(1, int(-(-wanted // 1)))
