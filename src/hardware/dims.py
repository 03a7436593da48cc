"""The dimensions of an operation's call that its time depends on; empty if the time depends on its bytes alone.

- products: (M, N, K) of `(M, K) @ (K, N)`; batched products (B, M, N, K)
- convolutions: the sizes of result and weight, (N, C_out, H, W, C_in, K, K), where C_in is that of one group
- recurrent kernels over a whole sequence: (T, N, features, hidden)
- softmax and layer norm: (rows, columns), where each row is normalised by itself
"""

from collections.abc import Mapping
from math import prod
from typing import Any

from torch import Tensor

# The two factors of a product, by the name of the operation.
_PRODUCTS = {
    "mm": ("self", "mat2"),
    "addmm": ("mat1", "mat2"),
    "bmm": ("self", "mat2"),
    "baddbmm": ("batch1", "batch2"),
}


def operation_dims(name: str, inputs: Mapping[str, Any], results: list[Tensor]) -> tuple[int, ...]:
    """Return the dimensions of a call of a torch operation, whose `name` has no namespace and no overload."""
    try:
        if name in _PRODUCTS:
            left, right = (inputs[key] for key in _PRODUCTS[name])
            return *left.shape[:-1], right.shape[-1], left.shape[-1]
        if name in ("convolution", "convolution_backward"):
            return *inputs.get("grad_output", results[0]).shape, *inputs["weight"].shape[1:]
        if "rnn" in name and "hidden_size" in inputs:
            shape, hidden = inputs["input"].shape, inputs["hidden_size"]
            if len(shape) != 3:  # a packed sequence: time steps differ in their samples
                steps = max(1, len(inputs.get("batch_sizes") or ()))
                return steps, max(1, shape[0] // steps), shape[-1], hidden
            is_batch_first = name.startswith("_cudnn") and inputs["batch_first"]  # for oneDNN it is transposed already
            steps, samples = shape[1::-1] if is_batch_first else shape[:2]
            return steps, samples, shape[2], hidden
        if "softmax" in name or "layer_norm" in name:
            tensor = next(value for value in inputs.values() if isinstance(value, Tensor))
            columns = prod(inputs["normalized_shape"]) if "layer_norm" in name else tensor.shape[inputs["dim"]]
            return tensor.numel() // max(columns, 1), columns
    except (LookupError, TypeError, RuntimeError):  # a nested tensor has no shape; a softmax of a number has no rows
        pass
    return ()
