"""Simulated runs are visited in passes until the sweep has its verdict; what ends the visits."""

import random

import pytest

from batchscope.records.intervals import TIME_LIMIT
from batchscope.sweep.passes import (
    MIN_PASSES,
    PASSES_PER_CHECK,
    SETTLED,
    VISIT_S,
    Limits,
    WaitingRun,
    measure_in_passes,
)
from tests.support.devices import Clock


class Pretended(WaitingRun):
    """A run with a rate in samples/s, a spread from visit to visit, and a factor `slow` of each pass.

    It ends after so many `visits`; `load` is the share of the processor that other programs take.
    """

    def __init__(self, size, rate, spread=0.0, slow=None, visits=None, load=0.01, goes_on=False):
        super().__init__(size, goes_on)
        self.rate, self.spread, self.slow, self.visits, self.load = rate, spread, slow or {}, visits, load
        self.random, self.passes, self.reason = random.Random(size), [], None

    def visit(self, number, seconds):
        assert self.reason is None
        if len(self.passes) == self.visits:
            self.reason = "by itself"
            return None
        self.passes.append(number)
        self.order.append(self.size)
        self.clock.now += seconds
        noise = 1 + self.spread * self.random.uniform(-1, 1)
        mean_s = self.size * noise * self.slow.get(number, 1) / self.rate
        return {"mean_s": mean_s, "samples": self.size, "others_share": self.load}

    def stop(self, reason):
        assert self.reason is None
        self.reason = reason


def measure(*runs, **options):
    """Measure the runs; return the seconds that it takes."""
    clock, order = Clock(), []
    for run in runs:
        run.clock, run.order = clock, order
    measure_in_passes(runs, clock=clock, **options)
    return clock.now - 100


EIGHT = [(2**n, 2**n / (2**n + 30)) for n in range(2, 10)]  # a curve that saturates, as many have


def test_sizes_that_differ_clearly_are_visited_ten_times_in_changing_order():
    runs = [Pretended(size, 100 * size) for size in (1, 8, 64)]
    assert measure(*runs, first_pass=70) == pytest.approx(3 * MIN_PASSES * VISIT_S)
    assert [run.passes for run in runs] == [list(range(70, 70 + MIN_PASSES))] * 3
    assert [run.reason for run in runs] == [SETTLED] * 3
    assert runs[0].order[:9] == [1, 8, 64, 64, 8, 1, 1, 8, 64]


@pytest.mark.parametrize("seed", range(2))
def test_doubling_sizes_on_a_curve_that_saturates_are_decided_in_half_a_minute(seed):
    """Every list of doubling sizes has one near 90 %: that it lies there is no reason to go on."""
    runs = [Pretended(*run, spread=0.12) for run in EIGHT]
    for run in runs:
        run.random.seed(f"{seed} {run.size}")
    assert measure(*runs) <= 30
    assert {run.reason for run in runs} == {SETTLED}
    assert {len(run.passes) for run in runs} == {len(runs[0].passes)}  # a pass visits all sizes


def test_after_ten_passes_every_second_one_is_followed_by_a_look():
    runs = [Pretended(64, 900, spread=0.9), Pretended(512, 1000, spread=0.9)]
    measure(*runs)
    assert runs[0].reason == SETTLED
    assert len(runs[0].passes) > MIN_PASSES and (len(runs[0].passes) - MIN_PASSES) % PASSES_PER_CHECK == 0


def test_what_slows_a_whole_pass_is_not_in_the_comparison():
    slow = dict(enumerate([1, 1.6, 1, 0.7, 1.5, 1, 0.8, 1.4] * 60))
    together = [Pretended(*run, slow=slow, load=0.5) for run in ((64, 950), (512, 1000))]
    measure(*together)
    assert len(together[0].passes) == MIN_PASSES


@pytest.mark.parametrize(
    ("limits", "runs", "passes", "reason"),
    [
        # More passes make an answer surer.
        (Limits(min_passes=24), 2, 24, SETTLED),
        # The time is that of all runs.
        (Limits(seconds=5, settles=False), 2, 5 / VISIT_S, TIME_LIMIT),
        (Limits(seconds=5, settles=False), 4, 5 / VISIT_S, TIME_LIMIT),
        # There are ten passes, however long they take, or as few as the user says.
        (Limits(seconds=0.1, settles=False), 3, MIN_PASSES, TIME_LIMIT),
        (Limits(seconds=0.1, min_passes=5, settles=False), 3, 5, TIME_LIMIT),
        # Without an answer to wait for, the time and a number of passes decide.
        (Limits(seconds=3, min_passes=8, settles=False), 2, 3 / VISIT_S, TIME_LIMIT),
        (Limits(seconds=0.1, min_passes=8, settles=False), 2, 8, TIME_LIMIT),
    ],
)
def test_the_time_and_the_number_of_passes_are_the_users(limits, runs, passes, reason):
    members = [Pretended(size, 100 * size) for size in range(1, runs + 1)]
    measure(*members, limits=limits)
    assert [(len(run.passes), run.reason) for run in members] == [(passes, reason)] * runs


def test_steps_that_are_not_known_end_with_the_time():
    (run,) = runs = [Pretended(8, float("nan"))]
    assert measure(*runs) <= Limits().seconds + VISIT_S
    assert run.reason == TIME_LIMIT
    measure()


def test_the_line_says_how_long_it_may_take():
    lines = []
    measure(*(Pretended(*run, spread=0.12) for run in EIGHT), say=lines.append)
    assert lines[0] == "measuring 8 runs · pass 1 · 0 s of at most 60"
    assert lines[9] == "measuring 8 runs · pass 10 · 14 s of at most 60"


def test_a_run_that_ends_leaves_the_visits_to_the_others():
    ends, never, stays = Pretended(8, 9, visits=1), Pretended(9, 9, visits=0), Pretended(80, 100)
    measure(ends, never, stays)
    assert (ends.passes, ends.reason, never.reason) == ([0], "by itself", "by itself")
    assert stays.reason == TIME_LIMIT


def test_a_training_that_is_left_alone_is_visited_no_more():
    for goes_on, reason in ((True, None), (False, TIME_LIMIT)):
        ends, stays = (
            Pretended(n, 100, spread=9, visits=visits, goes_on=goes_on) for n, visits in ((8, 3), (64, None))
        )
        measure(ends, stays, limits=Limits(seconds=2))
        assert stays.reason == reason
        assert (len(stays.passes) == 4) is goes_on
