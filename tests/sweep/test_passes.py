"""Runs are visited in passes until the answer is decided; what decides it, with runs that are pretended."""

import random

import pytest

from batchscope.sweep.passes import FEWEST, VISIT_S, Limits, Run, measure_in_passes
from tests.support.devices import Clock


class Pretended(Run):
    """A run with a rate in samples/s, a spread from visit to visit, and a factor `slow` of each pass.

    It ends after so many `visits`; other programs have `taken` a share of the processor.
    """

    def __init__(self, size, rate, spread=0.0, group="cnn", slow=None, visits=None, taken=0.01):
        super().__init__(group, size)
        self.rate, self.spread, self.slow, self.visits, self.taken = rate, spread, slow or {}, visits, taken
        self.random, self.passes, self.reason = random.Random(size), [], None

    def visit(self, number, seconds):
        assert self.reason is None
        if len(self.passes) == self.visits:
            return None
        self.passes.append(number)
        self.order.append(self.size)
        self.clock.now += seconds
        noise = 1 + self.spread * self.random.uniform(-1, 1)
        median_s = self.size * noise * self.slow.get(number, 1) / self.rate
        return {"median_s": median_s, "samples": self.size, "others_share": self.taken}

    def stop(self, reason):
        assert self.reason is None
        self.reason = reason


def measure(*runs, **how):
    """Measure the runs; how many seconds it takes."""
    clock, order = Clock(), []
    for run in runs:
        run.clock, run.order = clock, order
    measure_in_passes(runs, clock=clock, **how)
    return clock.now - 100


def test_runs_that_do_not_vary_are_done_after_the_fewest_passes_in_changing_order():
    runs = [Pretended(size, 100 * size) for size in (1, 8, 64)]
    assert measure(*runs, first_pass=70) == pytest.approx(3 * FEWEST * VISIT_S)
    assert [run.passes for run in runs] == [list(range(70, 70 + FEWEST))] * 3
    assert [run.reason for run in runs] == ["known to ± 5 %"] * 3
    assert runs[0].order[:9] == [1, 8, 64, 64, 8, 1, 1, 8, 64]


@pytest.mark.parametrize(
    ("limits", "passes", "reason"),
    [(Limits(precision=0.5), FEWEST, "known to ± 50 %"), (Limits(0.001, seconds=5), 5 / VISIT_S, "time limit")],
)
def test_the_precision_and_the_time_are_the_users(limits, passes, reason):
    runs = [Pretended(size, 100 * size, spread=0.2) for size in (1, 8)]
    measure(*runs, limits=limits)
    assert [(len(run.passes), run.reason) for run in runs] == [(passes, reason)] * 2


def test_only_sizes_on_which_the_answer_depends_go_on():
    slow, near, best = (Pretended(*run, spread=0.16) for run in ((1, 100), (64, 930), (512, 1000)))
    assert measure(slow, near, best, limits=Limits(decide_s=12)) > 3 * Limits().seconds  # the time that they have
    assert len(slow.passes) < len(near.passes) == len(best.passes)


def test_what_slows_a_whole_pass_is_not_in_the_comparison():
    slow = dict(enumerate([1, 1.6, 1, 0.7, 1.5, 1, 0.8, 1.4] * 60))
    together = [Pretended(*run, slow=slow) for run in ((64, 950), (512, 1000))]
    measure(*together)
    assert len(together[0].passes) == FEWEST


def test_an_answer_that_stays_undecided_ends_after_its_time():
    said = []
    every_other = {number: 1.5 if number % 2 else 1 / 1.5 for number in range(100)}
    runs = Pretended(64, 900, slow=every_other), Pretended(512, 1000)  # exactly at the limit of 90 %
    assert 8 <= measure(*runs, say=said.append, limits=Limits(decide_s=8)) <= 8 + 2 * VISIT_S
    assert said[0] == "measuring 2 settings · pass 1 · at most 6 s left"
    assert said[-1].startswith("not decided yet: measuring 64 and 512 again · pass ")


LIMIT, KNOWN = "time limit", "known to ± 5 %"
TWO_CLEAR_ANSWERS = [("cnn", 1, 100), ("cnn", 64, 930), ("mlp", 1, 1000), ("mlp", 64, 8000)]
# Runs that more passes would not help, and how the first one ends.
NOT_LONGER = {
    "a busy machine": ([Pretended(*run, 0.5, taken=0.4) for run in ((64, 900), (512, 1000))], LIMIT),
    "two models": ([Pretended(*run, 0.16, group) for group, *run in TWO_CLEAR_ANSWERS], KNOWN),
    "steps that are not known": ([Pretended(8, float("nan"))], LIMIT),
    "no run": ([], None),
}


@pytest.mark.parametrize("name", NOT_LONGER)
def test_what_more_passes_cannot_decide_takes_no_longer_than_asked(name):
    runs, reason = NOT_LONGER[name]
    assert measure(*runs) <= len(runs) * (Limits().seconds + VISIT_S)
    assert [run.reason for run in runs[:1]] == [reason] * len(runs[:1])


def test_a_run_that_ends_leaves_the_visits_to_the_others():
    ends, never, stays = Pretended(8, 9, visits=1), Pretended(9, 9, visits=0), Pretended(80, 100)
    measure(ends, never, stays)
    assert (ends.passes, ends.reason, never.reason) == ([0], "", "")
    assert (stays.reason, len(stays.passes)) == ("known to ± 5 %", FEWEST)
