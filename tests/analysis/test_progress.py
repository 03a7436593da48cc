"""Which size reaches a given quality first by the noise scale: all that enters a sentence has the confidence of the sentence."""

import math

import pytest
from scipy.special import ndtri, stdtrit

from batchscope.analysis.noise import STATED, Ratio
from batchscope.analysis.progress import Progress, pooled, progress_of
from batchscope.analysis.read import find
from tests.support.synthetic_runs import write_rates

SCALE = {"samples": 400.0, "low": 300.0, "high": 533.0, "pairs": 100}


def progress(folder, rates, **scale):
    (group,) = find([write_rates(folder, rates, drift=0, noise=0.0005, noise_scale={**SCALE, **scale})]).groups
    return progress_of(group.sizes, group.rates)


def half(ratio):
    return math.log(ratio.high / ratio.low) / 2


@pytest.mark.parametrize("freedom", [9, 99])
def test_the_interval_of_a_run_is_recorded_with_90_percent_and_widened_to_the_confidence_that_is_asked_for(freedom):
    one = [Ratio(400, 300, 533)]
    wider = stdtrit(freedom, 0.99) / stdtrit(freedom, 0.95)
    assert half(pooled(one, 0.98, freedom)) == pytest.approx(wider * half(pooled(one, 0.9, freedom)))
    no_end = pooled([Ratio(400, 100, math.inf)], 0.98, freedom)
    assert math.log(no_end.value / no_end.low) == pytest.approx(wider * math.log(4))
    assert no_end.high == math.inf


def test_what_runs_differ_by_is_widened_as_well():
    runs = [Ratio(value, 0.999 * value, 1.001 * value) for value in (100, 200, 400)]
    assert half(pooled(runs, 0.98)) / half(pooled(runs, 0.9)) == pytest.approx(stdtrit(2, 0.99) / stdtrit(2, 0.95))


def test_the_ratio_of_two_sizes_has_the_noise_scale_at_its_own_confidence(tmp_path):
    found = progress(tmp_path, {16: 1000.0, 1024: 8000.0})
    rates = found.rates.ratio(1024, 16, STATED)
    scale = found.scale_at(STATED)
    efficiency = [found.efficiency(1024, phi) / found.efficiency(16, phi) for phi in (scale.low, scale.high)]
    ratio = found.ratio(1024, 16, STATED)
    assert (ratio.low, ratio.high) == pytest.approx((rates.low * efficiency[0], rates.high * efficiency[1]))
    assert scale.low < found.scale.low < found.scale.high < scale.high


def test_few_comparisons_widen_more_than_many(tmp_path):
    many, few = (progress(tmp_path / str(n), {16: 1000.0, 64: 2000.0}, pairs=n) for n in (100, 10))
    assert half(few.scale) == pytest.approx(half(many.scale))  # as it was recorded
    assert half(few.scale_at(STATED)) > 1.03 * half(many.scale_at(STATED))
    unknown = progress(tmp_path / "unknown", {16: 1000.0, 64: 2000.0}, pairs=None)
    assert unknown.scale_at(STATED) == few.scale_at(STATED)


class Normal:
    """Rates whose ratios have a standard deviation of 5 %."""

    def __init__(self, rates):
        self.rate = rates.get

    def ratio(self, a, b, confidence):
        value, reach = self.rate(a) / self.rate(b), math.exp(0.05 * ndtri((1 + confidence) / 2))
        return Ratio(value, value / reach, value * reach)


def test_a_rival_that_is_shown_to_be_later_than_a_size_alone_may_be_first_of_many():
    """Of many the best one is the best by chance, so that all comparisons hold together."""
    rates = {256: 1.0, 512: 0.88, **{2**n: 0.1 for n in range(7)}}
    found = Progress([Ratio(1e9, 9e8, 1.1e9)], 99, dict.fromkeys(rates, 1), Normal(rates), False, True)
    assert found.first([256, 512]) == [256]
    assert found.first(rates) == [256, 512]
