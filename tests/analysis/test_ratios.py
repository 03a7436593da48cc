"""Ratios of times whose truth is known: from fabricated steps, with the spread that separate runs have."""

import math

import numpy as np
import pytest

from batchscope.analysis.ratios import Ratio, time_ratio, took_turns
from batchscope.analysis.read import find
from batchscope.analysis.run_times import FASTEST, FIT, STEP, unreadable
from tests.support.synthetic_runs import write_run, write_steps

CONFIDENCE = 0.975


def runs(folder):
    return find([folder]).runs


def measured(folder, step_ms, random, spread=0.02, **facts):
    """A run of 200 steps in 8 stretches, with its summary."""
    steps = step_ms * np.exp(spread * random.standard_normal((8, 25)))
    write_run(folder, 64, float(np.median(steps)), **facts)
    return write_steps(folder, steps)


def in_turns(folder, a_ms, b_ms, random, rounds=9, drift=0.2, spread=0.02):
    """Two runs of a sweep whose stretches took turns; each round is as slow as the machine was."""
    machine = np.exp(drift * random.standard_normal((rounds, 1)))
    for name, ms in (("0", a_ms), ("1", b_ms)):
        steps = ms * machine * np.exp(spread * random.standard_normal((rounds, 10)))
        write_run(folder / name, 64, float(np.median(steps)))
        write_steps(folder / name, steps, rounds=range(rounds))
    return [[run] for run in runs(folder)]


def test_a_ratio_is_b_over_a_and_rates_are_its_inverse(tmp_path):
    random = np.random.default_rng(0)
    sides = [runs(measured(tmp_path / name, ms, random)) for name, ms in (("a", 10.0), ("b", 20.0))]
    found = time_ratio(*sides, STEP, CONFIDENCE)
    assert found.value == pytest.approx(2, rel=0.02)
    assert 1.4 < found.low < found.value < found.high < 2.8
    assert found.inverse.value == pytest.approx(0.5, rel=0.02)
    assert found.inverse.low == pytest.approx(1 / found.high)
    assert found.times(2).high == 2 * found.high


def test_separate_runs_differ_by_what_runs_of_the_same_thing_do(tmp_path):
    random = np.random.default_rng(0)
    sides = [runs(measured(tmp_path / name, ms, random)) for name, ms in (("a", 10.0), ("b", 10.8))]
    assert not time_ratio(*sides, STEP, CONFIDENCE, between=0.05).differs
    assert time_ratio(*sides, STEP, CONFIDENCE, between=0.0).differs


def test_runs_that_took_turns_are_compared_within_rounds(tmp_path):
    sides = in_turns(tmp_path, 10.0, 10.8, np.random.default_rng(0))
    found = time_ratio(*sides, STEP, CONFIDENCE)
    assert took_turns(*sides) == 9
    assert found.value == pytest.approx(1.08, rel=0.02)
    assert found.low > 1
    assert time_ratio(*sides, "backward", CONFIDENCE).value == pytest.approx(1.08, rel=0.03)


def test_equal_numbers_of_rounds_in_two_sweeps_are_no_common_rounds(tmp_path):
    random = np.random.default_rng(0)
    for name in "ab":
        in_turns(tmp_path / name, 10.0, 20.0, random)
    sides = [runs(tmp_path / name)[:1] for name in "ab"]
    assert took_turns(*sides) == 0


def test_whole_runs_are_rounds_where_their_records_say_so(tmp_path):
    random = np.random.default_rng(0)
    for number in range(6):
        slow = math.exp(0.3 * random.standard_normal())
        for name, ms in (("a", 10.0), ("b", 11.0)):
            folder = write_run(tmp_path / name / str(number), 64, ms * slow, turn={"of": "x", "round": number})
            assert folder.is_dir()
    sides = [runs(tmp_path / name) for name in "ab"]
    assert took_turns(*sides) == 6
    found = time_ratio(*sides, STEP, CONFIDENCE)
    assert (found.low, found.high) == (pytest.approx(1.1), pytest.approx(1.1))


@pytest.mark.parametrize(("paired", "between"), [(True, 0.0), (False, 0.05)])
def test_an_interval_holds_1_in_unchanged_pairs_as_often_as_it_says(tmp_path, paired, between):
    random, missed = np.random.default_rng(1), 0
    for trial in range(60):
        folder = tmp_path / str(trial)
        if paired:
            sides = in_turns(folder, 10.0, 10.0, random)
        else:
            drift = np.exp(0.05 * random.standard_normal(2))
            sides = [runs(measured(folder / n, 10.0 * d, random)) for n, d in zip("ab", drift, strict=True)]
        missed += time_ratio(*sides, STEP, 0.95, between).differs
    assert missed <= 7  # 60 trials at 5 %: 8 or more in one of 100


def test_repeated_runs_tell_what_runs_differ_by(tmp_path):
    for name, times in (("a", (10.0, 13.0, 16.0)), ("b", (14.0, 18.0, 22.0))):
        for seed, ms in enumerate(times):
            write_run(tmp_path / name / str(seed), 64, ms, seed=seed)
    sides = [runs(tmp_path / name) for name in "ab"]
    assert not time_ratio(*sides, STEP, CONFIDENCE, between=0.0).differs
    alone = [side[1:2] for side in sides]
    assert time_ratio(*alone, STEP, CONFIDENCE).low == 0  # the record has neither steps nor their number


def test_a_machine_that_others_used_may_have_been_slower(tmp_path):
    for name, ms, share in (("a", 10.0, 0.0), ("b", 17.0, 0.4)):
        known = {"step_ms_interval": [0.98 * ms, 1.02 * ms], "others_share": share, "steal_share": 0.05}
        write_run(tmp_path / name, 64, ms, throughput=known)
    a, b = (runs(tmp_path / name) for name in "ab")
    found = time_ratio(a, b, STEP, CONFIDENCE)
    assert found.low < 1 < found.value < found.high < 2.4  # B was slowed
    assert time_ratio(b, a, STEP, CONFIDENCE).high == pytest.approx(1 / found.low)


def test_disturbed_stretches_do_not_count_where_others_do(tmp_path):
    steps_a = 10 * calm()
    for name, steps, disturbed in (("a", steps_a, ()), ("b", np.vstack([steps_a[:4], 3 * steps_a[4:]]), (4, 5, 6, 7))):
        write_run(tmp_path / name, 64, 10.0)
        write_steps(tmp_path / name, steps, disturbed=disturbed)
    sides = [runs(tmp_path / name) for name in "ab"]
    assert time_ratio(*sides, "forward", CONFIDENCE).value == pytest.approx(1, rel=0.02)


def test_older_records_are_compared_by_their_percentiles(tmp_path):
    known = {"updates": 400, "step_ms_p10": 9.0, "step_ms_p90": 11.0}
    sides = [runs(write_run(tmp_path / n, 64, ms, throughput=known)) for n, ms in (("a", 10.0), ("b", 15.0))]
    found = time_ratio(*sides, STEP, CONFIDENCE)
    assert 1 < found.low < 1.5 < found.high
    assert time_ratio(*sides, "forward", CONFIDENCE).low == 0  # of the parts nothing but the mean is known


def test_the_interval_of_a_summary_is_taken_where_there_are_no_steps(tmp_path):
    for name, ends in (("narrow", [9.9, 10.1]), ("wide", [7.0, 13.0])):
        for side in "ab":
            write_run(tmp_path / name / side, 64, 10.0, throughput={"step_ms_interval": ends})
    ends = [
        time_ratio(runs(tmp_path / n / "a"), runs(tmp_path / n / "b"), STEP, CONFIDENCE, between=0).high
        for n in ("narrow", "wide")
    ]
    assert ends[0] < 1.03
    assert ends[1] > 1.2


def test_the_rate_of_the_whole_fit_is_compared_as_a_time(tmp_path):
    sides = [
        runs(write_run(tmp_path / n, 64, 10.0, throughput={"samples_per_sec_fit": r}))
        for n, r in (("a", 200.0), ("b", 100.0))
    ]
    assert time_ratio(*sides, FIT, CONFIDENCE).value == pytest.approx(2)
    bare = runs(write_run(tmp_path / "c", 64, 10.0))
    assert time_ratio(bare, bare, FIT, CONFIDENCE) is None


def test_a_damaged_file_of_steps_is_a_line(tmp_path):
    run = write_run(tmp_path / "a", 64, 10.0)
    (run / "steps.npz").write_bytes(b"no archive")
    found = runs(run)
    assert [line.startswith("a: ") and "cannot be read" in line for line in unreadable(found)] == [True]
    assert time_ratio(found, found, STEP, CONFIDENCE) == Ratio(pytest.approx(1), 0, math.inf)


def test_a_machine_whose_probe_was_slower_may_have_slowed_the_steps(tmp_path):
    for name, slow in (("a", 1.0), ("b", 1.4)):
        write_run(tmp_path / name, 64, 10.0 * slow)
        write_steps(tmp_path / name, 10.0 * slow * calm(), probe_s=3e-4 * slow)
        write_run(tmp_path / f"{name} elsewhere", 64, 10.0 * slow, device_name=f"processor {name}")
        write_steps(tmp_path / f"{name} elsewhere", 10.0 * slow * calm(), probe_s=3e-4 * slow)
    assert not time_ratio(runs(tmp_path / "a"), runs(tmp_path / "b"), STEP, CONFIDENCE).differs
    machines = [runs(tmp_path / f"{name} elsewhere") for name in "ab"]
    assert time_ratio(*machines, STEP, CONFIDENCE).low > 1  # of two machines, their speeds are what is compared


def calm():
    return np.exp(0.01 * np.random.default_rng(0).standard_normal((8, 25)))


def separate(folder, random, probe_s=3e-4, per_stretch=30, **sides):
    """Two runs of 30 s, each `(step_ms, share of stretches that the machine made slower)`."""
    for name, (step_ms, share) in sides.items():
        machine = np.where(random.permutation(20) < 20 * share, 1.3, 1.0)[:, None]
        steps = step_ms * machine * np.exp(0.02 * random.standard_normal((20, per_stretch)))
        write_run(folder / name, 64, float(np.median(steps)))
        write_steps(folder / name, steps, probe_s=probe_s)
    return [runs(folder / name) for name in sides]


def test_slow_moments_of_the_machine_change_the_median_and_not_the_fastest_steps(tmp_path):
    sides = separate(tmp_path, np.random.default_rng(0), a=(50.0, 0.2), b=(50.0, 0.8))
    assert time_ratio(*sides, STEP, CONFIDENCE).value == pytest.approx(1.3, rel=0.03)
    assert time_ratio(*sides, FASTEST, CONFIDENCE).value == pytest.approx(1, rel=0.03)


@pytest.mark.parametrize(
    ("of_runs", "share"), [({}, 0.4), ({"per_stretch": 15}, 0.6), ({"probe_s": math.nan}, 1.0)],
    ids=["30 s", "15 s", "no probe that tells of slow runs"],
)  # fmt: skip
def test_the_fastest_steps_of_separate_runs_differ_by_a_share_of_what_medians_do(tmp_path, of_runs, share):
    sides = separate(tmp_path, np.random.default_rng(0), **of_runs, a=(50.0, 0.0), b=(50.0, 0.0))
    reaches = {}
    for name in (STEP, FASTEST):
        found = time_ratio(*sides, name, CONFIDENCE)
        reaches[name] = math.log(found.high / found.value)
    assert reaches[FASTEST] == pytest.approx(share * reaches[STEP], rel=0.1)


def test_a_repeated_run_without_steps_is_not_asked_for_the_fastest_ones(tmp_path):
    random = np.random.default_rng(0)
    separate(tmp_path / "a", random, second=(50.0, 0.0))
    write_run(tmp_path / "a" / "first", 64, 50.0, seed=1)
    a, b = runs(tmp_path / "a"), separate(tmp_path, random, b=(65.0, 0.0))[0]
    assert len(a) == 2
    assert time_ratio(a, b, FASTEST, CONFIDENCE).value == pytest.approx(1.3, rel=0.03)


@pytest.mark.parametrize(("step_ms", "per_stretch"), [(50.0, 14), (1.0, 40)], ids=["280 steps", "0.8 s"])
def test_a_short_run_has_no_fastest_steps(tmp_path, step_ms, per_stretch):
    folder = write_run(tmp_path, 64, step_ms)
    write_steps(folder, np.full((20, per_stretch), step_ms))
    assert time_ratio(runs(tmp_path), runs(tmp_path), FASTEST, CONFIDENCE) is None


def test_the_interval_of_the_fastest_steps_holds_1_in_unchanged_pairs_as_often_as_it_says(tmp_path):
    random, missed = np.random.default_rng(2), 0
    for trial in range(60):
        machine = 50 * np.exp(0.04 * random.standard_normal(2))
        shares = random.uniform(0.1, 0.8, 2)
        sides = separate(tmp_path / str(trial), random, a=(machine[0], shares[0]), b=(machine[1], shares[1]))
        missed += time_ratio(*sides, FASTEST, 0.95).differs
    assert missed <= 7  # 60 trials at 5 %: 8 or more in one of 100


def test_absurd_probes_and_shares_are_left_out(tmp_path):
    for name, probe_s in (("a", 1e308), ("b", 5e-324)):
        write_run(tmp_path / name, 64, 10.0)
        write_steps(tmp_path / name, 10.0 * calm(), probe_s=probe_s)
    found = time_ratio(runs(tmp_path / "a"), runs(tmp_path / "b"), STEP, CONFIDENCE)
    assert found.high < 1.5
