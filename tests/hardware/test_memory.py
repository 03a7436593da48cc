"""Memory at the peak of a training step: equal to closed forms and to a real step, and nothing of the module changed."""

import copy
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from batchscope.hardware import memory
from batchscope.hardware.allocations import AllocationRecorder
from batchscope.hardware.memory import MemoryCounter, StepMemory
from tests.support.closed_forms import CIFAR, COPY_MEMORY, MNIST, zoo_task
from tests.support.runs import assert_alike

BATCH, WIDE = 64, 512
FLOAT = 4


class Mean(lightning.LightningModule):
    """The mean of a network's outputs is the loss: autograd keeps nothing for it."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def training_step(self, batch: Any, batch_idx: int) -> STEP_OUTPUT:
        output = self.network(batch)
        self.log("loss", 1.0)
        return (output[0] if isinstance(output, tuple) else output).mean()


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, WIDE), nn.ReLU(), nn.Linear(WIDE, 4))


def numbers(module: nn.Module, trained: bool = False) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad or not trained)


def adamw(module: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)]


def counted(module: lightning.LightningModule, batch: Any, optimizers: Any = None, at: int | None = None) -> StepMemory:
    counter = MemoryCounter(module, batch, optimizers=adamw(module) if optimizers is None else optimizers)
    found = counter.at(at)
    assert found is not None, counter.reason
    assert counter.optimizer_reason is None
    return found


def attach(module: lightning.LightningModule, **options: Any) -> lightning.LightningModule:
    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, barebones=False, **options)
    module.trainer = trainer
    return module


def test_an_mlp_with_adamw_takes_what_its_closed_form_says() -> None:
    module = Mean(mlp())
    found = counted(module, torch.randn(8, 16))
    weights = FLOAT * numbers(module)
    assert found.stage == "forward"
    assert found.parameters == weights
    assert found.gradients == weights  # of the update before: Lightning frees them after the forward pass
    assert found.optimizer == 2 * weights + 4 * FLOAT  # and a count of steps for each of four parameters
    assert found.activations == 2 * 8 * WIDE * FLOAT  # the wide layer, and its ReLU
    assert found.rest == 8 * 16 * FLOAT  # the batch
    assert found.total == sum(found.parts.values())


def test_a_larger_batch_has_its_peak_where_a_relu_has_both_its_gradients() -> None:
    module = Mean(mlp())
    found = counted(module, torch.randn(BATCH, 16))
    wide = BATCH * WIDE * FLOAT
    assert found.stage == "backward"
    assert found.gradients == FLOAT * numbers(module.network[2])  # the first layer's come later
    assert found.activations == wide + 2 * FLOAT  # the ReLU; the loss and its gradient
    assert found.rest == 2 * wide + BATCH * 16 * FLOAT


@pytest.mark.parametrize(
    ("momentum", "states"), [(0.0, 0), (0.9, 1)], ids=["SGD without momentum", "SGD with momentum"]
)
def test_the_optimizer_states_are_those_that_the_optimizer_makes(momentum: float, states: int) -> None:
    module = Mean(mlp())
    sgd = [torch.optim.SGD(module.parameters(), lr=0.1, momentum=momentum)]
    assert counted(module, torch.randn(BATCH, 16), sgd).optimizer == states * FLOAT * numbers(module)


def test_states_that_exist_are_counted_once() -> None:
    module = Mean(mlp())
    optimizers = adamw(module)
    before = counted(module, torch.randn(BATCH, 16), optimizers)
    module.network(torch.randn(BATCH, 16)).mean().backward()
    optimizers[0].step()
    assert counted(module, torch.randn(BATCH, 16), optimizers) == before


def test_a_frozen_layer_has_no_gradient_and_no_state() -> None:
    module = Mean(mlp())
    module.network[0].requires_grad_(False)
    found = counted(module, torch.randn(BATCH, 16))
    assert found.parameters == FLOAT * numbers(module)
    assert found.gradients == FLOAT * numbers(module, trained=True)
    assert found.optimizer == 2 * FLOAT * numbers(module, trained=True) + 2 * FLOAT


def test_a_shared_weight_counts_once() -> None:
    layer = nn.Linear(8, 8, bias=False)
    module = Mean(nn.Sequential(layer, nn.ReLU(), layer))
    assert counted(module, torch.randn(4, 8)).parameters == FLOAT * 64


def test_a_large_optimizer_step_is_the_peak_of_a_small_batch() -> None:
    module = Mean(nn.Linear(256, 256))
    found = counted(module, torch.randn(1, 256), [torch.optim.AdamW(module.parameters(), foreach=True)])
    assert found.stage == "optimizer"
    assert found.rest >= FLOAT * numbers(module)  # foreach keeps a denominator for every weight


def test_autocast_halves_the_activations() -> None:
    full, half = (
        counted(attach(Mean(nn.Sequential(mlp(), mlp_back())), precision=precision), torch.randn(BATCH, 16), [])
        for precision in ("32-true", "bf16-mixed")
    )
    weights = 2 * numbers(Mean(nn.Sequential(mlp(), mlp_back())))  # bytes of the copies that autocast keeps, at most
    assert half.parameters == full.parameters
    assert full.activations // 2 <= half.activations <= full.activations // 2 + weights + BATCH * 16 * 2 + FLOAT


def mlp_back() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, WIDE), nn.ReLU(), nn.Linear(WIDE, 4))


class Checkpointed(nn.Module):
    """Blocks whose activations are computed a second time in the backward pass."""

    def __init__(self, blocks: int, recompute: bool):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Sigmoid())))
            for _ in range(blocks)
        )
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


def test_activation_checkpointing_keeps_the_borders_and_one_block() -> None:
    x, one = torch.randn(4096, 64), 4096 * 64 * FLOAT
    kept = counted(Mean(Checkpointed(8, recompute=False)), x)
    recomputed = counted(Mean(Checkpointed(8, recompute=True)), x)
    assert kept.activations == 8 * 4 * one + 2 * FLOAT  # every sigmoid; the loss and its gradient
    assert recomputed.stage == "backward"
    assert recomputed.activations // one in (7 + 4, 7 + 5)  # seven borders beside the last block, and that block


def test_with_accumulated_gradients_they_are_there_in_every_later_forward_pass() -> None:
    module = attach(Mean(mlp()), accumulate_grad_batches=4)
    found = counted(module, torch.randn(BATCH, 16))
    assert found.gradients == FLOAT * numbers(module)
    assert found.total >= counted(Mean(mlp()), torch.randn(BATCH, 16)).total


def test_simple_cnn_takes_what_its_closed_form_says() -> None:
    task, (x, y) = zoo_task("cnn", MNIST)
    task.channels_last = False
    found = counted(task, (x.repeat(16, 1, 1, 1), y.repeat(16)))
    # The peak is where the backward pass of the second ReLU has both its gradients: kept are the first ReLU, what the
    # pool made of it with int64 positions, and the second ReLU.
    first, pooled, second = 32 * 28 * 28, 32 * 14 * 14, 64 * 14 * 14
    scalars = 3  # loss, its weight, accuracy
    assert found.stage == "backward"
    assert found.activations == FLOAT * (64 * (first + 3 * pooled + second) + scalars)


@pytest.mark.slow
def test_an_unrolled_cell_grows_by_the_same_for_every_step() -> None:
    cell = zoo_task("lstm_cell", COPY_MEMORY)[0]
    for part in cell.modules():
        if hasattr(part, "backend"):
            part.backend = "reference"
    found = {n: counted(cell, (torch.randn(4, n, 10), torch.zeros(4, n, dtype=torch.long))) for n in (10, 20, 30)}
    assert found[30].activations - found[20].activations == found[20].activations - found[10].activations
    hidden = 4 * 128 * FLOAT
    assert 5 <= (found[20].activations - found[10].activations) / 10 / hidden <= 12


@pytest.mark.slow
def test_a_long_sequence_is_counted_at_three_short_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    cell, _ = zoo_task("lstm_cell", COPY_MEMORY)
    for part in cell.modules():
        if hasattr(part, "backend"):
            part.backend = "reference"
    batch = torch.randn(4, 80, 10), torch.zeros(4, 80, dtype=torch.long)
    whole = counted(cell, batch)
    monkeypatch.setattr(memory, "_QUICK_OPERATIONS", 100)
    assert counted(cell, batch) == whole


def real_step(task: lightning.LightningModule, batch: Any, optimizer: torch.optim.Optimizer) -> tuple[str, Any]:
    """The same update on tensors with memory."""
    recorder = AllocationRecorder(torch.device("cpu"), 10**6)
    with recorder:
        recorder.assign((*batch, *task.buffers()), "rest")
        recorder.assign(task.parameters(), "parameters")
        memory._Step(task, [optimizer], recorder).run(batch, None)
        return recorder.at_peak()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("name", "spec"),
    [("mlp", MNIST), ("cnn", MNIST), ("rnn_cell", MNIST), pytest.param("torchvision", CIFAR, marks=pytest.mark.slow)],
)
def test_the_count_is_that_of_a_real_step(name: str, spec: Any, fused: bool) -> None:
    task, batch = zoo_task(name, spec)
    for part in task.modules():
        if hasattr(part, "backend"):
            part.backend = "reference"
    optimizer = torch.optim.AdamW(task.parameters(), fused=fused)
    found = counted(task, batch, [optimizer])
    stage, parts = real_step(task, batch, optimizer)
    assert (found.stage, found.parts) == (stage, parts)


def test_a_fused_lstm_takes_about_what_the_real_kernel_keeps() -> None:
    task, batch = zoo_task("stacked_lstm", MNIST)
    x, y = (tensor.repeat(16, *[1] * (tensor.dim() - 1)) for tensor in batch)
    optimizer = torch.optim.AdamW(task.parameters(), fused=True)
    found = counted(task, (x, y), [optimizer])
    _, parts = real_step(task, (x, y), optimizer)
    assert found.activations == pytest.approx(parts["activations"], rel=0.3)  # oneDNN's layout differs by processor
    assert found.parameters == parts["parameters"]


def test_another_batch_size_is_counted_as_if_the_batch_had_it() -> None:
    task, (x, y) = zoo_task("cnn", MNIST)
    assert counted(task, (x, y), at=100) == counted(task, (x.repeat(25, 1, 1, 1), y.repeat(25)))


@pytest.mark.slow
def test_the_largest_batch_that_fits_fits_and_twice_as_large_a_one_does_not() -> None:
    task, batch = zoo_task("cnn", MNIST)
    counter = MemoryCounter(task, batch, optimizers=adamw(task))
    largest = counter.largest_batch_that_fits(2**30)
    assert largest is not None
    assert counter.at(largest).total <= 2**30 < counter.at(2 * largest).total
    assert counter.largest_batch_that_fits(2**20) == 0  # the weights alone take more


def test_nothing_of_the_module_the_optimizer_or_the_random_states_changes() -> None:
    module = attach(Mean(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))))
    optimizers = adamw(module)
    batch = torch.randn(4, 8)
    before = copy.deepcopy((module.state_dict(), optimizers[0].state_dict()))
    random = torch.random.get_rng_state()
    counted(module, batch, optimizers)
    assert torch.equal(random, torch.random.get_rng_state())
    assert_alike(before, (module.state_dict(), optimizers[0].state_dict()))
    assert all(p.grad is None for p in module.parameters())
    assert not vars(optimizers[0]).get("zero_grad")


class ByValue(Mean):
    def training_step(self, batch: Any, batch_idx: int) -> STEP_OUTPUT:
        loss = self.network(batch).mean()
        return loss * 2 if loss.item() > 0 else loss


def test_a_step_that_depends_on_values_is_not_counted_and_says_why() -> None:
    counter = MemoryCounter(ByValue(nn.Linear(4, 4)), torch.randn(2, 4))
    assert counter.at() is None
    assert "_local_scalar_dense" in counter.reason
    assert counter.largest_batch_that_fits(2**30) is None


class Manual(Mean):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.network(batch).mean()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


def test_manual_optimisation_takes_the_same() -> None:
    by_hand = attach(Manual(mlp()))
    by_hand.trainer.strategy.optimizers = adamw(by_hand)
    batch = torch.randn(BATCH, 16)
    assert counted(by_hand, batch, by_hand.trainer.optimizers) == counted(Mean(mlp()), batch)


class Refuses(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        raise ZeroDivisionError("not on fake tensors")


def test_an_optimizer_that_cannot_be_run_is_left_out_and_says_why() -> None:
    module = Mean(mlp())
    counter = MemoryCounter(module, torch.randn(BATCH, 16), optimizers=[Refuses(module.parameters(), lr=0.1)])
    found = counter.at()
    assert found.optimizer == 0
    assert found.activations > BATCH * WIDE * FLOAT
    assert "ZeroDivisionError" in counter.optimizer_reason
