"""A device as its datasheet has it: what a prediction may know of it."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """Facts on paper, in SI units. None: the datasheet does not say.

    Attributes:
        kind: `cuda`, `rocm`, `mps`, `tpu`, `cpu`.
        flops_per_sec: of dense products, by precision: `fp32`, `tf32`, `bf16`, `fp16`, `fp64`.
        sms: streaming multiprocessors.
        clock_hz: the boost clock.
        cores_per_sm: fp32 lanes of a multiprocessor.
    """

    name: str
    kind: str
    memory_bytes: float
    bytes_per_sec: float
    flops_per_sec: Mapping[str, float]
    sms: int | None = None
    l2_bytes: float | None = None
    clock_hz: float | None = None
    cores_per_sm: int | None = None
    tdp_w: float | None = None
