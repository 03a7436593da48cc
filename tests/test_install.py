"""An ordinary installation works as the checkout does: the wheel carries the configs, and trains from anywhere."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from batchscope.cli import new
from batchscope.options.groups import CONFIGS
from tests.support.wheel import ROOT, build


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"))


def test_the_wheel_holds_every_config_module_and_data_file(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    configs = {f"batchscope/configs/{path.relative_to(CONFIGS)}" for path in CONFIGS.rglob("*.yaml")}
    template = {f"batchscope/own_project/{name}" for name in new.files_of(new.NAME)}
    sources = (path for kind in ("*.py", "*.yaml") for path in (ROOT / "src").rglob(kind))
    assert configs | template | {f"batchscope/{path.relative_to(ROOT / 'src')}" for path in sources} <= held


def test_the_wheel_installs_one_program(wheel: Path) -> None:
    (name,) = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("entry_points.txt")]
    scripts = zipfile.ZipFile(wheel).read(name).decode().splitlines()
    assert [line for line in scripts if "=" in line] == [
        "batchscope = batchscope.__main__:main",
        "batchscope = batchscope.attached:callbacks",  # what Lightning asks for callbacks of every Trainer
        "batchscope = batchscope.attached:callbacks_of_old_package",
    ]


@pytest.mark.slow  # a process that imports everything once more
def test_an_installed_wheel_trains_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    site, here = tmp_path / "site", tmp_path / "here"
    here.mkdir()
    zipfile.ZipFile(wheel).extractall(site)
    small = ["data=adding", "data.num_train=8", "data.num_val=4", "data.num_test=4", "trainer.max_steps=1"]
    options = ["model=rnn_cell", *small, "trainer.accelerator=cpu", "callbacks.throughput.calibrate=false"]
    done = subprocess.run(
        [sys.executable, "-m", "batchscope", "train", *options, "hydra.run.dir=out"],
        cwd=here,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads((here / "out" / "run.json").read_text())
    assert record["status"] == "finished"
    assert record["steps"] == 1


def test_the_installed_wheel_is_what_was_tested(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = "import batchscope.options.groups as c; print(c.CONFIGS)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path / "batchscope" / "configs")
