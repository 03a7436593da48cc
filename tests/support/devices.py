"""Devices without hardware: the calibrations of a GPU and a CPU, and the clock of a sampler."""

from batchscope.hardware.calibration import Calibration

GPU = Calibration(
    device="cuda",
    device_name="NVIDIA H200",
    driver="570.1",
    torch="2.15.0",
    threads=None,
    matmul_flops_per_sec={"fp32": 50e12, "tf32": 400e12, "bf16": 790e12, "fp16": 780e12, "fp64": 60e12},
    memory_bytes_per_sec=4.4e12,
    launch_us=3.5,
    cache_bytes=50 * 2**20,
)
HOST = Calibration("cpu", "AMD EPYC", "AVX512", "2.15.0", 2, {"fp32": 450e9, "bf16": 900e9}, 40e9, 1.75)
# Peaks that are easy to compute with.
CPU = Calibration("cpu", "Processor", None, "2", 1, {"fp32": 1e11}, memory_bytes_per_sec=1e10, launch_us=1.0)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now
