"""`compare --rerun`: which pairs are run, how, until when, and what is said if a run does not finish."""

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchscope.analysis.compare import compare
from batchscope.analysis.match import match
from batchscope.analysis.read import find
from batchscope.errors import UserError
from batchscope.records.read import read
from batchscope.records.run_record import plan
from batchscope.sweep import rerun
from batchscope.sweep.plans import Job
from tests.support.command_lines import composed
from tests.support.synthetic_runs import change_record, write_run, write_steps
from tests.sweep.conftest import play

SIZES = ["data.num_train=64", "data.num_val=32", "data.num_test=16", "data.batch_size=16", "trainer.accelerator=cpu"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Runs:
    """Runs that take no time; `ms` has the step of each side, with a noise of its own in each run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, noise: float = 0.0, status: str = "finished", b: float = 10.0):
        self.jobs, self.noise, self.status, self.ms = list[Job](), noise, status, {"a": 10.0, "b": b}
        self._random = np.random.default_rng(0)
        monkeypatch.setattr(rerun.Loop, "run", lambda loop, plan: play(plan, self.do))

    def do(self, job: Job) -> dict[str, Any]:
        self.jobs.append(job)
        side, size = job.run_dir.parent.name, job.config["data"]["batch_size"]
        ms = self.ms[side] * (1 + self.noise * self._random.standard_normal())
        plan(job.run_dir, config=job.config, **job.facts)
        cost = {"batch_size": size, "step_ms_median": ms, "samples_per_sec": 1e3 * size / ms}
        status = self.status if side == "b" else "finished"
        change_record(job.run_dir, status=status, error="no luck", throughput=cost)
        write_steps(job.run_dir, ms * np.ones((4, 5)), rounds=[(len(self.jobs) - 1) // 2 * 10 + n for n in range(4)])
        return read(job.run_dir)


def finished(folder: Path, name: str, *options: str) -> Path:
    """The record of a finished run on rendered digits."""
    line = ["data=digits", *SIZES, *options]
    config = composed(*line, run_dir=name)
    throughput = {"batch_size": config["data"]["batch_size"], "step_ms_median": 10.0, "samples_per_sec": 1600.0}
    facts = {"choices": {"model": "cnn", "data": "digits"}, "overrides": line, "throughput": throughput}
    plan(folder / name, config=config, **facts)
    change_record(folder / name, status="finished")
    return Path(name)


def run_again(*folders: Path, most: int = 8, options: tuple[str, ...] = (), **how: Any) -> list[Path]:
    return rerun.rerun(list(folders), Path("out"), most, 1.5, [sys.executable] * 2, list(options), **how)


def pair_of(run: Path) -> dict[str, list[Job]]:
    """A run against itself."""
    (pair,), _ = match(find([run]), find([run]))
    return {"": rerun.sides_of(pair, [sys.executable] * 2, [])}


def test_short_timed_pairs_change_their_order_and_end_once_it_is_decided_that_b_is_slower(here, monkeypatch, capsys):
    a, b = (finished(here, name, "model=mlp", "trainer.max_epochs=3", "data.seed=5") for name in ("one", "other"))
    runs = Runs(monkeypatch, noise=0.005, b=12.0)
    folders = run_again(a, b, options=("data.batch_size=8",))
    assert folders == [Path("out/a"), Path("out/b")]
    places = [str(job.run_dir.relative_to("out")) for job in runs.jobs]
    assert places[:6] == ["a/0-0", "b/0-0", "b/0-1", "a/0-1", "a/0-2", "b/0-2"]
    assert re.search(r"pair 5 of at most 8: A \d?\d(\.\d+)? ms", capsys.readouterr().out)
    found = compare(*folders).compared[0]
    assert (found.passes, found.verdict, len(places)) == (rerun.FEWEST, "slower", 2 * rerun.FEWEST)
    config = runs.jobs[2].config
    assert config["model"]["_target_"] == "batchscope.models.mlp.MLP"
    assert (config["data"]["seed"], config["data"]["batch_size"], config["run_dir"]) == (5, 8, "out/b/0-1")
    assert (config["trainer"]["max_time"], config["trainer"]["max_epochs"]) == (None, -1)
    assert (config["callbacks"]["until_known"]["seconds"], runs.jobs[2].seconds) == (1.5, 1.5)
    assert config["optimizer"]["schedule"] == "constant"
    assert not {"checkpoint", "prediction_images", "progress"} & {*config["callbacks"]}
    assert (config["test"], config["logger"]) == (False, {})


@pytest.mark.parametrize(
    ("noise", "b", "max_slowdown", "pairs"),
    [
        (0.005, 10.0, 0.05, 5),  # B is shown to be no slower than allowed
        (0.005, 12.0, 0.5, 5),
        (0.2, 10.0, 0.05, 6),  # too much noise
    ],
)
def test_pairs_go_on_until_it_is_decided_or_there_are_enough(noise, b, max_slowdown, pairs, here, monkeypatch):
    a, runs = finished(here, "one"), Runs(monkeypatch, noise=noise, b=b)
    run_again(a, a, most=6, max_slowdown=max_slowdown, quiet=True)
    assert len(runs.jobs) == 2 * pairs
    assert {"of"} == {*runs.jobs[0].facts["rerun"]} and len({job.facts["rerun"]["of"] for job in runs.jobs}) == 1


def test_runs_that_cannot_wait_for_each_other_are_told_their_pair(here, monkeypatch):
    runs = Runs(monkeypatch)
    play(rerun.a_b(pair_of(finished(here, "one", "trainer.devices=2")), Path("out"), 2, 1.0), runs.do)
    assert [job.facts["rerun"]["pair"] for job in runs.jobs] == [0, 0, 1, 1]


def test_a_pair_that_new_folders_call_otherwise_ends_once_it_is_decided(here, monkeypatch):
    """Beside a single run the label of a sweep's pair has the batch size, and in the folders of the new runs it is empty."""
    for size in (8, 16):
        finished(here, f"x/{size}", f"data.batch_size={size}")
    runs = Runs(monkeypatch, noise=0.002)
    run_again(Path("x"), finished(here, "one"), quiet=True)
    assert len(runs.jobs) == 2 * rerun.FEWEST


def test_a_run_that_does_not_finish_ends_it_with_one_line(here, monkeypatch):
    a = finished(here, "one")
    Runs(monkeypatch, status="failed")
    with pytest.raises(UserError, match="compare: a run of B did not finish: no luck; its output: out/b/0-0/log.txt"):
        run_again(a, a, quiet=True)


def test_what_a_record_alone_cannot_decide_or_hold_is_refused_before_anything_runs(here):
    a, synthetic = finished(here, "one", f"data.root={here}/elsewhere"), write_run(Path("synthetic"), 16, 10.0)
    with pytest.raises(UserError, match="data.root: is .* repeat data.root="):
        run_again(a, a)
    with pytest.raises(UserError, match=r"^synthetic/run.json: cannot be run again: test: is missing$"):
        run_again(synthetic, synthetic)
    assert not Path("out").exists()


def test_on_a_cpu_the_two_of_a_pair_are_visited_side_by_side(here, loop):
    loop.run(rerun.a_b(pair_of(finished(here, "one")), Path("out"), 2, 0.1))
    found = [[read(Path(f"out/{side}/0-{n}")) for side in "ab"] for n in range(2)]
    taken = [[record["taken"] for record in pair] for pair in found]
    assert taken[0][0] == taken[0][1] and taken[1][0] == taken[1][1]
    assert len(taken[0][0]) >= 8
    assert {record["told"] for pair in found for record in pair} == {"stop time limit"}
