"""Every processor trains: decisive tests again, in a process whose libraries use old instructions only."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE_S

TESTS = Path(__file__).parent
DECISIVE = [
    "models/test_recurrent.py::test_autocast_stays_near_full_precision_and_has_gradients",
    "hardware/test_calibration.py::test_this_machines_processor_is_measured",
]


@pytest.mark.slow
@pytest.mark.parametrize(("onednn", "aten"), [("AVX2", "avx2"), ("SSE41", "default")])
def test_models_and_calibration_run_without_the_newest_instructions(onednn, aten):
    limited = {**os.environ, "ONEDNN_MAX_CPU_ISA": onednn, "ATEN_CPU_CAPABILITY": aten}
    line = [sys.executable, "-m", "pytest", "-q", "-x", *(str(TESTS / name) for name in DECISIVE)]
    result = subprocess.run(
        line, env=limited, cwd=TESTS.parent, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
