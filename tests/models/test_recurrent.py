"""The recurrent cells equal torch's own, in values and in gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from batchscope.models.recurrent import LSTMCell, RNNCell, StackedLSTM, open_forget_gate

BATCH, STEPS, FEATURES, HIDDEN = 4, 6, 3, 5
CLOSE = {"rtol": 0, "atol": 1e-10}


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def copy_weights(ours: RNNCell | LSTMCell, theirs: nn.Module, suffix: str = "") -> None:
    with torch.no_grad():
        for name, parameter in pairs(ours, suffix):
            getattr(theirs, name).copy_(parameter)


def pairs(ours: RNNCell | LSTMCell, suffix: str = "") -> list[tuple[str, nn.Parameter]]:
    """Our parameters by the names that torch gives them."""
    return [
        (f"weight_ih{suffix}", ours.i2h.weight),
        (f"weight_hh{suffix}", ours.h2h.weight),
        (f"bias_ih{suffix}", ours.i2h.bias),
        (f"bias_hh{suffix}", ours.h2h.bias),
    ]


def backward(*outputs: Tensor) -> None:
    """Backpropagate different weights for every number of the outputs, so that no mistake cancels out."""
    sum((o * torch.linspace(-1, 2, o.numel(), dtype=o.dtype).view_as(o)).sum() for o in outputs).backward()


def grads_then_none(tensors: list[Tensor]) -> list[Tensor]:
    grads = [tensor.grad for tensor in tensors]
    for tensor in tensors:
        tensor.grad = None
    return grads


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# --- one step --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [True, False], ids=["given state", "default state"])
def test_rnn_cell_equals_torchs_in_values_and_gradients(given: bool) -> None:
    ours = RNNCell(FEATURES, HIDDEN).double()
    theirs = nn.RNNCell(FEATURES, HIDDEN).double()
    copy_weights(ours, theirs)
    x, states = random(BATCH, FEATURES), [random(BATCH, HIDDEN)] if given else []

    output = ours(x, *states)
    backward(output)
    grads = grads_then_none([x, *states])
    expected = theirs(x, *states)
    backward(expected)

    torch.testing.assert_close(output, expected, **CLOSE)
    torch.testing.assert_close(grads, grads_then_none([x, *states]), **CLOSE)
    for name, parameter in pairs(ours):
        torch.testing.assert_close(parameter.grad, getattr(theirs, name).grad, **CLOSE)


@pytest.mark.parametrize("given", [True, False], ids=["given states", "default states"])
def test_lstm_cell_equals_torchs_in_values_and_gradients(given: bool) -> None:
    ours = LSTMCell(FEATURES, HIDDEN).double()
    theirs = nn.LSTMCell(FEATURES, HIDDEN).double()
    copy_weights(ours, theirs)
    x, states = random(BATCH, FEATURES), [random(BATCH, HIDDEN), random(BATCH, HIDDEN)] if given else []
    arguments = [tuple(states)] if given else []

    output = ours(x, *arguments)
    backward(*output)
    grads = grads_then_none([x, *states])
    expected = theirs(x, *arguments)
    backward(*expected)

    torch.testing.assert_close(output, expected, **CLOSE)
    torch.testing.assert_close(grads, grads_then_none([x, *states]), **CLOSE)
    for name, parameter in pairs(ours):
        torch.testing.assert_close(parameter.grad, getattr(theirs, name).grad, **CLOSE)


# --- whole sequences -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, STEPS], ids=["one step", "many steps"])
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("given", [True, False], ids=["given states", "default states"])
def test_stacked_lstm_equals_torchs_in_values_and_gradients(layers: int, given: bool, steps: int) -> None:
    ours = StackedLSTM(layers, FEATURES, HIDDEN, dropout=0).double()
    theirs = nn.LSTM(FEATURES, HIDDEN, layers, batch_first=True).double()
    for index, cell in enumerate(ours.layers):
        copy_weights(cell, theirs, f"_l{index}")
    x = random(BATCH, steps, FEATURES)
    states = [random(layers, BATCH, HIDDEN), random(layers, BATCH, HIDDEN)] if given else []
    arguments = [tuple(states)] if given else []

    output, final = ours(x, *arguments)
    backward(output, *final)
    grads = grads_then_none([x, *states])
    expected, expected_final = theirs(x, *arguments)
    backward(expected, *expected_final)

    assert output.shape == (BATCH, steps, HIDDEN)
    torch.testing.assert_close(output, expected, **CLOSE)
    torch.testing.assert_close(final, expected_final, **CLOSE)
    torch.testing.assert_close(grads, grads_then_none([x, *states]), **CLOSE)
    for index, cell in enumerate(ours.layers):
        for name, parameter in pairs(cell, f"_l{index}"):
            torch.testing.assert_close(parameter.grad, getattr(theirs, name).grad, **CLOSE)


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


@pytest.mark.parametrize("shape", [(BATCH, STEPS, FEATURES), (BATCH, FEATURES)], ids=["sequence", "single step"])
def test_the_callers_states_are_never_changed(shape: tuple[int, ...]) -> None:
    lstm = StackedLSTM(2, FEATURES, HIDDEN, dropout=0)
    states = (torch.randn(2, BATCH, HIDDEN), torch.randn(2, BATCH, HIDDEN))
    before = tuple(state.clone() for state in states)
    versions = [state._version for state in states]
    lstm(torch.randn(shape), states)

    assert torch.equal(states[0], before[0])
    assert torch.equal(states[1], before[1])
    assert [state._version for state in states] == versions


# --- initial states --------------------------------------------------------------------------------------------------


CELLS = {
    "RNNCell": lambda: (RNNCell(FEATURES, HIDDEN), (BATCH, FEATURES)),
    "LSTMCell": lambda: (LSTMCell(FEATURES, HIDDEN), (BATCH, FEATURES)),
    "StackedLSTM": lambda: (StackedLSTM(2, FEATURES, HIDDEN), (BATCH, STEPS, FEATURES)),
}


def flat(result: Tensor | tuple) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [tensor for part in result for tensor in flat(part)]


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


def test_dropout_cuts_what_the_layer_above_reads_and_nothing_else() -> None:
    lstm = StackedLSTM(2, FEATURES, HIDDEN, dropout=1.0).double()
    x = random(BATCH, STEPS, FEATURES)
    output, (hx, _) = lstm(x)

    alone = StackedLSTM(1, FEATURES, HIDDEN).double()
    alone.layers[0].load_state_dict(lstm.layers[0].state_dict())
    torch.testing.assert_close(hx[0], alone(x)[1][0][0], **CLOSE)  # the first layer sees its input and its own past

    above = StackedLSTM(1, HIDDEN, HIDDEN).double()
    above.layers[0].load_state_dict(lstm.layers[1].state_dict())
    unfed = above(torch.zeros(BATCH, STEPS, HIDDEN, dtype=torch.float64))[0]
    torch.testing.assert_close(output, unfed, **CLOSE)  # the last layer reads zeros, and its own output is whole
    assert output.abs().min() > 0


def test_dropout_scales_what_it_keeps() -> None:
    lstm = StackedLSTM(2, FEATURES, HIDDEN, dropout=0.5)
    read = []
    lstm.layers[1].register_forward_pre_hook(lambda _, arguments: read.append(arguments[0]))
    (below, _), _ = lstm(torch.randn(1_000, FEATURES))

    kept = read[0] != 0
    assert 0.45 < kept.float().mean() < 0.55
    torch.testing.assert_close(read[0][kept], 2 * below[kept])


def test_one_layer_has_nothing_to_drop() -> None:
    lstm = StackedLSTM(1, FEATURES, HIDDEN, dropout=1.0)
    x = torch.randn(BATCH, STEPS, FEATURES)
    trained = lstm(x)[0]
    torch.testing.assert_close(trained, lstm.eval()(x)[0])


def test_dropout_is_off_in_evaluation() -> None:
    x = torch.randn(BATCH, STEPS, FEATURES)
    dropping = StackedLSTM(2, FEATURES, HIDDEN, dropout=0.9)
    whole = StackedLSTM(2, FEATURES, HIDDEN, dropout=0)
    whole.load_state_dict(dropping.state_dict())

    assert not torch.allclose(dropping(x)[0], whole(x)[0])
    torch.testing.assert_close(dropping.eval()(x)[0], whole(x)[0])


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
