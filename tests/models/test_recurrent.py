"""The recurrent cells equal torch's own, step by step and through the fused kernels, in values and in gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from batchscope.data.spec import DataSpec
from batchscope.models.recurrent import LSTMCell, RNNCell, StackedLSTM, open_forget_gate, runs_fused, unroll
from batchscope.models.sequence import LSTMCellModel, RNNCellModel, StackedLSTMModel

BATCH, STEPS, FEATURES, HIDDEN = 4, 37, 3, 5  # steps enough for two whole blocks and a part of one
VALUE = DataSpec(kind="sequence", input_shape=(STEPS, FEATURES), target="value", num_outputs=1)
LAYERS = {"RNNCell": 0, "LSTMCell": 0, "StackedLSTM of 1": 1, "StackedLSTM of 3": 3}
networks = pytest.mark.parametrize("kind", LAYERS)
models = pytest.mark.parametrize("model_class", [RNNCellModel, LSTMCellModel, StackedLSTMModel])
backends = pytest.mark.parametrize("backend", ["fused", "reference"])


def network(kind: str, dropout: float = 0.0) -> Any:
    if layers := LAYERS[kind]:
        return StackedLSTM(layers, FEATURES, HIDDEN, dropout)
    return {"RNNCell": RNNCell, "LSTMCell": LSTMCell}[kind](FEATURES, HIDDEN)


def run(net: nn.Module, x: Tensor, states: Any, backend: Any) -> tuple[Any, Any]:
    if isinstance(net, StackedLSTM):
        net.backend = backend
        return net(x, states)
    return unroll(net, x, states, backend)


def random_states(net: nn.Module, **options: Any) -> Any:
    shape = (len(net.layers), BATCH, HIDDEN) if isinstance(net, StackedLSTM) else (BATCH, HIDDEN)
    first, second = torch.randn(shape, **options), torch.randn(shape, **options)
    return first if isinstance(net, RNNCell) else (first, second)


def sequence(**options: Any) -> Tensor:
    return torch.randn(BATCH, STEPS, FEATURES, **options)


def torch_state_dict(net: Any) -> dict[str, Tensor]:
    """A copy of the weights under the names of nn.RNN and nn.LSTM."""
    return {
        f"{kind}_{part}_l{layer}": getattr(linear, kind).detach().clone()
        for layer, cell in enumerate(net.cells if isinstance(net, StackedLSTM) else [net])
        for part, linear in (("ih", cell.i2h), ("hh", cell.h2h))
        for kind in ("weight", "bias")
    }


def flat(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [tensor for part in result or () for tensor in flat(part)]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# --- the same results ------------------------------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "from given states": {"given": True},
    "from default states": {},
    "read at the last step": {"read": "last step"},
    "read as final states": {"read": "states", "given": True},
    "one step": {"steps": 1, "given": True},
    "strided, in evaluation": {"strided": True, "evaluated": True},
    "in float32": {"dtype": torch.float32, "atol": 1e-4},
}


@pytest.mark.parametrize("way", WAYS)
@backends
@networks
def test_a_network_equals_torchs_in_values_states_and_gradients(kind: str, backend: str, way: str) -> None:
    how = {"dtype": torch.float64, "atol": 1e-10, "read": "everything", "steps": STEPS, **WAYS[way]}
    dtype, evaluated = how["dtype"], how.get("evaluated", False)
    ours = network(kind, dropout=0.9 if evaluated else 0.0).to(dtype).train(not evaluated)
    torchs = nn.RNN if isinstance(ours, RNNCell) else nn.LSTM
    theirs = torchs(FEATURES, HIDDEN, max(LAYERS[kind], 1), batch_first=True, dtype=dtype)
    theirs.load_state_dict(torch_state_dict(ours))
    x = torch.randn(how["steps"], BATCH, FEATURES, dtype=dtype).transpose(0, 1)
    x = (x if how.get("strided") else x.contiguous()).requires_grad_()
    states = random_states(ours, dtype=dtype, requires_grad=True) if how.get("given") else None

    def results(net: nn.Module) -> list[Tensor]:
        """Outputs, final states and gradients, weighted so that no errors cancel; then the network takes a step."""
        if net is ours:
            output, final = run(ours, x, states, backend)
        else:
            lifted = [state.view(-1, BATCH, HIDDEN) for state in flat(states)]
            output, final = net(x, None if not lifted else lifted[0] if torchs is nn.RNN else tuple(lifted))
        read = {"last step": [output[:, -1]], "states": flat(final), "everything": [output, *flat(final)]}[how["read"]]
        loss = sum((o.flatten() * torch.linspace(-1, 2, o.numel(), dtype=dtype)).mean() for o in read)
        wanted = [x, *flat(states), *net.parameters()]
        first = torch.autograd.grad(loss, wanted, retain_graph=True)
        torch.testing.assert_close(torch.autograd.grad(loss, wanted), first, rtol=0, atol=0)
        with torch.no_grad():
            for weight, gradient in zip(net.parameters(), first[1 + len(flat(states)) :], strict=True):
                weight -= gradient
        return [o.flatten() for o in (output, *flat(final), *first[: 1 + len(flat(states))])]

    before = [state.clone() for state in flat(states)]
    torch.testing.assert_close(results(ours), results(theirs), rtol=0, atol=how["atol"])
    torch.testing.assert_close(torch_state_dict(ours), dict(theirs.state_dict()), rtol=0, atol=how["atol"])
    assert all(torch.equal(state, copy) for state, copy in zip(flat(states), before, strict=True))


F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


@pytest.mark.parametrize(("dtype", "autocast", "given"), [(F32, BF16, True), (F32, F16, False), (F64, BF16, False)])
@backends
@networks
def test_autocast_stays_near_full_precision_and_has_gradients(kind, backend, dtype, autocast, given) -> None:
    net, x = network(kind).to(dtype), sequence(dtype=dtype)
    states = random_states(net, dtype=dtype) if given else None
    expected = run(net, x, states, "reference")[0]
    with torch.autocast("cpu", autocast):
        output, states = run(net, x, states, backend)
        again, _ = run(net, x, states, backend)  # the returned states are valid inputs
    atol = 1e-10 if dtype == F64 else 0.05  # autocast leaves float64 alone
    torch.testing.assert_close(output.to(dtype), expected, rtol=0, atol=atol)
    (output.sum() + again.sum()).backward()
    assert all(parameter.grad.isfinite().all() for parameter in net.parameters())
    assert {parameter.grad.dtype for parameter in net.parameters()} == {dtype}


def test_a_gradient_that_vanishes_is_zero_rather_than_denormal() -> None:
    cell = RNNCell(1, HIDDEN)
    with torch.no_grad():
        cell.h2h.weight.mul_(0.5)
    x = torch.randn(2, 400, 1, requires_grad=True)
    unroll(cell, x, backend="fused")[0][:, -1].sum().backward()
    tiny = (x.grad != 0) & (x.grad.abs() < torch.finfo(torch.float32).tiny)
    assert not tiny.any()
    assert not x.grad[:, 0].any()


# --- dropout and first weights ---------------------------------------------------------------------------------------


@backends
def test_both_backends_drop_between_the_layers_and_there_alone(backend: Any) -> None:
    lstm = StackedLSTM(2, FEATURES, HIDDEN, dropout=1.0, backend=backend).double()
    x = sequence(dtype=torch.float64)
    output, (hx, _) = lstm(x)
    below, _ = unroll(lstm.layers[0], x, backend="reference")
    above, _ = unroll(lstm.layers[1], torch.zeros(BATCH, STEPS, HIDDEN, dtype=torch.float64), backend="reference")
    torch.testing.assert_close(hx[0], below[:, -1])
    torch.testing.assert_close(output, above)  # reads zeros, and its own output is whole


@pytest.mark.parametrize("cell", [RNNCell, LSTMCell])
def test_the_recurrent_weights_of_every_gate_start_orthogonal(cell: type[RNNCell | LSTMCell]) -> None:
    for gate in cell(FEATURES, HIDDEN).h2h.weight.detach().split(HIDDEN):
        torch.testing.assert_close(gate @ gate.T, torch.eye(HIDDEN), rtol=0, atol=1e-5)


def test_a_model_starts_with_the_same_weights_on_any_number_of_threads() -> None:
    weights, threads = [], torch.get_num_threads()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            torch.manual_seed(0)
            weights.append(LSTMCell(FEATURES, 128).h2h.weight.detach())  # last digits of a QR depend on threads
            assert torch.get_num_threads() == number
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*weights)


def test_forget_gates_start_open_or_with_memories_of_all_lengths_up_to_a_known_one() -> None:
    cell = LSTMCell(FEATURES, HIDDEN)
    torch.testing.assert_close((cell.i2h.bias + cell.h2h.bias)[HIDDEN : 2 * HIDDEN], torch.ones(HIDDEN))
    hidden, (of_input, of_state) = 4_000, torch.randn(2, 16_000)
    open_forget_gate(of_input, of_state, hidden, memory_steps=200)
    input_gate, forget_gate, *_ = (of_input + of_state).split(hidden)
    spans = forget_gate.exp()  # a gate open by sigmoid(log t) forgets 1 / (t + 1) a step
    assert 1 <= spans.min() < 5
    assert 195 < spans.max() <= 199
    assert spans.mean() == pytest.approx(100, rel=0.05)
    assert torch.equal(input_gate, -forget_gate)


# --- which backend is taken ------------------------------------------------------------------------------------------


def test_auto_takes_the_fused_one() -> None:
    assert runs_fused("auto", [LSTMCell(FEATURES, HIDDEN)], sequence())


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Peephole(LSTMCell):
    def forward(self, input: Tensor, states: Any = None) -> Any:
        return super().forward(input, states)


CHANGES: dict[str, Callable[[LSTMCell], object]] = {
    "a Peephole with its own forward": lambda cell: setattr(cell, "__class__", Peephole),
    "a Linear that has hooks": lambda cell: cell.i2h.register_forward_hook(lambda *_: None),
    "Doubled": lambda cell: setattr(cell, "h2h", Doubled(HIDDEN, 4 * HIDDEN)),
    "complex64": lambda cell: cell.to(torch.complex64),
}


@pytest.mark.filterwarnings("ignore:Complex modules")
@pytest.mark.parametrize("why", CHANGES)
def test_what_a_kernel_would_leave_out_runs_in_the_cells(why: str) -> None:
    cell = LSTMCell(FEATURES, HIDDEN)
    CHANGES[why](cell)
    x = sequence(dtype=cell.i2h.weight.dtype)
    assert not runs_fused("auto", [cell], x)
    assert unroll(cell, x)[0].shape == (BATCH, STEPS, HIDDEN)
    with pytest.raises(ValueError, match=rf"^backend: fused cannot run .*{why}"):
        unroll(cell, x, backend="fused")


def test_a_dropout_of_ones_own_runs_between_the_cells() -> None:
    assert not runs_fused("auto", [LSTMCell(FEATURES, HIDDEN)] * 2, sequence(), nn.AlphaDropout())


@models
def test_a_model_passes_its_backend_on(model_class: Callable) -> None:
    model = model_class(VALUE, HIDDEN, backend="fused")
    next(m for m in model.modules() if isinstance(m, RNNCell | LSTMCell)).register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="backend: fused cannot run"):
        model(sequence())


# --- cuDNN ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Parameters on a CPU count as those on a GPU; lists what cuDNN is asked for: to move weights into one block."""
    calls = []

    def into_one_block(weights: list[Tensor], *arguments: Any) -> None:
        calls.append(arguments)
        block = torch.cat([weight.flatten() for weight in weights])
        for weight, part in zip(weights, block.split([weight.numel() for weight in weights]), strict=True):
            weight.set_(part.view_as(weight))

    monkeypatch.setattr(nn.Parameter, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch, "_cudnn_rnn_flatten_weight", into_one_block)
    monkeypatch.setattr(torch, "_use_cudnn_rnn_flatten_weight", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "is_acceptable", lambda weight: True)
    return calls


def test_weights_that_are_moved_to_a_gpu_are_put_into_one_block_once_as_by_nn_lstm(cudnn: list) -> None:
    lstm, x = StackedLSTM(2, FEATURES, HIDDEN, dropout=0, backend="fused"), sequence()
    before, expected = [id(parameter) for parameter in lstm.parameters()], lstm(x)
    lstm.float()
    lstm.float()
    each_layer_and_both = ((FEATURES, 1), (HIDDEN, 1), (FEATURES, 2))  # 2 is cuDNN's number of an LSTM
    assert cudnn == [(4, size, 2, HIDDEN, 0, layers, True, False) for size, layers in each_layer_and_both]
    assert len({parameter.untyped_storage().data_ptr() for parameter in lstm.parameters()}) == 1
    assert [id(parameter) for parameter in lstm.parameters()] == before
    torch.testing.assert_close(lstm(x), expected, rtol=0, atol=0)


SEPARATE: dict[str, Callable[[RNNCell], object]] = {
    "tied": lambda cell: setattr(cell.h2h, "bias", cell.i2h.bias),
    "normalised": lambda cell: nn.utils.parametrizations.weight_norm(cell.h2h),
    "half in float64": lambda cell: cell.i2h.double(),
}


@pytest.mark.parametrize("change", SEPARATE)
def test_weights_that_cannot_be_in_one_block_stay_where_they_are(change: str, cudnn: list) -> None:
    cell = RNNCell(FEATURES, HIDDEN)
    SEPARATE[change](cell)
    cell.to("cpu")
    assert not cudnn


# --- what does not fit -----------------------------------------------------------------------------------------------


def spoilt(states: Any, spoil: Callable[[Tensor], Tensor]) -> Any:
    return spoil(states) if isinstance(states, Tensor) else (states[0], spoil(states[1]))


# The shape of an input, or a change of the states; and the beginning of the error.
REFUSED: dict[str, tuple[tuple[int, ...] | Callable[[Any], Any], str]] = {
    "no steps": ((BATCH, 0, FEATURES), r"input: got \(4, 0, 3\), sequences of length 0"),
    "no samples": ((0, STEPS, FEATURES), r"input: got \(0, 37, 3\), a batch of length 0"),
    "a feature too many": ((BATCH, STEPS, 4), r"input: got \(4, 37, 4\), takes \(B, T, 3\)"),
    "no batch": ((FEATURES,), r"input: got \(3,\), takes \(B, T, 3\)"),
    "a dimension too many": ((1, BATCH, STEPS, FEATURES), r"input: got \(1, 4, 37, 3\), takes \(B, T, 3\)"),
    "narrow states": (lambda s: spoilt(s, lambda t: t[..., :-1]), r"(initial_)?states: got a state of shape .*4\), takes "),
    "states of more": (lambda s: spoilt(s, lambda t: torch.cat([t, t], -2)), r"(initial_)?states: got a state of .* 5\)$"),
    "another cell's": (lambda s: (s, s) if isinstance(s, Tensor) else s[0], r"(initial_)?states: takes (a pair|one tensor)"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
@networks
def test_what_does_not_fit_is_refused_by_name(kind: str, case: str) -> None:
    net, (spoil, reason) = network(kind), REFUSED[case]
    x, states = (sequence(), spoil(random_states(net))) if callable(spoil) else (torch.zeros(spoil), None)
    with pytest.raises(ValueError, match=f"^{reason}"):
        run(net, x, states, "auto")
