"""What the recorder notes of a real step: operations, FLOPs and bytes by closed forms, parts, modules, the cache."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from batchscope.hardware.operations import OperationRecorder, merge
from batchscope.records.operations import OperationRow

B, IN, OUT, N = 8, 32, 16, 1000
FLOAT = 4  # bytes


def recorded(
    step: Callable[[], Any],
    module: nn.Module | None = None,
    cache_bytes: int | None = None,
    steps: int = 1,
    part: Callable[[], str] = lambda: "other",
) -> list[OperationRow]:
    recorder = OperationRecorder(module, cache_bytes, part)
    for _ in range(steps):
        recorder.next_step()
        with recorder:
            step()
    assert recorder.error is None
    return recorder.operations()


def only(operations: list[OperationRow], name: str) -> OperationRow:
    return merge([each for each in operations if each.name == f"aten.{name}"], lambda each: each.name)[f"aten.{name}"]


def linear() -> Callable[[], Any]:
    layer, x = nn.Linear(IN, OUT), torch.randn(B, IN)
    return lambda: layer(x)


def linear_backward() -> Callable[[], Any]:
    layer, x = nn.Linear(IN, OUT), torch.randn(B, IN, requires_grad=True)
    return lambda: layer(x).sum().backward()


def convolution() -> Callable[[], Any]:
    layer, x = nn.Conv2d(3, 8, 3, padding=1), torch.randn(B, 3, 10, 10)
    return lambda: layer(x)


def lstm() -> Callable[[], Any]:
    layers, x = nn.LSTM(IN, 12, num_layers=2), torch.randn(5, B, IN)
    return lambda: layers(x)


def look_up() -> Callable[[], Any]:
    table, rows = nn.Embedding(10_000, 16), torch.arange(50)
    return lambda: table(rows)


def on(operation: Callable[..., Any], *shapes: tuple[int, ...]) -> Callable[[], Any]:
    tensors = [torch.randn(shape) for shape in shapes]
    return lambda: operation(*tensors)


MOVED_BY_LINEAR = FLOAT * (B * IN + IN * OUT + OUT + B * OUT)
LSTM = 2 * 5 * B * 4 * 12 * (IN + 12) + 2 * 5 * B * 4 * 12 * (12 + 12)
WORK: dict[str, tuple[Callable[[], Any], str, int, int | None, int | None]] = {  # → calls, FLOPs, bytes; None: not asked
    "a linear layer": (linear(), "addmm", 1, 2 * B * IN * OUT, MOVED_BY_LINEAR),
    "its backward pass is two products": (linear_backward(), "mm", 2, 2 * 2 * B * IN * OUT, None),
    "a convolution moves images and weights once": (
        convolution(), "convolution", 1, 2 * B * 8 * 100 * 3 * 9, FLOAT * (B * 3 * 100 + 8 * 3 * 9 + 8 + B * 8 * 100),
    ),
    "a fused LSTM is one operation a layer": (lstm(), "mkldnn_rnn_layer", 2, LSTM, None),
    "elementwise: reads and writes": (on(lambda x: x * x, (N,)), "mul", 1, 0, FLOAT * 3 * N),
    "a number is not read": (on(lambda x: x + 1, (N,)), "add", 1, 0, FLOAT * 2 * N),
    "in place: reads and writes the same": (on(lambda x: x.mul_(2), (N,)), "mul_", 1, 0, FLOAT * 2 * N),
    "what is overwritten is not read": (on(lambda x: x.zero_(), (N,)), "zero_", 1, 0, FLOAT * N),
    "a copy": (on(lambda x, y: x.copy_(y), (N,), (N,)), "copy_", 1, 0, FLOAT * 2 * N),
    "an expanded tensor is read once": (
        on(lambda x, row: x + row.expand(N, 10), (N, 10), (1, 10)), "add", 1, 0, FLOAT * (2 * 10 * N + 10),
    ),
    "a look-up reads the rows that it returns": (look_up(), "embedding", 1, 0, FLOAT * 2 * 50 * 16 + 8 * 50),
    "of a column its own numbers": (on(lambda x: x[:, 0].sum(), (64, 64)), "sum", 1, 0, FLOAT * (64 + 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", WORK)
def test_an_operation_computes_and_moves_what_its_closed_form_says(name: str) -> None:
    step, operation, calls, flops, moved = WORK[name]
    found = only(recorded(step), operation)
    assert (found.calls, found.flops) == (calls, flops)
    assert moved is None or found.bytes == moved


def test_the_backward_pass_of_a_fused_lstm_does_twice_the_work_but_for_the_first_state() -> None:
    lstm, x = nn.LSTM(IN, 12), torch.randn(5, B, IN, requires_grad=True)
    operations = recorded(lambda: lstm(x)[0].sum().backward())
    forward, backward = only(operations, "mkldnn_rnn_layer"), only(operations, "mkldnn_rnn_layer_backward")
    assert (backward.calls, backward.flops) == (1, 2 * forward.flops - 2 * B * 12 * 4 * 12)


def test_a_nested_tensor_moves_its_values() -> None:
    layer = nn.Linear(IN, OUT)
    x = torch.nested.nested_tensor([torch.randn(length, IN) for length in (B - 3, 3)], layout=torch.jagged)
    operations = recorded(lambda: layer(x).values().sum().backward())
    assert any(each.bytes >= FLOAT * (B * IN + IN * OUT + B * OUT) for each in operations)


def test_a_bag_reads_all_rows_that_it_sums() -> None:
    bag, rows = nn.EmbeddingBag(100_000, 16), torch.arange(60).view(3, 20)
    assert FLOAT * 60 * 16 < only(recorded(lambda: bag(rows)), "_embedding_bag").bytes < FLOAT * 200 * 16


def test_a_view_and_reserved_memory_are_no_operations() -> None:
    x = torch.randn(10, 10)
    assert recorded(lambda: (x.t(), x[2:], x.view(-1), x.detach(), torch.empty(100), torch.empty_like(x))) == []


def test_a_sparse_gradient_is_its_indices_and_its_values() -> None:
    table, rows = nn.Embedding(1000, IN, sparse=True), torch.arange(B)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        table(rows).mean().backward()
        optimizer.step()

    moved = sum(each.bytes for each in recorded(step))
    assert FLOAT * B * IN <= moved < FLOAT * 1000 * IN  # the rows that were looked up, not the table


def test_fused_adam_passes_over_weights_gradients_and_both_moments() -> None:
    parameter = nn.Parameter(torch.randn(10_000))
    parameter.grad = torch.randn(10_000)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    optimizer.step()
    found = only(recorded(optimizer.step), "_fused_adamw_")
    assert found.calls == 1
    assert found.bytes == pytest.approx(FLOAT * 10_000 * (1 + 2 * 3), abs=8)  # parameter, moments: read and written


COLD = {  # of steps that each pass over so many tensors of 4 KB in place: the cache → the bytes from memory, of 8 KB a tensor
    "the cache holds them all": (1, 10_000, 0),
    "no cache": (1, None, 8_000),
    "each is larger than the cache": (2, 1_000, 16_000),
    "together they are larger than the cache": (5, 10_000, 40_000),
}


@pytest.mark.parametrize("case", COLD)
def test_a_tensor_is_cold_once_more_than_the_cache_has_come_since(case: str) -> None:
    number, cache_bytes, cold = COLD[case]
    tensors = [torch.randn(1000) for _ in range(number)]
    found = only(recorded(lambda: [x.mul_(2) for x in tensors], cache_bytes=cache_bytes, steps=2), "mul_")
    assert (found.bytes, found.cold_bytes) == (8_000 * number, cold)


def test_a_new_tensor_that_fits_into_the_cache_is_not_cold() -> None:
    x, kept = torch.randn(1000), []
    found = only(recorded(lambda: kept.append(x * 2), cache_bytes=100_000, steps=2), "mul")
    assert (found.bytes, found.cold_bytes) == (8_000, 0)


@pytest.mark.parametrize(("rows", "cold"), [(10_000, 0.9), (1000, 0.0)])  # 640 KB, and 64 KB
def test_rows_of_a_table_are_cold_by_the_part_of_it_that_the_cache_cannot_hold(rows: int, cold: float) -> None:
    table, places, new = torch.randn(rows, 16), torch.arange(50), torch.ones(50, 16)
    found = only(recorded(lambda: table.index_add_(0, places, new), cache_bytes=64_000, steps=2), "index_add_")
    rows_bytes = found.bytes - 50 * (FLOAT * 16 + 8)  # without the new values and the places, which the cache holds
    assert found.cold_bytes == pytest.approx(cold * rows_bytes)


def test_an_operation_belongs_to_its_module_in_both_passes_and_to_the_part_that_runs() -> None:
    net = nn.Sequential(nn.Linear(IN, IN), nn.Sequential(nn.ReLU(), nn.Linear(IN, OUT)))
    x, modules = torch.randn(B, IN), {}
    for each in recorded(lambda: net(x).sum().backward(), net):
        modules.setdefault(each.name.removeprefix("aten."), set()).add(each.module)
    assert modules["addmm"] == modules["mm"] == {"0", "1.1"}
    assert modules["threshold_backward"] == {"1.0"}
    parts = iter(["forward", "backward"])
    found = recorded(lambda: (x + 1, x * 2), part=lambda: next(parts))
    assert {each.name: each.part for each in found} == {"aten.add": "forward", "aten.mul": "backward"}


def test_a_module_that_torch_compile_has_wrapped_has_its_own_name() -> None:
    net = nn.ModuleDict({"head": nn.ModuleDict({"_orig_mod": nn.Linear(IN, OUT)})})
    operations = recorded(lambda: net["head"]["_orig_mod"](torch.randn(B, IN)), net)
    assert [(each.name, each.module) for each in operations if each.flops] == [("aten.addmm", "head")]


def test_the_type_is_that_of_the_numbers() -> None:
    a, b = torch.randn(4, 4, dtype=torch.bfloat16), torch.randn(4, 4, dtype=torch.float64)
    found = {each.name: each.dtype for each in recorded(lambda: (a @ a, b + b, torch.arange(4) * 2))}
    assert (found["aten.mm"], found["aten.add"], found["aten.mul"]) == ("bf16", "fp64", "other")


def test_alike_operations_are_added_up_and_of_steps_that_differ_the_largest_counts() -> None:
    x = torch.randn(10)
    (found,) = recorded(lambda: [x + 1 for _ in range(5)])
    assert found.calls == 5 and found.seconds > 0
    batches, layer = iter([8, 64, 1]), nn.Linear(IN, OUT)
    found = only(recorded(lambda: layer(torch.ones(next(batches), IN)), steps=3), "addmm")
    assert found.flops == 2 * 64 * IN * OUT


def test_steps_may_depend_on_the_data_and_operators_of_functions_run_unnoted() -> None:
    x = torch.tensor([1.0, -1.0, 2.0])
    operations = recorded(lambda: x[x > 0].sum().item())
    assert {"aten.gt", "aten.index", "aten.sum"} <= {each.name for each in operations}
    results: list[Any] = []
    recorded(lambda: results.append(torch.cond(x[0] > 0, lambda a: a + 1, lambda a: a - 1, (x[:1],)).item()))
    assert results == [2]


def test_an_error_of_the_recorder_ends_the_recording_and_not_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = OperationRecorder()
    monkeypatch.setattr(recorder, "_traffic", lambda *args: 1 / 0)
    with recorder:
        assert torch.ones(2).add(1).tolist() == [2, 2]
    assert isinstance(recorder.error, ZeroDivisionError)
    assert recorder.operations() == []


def test_an_error_of_the_step_is_the_steps_own_and_leaves_no_hook() -> None:
    hooks = len(nn.modules.module._global_forward_hooks)
    with pytest.raises(RuntimeError, match="size"), OperationRecorder():
        torch.ones(2) + torch.ones(3)
    assert len(nn.modules.module._global_forward_hooks) == hooks
