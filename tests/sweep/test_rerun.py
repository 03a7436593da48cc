"""`compare --rerun`: which runs are started, in which order and by which Python, and what is said if one does not finish."""

import json
import os
import stat
import sys
from pathlib import Path

import numpy as np
import pytest

from batchscope.analysis.compare import compare
from batchscope.errors import UserError
from batchscope.options.compose import check_command_line
from batchscope.records.read import read
from batchscope.records.run_record import plan
from batchscope.sweep import fork_server
from batchscope.sweep.rerun import rerun
from batchscope.training.run import train
from tests.support.synthetic_runs import write_run, write_steps
from tests.sweep.test_fork_server import ROOT, is_running

SIZES = ["data.num_train=64", "data.num_val=32", "data.num_test=16", "data.batch_size=16", "trainer.accelerator=cpu"]
# A Python that does what it is told to do with a run, in no time: it finishes it with a step of MS.
_PYTHON = """#!{python}
import json, os, pathlib, shutil, sys
assert sys.argv[1:3] == ["-m", "batchscope.sweep.job"], sys.argv
assert len(sys.argv[3]) == 32, "the digest of the configuration"
path = pathlib.Path(sys.argv[4], "run.json")
record = json.loads(path.read_text())
with open({log!r}, "a") as log:
    print(sys.argv[4], file=log)
if {status!r} != "silent":
    ms = {ms} * (1 + 0.01 * record["turn"]["round"])
    size = record["config"]["data"]["batch_size"]
    cost = {{"batch_size": size, "step_ms_median": ms, "samples_per_sec": 1e3 * size / ms}}
    record |= {{"status": {status!r}, "error": "no luck", "throughput": cost}}
    path.write_text(json.dumps(record))
    shutil.copyfile({steps!r}, path.with_name("steps.npz"))
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def python(folder: Path, name: str, ms: float = 10.0, status: str = "finished") -> str:
    path = folder / f"python-{name}"
    steps = write_steps(write_run(folder / f"steps-{name}"), ms * np.ones((4, 5))) / "steps.npz"
    text = _PYTHON.format(python=sys.executable, log=str(folder / "log"), ms=ms, status=status, steps=str(steps))
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def finished(folder: Path, name: str, *options: str) -> Path:
    """The record of a finished run on rendered digits."""
    line = ["data=digits", *SIZES, *options]
    (config,) = check_command_line(line, multirun=False, run_dir=name)
    throughput = {"batch_size": config["data"]["batch_size"], "step_ms_median": 10.0, "samples_per_sec": 1600.0}
    facts = {"choices": {"model": "cnn", "data": "digits"}, "overrides": line, "throughput": throughput}
    plan(folder / name, config=config, **facts)
    path = folder / name / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"status": "finished"}))
    return Path(name)


def test_both_sides_are_run_in_each_pass_and_the_order_changes(here, capsys):
    a, b = finished(here, "one"), finished(here, "other")
    pythons = [python(here, "a"), python(here, "b", 11.0)]
    folders = rerun([a, b], Path("out"), 4, 1.0, pythons, [])
    assert folders == [Path("out/a"), Path("out/b")]
    started = [line.removeprefix("out/") for line in (here / "log").read_text().split()]
    assert started == ["a/0-0", "b/0-0", "b/0-1", "a/0-1", "a/0-2", "b/0-2", "b/0-3", "a/0-3"]
    assert "pass 4 of 4: A 10.3 ms, B 11.3 ms" in capsys.readouterr().out
    found = compare(*folders)
    assert (found.compared[0].passes, found.exit_code) == (4, 3)
    assert found.compared[0].slowdown.value == pytest.approx(1.1)


def test_the_new_runs_are_short_timed_ones_of_the_recorded_configuration(here):
    a = finished(here, "one", "model=mlp", "trainer.max_epochs=3", "data.seed=5")
    rerun([a, a], Path("out"), 3, 1.5, [python(here, "a")] * 2, ["data.batch_size=8"], quiet=True)
    record = read(here / "out" / "a" / "0-1")
    config = record["config"]
    assert config["model"]["_target_"] == "batchscope.models.mlp.MLP"
    assert (config["data"]["seed"], config["data"]["batch_size"]) == (5, 8)
    assert (config["trainer"]["max_time"], config["trainer"]["max_epochs"]) == ({"seconds": 1.5}, -1)
    assert config["optimizer"]["schedule"] == "constant"
    assert config["run_dir"] == "out/a/0-1"
    assert not {"checkpoint", "prediction_images", "progress"} & {name for name in config["callbacks"]}
    assert "throughput" in config["callbacks"]
    assert (config["test"], config["logger"]) == (False, {})
    assert record["turn"]["round"] == 1


@pytest.mark.slow
def test_every_matched_pair_of_two_sweeps_is_run(here):
    for side in "xy":
        for size in (8, 16):
            finished(here, f"{side}/{size}", f"data.batch_size={size}")
    pythons = [python(here, "a")] * 2
    folders = rerun([Path("x"), Path("y")], Path("out"), 3, 1.0, pythons, [], quiet=True)
    found = compare(*folders)
    assert sorted((c.pair.label, c.passes) for c in found.compared) == [("batch size 16", 3), ("batch size 8", 3)]


def test_a_run_that_does_not_finish_ends_it_with_one_line(here):
    a = finished(here, "one")
    with pytest.raises(UserError, match="compare: a run of B did not finish: no luck; its output: out/b/0-0/log.txt"):
        rerun([a, a], Path("out"), 3, 1.0, [python(here, "a"), python(here, "b", status="failed")], [], quiet=True)
    with pytest.raises(UserError, match="compare: a run of A did not finish: ended with exit code 0 and said no more"):
        rerun([a, a], Path("more"), 3, 1.0, [python(here, "a", status="silent")] * 2, [], quiet=True)
    with pytest.raises(UserError, match="compare: ./no-python cannot be started: No such file"):
        rerun([a, a], Path("third"), 3, 1.0, ["./no-python"] * 2, [], quiet=True)


def test_what_a_record_alone_cannot_decide_is_refused_before_anything_runs(here):
    a = finished(here, "one", f"data.root={here}/elsewhere")
    with pytest.raises(UserError, match="data.root: is .* repeat data.root="):
        rerun([a, a], Path("out"), 3, 1.0, [python(here, "a")] * 2, [])
    assert not Path("out").exists()
    rerun([a, a], Path("out"), 3, 1.0, [python(here, "a")] * 2, [f"data.root={here}/elsewhere"], quiet=True)
    assert sorted(os.listdir("out/a")) == ["0-0", "0-1", "0-2"]


def test_a_record_that_cannot_be_run_again_is_named(here):
    write_run(here / "synthetic", 16, 10.0)
    with pytest.raises(UserError, match=r"^synthetic/run.json: cannot be run again: test: is missing$"):
        rerun([Path("synthetic")] * 2, Path("out"), 3, 1.0, [sys.executable] * 2, [])
    assert not Path("out").exists()


@pytest.fixture
def stand_in(here, monkeypatch) -> None:
    """Runs of this Python are stand-ins, which import nothing and take the turns that they are given."""
    monkeypatch.setattr(fork_server, "JOB", "tests.support.turns_taker")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.mark.slow
@pytest.mark.skipif(not fork_server.is_supported(), reason="needs Linux")
def test_on_a_cpu_the_two_processes_of_a_round_alternate(here, stand_in, capsys):
    folders = rerun([finished(here, "one"), finished(here, "other")], Path("out"), 3, 0.5, [sys.executable] * 2, [])
    assert sorted(os.listdir("out/a")) == sorted(os.listdir("out/b")) == ["0-0", "0-1", "0-2"]
    found = [read(here / "out" / name / "0-1") for name in "ab"]
    assert found[0]["turn"] == found[1]["turn"]
    assert [record["taken"] for record in found] == [[3, 4, 5], [3, 4, 5]]
    assert len(set((here / "pids").read_text().split())) == 6
    assert "pass 3 of 3: A 10 ms, B 10 ms" in capsys.readouterr().out
    assert compare(*folders).compared[0].passes == 3


@pytest.mark.slow
@pytest.mark.skipif(not fork_server.is_supported(), reason="needs Linux")
def test_a_log_that_cannot_be_written_ends_no_comparison_of_runs_that_finish(here, stand_in, monkeypatch, capsys):
    monkeypatch.setattr("batchscope.sweep.rerun._LOG", "none/log.txt")
    rerun([finished(here, "one")] * 2, Path("out"), 3, 0.5, [sys.executable] * 2, [], quiet=True)
    assert "warning: out/a/0-0/none/log.txt cannot be written: " in capsys.readouterr().err
    assert read(here / "out" / "b" / "0-2")["status"] == "finished"
    with pytest.raises(UserError, match="^out-2/a/0-0/none/log.txt cannot be written: "):
        rerun([here / "one"] * 2, Path("out"), 3, 0.5, [python(here, "a")] * 2, [], quiet=True)


@pytest.mark.slow
@pytest.mark.skipif(not fork_server.is_supported(), reason="needs Linux")
def test_a_run_that_dies_in_its_turn_ends_it_and_none_is_left(here, stand_in):
    a, b = finished(here, "one"), finished(here, "other", "data.batch_size=8")
    with pytest.raises(UserError, match="compare: a run of B did not finish: killed by SIGKILL"):
        rerun([a, b], Path("out"), 3, 0.5, [sys.executable] * 2, [], quiet=True)
    assert [read(Path(f"out/{side}/0-0"))["status"] for side in "ab"] == ["interrupted", "killed"]
    assert not any(is_running(int(pid)) for pid in (here / "pids").read_text().split())


@pytest.mark.slow
def test_real_runs_in_turns_are_compared(here):
    line = ["data=digits", *SIZES, "trainer.max_epochs=1", "callbacks.throughput.calibrate=false"]
    (config,) = check_command_line(line, multirun=False, run_dir="run")
    train(config, Path("run"), {"model": "cnn", "data": "digits"}, line)
    folders = rerun([Path("run"), Path("run")], Path("out"), 3, 0.2, [sys.executable] * 2, [])
    found = compare(*folders)
    assert found.compared[0].passes == 3
    assert 0.2 < found.compared[0].slowdown.value < 5
