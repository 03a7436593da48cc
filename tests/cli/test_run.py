"""`batchscope run`: its warning for a script that fits nothing. The scripts are stand-ins without torch."""

import pytest

from tests.support.spawned import end, spawn


@pytest.mark.parametrize(("ends", "code", "is_warned"), [("", 0, True), ("exit(3)", 3, False)])
def test_a_script_that_runs_no_fit_is_said_to_be_unmeasured_unless_it_fails(ends, code, is_warned, tmp_path):
    (tmp_path / "script.py").write_text(f"import os, sys\nos.chdir('/')\nsys.{ends or 'path'}\n")
    result = end(spawn(tmp_path, "-m", "batchscope", "run", "--out=out", "script.py"))
    not_measured = "warning: run: nothing was measured: no fit of a lightning.pytorch Trainer has left a record\n"
    assert result == (code, "", not_measured if is_warned else "")
