"""`compare --rerun`: the pairs of runs, their end, and the message if a run does not finish."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from batchscope.analysis.compare import Comparison
from batchscope.analysis.read import read_sweep
from batchscope.errors import UserError
from batchscope.records.read import read
from batchscope.sweep import rerun
from batchscope.sweep.plans import Job
from tests.support.command_lines import composed
from tests.support.synthetic_runs import write_run
from tests.sweep.conftest import ended

SIZES = ["data.num_train=64", "data.num_val=32", "data.num_test=16", "data.batch_size=16", "trainer.accelerator=cpu"]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def pretended(monkeypatch, noise=0.0, status="finished", b=10.0):
    """Simulate runs, and collect their jobs; `b` is the step of B in ms, with independent noise in each run."""
    jobs, random = [], np.random.default_rng(0)

    def do(job):
        jobs.append(job)
        is_b = job.run_dir.parent.name == "b"
        ms = (b if is_b else 10.0) * (1 + noise * random.standard_normal())
        passes = [(len(jobs) - 1) // 2 * 10 + n for n in range(8)]
        return ended(job, ms, passes=passes, status=status if is_b else "finished", error="no luck")

    monkeypatch.setattr(rerun.Loop, "do", lambda loop, pair: [*map(do, pair)])
    return jobs


def finished(name, *options):
    """Write a finished run on rendered digits, and return its folder."""
    line = ["data=digits", *SIZES, *options]
    config = composed(*line)
    ended(Job(Path(name), config, {"choices": {"model": "cnn", "data": "digits"}, "overrides": line}, name), 10.0)
    return Path(name)


def run_again(*folders, most=8, options=(), **further):
    return rerun.rerun(list(folders), Path("out"), most, 1.5, [sys.executable] * 2, list(options), **further)


def pair_of(folder, seconds=1.0):
    """The two jobs that compare a run with itself."""
    (run,) = read_sweep([folder]).runs
    return [rerun.side_job(side, run, sys.executable, [], seconds) for side in "ab"]


def test_short_timed_pairs_change_their_order_and_end_once_it_is_decided_that_b_is_slower(monkeypatch, capsys):
    a, b = (finished(name, "model=mlp", "trainer.max_epochs=3", "data.seed=5") for name in ("one", "other"))
    jobs = pretended(monkeypatch, noise=0.005, b=12.0)
    folders = run_again(a, b, options=("data.batch_size=8",))
    assert folders == [Path("out/a"), Path("out/b")]
    run_dirs = [str(job.run_dir.relative_to("out")) for job in jobs]
    assert run_dirs[:6] == ["a/0", "b/0", "b/1", "a/1", "a/2", "b/2"]
    assert re.search(r"pair 5 of at most 8: A \d?\d(\.\d+)? ms", capsys.readouterr().out)
    comparison = Comparison(*folders)
    assert (comparison.passes, comparison.verdict, len(run_dirs)) == (rerun.MIN_PAIRS, "slower", 2 * rerun.MIN_PAIRS)
    config = jobs[2].config
    assert config["model"]["_target_"] == "batchscope.models.mlp.MLP"
    assert (config["data"]["seed"], config["data"]["batch_size"]) == (5, 8)
    assert (config["trainer"]["max_time"], config["trainer"]["max_epochs"]) == (None, -1)
    assert (config["callbacks"]["until_known"]["seconds"], jobs[2].seconds) == (1.5, 1.5)
    assert config["optimizer"]["schedule"] == "constant"
    assert not {"checkpoint", "progress"} & {*config["callbacks"]}
    assert (config["test"], config["logger"]) == (False, {})


@pytest.mark.parametrize(
    ("noise", "b", "max_slowdown", "pairs"),
    [(0.005, 10.0, 0.05, 5), (0.005, 12.0, 0.5, 5), (0.2, 10.0, 0.05, 6)],  # the last has too much noise
)
def test_pairs_go_on_until_it_is_decided_or_there_are_enough(noise, b, max_slowdown, pairs, monkeypatch):
    a, jobs = finished("one"), pretended(monkeypatch, noise=noise, b=b)
    run_again(a, a, most=6, max_slowdown=max_slowdown)
    assert len(jobs) == 2 * pairs
    assert [job.record_fields["rerun"]["pair"] for job in jobs] == [n for n in range(pairs) for _ in "ab"]
    assert len({job.record_fields["rerun"]["of"] for job in jobs}) == 1


def test_a_side_is_called_by_the_choice_that_was_typed():
    (run,) = read_sweep([finished("one")]).runs
    side = rerun.side_job("a", run, sys.executable, ["model=mlp"], 1.0)
    assert side.record_fields["choices"] == {"model": "mlp", "data": "digits"}


def test_a_side_records_the_options_of_its_run_and_those_that_were_typed_behind_them():
    (run,) = read_sweep([finished("one")]).runs
    side = rerun.side_job("a", run, sys.executable, ["model=mlp"], 1.0)
    assert side.record_fields["overrides"] == ["data=digits", *SIZES, "model=mlp"]


def test_a_run_that_does_not_finish_ends_it_with_one_line(monkeypatch):
    a = finished("one")
    pretended(monkeypatch, status="failed")
    with pytest.raises(UserError, match="compare: a run of B did not finish: no luck"):
        run_again(a, a)


def test_what_a_record_alone_cannot_decide_or_hold_is_refused_before_anything_runs():
    a, synthetic = finished("one", f"data.root={Path.cwd()}/elsewhere"), write_run(Path("synthetic"), 16, 10.0)
    with pytest.raises(UserError, match="data.root: is .* add data.root="):
        run_again(a, a)
    with pytest.raises(UserError, match=r"^synthetic/run.json: cannot be run again: test: is missing$"):
        run_again(synthetic, synthetic)
    assert not Path("out").exists()


def test_what_has_to_be_typed_and_differs_is_refused_because_a_word_would_change_both_sides(monkeypatch):
    loss, jobs = "task.loss._target_=torch.nn.MSELoss", pretended(monkeypatch)
    a, b = (finished(name, f"data.root={Path.cwd()}/{name}") for name in ("one", "other"))
    c, d = finished("third", loss, "+task.loss.reduction=sum"), finished("fourth")
    for sides, option, typed in (
        ((a, b), "data.root", ()),
        ((c, d), "task.loss._target_", [loss]),
        ((d, c), "task.loss", ()),
    ):
        with pytest.raises(
            UserError, match=rf"{option}.*: is .* in A and .* in B, which .* changes both; add the --config"
        ):
            run_again(*sides, options=typed)
    assert not jobs and not Path("out").exists()
    run_again(a, b, options=[f"data.root={Path.cwd()}"])
    assert {job.config["data"]["root"] for job in jobs} == {str(Path.cwd())}
    run_again(c, d, options=["task=default"])


def test_on_a_cpu_the_two_of_a_pair_are_visited_side_by_side(loop):
    loop.run(rerun.pair_plan(pair_of(finished("one"), seconds=0.1), Path("out"), 2))
    pairs = [[read(Path(f"out/{side}/{n}")) for side in "ab"] for n in range(2)]
    passes_of_pairs = [[record["taken"] for record in pair] for pair in pairs]
    assert passes_of_pairs[0][0] == passes_of_pairs[0][1] and passes_of_pairs[1][0] == passes_of_pairs[1][1]
    assert len(passes_of_pairs[0][0]) >= 8
    assert {record["told"] for pair in pairs for record in pair} == {"stop time limit"}
