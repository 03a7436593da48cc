"""The libraries of a run are imported without modules that they do not need."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import gc, sys
from batchscope._imports import quick_imports
with quick_imports():
    assert not gc.isenabled()
    import lightning{also}
assert gc.isenabled() and "scipy.signal" not in sys.modules
import scipy.signal
print(len(scipy.signal.windows.hamming(5)), hasattr(scipy.signal, "hamming"))
class Open: pass
it = Open()
it.itself, it.file = it, open("file", "w")
it.file.write("all of it")
"""


@pytest.mark.parametrize("also", ["", pytest.param(", torch._dynamo", marks=pytest.mark.slow)])  # its Triton prints
def test_scipy_signal_is_left_out_until_asked_for_and_a_program_ends_in_silence_with_whole_files(
    also, tmp_path
) -> None:
    """One process tests both: it imports Lightning, and exits with an open file in a reference cycle."""
    command = [sys.executable, "-c", PROGRAM.format(also=also)]
    result = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert (result.stdout, result.stderr, (tmp_path / "file").read_text()) == ("5 False\n", "", "all of it")


@pytest.mark.slow
def test_a_package_that_asks_for_the_old_name_gets_it(tmp_path) -> None:
    (tmp_path / "srmrpy.py").touch()
    program = "from batchscope._imports import quick_imports\nwith quick_imports(): import torchmetrics, scipy.signal\n"
    program += "print(scipy.signal.hamming)"
    result = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert result.stdout.startswith("<function hamming ")


def test_a_script_imports_few_modules_with_the_monitor_and_all_others_before_its_fit_begins() -> None:
    """One process tests both: it imports Lightning, which takes seconds."""
    program = "import sys; from batchscope import ThroughputMonitor; monitor = ThroughputMonitor(calibrate=False)\n"
    program += "print(sum(name.partition('.')[0] == 'batchscope' for name in sys.modules))\n"
    program += "from tests.support.third_party_modules import Stranger, train\n"
    program += "class Early(Stranger):\n    def on_fit_start(self): print('batchscope.callbacks._measurement' in sys.modules)\n"
    program += "train(Early(), monitor, max_epochs=1)"
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).parents[1], check=True, capture_output=True, text=True
    )
    modules, is_imported, *_ = result.stdout.splitlines()
    assert int(modules) <= 25
    assert is_imported == "True"
