"""How long a network takes to answer a batch, by batch size: every size is visited in passes, as in a timed sweep.

One forward pass is timed from an idle device to an idle device, with the inputs on the device. Loading and transferring
the inputs is not part of it.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

from .._torch import lay_out_channels_last
from ..analysis.noise import PROCESSES, Rates
from ..analysis.selection import Selection, select
from ..analysis.text import aligned, choice_words
from ..data.spec import LENGTHS, DataSpec, arguments, takes
from ..errors import UserError, in_one_line
from ..hardware.device_memory import is_out_of_memory
from ..hardware.devices import current, device_name
from ..hardware.microbenchmarks import clock
from ..hardware.processor import NoiseMeter, is_disturbed, slowing_share
from ..records.formatting import percent, significant
from ..sweep.passes import Limits, WaitingRun, measure_in_passes, windows_of
from ..training.task import Task
from .load import Trained, trainer_for
from .samples import Samples, samples_of

_WARM_UP = 3  # forward passes before the first that is measured
_PERCENTILES = (50, 99)
_COLUMNS = ["batch size", "p50 ms", "p99 ms", "samples/s", "of best", "GiB"]
_FEWEST_FOR_P99 = 100  # of fewer times, the 99th percentile is a maximum


class _Size(WaitingRun):
    """The forward passes of one batch size, visited as a run of a sweep is. Between visits no inputs are on the device."""

    def __init__(self, size: int, network: nn.Module, inputs: Callable[[], Any], memory_gib: float | None, device: str):
        super().__init__(size)
        self.network, self.inputs, self.memory_gib, self.device = network, inputs, memory_gib, device
        self.times_s: list[float] = []

    @override
    def visit(self, number: int, seconds: float) -> Mapping[str, Any]:
        args, named = self.inputs()
        noise, until = NoiseMeter(), time.perf_counter() + seconds
        times: list[float] = []
        with torch.inference_mode():
            self.network(*args, **named)  # the sizes before it have filled the caches
            while not times or time.perf_counter() < until:
                began = clock()
                self.network(*args, **named)
                times.append(clock() - began)
        self.times_s += times
        found = noise.read()
        share = slowing_share(found, self.device)
        facts = {"mean_s": float(np.mean(times)), "samples": self.size, "disturbed": is_disturbed(found)}
        return facts | {"others_share": 0.0 if math.isnan(share) else share}


@dataclass(frozen=True)
class Latencies:
    """What was measured.

    Columns of `table`, one row a size: `batch size`, `p50 ms`, `p99 ms`, `samples/s`, `of best`, `GiB`. What is not known is
    NaN: everything of a size that did not fit, and what a device does not tell.
    """

    table: pd.DataFrame
    rates: Rates
    selection: Selection | None  # None where no rate is known
    device: str
    precision: str

    def lines(self) -> list[str]:
        """The table for a terminal."""
        known = self.table.dropna(axis="columns", how="all")
        cells = [[_cell(name, row[name]) for name in known.columns] for row in known.to_dict("records")]
        return aligned([[*known.columns], *cells])

    def sentences(self) -> list[str]:
        """The answer, and the sizes that did not fit."""
        missing = self.table.loc[self.table["p50 ms"].isna(), "batch size"]
        left = [f"Out of memory: {', '.join(f'{size:,}' for size in missing)}."] if len(missing) else []
        if self.selection is None or len(self.selection.shares) < min(2, len(self.table) - len(missing)):
            return ["No two rates are known well enough to be compared.", *left]
        said = choice_words(self.selection, "measurement", load=self.rates.load)
        answer = [said] if len(self.selection.shares) > 1 else []  # the only size is compared with none
        if self.selection.size is None:
            return [*answer, *left]
        row = self.table.set_index("batch size").to_dict("index")[self.selection.size]
        gives = f"{significant(row['samples/s'])} samples/s at {significant(row['p50 ms'])} ms a batch."
        return [*answer, f"{self.selection.size:,} answers {gives}", *left]


def _cell(name: str, value: float) -> str:
    if pd.isna(value):
        return "–"
    if name == "batch size":
        return f"{int(value):,}"
    return percent(value) if name == "of best" else significant(value)


def measure_latency(
    trained: Trained, sizes: Sequence[int], limits: Limits | None = None, say: Callable[[str], None] = lambda line: None
) -> Latencies:
    """Time a network's forward pass for each batch size, on random inputs, or samples where only these tell the shapes.

    Device and precision are those of the configuration's trainer; images are stored as in an evaluation. UserError if no
    size fits into the device's memory, or the network does not take such inputs.
    """
    samples = samples_of(trained, max(sizes)) if trained.needs_data or trained.example is not None else None
    trainer = trainer_for(trained)
    device, plugin = trainer.strategy.root_device, trainer.precision_plugin
    network = plugin.convert_module(trained.network.eval().to(device))
    layout = torch.preserve_format
    if isinstance(trained.module, Task) and trained.module.channels_last and device.type in ("cpu", "cuda"):
        layout = torch.channels_last  # as Task.setup
        lay_out_channels_last(network)

    def convert(given: Any) -> Any:
        images = tree_map_only(Tensor, lambda x: x.to(memory_format=layout) if x.dim() == 4 else x, given)
        return plugin.convert_input(images)

    with current(device), plugin.forward_context():
        inputs = samples.repeated if samples else partial(inputs_like, network, trained.spec, trained.dtype)
        prepared = (_prepared(network, inputs, size, device, convert) for size in sizes)
        fitting = [one for one in prepared if one is not None]
        if not fitting:
            raise UserError(f"data.batch_size: no batch of {', '.join(f'{s:,}' for s in sizes)} fits into memory")
        measure_in_passes(fitting, limits or Limits(), say=say)
    rates = Rates(windows_of(fitting), processes=PROCESSES if device.type == "cpu" else 0.0, at_equal_load=True)
    table = pd.DataFrame([_row(one, rates) for one in fitting], columns=_COLUMNS).set_index("batch size")
    table = table.reindex(sorted(sizes)).reset_index().astype(dict.fromkeys(_COLUMNS[1:], float))
    table["of best"] = table["samples/s"] / table["samples/s"].max()
    return Latencies(table, rates, select(rates), device_name(device), str(plugin.precision))


def inputs_like(network: nn.Module, spec: DataSpec, dtype: torch.dtype | None, size: int) -> Samples:
    """Random inputs `(size, *input_shape)`, all 0 of whole numbers, and full lengths where they vary and are taken.

    `dtype` is that of the training; where nobody knows it, tokens are whole numbers.
    """
    are_tokens = spec.kind == "sequence" and len(spec.input_shape) == 1
    x = torch.randn(size, *spec.input_shape, generator=torch.Generator().manual_seed(0))
    if are_tokens if dtype is None else not dtype.is_floating_point:
        x = torch.zeros_like(x, dtype=dtype or torch.int64)
    takes_lengths = spec.variable_length and takes(network, LENGTHS)
    return Samples(x, torch.full((size,), spec.input_shape[0]) if takes_lengths else None, "random numbers")


def _prepared(
    network: nn.Module, make: Callable[[int], Samples], size: int, device: torch.device, convert: Callable[[Any], Any]
) -> _Size | None:
    """A warm batch size with the memory that it takes; None if it does not fit. `make` makes inputs of a size."""
    shape: Any = size
    try:
        given = make(size)
        shape = next(tuple(leaf.shape) for leaf in tree_leaves(given.inputs))
        inputs = partial(move_data_to_device, convert(arguments(given.inputs, given.lengths)), device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        args, named = inputs()
        with torch.inference_mode():
            for _ in range(_WARM_UP):
                network(*args, **named)
        memory = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
    except Exception as error:  # any failure of a network on inputs that nobody has tried
        if is_out_of_memory(error):
            return None
        raise UserError(f"model: {type(network).__name__} does not take {shape}: {in_one_line(error)}") from error
    return _Size(size, network, inputs, memory, device.type)


def _row(one: _Size, rates: Rates) -> dict[str, Any]:
    p50, p99 = (float(value) * 1e3 for value in np.percentile(one.times_s, _PERCENTILES))
    return {
        "batch size": one.size,
        "p50 ms": p50,
        "p99 ms": p99 if len(one.times_s) >= _FEWEST_FOR_P99 else None,
        "samples/s": rates.rate(one.size),
        "GiB": one.memory_gib,
    }
