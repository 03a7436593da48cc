"""A choice from records alone has no need of torch, whose import takes seconds."""

import subprocess
import sys


def test_no_module_of_the_room_imports_torch():
    modules = "step, host, catalogue, kernels, memory, launches"
    code = f"import sys; from batchscope.choice import {modules}; print({{'torch', 'lightning'}} & {{*sys.modules}})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
