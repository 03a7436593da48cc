"""Long sequences: fed step by step, and trained window by window with memory for one window."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from batchscope.data.spec import DataSpec
from batchscope.models.sequence import LSTMCellModel, RNNCellModel, SequenceModel, StackedLSTMModel

BATCH, STEPS, FEATURES, HIDDEN = 4, 23, 3, 5
models = pytest.mark.parametrize("model_class", [RNNCellModel, LSTMCellModel, StackedLSTMModel])
targets = pytest.mark.parametrize("target", ["value", "class_per_step"])
backends = pytest.mark.parametrize("backend", ["reference", "fused"])


def build(model_class: type[SequenceModel], target: Any, hidden: int = HIDDEN, **options: Any) -> SequenceModel:
    torch.manual_seed(0)
    spec = DataSpec("sequence", (STEPS, FEATURES), target, num_outputs=1 if target == "value" else 6)
    if model_class is StackedLSTMModel:
        options["dropout"] = 0
    return model_class(spec, hidden, **options)


def inputs(steps: int = STEPS) -> Tensor:
    return torch.randn(BATCH, steps, FEATURES, generator=torch.Generator().manual_seed(1))


@backends
@targets
@models
def test_a_stream_of_steps_and_pieces_gives_what_the_whole_sequence_gives(model_class, target, backend) -> None:
    model, x, states, outputs = build(model_class, target, backend=backend), inputs(), None, []
    for piece in (*x[:, :9].unbind(dim=1), *x[:, 9:].split([1, 13], dim=1)):
        output, states = model(piece, states)
        outputs.append(output if output.dim() == 3 else output[:, None])
    given = torch.cat(outputs, dim=1) if target == "class_per_step" else outputs[-1][:, 0]
    torch.testing.assert_close(given, model(x), rtol=0, atol=1e-5)


@backends
@targets
@models
def test_truncation_changes_no_output_and_ends_a_gradient_at_the_beginning_of_its_window(
    model_class, target, backend
) -> None:
    model, x = build(model_class, target, backend=backend), inputs().requires_grad_()
    expected = model(x)
    model.tbptt_steps = 5
    output = model(x)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-5)
    (output[:, 20] if target == "class_per_step" else output).sum().backward()
    reached = x.grad.abs().sum(dim=(0, 2)) != 0  # windows end at the last step: 3, then 5 by 5
    last = 20 if target == "class_per_step" else 22
    assert reached.nonzero().flatten().tolist() == list(range(18, last + 1))


@models
def test_windows_add_up_to_what_training_them_one_by_one_gives(model_class) -> None:
    model, by_hand, x = (*(build(model_class, "class_per_step") for _ in range(2)), inputs(20))
    model.tbptt_steps = 5
    model(x).square().sum().backward()
    states = None
    for window in x.split(5, dim=1):
        output, states = by_hand.advance(window, states)
        output.square().sum().backward()
        states = states.detach() if isinstance(states, Tensor) else tuple(state.detach() for state in states)
    for ours, theirs in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    """The bytes that autograd saves in a forward pass, beside the input and the weights."""
    known = {tensor.untyped_storage().data_ptr() for tensor in (x, *model.parameters())}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no other one gets its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    return sum(tensor.untyped_storage().nbytes() for place, tensor in saved.items() if place not in known)


@targets
@models
def test_what_is_saved_does_not_grow_with_the_sequence(model_class, target) -> None:
    model, grown = build(model_class, target, hidden=32), {}
    for tbptt_steps in (None, 8):
        model.tbptt_steps = tbptt_steps
        short, long = (saved_bytes(model, inputs(steps)) for steps in (32, 128))
        grown[tbptt_steps] = long / short
    assert grown[None] > 3
    assert grown[8] <= (1.05 if target == "value" else 2)  # with a target at every step, by a state a window
