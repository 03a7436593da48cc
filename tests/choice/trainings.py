"""Sweeps as train.py writes them: an MLP, an LSTM and a convolution, whose operations follow from the batch size."""

import math
from pathlib import Path

import numpy as np

from batchscope.records.operations import OperationRow, StepOperations, write_operations
from tests.support.synthetic_runs import change_record, write_run, write_steps

GFLOPS, BYTES_PER_SEC, LAUNCH_S = 100e9, 30e9, 1.5e-6  # of the simulated CPU
CALIBRATION = {"matmul_flops_per_sec": {"fp32": GFLOPS}, "memory_bytes_per_sec": BYTES_PER_SEC, "launch_us": 1.5}


def product(module, part, m, n, k):
    flops, moved = 2.0 * m * n * k, 4.0 * (m * k + k * n + m * n)
    seconds = LAUNCH_S + max(flops / GFLOPS, moved / BYTES_PER_SEC) / 0.8
    name = "aten.addmm" if part == "forward" else "aten.mm"
    return OperationRow(name, module, part, "fp32", (m, n, k), 1, flops, moved, moved, seconds=seconds)


def elementwise(name, module, part, rows, columns, tensors=2):
    moved = 4.0 * tensors * rows * columns
    seconds = LAUNCH_S + moved / BYTES_PER_SEC
    return OperationRow(name, module, part, "fp32", (rows, columns), 1, 0.0, moved, moved, seconds=seconds)


def mlp(batch, width=512, layers=3):
    """The operations of a step of an MLP."""
    rows, modules = [], [f"model.{layer}" for layer in range(layers)]
    for module in modules:
        rows += [product(module, "forward", batch, width, width)]
        rows += [elementwise("aten.relu", module, "forward", batch, width)]
    for module in reversed(modules):
        rows += [elementwise("aten.threshold_backward", module, "backward", batch, width, 3)]
        rows += [product(module, "backward", batch, width, width), product(module, "backward", width, width, batch)]
    numbers = layers * (width * width + width)
    moved = 28.0 * numbers
    optimizer = OperationRow("aten._fused_adamw_", "", "optimizer", "fp32", (2 * layers, numbers), 1, 0, moved, moved)
    return [*rows, optimizer]


def lstm(batch, steps=64, features=32, hidden=128):
    """The operations of a step of one LSTM layer, as oneDNN computes it."""
    flops = 2.0 * steps * batch * 4 * hidden * (features + hidden)
    dims, moved = (steps, batch, features, hidden), 4.0 * steps * batch * (features + hidden)
    forward = OperationRow("aten.mkldnn_rnn_layer", "lstm", "forward", "fp32", dims, 1, flops, moved, moved)
    name = "aten.mkldnn_rnn_layer_backward"
    return [forward, OperationRow(name, "lstm", "backward", "fp32", dims, 1, 2 * flops, moved)]


def convolution(batch):
    """The operations of a step of one convolution and a batch norm."""
    flops, moved = 2.0 * batch * 64 * 64 * 9 * 32 * 32, 4.0 * batch * 128 * 32 * 32
    dims, shape = (batch, 64, 32, 32, 64, 3, 3), (batch * 64 * 32, 32)
    return [
        OperationRow("aten.convolution", "model.0", "forward", "fp32", dims, 1, flops, moved, moved, flops / GFLOPS),
        OperationRow("aten.native_batch_norm", "model.1", "forward", "fp32", shape, 1, 0, moved, moved),
        OperationRow("aten.convolution_backward", "model.0", "backward", "fp32", dims, 1, 2 * flops, 2 * moved, moved),
    ]


def memory_parts(size):
    """The memory that training needs at a batch size, in bytes by part."""
    return {"parameters": 1e6, "gradients": 1e6, "optimizer": 2e6, "saved": 3e5 * size, "rest": 1e4 * size}


def write_training(
    folder: Path, sizes=(8, 64, 512), rows=mlp, loop_s=1e-3, device="cpu", name="AMD EPYC", precision="32-true",
    memory=memory_parts, windows=0, others=math.nan, quiet=0, threads=2, **options,
) -> Path:  # fmt: skip
    """A run for each size, in numbered folders; `options` are those of `write_run`.

    `windows` is the number of windows of a run. Other programs took the share `others` of the processor in all windows
    but the first `quiet`; the windows in which they took any are disturbed, unless `quiet` is 0.
    """
    noise = np.random.default_rng(0)
    for number, size in enumerate(sizes):
        operations, run = rows(size), folder / str(number)
        step_ms = 1e3 * (loop_s + sum(row.seconds for row in operations))
        interval = {"step_ms_interval": [0.98 * step_ms, 1.03 * step_ms]}
        write_run(run, size, step_ms, device=device, device_name=name, throughput=interval, **options)
        if windows:
            times = step_ms * np.exp(0.01 * noise.standard_normal(windows))
            shares = np.where(np.arange(windows) < quiet, 0.0, others)
            write_steps(run, [[time] * 5 for time in times], others=shares, disturbed=quiet and shares > 0)
        change_record(run, memory={"batch_size": size, "parts_bytes": memory(size)})
        cpu_threads = threads if device == "cpu" else None
        write_operations(run, StepOperations(size, 1.0, device, name, precision, operations, cpu_threads, CALIBRATION))
    return folder
