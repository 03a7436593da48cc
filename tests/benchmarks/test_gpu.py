"""The one command for a GPU: what is done is kept, a failure is one line, and a rehearsal runs everything on a CPU."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
from gpu_parts import PARTS, Part, Result, Setting, runner

COMMAND = [sys.executable, str(BENCHMARKS / "gpu.py")]
PART = Part(1, "gpu_tests", ("first", "second", "third"))


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting("cpu", "data", tmp_path / "out", tmp_path / "work", small=False)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Items as functions, run in this process in place of another; returns the names of those that were called."""

    def use(**items: Any) -> list[str]:
        called: list[str] = []

        def run_child(part: Part, names: list[str], setting: Setting, seconds: float) -> str | None:
            for name in names:
                called.append(name)
                found = items[name]
                if found is SystemExit:
                    return "exit code -9: "
                if isinstance(found, Exception):
                    runner._keep(part, setting, name, {"error": str(found)})
                    return "exit code 3: "
                item = {"card": runner._card(setting), "seconds": 1, "machine": "a machine"}
                runner._keep(part, setting, name, {**item, "table": found.table, "claims": dict(found.claims)})
            return None

        monkeypatch.setattr(runner, "_run_child", run_child)
        return called

    return use


def written(setting: Setting) -> str:
    return (setting.out / "1-gpu_tests.md").read_text()


def test_what_is_done_is_not_run_again_unless_asked(ran: Callable, setting: Setting):
    every = {name: Result(f"table of {name}") for name in PART.items}
    assert ran(**every) == []
    assert runner.run_part(PART, setting, again=False) == []
    called = ran(**every)
    assert runner.run_part(PART, setting, again=False) == []
    assert called == []
    assert runner.run_part(PART, setting, again=True) == []
    assert called == list(PART.items)
    assert "table of second" in written(setting)


@pytest.mark.parametrize("failure", [RuntimeError("too hot"), SystemExit])
def test_an_item_that_fails_or_crashes_is_one_line_and_the_others_go_on(failure: Any, ran: Callable, setting: Setting):
    called = ran(first=Result("one"), second=failure, third=Result("three"))
    (problem,) = runner.run_part(PART, setting, again=False)
    assert problem.startswith("part 1, second: failed: " + ("exit code -9" if failure is SystemExit else "too hot"))
    assert called == ["first", "second", "third"]
    called = ran(second=Result("two"))
    assert runner.run_part(PART, setting, again=False) == []
    assert called == ["second"]
    assert [f"## {name}" in written(setting) for name in PART.items] == [True] * 3


def test_a_claim_that_does_not_hold_is_a_line_except_in_a_rehearsal(ran: Callable, setting: Setting, tmp_path: Path):
    items = {name: Result("table", claims={"it is fast": name != "second"}) for name in PART.items}
    ran(**items)
    assert runner.run_part(PART, setting, again=False) == ["part 1, second: does not hold: it is fast"]
    rehearsal = Setting("cpu", "data", tmp_path / "rehearsal", tmp_path / "work", small=True)
    assert runner.run_part(PART, rehearsal, again=False) == []
    assert "say nothing about a GPU" in written(rehearsal)
    assert "not judged in a rehearsal" in written(rehearsal)


@pytest.mark.parametrize("content", ["", "[]", '{"items": 3}', '{"items": {"first": 3}}', '{"items": {"first": {}}}'])
def test_a_damaged_file_of_results_is_started_anew(content: str, ran: Callable, setting: Setting):
    setting.out.mkdir()
    (setting.out / "1-gpu_tests.json").write_text(content)
    called = ran(**{name: Result("table") for name in PART.items})
    assert runner.run_part(PART, setting, again=False) == []
    assert called == list(PART.items)


def test_results_of_another_card_are_measured_again(ran: Callable, setting: Setting, monkeypatch: pytest.MonkeyPatch):
    every = {name: Result("table") for name in PART.items}
    ran(**every)
    runner.run_part(PART, setting, again=False)
    monkeypatch.setattr(runner, "nvidia_card", lambda: "NVIDIA H200, driver 580")
    called = ran(**every)
    runner.run_part(PART, setting, again=False)
    assert called == list(PART.items)


def test_the_parts_are_numbered_and_each_item_is_a_function_of_its_module():
    assert [part.number for part in PARTS] == list(range(1, len(PARTS) + 1))
    for part in PARTS:
        text = (BENCHMARKS / "gpu_parts" / f"{part.name}.py").read_text()
        assert all(f"\ndef {item}(setting: Setting) -> Result:" in text for item in part.items)
        assert part.limit_s <= 480


def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path):
    if runner.nvidia_card() is not None:
        pytest.skip("there is a GPU")
    done = subprocess.run([*COMMAND, "--out", str(tmp_path / "out")], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "error: no NVIDIA GPU here (NVML finds none); --rehearse tries everything on the CPU\n"
    assert not (tmp_path / "out").exists()


def test_a_rehearsal_writes_nothing_to_the_results(tmp_path: Path):
    out = BENCHMARKS / "results" / "gpu"
    done = subprocess.run([*COMMAND, "--rehearse", "--out", str(out)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: --out: a rehearsal writes nothing to ")
    assert len(done.stderr.splitlines()) == 1


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path):
    (tmp_path / "file").touch()
    line = [*COMMAND, "--rehearse", "--out", str(tmp_path / "file" / "out")]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: --out: {tmp_path / 'file' / 'out'} cannot be written: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_an_interrupted_rehearsal_keeps_what_was_done_and_leaves_no_process(tmp_path: Path):
    line = [
        *COMMAND,
        "--rehearse",
        "--part",
        "3",
        "5",
        "--out",
        str(tmp_path / "out"),
        "--work",
        str(tmp_path / "work"),
    ]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not process.stdout.readline().startswith("## run"):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert said.strip().startswith("interrupted: what is done is in ")
    kept = json.loads((tmp_path / "out" / "3-sweeps.json").read_text())["items"]
    assert "error" not in kept["run"]
    time.sleep(1)
    mine = [path for path in Path("/proc").glob("[0-9]*/cmdline") if os.access(path, os.R_OK)]
    assert not [path for path in mine if str(tmp_path).encode() in _bytes(path)]


@pytest.mark.slow
def test_every_part_runs_in_small_on_a_cpu(tmp_path: Path):
    line = [*COMMAND, "--rehearse", "--out", str(tmp_path / "out")]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert done.stdout.startswith("a rehearsal on the CPU")
    assert done.stdout.endswith("every item ran\n")
    assert len(list((tmp_path / "out").glob("*.md"))) == len(PARTS)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended
        return b""
