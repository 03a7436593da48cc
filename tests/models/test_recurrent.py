"""The recurrent cells equal torch's own, in values and in gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from batchscope.models.layout import torch_state_dict
from batchscope.models.recurrent import LSTMCell, RNNCell, StackedLSTM, open_forget_gate, unroll

BATCH, STEPS, FEATURES, HIDDEN = 4, 6, 3, 5
CLOSE = {"rtol": 0, "atol": 1e-10}


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def flat(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [tensor for part in result for tensor in flat(part)]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# --- torch's modules -------------------------------------------------------------------------------------------------


def lstm(layers: int) -> tuple[StackedLSTM, nn.LSTM]:
    ours = StackedLSTM(layers, FEATURES, HIDDEN, dropout=0, backend="reference")
    return ours, nn.LSTM(FEATURES, HIDDEN, layers, batch_first=True)


PAIRS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "RNNCell": lambda: (RNNCell(FEATURES, HIDDEN), nn.RNN(FEATURES, HIDDEN, batch_first=True)),
    "LSTMCell": lambda: (LSTMCell(FEATURES, HIDDEN), nn.LSTM(FEATURES, HIDDEN, batch_first=True)),
    "StackedLSTM of 1": lambda: lstm(1),
    "StackedLSTM of 3": lambda: lstm(3),
}


@pytest.mark.parametrize("steps", [1, STEPS], ids=["one step", "many steps"])
@pytest.mark.parametrize("given", [True, False], ids=["given states", "default states"])
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_a_network_equals_torchs_with_the_same_weights(pair: Callable, given: bool, steps: int) -> None:
    ours, theirs = (net.double() for net in pair())
    theirs.load_state_dict(torch_state_dict(ours))
    x, shape = random(BATCH, steps, FEATURES), (getattr(theirs, "num_layers", 1), BATCH, HIDDEN)
    states = [random(*shape) for _ in range(1 if isinstance(ours, RNNCell) else 2)] if given else []
    is_cell = not isinstance(ours, StackedLSTM)

    def run(net: Any, squeezed: bool) -> list[Tensor]:
        """Outputs, final states and gradients; the weights go against their gradients."""
        own = [state[0] if squeezed else state for state in states]
        arguments = [x, own[0] if len(own) == 1 else tuple(own)] if own else [x]
        output = flat(unroll(net, *arguments, backend="reference") if squeezed else net(*arguments))
        loss = sum(
            (o * torch.linspace(-1, 2, o.numel(), dtype=o.dtype).view(-1)).sum() for o in map(Tensor.flatten, output)
        )
        given = torch.autograd.grad(loss, [x, *states], retain_graph=True)
        loss.backward(inputs=[*net.parameters()])
        torch.optim.SGD(net.parameters(), lr=1.0).step()
        return [*(o.reshape(-1) for o in output), *given]

    torch.testing.assert_close(run(ours, is_cell), run(theirs, False), **CLOSE)
    torch.testing.assert_close(torch_state_dict(ours), dict(theirs.state_dict()), **CLOSE)


# --- single steps ----------------------------------------------------------------------------------------------------


def test_a_single_step_gives_the_list_of_every_layers_output() -> None:
    lstm = StackedLSTM(3, FEATURES, HIDDEN, dropout=0)
    x = torch.randn(BATCH, FEATURES)
    outputs, (hx, cx) = lstm(x)

    assert isinstance(outputs, list)
    assert [tuple(output.shape) for output in outputs] == [(BATCH, HIDDEN)] * 3
    assert hx.shape == cx.shape == (3, BATCH, HIDDEN)
    torch.testing.assert_close(torch.stack(outputs), hx)
    torch.testing.assert_close(outputs[-1], lstm(x[:, None])[0][:, 0])


def test_steps_fed_one_by_one_equal_the_whole_sequence() -> None:
    lstm = StackedLSTM(2, FEATURES, HIDDEN, dropout=0).double()
    x = random(BATCH, STEPS, FEATURES)
    states, last = None, []
    for step in x.unbind(dim=1):
        outputs, states = lstm(step, states)
        last.append(outputs[-1])

    whole, final = lstm(x)
    torch.testing.assert_close(torch.stack(last, dim=1), whole, **CLOSE)
    torch.testing.assert_close(states, final, **CLOSE)


# --- initial states --------------------------------------------------------------------------------------------------


CELLS = {
    "RNNCell": lambda: (RNNCell(FEATURES, HIDDEN), (BATCH, FEATURES)),
    "LSTMCell": lambda: (LSTMCell(FEATURES, HIDDEN), (BATCH, FEATURES)),
    "StackedLSTM": lambda: (StackedLSTM(2, FEATURES, HIDDEN), (BATCH, STEPS, FEATURES)),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("make", CELLS.values(), ids=CELLS)
def test_default_states_take_the_inputs_dtype(
    make: Callable[[], tuple[nn.Module, tuple[int, ...]]], dtype: torch.dtype
) -> None:
    cell, shape = make()
    assert {tensor.dtype for tensor in flat(cell.to(dtype)(torch.randn(shape, dtype=dtype)))} == {dtype}


@pytest.mark.parametrize("make", CELLS.values(), ids=CELLS)
def test_default_states_are_made_on_the_inputs_device(make: Callable[[], tuple[nn.Module, tuple[int, ...]]]) -> None:
    cell, shape = make()
    outputs = flat(cell.to("meta")(torch.randn(shape, device="meta")))
    assert {tensor.device.type for tensor in outputs} == {"meta"}


# --- dropout ---------------------------------------------------------------------------------------------------------


def test_dropout_scales_what_it_keeps() -> None:
    lstm = StackedLSTM(2, FEATURES, HIDDEN, dropout=0.5)
    read = []
    lstm.layers[1].register_forward_pre_hook(lambda _, arguments: read.append(arguments[0]))
    (below, _), _ = lstm(torch.randn(1_000, FEATURES))

    kept = read[0] != 0
    assert 0.45 < kept.float().mean() < 0.55
    torch.testing.assert_close(read[0][kept], 2 * below[kept])


# --- first weights ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", [RNNCell, LSTMCell])
def test_the_recurrent_weights_of_every_gate_start_orthogonal(cell: type[RNNCell | LSTMCell]) -> None:
    for gate in cell(FEATURES, HIDDEN).h2h.weight.detach().split(HIDDEN):
        torch.testing.assert_close(gate @ gate.T, torch.eye(HIDDEN), rtol=0, atol=1e-5)


def test_the_forget_gate_starts_open() -> None:
    cell = LSTMCell(FEATURES, HIDDEN)
    forget = slice(HIDDEN, 2 * HIDDEN)
    torch.testing.assert_close((cell.i2h.bias + cell.h2h.bias)[forget], torch.ones(HIDDEN))


def test_forget_gates_may_start_with_memories_of_all_lengths_up_to_a_known_one() -> None:
    hidden, (of_input, of_state) = 4_000, torch.randn(2, 16_000)
    open_forget_gate(of_input, of_state, hidden, memory_steps=200)
    input_gate, forget_gate, *_ = (of_input + of_state).split(hidden)
    spans = forget_gate.exp()  # a gate open by sigmoid(log t) forgets 1 / (t + 1) a step
    assert 1 <= spans.min() < 5
    assert 195 < spans.max() <= 199
    assert spans.mean() == pytest.approx(100, rel=0.05)
    assert torch.equal(input_gate, -forget_gate)
