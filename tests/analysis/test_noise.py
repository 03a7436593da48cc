"""Rates and their intervals, from windows whose drift and noise are known."""

import math

import numpy as np
import pandas as pd
import pytest

from batchscope.analysis.noise import Rates

COLUMNS = ["setting", "run", "pass_", "log_s", "taken", "disturbed"]


def simulated(
    log_s: dict[int, float],
    *,
    count: int = 12,
    noise: float = 0.02,
    alike: float = 0.0,
    drift: float = 0.0,
    passes: bool = True,
    seed: int = 0,
) -> pd.DataFrame:
    """The windows of a run for each setting: a random walk that the settings of a pass share, and AR(1) noise."""
    random = np.random.default_rng(seed)
    rows = []
    walk = np.cumsum(random.normal(0, drift, count * (1 if passes else len(log_s))))
    for number, (setting, center) in enumerate(log_s.items()):
        error = random.normal(0, noise)
        for window in range(count):
            error = alike * error + math.sqrt(1 - alike**2) * random.normal(0, noise)
            y = center + error + walk[window if passes else number * count + window]
            rows.append((setting, number, f"s#{window}" if passes else None, y, 0.0, False))
    return pd.DataFrame(rows, columns=COLUMNS)


def test_a_rate_is_the_mean_of_its_windows_in_logs():
    assert Rates(simulated({1: math.log(0.01)}, noise=0.001)).rate(1) == pytest.approx(100, rel=0.01)


def test_drift_is_in_no_ratio_of_settings_that_share_passes_and_widens_that_of_others():
    together = Rates(simulated({1: 0.0, 2: -0.1}, drift=0.1)).ratio(2, 1)
    assert together.value == pytest.approx(math.exp(0.1), rel=0.03)
    assert together.reach < 0.04
    apart = Rates(simulated({1: 0.0, 2: -0.1}, drift=0.1, passes=False)).ratio(2, 1)
    assert apart.reach > max(0.15, 4 * together.reach)


def test_autocorrelation_widens():
    white = [Rates(simulated({1: 0, 2: 0}, seed=s)).ratio(1, 2).reach for s in range(20)]
    alike = [Rates(simulated({1: 0, 2: 0}, alike=0.7, seed=s)).ratio(1, 2).reach for s in range(20)]
    assert np.median(alike) > 1.3 * np.median(white)


def test_what_sweeps_differ_by_is_the_same_for_all_repeats_of_a_sweep():
    windows = simulated(dict.fromkeys(range(6), 0.0), noise=0.001)
    repeated = windows.assign(setting=windows["setting"] % 2)  # three runs of each of two settings
    one, three = (Rates(each, sweeps=0.02).ratio(0, 1).reach for each in (windows, repeated))
    assert one < three < 1.4 * one  # of three runs it is less well known what they differ by


def test_runs_apart_differ_by_what_the_halves_of_a_run_differ_by():
    windows = simulated({1: 0.0, 2: 0.0}, passes=False)
    windows.loc[windows.index[:6], "log_s"] += 0.3  # the first half of the first run is slower
    assert Rates(windows).ratio(1, 2).reach > 0.3
    assert Rates(simulated({1: 0.0, 2: 0.0}, passes=False)).ratio(1, 2).reach < 0.05


def test_repeated_runs_that_differ_by_more_than_their_windows_widen():
    first, second = (simulated({1: shift, 2: 0.0}, passes=False, seed=n) for n, shift in enumerate((0.0, 0.3)))
    second["run"] += 2
    assert Rates(pd.concat([first, second])).ratio(1, 2).reach > 0.3


def test_a_spread_that_is_known_beforehand_is_assumed_between_separate_runs():
    windows = simulated({1: 0.0, 2: 0.0}, noise=0.001, passes=False)
    assert Rates(windows, between=0.1).ratio(1, 2).reach > 0.15 > Rates(windows).ratio(1, 2).reach


def test_what_a_whole_sweep_was_slowed_by_is_in_no_ratio_of_sweeps_that_share_a_setting():
    first = simulated({1: 0.0, 2: -1.0}, noise=0.001, drift=0.1)
    second = simulated({2: -1.0, 3: -3.0}, noise=0.001, drift=0.1, seed=1)
    second["log_s"] += 0.5
    second["run"] += 2
    second["pass_"] = "other " + second["pass_"]
    rates = Rates(pd.concat([first, second]))
    assert rates.ratio(3, 1).value == pytest.approx(math.exp(3), rel=0.01)
    assert rates.ratio(2, 1).value == pytest.approx(math.exp(1), rel=0.01)


def test_of_fewer_than_three_windows_and_of_a_record_alone_no_spread_is_known():
    for rates in (
        *(Rates(simulated({1: 0.0, 2: 0.0}, count=count)) for count in (1, 2)),
        Rates(pd.concat([simulated({1: 0.0}), simulated({2: 0.0}, count=1).assign(run=1)])),
    ):
        assert (rates.rate(2) > 0, rates.reach(2)) == (True, math.inf)
        assert (rates.ratio(1, 2).low, rates.ratio(1, 2).high) == (0.0, math.inf)
    assert Rates(pd.DataFrame(columns=COLUMNS)).settings == []


def test_disturbed_windows_are_left_out_unless_there_are_hardly_others():
    windows = simulated({1: 0.0}, noise=0.001)
    windows.loc[windows.index[:9], ["log_s", "disturbed"]] = [1.0, True]
    assert Rates(windows).rate(1) == pytest.approx(1, rel=0.01)
    windows.loc[windows.index[:10], "disturbed"] = True
    assert Rates(windows).rate(1) < 0.6


def test_a_run_that_was_disturbed_does_not_count_beside_others_of_its_setting_and_neither_does_its_partner():
    pairs = [simulated({1: 0.0, 2: 0.1}, noise=0.001, seed=pair) for pair in range(5)]
    pairs = [one.assign(run=one["run"] + 2 * pair, pass_=f"{pair} " + one["pass_"]) for pair, one in enumerate(pairs)]
    worst = pairs[0].assign(disturbed=pairs[0]["run"] == 0)
    worst["log_s"] += 1.0 * worst["disturbed"]
    without = Rates(pd.concat(pairs[1:])).ratio(1, 2)
    assert Rates(pd.concat([worst, *pairs[1:]])).ratio(1, 2) == without


def test_what_other_programs_took_is_allowed_for_on_the_side_that_they_slowed():
    windows = simulated({1: 0.0, 2: 0.0}, noise=0.001)
    windows.loc[windows["setting"] == 1, "taken"] = 0.25
    ratio = Rates(windows).ratio(1, 2)
    assert ratio.high == pytest.approx(1 / 0.8, rel=0.02)
    assert ratio.low == pytest.approx(1, rel=0.02)


def test_a_rate_reaches_as_far_as_other_programs_may_have_lowered_it():
    windows = simulated({1: 0.0, 2: 0.0}, noise=0.001)
    assert Rates(windows.assign(taken=0.25)).reach(1) == pytest.approx(0.25, abs=0.02)
    assert Rates(windows.assign(taken=0.25)).reach(1, others=False) == Rates(windows).reach(1)


def test_a_machine_is_busy_where_others_took_over_a_quarter_in_most_windows():
    windows = simulated({1: 0.0, 2: 0.0})
    windows.loc[windows.index[:13], "taken"] = 0.6
    assert Rates(windows).busy == pytest.approx(0.6 * 13 / 24)
    windows.loc[windows.index[:13], "taken"] = [0.6] * 11 + [0.1] * 2
    assert Rates(windows).busy is None


@pytest.mark.parametrize(("alike", "drift", "passes"), [(0.5, 0.05, True), (0.5, 0.0, False)])
def test_an_interval_holds_the_truth_in_at_least_85_percent_of_cases(alike: float, drift: float, passes: bool):
    truth = {1: 0.0, 2: -0.5, 3: -0.7}
    held = []
    for seed in range(100):
        rates = Rates(simulated(truth, alike=alike, drift=drift, passes=passes, seed=seed, count=15))
        for one, two in ((1, 2), (2, 3)):
            ratio = rates.ratio(one, two)
            held.append(ratio.low <= math.exp(truth[two] - truth[one]) <= ratio.high)
    assert np.mean(held) >= 0.85


@pytest.mark.parametrize("count", [3, 4])
def test_an_interval_from_few_passes_holds_the_truth_as_often(count: int):
    intervals = (Rates(simulated({1: 0.0, 2: 0.0}, count=count, seed=seed)).ratio(1, 2) for seed in range(200))
    assert sum(interval.low <= 1 <= interval.high for interval in intervals) >= 176


def test_an_interval_from_three_pairs_of_one_window_holds_the_truth_as_often():
    held = []
    for seed in range(200):
        pairs = [simulated({1: 0.0, 2: 0.0}, count=1, seed=3 * seed + pair) for pair in range(3)]
        pairs = [each.assign(run=each["run"] + 2 * pair, pass_=str(pair)) for pair, each in enumerate(pairs)]
        ratio = Rates(pd.concat(pairs)).ratio(1, 2)
        held.append(ratio.low <= 1 <= ratio.high)
    assert sum(held) >= 176


def test_a_run_of_its_own_beside_runs_that_share_passes_does_not_count():
    """A size that ran in a sweep and once more alone."""
    alone = simulated({1: 0.4}, noise=0.001, passes=False)
    alone["run"] += 2
    rates = Rates(pd.concat([simulated({1: 0.0, 2: 0.0}, noise=0.001), alone]))
    assert rates.rate(1) == pytest.approx(1, rel=0.01)
    assert rates.ratio(1, 2).reach < 0.01
