"""Timed runs are visited side by side: which ones, in how much memory, and what one that dies does to the others."""

from pathlib import Path

import pytest

from batchscope.sweep import visits
from batchscope.sweep.visits import can_wait
from tests.sweep.conftest import TIMED, job, running


def test_runs_share_passes_and_are_told_why_they_end(loop, tmp_path: Path) -> None:
    records = loop.do([job(tmp_path, str(n), 8**n) for n in (1, 2, 3)])
    assert records[0]["taken"] == records[1]["taken"] == records[2]["taken"]
    assert {record["told"] for record in records} == {"stop known to ± 5 %"}


def test_runs_share_passes_with_those_that_have_the_same_limits(loop, tmp_path: Path) -> None:
    jobs = [job(tmp_path, str(n), 8**n) for n in (1, 2, 3, 4)]
    for one in jobs[::2]:
        one.config["callbacks"] = {**TIMED, "until_known": {"precision": 0.5}}
    told = [record["told"] for record in loop.do(jobs)]
    assert told == ["stop known to ± 50 %", "stop known to ± 5 %"] * 2


@pytest.mark.parametrize("before", ["1 / 0", "len(record['taken']) == 2 and os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_run_that_dies_ends_no_other(loop, before: str, tmp_path: Path, capfd) -> None:
    one, other = loop.do([job(tmp_path, "0"), job(tmp_path, "1", 16, does=f"[{before} for n in visits]")])
    assert one["status"] == "finished"
    assert other["status"] in ("killed", "failed")
    assert f"  {other['status']}: " in capfd.readouterr().err


def test_a_run_that_is_killed_while_it_waits_ends_no_other(loop, tmp_path: Path) -> None:
    kills = "[os.kill(int((folder.parent / 'pids').read_text().split()[0]), 9) for n in visits if len(record['taken']) == 1]"
    one, other = loop.do([job(tmp_path, "0"), job(tmp_path, "1", 16, does=f"exec({kills!r})")])
    assert (one["status"], other["status"]) == ("killed", "finished")


def test_runs_that_find_no_memory_to_train_wait_as_they_are(loop, tmp_path: Path, monkeypatch) -> None:
    """They are not started twice, and leave nothing but their own folder."""
    asked: list[int] = []

    def has_memory(more: int, processes: list) -> bool:
        asked.append(len(processes))
        return len(asked) <= 2  # to set three runs up, and to train two

    monkeypatch.setattr(visits, "_has_memory_for", has_memory)
    records = loop.do([job(tmp_path, str(n), 8**n) for n in (1, 2, 3)])
    assert [record["status"] for record in records] == ["finished"] * 3
    assert records[0]["taken"] == records[1]["taken"]
    assert min(records[2]["taken"]) > max(records[0]["taken"])
    assert len((tmp_path / "pids").read_text().split()) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "3", "pids"]


def test_runs_that_find_no_memory_to_be_set_up_follow(loop, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(visits, "_SET_UP_AT_ONCE", 1)
    monkeypatch.setattr(visits, "_has_memory_for", lambda more, processes: len(processes) < 2)
    records = loop.do([job(tmp_path, str(n), 8**n) for n in (1, 2, 3)])
    assert [record["status"] for record in records] == ["finished"] * 3
    assert [bool(record["taken"]) for record in records] == [True, True, False]  # the last one is alone


def test_an_error_in_the_sweep_leaves_no_run_behind(loop, tmp_path: Path, monkeypatch) -> None:
    def fail(*args: object, **how: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(visits, "measure_in_passes", fail)
    with pytest.raises(OSError, match="the disk is full"):
        loop.do([job(tmp_path, str(n), 8**n) for n in (1, 2)])
    assert len((tmp_path / "pids").read_text().split()) == 2
    assert running(tmp_path) == []


SUITED = {"callbacks": {"until_known": {"a": 1}, "throughput": {"a": 1}}, "trainer": {"devices": 1}}


@pytest.mark.parametrize(
    ("changed", "suited"),
    [
        ({}, True),
        ({"trainer": {"devices": 1, "accelerator": "cpu"}}, True),
        ({"trainer": {"devices": 2, "accelerator": "cpu"}}, False),
        ({"trainer": {"devices": 1, "accelerator": "cuda"}}, False),
        ({"trainer": {"devices": 1, "max_time": {"seconds": 10}}}, False),
        ({"callbacks": {"until_known": None, "throughput": {"a": 1}}}, False),
        ({"callbacks": {"until_known": {"a": 1}, "throughput": None}}, False),
        ({"callbacks": None}, False),
    ],
)
def test_only_timed_runs_of_one_process_on_a_cpu_wait(changed: dict, suited: bool, tmp_path: Path) -> None:
    assert can_wait(SUITED | changed, devices=tmp_path) is suited


def test_where_there_is_an_accelerator_auto_is_no_cpu(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    assert not can_wait(SUITED, devices=tmp_path)
