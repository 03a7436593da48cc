"""On a GPU: two calibrations agree, nothing is above the datasheet, and the MFU is known and never above 1."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from batchscope.callbacks import ThroughputMonitor
from batchscope.hardware.calibration import PRECISIONS, Calibration
from batchscope.hardware.datasheet import datasheet
from batchscope.hardware.measure import load_or_measure
from tests.gpu.conftest import REHEARSAL

pytestmark = pytest.mark.gpu
PROGRAM = """
import json, sys, torch
from batchscope.hardware.measure import calibrate
print(json.dumps(calibrate(torch.device(sys.argv[1])).to_dict()))
"""


def rates(device: torch.device) -> dict[str, float]:
    """FLOP/s by precision, and bytes/s of memory, from a calibration in a fresh process."""
    line = [sys.executable, "-c", PROGRAM, device.type]
    said = subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True).stdout
    found = Calibration.from_dict(json.loads(said.splitlines()[-1]))
    every = {name: found.matmul_flops_per_sec.get(name) for name in PRECISIONS} | {"memory": found.memory_bytes_per_sec}
    return {name: rate for name, rate in every.items() if rate}


def test_two_calibrations_agree_and_nothing_is_above_the_datasheet(device: torch.device):
    first = rates(device)
    assert first
    if device.type == "cpu":
        return
    assert rates(device) == pytest.approx(first, rel=0.05)
    sheet = datasheet(torch.cuda.get_device_name())
    assert sheet is not None
    stated = {**sheet.flops_per_sec, "memory": sheet.memory_bytes_per_sec}
    assert not {name: rate for name, rate in first.items() if rate > stated.get(name, rate)}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_the_mfu_of_layers_as_large_as_the_card_likes_best_is_at_most_1(
    precision: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
):
    import causes

    if REHEARSAL and precision == "16-mixed":
        pytest.skip("not on a CPU")
    if not REHEARSAL:
        load_or_measure(device)
    monkeypatch.setattr(causes, "DEVICE", device.type)
    monitor = ThroughputMonitor(calibrate=False, verbose=False)
    size, steps = (64, 8) if REHEARSAL else (8192, 40)
    causes.fit(causes.products(size, size, precision=precision)(), monitor, steps)
    mfu: Any = monitor.summary.get("mfu")
    assert REHEARSAL or 0.1 < mfu <= 1


def test_a_run_out_of_memory_is_a_row_of_its_sweep(cuda: torch.device, tmp_path: Path, mnist_files: Path):
    """1,536 images take some 400 GB, and no tensor among them has more elements than 32 bits can count."""
    options = ["experiment=throughput", "model=torchvision", "model.name=resnet152", "model.image_size=224"]
    options += ["data=mnist", f"data.root={mnist_files}", "trainer.accelerator=gpu", "data.batch_size=8,1536,16"]
    line = [sys.executable, "-m", "batchscope.train", "-m", *options, f"hydra.sweep.dir={tmp_path}"]
    subprocess.run(line, check=False, stdout=subprocess.DEVNULL)
    records = [json.loads(path.read_text()) for path in tmp_path.rglob("run.json")]
    found = {record["config"]["data"]["batch_size"]: record["status"] for record in records}
    assert found == {8: "finished", 16: "finished", 1536: "out_of_memory"}
