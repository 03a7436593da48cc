"""Runs that take turns are processes of their own: what ends one of them, or the sweep, leaves none behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from batchscope.files import WriteError
from batchscope.records.read import read
from batchscope.sweep import fork_server, runner, turn_processes
from batchscope.sweep.passes import VISIT_S
from batchscope.sweep.process import exit_on_signals
from batchscope.sweep.turn_processes import is_suited, run_in_turns
from tests.sweep.test_fork_server import ROOT, is_running

pytestmark = pytest.mark.skipif(not fork_server.is_supported(), reason="needs Linux")

# A run without torch: it answers a turn at once, and has a steady step. `before` is done before each turn.
RUN = """
import json, os, sys, threading, signal
def stop():
    while os.read(0, 1024): pass
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=stop, daemon=True).start()
read, write = (os.fdopen(int(end), mode) for end, mode in zip(os.environ["BATCHSCOPE_TURNS"].split(","), "rw"))
def tell(**facts): print(json.dumps(facts), file=write, flush=True)
tell(ready=True)
assert next(read) == "warm up\\n"
tell(warm=True)
for turn, line in enumerate(read):
    {before}
    if line.startswith("stop"):
        print("said", line.strip())
        sys.exit()
    tell(median_s=0.01, samples={samples})
signal.pause()  # nobody gives turns any more
"""


def settings(jobs: list) -> list[tuple[str, int]]:
    return [("", 8**number) for number in range(len(jobs))]


def run(folder: Path, name: str, before: str = "pass", samples: int = 8) -> tuple[Path, list[str]]:
    made = folder / name
    made.mkdir()
    (made / "run.json").write_text(json.dumps({"schema": 3, "status": "running"}))
    return made, [RUN.format(before=before, samples=samples)]


def test_each_run_is_told_why_it_ends_and_its_output_is_kept_together(server, tmp_path: Path) -> None:
    jobs = [run(tmp_path, "0", samples=8), run(tmp_path, "1", samples=64)]
    ended: list[str] = []
    printed: list[str] = []

    def on_end(of: turn_processes.TurnRun) -> None:
        ended.append(of.folder.name)
        printed.extend(of.printed())

    assert run_in_turns(jobs, settings(jobs), server, on_end, say=lambda line: None) == {tmp_path / "0", tmp_path / "1"}
    assert ended == ["0", "1"]
    assert printed == ["said stop known to ± 5 %\n", ""] * 2


def test_passes_are_numbered_faster_than_they_can_pass() -> None:
    """So that a second group of runs in a folder has no number of the first one's."""
    assert turn_processes._PASSES_PER_S > 1 / VISIT_S


@pytest.mark.parametrize("before", ["turn == 1 and os.kill(os.getpid(), signal.SIGKILL)", "1 / 0"])
def test_a_run_that_dies_ends_no_other(server, tmp_path: Path, before: str) -> None:
    jobs = [run(tmp_path, "0"), run(tmp_path, "1", before=before)]
    ended: list[str] = []
    run_in_turns(jobs, settings(jobs), server, lambda of: ended.append(of.folder.name), say=lambda line: None)
    assert ended == ["1", "0"]
    assert read(tmp_path / "1")["status"] in ("killed", "failed")


def test_a_run_that_is_killed_while_it_waits_ends_no_other(server, tmp_path: Path) -> None:
    pids = tmp_path / "pid"
    first = run(tmp_path, "0", before=f"turn == 1 and os.kill(int(open({str(pids)!r}).read()), signal.SIGKILL)")
    second = run(tmp_path, "1", before=f"open({str(pids)!r}, 'w').write(str(os.getpid()))")
    ended: list[str] = []
    run_in_turns(
        [first, second], settings([0, 1]), server, lambda of: ended.append(of.folder.name), say=lambda line: None
    )
    assert ended == ["1", "0"]
    assert read(tmp_path / "1")["status"] == "killed"


def test_no_more_runs_wait_than_there_is_memory_for(server, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(turn_processes, "_has_memory_for_another", lambda runs: len(runs) < 2)
    jobs = [run(tmp_path, str(number)) for number in range(3)]
    assert run_in_turns(jobs, settings(jobs), server, lambda of: None, say=lambda line: None) == {
        tmp_path / "0",
        tmp_path / "1",
    }


def test_a_run_that_there_is_no_memory_to_train_is_put_off(server, tmp_path: Path, monkeypatch) -> None:
    jobs = [run(tmp_path, str(number)) for number in range(3)]
    asked: list[int] = []

    def has_memory(runs: list[turn_processes.TurnRun]) -> bool:
        asked.append(len(runs))
        return len(asked) <= 3  # to set both of the others up, and to train the second

    monkeypatch.setattr(turn_processes, "_has_memory_for_another", has_memory)
    ended: list[turn_processes.TurnRun] = []
    assert run_in_turns(jobs, settings(jobs), server, ended.append, say=lambda line: None) == {
        tmp_path / "0",
        tmp_path / "1",
    }
    assert len(ended) == 2
    assert read(tmp_path / "2")["status"] == "running"  # nothing was recorded: it begins anew


def test_where_no_server_can_fork_no_run_is_started(server, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(server, "fork", lambda *_: None)
    assert (
        run_in_turns(
            [run(tmp_path, "0"), run(tmp_path, "1")], settings([0, 1]), server, lambda of: None, lambda line: None
        )
        == set()
    )


@pytest.mark.parametrize("signals", ["(signal.SIGTERM,)", "(signal.SIGTERM, signal.SIGTERM, signal.SIGTERM)"])
def test_a_signal_ends_all_runs_even_if_it_is_sent_again(server, tmp_path: Path, signals: str) -> None:
    kill = f"turn == 1 and ([os.kill({os.getpid()}, number) for number in {signals}], signal.pause())"
    jobs = [run(tmp_path, "0"), run(tmp_path, "1", before=kill), run(tmp_path, "2")]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    ended: list[str] = []
    try:
        exit_on_signals()
        with pytest.raises(SystemExit) as stop:
            run_in_turns(jobs, settings(jobs), server, lambda of: ended.append(of.folder.name), say=lambda line: None)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert stop.value.code == 143
    assert sorted(ended) == ["0", "1", "2"]
    assert [read(tmp_path / name)["status"] for name in "012"] == ["interrupted"] * 3


def test_a_record_that_cannot_be_written_ends_all_runs(server, tmp_path: Path) -> None:
    def cannot_write(of: turn_processes.TurnRun) -> None:
        raise WriteError("run.json cannot be written: the disk is full")

    pids = tmp_path / "pids"
    note = f"turn == 0 and open({str(pids)!r}, 'a').write(str(os.getpid()) + ' ')"
    jobs = [run(tmp_path, str(number), before=note) for number in range(3)]
    with pytest.raises(WriteError, match="the disk is full"):
        run_in_turns(jobs, settings(jobs), server, cannot_write, say=lambda line: None)
    assert len(pids.read_text().split()) == 3
    assert not any(is_running(int(pid)) for pid in pids.read_text().split())


def test_no_run_is_left_when_the_sweep_is_killed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pids = tmp_path / "pids"
    note = f"turn == 0 and open({str(pids)!r}, 'a').write(str(os.getpid()) + ' ')"
    kill = f"{note}; turn == 1 and os.kill(os.getppid(), signal.SIGKILL)"
    jobs = [run(tmp_path, "0", before=note), run(tmp_path, "1", before=kill)]
    sweep = f"""
import pathlib
from batchscope.sweep import fork_server, runner, turn_processes
fork_server.JOB = "tests.support.forked"
server = fork_server.ForkServer([])
jobs = [(pathlib.Path(folder), words) for folder, words in {[(str(folder), words) for folder, words in jobs]!r}]
turn_processes.run_in_turns(jobs, [("", 1), ("", 8)], server, print, print)
"""
    done = subprocess.run([sys.executable, "-c", sweep], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    while any(is_running(int(pid)) for pid in pids.read_text().split()):
        time.sleep(0.05)


SUITED = {"callbacks": {"until_known": {"a": 1}, "throughput": {"a": 1}}, "trainer": {"accelerator": "auto"}}


@pytest.mark.parametrize(
    ("changed", "suited"),
    [
        ({}, True),
        ({"trainer": {"accelerator": "cpu"}}, True),
        ({"trainer": {"accelerator": "cuda"}}, False),
        ({"trainer": {"max_time": {"seconds": 10}}}, False),
        ({"callbacks": {"until_known": None, "throughput": {"a": 1}}}, False),
        ({"callbacks": {"until_known": {"a": 1}, "throughput": None}}, False),
        ({"callbacks": None}, False),
    ],
)
def test_only_timed_runs_on_a_cpu_take_turns(changed: dict, suited: bool, tmp_path: Path) -> None:
    assert is_suited(SUITED | changed, devices=tmp_path) is suited


def test_where_there_is_an_accelerator_auto_is_no_cpu(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    assert not is_suited(SUITED, devices=tmp_path)
    assert is_suited(SUITED | {"trainer": {"accelerator": "cpu"}}, devices=tmp_path)


def test_a_run_without_memory_while_others_wait_is_run_again_alone(tmp_path: Path, monkeypatch, capsys) -> None:
    alone: list[str] = []

    def in_turns(jobs: list, settings: list, server: object, on_end: object, say: object, limits: object) -> set[Path]:
        for (folder, _), status in zip(jobs, ("finished", "out_of_memory", "finished"), strict=True):
            (folder / "run.json").write_text(json.dumps(read(folder) | {"status": status}))
        return {folder for folder, _ in jobs[:2]}  # the third one waits for memory

    def by_itself(run_dir: Path, digest: str, server: object) -> dict:
        alone.append(f"{run_dir.name} {read(run_dir)['status']}")
        return {"status": "finished"}

    monkeypatch.setattr(turn_processes, "run_in_turns", in_turns)
    monkeypatch.setattr(runner, "run_in_subprocess", by_itself)
    monkeypatch.setattr(runner, "_has_ended", lambda run_dir: False)
    monkeypatch.setattr(runner.folder, "KEPT", ())
    sweep = runner.SweepRunner(tmp_path, ["small", "large", "last"])
    sweep._server = object()
    for number in range(3):
        facts = {"choices": {}, "overrides": []}
        config = SUITED | {"trainer": {"devices": 1}, "run_dir": str(tmp_path / str(number)), "data": {"batch_size": 8}}
        sweep._in_turns.append(runner.Waiting(number, tmp_path / str(number), config, facts))
    sweep.run_in_turns()
    assert alone == ["2 planned", "1 planned"]
    assert len(list(tmp_path.glob("1*"))) == 2  # what the first attempt has left is set aside
    assert not sweep.refused


def test_the_numbers_of_the_pipes_are_in_the_environment(server, tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    line = "import os; os.write(int(os.environ['BATCHSCOPE_TURNS'].split(',')[1]), b'here')"
    assert server.fork([line], turns=(read_end, write_end)).wait() == 0
    assert os.read(read_end, 9) == b"here"
    line = "import os; raise SystemExit('BATCHSCOPE_TURNS' in os.environ)"
    assert server.fork([line]).wait() == 0  # and in no other run's


def test_precision_and_time_are_those_of_the_configuration() -> None:
    config = {"callbacks": {"until_known": {"_target_": "a", "precision": 0.1, "seconds": 7.0, "min_steps": 3}}}
    assert turn_processes.limits_of(config) == (0.1, 7.0)
