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
def vary(tmp_path, monkeypatch, no_plots):
    """What `batchscope run --vary=--batch-size=…` answers for a script that does something else with each size."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def vary(ends):
        (tmp_path / "script.py").write_text(f"{MEASURED}exec({ends}[size])\n")
        sizes = ",".join(map(str, ends))
        return answer("run", f"--vary=--batch-size={sizes}", f"--out={tmp_path / 'out'}", tmp_path / "script.py")

    return vary


# What a script does after its fit, and what is said.
FAILURES = {
    "sys.exit(3)": "failed with exit code 3",
    "os.kill(os.getpid(), 9)": "killed by SIGKILL, as the system does where it runs out of memory",
    "change_record(folder, status='failed', error='caught')": "failed: caught",
    "change_record(folder, status='running'), os._exit(0)": "failed: ended with exit code 0 and said no more",
    "import shutil; shutil.rmtree(folder)": "not measured: the script ran no fit of a lightning.pytorch Trainer",
}


def test_the_exit_code_is_1_if_a_value_failed_and_the_report_is_written(vary, tmp_path):
    answered = vary({2 ** (3 + number): ends for number, ends in enumerate(FAILURES)})
    assert (answered.code, answered.err.splitlines()) == (1, [f"  {said}" for said in FAILURES.values()])
    assert "4 runs" in answered.out
    assert (tmp_path / "out/report/report.html").exists()


def test_a_value_that_does_not_fit_into_memory_is_a_result(vary):
    answered = vary({16: "", 64: "change_record(folder, status='out_of_memory'); sys.exit(1)"})
    assert (answered.code, answered.err) == (0, "  out of memory\n")
    assert "2 runs: 1 finished, 1 out of memory" in answered.out


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
    [
        pytest.param(LASTING, ["SIGTERM"], id="SIGTERM"),
        *(pytest.param(LASTING, [name], id=name, marks=pytest.mark.slow) for name in ("SIGINT", "SIGHUP")),
        pytest.param(DEAF, ["SIGTERM", "SIGTERM"], id="twice, to a script that ignores it", marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_the_running_script_with_its_workers_and_starts_no_other(script, signals, tmp_path):
    command, pids = started(tmp_path, script)
    for number, name in enumerate(signals):
        time.sleep(0.5 * number)  # sooner, it would be the same signal that arrives twice
        command.send_signal(signal.Signals[name])
    command.wait(PATIENCE_S)
    left = [int(pid) for pid in pids.read_text().split() if is_running(int(pid))]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert (end(command).code, left) == (128 + signal.Signals[signals[0]], [])
    assert record(tmp_path / "out/0")["status"] == "interrupted"
    assert os.listdir(tmp_path / "out") == ["0"]
