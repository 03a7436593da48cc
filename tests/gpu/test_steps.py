"""On a GPU: times are those of a clock outside, nothing in a step waits for the device, and its readings are true."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from batchscope import MemoryMonitor
from batchscope.callbacks._timer import clock_for
from batchscope.hardware.measure import identity
from batchscope.hardware.microbenchmarks import clock
from batchscope.hardware.nvml_readings import ENERGY, POWER, SM_CLOCK, UTILIZATION
from batchscope.hardware.probes import CPU, PROCESSOR_TIME, RSS, probe_for
from tests.gpu.conftest import REHEARSAL

pytestmark = pytest.mark.gpu
TOLERANCE = 0.99 if REHEARSAL else 0.03  # of times: a machine for rehearsals is never quiet


def test_two_marks_are_as_far_apart_as_on_a_clock_outside(device: torch.device):
    matrix = torch.randn(256 if REHEARSAL else 4096, 256 if REHEARSAL else 4096, device=device)
    of_device = clock_for(device)
    matrix @ matrix  # starts the library
    started, first = clock(), of_device.mark()
    for _ in range(40):
        matrix @ matrix
    last = of_device.mark()
    of_device.wait(last)
    outside = clock() - started
    assert of_device.ready(last)
    assert of_device.elapsed_ms(first, last) / 1e3 == pytest.approx(outside, rel=TOLERANCE)


@pytest.mark.parametrize("pipeline", ["memory", "device", "workers"])
def test_the_parts_of_a_step_add_up_to_the_time_outside(pipeline: str, accelerator: str, tmp_path: Path):
    from truth import measure

    found = measure("cnn", pipeline, str(tmp_path), accelerator, 640 if REHEARSAL else 25_600)
    assert found["samples_per_sec_ratio"] == pytest.approx(1, abs=TOLERANCE)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_no_step_of_the_default_callbacks_waits_for_the_device(precision: str, accelerator: str, tmp_path: Path):
    """torch raises an error at a call that waits; `cuda_trace.py` also sees what torch does not know."""
    from monitoring import cnn, default_trainer

    if REHEARSAL and precision == "16-mixed":
        pytest.skip("not on a CPU")
    first, last = (2, 6) if REHEARSAL else (30, 230)  # step 130 has read and written the first hundred

    class Strict(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if accelerator == "gpu" and batch_idx in (first, last):
                torch.cuda.set_sync_debug_mode("error" if batch_idx == first else "default")

    trainer = default_trainer(str(tmp_path), accelerator, [Strict()], precision=precision)
    try:
        trainer.fit(*cnn(last + 4, device=trainer.strategy.root_device, batch=8 if REHEARSAL else 128))
    finally:
        if accelerator == "gpu":
            torch.cuda.set_sync_debug_mode("default")
    assert not [each.failure for each in trainer.callbacks if getattr(each, "failure", None)]  # a callback never raises
    assert trainer.global_step == last + 5


def test_readings_of_the_device_are_there_and_plausible(device: torch.device):
    probe = probe_for(device)
    found: dict[str, float] = {}
    energies = []
    matrix = torch.randn(2048, 2048, device=device) if device.type == "cuda" else torch.randn(64, 64)
    for _ in range(6):
        until = time.monotonic() + 0.15
        while time.monotonic() < until:
            matrix = (matrix @ matrix).tanh()
        clock()
        found |= probe.read()
        energies.append(found.get(ENERGY, 0.0))
    assert found[RSS] > 0
    assert found[CPU] > 0
    if device.type == "cpu":
        assert 0 < found[PROCESSOR_TIME] <= 100
        return
    assert found[UTILIZATION] > 10
    assert 20 < found[POWER] < 2000
    assert 100 < found[SM_CLOCK] < 4000
    assert energies == sorted(energies)
    watts = found[POWER]
    assert energies[-1] - energies[0] < 30 * max(
        watts, 100
    )  # joules, not millijoules: each reading waits for the device
    assert all(0 <= value <= 100 for key, value in found.items() if key.endswith("_pct") and key != CPU)


def test_a_calibration_knows_the_card_and_its_driver(cuda: torch.device):
    known = identity(cuda)
    assert known["uuid"]
    assert known["driver"]
    assert 30 < known["power_limit_w"] < 3000


def test_what_a_step_holds_is_most_of_what_the_allocator_measures(train: Callable, device: torch.device):
    monitor = MemoryMonitor(verbose=False)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    train(monitor, data={"batch_size": 64} if REHEARSAL else {"batch_size": 2048, "num_train": 10_240})
    assert "uncounted" not in monitor.facts, monitor.facts
    assert monitor.facts["parts_bytes"]["saved"] > 0
    if device.type == "cuda":  # gradients of activations and workspaces of kernels are the rest
        assert monitor.facts["parts_bytes"]["rest"] < 0.5 * monitor.facts["measured_bytes"]["allocated"]
