"""Export a trained network to a file for other programs, and compare the file with the network on real samples."""

import contextlib
import importlib.util
import io
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..data.spec import LENGTHS
from ..errors import UserError, in_one_line
from ..files import refuse_existing
from ..records.read import replacing
from .load import Trained

FORMATS = {"torch_export": ".pt2", "onnx": ".onnx"}
_BATCH_SIZES = (1, 2, 5)  # the exported network takes any batch size, and is checked with these
_ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


class _Forward(nn.Module):
    """Wraps a network of one input, so that its arguments have the names `x` and `lengths` in the exported file."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        return self.network(x) if lengths is None else self.network(x, lengths=lengths)


def export(trained: Trained, file_format: str, path: Path, samples: Mapping[str, Tensor]) -> float:
    """Write a network in one of FORMATS and return the largest difference between outputs of the file and the network.

    `samples` are real inputs by the names of `forward`'s arguments: `x: (N, …)` if there is one input, `lengths: (N,)`
    if they vary. UserError if the network cannot be exported or written; a file whose outputs are NaN is deleted.
    """
    check_output(file_format, path)
    network = trained.network.eval().cpu()
    module = _Forward(network).eval() if {*samples} <= {"x", LENGTHS} else network
    # Two samples, because torch.export would specialise a batch size of 1.
    example = {name: tensor[torch.arange(2) % len(tensor)] for name, tensor in samples.items()}
    name = type(network).__name__
    try:
        if not isinstance(output := _call(module, example), Tensor):
            raise UserError(f"export: {name} answers a {type(output).__name__}, and a file one tensor")
        write = _write_torch_export if file_format == "torch_export" else _write_onnx
        run_file = write(module, example, path)
        return _max_difference(module, run_file, samples)
    except BaseException as error:  # from an exporter that does not know an operation, or from the exported network
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)  # a file that has not been compared is not kept
        if isinstance(error, UserError) or not isinstance(error, Exception):
            raise
        raise UserError(f"export: {name} cannot be written as {file_format}: {in_one_line(error)}") from error


def check_output(file_format: str, path: Path) -> None:
    """Raise UserError unless this format can be written to this file; no existing file is replaced."""
    if file_format not in FORMATS:
        raise UserError(f"format: got '{file_format}', takes {', '.join(FORMATS)}")
    if path.suffix != (suffix := FORMATS[file_format]):
        raise UserError(f"output: got '{path}', takes a name that ends in {suffix} for format={file_format}")
    refuse_existing("output", path)
    missing = [name for name in _ONNX_PACKAGES if importlib.util.find_spec(name) is None]
    if file_format == "onnx" and missing:
        raise UserError(f"format: onnx needs {' and '.join(missing)}; pip install 'batchscope[onnx]'")


_RunFile = Callable[[Mapping[str, Tensor]], Tensor]  # runs an exported file: samples → outputs


def _write_torch_export(module: nn.Module, example: Mapping[str, Tensor], path: Path) -> _RunFile:
    with torch.no_grad():
        args, kwargs = _arguments(example)
        program = torch.export.export(module, args, kwargs, dynamic_shapes=_dynamic_shapes(example))
    _write_file(path, lambda file: torch.export.save(program, file))
    return partial(_call, torch.export.load(path).module())


def _write_onnx(module: nn.Module, example: Mapping[str, Tensor], path: Path) -> _RunFile:
    import onnxruntime  # pyrefly: ignore[missing-import]  # an optional dependency

    options: dict[str, Any] = {"dynamo": True, "dynamic_shapes": _dynamic_shapes(example), "verbose": False}
    args, kwargs = _arguments(example)
    options |= {"kwargs": kwargs, "input_names": [*example], "output_names": ["output"]}
    program = torch.onnx.export(module, args, **options)
    assert program is not None, "the exporter returned no program"
    _write_file(path, lambda file: file.write(program.model_proto.SerializeToString()))
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda samples: torch.from_numpy(session.run(None, {name: x.numpy() for name, x in samples.items()})[0])


def _dynamic_shapes(example: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return dynamic shapes in which the first dimension of all inputs is one batch size of any value."""
    batch_size = torch.export.Dim("batch", min=1)
    return {name: {0: batch_size} for name in example}


def _arguments(samples: Mapping[str, Tensor]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Return positional and keyword arguments: one input and its lengths by position, several inputs by name."""
    return ((*samples.values(),), {}) if {*samples} <= {"x", LENGTHS} else ((), {**samples})


def _call(module: nn.Module, samples: Mapping[str, Tensor]) -> Any:
    args, kwargs = _arguments(samples)
    return module(*args, **kwargs)


def _max_difference(module: nn.Module, run_file: _RunFile, samples: Mapping[str, Tensor]) -> float:
    """Return the largest difference of an output, over batches of several sizes and all samples at once."""
    largest = 0.0
    with torch.inference_mode():
        for size in (*_BATCH_SIZES, None):
            batch = {name: tensor[:size] for name, tensor in samples.items()}
            output, expected = run_file(batch), _call(module, batch)
            # Equal infinities, such as masked logits, have a difference of NaN, and count as 0.
            difference = (output - expected).abs().where(output != expected, 0.0).max().item()
            if not math.isfinite(difference):
                raise ArithmeticError(f"an output differs from the network's by {difference}")
            largest = max(largest, difference)
    return largest


def _write_file(path: Path, write: Callable[[Any], Any]) -> None:
    buffer = io.BytesIO()
    write(buffer)
    with replacing(path, "output") as file:
        file.write(buffer.getvalue())
