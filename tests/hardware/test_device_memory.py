"""What training holds on its device, what autograd saves byte for byte, and which errors say that memory is full."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from batchscope.hardware.device_memory import (
    ALLOCATED,
    PEAK,
    RESERVED,
    MemoryReadings,
    SavedTensors,
    is_out_of_memory,
    measured_bytes,
)

GIB = 2**30


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (MemoryError(), True),
        (ValueError("out of memory"), False),
        (RuntimeError("shape mismatch"), False),
    ],
)
def test_which_errors_say_that_memory_is_full(error: Exception, full: bool) -> None:
    assert is_out_of_memory(error) is full


def test_a_sample_of_a_gpus_memory_asks_its_allocator_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reset, asked = [], []
    stats = {
        "allocated_bytes": {"all": {"current": GIB, "peak": 3 * GIB}},
        "reserved_bytes": {"all": {"current": 2 * GIB, "peak": 4 * GIB}},
    }
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: asked.append(device) or stats)
    cuda = torch.device("cuda", 1)
    assert MemoryReadings(cuda)() == {ALLOCATED: 1.0, PEAK: 3.0, RESERVED: 4.0}
    assert (reset, asked) == ([cuda], [cuda])


def test_the_peak_of_a_device_without_a_counter_is_the_highest_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    held = iter([GIB, 3 * GIB, GIB])
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: next(held))
    read = MemoryReadings(torch.device("mps"))
    assert measured_bytes(torch.device("mps")) == {}  # what is held now is no peak
    assert [read()[PEAK] for _ in range(3)] == [1.0, 3.0, 3.0]


def test_a_device_of_another_kind_has_no_reading() -> None:
    assert MemoryReadings(torch.device("meta"))() == {}


FLOAT, BATCH, WIDE = 4, 8, 512


def saved(module: nn.Module, x: Tensor, step: Callable[[Tensor], Any] | None = None) -> SavedTensors:
    found = SavedTensors(x.device)
    with found.watch([*module.parameters(), *module.buffers(), x]):
        loss = (step or (lambda x: module(x).mean()))(x)
    if isinstance(loss, Tensor):
        loss.backward()
    return found


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, WIDE), nn.ReLU(), nn.Linear(WIDE, 4))


def sigmoids() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, WIDE), nn.Sigmoid(), nn.Linear(WIDE, 4), nn.Sigmoid())


def twice(network: nn.Module, x: Tensor) -> None:
    for _ in range(2):
        network(x).mean().backward()


SAVED: dict[str, tuple[nn.Module, Callable[[nn.Module, Tensor], Any], int]] = {
    "the result of a ReLU, no weight and no batch": (mlp(), lambda net, x: net(x).mean(), BATCH * WIDE),
    "a storage that two operations save, once": (sigmoids(), lambda net, x: net(x).mean(), BATCH * (WIDE + 4)),
    "nothing without gradients": (mlp().requires_grad_(False), lambda net, x: None, 0),
    "what is freed in between is not added up": (mlp(), twice, BATCH * WIDE),
}


@pytest.mark.parametrize("name", SAVED)
def test_each_storage_that_is_saved_counts_once_and_none_is_held_afterwards(name: str) -> None:
    network, step, numbers = SAVED[name]
    found = saved(network, torch.randn(BATCH, 16), lambda x: step(network, x))
    assert found.most == numbers * FLOAT
    assert found._alive == {} and found._held == 0


def test_of_a_region_that_is_computed_again_only_its_border_can_be_seen() -> None:
    network = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
    blocks = nn.Sequential(nn.Linear(32, WIDE), nn.ReLU(), nn.Linear(WIDE, 4))
    both = nn.ModuleList([network, blocks])
    found = saved(both, torch.randn(BATCH, 16), lambda x: checkpoint(blocks, network(x), use_reentrant=False).mean())
    assert found.most <= 2 * BATCH * 32 * FLOAT


class Odd(nn.Module):
    """Computes with sparse tensors, and with gradients of torch.func, which refuses hooks of saved tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.EmbeddingBag(5, 16, sparse=True), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        sparse = torch.sparse.mm(torch.eye(len(x)).to_sparse(), self.layer(x))
        inner = torch.func.grad(lambda x: torch.func.grad(lambda x: self.layer(x).square().sum())(x).square().sum())(x)
        return sparse.sum() + self.table(torch.tensor([[1, 2]])).sum() + inner.sum()


def test_sparse_tensors_and_torch_func_are_trained_as_without() -> None:
    module, x = Odd(), torch.randn(BATCH, 16)
    module(x).backward()
    plain = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    disable = torch.autograd.graph.disable_saved_tensors_hooks
    saved(module, x, module)
    assert torch.autograd.graph.disable_saved_tensors_hooks is disable
    for before, after in zip(plain, (parameter.grad for parameter in module.parameters()), strict=True):
        assert torch.equal(before.to_dense(), after.to_dense())


@pytest.mark.parametrize("create_graph", [False, True])
def test_gradients_are_bit_for_bit_those_without(create_graph: bool) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(144, 3))
    x, y = torch.randn(BATCH, 1, 8, 8, requires_grad=True), torch.zeros(BATCH, dtype=torch.long)

    def step(x: Tensor) -> Tensor:
        loss = F.cross_entropy(module(x), y)
        if create_graph:
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = loss + gradient.square().sum()
        return loss

    step(x).backward()
    plain = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    saved(module, x, step)
    assert all(map(torch.equal, plain, (parameter.grad for parameter in module.parameters())))


def test_an_error_of_the_step_is_the_steps_own_and_leaves_no_hooks_behind() -> None:
    def failing(x: Tensor) -> None:
        raise ValueError("the user's own")

    with pytest.raises(ValueError, match="the user's own"):
        saved(mlp(), torch.randn(BATCH, 16), failing)
    found = SavedTensors(torch.device("cpu"))
    mlp()(torch.randn(BATCH, 16)).mean().backward()
    assert found.most == 0
    torch.func.grad(lambda x: x.square().sum())(torch.ones(3))  # which raises an error where hooks are active
