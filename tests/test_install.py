"""An ordinary installation works as the checkout does: the wheel carries the configs, and has one program.

That it trains from anywhere stands in test_own_project.py.
"""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

from batchscope.cli import new
from batchscope.options.groups import CONFIGS
from tests.support.wheel import ROOT, build


def test_the_wheel_holds_every_file_and_one_program_which_finds_the_configs_in_it(tmp_path: Path) -> None:
    wheel = zipfile.ZipFile(build(tmp_path))
    held = set(wheel.namelist())
    configs = {f"configs/{path.relative_to(CONFIGS)}" for path in CONFIGS.rglob("*.yaml")}
    template = {f"own_project/{name}" for name in new.files_of(new.NAME)}
    sources = {
        str(path.relative_to(ROOT / "src")) for kind in ("*.py", "*.yaml") for path in (ROOT / "src").rglob(kind)
    }
    assert {f"batchscope/{name}" for name in configs | template | sources} <= held
    (name,) = [name for name in held if name.endswith("entry_points.txt")]
    assert [line for line in wheel.read(name).decode().splitlines() if "=" in line] == [
        "batchscope = batchscope.__main__:main",
        "batchscope = batchscope.attached:callbacks",  # what Lightning asks for callbacks of every Trainer
        "batchscope = batchscope.attached:callbacks_of_old_package",
    ]
    wheel.extractall(tmp_path / "site")
    code = "import batchscope.options.groups as c; print(c.CONFIGS)"
    environ = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path / "site" / "batchscope" / "configs")
