"""The two ways to run a recurrent model: the same weights, outputs, states and gradients, whichever is taken."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from batchscope._torch import flatten_cudnn_weights
from batchscope.data.spec import DataSpec
from batchscope.distributed.sharding import shard
from batchscope.models import fused
from batchscope.models.recurrent import LSTMCell, RNNCell, StackedLSTM, runs_fused, unroll
from batchscope.models.sequence import LSTMCellModel, RNNCellModel, SequenceModel, StackedLSTMModel

BATCH, STEPS, FEATURES, HIDDEN = 4, 37, 3, 5  # steps enough for two whole blocks and a part of one
VALUE = DataSpec(kind="sequence", input_shape=(STEPS, FEATURES), target="value", num_outputs=1)
PER_STEP = DataSpec(kind="sequence", input_shape=(STEPS, FEATURES), target="class_per_step", num_outputs=6)
MODELS = {"RNNCellModel": RNNCellModel, "LSTMCellModel": LSTMCellModel, "StackedLSTMModel": StackedLSTMModel}
LAYERS = {"RNNCell": 0, "LSTMCell": 0, "StackedLSTM of 1": 1, "StackedLSTM of 3": 3}
networks = pytest.mark.parametrize("kind", LAYERS)
models = pytest.mark.parametrize("model_class", MODELS.values(), ids=MODELS)


def network(kind: str) -> nn.Module:
    if layers := LAYERS[kind]:
        return StackedLSTM(layers, FEATURES, HIDDEN, dropout=0)
    return {"RNNCell": RNNCell, "LSTMCell": LSTMCell}[kind](FEATURES, HIDDEN)


def run(net: nn.Module, x: Tensor, states: Any, backend: str) -> tuple[Tensor, Any]:
    if isinstance(net, StackedLSTM):
        net.backend = backend
        return net(x, states)
    return unroll(net, x, states, backend)


def random_states(net: nn.Module, **options: Any) -> Any:
    shape = (len(net.layers), BATCH, HIDDEN) if isinstance(net, StackedLSTM) else (BATCH, HIDDEN)
    first, second = torch.randn(shape, **options), torch.randn(shape, **options)
    return first if isinstance(net, RNNCell) else (first, second)


def flat(result: Any) -> list[Tensor]:
    if result is None:
        return []
    return [result] if isinstance(result, Tensor) else [tensor for part in result for tensor in flat(part)]


def outputs_and_gradients(net: nn.Module, x: Tensor, states: Any, backend: str, read: str) -> list[Tensor]:
    """Everything that a run gives, and the gradients of it all, weighted so that no mistake cancels out."""
    output, final = run(net, x, states, backend)
    losses = {"last step": [output[:, -1]], "states": flat(final), "everything": [output, *flat(final)]}
    loss = sum((o * torch.linspace(-1, 2, o.numel(), dtype=o.dtype).view_as(o)).mean() for o in losses[read])
    return flat((output, final)) + list(torch.autograd.grad(loss, [x, *flat(states), *net.parameters()]))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# --- the same results ------------------------------------------------------------------------------------------------


PRECISE = [(read, torch.float64, 1e-10) for read in ("everything", "last step", "states")]
PRECISE += [("everything", torch.float32, 1e-4)]


@pytest.mark.parametrize(("read", "dtype", "atol"), PRECISE)
@pytest.mark.parametrize("given", [True, False], ids=["given states", "default states"])
@networks
def test_fused_equals_the_reference_in_values_states_and_gradients(kind, given, dtype, atol, read):
    net = network(kind).to(dtype)
    x = torch.randn(BATCH, STEPS, FEATURES, dtype=dtype, requires_grad=True)
    states = random_states(net, dtype=dtype, requires_grad=True) if given else None
    results = [outputs_and_gradients(net, x, states, backend, read) for backend in ("fused", "reference")]
    torch.testing.assert_close(*results, rtol=0, atol=atol)


INPUTS: dict[str, Callable[[], Tensor]] = {
    "T=1": lambda: torch.randn(BATCH, 1, FEATURES, dtype=torch.float64),
    "single step": lambda: torch.randn(BATCH, FEATURES, dtype=torch.float64),
    "another layout": lambda: torch.randn(FEATURES, STEPS, BATCH, dtype=torch.float64).permute(2, 1, 0),
}


@pytest.mark.parametrize("make", INPUTS.values(), ids=INPUTS)
@networks
def test_fused_runs_any_input_that_the_cells_run(kind, make):
    net, x = network(kind).double(), make()
    states = random_states(net, dtype=torch.float64)
    torch.testing.assert_close(run(net, x, states, "fused"), run(net, x, states, "reference"), rtol=0, atol=1e-10)


@networks
def test_fused_gives_gradients_to_a_model_in_evaluation(kind):
    net = network(kind).double().eval()
    x = torch.randn(BATCH, STEPS, FEATURES, dtype=torch.float64, requires_grad=True)
    results = [outputs_and_gradients(net, x, None, backend, "everything") for backend in ("fused", "reference")]
    torch.testing.assert_close(*results, rtol=0, atol=1e-10)


@networks
def test_a_gradient_can_be_taken_twice_of_one_graph(kind):
    net = network(kind)
    loss = run(net, torch.randn(BATCH, STEPS, FEATURES), None, "fused")[0].square().sum()
    first = torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(loss, list(net.parameters())), first, rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["fused", "reference"])
@networks
def test_the_given_states_are_never_changed(kind, backend):
    net = network(kind)
    states = random_states(net)
    before = [state.clone() for state in flat(states)]
    run(net, torch.randn(BATCH, STEPS, FEATURES), states, backend)
    assert all(torch.equal(state, kept) for state, kept in zip(flat(states), before, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("given", [True, False], ids=["given states", "default states"])
@pytest.mark.parametrize("backend", ["fused", "reference"])
@networks
def test_autocast_stays_near_float32_and_has_gradients(kind, backend, given, dtype):
    net, x = network(kind), torch.randn(BATCH, STEPS, FEATURES)
    states = random_states(net) if given else None
    expected = run(net, x, states, "reference")[0]
    with torch.autocast("cpu", dtype):
        output, states = run(net, x, states, backend)
        again, _ = run(net, x, states, backend)  # what it returns, it takes
    torch.testing.assert_close(output.float(), expected, rtol=0, atol=0.05)
    (output.sum() + again.sum()).backward()
    assert all(parameter.grad.isfinite().all() for parameter in net.parameters())
    assert all(parameter.grad.dtype == torch.float32 for parameter in net.parameters())


@networks
def test_autocast_leaves_float64_alone(kind):
    net, x = network(kind).double(), torch.randn(BATCH, STEPS, FEATURES, dtype=torch.float64)
    expected = run(net, x, None, "reference")
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(run(net, x, None, "fused"), expected, rtol=0, atol=1e-10)


def test_a_gradient_that_vanishes_is_zero_rather_than_denormal():
    cell = RNNCell(1, HIDDEN)
    with torch.no_grad():
        cell.h2h.weight.mul_(0.5)
    x = torch.randn(2, 400, 1, requires_grad=True)
    unroll(cell, x, backend="fused")[0][:, -1].sum().backward()
    tiny = (x.grad != 0) & (x.grad.abs() < torch.finfo(torch.float32).tiny)
    assert not tiny.any()
    assert not x.grad[:, 0].any()


@pytest.mark.parametrize("backend", ["auto", "fused", "reference"])
@models
def test_models_run_in_inference_mode_and_by_seed_the_same(model_class, backend):
    def train_and_evaluate() -> tuple[Tensor, Tensor]:
        torch.manual_seed(1)
        model, x = model_class(VALUE, HIDDEN, backend=backend), torch.randn(BATCH, STEPS, FEATURES)
        trained = model(x)
        with torch.inference_mode():
            return trained, model.eval()(x)

    for first, second in zip(train_and_evaluate(), train_and_evaluate(), strict=True):
        assert torch.equal(first, second)


# --- dropout ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["fused", "reference"])
def test_both_backends_drop_between_the_layers_and_there_alone(backend):
    lstm = StackedLSTM(2, FEATURES, HIDDEN, dropout=1.0, backend=backend).double()
    x = torch.randn(BATCH, STEPS, FEATURES, dtype=torch.float64)
    output, (hx, _) = lstm(x)
    below, _ = unroll(lstm.layers[0], x, backend="reference")
    above, _ = unroll(lstm.layers[1], torch.zeros(BATCH, STEPS, HIDDEN, dtype=torch.float64), backend="reference")
    torch.testing.assert_close(hx[0], below[:, -1])
    torch.testing.assert_close(output, above)  # reads zeros, and its own output is whole


def test_what_is_dropped_has_the_same_distribution():
    def moments(backend: str) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        lstm = StackedLSTM(2, FEATURES, HIDDEN, dropout=0.4, backend=backend)
        torch.manual_seed(1)
        outputs = lstm(torch.ones(40_000, 2, FEATURES))[0][:, -1]  # of equal samples: what differs is what was dropped
        return outputs.mean(0), outputs.std(0)

    with torch.no_grad():
        (mean, std), (expected_mean, expected_std) = moments("fused"), moments("reference")
    assert expected_std.min() > 0.001
    standard_error = expected_std / 40_000**0.5
    assert ((mean - expected_mean).abs() < 6 * standard_error).all()
    torch.testing.assert_close(std, expected_std, rtol=0.05, atol=0)


@pytest.mark.parametrize("backend", ["fused", "reference"])
def test_nothing_is_dropped_in_evaluation_even_with_gradients(backend):
    lstm = StackedLSTM(2, FEATURES, HIDDEN, dropout=0.9, backend=backend).eval()
    x = torch.randn(BATCH, STEPS, FEATURES)
    assert torch.equal(lstm(x)[0], lstm(x)[0])


# --- which one is taken ----------------------------------------------------------------------------------------------


def sequence(**options: Any) -> Tensor:
    return torch.zeros(BATCH, STEPS, FEATURES, **options)


def test_auto_takes_the_fused_one_for_sequences_and_the_cells_for_a_step():
    assert runs_fused("auto", [LSTMCell(FEATURES, HIDDEN)], sequence())
    assert not runs_fused("auto", [LSTMCell(FEATURES, HIDDEN)], torch.zeros(BATCH, FEATURES))


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def with_hook(cell: LSTMCell) -> LSTMCell:
    cell.i2h.register_forward_hook(lambda *_: None)
    return cell


def with_other_linear(cell: LSTMCell) -> LSTMCell:
    cell.h2h = Doubled(HIDDEN, 4 * HIDDEN)
    return cell


def as_complex(cell: LSTMCell) -> LSTMCell:
    return cell.to(torch.complex64)


@pytest.mark.filterwarnings("ignore:Complex modules")
@pytest.mark.parametrize(
    ("change", "dtype", "why"),
    [
        (with_hook, torch.float32, "a Linear that has hooks"),
        (with_other_linear, torch.float32, "Doubled"),
        (as_complex, torch.complex64, "complex64"),
    ],
)
def test_what_a_kernel_would_leave_out_runs_in_the_cells(
    change: Callable[[LSTMCell], LSTMCell], dtype: torch.dtype, why: str
):
    cell, x = change(LSTMCell(FEATURES, HIDDEN)), sequence(dtype=dtype)
    assert not runs_fused("auto", [cell], x)
    assert unroll(cell, x)[0].shape == (BATCH, STEPS, HIDDEN)
    with pytest.raises(ValueError, match=rf"^backend: fused cannot run .*{why}"):
        unroll(cell, x, backend="fused")


def test_a_parametrized_weight_is_computed_for_the_fused_one_too():
    cell = LSTMCell(FEATURES, HIDDEN)
    nn.utils.parametrizations.weight_norm(cell.h2h)
    x = torch.randn(BATCH, STEPS, FEATURES)
    torch.testing.assert_close(unroll(cell, x, backend="fused"), unroll(cell, x, backend="reference"))


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="backend: got 'cudnn', takes auto, reference or fused"):
        unroll(RNNCell(FEATURES, HIDDEN), sequence(), backend="cudnn")


@pytest.mark.slow
@models
def test_compiled_models_leave_the_sequence_to_its_kernels(model_class):
    model, x = model_class(VALUE, HIDDEN).eval(), torch.randn(BATCH, STEPS, FEATURES)
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x))
    compiled(x).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


# --- cuDNN ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def cudnn(monkeypatch) -> list[tuple[Any, ...]]:
    """Parameters on a CPU count as those on a GPU; lists the calls that move them into one block."""
    calls = []

    def into_one_block(weights: list[Tensor], *arguments: Any) -> None:
        calls.append((weights[0].shape[1], *arguments))
        block = torch.cat([weight.detach().flatten() for weight in weights])
        for weight, part in zip(weights, block.split([weight.numel() for weight in weights]), strict=True):
            with torch.no_grad():
                weight.set_(part.view_as(weight))

    monkeypatch.setattr(fused, "flatten_cudnn_weights", into_one_block)
    monkeypatch.setattr(fused, "_is_on_gpu", lambda weight: True)
    return calls


def test_cudnn_is_asked_for_one_block_as_nn_lstm_asks(monkeypatch):
    class OnGPU:
        is_cuda = True
        shape = (4 * HIDDEN, FEATURES)

        def get_device(self) -> int:
            return -1  # no device to switch to

    calls = []
    monkeypatch.setattr(torch, "_cudnn_rnn_flatten_weight", lambda weights, *arguments: calls.append(arguments))
    monkeypatch.setattr(torch, "_use_cudnn_rnn_flatten_weight", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "is_acceptable", lambda weight: True)
    flatten_cudnn_weights([OnGPU()] * 8, "LSTM", HIDDEN, layers=2)
    assert calls == [(4, FEATURES, 2, HIDDEN, 0, 2, True, False)]  # the first 2 is cuDNN's number of an LSTM


def test_weights_that_are_moved_to_a_gpu_are_put_into_one_block_once(cudnn):
    lstm = StackedLSTM(2, FEATURES, HIDDEN, dropout=0, backend="fused")
    before = list(lstm.parameters())
    lstm.double()
    lstm.double()
    first_layer, second_layer = ((size, "LSTM", HIDDEN, 1) for size in (FEATURES, HIDDEN))
    assert cudnn == [first_layer, second_layer, (FEATURES, "LSTM", HIDDEN, 2)]
    assert len({parameter.untyped_storage().data_ptr() for parameter in lstm.parameters()}) == 1
    assert [id(parameter) for parameter in lstm.parameters()] == [id(parameter) for parameter in before]


@networks
def test_weights_in_one_block_compute_the_same(kind, cudnn):
    net = network(kind)
    x = torch.randn(BATCH, STEPS, FEATURES)
    expected = run(net, x, None, "fused")
    net.to(torch.float32)
    assert cudnn
    torch.testing.assert_close(run(net, x, None, "fused"), expected, rtol=0, atol=0)


def tied(cell: LSTMCell) -> LSTMCell:
    cell.h2h.bias = cell.i2h.bias
    return cell


def normalised(cell: LSTMCell) -> LSTMCell:
    nn.utils.parametrizations.weight_norm(cell.h2h)
    return cell


def half_in_float64(cell: LSTMCell) -> LSTMCell:
    cell.i2h.double()
    return cell


@pytest.mark.parametrize("change", [tied, normalised, half_in_float64])
def test_weights_that_cannot_be_in_one_block_stay_where_they_are(change, cudnn):
    cell = change(LSTMCell(FEATURES, HIDDEN))
    cell.to("cpu")
    assert not cudnn


@pytest.fixture
def one_process():
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@networks
def test_sharded_weights_are_never_moved_so_that_no_step_computes_with_old_ones(kind, cudnn, one_process):
    def outputs(net: nn.Module) -> list[Tensor]:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        seen = []
        for _ in range(3):
            optimizer.zero_grad()
            output = net(torch.ones(BATCH, STEPS, FEATURES))
            output.square().sum().backward()
            optimizer.step()
            seen.append(output.detach())
        return seen

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network(kind)

        def forward(self, x: Tensor) -> Tensor:
            return run(self.net, x, None, "fused")[0].clone()

    whole = Whole()
    sharded = copy.deepcopy(whole)
    shard(sharded, torch.device("cpu"), 1)
    sharded.to("cpu")
    torch.testing.assert_close(outputs(sharded), outputs(whole))
    assert not cudnn


def test_on_a_cpu_the_weights_stay_where_they_are():
    cell = RNNCell(FEATURES, HIDDEN)
    before = [parameter.data_ptr() for parameter in cell.parameters()]
    fused.rnn(cell, sequence(), None)
    assert [parameter.data_ptr() for parameter in cell.parameters()] == before


# --- what does not fit -----------------------------------------------------------------------------------------------

BAD_STATES = {"wrong width": lambda s: s[..., :-1], "wrong batch": lambda s: torch.cat([s, s], dim=-2)}


@pytest.mark.parametrize("shape", [(BATCH, 0, FEATURES), (0, STEPS, FEATURES), (0, FEATURES)], ids=str)
@networks
def test_an_empty_input_is_refused_by_name(kind, shape):
    with pytest.raises(ValueError, match=r"^input: got \(.*of length 0"):
        run(network(kind), torch.zeros(shape), None, "auto")


@pytest.mark.parametrize("shape", [(BATCH, STEPS, FEATURES + 1), (FEATURES,), (1, BATCH, STEPS, FEATURES)], ids=str)
@networks
def test_an_input_of_another_shape_is_refused_by_name(kind, shape):
    with pytest.raises(ValueError, match=r"^input: got \(.*takes \(B, T, 3\)"):
        run(network(kind), torch.zeros(shape), None, "auto")


@pytest.mark.parametrize("spoil", BAD_STATES.values(), ids=BAD_STATES)
@networks
def test_states_that_do_not_fit_are_refused_by_name(kind, spoil):
    net = network(kind)
    states = random_states(net)
    spoilt = spoil(states) if isinstance(states, Tensor) else (states[0], spoil(states[1]))
    name = "initial_states" if isinstance(net, StackedLSTM) else "states"
    with pytest.raises(ValueError, match=rf"^{name}: .*shape"):
        run(net, sequence(), spoilt, "auto")


@networks
def test_states_of_another_kind_of_cell_are_refused(kind):
    net = network(kind)
    other = random_states(LSTMCell(FEATURES, HIDDEN) if isinstance(net, RNNCell) else RNNCell(FEATURES, HIDDEN))
    with pytest.raises(ValueError, match="states: takes (a pair|one tensor)"):
        run(net, sequence(), other, "auto")


@models
def test_a_model_passes_its_backend_on(model_class):
    model: SequenceModel = model_class(PER_STEP, HIDDEN, backend="fused")
    next(m for m in model.modules() if isinstance(m, RNNCell | LSTMCell)).register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="backend: fused cannot run"):
        model(sequence())
