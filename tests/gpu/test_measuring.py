"""On a GPU: times are those of a clock outside, no step waits for the device, readings are true, and no peak is too high."""

import time

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from batchscope import ThroughputMonitor
from batchscope.callbacks._timer import clock_for
from batchscope.hardware.datasheet import datasheet
from batchscope.hardware.measure import calibrate, load_or_measure
from batchscope.hardware.microbenchmarks import synchronized_time
from batchscope.hardware.nvml_readings import ENERGY, POWER, SM_CLOCK, UTILIZATION
from batchscope.hardware.telemetry import CPU, PROCESSOR_TIME, RSS, queries_for, read
from tests.gpu.conftest import REHEARSAL, each_precision

pytestmark = pytest.mark.gpu
WORKSPACES = 64 * 2**20  # bytes, on Hopper
TOLERANCE = 0.99 if REHEARSAL else 0.03  # of times: a machine for rehearsals is never quiet


def test_two_calibrations_agree_know_the_card_change_no_state_and_have_nothing_above_the_datasheet(device):
    state, switch = torch.get_rng_state(), torch.backends.cuda.matmul.fp32_precision
    first = calibrate(device)
    rates = {**first.matmul_flops_per_sec, "memory": first.memory_bytes_per_sec}
    assert min(rates.values()) > 1e8
    assert torch.get_rng_state().equal(state) and torch.backends.cuda.matmul.fp32_precision == switch
    if device.type == "cpu":
        return
    second = calibrate(device)
    assert {**second.matmul_flops_per_sec, "memory": second.memory_bytes_per_sec} == pytest.approx(rates, rel=0.05)
    sheet = datasheet(torch.cuda.get_device_name())
    assert sheet is not None
    stated = {**sheet.flops_per_sec, "memory": sheet.memory_bytes_per_sec}
    stated["fp32"] *= 2.25  # what Winograd's algorithm saves at most of the multiplications of a convolution
    assert not {name: rate for name, rate in rates.items() if rate > stated.get(name, rate)}
    assert first.driver
    assert 30 < first.power_limit_w < 3000


@each_precision
def test_the_mfu_of_layers_as_large_as_the_card_likes_best_is_at_most_1(precision, device, monkeypatch):
    import causes

    if not REHEARSAL:
        load_or_measure(device)
    monkeypatch.setattr(causes, "DEVICE", device.type)
    monitor = ThroughputMonitor(calibrate=False, verbose=False)
    size, steps = (64, 8) if REHEARSAL else (8192, 40)
    causes.fit(causes.products(size, size, precision=precision)(), monitor, steps)
    mfu = monitor.summary.get("mfu")
    assert REHEARSAL or 0.1 < mfu <= 1


def test_two_marks_are_as_far_apart_as_on_a_clock_outside(device):
    size = 256 if REHEARSAL else 4096
    matrix = torch.randn(size, size, device=device)
    of_device = clock_for(device)
    matrix @ matrix  # starts the library
    started, first = synchronized_time(), of_device.mark()
    for _ in range(40):
        matrix @ matrix
    last = of_device.mark()
    of_device.wait(last)
    outside = synchronized_time() - started
    assert of_device.ready(last)
    assert of_device.elapsed_ms(first, last) / 1e3 == pytest.approx(outside, rel=TOLERANCE)


@pytest.mark.parametrize("pipeline", ["memory", "device", "workers"])
def test_the_parts_of_a_step_add_up_to_the_time_outside(pipeline, accelerator, tmp_path):
    from truth import measure

    measured = measure("cnn", pipeline, str(tmp_path), accelerator, 640 if REHEARSAL else 25_600)
    assert measured["samples_per_sec_ratio"] == pytest.approx(1, abs=TOLERANCE)


@each_precision
def test_no_step_of_the_default_callbacks_waits_for_the_device(precision, accelerator, tmp_path):
    """torch raises an error at a call that waits; `cuda_trace.py` also sees the waits that torch does not."""
    from monitoring import cnn, default_trainer

    first, last = (2, 6) if REHEARSAL else (30, 230)  # step 130 has read and written the first hundred

    class Strict(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if accelerator == "gpu" and batch_idx in (first, last):
                torch.cuda.set_sync_debug_mode("error" if batch_idx == first else "default")

    trainer = default_trainer(str(tmp_path), accelerator, [Strict()], precision=precision)
    try:
        trainer.fit(*cnn(last + 4, device=trainer.strategy.root_device, batch=8 if REHEARSAL else 128))
    finally:
        if accelerator == "gpu":
            torch.cuda.set_sync_debug_mode("default")
    assert not [cb.failure for cb in trainer.callbacks if getattr(cb, "failure", None)]  # a callback never raises
    assert trainer.global_step == last + 5


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    ("size", "waits", "low", "high"),
    [(16, False, 0.0, 0.4), (8192, False, 0.8, 1.0), (16, True, None, None)],
    ids=["small layers", "large layers", "a step that waits"],
)
def test_the_share_of_a_step_in_which_kernels_run_is_known_unless_the_step_waits(size, waits, low, high, monkeypatch):
    import causes

    monkeypatch.setattr(causes, "DEVICE", "cuda")
    monitor = ThroughputMonitor(calibrate=False, verbose=False)
    module, loader, options = causes.products(size, size)()
    module.before = (lambda: float(next(module.parameters()).sum())) if waits else None
    causes.fit((module, loader, options), monitor, 40)
    kernel_ms, step_ms = 1e3 * (monitor.measured.kernel_s or 0.0), monitor.summary["step_ms_median"]
    assert kernel_ms == 0 if waits else low < kernel_ms / step_ms <= 1.05 * high


def test_readings_of_the_device_are_there_and_plausible(device):
    queries, readings, energies = queries_for(device), {}, []
    size = 64 if device.type == "cpu" else 2048
    matrix = torch.randn(size, size, device=device)
    for _ in range(18):  # the utilisation is read after two seconds
        until = time.monotonic() + 0.15
        while time.monotonic() < until:
            matrix = (matrix @ matrix).tanh()
        synchronized_time()
        readings |= read(queries)
        energies.append(readings.get(ENERGY, 0.0))
    assert readings[RSS] > 0 and readings[CPU] > 0
    assert all(0 <= value <= 100 for key, value in readings.items() if key.endswith("_pct") and key != CPU)
    if device.type == "cpu":
        assert readings[PROCESSOR_TIME] > 0
        return
    assert readings[UTILIZATION] > 10
    assert 20 < readings[POWER] < 2000
    assert 100 < readings[SM_CLOCK] < 4000
    assert energies == sorted(energies)
    joules = energies[-1] - energies[0]  # not millijoules: each reading waits for the device
    assert joules < 30 * max(readings[POWER], 100)


def test_what_a_step_holds_is_most_of_what_the_allocator_measures(train, device):
    monitor = ThroughputMonitor(calibrate=False, verbose=False)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    train(monitor, data={"batch_size": 64} if REHEARSAL else {"batch_size": 2048, "num_train": 10_240})
    memory = monitor.memory()
    assert "uncounted" not in memory, memory
    assert memory["parts_bytes"]["saved"] > 0
    if device.type == "cuda":  # gradients of activations are the rest, and the workspaces that cuBLAS keeps
        assert memory["parts_bytes"]["rest"] - WORKSPACES < 0.5 * memory["measured_bytes"]
