"""FLOPs of a recorded training step: equal to the closed forms, or not known."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import checkpoint

from batchscope.data.spec import DataSpec
from batchscope.hardware.flops import FORMULAS, UncountableError, count_flops, flops_per_sample
from batchscope.hardware.operations import OperationRecorder
from batchscope.models.cnn import SimpleCNN
from batchscope.records.operations import OperationRow

BATCH = 4


def linear(fan_in: int, fan_out: int) -> int:
    """The FLOPs of a sample in closed form; a multiply-add counts as two."""
    return 2 * fan_in * fan_out


def conv(size: int, c_in: int, c_out: int, kernel: int, groups: int = 1) -> int:
    return 2 * size * size * kernel * kernel * (c_in // groups) * c_out


def chain(*layers: int) -> tuple[int, int]:
    """Layers in a chain. Backward, each takes twice its forward FLOPs; only the first layer computes no input gradient."""
    return sum(layers), 2 * sum(layers) - layers[0]


def recurrent(steps, features, hidden, gates=1, layers=1, directions=1) -> tuple[int, int]:
    """Stacked recurrent layers on an input that needs no gradient.

    A step multiplies its input and its state by a weight each. Backward, each weight gets a gradient at every step;
    so does the state but for the first one, which is zeros, and the input but for the first layer's.
    """
    forward = backward = 0
    for layer in range(layers):
        input_part = linear(features if layer == 0 else directions * hidden, gates * hidden)
        state_part = linear(hidden, gates * hidden)
        forward += directions * steps * (input_part + state_part)
        backward += directions * steps * (input_part + state_part)
        backward += directions * ((steps - 1) * state_part + (steps * input_part if layer else 0))
    return forward, backward


def add_up(*pairs: tuple[int, int], times: int = 1) -> tuple[int, int]:
    forward, backward = map(sum, zip(*pairs, strict=True))
    return times * forward, times * backward


def count(function: Callable[[Any], Any], batch: Any) -> list[OperationRow]:
    """The operations of a step that is recorded as a fit records it: a network or a function of the batch, and backward."""
    recorder = OperationRecorder(part=lambda: "forward" if torch._C._current_autograd_node() is None else "backward")
    with recorder:
        output = function(batch)
        while isinstance(output, tuple):  # an output with the last states, or a packed output
            output = output[0]
        output.square().mean().backward()
    assert recorder.error is None, recorder.error
    if recorder.uncounted:
        raise UncountableError(f"no formula for {recorder.uncounted}")
    return recorder.steps[-1]


def by_part(operations: list[OperationRow]) -> tuple[int, int]:
    """FLOPs forward and backward."""
    forward, backward = (sum(row.flops for row in operations if row.part == part) for part in ("forward", "backward"))
    assert flops_per_sample([(operations, 1)])[0] == forward + backward
    return forward, backward


def test_the_cnn_of_the_zoo_takes_what_its_closed_form_says_and_its_convolutions_are_told_from_its_linear_layers():
    first, second = conv(28, 1, 32, 3), conv(14, 32, 64, 3)
    cnn = chain(first, second, linear(7 * 7 * 64, 128), linear(128, 10))
    rows = count(SimpleCNN(DataSpec("image", (1, 28, 28), "class", 10)), torch.randn(BATCH, 1, 28, 28))
    assert by_part(rows) == add_up(cnn, times=BATCH)
    convolutions = (2 * first + 3 * second) / sum(cnn)  # the first passes no gradient on
    assert flops_per_sample([(rows, BATCH)])[1] == pytest.approx(
        {"convolution": convolutions, "matmul": 1 - convolutions}
    )


def attention(x: Tensor) -> Tensor:
    q, k, v = QKV(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def penalty(x: Tensor) -> Tensor:
    """A product forward, a product for the gradient of the input, and a product for the gradient of that gradient."""
    x = x.clone().requires_grad_()
    return torch.autograd.grad(nn.Linear(5, 6)(x).sum(), x, create_graph=True)[0]


def with_weight(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function of a weight (6, 5) and of the batch, as a function of the batch."""
    return lambda x: function(torch.ones(6, 5, requires_grad=True), x)


LINEAR, (PROJECTIONS, PRODUCT) = linear(5, 6), (BATCH * 10 * linear(16, 48), BATCH * 2 * 2 * 10 * 10 * 8)
LENGTHS = (9, 4, 2)
PACKED = pack_sequence([torch.randn(length, 5) for length in LENGTHS])
X, SEQUENCE = torch.ones(4, 5), torch.randn(9, BATCH, 5)
GROUPED = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 16, 1))
TRANSPOSED = nn.Sequential(nn.ConvTranspose2d(4, 6, 3, stride=2), nn.ConvTranspose2d(6, 6, 3, groups=6))
QKV, MLP = nn.Linear(16, 48), nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 7))
FROZEN = nn.Sequential(nn.Linear(5, 6).requires_grad_(False), nn.Linear(6, 7), nn.Linear(7, 8))
STEPS = {  # a function and a batch → the FLOPs of the whole step, forward and backward
    "grouped convolutions": (GROUPED, torch.randn(1, 8, 10, 10), chain(conv(10, 8, 8, 3, 8), conv(10, 8, 16, 1))),
    "transposed convolutions: each input position": (
        TRANSPOSED, torch.randn(1, 4, 10, 10), chain(conv(10, 4, 6, 3), conv(21, 6, 6, 3, groups=6)),
    ),
    "attention: two products forward and five backward, one of them computed again": (
        attention, torch.randn(BATCH, 10, 16), (PROJECTIONS + 2 * PRODUCT, PROJECTIONS + 5 * PRODUCT),
    ),
    "no gradient of a frozen layer": (
        FROZEN, X[:1], (LINEAR + linear(6, 7) + linear(7, 8), linear(6, 7) + 2 * linear(7, 8)),
    ),
    "a gradient of a gradient is backward": (penalty, X[:1], (LINEAR, 2 * LINEAR)),
    "what checkpointing computes again is backward": (
        lambda x: checkpoint(MLP, x, use_reentrant=False), X[:1],
        (LINEAR + linear(6, 7), LINEAR + chain(LINEAR, linear(6, 7))[1]),
    ),
    "an LSTM": (nn.LSTM(5, 6), SEQUENCE, add_up(recurrent(9, 5, 6, 4), times=BATCH)),
    "two layers": (nn.LSTM(5, 6, 2), SEQUENCE, add_up(recurrent(9, 5, 6, 4, layers=2), times=BATCH)),
    "both directions": (nn.LSTM(5, 6, bidirectional=True), SEQUENCE, add_up(recurrent(9, 5, 6, 4, 1, 2), times=BATCH)),
    "a GRU": (nn.GRU(5, 6), SEQUENCE, add_up(recurrent(9, 5, 6, 3), times=BATCH)),
    "a packed LSTM": (nn.LSTM(5, 6), PACKED, add_up(*(recurrent(length, 5, 6, 4) for length in LENGTHS))),
    "in place": (with_weight(lambda w, x: torch.zeros(4, 6).addmm_(x, w.t())), X, (4 * LINEAR, 4 * LINEAR)),
    "baddbmm": (with_weight(lambda w, x: torch.baddbmm(w[:, 0], x[None], w.t()[None])), X, (4 * LINEAR, 4 * LINEAR)),
    "vmap": (with_weight(lambda w, x: torch.vmap(lambda row: w @ row)(x)), X, (4 * LINEAR, 4 * LINEAR)),
    "sparse gradients": (
        with_weight(lambda w, x: F.embedding(torch.ones(3, dtype=torch.long), w, sparse=True).sum() + x @ w.t()), X,
        (4 * LINEAR, 4 * LINEAR),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_a_step_takes_what_its_closed_form_says(name):
    function, batch, expected = STEPS[name]
    assert by_part(count(function, batch)) == expected


def cudnn(x, layers=1, directions=1, gates=4, mask=(False, False, False, True), sizes=()):
    """The FLOPs of the recurrent kernels of cuDNN by their arguments, on tensors without memory."""
    weights = []
    for layer in range(layers):
        features = x.shape[-1] if layer == 0 else directions * 6
        shapes = ((gates * 6, features), (gates * 6, 6), (gates * 6,), (gates * 6,))
        weights += [torch.empty(shape, device="meta") for _ in range(directions) for shape in shapes]
    hx = torch.empty(layers * directions, sizes[0] if sizes else x.shape[1], 6)
    args = {"input": x, "weight": weights, "weight_stride0": 4, "hx": hx, "num_layers": layers, "batch_sizes": sizes}
    args |= {"bidirectional": directions == 2, "output_mask": mask}
    return tuple(FORMULAS[getattr(torch.ops.aten, name)](args) for name in ("_cudnn_rnn", "_cudnn_rnn_backward"))


@pytest.mark.parametrize(("layers", "directions", "gates"), [(2, 1, 3), (2, 2, 4)])
def test_cudnns_kernels_count_by_lengths_and_by_the_mask_of_gradients(layers, directions, gates):
    x = torch.empty(9, BATCH, 5, device="meta")
    assert cudnn(x, layers, directions, gates) == add_up(recurrent(9, 5, 6, gates, layers, directions), times=BATCH)
    packed = cudnn(torch.empty(sum(LENGTHS), 5, device="meta"), sizes=(3, 3, 2, 2, 1, 1, 1, 1, 1))
    assert packed == add_up(*(recurrent(length, 5, 6, 4) for length in LENGTHS))
    for has_weights, factor in ((True, 2), (False, 1)):
        forward, backward = cudnn(x, layers, directions, gates, mask=(True, True, True, has_weights))
        assert backward == factor * forward


@torch.library.custom_op("stranger::square", mutates_args=())
def square(x: Tensor) -> Tensor:
    return x * x


square.register_autograd(lambda ctx, grad: grad)
INTEGERS = torch.ones(32, 8, dtype=torch.int8), torch.ones(8, 8, dtype=torch.int8)
UNKNOWN = {
    "svd": lambda w, x: torch.linalg.svdvals(x @ w.t()),
    "cdist of few rows": lambda w, x: torch.cdist(x @ w.t(), x @ w.t()),
    "a custom operation": lambda w, x: torch.ops.stranger.square(x @ w.t()),
    "a sparse matrix": lambda w, x: x.to_sparse() @ w.t(),
    "two sparse matrices": lambda w, x: (x.t().to_sparse() @ x.to_sparse()).to_dense() * w.sum(),
    "nested": lambda w, x: F.linear(torch.nested.nested_tensor([x, x]), w).to_padded_tensor(0.0),
    "integers": lambda w, x: torch._int_mm(*INTEGERS) * w.sum(),
}


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
@pytest.mark.parametrize("name", UNKNOWN)
def test_a_product_without_a_formula_leaves_the_step_without_flops(name):
    with pytest.raises(UncountableError, match="no formula for"):
        count(with_weight(UNKNOWN[name]), X)


def test_a_step_without_products_has_no_flops_and_those_of_the_optimizer_are_none_of_the_steps():
    recorder = OperationRecorder(part=lambda: "optimizer")
    with recorder:
        torch.ones(3, 3) @ torch.ones(3, 3)
        torch.linalg.svdvals(torch.ones(3, 3))
    assert recorder.uncounted is None
    with pytest.raises(UncountableError, match="no matrix product"):
        flops_per_sample([(recorder.steps[-1], 1)])


def test_the_flops_of_a_sample_are_those_of_updates_which_must_not_differ():
    ten, eighty, twice = ([OperationRow("aten.mm", "", "forward", "fp32", flops=n)] for n in (10, 80, 160))
    assert flops_per_sample([(eighty, 8), (eighty, 8), (ten, 1)]) == (10, {"matmul": 1})
    for update in ((twice, 8), (eighty, 4)):  # sequences of other lengths, in as many samples and in fewer
        with pytest.raises(UncountableError, match="different numbers of FLOPs"):
            flops_per_sample([(eighty, 8), update])


def test_products_are_told_apart_by_the_format_of_their_tensors():
    rows = [OperationRow("aten.mm", "", "forward", dtype, flops=n) for dtype, n in (("fp32", 10), ("bf16", 30))]
    assert flops_per_sample([(rows, 2)]) == (20, {"matmul": 0.25, "matmul bf16": 0.75})


def test_the_distances_of_many_rows_are_a_product():
    others = torch.randn(30, 6)
    rows = count(with_weight(lambda w, x: torch.cdist(x @ w.t(), others)), torch.randn(40, 5))
    assert by_part(rows)[0] == 2 * 40 * 5 * 6 + 2 * 40 * 6 * 30


@pytest.mark.parametrize("name", ["mv", "addmv", "dot", "vdot", "trilinear"])
def test_a_product_without_a_formula_is_unknown_and_not_0(name: str) -> None:
    packet = getattr(torch.ops.aten, "_trilinear" if name == "trilinear" else name)
    assert count_flops(packet.default, (), {}, {}, None) is None
