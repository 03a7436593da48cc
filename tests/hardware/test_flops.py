"""FLOPs of a training step: equal to the closed forms, or None, and nothing of the module changed."""

import copy
import random
import threading
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning
import numpy as np
import pytest
import torch
import torchvision
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.compile import from_compiled
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from batchscope.data.spec import DataSpec
from batchscope.hardware import flops
from batchscope.hardware.flops import StepFlops, UncountableError, count_step
from tests.support.closed_forms import (
    BATCH,
    CNN,
    MNIST,
    MODELS,
    ZOO,
    chain,
    conv,
    linear,
    recurrent,
    with_head,
    zoo_task,
)


class Stranger(lightning.LightningModule):
    """A LightningModule as anybody may write one: here the mean of the squared outputs of a network is the loss."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output = self.network(batch)
        loss = (output[0] if isinstance(output, tuple) else output).square().mean()
        self.log("loss", loss, prog_bar=True)
        return loss


@pytest.mark.parametrize(("name", "spec"), ZOO, ids=lambda value: value if isinstance(value, str) else value.target)
def test_every_model_of_the_zoo_takes_what_its_closed_form_says(name, spec):
    task, batch = zoo_task(name, spec)
    assert count_step(task, batch) == StepFlops(*ZOO[name, spec])


@pytest.mark.parametrize("backend", ["auto", "reference", "fused"])
@pytest.mark.parametrize("name", ["rnn_cell", "lstm_cell", "stacked_lstm"])
def test_a_recurrent_model_takes_the_same_whatever_runs_it(name, backend):
    task, batch = zoo_task(name, DataSpec("sequence", (5, 28), "class", 10))
    for part in task.modules():
        if hasattr(part, "backend"):
            part.backend = backend
    cells = recurrent(5, 28, 128, gates=1 if name == "rnn_cell" else 4, layers=2 if name == "stacked_lstm" else 1)
    assert count_step(task, batch) == StepFlops(*with_head(cells, 128, 10))


@pytest.mark.parametrize(("backend", "kind"), [("auto", "recurrent"), ("fused", "recurrent"), ("reference", "matmul")])
@pytest.mark.parametrize("name", ["rnn_cell", "lstm_cell", "stacked_lstm"])
def test_a_recurrent_model_counts_as_what_runs_it(name, backend, kind):
    task, batch = zoo_task(name, DataSpec("sequence", (5, 28), "class", 10))
    for part in task.modules():
        if hasattr(part, "backend"):
            part.backend = backend
    forward, _ = recurrent(5, 28, 128, gates=1 if name == "rnn_cell" else 4, layers=2 if name == "stacked_lstm" else 1)
    expected = {"matmul": 0.0, "convolution": 0.0, "recurrent": 0.0}
    expected["matmul"] = linear(128, 10) / (forward + linear(128, 10))
    expected[kind] += forward / (forward + linear(128, 10))
    assert count_step(task, batch).shares == pytest.approx(expected)


def test_the_convolutions_of_a_network_are_told_from_its_linear_layers():
    shares = count_step(*zoo_task("cnn", MNIST)).shares
    convolutions = conv(28, 1, 32, 3) + conv(14, 32, 64, 3)
    assert shares["convolution"] == pytest.approx(convolutions / CNN[0])
    assert shares["matmul"] == pytest.approx(1 - convolutions / CNN[0])


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN, partial(nn.RNN, nonlinearity="relu")])
def test_torchs_recurrent_modules_count_as_recurrent(layer):
    counted = count_step(Stranger(layer(5, 6)), torch.randn(7, 4, 5))
    assert counted.recurrent == counted.forward


def test_what_is_recurrent_is_extended_with_the_length(impatient):
    counted = count_step(Stranger(nn.RNN(5, 6, batch_first=True)), torch.randn(4, 101, 5))
    assert counted.recurrent == counted.forward == recurrent(101, 5, 6)[0]


# By default those without a closed form: new ones.
CONFIGS = [
    pytest.param(path.stem, marks=[pytest.mark.slow] * any(path.stem == name for name, _ in ZOO))
    for path in sorted(MODELS.glob("*.yaml"))
]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_model_config_can_be_counted(name):
    task, batch = zoo_task(name, MNIST)
    counted = count_step(task, batch)
    assert counted.forward < counted.backward < 3 * counted.forward


def test_the_cnn_takes_8_48_mflop_forward_and_about_25_for_a_step():
    assert CNN[0] == 8_482_304
    assert sum(CNN) == pytest.approx(25e6, rel=0.01)


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("resnet18", conv(112, 3, 64, 7)),
        ("mobilenet_v2", conv(112, 3, 32, 3)),
        pytest.param("resnext50_32x4d", conv(112, 3, 64, 7), marks=pytest.mark.slow),
    ],
)
def test_torchvision_networks_take_what_is_published_of_them(name, first):
    published = 2e9 * torchvision.models.get_model_weights(name).DEFAULT.meta["_ops"]  # in billions of multiply-adds
    with torch.device("meta"):
        network = torchvision.models.get_model(name)
        counted = count_step(Stranger(network), torch.empty(2, 3, 224, 224))
    assert counted.forward == pytest.approx(published, rel=0.01)
    assert counted.backward == 2 * counted.forward - first


# The LSTM takes each option by default; of the others, the number of gates differs alone.
RECURRENT = [
    pytest.param(kind, gates, options, marks=[pytest.mark.slow] * bool(options and kind is not nn.LSTM))
    for kind, gates in ((nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1))
    for options in ({}, {"num_layers": 2}, {"bidirectional": True}, {"batch_first": True})
]


@pytest.mark.parametrize(("kind", "gates", "options"), RECURRENT)
def test_torchs_recurrent_modules_take_what_their_closed_form_says(kind, gates, options):
    shape = (BATCH, 9, 5) if options.get("batch_first") else (9, BATCH, 5)
    counted = count_step(Stranger(kind(5, 6, **options)), torch.randn(shape), batch_size=BATCH)
    layers, directions = options.get("num_layers", 1), 2 if options.get("bidirectional") else 1
    assert counted == StepFlops(*recurrent(9, 5, 6, gates, layers, directions))


def test_grouped_convolutions_take_a_share_of_the_full_ones():
    network = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 16, 1))
    assert count_step(Stranger(network), torch.randn(2, 8, 10, 10)) == StepFlops(
        *chain(conv(10, 8, 8, 3, groups=8), conv(10, 8, 16, 1))
    )


def test_a_transposed_convolution_takes_a_product_for_each_input_position():
    network = nn.Sequential(nn.ConvTranspose2d(4, 6, 3, stride=2), nn.ConvTranspose2d(6, 6, 3, groups=6))
    first, second = conv(10, 4, 6, 3), conv(21, 6, 6, 3, groups=6)
    assert count_step(Stranger(network), torch.randn(2, 4, 10, 10)) == StepFlops(*chain(first, second))


def test_attention_takes_its_two_products_forward_and_four_backward():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(16, 48)

        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    counted = count_step(Stranger(Attention()), torch.randn(BATCH, 10, 16))
    projections, product = 10 * linear(16, 48), 2 * 2 * 10 * 10 * 8
    assert counted == StepFlops(projections + 2 * product, projections + 4 * product)


def test_products_of_a_vector_count_too():
    class Vector(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.vector = nn.Parameter(torch.ones(6, 5)), nn.Parameter(torch.ones(5))

        def forward(self, x):
            return self.weight @ self.vector * x.sum()

    assert count_step(Stranger(Vector()), torch.ones(1, 5)).forward == linear(5, 6)


def test_a_frozen_layer_takes_no_gradient_of_its_weights():
    network = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 7), nn.Linear(7, 8))
    network[0].requires_grad_(False)
    forward = linear(5, 6) + linear(6, 7) + linear(7, 8)
    assert count_step(Stranger(network), torch.randn(2, 5)) == StepFlops(forward, linear(6, 7) + 2 * linear(7, 8))


def test_the_count_is_of_the_batch_as_it_is():
    class Contrastive(nn.Module):
        def forward(self, x):
            return x @ x.T

    network = nn.Sequential(nn.Linear(5, 6), Contrastive())
    counted = count_step(Stranger(network), torch.randn(32, 5))
    assert counted == StepFlops(linear(5, 6) + linear(6, 32), linear(5, 6) + 2 * linear(6, 32))


@dataclass
class Pair:
    x: Tensor
    notes: dict[str, Any]


def test_a_batch_may_be_any_nest_of_tensors():
    class Reader(Stranger):
        def training_step(self, batch):
            x = batch["pairs"][0].x + batch["pairs"][0].notes["more"][1]
            return {"loss": self.network(x).sum(), "other": 1}

    batch = {"pairs": [Pair(torch.randn(2, 5), {"more": (None, torch.randn(2, 5)), "name": "a"})]}
    assert count_step(Reader(nn.Linear(5, 6)), batch, batch_size=2) == StepFlops(linear(5, 6), linear(5, 6))
    assert batch["pairs"][0].x.device.type == "cpu"


def test_two_networks_trained_by_hand_count_with_their_own_steps():
    class Gan(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.generator, self.critic = nn.Linear(5, 6), nn.Linear(6, 1)

        def configure_optimizers(self):
            return [torch.optim.SGD(net.parameters(), lr=0.1) for net in (self.generator, self.critic)]

        def training_step(self, batch, batch_idx):
            for optimizer, of in zip(self.optimizers(), (self.generator, self.critic), strict=True):
                self.toggle_optimizer(optimizer)
                loss = self.critic(self.generator(batch[0])).mean()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
                self.untoggle_optimizer(optimizer)
                self.log(type(of).__name__, loss)

    counter, data = Counter(), TensorDataset(torch.randn(8, 5))
    assert fit(Gan(), counter, data) == fit(Gan(), Callback(), data)
    generator, critic = linear(5, 6), linear(6, 1)
    # The generator's step passes a gradient through the critic; the critic's stops at its own weights.
    assert counter.counted == StepFlops(2 * (generator + critic), (generator + critic) + critic)


class Counter(Callback):
    """Counts in the middle of training, as a callback would."""

    counted: StepFlops | None = None

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 0:
            self.counted = count_step(pl_module, batch)


def fit(module: lightning.LightningModule, callback: Callback, data: TensorDataset) -> list[list[float]]:
    """Train for two steps and return the weights."""
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    trainer = lightning.Trainer(
        max_steps=2,
        accelerator="cpu",
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data, batch_size=4, shuffle=True))
    return [parameter.flatten().tolist() for parameter in module.parameters()]


class Ordinary(lightning.LightningModule):
    """What many projects look like: metrics with validation, dropout, batch norm, logging, the trainer's counters."""

    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(), nn.Linear(6, 3))
        self.accuracy = MulticlassAccuracy(num_classes=3)
        self.metrics = MetricCollection([MulticlassAccuracy(num_classes=3), MulticlassF1Score(num_classes=3)])
        self.seen = []

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

    def training_step(self, batch, batch_idx):
        x, y = batch
        x = x + np.random.normal() + random.random() + torch.zeros(x.shape[1], device=self.device)
        output = self.network(x)
        loss = F.cross_entropy(output, y)
        self.seen.append(self.global_step)
        self.accuracy(output, y)
        self.log("acc", self.accuracy)
        self.log_dict(self.metrics(output, y))
        if self.trainer.is_global_zero and self.logger is not None:
            self.logger.experiment.add_scalar("loss", loss, self.global_step)
        return {"loss": loss}


def ordinary() -> tuple[Ordinary, tuple[Tensor, Tensor]]:
    """An ordinary module in the hands of a trainer, and a batch."""
    module = Ordinary()
    module.trainer = lightning.Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    return module, (torch.randn(4, 5), torch.zeros(4, dtype=torch.long))


def test_counting_during_training_changes_nothing():
    data = TensorDataset(torch.randn(8, 5), torch.zeros(8, dtype=torch.long))

    def train(callback):
        lightning.seed_everything(0, verbose=False)
        module = Ordinary()
        return module, fit(module, callback, data)

    counter = Counter()
    (module, weights), (plain, plain_weights) = train(counter), train(Callback())
    assert counter.counted == StepFlops(*chain(linear(5, 6), linear(6, 3)))
    assert weights == plain_weights
    assert module.seen == plain.seen == [0, 1]
    assert int(module.network[1].num_batches_tracked) == 2


def test_the_state_stays_as_it_is():
    module, batch = ordinary()
    before = copy.deepcopy(module.state_dict())
    assert count_step(module, batch) is not None
    assert all(value.equal(before[name]) for name, value in module.state_dict().items())
    assert {value.device.type for value in module.state_dict().values()} == {"cpu"}


def test_the_trainer_the_modes_and_the_attributes_stay_as_they_are():
    module, batch = ordinary()
    module.network[1].eval()
    before = [dict(vars(part)) for part in module.modules()]
    assert count_step(module, batch) is not None
    after = [dict(vars(part)) for part in module.modules()]
    assert [values.keys() for values in after] == [values.keys() for values in before]
    assert all(now[name] is then[name] for now, then in zip(after, before, strict=True) for name in now)


def test_gradients_stay_as_they_are():
    module, batch = ordinary()
    module.network[3].bias.grad = torch.ones(3)
    assert count_step(module, batch) is not None
    assert module.network[3].bias.grad.equal(torch.ones(3))
    assert module.network[3].weight.grad is None


def test_hooks_that_watch_are_not_called():
    module, batch = ordinary()
    calls = []
    module.network[0].register_forward_hook(lambda *_: calls.append("forward"))
    module.network[0].register_forward_pre_hook(lambda *_: calls.append("before"))
    module.network[3].register_full_backward_hook(lambda *_: calls.append("backward"))
    module.network[3].weight.register_hook(lambda *_: calls.append("gradient"))
    assert count_step(module, batch) is not None
    assert calls == []


def test_random_states_stay_as_they_are():
    module, batch = ordinary()
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert count_step(module, batch) is not None
    assert torch.get_rng_state().equal(before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    assert random.getstate() == before[2]


def test_random_states_stay_as_they_are_when_nothing_could_be_counted():
    class Random(Stranger):
        def training_step(self, batch, batch_idx):
            return self.network(batch).sum() * np.random.normal() * random.random() * batch.mean().item()

    before = np.random.get_state()[1].tolist(), random.getstate()
    with pytest.raises(UncountableError):
        count_step(Random(nn.Linear(5, 6)), torch.ones(2, 5))
    assert np.random.get_state()[1].tolist() == before[0]
    assert random.getstate() == before[1]


def test_a_module_without_a_trainer_is_in_its_first_step():
    class Stepwise(Stranger):
        def training_step(self, batch, batch_idx):
            return self.network(batch).sum() * (1 + self.global_step + self.current_epoch)

    assert count_step(Stepwise(nn.Linear(5, 6)), torch.ones(2, 5)) == StepFlops(linear(5, 6), linear(5, 6))


def test_nothing_is_computed_or_copied_on_the_device():
    class Seen(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.real = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if (
                isinstance(result, Tensor)
                and result.device.type != "meta"
                and func is not torch.ops.aten.detach.default
            ):
                self.real.append(func)
            return result

    module, batch = Stranger(nn.LSTM(5, 6)), torch.randn(3, 2, 5)
    with Seen() as seen:
        count_step(module, batch)
    assert seen.real == []


@pytest.mark.parametrize(
    "loss",
    [
        lambda net, x: net(x).sum() * x.mean().item(),
        lambda net, x: net(x).sum() if x.sum() > 0 else None,
        lambda net, x: net(x)[x[:, 0] > 0].sum(),
        lambda net, x: net(x).sum() * torch.bincount(torch.zeros(3, dtype=torch.long)).sum(),
        lambda net, x: torch.fft.rfft(net(x)).abs().sum(),
        lambda net, x: torch.linalg.svdvals(net(x)).sum(),
        lambda net, x: torch.cdist(net(x), net(x)).sum(),
        lambda net, x: F.bilinear(x, x, net.weight[:, :, None] * net.weight[:, None]).sum(),
        lambda net, x: torch.ops.stranger.square(net(x)).sum(),
        lambda net, x: net(x).sum() + ELSEWHERE(x).sum(),
        lambda net, x: None,
        lambda net, x: net(x).detach().sum(),
        lambda net, x: x.sum().requires_grad_(),
        lambda net, x: 1 / 0,
    ],
)
def test_what_cannot_be_counted_truly_has_no_flops(loss):
    class Uncountable(Stranger):
        def training_step(self, batch, batch_idx):
            return loss(self.network, batch)

    with pytest.raises(UncountableError):
        count_step(Uncountable(nn.Linear(5, 6)), torch.ones(4, 5))


ELSEWHERE = nn.Linear(5, 6)  # no part of the module, so that it cannot be copied along


@torch.library.custom_op("stranger::square", mutates_args=())
def square(x: Tensor) -> Tensor:
    return x * x


square.register_fake(torch.empty_like)
square.register_autograd(lambda ctx, grad: grad)


def test_what_cannot_be_copied_has_no_flops():
    module = Stranger(nn.Linear(5, 6))
    module.lock = threading.Lock()
    with pytest.raises(UncountableError):
        count_step(module, torch.ones(4, 5))


def test_the_reason_is_one_line():
    with pytest.raises(UncountableError) as why:
        count_step(Stranger(nn.Bilinear(5, 5, 3)), torch.ones(4, 5))
    assert str(why.value).startswith("TypeError: ") and "\n" not in str(why.value)


def test_a_step_without_products_has_no_flops():
    class Sum(Stranger):
        def training_step(self, batch, batch_idx):
            return sum(p.sum() for p in self.parameters())

    with pytest.raises(UncountableError, match="no matrix product"):
        count_step(Sum(nn.Linear(5, 6)), torch.ones(4, 5))


class Loop(nn.Module):
    """A loop over cells that lets the gradient go back `window` steps at a time."""

    def __init__(self, window: int):
        super().__init__()
        self.cell, self.window = nn.RNNCell(5, 6), window

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.new_zeros(len(x), 6)
        for index, step in enumerate(x.unbind(1)):
            hidden = self.cell(step, hidden if index % self.window else hidden.detach())
        return hidden


@pytest.fixture
def impatient(monkeypatch):
    """Every loop is too long to be counted step by step at first."""
    monkeypatch.setattr(flops, "_QUICK_OPERATIONS", 100)


def test_a_long_loop_is_counted_by_its_length(impatient, monkeypatch):
    monkeypatch.setattr(flops, "_MOST_OPERATIONS", 2000)  # the whole would take several times as many
    assert count_step(Stranger(Loop(window=1000)), torch.randn(4, 301, 5)) == StepFlops(*recurrent(301, 5, 6))


@pytest.mark.slow
def test_a_long_loop_that_is_no_line_is_counted_whole(impatient):
    forward, backward = recurrent(20, 5, 6)  # of one window; only the last one has a gradient
    counted = count_step(Stranger(Loop(window=20)), torch.randn(4, 120, 5))
    assert counted == StepFlops(6 * forward, backward)


def test_a_long_loop_of_a_model_for_one_length_is_counted_whole(impatient):
    class Fixed(Loop):
        def forward(self, x):
            return super().forward(x + torch.zeros(100, 1))

    assert count_step(Stranger(Fixed(window=1000)), torch.randn(4, 100, 5)) == StepFlops(*recurrent(100, 5, 6))


def test_a_step_of_endless_operations_is_not_counted(monkeypatch):
    monkeypatch.setattr(flops, "_MOST_OPERATIONS", 10)
    with pytest.raises(UncountableError):
        count_step(Stranger(nn.LSTM(5, 6)), torch.randn(9, 4, 5))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "gates", "layers"), [("rnn_cell", 1, 1), ("lstm_cell", 4, 1), ("stacked_lstm", 4, 2)])
def test_784_steps_take_what_their_closed_form_says(name, gates, layers):
    spec = DataSpec("sequence", (784, 1), "class", 10)
    assert count_step(*zoo_task(name, spec)) == StepFlops(*with_head(recurrent(784, 1, 128, gates, layers), 128, 10))


def test_weights_that_a_hook_or_a_parametrization_computes_still_get_gradients():
    for norm in (nn.utils.weight_norm, nn.utils.parametrizations.weight_norm):
        network = nn.Sequential(nn.Linear(5, 6), norm(nn.Linear(6, 7)))
        assert count_step(Stranger(network), torch.ones(2, 5)) == StepFlops(*chain(linear(5, 6), linear(6, 7)))


def test_a_gradient_of_a_gradient_is_part_of_the_backward_pass():
    class Penalized(Stranger):
        def training_step(self, batch, batch_idx):
            x = batch.requires_grad_()
            (gradient,) = torch.autograd.grad(self.network(x).sum(), x, create_graph=True)
            return gradient.square().sum()

    # Forward; the gradient of the input, a product; and of that one the gradient of the weight, another.
    assert count_step(Penalized(nn.Linear(5, 6)), torch.ones(2, 5)) == StepFlops(linear(5, 6), 2 * linear(5, 6))


def test_checkpointing_counts_what_it_computes_again_as_backward():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 7))

        def forward(self, x):
            return checkpoint(self.body, x, use_reentrant=False)

    forward, backward = chain(linear(5, 6), linear(6, 7))
    counted = count_step(Stranger(Checkpointed()), torch.ones(2, 5))
    assert counted.forward == forward
    assert backward < counted.backward <= forward + backward


@pytest.mark.parametrize("compiled", ["module", "network", "in place"])
def test_compiled_modules_are_counted_without_being_compiled(compiled):
    module = Stranger(nn.Linear(5, 6))
    if compiled == "module":
        module = from_compiled(torch.compile(module, backend=never))
    elif compiled == "network":
        module.network = torch.compile(module.network, backend=never)
    else:
        module.network.compile(backend=never)
    assert count_step(module, torch.ones(2, 5)) == StepFlops(linear(5, 6), linear(5, 6))


def never(graph, inputs):
    raise AssertionError("compiled")
