"""The loop: a plan asks for runs and gets their records; what is kept, refused, or done once more."""

import json
import os
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from batchscope.errors import UserError
from batchscope.files import WriteError
from batchscope.sweep import folder
from batchscope.sweep.plans import Plan, RunFailed
from tests.sweep.conftest import job


def test_a_plan_gets_the_records_of_what_it_asks_for(loop, tmp_path: Path) -> None:
    def plan() -> Plan[str]:
        one, two = yield [job(tmp_path, "a", 1, timed=False), job(tmp_path, "b", 2, timed=False, does="sys.exit(1)")]
        (three,) = yield [job(tmp_path, f"after-{one['throughput']['batch_size']}", timed=False)]
        return f"{two['status']}, {three['status']}"

    assert loop.run(plan()) == "failed, finished"
    assert (tmp_path / "after-1/run.json").exists()


def test_each_run_is_named_with_its_end_and_a_kept_one_is_not_run_again(loop, tmp_path: Path, capfd) -> None:
    jobs = [job(tmp_path, "a", 100, timed=False), job(tmp_path, "b", timed=False, does="sys.exit(1)")]
    first = loop.do(jobs)
    said = capfd.readouterr()
    assert said.out == "\n— run a\n  0 s\n\n— run b\n"
    assert said.err == "  failed: ended with exit code 1 and said no more\n"
    assert loop.do(jobs) == first
    said = capfd.readouterr()
    assert "— run a — kept" in said.out
    assert f"to run it again with the sweep: mv {os.path.relpath(tmp_path / 'b')}" in said.err
    assert len((tmp_path / "pids").read_text().split()) == 2


@pytest.mark.parametrize("timed", [True, False])
def test_a_run_that_is_refused_is_not_started_and_the_others_are(loop, timed: bool, tmp_path: Path, capfd) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b/run.json").write_text(json.dumps({"schema": 3, "status": "finished", "config": {"seed": 7}}))
    before = (tmp_path / "b/run.json").read_bytes()
    records = loop.do([job(tmp_path, name, size, timed) for name, size in (("a", 8), ("b", 16), ("c", 64))])
    assert [record["status"] for record in records] == ["finished", "refused", "finished"]
    assert (tmp_path / "b/run.json").read_bytes() == before
    assert loop.refused
    assert capfd.readouterr().err.startswith("error: hydra.sweep.dir: ")


def test_a_visited_run_whose_record_cannot_be_written_is_not_started(loop, tmp_path: Path, monkeypatch) -> None:
    planned = folder.keep_or_plan

    def keep_or_plan(run_dir: Path, *args: object, **facts: object) -> object:
        if run_dir.name == "b":
            raise WriteError("run.json cannot be written: the disk is full")
        return planned(run_dir, *args, **facts)

    monkeypatch.setattr(folder, "keep_or_plan", keep_or_plan)
    records = loop.do([job(tmp_path, name, size) for name, size in (("a", 8), ("b", 16), ("c", 64))])
    assert [record["status"] for record in records] == ["finished", "refused", "finished"]
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("timed", [True, False])
def test_the_others_go_on_where_somebody_removes_a_runs_folder(loop, timed: bool, tmp_path: Path, capfd) -> None:
    does = "import shutil; shutil.rmtree(folder); os._exit(0)"
    jobs = [job(tmp_path, "a", timed=timed, does=does), *(job(tmp_path, str(n), n, timed) for n in (16, 64))]
    assert [record["status"] for record in loop.do(jobs)] == ["refused", "finished", "finished"]
    assert loop.refused
    assert capfd.readouterr().err.startswith("error: ")


def test_a_run_without_memory_beside_others_is_done_once_more_alone(loop, tmp_path: Path, capfd) -> None:
    fails = "record['status'] = 'out_of_memory' if asked['visited'] else 'finished'; list(visits)"
    records = loop.do([job(tmp_path, "a"), job(tmp_path, "b", 16, does=fails)])
    assert [record["status"] for record in records] == ["finished", "finished"]
    assert json.loads((tmp_path / "b.aside/run.json").read_text())["status"] == "out_of_memory"
    assert "b ran out of memory beside other runs, and is done alone; what it left is in " in capfd.readouterr().err


def test_a_run_without_memory_beside_others_is_not_kept_where_the_sweep_ends_meanwhile(loop, tmp_path: Path) -> None:
    fails = "record['status'] = 'out_of_memory'"
    kill = f"[n for n in visits if os.kill({os.getpid()}, signal.SIGTERM)]"
    with pytest.raises(SystemExit):
        loop.do([job(tmp_path, "a", does=kill), job(tmp_path, "b", 16, does=fails)])
    assert not folder.has_ended(tmp_path / "b")
    assert json.loads((tmp_path / "b.aside/run.json").read_text())["status"] == "out_of_memory"


def test_what_a_run_prints_is_in_its_log_and_warnings_of_visited_runs_are_said_once(loop, tmp_path, capfd) -> None:
    says = "print('said'); print('warning: slow', file=sys.stderr); list(visits)"
    loop.do([job(tmp_path, "a", does=says), job(tmp_path, "b", 16, does=says)])
    assert capfd.readouterr().err == "warning: slow\n"
    one = job(tmp_path, "c", timed=False, does=says)
    loop.do([replace(one, logged=True)])
    assert (one.run_dir / "log.txt").read_text().splitlines() == ["said", "warning: slow"]
    assert capfd.readouterr() == ("\n— run c\n  0 s\n", "")


def test_a_python_that_there_is_not_is_one_line(loop, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^no-python cannot be started: No such file"):
        loop.do([replace(job(tmp_path, "a", timed=False), python="no-python", forks=False)])


def test_a_failed_run_is_told_to_a_sweeper_in_another_process() -> None:
    told = pickle.loads(pickle.dumps(RunFailed("s/0: it broke")))
    assert (str(told), told.exit_code, told.reported) == ("s/0: it broke", 1, True)
