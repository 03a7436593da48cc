"""The program `batchscope`: one word chooses the command, however the program is started."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from batchscope import __version__
from tests.support.command_lines import answer
from tests.support.runs import SMALL, record
from tests.support.spawned import end, spawn

COMMANDS = "train new evaluate run predict export latency report compare explain choose hardware"


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_help_lists_every_command(words):
    code, out, err = answer(*words)
    assert (code, err) == (0, "")
    assert all(f"\n  {command} " in out for command in COMMANDS.split())


def test_a_sign_that_the_output_cannot_have_is_printed_plainly(tmp_path):
    result = end(spawn(tmp_path, "-m", "batchscope", "--help", PYTHONIOENCODING="ascii"))
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("usage: batchscope <command> ...\n")


def test_the_version_is_printed():
    assert answer("--version") == (0, f"batchscope {__version__}\n", "")


MISTAKES = {
    "train model=torchvision optimizer.lr=-1": "optimizer.lr: got -1",
    "explain modle=cnn": "modle: no such option.",
    "evaluate ckpt=nope.ckpt": "ckpt: got 'nope.ckpt', which is not a file",
}
ONE_AFTER_THE_OTHER = """
import sys
from batchscope.__main__ import main
for line in {lines}:
    sys.argv = ["batchscope", *line.split()]
    try:
        main()
    except SystemExit as end:
        print(end.code, {{"torch", "lightning", "pandas", "scipy", "matplotlib"}} & {{*sys.modules}})
"""


def test_a_mistake_is_answered_before_anything_slow_is_imported(tmp_path):
    result = end(spawn(tmp_path, "-c", ONE_AFTER_THE_OTHER.format(lines=[*MISTAKES])))
    assert result.out.splitlines() == ["1 set()"] * len(MISTAKES)
    for line, message in zip(result.err.splitlines(), MISTAKES.values(), strict=True):
        assert line.startswith(f"error: {message}")
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_has_gone_is_no_line():
    read_end, write_end = os.pipe()
    os.close(read_end)
    words = [sys.executable, "-m", "batchscope"]
    process = subprocess.run(words, stdout=write_end, stderr=subprocess.PIPE, text=True, check=False)
    assert (process.returncode, process.stderr) == (141, "")


@pytest.mark.slow
@pytest.mark.parametrize("installed", [True, False])
def test_a_run_on_two_devices_is_trained_and_resumed_by_an_installed_script_and_by_a_module(installed, tmp_path):
    words, python = ["-m", "batchscope"], sys.executable
    if installed:
        program = "from batchscope.__main__ import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
        words, python = [], str(tmp_path / "batchscope")
        Path(python).write_text(f"#!{sys.executable}\nimport sys\n{program}")
        Path(python).chmod(0o755)
    devices = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "optimizer.schedule=constant"]
    result = end(spawn(tmp_path, *words, "train", "-v", *SMALL, *devices, python=python))
    assert result.code == 0, result.err
    (out,) = (tmp_path / "outputs" / "runs").iterdir()  # the ranks agree on a folder that is named by the time
    assert record(out)["throughput"]["processes"] == 2
    assert f"again   batchscope evaluate ckpt={out.relative_to(tmp_path)}/checkpoints/best.ckpt" in result.out
    resumed = end(spawn(tmp_path, *words, "train", "resume=last", "trainer.max_epochs=3", python=python))
    assert resumed.code == 0, resumed.err
    assert record(out)["epochs"] == 3
