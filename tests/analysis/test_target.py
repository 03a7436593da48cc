"""Which batch size reached a target first, by times in which repeated runs differ."""

import math
from pathlib import Path

import pytest

from batchscope.analysis.run import Run
from batchscope.analysis.target import Arrival, Arrivals, find_arrivals, least_time_ratio


def arrivals(*seeds, validated=1.0):
    """The arrivals of one run for each size and seed: its seconds, or minus the seconds after which the run was ended.

    `validated`: the time of the last validation below the target, as a share of the time of the arrival.
    """
    sizes = {}
    for seed, times in enumerate(seeds):
        for size, seconds in times.items():
            record = {"config": {"seed": seed}}
            run = Run(f"{seed}/{size}", Path(), record)
            reached = seconds > 0
            after = validated * seconds if reached else -seconds
            arrival = Arrival(run, after, seconds if reached else math.inf, 100 * seconds if reached else math.inf)
            sizes.setdefault(size, {})[str(seed)] = arrival
    return Arrivals("val/acc 90.0 %", "", sizes)


def outcome(*seeds, **options):
    """The winner, and the best guess."""
    result = arrivals(*seeds, **options)
    return result.winner, result.best_guess


@pytest.mark.parametrize(
    ("seconds", "answer"),
    [
        (2.06, (None, 16)),  # repeated runs differ by more
        (2.5, (None, 16)),
        (2.7, (16, 16)),
        (-2.5, (None, 16)),  # ended while 64 could still be first
        (-2.7, (16, 16)),
    ],
)
def test_times_of_separate_runs_decide_where_they_differ_by_more_than_the_same_run_twice(seconds, answer):
    assert outcome({16: 2.0, 64: seconds}) == answer


def test_runs_to_another_target_do_not_count():
    def run(number, value, seconds):
        target = {"metric": "val/acc", "value": value, "after_seconds": seconds / 2}
        record = {"config": {"seed": number}, "target": target | {"seconds": seconds, "samples": 100.0}}
        return Run(str(number), Path(), record)

    arrivals = find_arrivals({16: [run(0, 0.9, 2.0), run(1, 0.9, 2.0), run(2, 0.5, 0.1)]})
    assert (arrivals.target, [*arrivals.sizes[16]], arrivals.other_targets) == ("val/acc 90 %", ["0", "1"], 1)
    assert arrivals.lines[-1] == "Left out: 1 run to another target."


def test_times_are_told_apart_from_the_last_validation_below_the_target_on():
    assert outcome({16: 2.0, 64: 2.7}, validated=0.9) == (None, 16)
    seeds = [{16: seconds, 64: 1.3 * seconds} for seconds in (1.0, 2.0)]
    assert outcome(*seeds) == (16, 16)
    assert outcome(*seeds, validated=0.9) == (None, 16)


def test_each_seed_is_a_pair_so_that_several_tell_closer_sizes_apart():
    assert outcome({16: 2.0, 64: 2.5}) == (None, 16)
    assert outcome(*({16: seconds, 64: 1.25 * seconds} for seconds in (1.0, 2.0, 4.0))) == (16, 16)


def test_seeds_that_disagree_tell_nothing_apart_and_the_best_guess_has_the_smallest_typical_time():
    assert outcome({16: 4.0, 64: 2.0}, {16: 2.0, 64: 4.0}, {16: 3.0, 64: 2.9}) == (None, 64)
    assert outcome({16: 2.0, 64: 9.0}, {16: 2.0, 64: 9.0}, {16: -9.0, 64: 9.0}) == (None, 16)


def test_more_sizes_need_more_evidence_because_the_first_of_many_may_be_so_by_chance():
    assert least_time_ratio(2) < least_time_ratio(5) < 1.5
    assert outcome({16: 2.0, 64: 2.7}) == (16, 16)
    assert outcome({16: 2.0, 64: 2.7, 256: 2.8, 1024: 20.0, 4096: 20.0}) == (None, 16)
    assert outcome({16: 2.0, 64: 20.0, 256: 20.0, 1024: 20.0, 4096: 20.0}) == (16, 16)
    assert outcome({16: 2.0, 64: 20.0, 256: 20.0, 1024: 2.8, 4096: 20.0}) == (None, 16)


def test_where_no_run_arrived_there_is_no_guess():
    assert outcome({16: -2.0, 64: -4.0}) == (None, None)


def test_a_guess_is_said_with_its_time_and_with_the_sizes_that_did_not_reach_the_target():
    lines = arrivals({16: 2.0, 64: 2.1, 256: 9.0, 1024: -1.0, 4096: -9.0}).lines
    assert lines == [
        "Best guess: 16 reached val/acc 90.0 % first (one seed), after 2 s of training and 200 samples.",
        "1,024 and 4,096 did not reach it.",
    ]


def test_of_a_guess_that_not_all_seeds_have_reached_it_is_said_how_many():
    result = arrivals({16: -9.0, 64: 5.0}, {16: -9.0, 64: -9.0}, {16: -9.0, 64: -9.0})
    assert result.arrived == {16: 0, 64: 1}
    assert result.lines == ["64 reached val/acc 90.0 % first (1 of 3 seeds).", "16 did not reach it."]


def test_one_size_alone_is_no_winner():
    assert outcome({256: 2.0}) == (None, 256)
    assert arrivals({256: 2.0}).lines == [
        "256 reached val/acc 90.0 % (one seed), after 2 s of training and 200 samples."
    ]


def test_where_no_run_arrived_an_easier_target_or_more_time_is_advised():
    line = "No run reached val/acc 90.0 %. Take an easier target, or more time (search.minutes)."
    assert arrivals({16: -2.0, 64: -4.0}).lines == [line]
