"""Checks by the first batch that network, loss and metrics fit the data, with one line for whatever does not."""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .._torch import is_compilation_error
from ..callbacks._batches import first_tensor
from ..data.spec import DataSpec
from ..errors import UnfitError, UserError, in_one_line, location_of
from ..hardware.device_memory import is_out_of_memory
from ..random_state import random_state, restore_random_state
from .objective import for_metrics

if TYPE_CHECKING:
    from .task import Task

_LIBRARIES = {"batchscope", "hydra", "lightning", "lightning_utilities", "torch", "torchmetrics", "torchvision"}
_LIBRARIES |= sys.stdlib_module_names


def first_output(task: "Task", x: Any, y: Any, lengths: Tensor | None) -> Any:
    """Return a Task's output for its first batch; UnfitError if network, loss or metrics do not take the batch."""
    try:
        with blamed("model", f"{type(task.model).__name__} does not take a batch {_label(x)}"):
            output = task(x, lengths)
        state = random_state()
        check_output(task, tree_map_only(Tensor, torch.clone, output), y)
        restore_random_state(state)
    except UserError as error:
        raise UnfitError(str(error)) from error
    first = first_tensor(x)
    task.is_tried, task.input_dtype = True, "" if first is None else str(first.dtype).removeprefix("torch.")
    return output


def check_output(task: "Task", output: Any, y: Any) -> None:
    """Raise UserError unless the loss and the metrics of a Task take this output and this target."""
    _check_shapes(task, output, y)
    shapes = f"an output {_label(output)} and a target {_label(y)}"
    buffers = [buffer for name, buffer in task.named_buffers() if not name.startswith("model.")]  # of the loss
    saved_buffers = [buffer.clone() for buffer in buffers]
    with blamed("task.loss", f"{task.loss_name} fails with {shapes}"):
        loss = task.loss(output, y)
    for buffer, saved_buffer in zip(buffers, saved_buffers, strict=True):
        buffer.copy_(saved_buffer)
    if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
        got = f"a tensor {_shape(loss)} of {loss.dtype}" if isinstance(loss, Tensor) else f"an object {_label(loss)}"
        raise UserError(
            f"task.loss: {task.loss_name} returns {got} for {shapes}, takes a scalar: a mean over the batch"
        )
    if torch.is_grad_enabled() and task.automatic_optimization and not loss.requires_grad:
        raise UserError(
            f"task.loss: {task.loss_name} depends on no parameter that is trained: the loss or the output of "
            f"{type(task.model).__name__} has no gradient"
        )
    means = ("loss", "acc") if task.has_accuracy else ("loss",)
    for name, metric in task.measured["val"].items():
        if name in means:
            continue
        with blamed(f"task.metrics.{name}", f"{type(metric).__name__} fails with {shapes}"):
            trial_metric = metric.clone()
            trial_metric.sync_on_compute = False  # each rank tries it alone
            with torch.no_grad():
                for _ in range(2):  # some metrics need more samples than a small batch has
                    trial_metric.update(*for_metrics(task.spec, output, y, metric))
            value = trial_metric.compute()
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise UserError(f"task.metrics.{name}: {type(metric).__name__} returns {_shape(value)}, takes one number")


def _check_shapes(task: "Task", output: Any, y: Any) -> None:
    """Check the shapes that a loss by name or the accuracy reads against the spec: torch would broadcast some wrong ones."""
    spec, is_any = task.spec, task.spec.target == "any"
    if not is_any and not isinstance(y, Tensor):
        raise UserError(f"data: the target of a batch is of the class {type(y).__name__}, takes a tensor")
    steps = () if is_any else y.shape[1:2] if spec.pads_steps else spec.target_shape
    if not is_any and y.shape != (expected := (len(y), *steps)):
        raise UserError(f"data: the target has the shape {_shape(y)}, and a target {spec.target} has {expected}")
    readers = [f"task.loss={task.loss_name}"] if task.has_named_loss else []
    readers += ["the accuracy"] if task.has_accuracy else []
    if not readers:
        return
    output_shape = _expected_output_shape(spec, y)
    may_omit_n = spec.target == "value" or (spec.is_one_logit and not spec.pads_steps)
    if isinstance(output, Tensor) and output.shape in ((output_shape, y.shape) if may_omit_n else (output_shape,)):
        return
    hint = ""
    if not isinstance(output, Tensor) and task.has_named_loss:
        hint = "; a loss of your own, 'task.loss={_target_: …}', takes several tensors"
    if task.has_accuracy and (hint or not task.has_named_loss):
        hint += "; task.metrics.acc=null leaves the accuracy out"
    raise UserError(
        f"model: {type(task.model).__name__} answers {_shape(output)}, and {' and '.join(readers)} for a target "
        f"{spec.target} {_shape(y)} takes {output_shape}{hint}"
    )


def _expected_output_shape(spec: DataSpec, y: Any) -> Any:
    """Return the shape of the output that belongs to a target: for a target `any` the target's own shape."""
    if spec.target == "any":
        return _shape(y)
    if spec.target == "class_per_step":
        return (*y.shape, spec.num_outputs)
    return (len(y), *spec.output_shape)


@contextlib.contextmanager
def blamed(option: str, problem: str) -> Iterator[None]:
    """Turn an exception into one line that names an option, and the place in the user's own code that raised it."""
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) or is_out_of_memory(error) or is_compilation_error(error):
            raise
        place = location_of(error, is_own)
        raise UserError(f"{option}: {problem}: {in_one_line(error)}{place}") from error


def is_own(package: str) -> bool:
    """Whether a package is the user's own code, and not batchscope or a library that batchscope uses."""
    return package not in _LIBRARIES


def _shape(value: Any) -> Any:
    """Return the shape of a tensor, the shapes in a dict, or the name of the class of another value."""
    if isinstance(value, Mapping):
        return {key: _shape(item) for key, item in value.items()}
    return tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__


def _label(value: Any) -> Any:
    """Return the label that follows a noun such as `a batch`: the value's shape, or `of the class Bag`."""
    shape = _shape(value)
    return f"of the class {shape}" if isinstance(shape, str) else shape
