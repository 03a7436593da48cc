"""What training holds on its device, what autograd saves byte for byte, and which errors say that memory is full."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from batchscope.hardware import device_memory
from batchscope.hardware.device_memory import MemoryReadings, SavedTensors

GIB = 2**30


def test_which_errors_say_that_memory_is_full() -> None:
    full = [MemoryError(), RuntimeError("CUDA error: out of memory"), RuntimeError("CUDNN_STATUS_ALLOC_FAILED in x")]
    assert all(map(device_memory.is_out_of_memory, full))
    assert not any(map(device_memory.is_out_of_memory, (ValueError("out of memory"), RuntimeError("shape mismatch"))))


def test_the_memory_of_each_kind_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    reset, asked, held = [], [], iter([GIB, 3 * GIB, GIB])
    stats = {
        "allocated_bytes": {"all": {"current": GIB, "peak": 3 * GIB}},
        "reserved_bytes": {"all": {"current": 2 * GIB, "peak": 4 * GIB}},
    }
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: asked.append(device) or stats)
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: next(held))
    cuda, mps = torch.device("cuda", 1), torch.device("mps")
    assert list(MemoryReadings(cuda)().items()) == [
        ("device/memory_allocated_gib", 1.0), ("device/memory_peak_gib", 3.0), ("device/memory_reserved_gib", 4.0),
    ]  # fmt: skip
    assert (reset, asked) == ([cuda], [cuda])  # the allocator is asked once
    read = MemoryReadings(mps)  # without a counter, the highest reading is the peak
    assert [read()[device_memory.PEAK] for _ in range(3)] == [1.0, 3.0, 3.0]
    assert device_memory.measured_bytes(mps) == MemoryReadings(torch.device("meta"))() == {}


FLOAT, BATCH, WIDE = 4, 8, 512


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, WIDE), nn.ReLU(), nn.Linear(WIDE, 4))


def twice(network: nn.Module, x: Tensor) -> None:
    for _ in range(2):
        network(x).mean().backward()


def mean(network: nn.Module, x: Tensor) -> Tensor:
    return network(x).mean()


def penalized(network: nn.Module, x: Tensor) -> Tensor:
    """With a gradient of a gradient."""
    loss = F.cross_entropy(network(x), torch.zeros(len(x), dtype=torch.long))
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + gradient.square().sum()


class Odd(nn.Module):
    """Computes with sparse tensors, and with gradients of torch.func, which refuses hooks of saved tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.EmbeddingBag(5, 16, sparse=True), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        sparse = torch.sparse.mm(torch.eye(len(x)).to_sparse(), self.layer(x))
        inner = torch.func.grad(lambda x: torch.func.grad(lambda x: self.layer(x).square().sum())(x).square().sum())(x)
        return sparse.sum() + self.table(torch.tensor([[1, 2]])).sum() + inner.sum()


Loss = Callable[[nn.Module, Tensor], Any]
SIGMOIDS = nn.Sequential(nn.Linear(16, WIDE), nn.Sigmoid(), nn.Linear(WIDE, 4), nn.Sigmoid())
CNN = nn.Sequential(nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten())
SAVED: dict[str, tuple[nn.Module, Loss, int | None]] = {  # → numbers; None: not asked
    "the result of a ReLU, no weight and no batch": (mlp(), mean, BATCH * WIDE),
    "a storage that two operations save, once": (SIGMOIDS, mean, BATCH * (WIDE + 4)),
    "nothing without gradients": (mlp().requires_grad_(False), lambda net, x: None, 0),
    "what is freed in between is not added up": (mlp(), twice, BATCH * WIDE),
    "a gradient of a gradient": (CNN, penalized, None),
    "sparse tensors and torch.func": (Odd(), mean, None),
}


@pytest.mark.parametrize("name", SAVED)
def test_each_saved_storage_counts_once_none_is_held_and_gradients_are_bit_for_bit_those_without(name: str) -> None:
    network, loss, numbers = SAVED[name]
    gradients = []
    for found in (None, SavedTensors(torch.device("cpu"))):
        x = torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(0)).requires_grad_(loss is penalized)
        network.zero_grad()
        if found is None:
            result = loss(network, x)
        else:
            with found.watch([*network.parameters(), *network.buffers(), x]):
                result = loss(network, x)
        if isinstance(result, Tensor):
            result.backward()
        gradients.append([each.grad.to_dense() for each in network.parameters() if each.grad is not None])
        del result
    assert numbers is None or (found.most, found._held) == (numbers * FLOAT, 0)  # nothing public says what is held
    assert all(map(torch.equal, *gradients))
    torch.func.grad(lambda x: x.square().sum())(torch.ones(3))  # which raises an error where hooks are active


def test_of_a_region_that_is_computed_again_only_its_border_can_be_seen_and_an_error_is_the_steps_own() -> None:
    start, blocks = nn.Sequential(nn.Linear(16, 32), nn.ReLU()), nn.Sequential(nn.Linear(32, WIDE), nn.Linear(WIDE, 4))
    found, x = SavedTensors(torch.device("cpu")), torch.randn(BATCH, 16)
    with pytest.raises(ValueError, match="the user's own"), found.watch([*start.parameters(), *blocks.parameters(), x]):
        checkpoint(blocks, start(x), use_reentrant=False).mean().backward()
        raise ValueError("the user's own")
    assert found.most <= 2 * BATCH * 32 * FLOAT
    before = found.most
    mlp()(torch.randn(BATCH, 16)).mean().backward()
    assert found.most == before
