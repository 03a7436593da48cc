"""The runs of experiment=time_to_target: their order, their limits, and what ends them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchscope.options.compose import check_command_line
from batchscope.sweep.plans import Job, RunFailed
from batchscope.sweep.search import search_of
from batchscope.sweep.time_to_target import MARGIN, time_to_target
from tests.support.command_lines import answer
from tests.support.runs import run as forked
from tests.sweep.conftest import play

WORDS = ["experiment=time_to_target", "target=0.9", "search.sizes=[16,64,256]", "search.rates=[1,2]"]
End = Callable[[int, float], dict[str, Any]]  # of a batch size and a learning rate: how the run ends


def reached(seconds: float, took: float = 10.0) -> dict[str, Any]:
    return {"status": "finished", "seconds": took, "time_to_target_s": seconds}


LATE = {"status": "finished", "seconds": 10.0}


class Played:
    """A search whose runs take no time: `ran` has the size and the rate of each, `limits` what it may take."""

    def __init__(self, folder: Path, end: End, *words: str):
        self.folder, self.end = folder, end
        self.ran: list[tuple[int, float]] = []
        self.limits: list[tuple[float | None, float]] = []
        (config,) = check_command_line([*WORDS, "optimizer.lr=0.01", *words], multirun=False, run_dir=str(folder))
        self.job = Job(folder, config, {"choices": {}, "overrides": WORDS})

    def play(self) -> float | None:
        return play(time_to_target(self.job, search_of(self.job.config)), self._do)

    def _do(self, one: Job) -> dict[str, Any]:
        size, lr = one.config["data"]["batch_size"], one.config["optimizer"]["lr"]
        stop = one.config["callbacks"]["stop_at_target"]
        assert one.facts["overrides"][-2:] == [f"data.batch_size={size}", f"optimizer.lr={lr:g}"]
        assert (stop["metric"], stop["value"]) == ("val/acc", 0.9)
        self.ran.append((size, lr))
        self.limits.append((stop["seconds"], stop["wall_seconds"]))
        return {"dataset": {"train_samples": 55_000}, **self.end(size, lr)}


def test_the_middle_size_is_first_and_then_the_size_with_the_best_time(tmp_path: Path) -> None:
    times = {16: 3.0, 64: 2.0, 256: 8.0}
    played = Played(tmp_path, lambda size, lr: reached(times[size] / (100 * lr)))
    assert played.play() == 1.0
    sizes = [64, 16, 256]
    assert played.ran == [*((size, 0.01) for size in sizes), (64, 0.02), (16, 0.02), (256, 0.02)]
    best = [None, 2.0, 2.0, 2.0, 1.0, 1.0]
    assert [limit for limit, _ in played.limits] == [one and MARGIN * one for one in best]


@pytest.mark.parametrize(
    ("end", "words", "ran"),
    [
        # What does not fit into memory is not tried again, nor anything larger.
        (lambda size, lr: LATE if size < 64 else {"status": "out_of_memory"}, (), [(64, 0.01), (16, 0.01), (16, 0.02)]),
        # No batch is larger than the training set.
        (lambda size, lr: {**LATE, "dataset": {"train_samples": 70}}, ("search.rates=[1]",), [(64, 0.01), (16, 0.01)]),
        # A loss that is not finite is a result.
        (
            lambda size, lr: {"status": "failed", "error": "step 3: the loss is nan"},
            ("search.rates=[1]",),
            [(64, 0.01), (16, 0.01), (256, 0.01)],
        ),
        # Minutes that are over.
        (lambda size, lr: reached(1.0, took=70.0), ("search.minutes=2",), [(64, 0.01), (16, 0.01)]),
    ],
)
def test_which_runs_are_left_out(
    end: End, words: tuple[str, ...], ran: list[tuple[int, float]], tmp_path: Path
) -> None:
    played = Played(tmp_path, end, *words)
    played.play()
    assert played.ran == ran


def test_without_a_best_time_a_run_gets_a_share_of_the_time_that_is_left(tmp_path: Path) -> None:
    played = Played(tmp_path, lambda size, lr: {**LATE, "seconds": 60.0}, "search.minutes=10")
    assert played.play() is None
    assert played.limits == [(None, share) for share in (300.0, 270.0, 240.0, 210.0, 180.0, 300.0)]


def test_any_other_failure_ends_it(tmp_path: Path, capsys) -> None:
    played = Played(tmp_path, lambda size, lr: {"status": "failed", "error": "target_metric: got 'f1', and …"})
    with pytest.raises(RunFailed, match="target_metric: got 'f1'"):
        played.play()
    assert len(played.ran) == 1


TINY = ["data=digits", "data.num_train=300", "data.num_val=50", "model=mlp", "model.hidden_sizes=[8]"]
TINY += ["trainer.accelerator=cpu", "callbacks.progress=null", "hydra.sweep.dir=s"]


@pytest.mark.slow
def test_a_real_one_answers_and_keeps_what_it_has_done(tmp_path: Path) -> None:
    words = ["experiment=time_to_target", "target=0.5", "search.sizes=[8,64]", "search.rates=[1]", *TINY]
    done = forked(tmp_path, *words)
    assert done.end() == 0, done.complained
    said = " ".join(done.said.split())
    assert "reached val/acc 50.0 % first" in said or "The machine was busy" in said
    assert "s to target" in said
    assert (tmp_path / "s/report/time_to_target.png").exists()
    found = [json.loads(path.read_text()) for path in sorted((tmp_path / "s").rglob("run.json"))]
    assert any(one["target"]["reached"] and one["time_to_target_s"] > 0 for one in found)
    again = forked(tmp_path, *words)
    assert again.end() == 0, again.complained
    assert again.said.count("— kept") == len(found) == 2


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "target: has no value; write target=…"),
        (["target=98"], "target: got 98, and val/acc is a fraction between 0 and 1; write target=0.98"),
        (["target=0.9", "target_metric=test/acc"], "target_metric: got 'test/acc', takes a metric of the validation, "),
        (["target=0.9", "search.sizes=[16]"], "search.sizes: takes at least two different batch sizes"),
        (["target=0.9", "data.batch_size=16"], "data.batch_size: experiment=time_to_target tries several; write "),
        (
            ["target=0.9", "callbacks.stop_at_target=null"],
            "callbacks.stop_at_target: is left out, and ends the runs of",
        ),
        (["target=0.9", "search.minutes=0"], "search.minutes: got 0, takes a number above 0"),
    ],
)
def test_mistakes_are_one_line_and_nothing_is_written(words: list[str], line: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = answer("train", "experiment=time_to_target", *words)
    assert (said.code, said.out, said.err.count("\n")) == (1, "", 1)
    assert said.err.startswith(f"error: {line}")
    assert not [*tmp_path.iterdir()]


def test_the_target_is_an_option_of_its_experiment() -> None:
    assert answer("train", "target=0.9").err == "error: target: is an option of experiment=time_to_target; write both\n"
