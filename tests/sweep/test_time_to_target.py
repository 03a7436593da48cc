"""The runs of experiment=time_to_target: their order, their limits, and what ends them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchscope.sweep.plans import Job, RunFailed
from batchscope.sweep.search import search_of
from batchscope.sweep.time_to_target import MARGIN, time_to_target
from tests.support.command_lines import composed
from tests.sweep.conftest import play

WORDS = ["experiment=time_to_target", "target=0.9", "search.sizes=[16,64,256]", "search.rates=[1,2]"]
ONE_RATE = "search.rates=[1]"
LATE = {"status": "finished", "seconds": 10.0}
End = Callable[[int, float], dict[str, Any]]  # of a batch size and a learning rate: how the run ends
Limits = list[tuple[float | None, float]]  # the seconds of training and of the clock that each run may take


def searched(folder: Path, end: End, *words: str) -> tuple[float | None, list[tuple[int, float]], Limits]:
    """The best time of a search whose runs take no time, the size and the rate of each, and its limits."""
    ran: list[tuple[int, float]] = []
    limits: Limits = []

    def do(one: Job) -> dict[str, Any]:
        size, lr = one.config["data"]["batch_size"], one.config["optimizer"]["lr"]
        stop = one.config["callbacks"]["stop_at_target"]
        assert one.facts["overrides"][-2:] == [f"data.batch_size={size}", f"optimizer.lr={lr:g}"]
        assert (stop["metric"], stop["value"]) == ("val/acc", 0.9)
        ran.append((size, lr))
        limits.append((stop["seconds"], stop["wall_seconds"]))
        return {"dataset": {"train_samples": 55_000}, **LATE, **end(size, lr)}

    config = composed(*WORDS, "optimizer.lr=0.01", *words, run_dir=folder)
    job = Job(folder, config, {"choices": {}, "overrides": WORDS})
    return play(time_to_target(job, search_of(config)), do), ran, limits


def test_the_middle_size_is_first_and_then_the_size_with_the_best_time(tmp_path: Path) -> None:
    times = {16: 3.0, 64: 2.0, 256: 8.0}
    best, ran, limits = searched(tmp_path, lambda size, lr: {"time_to_target_s": times[size] / (100 * lr)})
    assert best == 1.0
    assert ran == [*((size, 0.01) for size in (64, 16, 256)), (64, 0.02), (16, 0.02), (256, 0.02)]
    assert [limit for limit, _ in limits] == [one and MARGIN * one for one in (None, 2.0, 2.0, 2.0, 1.0, 1.0)]


@pytest.mark.parametrize(
    ("end", "words", "ran"),
    [
        # What does not fit into memory is not tried again, nor anything larger.
        (lambda size, lr: {} if size < 64 else {"status": "out_of_memory"}, (), [(64, 0.01), (16, 0.01), (16, 0.02)]),
        # No batch is larger than the training set.
        (lambda size, lr: {"dataset": {"train_samples": 70}}, (ONE_RATE,), [(64, 0.01), (16, 0.01)]),
        # A loss that is not finite is a result.
        (
            lambda size, lr: {"status": "failed", "error": "step 3: the loss is nan"},
            (ONE_RATE,),
            [(64, 0.01), (16, 0.01), (256, 0.01)],
        ),
        # Minutes that are over.
        (lambda size, lr: {"seconds": 70.0}, ("search.minutes=2",), [(64, 0.01), (16, 0.01)]),
    ],
)
def test_which_runs_are_left_out(end: End, words: tuple[str, ...], ran: list[Any], tmp_path: Path) -> None:
    assert searched(tmp_path, end, *words)[1] == ran


def test_without_a_best_time_a_run_gets_a_share_of_the_time_that_is_left(tmp_path: Path) -> None:
    best, _, limits = searched(tmp_path, lambda size, lr: {"seconds": 60.0}, "search.minutes=10")
    assert best is None
    assert limits == [(None, share) for share in (300.0, 270.0, 240.0, 210.0, 180.0, 300.0)]


def test_any_other_failure_ends_it(tmp_path: Path) -> None:
    ends = iter([{"status": "failed", "error": "target_metric: got 'f1', and …"}])
    with pytest.raises(RunFailed, match="target_metric: got 'f1'"):
        searched(tmp_path, lambda size, lr: next(ends))
