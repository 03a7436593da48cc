"""Part 5: the recurrent models against cuDNN, CUDA graphs, large batches against the roofline, and the memory of a step."""

from collections.abc import Callable
from typing import Any

import recurrent
import torch
from floor import flops_of
from harness import median
from torch import nn
from torch.utils._pytree import tree_leaves
from zoo_steps import zoo_batch, zoo_task

from batchscope.hardware.calibration import peak_flops_per_sec
from batchscope.hardware.device_memory import SavedTensors, bytes_of
from batchscope.hardware.devices import cache_bytes
from batchscope.hardware.measure import load_or_measure
from batchscope.hardware.microbenchmarks import clock, time_runs
from batchscope.hardware.operations import OperationRecorder
from batchscope.hardware.roofline import lower_bound, peaks_of

from . import Result, Setting

LEAST_OF_CUDNN, LEAST_OF_ROOF = 0.95, 0.5
MODELS = ("cnn", "mlp", "lstm_cell")


def against_cudnn(setting: Setting) -> Result:
    """`benchmarks/recurrent.py` on this device: auto is never clearly slower than torch's own network."""
    cases = [("LSTM", (5, 4, 8, 2, 3)), ("RNN", (5, 4, 8, 1, 3))] if setting.small else recurrent.CASES
    found: dict[str, Any] = {}
    for kind, shape in cases:
        seconds = recurrent.times(kind, shape, setting.device, 2 if setting.small else 5)
        peaks = {way: recurrent.measured_peak(kind, shape, way, setting.device) for way in recurrent.WAYS}
        found[f"{kind} {shape}"] = {"kind": kind, "shape": shape, "seconds": seconds, "peak_mib": peaks}
    slower = []
    for name, case in found.items():
        for what, of in case["seconds"].items():
            ratio = median([theirs / ours for theirs, ours in zip(of["torch"], of["auto"], strict=True)])
            slower += [f"{name}, {what}: {ratio:.2f}"] if ratio < LEAST_OF_CUDNN else []
    tables = [recurrent.table(found, what) for what in ("forward", "forward+backward")] + [
        recurrent.memory_table(found)
    ]
    claim = f"torch's ÷ auto is at least {LEAST_OF_CUDNN} everywhere (not: {'; '.join(slower) or 'none'})"
    return Result("\n\n".join(tables), found, {claim: not slower})


def graphs(setting: Setting) -> Result:
    """The floor of a small step: eager, and with the network alone as CUDA graphs. An experiment, without a claim."""
    lines = [
        "| model | batch | eager | graphed | eager ÷ graphed | same loss |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
    ]
    data = []
    for model in MODELS:
        for batch in (4,) if setting.small else (8, 64, 512):
            eager, loss = _step_seconds(setting, model, batch, graphed=False)
            if setting.small:
                graphed, same = eager, loss
            else:
                graphed, same = _step_seconds(setting, model, batch, graphed=True)
            is_same = abs(loss - same) <= 1e-3 * max(1.0, abs(loss))
            data.append({"model": model, "batch": batch, "eager": eager, "graphed": graphed, "losses": [loss, same]})
            cells = [model, str(batch), f"{1e6 * eager:.0f} µs", f"{1e6 * graphed:.0f} µs", f"{eager / graphed:.2f}"]
            lines.append(f"| {' | '.join([*cells, 'yes' if is_same else f'{loss:.4g} and {same:.4g}'])} |")
    return Result("\n".join(lines), data)


def roofline(setting: Setting) -> Result:
    """Large batches: the floor of a step by the calibration ÷ the measured step, and its FLOP/s."""
    device = torch.device(setting.device)
    found = load_or_measure(device)
    lines = ["| model | batch | step | floor | floor ÷ step | FLOP/s | ÷ peak |", "| --- " + "| ---: " * 6 + "|"]
    data, low = [], []
    for model, batch in zip((*MODELS, "torchvision"), (8192, 65536, 8192, 2048), strict=True):
        batch = 4 if setting.small else batch
        step = _step(setting, model, batch)
        operations = _operations(step)
        seconds, floor = _seconds(step, 2 if setting.small else 20), lower_bound(operations, peaks_of(found)).total
        rate, peak = flops_of(operations) / seconds, peak_flops_per_sec(found, "32-true")
        low += [f"{model} {floor / seconds:.2f}"] if floor / seconds < LEAST_OF_ROOF else []
        data.append({"model": model, "batch": batch, "seconds": seconds, "floor": floor, "flops_per_sec": rate})
        cells = [model, f"{batch:,}", f"{1e3 * seconds:.3g} ms", f"{1e3 * floor:.3g} ms", f"{floor / seconds:.2f}"]
        lines.append(f"| {' | '.join([*cells, f'{rate / 1e12:.3g} T', f'{rate / peak:.2f}' if peak else ''])} |")
    over = [each["model"] for each in data if each["floor"] > 1.05 * each["seconds"]]
    claims = {
        f"large batches reach {LEAST_OF_ROOF:.0%} of the roofline (not: {', '.join(low) or 'none'})": not low,
        f"no floor is above its step (above: {', '.join(over) or 'none'})": not over,
    }
    return Result("\n".join(lines), data, claims)


def memory(setting: Setting) -> Result:
    """What a step holds, as autograd saves it in a real step, and what torch's allocator has at the peak of one."""
    lines, data = ["| model | batch | held | allocated | held ÷ allocated |", "| --- " + "| ---: " * 4 + "|"], {}
    for model in (*MODELS, "rnn_cell", "stacked_lstm", "torchvision"):
        batch = 4 if setting.small else 512
        before = torch.cuda.memory_allocated() if setting.device == "cuda" else 0
        step = _step(setting, model, batch)
        for _ in range(2):
            step()
        parameters, saved = list(step.task.parameters()), SavedTensors(step.x.device)
        with saved.watch([*parameters, *step.task.buffers(), step.x, step.y]):
            step()
        states = tree_leaves([list(each.values()) for each in step.optimizer.state.values()])
        held = saved.most + sum(map(bytes_of, (parameters, [each.grad for each in parameters], states)))
        taken = None
        if setting.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            step()
            taken = torch.cuda.max_memory_allocated() - before
        data[model] = {"held": held, "allocated": taken}
        cells = [model, str(batch), f"{held / 2**20:.1f} MiB", f"{taken / 2**20:.1f} MiB" if taken else ""]
        lines.append(f"| {' | '.join([*cells, f'{held / taken:.2f}' if taken else ''])} |")
        del step, saved
    ratios = [each["held"] / each["allocated"] for each in data.values() if each["allocated"]]
    claim = "held ÷ allocated is between 0.5 and 1.1 (gradients of activations and workspaces are not saved)"
    return Result("\n".join(lines), data, {claim: bool(ratios) and min(ratios) >= 0.5 and max(ratios) <= 1.1})


class _Step:
    """A training step on one batch on the device, in a plain loop."""

    def __init__(self, setting: Setting, model: str, batch: int, graphed: bool = False):
        self.task = zoo_task(model).to(setting.device)
        if self.task.channels_last:
            self.task.model.to(memory_format=torch.channels_last)
        self.x, self.y = (tensor.to(setting.device) for tensor in zoo_batch(model, batch))
        if self.task.channels_last:
            self.x = self.x.to(memory_format=torch.channels_last)
        self.network: Callable = _graphed(self.task.model, self.x) if graphed else self.task.model
        self.optimizer = self.task.optimizer_recipe.build(self.task.parameters())
        self.loss = torch.zeros(())

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        self.loss = self.task.loss(self.network(self.x), self.y)
        self.loss.backward()
        self.optimizer.step()


def _graphed(network: nn.Module, x: torch.Tensor) -> Callable:
    """The network alone as CUDA graphs: clipping, schedule and optimizer stay as they are."""
    return torch.cuda.make_graphed_callables(network, (torch.randn_like(x),))


def _step(setting: Setting, model: str, batch: int, graphed: bool = False) -> _Step:
    torch.manual_seed(0)
    return _Step(setting, model, batch, graphed)


def _step_seconds(setting: Setting, model: str, batch: int, graphed: bool) -> tuple[float, float]:
    """Seconds of a step, and the loss after a fixed number of steps."""
    step = _step(setting, model, batch, graphed)
    for _ in range(2 if setting.small else 20):
        step()
    loss = step.loss.item()
    return _seconds(step, 2 if setting.small else 200), loss


def _seconds(step: Callable, times: int) -> float:
    """The best of several blocks of steps."""
    time_runs(step, 2)
    return min(time_runs(step, times) / times for _ in range(3))


def _operations(step: _Step) -> list:
    step()
    clock()
    recorder = OperationRecorder(step.task, cache_bytes(step.x.device), lambda: "forward")
    recorder.next_step()
    with recorder:
        step()
    if recorder.error is not None:
        raise recorder.error
    return recorder.operations()
