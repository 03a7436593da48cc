"""The process of a run: its commands, the record of its end, and the effect of signals to the sweep."""

import json
import os
import signal
from dataclasses import replace
from unittest.mock import Mock

import pytest

from batchscope import _system
from batchscope.errors import UserError
from batchscope.records.run_record import write_planned
from batchscope.sweep import folder, process
from batchscope.sweep import job as program
from tests.support.fork_server import Forked
from tests.support.locks import RUN_DIR, held
from tests.support.marks import LINUX, POSIX
from tests.support.runs import record
from tests.support.systems import SYSTEM
from tests.support.waiting import PATIENCE_S, wait_until
from tests.sweep.conftest import job, running, stand_ins


@pytest.mark.parametrize(
    ("does", "status", "error"),
    [
        ("pass", "finished", None),
        ("os.kill(os.getpid(), 9)", "killed", "killed by SIGKILL, as the system does where it runs out of memory"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "failed", "killed by SIGSEGV"),
        ("sys.exit(143)", "interrupted", "stopped by SIGTERM"),
        ("record['status'] = 'out_of_memory'; file.write_text(json.dumps(record)); os.kill(os.getpid(), 9)", "out_of_memory", None),
    ],
)  # fmt: skip
def test_the_record_says_how_a_run_ended_also_where_the_run_did_not(do, does, status, error):
    (run_record,) = do(does)
    assert (run_record["status"], run_record.get("error")) == (status, error)


@LINUX
def test_a_forked_run_is_a_process_as_any_other(do, tmp_path, monkeypatch):
    """In a session of its own and the sweep's folder, which shadows nothing; with its start method and exit functions."""
    (tmp_path / "json.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    does = """import atexit, multiprocessing
atexit.register((folder / "left").touch)
facts = os.getsid(0) == os.getpid(), os.getcwd(), asked, len(os.listdir("/proc/self/task"))
file.write_text(json.dumps(record | {"facts": [*facts, multiprocessing.get_start_method()]}))
sys.exit(7)"""
    (forked,), has_exited = do(does), (tmp_path / "a/left").exists()
    (tmp_path / "a").rename(tmp_path / "a.aside")
    (new,) = do(does, may_fork=False)
    twin = job(tmp_path, "a", timed=False, does=does)
    assert forked["facts"] == new["facts"]
    assert new["facts"][:3] == [True, str(tmp_path), {"config": twin.config, **twin.record_fields, "visited": False}]
    assert (has_exited, forked["error"], new["error"]) == (True, *["ended with exit code 7 and said no more"] * 2)


def test_where_no_server_can_be_started_a_run_is_a_new_python(do, monkeypatch):
    monkeypatch.setattr(_system, "start_fork_server", Mock(side_effect=OSError("AF_UNIX path too long")))
    assert not process.start_server()
    (run_record,) = do("pass")
    assert run_record["status"] == "finished"


@pytest.mark.parametrize("status", ["planned", "killed"])
def test_the_program_trains_what_it_was_told_and_resumes_what_has_begun(status, tmp_path, monkeypatch):
    """The command's configuration wins over that of the record."""
    trained = []
    monkeypatch.setattr("batchscope.training.run.train", lambda *run: trained.append(run))
    monkeypatch.setattr(program, "check_config", dict)
    (tmp_path / "run.json").write_text(json.dumps({"schema": 3, "status": status, "config": {"seed": 666}}))
    config = {"trainer": {"devices": 1}, "seed": 1}
    program.run_planned(tmp_path, {"config": config, "choices": {}, "overrides": [], "visited": False})
    resumed = None if status == "planned" else str(tmp_path)
    assert trained == [({**config, "resume": resumed}, tmp_path, {}, [], None)]


@pytest.mark.parametrize(
    ("before", "after"), [("planned", "failed"), ("interrupted", "interrupted"), ("killed", "interrupted")]
)
def test_a_run_that_fails_before_it_begins_is_recorded_with_that_reason_and_can_still_be_resumed(
    before, after, tmp_path
):
    old = {"schema": 3, "status": before, "error": "stopped by SIGINT", "config": None}
    (tmp_path / "run.json").write_text(json.dumps(old))
    with pytest.raises(UserError):
        program.run_planned(tmp_path, {"config": {"model": 7}, "choices": {}, "overrides": [], "visited": False})
    failed = record(tmp_path)
    assert failed["status"] == after and failed["error"] != "stopped by SIGINT"


def test_a_run_that_is_going_on_elsewhere_is_not_closed(loop, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/run.json").write_text(json.dumps({"schema": 3, "status": "planned", "config": None}))
    with held(tmp_path / "a", RUN_DIR):
        with pytest.raises(UserError):
            program.run_planned(tmp_path / "a", {"config": {}, "choices": {}, "overrides": [], "visited": False})
        assert record(tmp_path / "a")["status"] == "planned"
        ended = process.Process(job(tmp_path, "a", timed=False, does="hang()"))
        ended.program.end_group()
        ended.wait()
        assert record(tmp_path / "a")["status"] in ("planned", "running")


def test_after_a_signal_no_run_is_started():
    with pytest.raises(SystemExit) as stop, process.Processes() as processes:
        os.kill(os.getpid(), signal.SIGTERM)
        processes.add(lambda: pytest.fail("a run is started"))
    assert stop.value.code == 143


def test_a_signal_while_the_first_process_is_started_leaves_none_behind(loop, tmp_path):
    def start():
        write_planned(tmp_path / "a", config={})
        started.append(process.Process(job(tmp_path, "a", timed=False, does="hang()")))
        os.kill(os.getpid(), signal.SIGTERM)
        return started[0]

    started = []
    with pytest.raises(SystemExit) as stop, process.Processes() as processes:
        processes.add(start)
    started[0].program.end_group()
    assert (stop.value.code, started[0].has_ended) == (143, True)


IN_A_VISIT = "[n for n in visits if len(record['taken']) == 1 and os.kill({0}, {1})]"
TWICE = "signal.signal(15, signal.SIG_IGN); os.kill({0}, {1}); time.sleep(0.5); os.kill({0}, {1}); hang()"
# The signal, the action of the first of three runs, whether they are visited side by side → their ends.
SIGNALS = {
    "while one trains": ("SIGTERM", "os.kill({0}, {1}); hang()", False, "interrupted planned planned"),
    "while one is visited": (
        "SIGTERM" if SYSTEM == "windows" else "SIGHUP",
        IN_A_VISIT,
        True,
        "interrupted interrupted interrupted",
    ),
    "while the first is set up": ("SIGTERM", "os.kill({0}, {1}); hang()", True, "interrupted planned planned"),
    "twice, to one that does not end": ("SIGTERM", TWICE, False, "interrupted planned planned"),
}


@pytest.mark.parametrize("name", SIGNALS)
def test_a_signal_to_the_sweep_ends_its_runs_and_no_other_is_started(do, name, tmp_path):
    sent, does, timed, ends = SIGNALS[name]
    number = signal.Signals[sent].value
    with pytest.raises(SystemExit) as stop:
        do(does.format(os.getpid(), number), "list(visits)", "list(visits)", timed=timed)
    assert stop.value.code == 128 + number
    assert running(tmp_path) == []
    assert " ".join(folder.statuses(tmp_path)) == ends
    assert record(tmp_path / "a")["error"] == f"stopped by {sent}"


@POSIX
def test_a_launchers_own_handler_of_a_signal_is_called_once_the_runs_have_ended(do, tmp_path):
    """The handler of submitit asks SLURM to start the job again."""
    states = []
    before = signal.signal(
        signal.SIGUSR2, lambda *_: states.append([running(tmp_path), record(tmp_path / "a")["status"]])
    )
    with pytest.raises(SystemExit) as stop:
        do(f"os.kill({os.getpid()}, signal.SIGUSR2); hang()", may_fork=False)
    signal.signal(signal.SIGUSR2, before)
    assert (stop.value.code, states) == (128 + signal.SIGUSR2, [[[], "running"]])
    assert record(tmp_path / "a")["error"] == "stopped by SIGTERM"


def killed_sweep(folder):
    kill = f"[n for n in visits if len(record['taken']) == 1 and os.kill({os.getpid()}, 9)]"
    jobs = job(folder, "0"), job(folder, "1", 16, does=kill)
    stand_ins(pytest.MonkeyPatch()).do([replace(planned, title="") for planned in jobs])  # no title: it prints nothing


@LINUX
def test_no_run_is_left_when_the_sweep_is_killed(tmp_path):
    assert Forked.start(killed_sweep, tmp_path).end(PATIENCE_S) == -signal.SIGKILL
    wait_until(lambda: not running(tmp_path), "a run is left")
