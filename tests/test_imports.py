"""What a new process imports, and that it ends in silence: one process for all, because Lightning takes seconds to import."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import gc, sys
from batchscope._imports import quick_imports
with quick_imports():
    assert not gc.isenabled()
    import lightning
assert gc.isenabled()
print("scipy.signal" in sys.modules)
import scipy.signal
print(len(scipy.signal.windows.hamming(5)), hasattr(scipy.signal, "hamming"))

from batchscope import ThroughputMonitor
monitor = ThroughputMonitor(calibrate=False, verbose=False)
print(sum(name.partition(".")[0] == "batchscope" for name in sys.modules) - 1)  # without batchscope._imports

sys.path.append({root!r})
from tests.support.third_party_modules import Stranger, train
class Early(Stranger):
    def on_fit_start(self): print("batchscope.callbacks._measurement" in sys.modules)
train(Early(), monitor, max_epochs=1)

class Open: pass
it = Open()
it.itself, it.file = it, open("file", "w")
it.file.write("all of it")
print("end", file=sys.stderr)
"""


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], str, str]:
    """The lines that a new process has printed, what it has complained of at its end, and the file that it had open then."""
    folder = tmp_path_factory.mktemp("process")
    command = [sys.executable, "-c", PROGRAM.format(root=str(Path(__file__).parents[1]))]
    result = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    return result.stdout.splitlines(), result.stderr.partition("end\n")[2], (folder / "file").read_text()


def test_scipy_signal_is_left_out_until_asked_for(process) -> None:
    assert process[0][:2] == ["False", "5 False"]


def test_a_script_that_names_the_monitor_imports_few_modules_of_the_package(process) -> None:
    assert int(process[0][2]) <= 25


def test_importing_what_measures_a_fit_is_no_part_of_it(process) -> None:
    assert process[0][3] == "True"


def test_a_program_ends_in_silence_with_whole_files(process) -> None:
    """Its file is open in a reference cycle, and it has imported Triton, which prints what is left."""
    assert process[1:] == ("", "all of it")


@pytest.mark.slow
def test_a_package_that_asks_for_the_old_name_gets_it(tmp_path) -> None:
    (tmp_path / "srmrpy.py").touch()
    program = "from batchscope._imports import quick_imports\nwith quick_imports(): import torchmetrics, scipy.signal\n"
    program += "print(scipy.signal.hamming)"
    result = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert result.stdout.startswith("<function hamming ")
