"""A step's works in another precision than the one that was measured."""

from dataclasses import replace

from ..errors import UserError, did_you_mean
from .device import Device
from .kinds import PRODUCTS
from .work import Work

# What Lightning calls a precision → the format of the products; `mixed` where everything else stays in float32.
_NAMES = {
    **dict.fromkeys(("32-true", "32", "fp32"), "fp32"),
    **dict.fromkeys(("64-true", "64", "fp64"), "fp64"),
    **dict.fromkeys(("bf16-mixed", "bf16"), "bf16 mixed"),
    **dict.fromkeys(("16-mixed", "16", "fp16"), "fp16 mixed"),
    "bf16-true": "bf16 true",
    "16-true": "fp16 true",
    "tf32": "tf32",
}
_STAYS = ("softmax", "layer_norm")  # that autocast computes in float32


def format_of(measured: str, asked: str | None) -> str | None:
    """The format that a step is to be converted to; None where it stays as it was measured.

    Raises:
        UserError: for an unknown precision, and for one that cannot be derived from what was measured.
    """
    if asked is None:
        return None
    wanted = _NAMES.get(str(asked))
    if wanted is None:
        near = did_you_mean(str(asked), _NAMES)
        raise UserError(
            f"--precision: got {asked!r}, takes 32-true, tf32, bf16-mixed, 16-mixed, bf16-true or 16-true.{near}"
        )
    if wanted == _NAMES.get(measured):
        return None
    if _NAMES.get(measured) != "fp32" or wanted == "fp64":
        raise UserError(
            f"--precision: {asked} cannot be predicted from a measurement at {measured}; measure at 32-true, or at {asked}"
        )
    return wanted


def element_of(form: str | None) -> float:
    """The size of an activation's number, relative to the measured one."""
    return 0.5 if form and form.startswith(("bf16", "fp16")) else 1.0


def in_precision(work: Work, device: Device, form: str | None) -> Work:
    """A work as the device computes it.

    In float32 a GPU's convolutions and recurrent kernels use TF32 where it has them, which is torch's default, and matrix
    products do not. A TPU multiplies in bf16.

    Args:
        work: as it was recorded.
        device: that computes it.
        form: as `format_of` gives it.

    Raises:
        UserError: if the device has no hardware for the products' precision.
    """
    products = work.kind in PRODUCTS or "rnn" in work.name
    if form:
        precision, _, mode = form.partition(" ")
        if mode == "true" or (mode == "mixed" and work.part != "optimizer" and work.kind not in _STAYS):
            work = replace(work, bytes=work.bytes / 2)
        work = replace(work, precision=precision if products else work.precision)
    through_cudnn = work.kind == "convolution" or "rnn" in work.name
    if work.precision == "fp32" and device.kind == "cuda" and through_cudnn and "tf32" in device.flops_per_sec:
        work = replace(work, precision="tf32")
    if not products:
        return work
    if device.kind == "tpu":
        return replace(work, precision="bf16")
    if work.precision == "tf32" and device.kind != "cuda":
        work = replace(work, precision="fp32")
    if work.precision in ("bf16", "fp16", "fp64", "tf32") and work.precision not in device.flops_per_sec:
        raise UserError(f"{device.name} has no hardware for {work.precision}; choose another precision")
    return work
