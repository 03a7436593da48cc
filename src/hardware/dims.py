"""The dimensions of an operation's call that its time depends on; empty for an operation that its bytes describe.

- products: (M, N, K) of `(M, K) @ (K, N)`; with a batch of them (B, M, N, K)
- convolutions: those of the result and of the weight, (N, C_out, H, W, C_in, K, K), C_in of one group
- recurrent kernels over a whole sequence: (T, N, features, hidden)
- softmax and layer norm: (rows, columns), a row being what is normalised together
"""

from collections.abc import Mapping
from math import prod
from typing import Any

from torch import Tensor

# The arguments that are multiplied, by the name of the operation.
_PRODUCTS = {
    "mm": ("self", "mat2"),
    "addmm": ("mat1", "mat2"),
    "bmm": ("self", "mat2"),
    "baddbmm": ("batch1", "batch2"),
}


def dims_of(name: str, inputs: Mapping[str, Any], results: list[Tensor]) -> tuple[int, ...]:
    """The dimensions of a call of an operation of torch, named without namespace and ending."""
    try:
        if name in _PRODUCTS:
            first, second = (inputs[key] for key in _PRODUCTS[name])
            return *first.shape[:-1], second.shape[-1], first.shape[-1]
        if name in ("convolution", "convolution_backward"):
            return *inputs.get("grad_output", results[0]).shape, *inputs["weight"].shape[1:]
        if "rnn" in name and "hidden_size" in inputs:
            shape, hidden = inputs["input"].shape, inputs["hidden_size"]
            if len(shape) != 3:  # packed: the samples of all steps, of which each has others
                steps = max(1, len(inputs.get("batch_sizes") or ()))
                return steps, max(1, shape[0] // steps), shape[-1], hidden
            swapped = name.startswith("_cudnn") and inputs["batch_first"]  # torch has swapped them for oneDNN
            steps, samples = shape[1::-1] if swapped else shape[:2]
            return steps, samples, shape[2], hidden
        if "softmax" in name or "layer_norm" in name:
            numbers = next(value for value in inputs.values() if isinstance(value, Tensor))
            columns = prod(inputs["normalized_shape"]) if "layer_norm" in name else numbers.shape[inputs["dim"]]
            return numbers.numel() // max(columns, 1), columns
    except (LookupError, TypeError, RuntimeError):  # a nested tensor has no shape; a softmax of a number has no rows
        pass
    return ()
