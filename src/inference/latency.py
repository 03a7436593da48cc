"""Measure the latency of a network's forward pass by batch size, in passes over all sizes, as in a timed sweep.

A forward pass is timed from an idle device to an idle device, with the inputs on the device. Loading and transferring
the inputs is excluded.
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
from ..analysis.noise import PROCESSES_SD, Rates
from ..analysis.selection import Selection, select
from ..analysis.text import aligned, choice_words
from ..data.spec import LENGTHS, DataSpec, accepts_argument, forward_arguments
from ..errors import UserError, in_one_line
from ..hardware.device_memory import is_out_of_memory
from ..hardware.devices import as_current_device, device_name
from ..hardware.microbenchmarks import synchronized_time
from ..hardware.processor import NoiseMeter, is_disturbed, slowing_share
from ..records.formatting import percent, significant
from ..sweep.passes import Limits, WaitingRun, collect_windows, measure_in_passes
from ..training.task import Task
from .load import Trained, trainer_for
from .samples import Samples, samples_of

_WARM_UP = 3  # forward passes before the first measured one
_PERCENTILES = (50, 99)
_COLUMNS = ["batch size", "p50 ms", "p99 ms", "samples/s", "of best", "GiB"]
_MIN_TIMES_FOR_P99 = 100  # the 99th percentile of fewer times is their maximum


class _SizeRun(WaitingRun):
    """The forward passes of one size, visited like a run of a sweep. Between visits no inputs are on the device."""

    def __init__(self, size: int, network: nn.Module, inputs: Callable[[], Any], memory_gib: float | None, device: str):
        super().__init__(size)
        self.network, self.inputs, self.memory_gib, self.device = network, inputs, memory_gib, device
        self.times_s: list[float] = []

    @override
    def visit(self, number: int, seconds: float) -> Mapping[str, Any]:
        args, kwargs = self.inputs()
        noise, deadline = NoiseMeter(), time.perf_counter() + seconds
        times: list[float] = []
        with torch.inference_mode():
            self.network(*args, **kwargs)  # refills caches that hold the data of other sizes
            while not times or time.perf_counter() < deadline:
                start = synchronized_time()
                self.network(*args, **kwargs)
                times.append(synchronized_time() - start)
        self.times_s += times
        reading = noise.read()
        share = slowing_share(reading, self.device)
        window = {"mean_s": float(np.mean(times)), "samples": self.size, "disturbed": is_disturbed(reading)}
        return window | {"others_share": 0.0 if math.isnan(share) else share}


@dataclass(frozen=True)
class Latencies:
    """The measured latencies of a network.

    `table` has a row for each size, with the columns `batch size`, `p50 ms`, `p99 ms`, `samples/s`, `of best`, `GiB`.
    Unknown values are NaN: all of a size that did not fit into memory, and readings that the device does not offer.
    """

    table: pd.DataFrame
    rates: Rates
    selection: Selection | None  # None if no rate is known
    device: str
    precision: str

    def lines(self) -> list[str]:
        """Return the table as lines for a terminal, without columns that are unknown for all sizes."""
        table = self.table.dropna(axis="columns", how="all")
        cells = [[_format_cell(name, row[name]) for name in table.columns] for row in table.to_dict("records")]
        return aligned([[*table.columns], *cells])

    def sentences(self) -> list[str]:
        """Return the verdict on the sizes in words, and the sizes that did not fit into memory."""
        missing = self.table.loc[self.table["p50 ms"].isna(), "batch size"]
        out_of_memory = [f"Out of memory: {', '.join(f'{size:,}' for size in missing)}."] if len(missing) else []
        if self.selection is None or len(self.selection.shares) < min(2, len(self.table) - len(missing)):
            return ["No two rates are known well enough to be compared.", *out_of_memory]
        choice = choice_words(self.selection, "measurement", load=self.rates.load)
        verdict = [choice] if len(self.selection.shares) > 1 else []  # a single size is not compared
        if self.selection.size is None:
            return [*verdict, *out_of_memory]
        row = self.table.set_index("batch size").to_dict("index")[self.selection.size]
        rate = f"{significant(row['samples/s'])} samples/s at {significant(row['p50 ms'])} ms a batch."
        return [*verdict, f"{self.selection.size:,} answers {rate}", *out_of_memory]


def _format_cell(name: str, value: float) -> str:
    if pd.isna(value):
        return "–"
    if name == "batch size":
        return f"{int(value):,}"
    return percent(value) if name == "of best" else significant(value)


def measure_latency(
    trained: Trained, sizes: Sequence[int], limits: Limits | None = None, say: Callable[[str], None] = lambda line: None
) -> Latencies:
    """Time a network's forward pass for each batch size, on random inputs, or samples if only these tell the shapes.

    Device and precision are those of the configuration's trainer; images have the memory format of an evaluation.
    UserError if no size fits into the device's memory, or the network does not take these inputs.
    """
    samples = samples_of(trained, max(sizes)) if trained.needs_data or trained.example is not None else None
    trainer = trainer_for(trained)
    device, plugin = trainer.strategy.root_device, trainer.precision_plugin
    network = plugin.convert_module(trained.network.eval().to(device))
    memory_format = torch.preserve_format
    if isinstance(trained.module, Task) and trained.module.channels_last and device.type in ("cpu", "cuda"):
        memory_format = torch.channels_last  # as in Task.setup
        lay_out_channels_last(network)

    def convert(inputs: Any) -> Any:
        inputs = tree_map_only(Tensor, lambda x: x.to(memory_format=memory_format) if x.dim() == 4 else x, inputs)
        return plugin.convert_input(inputs)

    with as_current_device(device), plugin.forward_context():
        make_inputs = samples.repeated if samples else partial(random_inputs, network, trained.spec, trained.dtype)
        prepared = (_prepare_run(network, make_inputs, size, device, convert) for size in sizes)
        runs = [run for run in prepared if run is not None]
        if not runs:
            raise UserError(f"data.batch_size: no batch of {', '.join(f'{s:,}' for s in sizes)} fits into memory")
        measure_in_passes(runs, limits or Limits(), say=say)
    rates = Rates(collect_windows(runs), processes=PROCESSES_SD if device.type == "cpu" else 0.0, at_equal_load=True)
    table = pd.DataFrame([_table_row(run, rates) for run in runs], columns=_COLUMNS).set_index("batch size")
    table = table.reindex(sorted(sizes)).reset_index().astype(dict.fromkeys(_COLUMNS[1:], float))
    table["of best"] = table["samples/s"] / table["samples/s"].max()
    return Latencies(table, rates, select(rates), device_name(device), str(plugin.precision))


def random_inputs(network: nn.Module, spec: DataSpec, dtype: torch.dtype | None, size: int) -> Samples:
    """Return random inputs `(size, *input_shape)`, zeros for integers, with full lengths if `forward` takes them.

    `dtype` is that of the training. If it is unknown, only tokens are integers.
    """
    are_tokens = spec.kind == "sequence" and len(spec.input_shape) == 1
    x = torch.randn(size, *spec.input_shape, generator=torch.Generator().manual_seed(0))
    if are_tokens if dtype is None else not dtype.is_floating_point:
        x = torch.zeros_like(x, dtype=dtype or torch.int64)
    takes_lengths = spec.variable_length and accepts_argument(network, LENGTHS)
    return Samples(x, torch.full((size,), spec.input_shape[0]) if takes_lengths else None, "random numbers")


def _prepare_run(
    network: nn.Module, make: Callable[[int], Samples], size: int, device: torch.device, convert: Callable[[Any], Any]
) -> _SizeRun | None:
    """Warm up a batch size, whose inputs `make` makes, and measure its memory; return None if it does not fit."""
    shape: Any = size
    try:
        samples = make(size)
        shape = next(tuple(leaf.shape) for leaf in tree_leaves(samples.inputs))
        inputs = partial(move_data_to_device, convert(forward_arguments(samples.inputs, samples.lengths)), device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        args, kwargs = inputs()
        with torch.inference_mode():
            for _ in range(_WARM_UP):
                network(*args, **kwargs)
        memory_gib = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
    except Exception as error:  # any failure of a network on untried inputs
        if is_out_of_memory(error):
            return None
        raise UserError(f"model: {type(network).__name__} does not take {shape}: {in_one_line(error)}") from error
    return _SizeRun(size, network, inputs, memory_gib, device.type)


def _table_row(run: _SizeRun, rates: Rates) -> dict[str, Any]:
    p50, p99 = (float(value) * 1e3 for value in np.percentile(run.times_s, _PERCENTILES))
    return {
        "batch size": run.size,
        "p50 ms": p50,
        "p99 ms": p99 if len(run.times_s) >= _MIN_TIMES_FOR_P99 else None,
        "samples/s": rates.rate(run.size),
        "GiB": run.memory_gib,
    }
