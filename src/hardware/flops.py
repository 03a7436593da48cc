"""How many FLOPs a training step takes, counted without doing any of them.

A copy of the module runs its own `training_step` and `backward` once on meta tensors, which have shapes but no memory,
under torch's own FlopCounterMode. The module itself, its trainer and the random states are not touched.

What counts is what everybody counts: matrix products, convolutions and attention, a multiply-add as two. Element-wise
operations, the optimizer and torchmetrics' metrics are left out. Causal attention counts as if nothing were masked.
Activation checkpointing counts as executed: what it computes again is part of the backward pass.

A recurrent module of torch's own needs no formula: on meta tensors nn.LSTM, nn.GRU and nn.RNN fall apart into the
products that the fused kernels do, where on a CPU or a GPU the counter would see one operation that it takes for free.
"""

import contextlib
import copy
import logging
import re
import sys
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from types import FunctionType, MethodType
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count
from torchmetrics import Metric, MetricCollection

_log = logging.getLogger(__name__)

Flops = tuple[int, ...]  # forward, backward; of the forward ones those in convolutions, and in recurrent kernels

# On meta tensors an operation takes about 0.1 ms of a processor: after 0.3 s a loop over cells is counted by its length
# instead, and what would take longer than half a minute is not counted at all.
_QUICK_OPERATIONS = 3_000
_MOST_OPERATIONS = 300_000
_SHORTEST_SEQUENCE = 64


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of one training step, per sample.

    Attributes:
        forward: of everything up to the loss.
        backward: of the gradients; fewer than twice the forward pass, since the first layer passes none on.
        convolution: of the forward pass, in convolutions.
        recurrent: of the forward pass, in torch's functions for whole sequences (`torch.lstm`, …), which a GPU runs by
            cuDNN. What is unrolled step by step consists of matrix products.
    """

    forward: float
    backward: float
    convolution: float = field(default=0.0, compare=False)
    recurrent: float = field(default=0.0, compare=False)

    @property
    def total(self) -> float:
        """Of the whole step but the optimizer; times the batch size, what the device has to do."""
        return self.forward + self.backward

    @property
    def shares(self) -> dict[str, float]:
        """`matmul`, `convolution` and `recurrent` as fractions of the forward pass; those of the backward are alike."""
        convolution, recurrent = self.convolution / self.forward, self.recurrent / self.forward
        return {"matmul": 1 - convolution - recurrent, "convolution": convolution, "recurrent": recurrent}


def count_step(module: LightningModule, batch: Any, batch_size: int | None = None) -> StepFlops | None:
    """Count the FLOPs of one training step of any LightningModule, as it is now: its modes, its frozen layers.

    The batch is taken as it is, not cut to a sample or two: meta tensors cost nothing, and only so it is exact for
    losses between the samples of a batch, for batch norm, and for whatever else does not grow with the batch.

    Where the step is thousands of operations (a Python loop over cells), it is counted at three short lengths of the
    sequence instead. If those lie exactly on a line, the whole is taken to lie on it too; if not, the whole is counted.

    Args:
        module: attached to its trainer or not.
        batch: what its `training_step` gets, on any device.
        batch_size: the samples in it; by default what Lightning takes it for, the first dimension of its first tensor.

    Returns:
        None where it cannot be known: steps that depend on the data (`.item()`, `nonzero`, an `if` on a tensor), that
        do work of unknown size (custom kernels, FFTs, decompositions), or that cannot be copied. Better no number
        than a wrong one. The first process logs the reason at level INFO.
    """
    with _side_effects_contained():
        try:
            size = batch_size or extract_batch_size(batch)
            counts = _count_quickly(module, batch, size)
        except Exception as error:  # noqa: BLE001 - a stranger's step, on tensors it was not written for
            why = f"{type(error).__name__}: {error}"
            rank_zero_only(_log.info)("the FLOPs of %s cannot be counted: %s", type(module).__name__, why)
            return None
    return StepFlops(*(count / size for count in counts)) if counts[0] else None


@contextlib.contextmanager
def _side_effects_contained() -> Iterator[None]:
    """Random states as before, no warnings about meta tensors, nothing compiled."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(isolate_rng(include_cuda=torch.cuda.is_initialized()))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if "torch._dynamo" in sys.modules:  # whoever compiles has imported it already, which takes seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _count_quickly(module: LightningModule, batch: Any, batch_size: int) -> Flops:
    length = _sequence_length(batch, batch_size)
    if length is None:
        return _count(module, batch, _MOST_OPERATIONS)
    try:
        return _count(module, batch, _QUICK_OPERATIONS)
    except _TooManyOperationsError:
        return _count_by_length(module, batch, length) or _count(module, batch, _MOST_OPERATIONS)


def _count(module: LightningModule, batch: Any, most_operations: int, cut: tuple[int, int] | None = None) -> Flops:
    """Run one step of a copy; `cut=(T, t)` shortens sequences from T to t steps."""
    twin, batch = _twin(module, batch)
    if cut:
        batch = apply_to_collection(batch, Tensor, _shortened, *cut)
    counter = FlopCounterMode(display=False, custom_mapping=_FORMULAS)
    counter.mod_tracker = _NoModules()
    shares = _Shares(counter)
    watch = _Watch(counter.flop_registry, most_operations)
    arguments = (batch, 0) if is_param_in_hook_signature(twin.training_step, "batch_idx", min_args=2) else (batch,)
    with torch.inference_mode(False), torch.enable_grad(), torch.device("meta"), watch, counter, shares:
        result = twin.training_step(*arguments)
        if twin.automatic_optimization:
            twin.backward(result["loss"] if isinstance(result, Mapping) else result)
    forward = counter.get_total_flops() - shares.backward
    return forward, shares.backward, shares.convolution, shares.recurrent


# --- long sequences -----------------------------------------------------------------------------------------------


def _count_by_length(module: LightningModule, batch: Any, length: int) -> Flops | None:
    """Extend the counts at three short lengths to the real one, if the three are on a line; else None.

    The short lengths leave the same remainder as the real one, so that a stride of 2, 4 or 8 rounds alike.
    """
    lengths = [length % 8 + base for base in (8, 16, 40)]
    try:
        counts = [_count(module, batch, _MOST_OPERATIONS, (length, short)) for short in lengths]
    except Exception:  # noqa: BLE001 - a model that takes one length only
        return None
    extended = [_extended(lengths, parts, length) for parts in zip(*counts, strict=True)]
    return None if None in extended else tuple(extended)


def _sequence_length(batch: Any, batch_size: int) -> int | None:
    """The longest of the first two dimensions of the batch's tensors, if it can only be time."""
    lengths: list[int] = []
    apply_to_collection(batch, Tensor, lambda tensor: lengths.extend(tensor.shape[:2] if tensor.dim() > 1 else ()))
    longest = max((length for length in lengths if length != batch_size), default=0)
    return longest if longest >= _SHORTEST_SEQUENCE else None


def _shortened(tensor: Tensor, length: int, short: int) -> Tensor:
    for dim in range(min(2, tensor.dim())):
        if tensor.shape[dim] == length:
            tensor = tensor.narrow(dim, 0, short)
    return tensor


def _extended(lengths: list[int], counts: tuple[int, ...], length: int) -> int | None:
    """The count at `length` of the line through three points; None if they are on none."""
    (first, second, third), (a, b, c) = lengths, counts
    slope, remainder = divmod(b - a, second - first)
    if remainder or c != a + slope * (third - first):
        return None
    return a + slope * (length - first)


# --- what is counted ----------------------------------------------------------------------------------------------


def _convolution_backward(
    grad_out: list[int], x: list[int], w: list[int], *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    """Each of the two gradients takes as many as the forward pass; torch's formula is wrong by a factor of `groups`."""
    transposed, output_mask = args[4], args[7]
    return sum(output_mask[:2]) * conv_flop_count(x, w, grad_out, transposed)


def _matrix_vector(matrix: list[int], vector: list[int], **kwargs: Any) -> int:
    return 2 * prod(matrix)


def _dot(a: list[int], b: list[int], **kwargs: Any) -> int:
    return 2 * prod(a)


_aten = torch.ops.aten
# Beside torch's own: what it gets wrong, and the products of vectors, which it takes for free.
_FORMULAS = {
    _aten.convolution_backward: _convolution_backward,
    _aten.mv: _matrix_vector,
    _aten.addmv: lambda bias, matrix, vector, **kwargs: _matrix_vector(matrix, vector),
    _aten.dot: _dot,
    _aten.vdot: _dot,
}

# Operations of torch's own that do more than a few FLOPs an element and have no formula.
_UNKNOWN_WORK = re.compile(
    r".*mm(_v2)?_?"
    r"|.*(rnn|lstm|gru|attention|matmul|cdist|pdist|_fft_|cholesky|svd|spsolve|lstsq|geqrf|ormqr|orgqr|pack_mm).*"
    r"|_?linalg_(?!vector_norm|cross|diagonal).*|_trilinear|triangular_solve|lu_solve|.*conv(_|\d|olution).*"
    r"|(cudnn|miopen|mkldnn|mps|_mps|_nnpack|_sparse|quantized|fbgemm)_.*|_transformer_encoder_layer_fwd"
)
_POINTWISE = re.compile(r"_thnn_.*")  # the gates of fused cells, without their products


class _NotCountableError(Exception):
    """The step did something whose FLOPs are not known."""


class _TooManyOperationsError(Exception):
    """The step is longer than it may be."""


class _Watch(TorchDispatchMode):
    """Sees every operation after the counter, and ends what cannot be counted truly.

    It also keeps the original safe: no operation on a tensor that has memory is let through.
    """

    def __init__(self, formulas: Mapping[Any, Any], most_operations: int):
        super().__init__()
        self._formulas = formulas
        self._left = most_operations
        self._free: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._left -= 1
        if self._left < 0:
            raise _TooManyOperationsError
        for value in (*args, *(kwargs or {}).values()):
            for tensor in value if isinstance(value, list | tuple) else (value,):
                if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                    raise _NotCountableError(f"{func} on a tensor that the copy does not own")
        if func not in self._free:
            self._check(func)
        return func(*args, **(kwargs or {}))

    def _check(self, func: Any) -> None:
        packet = func.overloadpacket
        name = packet.__name__
        if packet not in self._formulas and not _POINTWISE.fullmatch(name):
            if func.namespace not in ("aten", "prim", "prims", "profiler"):
                raise _NotCountableError(f"no formula for {func}")
            if _UNKNOWN_WORK.fullmatch(name):
                raise _NotCountableError(f"no formula for {func}")
        self._free.add(func)


class _NoModules(contextlib.nullcontext):
    """In place of the counter's ModuleTracker, which counts by module and fails under `autograd.grad`."""

    parents = ("Global",)


class _Shares(TorchFunctionMode):
    """Adds up what is counted inside `backward()` and `autograd.grad()`, whoever calls them, and outside of them inside
    convolutions and recurrent kernels."""

    def __init__(self, counter: FlopCounterMode):
        super().__init__()
        self._counter = counter
        self.backward = self.convolution = self.recurrent = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.backward, torch.autograd.grad):
            share = "backward"
        else:
            share = _KINDS.get(getattr(func, "__name__", ""))
        if share is None:
            return func(*args, **(kwargs or {}))
        before = self._counter.get_total_flops()
        result = func(*args, **(kwargs or {}))  # in which this mode is off: what it calls is not counted twice
        setattr(self, share, getattr(self, share) + self._counter.get_total_flops() - before)
        return result


_KINDS = {f"conv{transposed}{n}d": "convolution" for transposed in ("", "_transpose") for n in (1, 2, 3)}
_KINDS |= dict.fromkeys(("convolution", "_convolution"), "convolution")
_KINDS |= dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), "recurrent")


# --- the copy -----------------------------------------------------------------------------------------------------


def _twin(module: LightningModule, batch: Any) -> tuple[LightningModule, Any]:
    """A copy of the module and its batch, every tensor of which is on the meta device, and which logs nowhere."""
    trainer = module._trainer
    stand_in = _StandInTrainer(trainer)
    memo: dict[int, Any] = {id(trainer): stand_in} if trainer is not None else {}
    compiled = getattr(module, "_compiler_ctx", None)
    if compiled is not None:
        memo[id(compiled)] = {}
    hooks = [getattr(m, name) for m in module.modules() for name in _HOOKS]
    for hook in hooks:
        memo[id(hook)] = OrderedDict()
    optimizers = trainer.optimizers if trainer is not None and not module.automatic_optimization else []
    with _OnMeta():
        twin, batch, optimizers = copy.deepcopy((module, batch, list(optimizers)), memo)
        for hook in hooks:  # one that watches has nothing to do here; one that computes weights is an object of its own
            working = {k: h for k, h in hook.items() if not isinstance(h, FunctionType | MethodType)}
            memo[id(hook)].update(copy.deepcopy(working, memo))
    if compiled is not None:  # trainer.fit(torch.compile(module)) puts the original's methods here
        for name in ("forward", "training_step"):
            vars(twin).pop(name, None)
    twin.to("meta")  # no tensor moves; `self.device` does
    if trainer is not None:
        twin.trainer, stand_in.optimizers = stand_in, optimizers
    _mute(twin, optimizers or [_Silent()])
    return twin, batch


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _OnMeta(TorchFunctionMode):
    """While it is active, `copy.deepcopy` copies a tensor's shape, strides and type, and nothing else."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = _on_meta(tensor).requires_grad_(tensor.requires_grad)
            return memo[id(tensor)]
        if func is Tensor.clone:  # how a Parameter copies itself
            return _on_meta(args[0])
        return func(*args, **(kwargs or {}))


def _on_meta(tensor: Tensor) -> Tensor:
    if type(tensor) is not Tensor or tensor.layout != torch.strided:
        raise _NotCountableError(f"a {type(tensor).__name__} of layout {tensor.layout} among the tensors")
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _mute(twin: LightningModule, optimizers: list[Any]) -> None:
    """Have the copy log nothing, step no optimizer and measure no metric."""
    for optimizer in optimizers:
        optimizer.step = _call_closure
    for part in twin.modules():
        part._compiled_call_impl = None  # of `module.compile()`: it would call the original
        if isinstance(part, LightningModule):
            for name in ("log", "log_dict", "print", "clip_gradients"):
                setattr(part, name, _nothing)
            part.lr_schedulers = _Silent()
            part.manual_backward = part.backward
            part.optimizers = partial(_one_or_all, optimizers)
        elif isinstance(part, MetricCollection):
            part.forward, part.update, part.compute = partial(_zeros, list(part.keys())), _nothing, _nothing
        elif isinstance(part, Metric) and not part.is_differentiable:
            # Most check or count values, which meta tensors do not have; no loss is made of them.
            part.forward, part.update, part.compute = _zero, _nothing, _zero


def _one_or_all(optimizers: list[Any], use_pl_optimizer: bool = True) -> Any:
    return optimizers[0] if len(optimizers) == 1 else optimizers


def _call_closure(closure: Any = None) -> Any:
    return closure() if closure else None


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _zero(*args: Any, **kwargs: Any) -> Tensor:
    return torch.zeros((), device="meta")


def _zeros(names: list[str], *args: Any, **kwargs: Any) -> dict[str, Tensor]:
    return {name: _zero() for name in names}


class _Silent:
    """Takes any call and does nothing: in place of loggers and schedulers."""

    def __getattr__(self, name: str) -> "_Silent":
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> "_Silent":
        return self


class _StandInTrainer:
    """What a step may see of its trainer: the plain values (`global_step`, `world_size`, …), and nothing that acts."""

    def __init__(self, trainer: Any):
        self._real = trainer
        self.optimizers: list[Any] = []
        self.logger = _Silent()
        self.loggers: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._real, name)
        if isinstance(value, bool | int | float | str | None):
            return value
        raise AttributeError(f"trainer.{name}")
