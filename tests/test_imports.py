"""The libraries of a run are imported without what none of them needs."""

import subprocess
import sys

PROGRAM = """
import gc, sys
from batchscope._imports import quick_imports
with quick_imports():
    assert not gc.isenabled()
    import lightning
assert gc.isenabled() and "scipy.signal" not in sys.modules
import scipy.signal
print(len(scipy.signal.windows.hamming(5)), hasattr(scipy.signal, "hamming"))
"""


def test_scipy_signal_is_left_out_and_is_itself_for_who_asks_for_it() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True)
    assert done.stdout == "5 False\n"


def test_a_package_that_asks_for_the_old_name_gets_it(tmp_path) -> None:
    (tmp_path / "srmrpy.py").touch()
    program = "from batchscope._imports import quick_imports\nwith quick_imports(): import torchmetrics, scipy.signal\n"
    program += "print(scipy.signal.hamming)"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert done.stdout.startswith("<function hamming ")


def test_a_program_whose_imports_are_left_ends_in_silence_and_its_files_are_whole(tmp_path) -> None:
    program = "from batchscope._imports import quick_imports\nwith quick_imports(): import lightning, torch._dynamo\n"
    program += "class Open: pass\nit = Open()\nit.itself, it.file = it, open('file', 'w')\nit.file.write('all of it')\n"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert (done.stdout, done.stderr, (tmp_path / "file").read_text()) == ("", "", "all of it")
