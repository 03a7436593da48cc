"""The dimensions of an operation's call that its time depends on.

- products: (M, N, K) of `(M, K) @ (K, N)`; with a batch of them (B, M, N, K)
- convolutions: those of the result and of the weight, (N, C_out, H, W, C_in, K, K), C_in of one group
- recurrent kernels over a whole sequence: (T, N, features, hidden)
- along a dimension (softmax, layer norm): (rows, columns), a row being what is normalised together
- an optimizer's kernel over many tensors: (tensors, numbers in all of them)
- everything else: (rows, columns) of its largest tensor, a row being the last dimension
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from torch import Tensor

# The arguments that are multiplied, by the name of the operation.
_PRODUCTS = {
    "mm": ("self", "mat2"),
    "addmm": ("mat1", "mat2"),
    "_addmm_activation": ("mat1", "mat2"),
    "bmm": ("self", "mat2"),
    "baddbmm": ("batch1", "batch2"),
    "mv": ("self", "vec"),
    "addmv": ("mat", "vec"),
}
_RECURRENT = ("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward", "_cudnn_rnn", "_cudnn_rnn_backward")


def dims_of(
    name: str, inputs: Mapping[str, Any], given: Sequence[Tensor], results: Sequence[Tensor]
) -> tuple[int, ...]:
    """The dimensions of a call; empty for a call that has not what its name says.

    Args:
        name: of the operation, without namespace and ending.
        inputs: its arguments by name.
        given: the tensors among them.
        results: the tensors that it returns.
    """
    try:
        return _dims_of(name, inputs, given, results)
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError):  # anybody's operation; nested tensors
        return ()


def _dims_of(
    name: str, inputs: Mapping[str, Any], given: Sequence[Tensor], results: Sequence[Tensor]
) -> tuple[int, ...]:
    if name in _PRODUCTS:
        first, second = (inputs[key] for key in _PRODUCTS[name])
        columns = second.shape[-1] if second.ndim > 1 else 1
        return *first.shape[:-1], columns, first.shape[-1]
    if name in ("convolution", "_convolution", "convolution_backward"):
        result = inputs.get("grad_output", results[0] if results else None)
        return *_two_sizes(result.shape), *_two_sizes(inputs["weight"].shape)[1:]
    if name in _RECURRENT:
        return *_of_sequence(name, inputs), inputs["hidden_size"]
    if name.startswith(("_foreach", "_fused")):
        first = next((value for value in inputs.values() if isinstance(value, list | tuple) and value), ())
        return len(first), sum(each.numel() for each in first if isinstance(each, Tensor))
    largest = max((*results, *given), key=Tensor.numel)
    columns = _columns(inputs, largest)
    return largest.numel() // max(columns, 1), columns


def _two_sizes(shape: Sequence[int]) -> Sequence[int]:
    """The shape of images or weights; sequences get a height of 1, volumes keep their three sizes."""
    return (*shape[:2], 1, *shape[2:]) if len(shape) == 3 else shape


def _of_sequence(name: str, inputs: Mapping[str, Any]) -> tuple[int, int, int]:
    """Time steps, samples and features of a recurrent kernel's input."""
    shape = inputs["input"].shape
    if len(shape) != 3:  # packed: the samples of all steps
        return 1, shape[0], shape[-1]
    first, second, features = shape
    swapped = name.startswith("_cudnn") and inputs["batch_first"]  # torch has swapped them for oneDNN
    return (second, first, features) if swapped else (first, second, features)


def _columns(inputs: Mapping[str, Any], largest: Tensor) -> int:
    """The length of a row."""
    together = inputs.get("normalized_shape")
    if isinstance(together, list | tuple) and together:
        return prod(together)
    dim = inputs.get("dim")
    if isinstance(dim, int) and -largest.ndim <= dim < largest.ndim:
        return largest.shape[dim]
    return largest.shape[-1] if largest.ndim else 1
