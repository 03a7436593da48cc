"""A short measurement at a few batch sizes: which sizes, what is run, and when it stops."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from batchscope.errors import UserError
from batchscope.sweep import sizes
from batchscope.sweep.plans import Job
from tests.sweep.conftest import play


def test_the_timed_run_keeps_the_users_experiment():
    words = sizes.timed(["experiment=mnist_rows", "model=lstm_cell"])
    assert (words[0], words[-1]) == ("experiment=[mnist_rows,throughput]", "model=lstm_cell")


def run(
    folder: Path, step_s=lambda size: 1e-3, wanted=(), status=lambda size: "finished"
) -> tuple[list[Job], list[str]]:
    """The jobs that are asked for, and what is said, where a step takes so long."""
    jobs, said = [], []

    def do(job: Job) -> dict[str, Any]:
        size = job.config["data"]["batch_size"]
        jobs.append(job)
        return {"status": status(size), "throughput": {"step_ms_median": 1e3 * step_s(size)}, "error": "it broke"}

    play(sizes.sizes_for_choose(["model=cnn", "data=digits"], wanted, "cpu", folder, said.append), do)
    return jobs, said


def test_each_size_is_a_timed_run_on_the_device_with_a_folder_of_its_own(tmp_path):
    jobs, said = run(tmp_path)
    assert [job.run_dir for job in jobs] == [tmp_path / "cpu" / str(n) for n in range(4)]
    assert [job.config["data"]["batch_size"] for job in jobs] == [8, 32, 128, 512]
    assert jobs[1].config["callbacks"]["until_known"]["seconds"] == sizes.SECONDS_A_RUN
    assert jobs[1].facts["choices"]["model"] == "cnn"
    assert jobs[1].facts["overrides"] == ["model=cnn", "data=digits", "data.batch_size=32"]
    assert (jobs[1].config["trainer"]["accelerator"], jobs[1].logged) == ("cpu", True)
    assert said[:2] == ["cpu: measuring batch size 8", "cpu: 1 ms a step of 8"]


@pytest.mark.parametrize(
    ("step_s", "wanted", "ran"),
    [
        (lambda size: 12e-3 * size, (), [8, 32, 128]),  # a size that would take too long is left out
        (lambda size: 9.0, (), [8, 32]),  # two are measured however long they take
        (lambda size: 9.0, (1, 2, 3), [1, 2, 3]),  # and all that were asked for
    ],
)
def test_sizes_grow_as_long_as_there_is_time(step_s, wanted, ran, tmp_path):
    jobs, said = run(tmp_path, step_s, wanted)
    assert [job.config["data"]["batch_size"] for job in jobs] == ran
    assert said[-1].endswith("would take too long") is not bool(wanted)


def test_what_does_not_fit_ends_the_list_and_any_other_failure_the_measurement(tmp_path):
    assert len(run(tmp_path, status=lambda size: "finished" if size < 128 else "out_of_memory")[0]) == 3
    with pytest.raises(UserError, match="fewer than two batch sizes fit on cpu"):
        run(tmp_path, status=lambda size: "finished" if size < 32 else "out_of_memory")
    with pytest.raises(UserError, match="^choose: the run with data.batch_size=8 did not finish: it broke$"):
        run(tmp_path, status=lambda size: "failed")


def test_two_measurements_at_once_have_a_folder_each(tmp_path, monkeypatch):
    monkeypatch.setattr(sizes.Loop, "run", lambda loop, plan: None)
    measure = partial(sizes.measure, [], [], ["cpu"], tmp_path / "new", print)
    assert [measure(), measure()] == [[tmp_path / "new" / "cpu"], [tmp_path / "new-2" / "cpu"]]
