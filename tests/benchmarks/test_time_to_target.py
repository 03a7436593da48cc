"""`benchmarks/time_to_target.py`: the smallest case from its sweep to its table."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "time_to_target.py"


@pytest.mark.slow
def test_the_smallest_case_compares_the_named_size_with_the_first_one(tmp_path: Path) -> None:
    line = [sys.executable, str(SCRIPT), "--smallest", f"--root={tmp_path}", f"--out={tmp_path / 'out'}"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    said = subprocess.run(line, check=True, capture_output=True, text=True, env=environment).stdout
    assert "| mlp on digits | val/acc 40.0 % |" in said
    assert "of 1 cases." in said
