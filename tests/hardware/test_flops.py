"""FLOPs of a recorded training step: equal to the closed forms, or not known."""

from typing import Any

import lightning
import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.checkpoint import checkpoint

from batchscope.hardware.flop_formulas import OURS
from batchscope.hardware.flops import StepFlops, UncountableError, flops_of, flops_per_sample
from batchscope.hardware.operations import OperationRecorder
from batchscope.records.operations import OperationRow
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
    zoo_task,
)
from tests.support.recorded import count_step, record_step


class Stranger(lightning.LightningModule):
    """A LightningModule as anybody may write one: here the mean of the squared outputs of a network is the loss."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output = self.network(batch)
        output = output[0] if isinstance(output, tuple) else output
        loss = (output.data if isinstance(output, PackedSequence) else output).square().mean()
        return loss


@pytest.mark.parametrize(("name", "spec"), ZOO, ids=lambda value: value if isinstance(value, str) else value.target)
def test_every_model_of_the_zoo_takes_what_its_closed_form_says(name, spec):
    task, batch = zoo_task(name, spec)
    assert count_step(task, batch) == StepFlops(*ZOO[name, spec])


def test_the_convolutions_of_a_network_are_told_from_its_linear_layers():
    shares = count_step(*zoo_task("cnn", MNIST)).shares
    convolutions = conv(28, 1, 32, 3) + conv(14, 32, 64, 3)
    total = 3 * convolutions - conv(28, 1, 32, 3)  # the first passes no gradient on
    assert shares["convolution"] == pytest.approx(total / sum(CNN))
    assert shares["matmul"] == pytest.approx(1 - total / sum(CNN))


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


def test_a_resnet_takes_what_is_published_of_it():
    published = 2e9 * torchvision.models.get_model_weights("resnet18").DEFAULT.meta["_ops"]  # billions of multiply-adds
    counted = count_step(Stranger(torchvision.models.resnet18()), torch.randn(1, 3, 224, 224))
    assert counted.forward == pytest.approx(published, rel=0.01)
    assert counted.backward == 2 * counted.forward - conv(112, 3, 64, 7)


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


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def frozen():
    network = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 7), nn.Linear(7, 8))
    network[0].requires_grad_(False)
    return network


GROUPED = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 16, 1))
TRANSPOSED = nn.Sequential(nn.ConvTranspose2d(4, 6, 3, stride=2), nn.ConvTranspose2d(6, 6, 3, groups=6))
LINEAR, (PROJECTIONS, PRODUCT) = (linear(5, 6), linear(6, 7), linear(7, 8)), (10 * linear(16, 48), 2 * 2 * 10 * 10 * 8)
CLOSED = {
    "a share of the full ones": (GROUPED, (2, 8, 10, 10), chain(conv(10, 8, 8, 3, groups=8), conv(10, 8, 16, 1))),
    "a product for each input position": (
        TRANSPOSED, (2, 4, 10, 10), chain(conv(10, 4, 6, 3), conv(21, 6, 6, 3, groups=6)),
    ),
    "two products forward and four backward": (
        Attention(), (BATCH, 10, 16), (PROJECTIONS + 2 * PRODUCT, PROJECTIONS + 4 * PRODUCT),
    ),
    "no gradient of a frozen layer": (frozen(), (2, 5), (sum(LINEAR), LINEAR[1] + 2 * LINEAR[2])),
}  # fmt: skip


@pytest.mark.parametrize("name", CLOSED)
def test_convolutions_attention_and_frozen_layers_take_what_their_closed_form_says(name):
    network, shape, expected = CLOSED[name]
    assert count_step(Stranger(network), torch.randn(shape)) == StepFlops(*expected)


def test_a_step_without_products_has_no_flops():
    class Sum(Stranger):
        def training_step(self, batch, batch_idx):
            return sum(p.sum() for p in self.parameters())

    with pytest.raises(UncountableError, match="no matrix product"):
        count_step(Sum(nn.Linear(5, 6)), torch.ones(4, 5))


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


LENGTHS = (9, 4, 2)


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3)])
def test_packed_sequences_count_by_their_lengths_and_twice_in_two_directions(kind, gates):
    packed = pack_sequence([torch.randn(length, 5) for length in LENGTHS])
    each = [recurrent(length, 5, 6, gates=gates) for length in LENGTHS]
    assert count_step(Stranger(kind(5, 6)), packed, batch_size=1) == StepFlops(*map(sum, zip(*each, strict=True)))
    both = count_step(Stranger(kind(5, 6, bidirectional=True)), packed, batch_size=1)
    assert both.forward == 2 * sum(forward for forward, _ in each)


def cudnn(kind, x, layers=1, directions=1, hidden=6, gates=4, **options):
    """The FLOPs of a recurrent kernel of cuDNN by its arguments; here on tensors without memory."""
    samples = options["batch_sizes"][0] if options.get("batch_sizes") else x.shape[1]
    weights = []
    for layer in range(layers):
        features = x.shape[-1] if layer == 0 else directions * hidden
        of_one = ((gates * hidden, features), (gates * hidden, hidden), (gates * hidden,), (gates * hidden,))
        weights += [torch.empty(shape, device="meta") for _ in range(directions) for shape in of_one]
    known = {
        "input": x,
        "weight": weights,
        "weight_stride0": 4,
        "hx": torch.empty(layers * directions, samples, hidden),
    }
    known |= {"num_layers": layers, "bidirectional": directions == 2, "batch_sizes": []}
    return OURS[getattr(torch.ops.aten, kind)](known | options)


@pytest.mark.parametrize(("layers", "directions", "gates"), [(1, 1, 4), (2, 1, 3), (2, 2, 4), (1, 2, 1)])
def test_cudnns_kernels_take_what_their_closed_form_says(layers, directions, gates):
    x, options = torch.empty(9, BATCH, 5, device="meta"), {"layers": layers, "directions": directions, "gates": gates}
    backward = cudnn("_cudnn_rnn_backward", x, **options, output_mask=[False, False, False, True])
    expected = recurrent(9, 5, 6, gates, layers, directions)
    assert (cudnn("_cudnn_rnn", x, **options), backward) == tuple(BATCH * each for each in expected)


def test_cudnns_packed_sequences_count_by_their_lengths_and_its_mask_says_which_gradients_there_are():
    x, sizes = torch.empty(sum(LENGTHS), 5, device="meta"), [3, 3, 2, 2, 1, 1, 1, 1, 1]
    backward = cudnn("_cudnn_rnn_backward", x, batch_sizes=sizes, output_mask=[False, False, False, True])
    each = [recurrent(length, 5, 6, gates=4) for length in LENGTHS]
    assert (cudnn("_cudnn_rnn", x, batch_sizes=sizes), backward) == tuple(map(sum, zip(*each, strict=True)))
    x = torch.empty(9, BATCH, 5, device="meta")
    forward = cudnn("_cudnn_rnn", x)
    assert cudnn("_cudnn_rnn_backward", x, output_mask=[True, True, True, True]) == 2 * forward
    assert cudnn("_cudnn_rnn_backward", x, output_mask=[True, True, True, False]) == forward


PRODUCTS = {
    "mv": (lambda w, x: torch.mv(w, x[0]), 2 * 30, 0),
    "addmv": (lambda w, x: torch.addmv(w[:, 0], w, x[0]), 2 * 30, 0),
    "dot": (lambda w, x: torch.dot(w[0], x[0]), 2 * 5, 0),
    "mm": (lambda w, x: torch.mm(x, w.t()), 2 * 4 * 30, 2 * 4 * 30),
    "addmm": (lambda w, x: torch.addmm(w[:, 0], x, w.t()), 2 * 4 * 30, 2 * 4 * 30),
    "in place": (lambda w, x: torch.zeros(4, 6).addmm_(x, w.t()), 2 * 4 * 30, 2 * 4 * 30),
    "bmm": (lambda w, x: torch.bmm(x[None], w.t()[None]), 2 * 4 * 30, 2 * 4 * 30),
    "baddbmm": (lambda w, x: torch.baddbmm(w[:, 0], x[None], w.t()[None]), 2 * 4 * 30, 2 * 4 * 30),
    "einsum": (lambda w, x: torch.einsum("ij,kj->ik", x, w), 2 * 4 * 30, 2 * 4 * 30),
}


class Function(Stranger):
    """Computes with one weight of 6 × 5."""

    def __init__(self, function: Any):
        super().__init__(nn.Linear(5, 6))
        self.function = function

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.function(self.network.weight, batch).sum()


@pytest.mark.parametrize("name", PRODUCTS)
def test_every_product_counts_forward_and_backward(name):
    function, forward, backward = PRODUCTS[name]
    found = flops_of(record_step(Function(function), torch.ones(4, 5)).steps[-1], 1)
    assert (found.forward, found.backward) == (forward, backward)  # the gradient of a vector's product is an outer one


@torch.library.custom_op("stranger::square", mutates_args=())
def square(x: Tensor) -> Tensor:
    return x * x


square.register_autograd(lambda ctx, grad: grad)


@pytest.mark.parametrize(
    "loss",
    [
        lambda w, x: torch.fft.rfft(x @ w.t()).abs(),
        lambda w, x: torch.linalg.svdvals(x @ w.t()),
        lambda w, x: torch.cdist(x @ w.t(), x @ w.t()),
        lambda w, x: torch.ops.stranger.square(x @ w.t()),
        lambda w, x: torch.sparse.mm(x.to_sparse(), w.t()),
        lambda w, x: x.to_sparse() @ w.t(),
        lambda w, x: F.linear(torch.nested.nested_tensor([x, x]), w).to_padded_tensor(0.0),
        lambda w, x: torch._int_mm(torch.ones(32, 8, dtype=torch.int8), torch.ones(8, 8, dtype=torch.int8)) * w.sum(),
    ],
    ids=["fft", "svd", "cdist", "a custom operation", "sparse.mm", "a sparse matrix", "nested", "integers"],
)
def test_a_product_without_a_formula_leaves_the_step_without_flops(loss):
    with pytest.raises(UncountableError, match="no formula for"):
        count_step(Function(loss), torch.ones(4, 5))


@pytest.mark.parametrize(
    "loss",
    [
        lambda w, x: (x @ w.t()) * (x.mean().item() + 1),
        lambda w, x: x @ w.t() if x.sum() > 0 else x,
        lambda w, x: (x @ w.t())[x[:, 0] > 0],
        lambda w, x: x @ w.t() + torch.bincount(torch.zeros(3, dtype=torch.long)).sum(),
        lambda w, x: F.embedding(torch.ones(3, dtype=torch.long), w, sparse=True).sum() + x @ w.t(),
        lambda w, x: torch.vmap(lambda each: w @ each)(x),
    ],
    ids=["item", "if", "mask", "bincount", "sparse gradients", "vmap"],
)
def test_a_step_that_depends_on_its_data_counts_as_it_ran(loss):
    assert count_step(Function(loss), torch.ones(4, 5)).total == 2 * linear(5, 6)


def test_products_of_the_optimizer_are_none_of_the_steps():
    part = "optimizer"
    recorder = OperationRecorder(part=lambda: part)
    with recorder:
        torch.ones(3, 3) @ torch.ones(3, 3)
        torch.linalg.svdvals(torch.ones(3, 3))
    assert recorder.uncounted is None
    with pytest.raises(UncountableError, match="no matrix product"):
        flops_of(recorder.steps[-1], 1)


def operation(flops: float) -> OperationRow:
    return OperationRow("aten.mm", "", "forward", "fp32", flops=flops)


def test_the_flops_of_a_sample_are_the_mean_of_whole_updates():
    assert flops_per_sample([([operation(80)], 8), ([operation(80)], 8), ([operation(9)], 1)]).total == 10


def test_updates_that_differ_have_no_flops():
    with pytest.raises(UncountableError, match="different numbers of FLOPs"):
        flops_per_sample([([operation(80)], 8), ([operation(160)], 8)])
