"""What a training step does: the operations that torch dispatches in it, what each computes and moves, and its time.

`OperationRecorder` passes every operation of a real step through, on the device that trains, and notes it. So a fused
LSTM is one operation, and an optimizer that updates all parameters at once is one, too.

Bytes are those of the tensors that an operation reads and writes. A view moves nothing and is no operation. A look-up of
rows (`embedding`, `index`, `gather`) reads as many bytes as it returns. `cold_bytes` are those that move through main
memory, by the rule of `traffic.Cache`.
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
from .dims import dims_of
from .flops import flops_of
from .traffic import IN_ROWS, Cache, address, tensors, touched_bytes

_COMPILED = re.compile(r"\b_orig_mod\.?|\._orig_mod\b")  # what torch.compile adds to the path of a module
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
# In-place operations that do not read what they overwrite.
_OVERWRITES = ("copy", "zero", "fill", "normal", "uniform", "bernoulli", "random", "exponential")
_OVERWRITES += ("_foreach_zero", "_foreach_copy")


class OperationRecorder(TorchDispatchMode):
    """Notes every operation while it is active, as a context manager. It changes no result.

    One recorder watches several steps, since a step finds in the cache what the one before has left there: call
    `next_step` before each. An error of its own ends the recording, and never the step; `error` has it.

    Args:
        module: whose parts give the paths; None for none.
        cache_bytes: of the device; None counts all bytes as cold.
        part: returns the part of the step that runs now.
    """

    supports_higher_order_operators = True  # torch.cond and the like are called, and what they consist of is not noted

    def __init__(
        self, module: nn.Module | None = None, cache_bytes: int | None = None, part: Callable[[], str] = lambda: "other"
    ):
        super().__init__()
        self.error: Exception | None = None
        self.uncounted: str | None = None  # the first operation of a forward or backward pass whose FLOPs are not known
        self.steps: list[list[OperationRow]] = []
        self._cache = Cache(cache_bytes)
        self._part = part
        named = module.named_modules() if module is not None else ()
        self._paths = {id(each): _COMPILED.sub("", path) for path, each in named}
        self._running: list[str] = [""]  # the paths of the modules that run now, outermost first
        self._made_in: dict[int, str] = {}  # autograd's number of an operation → the module that it ran in
        self._hooks: list[Any] = []

    def next_step(self) -> None:
        """Begin a step."""
        self.steps.append([])
        self._made_in.clear()

    def operations(self) -> list[OperationRow]:
        """The operations of a step, alike ones added up.

        Their work is that of the largest step. Their time is the median of alike calls × their number.

        Operations are alike if they have the same name, part, module, dtype and dims, and a call of each does as much. The
        median leaves out calls that other processes have interrupted. Empty after an error.
        """
        if self.error is not None or not any(self.steps):
            return []
        calls: dict[Any, list[OperationRow]] = {}
        for operation in (each for step in self.steps for each in step):
            calls.setdefault(_alike(operation), []).append(operation)
        whole = max(reversed(self.steps), key=lambda step: sum(each.bytes for each in step))
        return [
            replace(work, seconds=work.calls * median(call.seconds for call in calls[key]))
            for key, work in merge(whole, _alike).items()
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
        self._running = [""]

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        self._running.append(self._paths.get(id(module), self._running[-1]))

    def _leave_module(self, module: nn.Module, args: Any, result: Any) -> None:
        if len(self._running) > 1:
            self._running.pop()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):  # a function of functions such as `torch.cond`
            self._leave_uncounted(func)
            return func(*args, **kwargs)
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # the operations on the plain tensors in it are seen next
        start = time.perf_counter()
        result = func(*args, **kwargs)
        seconds = time.perf_counter() - start
        if self.error is None:
            try:
                self._note(func, args, kwargs, result, seconds)
            except Exception as error:  # noqa: BLE001 - anybody's operation, and the training must not end for it
                self.error = error
        return result

    def _note(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any, seconds: float) -> None:
        module, given = self._module(), func._schema.arguments
        base = func.overloadpacket.__name__.removesuffix("_")  # of an operation in place, too
        inputs = dict(zip((each.name for each in given), args, strict=False)) | dict(kwargs)
        written = {each.name for each in given if each.alias_info and each.alias_info.is_write}
        if base.startswith("_fused_"):
            written -= {"grads"}  # an optimizer's, which it only unscales, and only under a gradient scaler
        outputs = list(tensors(result))
        flops = flops_of(func, args, kwargs, inputs, result)
        if flops is None:
            self._leave_uncounted(func)
        moved, cold = self._traffic(base, inputs, written, outputs)
        if not moved:  # a view, or memory that is reserved and not written
            return
        dtypes = (_DTYPES.get(tensor.dtype) for tensor in (*outputs, *tensors(list(inputs.values()))))
        dtype = next(filter(None, dtypes), "other")
        dims = dims_of(base, inputs, outputs) if func.namespace == "aten" else ()
        name = f"{func.namespace}.{func.overloadpacket.__name__}"
        row = OperationRow(name, module, self._part(), dtype, dims, 1, flops or 0, moved, cold, seconds)
        self.steps[-1].append(row)

    def _leave_uncounted(self, func: Any) -> None:
        if self.uncounted is None and self._part() in ("forward", "backward"):
            self.uncounted = str(func)

    def _traffic(
        self, base: str, inputs: Mapping[str, Any], written: set[str], outputs: list[Tensor]
    ) -> tuple[int, float]:
        """The bytes that a call reads and writes, and those of them through main memory; `written` are the arguments it writes."""
        given = {name: list(tensors(value)) for name, value in inputs.items()}
        places = {address(tensor.untyped_storage()) for each in given.values() for tensor in each}
        results = [tensor for tensor in outputs if address(tensor.untyped_storage()) not in places]
        if base.removeprefix("new_").startswith(("empty", "_empty")):  # which hold no values yet
            results = []
        if not results and not written:
            return 0, 0
        total, cold = 0, 0.0
        for position, (name, each) in enumerate(given.items()):
            times = 2 if name in written and base not in _OVERWRITES and written != {"out"} else 1  # read and written
            if position == 0 and base in IN_ROWS:
                touched = sum(map(touched_bytes, results or [one for other in list(given)[1:] for one in given[other]]))
                for table in each:
                    size = times * min(touched_bytes(table), touched)
                    total, cold = total + size, cold + self._cache.cold_bytes_of_rows(table, size)
            else:
                for tensor in each:
                    size = touched_bytes(tensor)
                    total, cold = total + times * size, cold + times * self._cache.cold_bytes(tensor, size)
        for tensor in results:
            size = touched_bytes(tensor)
            total, cold = total + size, cold + self._cache.cold_bytes(tensor, size, is_new=True)
        return total, cold

    def _module(self) -> str:
        """The module that runs now; in the backward pass the one whose forward operation made the running node."""
        node = torch._C._current_autograd_node()
        if node is not None:
            return self._made_in.get(node._sequence_nr(), "")
        number = torch._C._autograd._get_sequence_nr() - 1  # of the operation that runs
        self._made_in.setdefault(number, self._running[-1])
        return self._running[-1]


def _alike(operation: OperationRow) -> tuple[Any, ...]:
    where = operation.name, operation.part, operation.module, operation.dtype
    return *where, operation.flops, operation.bytes, operation.dims
