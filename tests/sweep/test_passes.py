"""Runs are visited in passes until the answer is decided; what decides it, with runs that are pretended."""

import random
from collections.abc import Mapping
from typing import Any

import pytest

from batchscope.sweep.passes import FEWEST, VISIT_S, Limits, Run, measure_in_passes
from tests.support.devices import Clock


class Pretended(Run):
    """A run with such a rate, and a spread from visit to visit; `slow` are factors of the passes."""

    def __init__(self, clock: Clock, size: int, rate: float, spread: float = 0.0, visits: int = 10**6, **how: Any):
        super().__init__(how.get("group", "cnn"), size)
        self.clock, self.rate, self.spread, self.visits = clock, rate, spread, visits
        self.slow: Mapping[int, float] = how.get("slow", {})
        self.taken: float = how.get("taken", 0.01)
        self.passes: list[int] = []
        self.reason: str | None = None
        self._random = random.Random(size)

    def visit(self, number: int, seconds: float) -> dict[str, Any] | None:
        assert self.reason is None
        if len(self.passes) == self.visits:
            return None
        self.passes.append(number)
        self.clock.now += seconds
        seconds_a_sample = (1 + self.spread * self._random.uniform(-1, 1)) * self.slow.get(number, 1) / self.rate
        return {"median_s": self.size * seconds_a_sample, "samples": self.size, "others_share": self.taken}

    def stop(self, reason: str) -> None:
        assert self.reason is None
        self.reason = reason


@pytest.fixture
def clock() -> Clock:
    return Clock()


def measure(clock: Clock, *runs: Pretended, **how: Any) -> None:
    measure_in_passes(runs, clock=clock, **how)


def test_runs_that_do_not_vary_are_done_after_the_fewest_passes(clock: Clock) -> None:
    runs = Pretended(clock, 8, 800), Pretended(clock, 64, 3_200)
    measure(clock, *runs)
    assert [run.passes for run in runs] == [list(range(FEWEST))] * 2
    assert [run.reason for run in runs] == ["known to ± 5 %"] * 2
    assert clock.now == pytest.approx(100 + 2 * FEWEST * VISIT_S)


def test_the_order_is_reversed_in_every_other_pass(clock: Clock) -> None:
    order: list[int] = []
    runs = [Pretended(clock, size, 100) for size in (1, 2, 3)]
    for run in runs:
        run.visit = lambda number, seconds, of=run: (order.append(of.size), Pretended.visit(of, number, seconds))[1]
    measure(clock, *runs)
    assert order[:9] == [1, 2, 3, 3, 2, 1, 1, 2, 3]


def test_the_precision_and_the_time_are_the_users(clock: Clock) -> None:
    rough = [Pretended(clock, size, 100 * size, spread=0.2) for size in (1, 8)]
    measure(clock, *rough, limits=Limits(precision=0.5))
    assert {run.reason for run in rough} == {"known to ± 50 %"}
    exact = [Pretended(clock, size, 100 * size, spread=0.2) for size in (1, 8)]
    measure(clock, *exact, limits=Limits(precision=0.001, seconds=5))
    assert {run.reason for run in exact} == {"time limit"}
    assert len(exact[0].passes) == 5 / VISIT_S


def test_passes_are_numbered_from_a_number_on(clock: Clock) -> None:
    run = Pretended(clock, 8, 100)
    measure(clock, run, first_pass=70)
    assert run.passes == list(range(70, 70 + len(run.passes)))


def test_only_sizes_on_which_the_answer_depends_go_on(clock: Clock) -> None:
    slow, near, best = (Pretended(clock, *run, spread=0.16) for run in ((1, 100), (64, 930), (512, 1000)))
    measure(clock, slow, near, best, limits=Limits(decide_s=20))
    assert clock.now - 100 > 3 * Limits().seconds  # longer than the time that they have
    assert len(slow.passes) < len(near.passes) == len(best.passes)


def test_what_slows_a_whole_pass_is_not_in_the_comparison(clock: Clock) -> None:
    slow = {number: factor for number, factor in enumerate([1, 1.6, 1, 0.7, 1.5, 1, 0.8, 1.4] * 60)}
    together = [Pretended(clock, *run, slow=slow) for run in ((64, 950), (512, 1000))]
    measure(clock, *together)
    assert len(together[0].passes) == FEWEST


def test_an_answer_that_stays_undecided_ends_after_its_time(clock: Clock) -> None:
    said: list[str] = []
    every_other = {number: 1.5 if number % 2 else 1 / 1.5 for number in range(1000)}
    runs = [Pretended(clock, 64, 900, slow=every_other), Pretended(clock, 512, 1000)]  # exactly at the limit of 90 %
    measure(clock, *runs, say=said.append, limits=Limits(decide_s=15))
    assert 15 <= clock.now - 100 <= 15 + 2 * VISIT_S
    assert said[0] == "measuring 2 settings · pass 1 · at most 6 s left"
    assert said[-1].startswith("not decided yet: measuring 64 and 512 again · pass ")


def test_a_busy_machine_is_not_measured_longer_than_asked(clock: Clock) -> None:
    runs = [Pretended(clock, *run, spread=0.5, taken=0.4) for run in ((64, 900), (512, 1000))]
    measure(clock, *runs)
    assert clock.now - 100 <= 2 * Limits().seconds + 2 * VISIT_S


def test_sizes_of_different_models_are_not_compared(clock: Clock) -> None:
    cnn = [Pretended(clock, *run, spread=0.16) for run in ((1, 100), (64, 930))]
    mlp = [Pretended(clock, *run, spread=0.16, group="mlp") for run in ((1, 1000), (64, 8000))]
    measure(clock, *cnn, *mlp)
    assert clock.now - 100 <= 4 * Limits().seconds + 1  # both answers are clear


def test_a_run_that_ends_leaves_the_visits_to_the_others(clock: Clock) -> None:
    ends, never, stays = Pretended(clock, 8, 9, visits=1), Pretended(clock, 9, 9, visits=0), Pretended(clock, 80, 100)
    measure(clock, ends, never, stays)
    assert (ends.passes, ends.reason, never.reason) == ([0], "", "")
    assert stays.reason is not None
    assert len(stays.passes) >= FEWEST


def test_steps_that_are_not_known_are_waited_for_until_the_time_limit(clock: Clock) -> None:
    run = Pretended(clock, 8, float("nan"))
    measure(clock, run)
    assert run.reason == "time limit"


def test_without_runs_nothing_is_measured(clock: Clock) -> None:
    measure(clock)
