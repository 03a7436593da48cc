"""Access to what torch 2.15 does not document or type, for what several rooms use."""

import contextlib
import math
import sys
import traceback
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode, _push_mode

# Parts of a RuntimeError's message about a lack of memory. cuBLAS and cuDNN report it for their buffers by a status.
_OUT_OF_MEMORY_MESSAGES = (
    "DefaultCPUAllocator",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
)
# Parts of torch's messages about a file of shared memory, and about a worker that was killed for lack of it.
_SHARED_MEMORY_MESSAGES = ("</torch_", "workers are out of shared memory")
BATCH_NORM = nn.modules.batchnorm._BatchNorm  # of any package


def is_dispatch_mode_active() -> bool:
    """Whether a mode of torch's dispatcher is active in this thread."""
    return _get_current_dispatch_mode() is not None


def end_mode(mode: TorchDispatchMode) -> None:
    """End an active mode wherever it stands in the stack of modes; the other modes stay, in their order."""
    inner_modes = _pop_modes(until=mode)
    if _get_current_dispatch_mode() is mode:
        mode.__exit__(None, None, None)
    for inner_mode in reversed(inner_modes):
        _push_mode(inner_mode)


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Suspend, within the context, the modes of torch's dispatcher that are active in this thread."""
    modes = _pop_modes()
    try:
        yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)


def _pop_modes(until: TorchDispatchMode | None = None) -> list[Any]:
    """Pop the active modes inside of `until`, or all of them, and return them, the innermost first."""
    popped_modes = []
    while (innermost := _get_current_dispatch_mode()) is not None and innermost is not until:
        popped_modes.append(_pop_mode())
    return popped_modes


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile has compiled this module, or a function among the attributes of the module or of its class."""
    if module._compiled_call_impl is not None or hasattr(module, "_orig_mod"):
        return True
    attributes = (value for owner in (module, *type(module).__mro__) for value in vars(owner).values())
    marks = (vars(function) for function in attributes if isinstance(function, FunctionType))
    return any("_torchdynamo_orig_callable" in names and "_torchdynamo_disable" not in names for names in marks)


def compiled_frame_count() -> int:
    """Return how many functions torch.compile has compiled in this process so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters["frames"]["ok"] if dynamo is not None else 0


def watch_compilation(make_context: Callable[[], contextlib.AbstractContextManager[Any]]) -> Callable[[], None]:
    """Enter the context that `make_context` returns whenever torch.compile compiles; return a function that ends this."""
    from torch._dynamo.callback import callback_handler

    contexts = contextlib.ExitStack()
    on_start, on_end = (lambda *_: contexts.enter_context(make_context())), (lambda *_: contexts.close())
    callback_handler.register_start_callback(on_start)
    callback_handler.register_end_callback(on_end)

    def stop() -> None:
        callback_handler.remove_start_callback(on_start)
        callback_handler.remove_end_callback(on_end)

    return stop


def is_compilation_error(error: BaseException) -> bool:
    """Whether an exception is one of torch.compile's own classes."""
    return type(error).__module__.startswith(("torch._dynamo.", "torch._inductor."))


def is_allocation_error(error: BaseException) -> bool:
    """Whether an error says that the host or a device has had no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY_MESSAGES)


def is_shared_memory_error(error: BaseException) -> bool:
    """Whether the system refuses shared memory to a DataLoader's workers, for their tensors or the locks of their queues."""
    if isinstance(error, OSError):  # its message names no file
        frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
        return any(frame.f_globals.get("__name__") == "multiprocessing.synchronize" for frame in frames)
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _SHARED_MEMORY_MESSAGES)


def non_finite_check(tensors: list[Tensor], flag: Tensor, one: Tensor) -> None:
    """Set `flag` to 1 on the device if any value is infinite or NaN, in one operation for each dtype among the tensors.

    `flag` and `one` are float32 scalars on the tensors' device. Gradient scalers use this operation to unscale; the scale
    `one` leaves the tensors unchanged. CUDA has no such operation for bfloat16: there the largest magnitude is computed,
    which is not finite if any value is not. MPS uses the operation for bfloat16, too, because its maximum may lose a NaN.
    """
    dtypes = {tensor.dtype for tensor in tensors}
    for dtype in dtypes:
        group = tensors if len(dtypes) == 1 else [tensor for tensor in tensors if tensor.dtype == dtype]
        if dtype == torch.bfloat16 and not flag.is_mps:
            largest = torch.nn.utils.get_total_norm([tensor for tensor in group if tensor.numel()], math.inf)
            flag.logical_or_(largest.isfinite().logical_not_())
        else:
            torch._amp_foreach_non_finite_check_and_unscale_(group, flag, one)


def float32_formats(device: str) -> dict[str, str]:
    """Return the format in which torch now computes float32 on a kind of device, for each kind of product.

    `none` and `ieee` mean float32 itself; the other formats are `tf32` and `bf16`.
    """
    backends = cast(Any, torch.backends)  # these switches are attributes that no type checker sees
    if device == "cpu":
        switches = (backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn)
    elif backends.cudnn.enabled:
        switches = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
    else:
        switches = (backends.cuda.matmul,) * 3
    kinds = ("matmul", "convolution", "recurrent")
    return {kind: switch.fp32_precision for kind, switch in zip(kinds, switches, strict=True)}


def is_profiler_active() -> bool:
    """Whether torch's profiler records this thread."""
    return torch.autograd._profiler_enabled()


@contextlib.contextmanager
def float32_computed_as(form: str) -> Iterator[None]:
    """Within the context, compute float32 matrix products and convolutions as `ieee` or `tf32`, on every device."""
    backends = cast(Any, torch.backends)
    switches = (backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv)
    previous_forms = [switch.fp32_precision for switch in switches]
    try:
        for switch in switches:
            switch.fp32_precision = form
        yield
    finally:
        for switch, previous_form in zip(switches, previous_forms, strict=True):
            switch.fp32_precision = previous_form


def lay_out_channels_last(network: nn.Module) -> None:
    """Lay out the weights of 2-D convolutions channels-last; `Module.to` refuses 5-D weights, those of 3-D convolutions."""
    for tensor in (*network.parameters(), *network.buffers()):
        if tensor.dim() == 4:
            tensor.data = tensor.data.to(memory_format=torch.channels_last)
