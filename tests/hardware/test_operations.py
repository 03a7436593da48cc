"""What the recorder notes of a real step: operations, FLOPs, bytes and dimensions by closed forms; parts, modules, cache."""

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from batchscope.hardware.dims import operation_dims
from batchscope.hardware.operations import OperationRecorder
from batchscope.records.operations import OperationRow, merge

B, IN, OUT, N = 8, 32, 16, 1000
FLOAT = 4  # bytes


def recorded(step, module=None, cache_bytes=None, steps=1, part=lambda: "other") -> list[OperationRow]:
    recorder = OperationRecorder(module, cache_bytes, part)
    for _ in range(steps):
        recorder.next_step()
        with recorder:
            step()
    assert recorder.error is None
    return recorder.operations()


def only(operations: list[OperationRow], name: str) -> OperationRow:
    return merge([row for row in operations if row.name == f"aten.{name}"], lambda row: row.name)[f"aten.{name}"]


def forward(function: Callable[..., Any], *shapes: tuple[int, ...]) -> Callable[[], Any]:
    """A step that calls a function or a module with random tensors of these shapes."""
    tensors = [torch.randn(shape) for shape in shapes]
    return lambda: function(*tensors)


def backward(module: nn.Module, *shape: int) -> Callable[[], Any]:
    """A step whose backward pass goes down to the input of the module."""
    x = torch.randn(shape, requires_grad=True)

    def step() -> None:
        result = module(x)
        (result[0] if isinstance(result, tuple) else result).sum().backward()

    return step


def fused_adam() -> Callable[[], Any]:
    parameter = nn.Parameter(torch.randn(N))
    parameter.grad = torch.randn(N)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    optimizer.step()
    return optimizer.step


CONV, GROUPS = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(4, 8, 3, groups=2)
MOVED = FLOAT * (B * IN + IN * OUT + OUT + B * OUT), FLOAT * (B * 3 * 100 + 8 * 3 * 9 + 8 + B * 8 * 100)
TABLE = nn.Embedding(10_000, 16)
LSTM = 2 * 5 * B * 4 * 12 * (IN + 12)  # one layer
WORK = {  # a step, and the name of one of its operations → fields of its row
    "a linear layer": (
        forward(nn.Linear(IN, OUT), (B, IN)), "addmm",
        {"calls": 1, "flops": 2 * B * IN * OUT, "bytes": MOVED[0], "dims": (B, OUT, IN)},
    ),
    "its backward pass is two products": (backward(nn.Linear(IN, OUT), B, IN), "mm", {"calls": 2, "flops": 4 * B * IN * OUT}),
    "a convolution moves images and weights once": (
        forward(CONV, (B, 3, 10, 10)), "convolution",
        {"flops": 2 * B * 8 * 100 * 3 * 9, "bytes": MOVED[1], "dims": (B, 8, 10, 10, 3, 3, 3)},
    ),
    "of a group's channels": (forward(GROUPS, (2, 4, 10, 12)), "convolution", {"dims": (2, 8, 8, 10, 2, 3, 3)}),
    "its backward pass": (backward(GROUPS, 2, 4, 10, 12), "convolution_backward", {"dims": (2, 8, 8, 10, 2, 3, 3)}),
    "a batch of products": (forward(torch.bmm, (3, 4, 5), (3, 5, 6)), "bmm", {"dims": (3, 4, 6, 5)}),
    "layer norm": (forward(nn.LayerNorm((3, 4)), (5, 3, 4)), "native_layer_norm", {"dims": (5, 12), "flops": 0}),
    "softmax": (forward(nn.Softmax(dim=1), (5, 3, 4)), "_softmax", {"dims": (20, 3)}),
    "elementwise has no dimensions": (forward(nn.ReLU(), (5, 3, 4)), "relu", {"dims": ()}),
    "a fused LSTM is one operation a layer": (
        forward(nn.LSTM(IN, 12, num_layers=2), (5, B, IN)), "mkldnn_rnn_layer",
        {"calls": 2, "flops": LSTM + 2 * 5 * B * 4 * 12 * (12 + 12), "dims": (5, B, IN, 12)},
    ),
    "its backward pass does twice the work but for the first state": (
        backward(nn.LSTM(IN, 12), 5, B, IN), "mkldnn_rnn_layer_backward", {"flops": 2 * LSTM - 2 * B * 12 * 4 * 12},
    ),
    "elementwise: reads and writes": (forward(lambda x: x * x, (N,)), "mul", {"bytes": FLOAT * 3 * N}),
    "a number is not read": (forward(lambda x: x + 1, (N,)), "add", {"bytes": FLOAT * 2 * N}),
    "in place: reads and writes the same": (forward(lambda x: x.mul_(2), (N,)), "mul_", {"bytes": FLOAT * 2 * N}),
    "what is overwritten is not read": (forward(lambda x: x.zero_(), (N,)), "zero_", {"bytes": FLOAT * N}),
    "a copy": (forward(lambda x, y: x.copy_(y), (N,), (N,)), "copy_", {"bytes": FLOAT * 2 * N}),
    "an expanded tensor is read once": (
        forward(lambda x, row: x + row.expand(N, 10), (N, 10), (1, 10)), "add", {"bytes": FLOAT * (2 * 10 * N + 10)},
    ),
    "a look-up reads the rows that it returns": (
        lambda: TABLE(torch.arange(50)), "embedding", {"bytes": FLOAT * 2 * 50 * 16 + 8 * 50},
    ),
    "of a column its own numbers": (forward(lambda x: x[:, 0].sum(), (64, 64)), "sum", {"bytes": FLOAT * (64 + 1)}),
    "fused Adam: weights, gradients and both moments": (
        fused_adam(), "_fused_adamw_", {"calls": 1, "bytes": FLOAT * N * (1 + 2 * 3) + FLOAT},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WORK)
def test_an_operation_has_the_work_and_the_dimensions_of_its_closed_form(name):
    step, operation, expected = WORK[name]
    row = only(recorded(step), operation)
    assert {key: getattr(row, key) for key in expected} == expected


def test_a_recurrent_kernel_has_steps_samples_features_and_hidden():
    arguments = {"input": torch.empty(4, 11, 5), "hidden_size": 7}
    # Torch has swapped the first two dimensions for oneDNN's kernel.
    assert operation_dims("mkldnn_rnn_layer", arguments | {"batch_first": True}, []) == (4, 11, 5, 7)
    assert operation_dims("_cudnn_rnn", arguments | {"batch_first": True}, []) == (11, 4, 5, 7)
    assert operation_dims("_cudnn_rnn", arguments | {"batch_first": False}, []) == (4, 11, 5, 7)
    packed = {"input": torch.empty(30, 5), "hidden_size": 7, "batch_sizes": [12, 10, 8]}
    assert operation_dims("_cudnn_rnn", packed, []) == (3, 10, 5, 7)
    assert operation_dims("addmm", arguments, []) == ()  # the arguments are not those of a product


def test_a_view_and_reserved_memory_are_no_operations():
    x = torch.randn(10, 10)
    assert recorded(lambda: (x.t(), x[2:], x.view(-1), x.detach(), torch.empty(100), torch.empty_like(x))) == []


def test_sparse_gradients_are_passed_over():
    table, indices = nn.Embedding(1000, IN, sparse=True), torch.arange(B)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    assert recorded(lambda: (table(indices).mean().backward(), optimizer.step()))


def in_place(number: int) -> Callable[[], Any]:
    tensors = [torch.randn(1000) for _ in range(number)]
    return lambda: [x.mul_(2) for x in tensors]


def rows_of(table: Tensor) -> Callable[[], Any]:
    indices, values = torch.arange(50), torch.ones(50, 16)
    return lambda: table.index_add_(0, indices, values)


KEPT = []
ROWS = 50 * (FLOAT * 16 + 8)  # bytes of the given rows and their indices; rows of the table are read and written
COLD = {  # a step on tensors of 4 KB, an operation, the cache in bytes → all bytes, and those from memory
    "the cache holds them all": (in_place(1), "mul_", 10_000, 8_000, 0),
    "no cache": (in_place(1), "mul_", None, 8_000, 8_000),
    "each is larger than the cache": (in_place(2), "mul_", 1_000, 16_000, 16_000),
    "together they are larger than the cache": (in_place(5), "mul_", 10_000, 40_000, 40_000),
    "a new one fits into the cache": (lambda: KEPT.append(torch.ones(1000) * 2), "mul", 100_000, 8_000, 0),
    "a tenth of a table fits into the cache": (rows_of(torch.ones(10_000, 16)), "index_add_", 64_000, 3 * ROWS, 1.8 * ROWS),
    "a table fits into the cache": (rows_of(torch.ones(1_000, 16)), "index_add_", 64_000, 3 * ROWS, 0),
}  # fmt: skip


@pytest.mark.parametrize("case", COLD)
def test_a_tensor_is_cold_once_more_than_the_cache_has_come_since(case):
    step, name, cache_bytes, total, cold = COLD[case]
    row = only(recorded(step, cache_bytes=cache_bytes, steps=2), name)
    assert (row.bytes, row.cold_bytes) == (total, pytest.approx(cold))


def test_an_operation_belongs_to_its_module_in_both_passes_and_to_the_part_that_runs():
    compiled = nn.ModuleDict({"_orig_mod": nn.Linear(IN, OUT)})  # as torch.compile wraps it
    net = nn.ModuleList([nn.Linear(IN, IN), nn.ModuleList([nn.ReLU(), compiled])])
    x: Tensor = torch.randn(B, IN)
    modules = {}
    for row in recorded(lambda: compiled["_orig_mod"](net[1][0](net[0](x))).sum().backward(), net):
        modules.setdefault(row.name.removeprefix("aten."), set()).add(row.module)
    assert modules["addmm"] == modules["mm"] == {"0", "1.1"}
    assert modules["threshold_backward"] == {"1.0"}
    parts = iter(["forward", "backward"])
    rows = recorded(lambda: (x + 1, x * 2), part=lambda: next(parts))
    assert {row.name: row.part for row in rows} == {"aten.add": "forward", "aten.mul": "backward"}


def test_the_type_is_that_of_the_numbers():
    a, b = torch.randn(4, 4, dtype=torch.bfloat16), torch.randn(4, 4, dtype=torch.float64)
    dtypes = {row.name: row.dtype for row in recorded(lambda: (a @ a, b + b, torch.arange(4) * 2))}
    assert (dtypes["aten.mm"], dtypes["aten.add"], dtypes["aten.mul"]) == ("bf16", "fp64", "other")


def test_alike_operations_are_added_up_and_of_steps_that_differ_the_largest_counts():
    x = torch.randn(10)
    (row,) = recorded(lambda: [x + 1 for _ in range(5)])
    assert row.calls == 5 and row.seconds > 0
    batches, layer = iter([8, 64, 1]), nn.Linear(IN, OUT)
    row = only(recorded(lambda: layer(torch.ones(next(batches), IN)), steps=3), "addmm")
    assert row.flops == 2 * 64 * IN * OUT


def test_operators_of_functions_run_unnoted():
    x = torch.tensor([1.0])
    results = []
    recorded(lambda: results.append(torch.cond(x[0] > 0, lambda a: a + 1, lambda a: a - 1, (x[:1],)).item()))
    assert results == [2]


def test_an_error_of_the_recorder_ends_the_recording_and_one_of_the_step_is_the_steps_own():
    hooks = len(nn.modules.module._global_forward_hooks)
    recorder = OperationRecorder(part=Mock(side_effect=ZeroDivisionError))
    with pytest.raises(RuntimeError, match="size"), recorder:
        assert torch.ones(2).add(1).tolist() == [2, 2]
        torch.ones(2) + torch.ones(3)
    assert isinstance(recorder.error, ZeroDivisionError)
    assert recorder.operations() == []
    assert len(nn.modules.module._global_forward_hooks) == hooks
