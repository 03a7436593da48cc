"""Timed runs are visited side by side: which ones, in how much memory, and what an error does to them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from batchscope.sweep import visits
from tests.sweep.conftest import TIMED, job, running


def test_runs_with_the_same_limits_share_passes_and_are_told_why_they_end(loop, tmp_path: Path) -> None:
    jobs = [job(tmp_path, str(n), 8**n) for n in (1, 2, 3, 4)]
    for one in jobs[::2]:
        one.config["callbacks"] = {**TIMED, "until_known": {"precision": 0.5}}
    records = loop.do(jobs)
    assert [record["told"] for record in records] == ["stop known to ± 50 %", "stop known to ± 5 %"] * 2
    taken = [record["taken"] for record in records]
    assert taken[0] == taken[2] != taken[1] == taken[3]


@pytest.mark.parametrize("has_room_for", ["training one", "one"])
def test_a_run_that_finds_less_than_a_quarter_of_the_memory_waits(loop, has_room_for, tmp_path, monkeypatch) -> None:
    """It is not started twice, and leaves nothing but its own folder."""
    total = 2**50
    available = iter([total // 4, total // 4 - 1] if has_room_for == "training one" else [total // 4 - 1])
    monkeypatch.setattr(
        visits, "host_memory", lambda: SimpleNamespace(total=total, available=next(available, total // 4))
    )
    records = loop.do([job(tmp_path, str(n), 8**n) for n in (1, 2)])
    assert [record["status"] for record in records] == ["finished"] * 2
    taken = [record["taken"] for record in records]
    assert min(taken[1]) > max(taken[0]) if has_room_for == "training one" else taken[1] == []  # the last is alone
    assert len((tmp_path / "pids").read_text().split()) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "pids"]


def test_an_error_in_the_sweep_leaves_no_run_behind(loop, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(visits, "measure_in_passes", lambda *args, **how: 1 / 0)
    with pytest.raises(ZeroDivisionError):
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
def test_only_timed_runs_of_one_process_on_a_cpu_wait(changed: dict[str, Any], suited: bool, tmp_path: Path) -> None:
    assert visits.can_wait(SUITED | changed, devices=tmp_path) is suited
    (tmp_path / "nvidia0").touch()  # Lightning's `auto` would take it
    assert visits.can_wait(SUITED | changed, devices=tmp_path) is (suited and "trainer" in changed)
