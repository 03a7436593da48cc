"""What this project uses of torch that torch does not document or type, and no single room owns. Read in torch 2.15."""

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

# In what torch says of a file of shared memory, and of a worker that was killed for want of it.
_OF_SHARED_MEMORY = ("</torch_", "workers are out of shared memory")
BATCH_NORM = nn.modules.batchnorm._BatchNorm  # of any package


def any_mode() -> bool:
    """Whether a mode of torch's dispatcher is active in this thread."""
    return _get_current_dispatch_mode() is not None


def end_mode(mode: TorchDispatchMode) -> None:
    """End a mode wherever it stands among the active ones; the others stay, in their order."""
    within = _pop_modes(until=mode)
    if _get_current_dispatch_mode() is mode:
        mode.__exit__(None, None, None)
    for other in reversed(within):
        _push_mode(other)


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Hide what happens within from the modes of torch's dispatcher that are active in this thread."""
    modes = _pop_modes()
    try:
        yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)


def _pop_modes(until: TorchDispatchMode | None = None) -> list[Any]:
    """Take the active modes away, the innermost first; those outside of `until`, and it, stay."""
    taken = []
    while (innermost := _get_current_dispatch_mode()) is not None and innermost is not until:
        taken.append(_pop_mode())
    return taken


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile has compiled this module itself, or a function that is an attribute of it or of its class."""
    if module._compiled_call_impl is not None or hasattr(module, "_orig_mod"):
        return True
    attributes = (vars(owner).values() for owner in (module, *type(module).__mro__))
    functions = (vars(each) for own in attributes for each in own if isinstance(each, FunctionType))
    return any("_torchdynamo_orig_callable" in marks and "_torchdynamo_disable" not in marks for marks in functions)


def compiled_frames() -> int:
    """How many functions torch.compile has compiled in this process so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters["frames"]["ok"] if dynamo is not None else 0


def watch_compilation(around: Callable[[], contextlib.AbstractContextManager[Any]]) -> Callable[[], None]:
    """Have a context around everything that torch.compile compiles; returns a function that ends this."""
    from torch._dynamo.callback import callback_handler

    entered = contextlib.ExitStack()
    hooks = (lambda *_: entered.enter_context(around())), (lambda *_: entered.close())
    callback_handler.register_start_callback(hooks[0])
    callback_handler.register_end_callback(hooks[1])

    def stop() -> None:
        callback_handler.remove_start_callback(hooks[0])
        callback_handler.remove_end_callback(hooks[1])

    return stop


def is_compilation_error(error: BaseException) -> bool:
    """Whether an exception is one of torch.compile's own classes."""
    return type(error).__module__.startswith(("torch._dynamo.", "torch._inductor."))


def is_shared_memory_error(error: BaseException) -> bool:
    """Whether the system refuses the shared memory in which a DataLoader's workers hand over tensors and lock queues."""
    if isinstance(error, OSError):  # names no file
        frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
        return any(frame.f_globals.get("__name__") == "multiprocessing.synchronize" for frame in frames)
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OF_SHARED_MEMORY)


def non_finite_check(tensors: list[Tensor], flag: Tensor, one: Tensor) -> None:
    """Set `flag` to 1 on the device if any value is infinite or NaN, in one operation for each dtype among the tensors.

    `flag` and `one` are float32 scalars on the tensors' device. Gradient scalers use this operation while they unscale;
    a scale of `one` leaves the tensors as they are. CUDA has no such operation for bfloat16: there the largest magnitude is
    computed, which is not finite if any value is not. MPS keeps the operation, because its maximum may lose a NaN.
    """
    dtypes = {tensor.dtype for tensor in tensors}
    for dtype in dtypes:
        same = tensors if len(dtypes) == 1 else [tensor for tensor in tensors if tensor.dtype == dtype]
        if dtype == torch.bfloat16 and not flag.is_mps:
            largest = torch.nn.utils.get_total_norm([tensor for tensor in same if tensor.numel()], math.inf)
            flag.logical_or_(largest.isfinite().logical_not_())
        else:
            torch._amp_foreach_non_finite_check_and_unscale_(same, flag, one)


def float32_formats(device: str) -> dict[str, str]:
    """What torch computes float32 in on a kind of device, by kind of product, with its switches as they are.

    `none` and `ieee` are float32 itself; others are `tf32` and `bf16`.
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
    """Whether a profiler of torch records this thread."""
    return torch.autograd._profiler_enabled()


@contextlib.contextmanager
def float32_computed_as(form: str) -> Iterator[None]:
    """Have torch compute float32 matrix products and convolutions as `ieee` or `tf32`, on every device."""
    backends = cast(Any, torch.backends)
    switches = (backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv)
    before = [switch.fp32_precision for switch in switches]
    try:
        for switch in switches:
            switch.fp32_precision = form
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.fp32_precision = value


def lay_out_channels_last(network: nn.Module) -> None:
    """Have the weights of 2-D convolutions lie channels last. `Module.to` refuses those of 3-D ones, of five dimensions."""
    for tensor in (*network.parameters(), *network.buffers()):
        if tensor.dim() == 4:
            tensor.data = tensor.data.to(memory_format=torch.channels_last)
