"""What this project uses of torch that torch does not document or type: here alone. Read in torch 2.15."""

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _pop_mode,
    _push_mode,
    is_traceable_wrapper_subclass_type,
)

DispatchMode = TorchDispatchMode  # sees every operation after autograd
PRODUCT_KINDS = ("matmul", "convolution", "recurrent")  # each has its own switch for TF32
_F = TypeVar("_F", bound=Callable[..., Any])
# In what torch says of a file of shared memory, and of a worker that was killed for want of it.
_OF_SHARED_MEMORY = ("</torch_", "workers are out of shared memory")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a module is a batch norm of any number of dimensions."""
    return isinstance(module, _BatchNorm)


def is_convolution(module: nn.Module) -> bool:
    """Whether a module is a convolution of any number of dimensions, transposed or not."""
    return isinstance(module, _ConvNd)


def is_operation(function: Any) -> bool:
    """Whether what a mode sees is one operation, and not a function of functions such as `torch.cond`."""
    return isinstance(function, torch._ops.OpOverload)


def is_wrapper(kind: type) -> bool:
    """Whether tensors of a class consist of plain ones, on which the class's own dispatch calls operations."""
    return is_traceable_wrapper_subclass_type(kind)


def any_mode() -> bool:
    """Whether a mode of torch's dispatcher is active in this thread."""
    return _get_current_dispatch_mode() is not None


def end_mode(mode: DispatchMode) -> None:
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


def _pop_modes(until: DispatchMode | None = None) -> list[Any]:
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

    def started(*_: object) -> None:
        entered.enter_context(around())

    def ended(*_: object) -> None:
        entered.close()

    callback_handler.register_start_callback(started)
    callback_handler.register_end_callback(ended)

    def stop() -> None:
        callback_handler.remove_start_callback(started)
        callback_handler.remove_end_callback(ended)

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


def hook_dicts(module: nn.Module) -> list[dict[int, Any]]:
    """The module's own dictionaries of forward and backward hooks; they are empty where there are none."""
    return [getattr(module, name) for name in _HOOKS]


def disable_dynamo(function: _F) -> _F:
    """Have torch.compile run a function as it is.

    `torch.compiler.disable` does the same and imports torch._dynamo, which takes seconds, when it decorates. This one
    imports it at the first call.
    """
    return cast(_F, torch._disable_dynamo(function))


def flatten_cudnn_weights(weights: Sequence[nn.Parameter], mode: str, hidden_size: int, layers: int) -> bool:
    """Put the weights of a recurrent network on a GPU into one block of memory, as `nn.LSTM.flatten_parameters` does.

    `weights` are four a layer, lowest layer first. `mode` is cuDNN's name of the kind of cell: `LSTM` or `RNN_TANH`.
    Returns False, with nothing changed, where cuDNN does not run these weights.
    """
    from torch.backends.cudnn import rnn

    usable = all(weight.is_cuda and torch.backends.cudnn.is_acceptable(weight) for weight in weights)
    if not usable or not torch._use_cudnn_rnn_flatten_weight():
        return False
    first = weights[0]
    with torch.no_grad(), torch.cuda.device_of(first):
        torch._cudnn_rnn_flatten_weight(
            list(weights), 4, first.shape[1], rnn.get_cudnn_mode(mode), hidden_size, 0, layers, True, False
        )
    return True


def stored_values(tensor: Tensor) -> Tensor:
    """The values that a sparse tensor stores, as they are: several may be of one element. A dense tensor is returned."""
    return tensor._values() if tensor.layout == torch.sparse_coo else tensor


def non_finite_check(tensors: list[Tensor], flag: Tensor, one: Tensor) -> None:
    """Set `flag` to 1 on the device if any value is infinite or NaN, in one operation for each dtype among the tensors.

    `flag` and `one` are float32 scalars on the tensors' device. Gradient scalers use this operation while they unscale;
    a scale of `one` leaves the tensors as they are.
    """
    dtypes = {tensor.dtype for tensor in tensors}
    for dtype in dtypes:
        same = tensors if len(dtypes) == 1 else [tensor for tensor in tensors if tensor.dtype == dtype]
        torch._amp_foreach_non_finite_check_and_unscale_(same, flag, one)


def supports_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's `step` reads `found_inf` and `grad_scale` on the device: fused ones do."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


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
    return {kind: switch.fp32_precision for kind, switch in zip(PRODUCT_KINDS, switches, strict=True)}


def cannot_use_cuda_after_fork() -> bool:
    """Whether this process was forked from one that had used CUDA, if only to count devices."""
    return torch.cuda._is_in_bad_fork()


def sleep_on_cuda(cycles: int) -> None:
    """Submit a kernel to the current stream that counts so many cycles of one multiprocessor."""
    torch.cuda._sleep(cycles)


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


def next_autograd_number() -> int:
    """The number that autograd gives to the next operation of this thread; the one that runs has the number before."""
    return torch._C._autograd._get_sequence_nr()


def running_autograd_number() -> int | None:
    """The number of the forward operation whose gradient this thread computes now; None outside of a backward pass."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def storage_id(storage: torch.UntypedStorage) -> int:
    """What tells a storage from others that exist at the same time."""
    return storage._cdata


@contextlib.contextmanager
def saved_tensors(saved: Callable[[Tensor], None]) -> Iterator[None]:
    """Call a function with every tensor that autograd saves in this thread, as long as no inner hooks take it.

    The step does not change, but for two things: a saved tensor that is then changed in place is not reported, and
    nothing is seen within `torch.func.grad` and its kind, which refuse to run under such hooks.
    """
    graph = torch.autograd.graph

    def pack(tensor: Tensor) -> Tensor:
        saved(tensor)
        return tensor.detach()  # the tensor itself would keep its own node alive

    hooks, disable, depth = graph.saved_tensors_hooks(pack, lambda tensor: tensor), graph.disable_saved_tensors_hooks, 0

    @contextlib.contextmanager
    def without_hooks(error_message: str) -> Iterator[None]:
        nonlocal depth
        if not depth:
            hooks.__exit__()
        depth += 1
        try:
            with disable(error_message):
                yield
        finally:
            depth -= 1
            if not depth:
                hooks.__enter__()

    with hooks:
        graph.disable_saved_tensors_hooks = without_hooks
        try:
            yield
        finally:
            graph.disable_saved_tensors_hooks = disable


def lay_out_channels_last(network: nn.Module) -> None:
    """Have the weights of 2-D convolutions lie channels last. `Module.to` refuses those of 3-D ones, of five dimensions."""
    for tensor in (*network.parameters(), *network.buffers()):
        if tensor.dim() == 4:
            tensor.data = tensor.data.to(memory_format=torch.channels_last)
