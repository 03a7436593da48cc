"""A short measurement at a few batch sizes: which sizes, what is run, and when it stops."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from batchscope.errors import UserError
from batchscope.sweep import sizes
from batchscope.sweep.plans import Job
from tests.sweep.conftest import play


@pytest.mark.parametrize(
    ("words", "rest", "found"),
    [
        (["model=cnn", "data.batch_size=64,16"], ["model=cnn"], [16, 64]),
        (["model=cnn"], ["model=cnn"], []),
        (["data.batch_size=choice(8,16,32)"], [], [8, 16, 32]),
    ],
)
def test_sizes_are_listed_or_left_out(words, rest, found):
    assert sizes.own_sizes(words) == (rest, found)


def test_the_timed_run_keeps_the_users_experiment():
    assert sizes.timed(["model=cnn"])[0] == "experiment=throughput"
    words = sizes.timed(["experiment=mnist_rows", "model=lstm_cell"])
    assert words[0] == "experiment=[mnist_rows,throughput]"
    assert words[-1] == "model=lstm_cell"


STEP_S = {"fast": lambda size: 1e-3, "slow": lambda size: 9.0, "slower and slower": lambda size: 12e-3 * size}


def run(folder: Path, step: str = "fast", wanted=(), monkeypatch=None, status=lambda size: "finished"):
    """The jobs that are asked for, and what is said, where a step takes so long."""
    jobs, said, clock = [], [], [0.0]
    monkeypatch.setattr(sizes.time, "monotonic", lambda: clock[0])

    def do(job: Job) -> dict[str, Any]:
        size = job.config["data"]["batch_size"]
        jobs.append(job)
        clock[0] += sizes._START_S + 15 * STEP_S[step](size)
        throughput = {"step_ms_median": 1e3 * STEP_S[step](size)}
        return {"status": status(size), "throughput": throughput, "error": "it broke"}

    play(sizes.sizes_for_choose(["model=cnn", "data=digits"], wanted, "cpu", folder, said.append), do)
    return jobs, said


def test_each_size_is_a_timed_run_on_the_device_with_a_folder_of_its_own(tmp_path, monkeypatch):
    jobs, said = run(tmp_path, monkeypatch=monkeypatch)
    assert [job.run_dir for job in jobs] == [tmp_path / "cpu" / str(n) for n in range(4)]
    assert [job.config["data"]["batch_size"] for job in jobs] == [8, 32, 128, 512]
    assert jobs[1].facts["choices"]["model"] == "cnn"
    assert jobs[1].facts["overrides"] == ["model=cnn", "data=digits", "data.batch_size=32"]
    assert jobs[1].config["trainer"]["accelerator"] == "cpu"
    assert jobs[1].logged
    assert said[:2] == ["cpu: measuring batch size 8", "cpu: 1 ms a step of 8"]


@pytest.mark.parametrize(
    ("step", "wanted", "ran"),
    [
        ("slower and slower", (), [8, 32, 128]),  # a size that would take too long is left out
        ("slow", (), [8, 32]),  # two are measured however long they take
        ("slow", (1, 2, 3), [1, 2, 3]),  # and all that were asked for
    ],
)
def test_sizes_grow_as_long_as_there_is_time(step, wanted, ran, tmp_path, monkeypatch):
    jobs, said = run(tmp_path, step, wanted, monkeypatch)
    assert [job.config["data"]["batch_size"] for job in jobs] == ran
    assert said[-1].endswith("would take too long") is not bool(wanted)


def test_what_does_not_fit_ends_the_list(tmp_path, monkeypatch):
    def fits_below(limit: int) -> Callable[[int], str]:
        return lambda size: "finished" if size < limit else "out_of_memory"

    jobs, _ = run(tmp_path, monkeypatch=monkeypatch, status=fits_below(128))
    assert len(jobs) == 3
    with pytest.raises(UserError, match="fewer than two batch sizes fit on cpu"):
        run(tmp_path, monkeypatch=monkeypatch, status=fits_below(32))


def test_a_run_that_fails_is_one_line(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="^choose: the run with data.batch_size=8 did not finish: it broke$"):
        run(tmp_path, monkeypatch=monkeypatch, status=lambda size: "failed")


def test_two_measurements_at_once_have_a_folder_each(tmp_path, monkeypatch):
    monkeypatch.setattr(sizes.Loop, "run", lambda loop, plan: None)
    measure = partial(sizes.measure, [], [], ["cpu"], tmp_path / "new", print)
    assert [measure(), measure()] == [[tmp_path / "new" / "cpu"], [tmp_path / "new-2" / "cpu"]]
