"""A Task is tried before it trains: whether network, loss and metrics fit the data. What does not is one line.

The network answers a small batch by shapes alone, on torch's meta device; where it cannot, it answers with numbers. No
random state, buffer or weight changes.
"""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from ..data.base import DataModule
from ..data.plain import Data
from ..data.spec import CLASSES, DataSpec
from ..data.workers import seeded
from ..errors import UserError, in_one_line, place_of
from ..hardware.device_memory import is_out_of_memory
from .objective import for_metrics

if TYPE_CHECKING:
    from .task import Task

_SAMPLES = 2
UNKNOWN = object()  # an answer that a network cannot give without numbers
_LIBRARIES = {"batchscope", "hydra", "lightning", "torch", "torchmetrics", "torchvision", *sys.stdlib_module_names}


def try_out(task: "Task", data: Data) -> None:
    """Try a Task on samples of its data.

    Data of other kinds than DataModule are not read before training: zeros of their spec's shapes take their place, and a
    network that cannot take those is tried on the first batch.

    Raises:
        UserError: for a network that does not take the samples or answers in another shape than the target asks for, a loss
            that returns no scalar, a metric that does not take the answer, and a group of parameters without a member.
    """
    if task.optimizer_recipe.groups or not task.optimizer_recipe.elementwise:
        task.optimizer_recipe.build(task.named())
    is_real = isinstance(data, DataModule)
    x, y, lengths = task.spec.parts(data.example()) if is_real else zeros(task.spec)
    with seeded(0), torch.enable_grad():
        known = torch.zeros(_asked(task.spec, y), requires_grad=True)
        output = known if _is_known(task) else answer(task, x, lengths, "meta")
        if output is UNKNOWN and is_real:
            with blamed("model", f"{type(task.model).__name__} does not take a batch {_shape(x)}"):
                output = answer(task, x, lengths, "cpu")
        if output is not UNKNOWN:
            check_answer(task, tree_map_only(Tensor, _like, output), y)
            task.is_tried = True


def _like(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype).requires_grad_(tensor.requires_grad)


def _is_known(task: "Task") -> bool:
    """Whether tests show that a network answers as its target asks: one of the zoo. A long recurrence takes seconds to try."""
    own = type(task.model).__module__.startswith("batchscope.models.")
    return own and task.spec.target not in ("class_per_pixel", "input")


def answer(task: nn.Module, x: Any, lengths: Tensor | None, device: str) -> Any:
    """What a module answers on a device; on `meta` only its shapes, and UNKNOWN where it cannot be tried without numbers."""
    state = dict(task.named_buffers()) | (dict(task.named_parameters()) if device == "meta" else {})
    copies = {name: tensor.to(device, copy=True) for name, tensor in state.items()}
    arguments = (x,) if lengths is None else (x, lengths)
    try:
        return functional_call(task, copies, tree_map_only(Tensor, lambda t: t.to(device), arguments))
    except Exception:  # anybody's model
        if device == "meta":
            return UNKNOWN
        raise


def first_answer(task: "Task", x: Any, y: Tensor, lengths: Tensor | None) -> Any:
    """What a Task answers to its first batch of real data, tried as by `try_out`."""
    with blamed("model", f"{type(task.model).__name__} does not take a batch {_shape(x)}"):
        output = task(x, lengths)
    with torch.no_grad(), torch.random.fork_rng([y.device] if y.is_cuda else []):
        check_answer(task, tree_map_only(Tensor, torch.clone, output), y)
    task.is_tried = True
    return output


def check_answer(task: "Task", output: Any, y: Tensor) -> None:
    """Raise UserError unless the loss and the metrics of a Task take an output and a target."""
    _check_shapes(task, output, y)
    shapes = f"an output {_shape(output)} and a target {tuple(y.shape)}"
    buffers = [*task.loss_function.buffers()] if isinstance(task.loss_function, nn.Module) else []
    before = [buffer.clone() for buffer in buffers]
    with blamed("task.loss", f"{task.loss_name} fails with {shapes}"):
        loss = task.loss(output, y)
    for buffer, value in zip(buffers, before, strict=True):
        buffer.copy_(value)
    if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
        got = (
            f"a tensor {tuple(loss.shape)} of {loss.dtype}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        )
        raise UserError(
            f"task.loss: {task.loss_name} returns {got} for {shapes}, takes a scalar: a mean over the batch"
        )
    if torch.is_grad_enabled() and task.automatic_optimization and not loss.requires_grad:
        raise UserError(
            f"task.loss: {task.loss_name} depends on no parameter that is trained: the loss or the output of "
            f"{type(task.model).__name__} has no gradient"
        )
    for name, metric in task.measured["train"].items():
        with blamed(f"task.metrics.{name}", f"{type(metric).__name__} fails with {shapes}"):
            tried = metric.clone()
            with torch.no_grad():
                tried.update(*for_metrics(task.spec, output, y))
            value = tried.compute()
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise UserError(f"task.metrics.{name}: {type(metric).__name__} returns {_shape(value)}, takes one number")


def _check_shapes(task: "Task", output: Any, y: Tensor) -> None:
    """Compare with the spec what a loss by name, or the accuracy, reads: torch would broadcast some wrong shapes."""
    spec, samples = task.spec, len(y)
    steps = y.shape[1:2] if spec.pads_steps else spec.target_shape
    if y.shape != (samples, *steps):
        raise UserError(
            f"data: the target has the shape {_shape(y)}, and one that is {spec.target} has {(samples, *steps)}"
        )
    asking = [f"task.loss={task.loss_name}"] if task.has_named_loss else []
    asking += ["the accuracy"] if task.has_accuracy else []
    if not asking:
        return
    wanted = _asked(spec, y)
    allowed = (wanted, y.shape) if spec.target == "value" else (wanted,)
    if not isinstance(output, Tensor) or output.shape not in allowed:
        raise UserError(
            f"model: {type(task.model).__name__} answers {_shape(output)}, and {' and '.join(asking)} for a target "
            f"{spec.target} {tuple(y.shape)} takes {wanted}"
        )


def _asked(spec: DataSpec, y: Tensor) -> tuple[int, ...]:
    """The shape of the output that a target asks for."""
    if spec.target == "class_per_step":
        return (*y.shape, spec.num_outputs)
    return (len(y), *spec.output_shape)


def zeros(spec: DataSpec) -> tuple[Tensor, Tensor, Tensor | None]:
    """An input, a target and, where they vary, lengths of two samples."""
    x = torch.zeros(_SAMPLES, *spec.input_shape)
    y = torch.zeros(_SAMPLES, *spec.target_shape, dtype=torch.long if spec.target in CLASSES else torch.float)
    return x, y, torch.full((_SAMPLES,), spec.input_shape[0]) if spec.variable_length else None


@contextlib.contextmanager
def blamed(option: str, what: str) -> Iterator[None]:
    """Turn an exception into one line that names an option, and where in the user's own code it was raised."""
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) or is_out_of_memory(error):
            raise
        place = place_of(error, lambda package: package not in _LIBRARIES)
        raise UserError(f"{option}: {what}: {in_one_line(error)}{place}") from error


def _shape(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _shape(one) for key, one in value.items()}
    return tuple(value.shape) if isinstance(value, Tensor) else f"a {type(value).__name__}"
