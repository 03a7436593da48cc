"""An ordinary installation works as the checkout does: the wheel carries the configs, and every processor trains.

That the wheel trains from anywhere stands in test_own_project.py and test_lightning_modules.py.
"""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from batchscope.cli import new
from batchscope.options.groups import CONFIGS
from tests.support.spawned import TRAIN, end, spawn
from tests.support.wheel import ROOT


@pytest.mark.slow  # no default test builds a wheel
def test_the_wheel_holds_every_file_and_one_program_which_finds_the_configs_in_it(built: Path, tmp_path: Path) -> None:
    wheel = zipfile.ZipFile(built)
    members = set(wheel.namelist())
    configs = {f"configs/{path.relative_to(CONFIGS)}" for path in CONFIGS.rglob("*.yaml")}
    template = {f"own_project/{name}" for name in new.files_of(new.NAME)}
    sources = {
        str(path.relative_to(ROOT / "src")) for kind in ("*.py", "*.yaml") for path in (ROOT / "src").rglob(kind)
    }
    assert {f"batchscope/{name}" for name in configs | template | sources} <= members
    (name,) = [name for name in members if name.endswith("entry_points.txt")]
    assert [line for line in wheel.read(name).decode().splitlines() if "=" in line] == [
        "batchscope = batchscope.__main__:main",
        "batchscope = batchscope.attached:callbacks",  # what Lightning asks for callbacks of every Trainer
        "batchscope = batchscope.attached:callbacks_of_old_package",
    ]
    wheel.extractall(tmp_path / "site")
    code = "import batchscope.options.groups as c; print(c.CONFIGS)"
    environ = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    result = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == str(tmp_path / "site" / "batchscope" / "configs")


OPTIONS = ["data=digits", "data.num_train=64", "data.num_val=16", "data.num_test=16", "trainer.accelerator=cpu"]
OPTIONS += ["trainer.precision=bf16-mixed", "trainer.max_epochs=1", "hydra.run.dir=out"]


@pytest.mark.slow
@pytest.mark.parametrize(("onednn", "aten"), [("AVX2", "avx2"), ("SSE41", "default")])
def test_a_run_is_calibrated_and_trained_without_the_newest_instructions(onednn, aten, tmp_path: Path) -> None:
    result = end(spawn(tmp_path, TRAIN, *OPTIONS, ONEDNN_MAX_CPU_ISA=onednn, ATEN_CPU_CAPABILITY=aten))
    assert result.code == 0, result.err
    assert "\nresult  " in result.out
