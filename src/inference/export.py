"""A trained network as a file that other programs read, checked against the network on real samples."""

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
_BATCHES = (1, 2, 5)  # the exported network takes any number of samples: checked with these
_ONNX = ("onnx", "onnxscript", "onnxruntime")


class _Forward(nn.Module):
    """A network of one input, under the argument names of an export."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        return self.network(x) if lengths is None else self.network(x, lengths=lengths)


def export(trained: Trained, form: str, path: Path, samples: Mapping[str, Tensor]) -> float:
    """Write a network in one of FORMATS; returns the largest difference of an output of the file to the network's.

    `samples` are real inputs by the names of `forward`'s arguments: `x: (N, …)` where there is one, `lengths: (N,)`
    where they vary. UserError for what cannot be exported or written; a file that answers NaN is not kept.
    """
    refuse(form, path)
    network = trained.network.eval().cpu()
    module = _Forward(network).eval() if {*samples} <= {"x", LENGTHS} else network
    example = {
        name: tensor[torch.arange(2) % len(tensor)] for name, tensor in samples.items()
    }  # of one, any number is 1
    try:
        if not isinstance(answer := _answer(module, example), Tensor):
            raise UserError(
                f"export: {type(network).__name__} answers a {type(answer).__name__}, and a file one tensor"
            )
        run = _torch_export(module, example, path) if form == "torch_export" else _onnx(module, example, path)
        return _difference(module, run, samples)
    except BaseException as error:  # of an exporter, for operations that it does not know, or of the exported network
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)  # what has not been compared is not kept
        if isinstance(error, UserError) or not isinstance(error, Exception):
            raise
        raise UserError(
            f"export: {type(network).__name__} cannot be written as {form}: {in_one_line(error)}"
        ) from error


def refuse(form: str, path: Path) -> None:
    """UserError unless this format can be written to this file; nothing that exists is replaced."""
    if form not in FORMATS:
        raise UserError(f"format: got '{form}', takes {', '.join(FORMATS)}")
    if path.suffix != FORMATS[form]:
        raise UserError(f"output: got '{path}', takes a name that ends in {FORMATS[form]} for format={form}")
    refuse_existing("output", path)
    missing = [name for name in _ONNX if importlib.util.find_spec(name) is None]
    if form == "onnx" and missing:
        raise UserError(f"format: onnx needs {' and '.join(missing)}; pip install 'batchscope[onnx]'")


_Run = Callable[[Mapping[str, Tensor]], Tensor]  # of a file: the answer to samples


def _torch_export(module: nn.Module, example: Mapping[str, Tensor], path: Path) -> _Run:
    with torch.no_grad():
        args, named = _arguments(example)
        program = torch.export.export(module, args, named, dynamic_shapes=_any_batch(example))
    _write(path, lambda file: torch.export.save(program, file))
    return partial(_answer, torch.export.load(path).module())


def _onnx(module: nn.Module, example: Mapping[str, Tensor], path: Path) -> _Run:
    import onnxruntime  # pyrefly: ignore[missing-import]  # of an optional extra

    how: dict[str, Any] = {"dynamo": True, "dynamic_shapes": _any_batch(example), "verbose": False}
    args, named = _arguments(example)
    program = torch.onnx.export(module, args, kwargs=named, input_names=[*example], output_names=["output"], **how)
    assert program is not None, "the exporter returned no program"
    _write(path, lambda file: file.write(program.model_proto.SerializeToString()))
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda samples: torch.from_numpy(session.run(None, {name: x.numpy() for name, x in samples.items()})[0])


def _any_batch(example: Mapping[str, Tensor]) -> dict[str, Any]:
    """That the first dimension of each input may have any size, the same in all."""
    batch = torch.export.Dim("batch", min=1)
    return {name: {0: batch} for name in example}


def _arguments(samples: Mapping[str, Tensor]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """One input, and its lengths, by position; several by their names."""
    return ((*samples.values(),), {}) if {*samples} <= {"x", LENGTHS} else ((), {**samples})


def _answer(module: nn.Module, samples: Mapping[str, Tensor]) -> Any:
    args, named = _arguments(samples)
    return module(*args, **named)


def _difference(module: nn.Module, run: _Run, samples: Mapping[str, Tensor]) -> float:
    """The largest difference of an output, over batches of several sizes and all samples at once."""
    largest = 0.0
    with torch.inference_mode():
        for size in (*_BATCHES, None):
            part = {name: tensor[:size] for name, tensor in samples.items()}
            answer, expected = run(part), _answer(module, part)
            # Infinities that are equal differ by nothing: logits of what a mask excludes.
            difference = (answer - expected).abs().where(answer != expected, 0.0).max().item()
            if not math.isfinite(difference):
                raise ArithmeticError(f"an output differs from the network's by {difference}")
            largest = max(largest, difference)
    return largest


def _write(path: Path, write: Callable[[Any], Any]) -> None:
    buffer = io.BytesIO()
    write(buffer)
    with replacing(path, "output") as file:
        file.write(buffer.getvalue())
