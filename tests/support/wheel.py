"""The wheel of this checkout, and an environment in which it alone is installed, beside the libraries of this one."""

import importlib.util
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
_OFFLINE = ["--no-deps", "--no-build-isolation", "--no-index"]


def build(folder: Path) -> Path:
    """Build the wheel from a copy of what it is made of, so that the checkout stays clean."""
    source, out = folder / "source", folder / "wheel"
    source.mkdir()
    for name in ("src", "configs", "examples", "pyproject.toml", "README.md", "LICENSE"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(source)], check=True)
    subprocess.run([*_PIP, "wheel", *_OFFLINE, "--wheel-dir", str(out), str(source)], check=True, capture_output=True)
    return next(out.glob("batchscope-*.whl"))


class Environment:
    """A virtual environment with the wheel, and the libraries of this Python, in a folder that is made."""

    def __init__(self, folder: Path, wheel: Path):
        self.programs = folder / "bin"
        venv.create(folder, with_pip=False, symlinks=True)
        (site,) = folder.glob("lib/python*/site-packages")
        torch = importlib.util.find_spec("torch").origin  # to import it takes seconds
        (site / "libraries.pth").write_text(f"{Path(torch).parents[1]}\n")  # no .pth file in there is read
        pip = [*_PIP[:3], "--python", str(self.programs / "python"), *_PIP[3:], "install", *_OFFLINE, str(wheel)]
        subprocess.run(pip, check=True, capture_output=True)

    @property
    def variables(self) -> dict[str, str]:
        """The environment of a shell in which this one is active."""
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HYDRA_FULL_ERROR")}
        return {**kept, "PATH": f"{self.programs}{os.pathsep}{os.environ['PATH']}"}
