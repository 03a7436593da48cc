"""`batchscope run`: how it ends where a script fits nothing or fails, and where a signal comes. The scripts are stand-ins without torch."""

import os
import signal
import sys
import time

import psutil
import pytest

from tests.support.command_lines import answer
from tests.support.runs import record
from tests.support.spawned import ROOT, end, spawn
from tests.support.waiting import PATIENCE_S, wait_until

MEASURED = """import os, sys
from pathlib import Path
from tests.support.synthetic_runs import change_record, write_run
flag, folder = os.environ["BATCHSCOPE_VARIED"], Path(os.environ["BATCHSCOPE_RUN"])
size = int(sys.argv[1].removeprefix(f"{flag}="))
write_run(folder, size, step_ms=1.0)
"""
LASTING = """import os, signal, subprocess, sys, time
from pathlib import Path
from tests.support.synthetic_runs import write_run
write_run(Path(os.environ["BATCHSCOPE_RUN"]), 16, status="running")
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open("pids", "a") as pids:
    print(os.getpid(), worker.pid, file=pids)
time.sleep(600)
"""
DEAF = f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{LASTING}"


@pytest.fixture
def vary(tmp_path, monkeypatch):
    """What `batchscope run --vary=--batch-size=16,64` answers for a script."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def vary(script):
        (tmp_path / "script.py").write_text(script)
        return answer("run", "--vary=--batch-size=16,64", f"--out={tmp_path / 'out'}", tmp_path / "script.py")

    return vary


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        ("", 0, ""),
        ("sys.exit(3 * (size == 16))", 1, "  failed with exit code 3\n"),
        (
            "os.kill(os.getpid(), 9 * (size == 64))",
            1,
            "  killed by SIGKILL, as the system does where it runs out of memory\n",
        ),
        (
            "size == 64 and change_record(folder, status='out_of_memory') or sys.exit(size == 64)",
            0,
            "  out of memory\n",
        ),
        ("size == 64 and change_record(folder, status='failed', error='caught')", 1, "  failed: caught\n"),
        (
            "size == 64 and (change_record(folder, status='running') or os._exit(0))",
            1,
            "  failed: ended with exit code 0 and said no more\n",
        ),
    ],
)
def test_the_exit_code_is_1_if_a_value_failed_and_the_report_is_written(vary, ends, code, said, tmp_path):
    answered = vary(MEASURED + ends)
    assert (answered.code, answered.err) == (code, said)
    assert "2 runs" in answered.out
    assert (tmp_path / "out/report/report.html").exists()


def test_a_value_whose_script_runs_no_fit_has_failed(vary):
    answered = vary(MEASURED.replace("\nwrite_run", "\nif size == 64: write_run"))
    assert answered.code == 1
    assert answered.err == "  not measured: the script ran no fit of a lightning.pytorch Trainer\n"


@pytest.mark.parametrize(("ends", "code", "said"), [("", 0, True), ("exit()", 0, True), ("exit(3)", 3, False)])
def test_a_script_that_runs_no_fit_is_said_to_be_unmeasured_unless_it_fails(ends, code, said, tmp_path):
    (tmp_path / "script.py").write_text(f"import os, sys\nos.chdir('/')\nsys.{ends or 'path'}\n")
    ended = end(spawn(tmp_path, "-m", "batchscope", "run", "--out=out", "script.py"))
    not_measured = "warning: run: not measured: the script ran no fit of a lightning.pytorch Trainer\n"
    assert ended == (code, "", not_measured if said else "")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the longest command line is that of Linux")
def test_a_script_that_cannot_be_started_is_one_line(tmp_path):
    (tmp_path / "script.py").touch()
    answered = answer("run", "--vary=--n=1", f"--out={tmp_path / 'out'}", tmp_path / "script.py", "x" * 2**18)
    assert answered.code == 1
    assert answered.err == f"error: {sys.executable} cannot be started: Argument list too long\n"


def is_running(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def started(folder, script):
    """`batchscope run --vary` of a script that trains by now, and the file with the processes of the script."""
    (folder / "script.py").write_text(script)
    words = ["-m", "batchscope", "run", "--vary=--batch-size=16,64", "--out=out", "script.py"]
    command, pids = spawn(folder, *words, PYTHONPATH=str(ROOT)), folder / "pids"
    wait_until(lambda: command.poll() is not None or (pids.exists() and pids.read_text()), "the script does not start")
    return command, pids


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_the_script_ends_with_its_workers_when_the_command_is_killed(tmp_path):
    command, pids = started(tmp_path, LASTING)
    command.kill()
    command.communicate(timeout=PATIENCE_S)  # until nobody holds its output
    wait_until(lambda: not any(is_running(int(pid)) for pid in pids.read_text().split()), "the script goes on")


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
@pytest.mark.parametrize(
    ("script", "signals"),
    [(LASTING, ["SIGTERM"]), (LASTING, ["SIGINT"]), (LASTING, ["SIGHUP"]), (DEAF, ["SIGTERM", "SIGTERM"])],
    ids=["SIGTERM", "SIGINT", "SIGHUP", "twice, to a script that ignores it"],
)
def test_a_signal_ends_the_running_script_with_its_workers_and_starts_no_other(script, signals, tmp_path):
    command, pids = started(tmp_path, script)
    for name in signals:
        command.send_signal(signal.Signals[name])
        time.sleep(0.5)  # sooner, it would be the same signal that arrives twice
    command.wait(PATIENCE_S)
    left = [int(pid) for pid in pids.read_text().split() if is_running(int(pid))]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert (end(command).code, left) == (128 + signal.Signals[signals[0]], [])
    assert record(tmp_path / "out/0")["status"] == "interrupted"
    assert os.listdir(tmp_path / "out") == ["0"]
