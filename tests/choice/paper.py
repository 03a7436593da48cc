"""Devices and a training on paper, for tests: a step is launches or arithmetic, whichever takes longer."""

from dataclasses import dataclass, field

from batchscope.choice.device import Device
from batchscope.choice.seconds import Interval
from batchscope.errors import UserError

GIB = 2.0**30


def device(name, kind="cuda", tflops=10.0, gib=16.0, tdp=70.0):
    return Device(name, kind, gib * GIB, 3e11, {"fp32": tflops * 1e12}, tdp_w=tdp)


CPU = device("AMD EPYC, 2 threads", "cpu", 0.1, 15.0, None)
T4, L4, H100 = device("Tesla T4", tflops=8.1), device("L4", tflops=30.3, gib=24.0), device("H100", tflops=67, gib=80.0)
TPU = device("TPU v5e", "tpu", 98.0, 16.0, None)


@dataclass(frozen=True)
class Step:
    """As `choice.step.StepPrediction`."""

    seconds: Interval
    how: str = "predicted from cpu"
    limit: str = "compute"
    memory_bytes: Interval = field(default_factory=lambda: Interval(GIB, GIB, GIB))
    fits: bool = True


@dataclass
class Training:
    """As `choice.step.Workload`: so many FLOPs a sample, and launches that take as long on every GPU."""

    device: Device = CPU
    title: str = "cnn · mnist · 32-true"
    batch_sizes: tuple[int, ...] = (8, 32, 128, 512)
    train_samples: int = 55_000
    flops: float = 25e6  # a sample
    launches_s: float = 1e-3
    width: float = 1.5  # of a prediction's interval, as a factor
    bytes_per_sample: float = 2e6

    precision: str = "32-true"
    notes: tuple[str, ...] = ()
    busy: float | None = None

    @property
    def label(self):
        return self.device.kind

    @property
    def measured(self):
        return {size: self.on(self.device, size).seconds for size in self.batch_sizes}

    def on(self, device, batch_size, host=None, precision=None):
        if precision == "bf16-mixed" and device is T4:
            raise UserError("no bf16 in its hardware")
        compute = batch_size * self.flops / device.flops_per_sec["fp32"]
        launches = 0.0 if device.kind == "cpu" else self.launches_s
        middle, own = max(compute, launches), device.name == self.device.name
        width = 1.02 if own else self.width
        how = "measured" if own else "bound: at best" if device.kind == "tpu" else "predicted from cpu"
        needed = batch_size * self.bytes_per_sample + 0.1 * GIB
        memory = Interval(0.9 * needed, needed, 1.2 * needed)
        seconds = Interval(middle / width, middle, middle * width)
        limit = "compute" if compute >= launches else "launches"
        return Step(seconds, how, limit, memory, memory.high <= device.memory_bytes)

    def largest_batch_size(self, device, precision=None):
        return int((device.memory_bytes / 1.2 - 0.1 * GIB) // self.bytes_per_sample)
