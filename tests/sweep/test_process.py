"""A run's process: what it is told, how its end is recorded, and what signals to the sweep do to it."""

import dataclasses
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from batchscope.checkpointing.resume import lock_run_dir
from batchscope.checkpointing.signals import exit_on_signals
from batchscope.records.read import read
from batchscope.sweep import job as program
from batchscope.sweep import process
from batchscope.sweep.loop import Loop
from tests.support.locks import HOLD, RUN_DIR, held
from tests.sweep.conftest import ROOT, job, running

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux")


def end_of(loop: Loop, folder: Path, does: str) -> tuple[str, str | None]:
    """Status and error of a run that does this."""
    (record,) = loop.do([job(folder, "0", timed=False, does=does)])
    return record["status"], record.get("error")


@pytest.mark.parametrize(
    ("does", "end"),
    [
        ("pass", ("finished", None)),
        ("os.kill(os.getpid(), signal.SIGKILL)", ("killed", "killed by SIGKILL, as the system does where it runs out of memory")),
        ("os.kill(os.getpid(), signal.SIGSEGV)", ("failed", "killed by SIGSEGV")),
        ("sys.exit(143)", ("interrupted", "stopped by SIGTERM")),
        ("sys.exit(7)", ("failed", "ended with exit code 7 and said no more")),
        ("record['status'] = 'out_of_memory'; file.write_text(json.dumps(record)); os.kill(0, 9)", ("out_of_memory", None)),
    ],
)  # fmt: skip
def test_the_record_says_how_a_run_ended_also_where_the_run_did_not(loop, does: str, end: tuple, tmp_path) -> None:
    assert end_of(loop, tmp_path, does) == end


def test_what_lies_in_the_current_folder_shadows_nothing_in_a_new_python(loop, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    (record,) = loop.do([dataclasses.replace(job(tmp_path, "0", timed=False, does="pass"), forks=False)])
    assert record["status"] == "finished"


def test_a_new_python_ends_alike(loop, tmp_path: Path) -> None:
    (record,) = loop.do([dataclasses.replace(job(tmp_path, "0", timed=False, does="sys.exit(7)"), forks=False)])
    assert record["error"] == "ended with exit code 7 and said no more"


@LINUX
def test_a_forked_run_is_a_process_as_any_other(loop, tmp_path: Path, monkeypatch, capfd) -> None:
    """In a session of its own, with the sweep's folder, and with workers that are started as those of any other run."""
    monkeypatch.chdir(tmp_path)
    facts = "os.getsid(0) == os.getpid(), os.getcwd(), len(os.listdir('/proc/self/task'))"
    does = f"import multiprocessing; record['facts'] = [{facts}, multiprocessing.get_start_method()]"
    done = [
        loop.do([dataclasses.replace(job(tmp_path, name, timed=False, does=does), forks=forks)])[0]["facts"]
        for name, forks in (("forked", True), ("new", False))
    ]
    assert done[0] == done[1]
    assert done[0][:2] == [True, str(tmp_path)]


@LINUX
def test_what_is_registered_for_the_exit_of_a_forked_run_is_done(loop, tmp_path: Path) -> None:
    end_of(loop, tmp_path, "import atexit; atexit.register((folder / 'left').touch)")
    assert (tmp_path / "0/left").exists()


@LINUX
def test_a_killed_server_ends_no_run(loop, tmp_path: Path) -> None:
    does = "os.kill(os.getppid(), signal.SIGKILL); time.sleep(0.3)"
    assert end_of(loop, tmp_path, does) == ("finished", None)
    (after,) = loop.do([job(tmp_path, "1", timed=False)])
    assert after["status"] == "finished"


def test_a_run_gets_its_configuration_from_the_sweep_and_not_from_a_file(loop, tmp_path: Path) -> None:
    one = job(tmp_path, "0", timed=False, does="record['got'] = asked")
    one.config["data"]["batch_size"] = 5
    (record,) = loop.do([one])
    assert record["got"] == {"config": one.config, **one.facts, "visited": False}


@pytest.mark.parametrize("status", ["planned", "killed"])
def test_the_program_trains_what_it_was_told_and_resumes_what_has_begun(status: str, tmp_path, monkeypatch) -> None:
    """Whatever configuration the folder's record has."""
    trained = []
    monkeypatch.setattr("batchscope.training.run.train", lambda *run: trained.append(run))
    monkeypatch.setattr(program, "check_config", dict)
    (tmp_path / "run.json").write_text(json.dumps({"schema": 3, "status": status, "config": {"seed": 666}}))
    config = {"trainer": {"devices": 1}, "seed": 1}
    program.run_planned(tmp_path, {"config": config, "choices": {}, "overrides": [], "visited": False})
    resumed = None if status == "planned" else str(tmp_path)
    assert trained == [({**config, "resume": resumed}, tmp_path, {}, [], None)]


def test_a_run_that_is_going_on_elsewhere_is_not_closed(loop, tmp_path: Path) -> None:
    does = f"import subprocess; subprocess.Popen([sys.executable, '-c', {HOLD!r}, str(folder), {RUN_DIR!r}]).wait(); sys.exit(1)"
    with held(tmp_path / "0", RUN_DIR):
        (tmp_path / "0/run.json").write_text(json.dumps({"schema": 3, "status": "running"}))
        one = job(tmp_path, "0", timed=False, does=does)
        ended = process.Process(one)
        os.killpg(ended.pid, signal.SIGKILL)
        ended.wait()
        assert read(tmp_path / "0")["status"] == "running"


def test_a_program_whose_run_is_going_on_elsewhere_leaves_its_record(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"schema": 3, "status": "planned", "config": None}))
    before = read(tmp_path)
    with lock_run_dir(tmp_path), pytest.raises(Exception, match="."):
        program.run_planned(tmp_path, {"config": {}, "choices": {}, "overrides": [], "visited": False})
    assert read(tmp_path) == before


@pytest.fixture
def signals():
    """The sweep's handlers, for a test."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    exit_on_signals()
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@LINUX
def test_a_run_that_ends_before_it_has_begun_is_not_waited_for(loop, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(process, "_run_forked", sys.exit)  # takes fewer arguments: the forked process fails at once
    assert end_of(loop, tmp_path, "pass") == ("failed", "ended with exit code 1 and said no more")


@LINUX
def test_a_forked_run_whose_sweep_has_ended_does_nothing() -> None:
    ours, theirs = socket.socketpair()
    ours.close()
    fork = multiprocessing.get_context("fork").Process(target=process._run_forked, args=("none", "", theirs))
    fork.start()
    fork.join()
    assert fork.exitcode == 0


@LINUX
def test_a_signal_gives_up_the_first_run_that_waits_for_the_server(loop, signals, tmp_path: Path, monkeypatch) -> None:
    def wait_for_server(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("waits on")

    monkeypatch.setattr(process, "_forked", wait_for_server)
    with pytest.raises(SystemExit) as stop:
        loop.do([job(tmp_path, "0", timed=False)])
    assert stop.value.code == 128 + signal.SIGTERM
    assert read(tmp_path / "0")["status"] == "planned"


@LINUX
@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_sweep_ends_its_runs(loop, signals, timed: bool, number: int, tmp_path: Path) -> None:
    kill = f"os.kill({os.getpid()}, {number})"
    does = f"[n for n in visits if len(record['taken']) == 1 and {kill}]" if timed else f"{kill}; time.sleep(600)"
    jobs = [job(tmp_path, "0", timed=timed, does=does), *(job(tmp_path, str(n), 8 * n, timed) for n in (1, 2))]
    with pytest.raises(SystemExit) as stop:
        loop.do(jobs)
    assert stop.value.code == 128 + number
    assert running(tmp_path) == []
    assert read(tmp_path / "0")["error"] == f"stopped by {signal.Signals(number).name}"


@LINUX
def test_after_a_signal_no_run_is_started(loop, signals, tmp_path: Path) -> None:
    stop = f"os.kill({os.getpid()}, signal.SIGTERM); time.sleep(600)"
    with pytest.raises(SystemExit):
        loop.do([job(tmp_path, "0", does=stop), *(job(tmp_path, str(n), 8 * n) for n in (1, 2))])
    assert running(tmp_path) == []
    assert [read(tmp_path / str(n))["status"] for n in range(3)] == ["interrupted", "planned", "planned"]


@LINUX
def test_a_second_signal_kills_runs_that_do_not_end(loop, signals, tmp_path: Path) -> None:
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN); os.kill(%d, 15); time.sleep(0.5); os.kill(%d, 15); time.sleep(600)"
    pid = os.getpid()
    with pytest.raises(SystemExit):
        loop.do([job(tmp_path, "0", timed=False, does=stubborn % (pid, pid))])
    assert running(tmp_path) == []


@LINUX
def test_no_run_is_left_when_the_sweep_is_killed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    kill = "[n for n in visits if len(record['taken']) == 1 and os.kill(int(os.environ['SWEEP']), signal.SIGKILL)]"
    sweep = f"""
import os, pathlib
os.environ["SWEEP"] = str(os.getpid())
from batchscope.sweep.loop import Loop
from tests.sweep.conftest import job, use_stand_ins
use_stand_ins()
place = pathlib.Path({str(tmp_path)!r})
Loop().do([job(place, "0"), job(place, "1", 16, does={kill!r})])
"""
    done = subprocess.run([sys.executable, "-c", sweep], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGKILL, b"")
    while running(tmp_path):
        time.sleep(0.05)
