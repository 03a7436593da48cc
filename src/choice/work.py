"""One operation of a training step, with its shape: what a prediction is asked for."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """One operation with this shape.

    Attributes:
        kind: `linear`, `bmm`, `elementwise`, `softmax`, `layer_norm`, `convolution`, `recurrent`, `copy`, `other`.
        name: `aten.addmm`; in the shared measurements `linear`, `add`, `powu`, …
        dims: linear (M, N, K); bmm (B, M, N, K); elementwise and rows (B, H); else ().
        flops: of one call.
        bytes: read and written by one call, each tensor once.
        calls: in a step.
        precision: `fp32`, `tf32`, `bf16`, `fp16`, `fp64`.
        part: `forward`, `backward`, `optimizer`.
        module: of the model.
    """

    kind: str
    name: str
    dims: tuple[int, ...]
    flops: float
    bytes: float
    calls: float = 1
    precision: str = "fp32"
    part: str = "forward"
    module: str = ""
