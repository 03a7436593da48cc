"""The operations that torch dispatches in a training step: the FLOPs, bytes and time of each.

`OperationRecorder` runs every operation of a real step unchanged, on the training device, and records it. So a fused LSTM is
one operation, and so is an optimizer that updates all parameters at once.

Bytes are those of the tensors that an operation reads and writes. A view moves no bytes and does not count as an operation. A
look-up of rows (`embedding`, `index`, `gather`) reads as many bytes as it returns. `cold_bytes` move through main memory,
by the rule of `traffic.Cache`.
"""

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import median
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from typing_extensions import override

from ..records.operations import OperationRow, merge
from .dims import operation_dims
from .flops import count_flops
from .traffic import ROW_NAMES, Cache, address, tensors, touched_bytes

_COMPILED = re.compile(r"\b_orig_mod\.?|\._orig_mod\b")  # added by torch.compile to the path of a module
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
# In-place operations that do not read what they overwrite.
_OVERWRITES = ("copy", "zero", "fill", "normal", "uniform", "bernoulli", "random", "exponential")
_OVERWRITES += ("_foreach_zero", "_foreach_copy")


class OperationRecorder(TorchDispatchMode):
    """Context manager that records every operation while it is active. It changes no result.

    One recorder records several steps, since a step finds the bytes of the step before in the cache. Call `next_step` before each
    step. An error in the recorder ends the recording, but not the step; `error` holds it.

    Args:
        module: its submodules give the paths of operations; None for operations without paths.
        cache_bytes: size of the device's cache; None counts all bytes as cold.
        part: returns the current part of the step.
    """

    supports_higher_order_operators = True  # torch.cond and others run, but their inner operations are not recorded

    def __init__(
        self, module: nn.Module | None = None, cache_bytes: int | None = None, part: Callable[[], str] = lambda: "other"
    ):
        super().__init__()
        self.error: Exception | None = None
        self.uncounted: str | None = None  # first operation of a forward or backward pass with unknown FLOPs
        self.steps: list[list[OperationRow]] = []
        self._cache = Cache(cache_bytes)
        self._current_part = part
        named_modules = module.named_modules() if module is not None else ()
        self._paths = {id(part_module): _COMPILED.sub("", path) for path, part_module in named_modules}
        self._module_stack: list[str] = [""]  # paths of the running modules, outermost first
        self._module_by_sequence: dict[int, str] = {}  # autograd's sequence number of an operation → path of its module
        self._hooks: list[Any] = []

    def next_step(self) -> None:
        """Begin the next step."""
        self.steps.append([])
        self._module_by_sequence.clear()

    def operations(self) -> list[OperationRow]:
        """Return the operations of one step, where like operations are merged; empty after an error.

        Operations are alike if they have the same name, part, module, dtype and dims, and the same FLOPs and bytes in a call.
        FLOPs and bytes are those of the largest step. The time is the median of like calls × their number: a median leaves out
        calls that other processes have interrupted.
        """
        if self.error is not None or not any(self.steps):
            return []
        calls: dict[Any, list[OperationRow]] = {}
        for operation in (operation for step in self.steps for operation in step):
            calls.setdefault(_call_key(operation), []).append(operation)
        largest_step = max(reversed(self.steps), key=lambda step: sum(operation.bytes for operation in step))
        return [
            replace(operation, seconds=operation.calls * median(call.seconds for call in calls[key]))
            for key, operation in merge(largest_step, _call_key).items()
        ]

    @override
    def __enter__(self) -> Self:
        if not self.steps:
            self.next_step()
        self._hooks = [
            nn.modules.module.register_module_forward_pre_hook(self._enter_module),
            nn.modules.module.register_module_forward_hook(self._leave_module, always_call=True),
        ]
        super().__enter__()
        return self

    @override
    def __exit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        for hook in self._hooks:
            hook.remove()
        self._module_stack = [""]

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        self._module_stack.append(self._paths.get(id(module), self._module_stack[-1]))

    def _leave_module(self, module: nn.Module, args: Any, result: Any) -> None:
        if len(self._module_stack) > 1:
            self._module_stack.pop()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):  # a higher-order operator such as `torch.cond`
            self._mark_uncounted(func)
            return func(*args, **kwargs)
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # torch then dispatches the operations on the plain tensors inside
        start = time.perf_counter()
        result = func(*args, **kwargs)
        seconds = time.perf_counter() - start
        if self.error is None:
            try:
                self._note(func, args, kwargs, result, seconds)
            except Exception as error:  # noqa: BLE001 - a custom operation may raise anything, and the training must go on
                self.error = error
        return result

    def _note(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any, seconds: float) -> None:
        module, arguments = self._find_module(), func._schema.arguments
        base = func.overloadpacket.__name__.removesuffix("_")  # also for an in-place operation
        inputs = dict(zip((argument.name for argument in arguments), args, strict=False)) | dict(kwargs)
        written = {argument.name for argument in arguments if argument.alias_info and argument.alias_info.is_write}
        if base.startswith("_fused_"):
            written -= {"grads"}  # a fused optimizer only unscales them, and only under a gradient scaler
        outputs = list(tensors(result))
        flops = count_flops(func, args, kwargs, inputs, result)
        if flops is None:
            self._mark_uncounted(func)
        moved, cold = self._traffic(base, inputs, written, outputs)
        if not moved:  # a view, or an allocation without a write
            return
        dtypes = (_DTYPES.get(tensor.dtype) for tensor in (*outputs, *tensors(list(inputs.values()))))
        dtype = next(filter(None, dtypes), "other")
        dims = operation_dims(base, inputs, outputs) if func.namespace == "aten" else ()
        name = f"{func.namespace}.{func.overloadpacket.__name__}"
        row = OperationRow(name, module, self._current_part(), dtype, dims, 1, flops or 0, moved, cold, seconds)
        self.steps[-1].append(row)

    def _mark_uncounted(self, func: Any) -> None:
        if self.uncounted is None and self._current_part() in ("forward", "backward"):
            self.uncounted = str(func)

    def _traffic(
        self, base: str, inputs: Mapping[str, Any], written: set[str], outputs: list[Tensor]
    ) -> tuple[int, float]:
        """Return the bytes that a call reads and writes, and those through main memory; `written` names the arguments it writes."""
        arguments = {name: list(tensors(value)) for name, value in inputs.items()}
        addresses = {address(tensor.untyped_storage()) for group in arguments.values() for tensor in group}
        new_tensors = [tensor for tensor in outputs if address(tensor.untyped_storage()) not in addresses]
        if base.removeprefix("new_").startswith(("empty", "_empty")):  # uninitialized tensors
            new_tensors = []
        if not new_tensors and not written:
            return 0, 0
        total, cold = 0, 0.0
        for position, (name, group) in enumerate(arguments.items()):
            accesses = 2 if name in written and base not in _OVERWRITES and written != {"out"} else 1
            if position == 0 and base in ROW_NAMES:
                rows = new_tensors or [tensor for others in list(arguments.values())[1:] for tensor in others]
                row_bytes = sum(map(touched_bytes, rows))
                for table in group:
                    size = accesses * min(touched_bytes(table), row_bytes)
                    total, cold = total + size, cold + self._cache.cold_bytes_of_rows(table, size)
            else:
                for tensor in group:
                    size = touched_bytes(tensor)
                    total, cold = total + accesses * size, cold + accesses * self._cache.cold_bytes(tensor, size)
        for tensor in new_tensors:
            size = touched_bytes(tensor)
            total, cold = total + size, cold + self._cache.cold_bytes(tensor, size, is_new=True)
        return total, cold

    def _find_module(self) -> str:
        """Return the path of the running module; in the backward pass, of the module whose operation created the running node."""
        node = torch._C._current_autograd_node()
        if node is not None:
            return self._module_by_sequence.get(node._sequence_nr(), "")
        number = torch._C._autograd._get_sequence_nr() - 1  # of the running operation
        self._module_by_sequence.setdefault(number, self._module_stack[-1])
        return self._module_stack[-1]


def _call_key(operation: OperationRow) -> tuple[Any, ...]:
    origin = operation.name, operation.part, operation.module, operation.dtype
    return *origin, operation.flops, operation.bytes, operation.dims
