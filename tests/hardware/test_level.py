"""find_slowdown tells a lasting slower level from noise, moods, bursts, warm-up and drift: simulated runs, fixed seeds."""

import math

import numpy
import pytest

from batchscope.hardware.level import find_slowdown

SPANS, SPAN_S = 200, 6.0  # twenty minutes
AT = numpy.arange(SPANS) / SPANS  # the start of each span, as a share of the run


def ar_noise(random: numpy.random.Generator, phi: float, size: float = 0.05, n: int = SPANS) -> numpy.ndarray:
    """Log times as an autoregressive process of order 1: the autocorrelation is `phi`, the standard deviation `size`."""
    noise, values = random.normal(0, size * math.sqrt(1 - phi**2), n), numpy.zeros(n)
    values[0] = random.normal(0, size)
    for i in range(1, n):
        values[i] = phi * values[i - 1] + noise[i]
    return values


def burst(random: numpy.random.Generator) -> numpy.ndarray:
    """Spans that take 1.5 times as long for a twentieth of the run."""
    began = random.uniform(0, 1)
    return math.log(1.5) * ((began <= AT) & (began + 0.05 > AT)) + ar_noise(random, 0.3)


ORDINARY = {
    "noise of 3 %": lambda random: ar_noise(random, 0.0, 0.03),
    "noise of 20 %": lambda random: ar_noise(random, 0.0, 0.2),
    "heavy tails": lambda random: 0.04 * random.standard_t(2, SPANS),
    "autocorrelated noise": lambda random: ar_noise(random, 0.5, 0.1),
    "moods of 9 % for half a minute": lambda random: ar_noise(random, 0.8, 0.09) + random.normal(0, 0.03, SPANS),
    "moods of 5 % for minutes": lambda random: ar_noise(random, 0.95, 0.05),
    "moods of 10 % for minutes": lambda random: ar_noise(random, 0.98, 0.1),
    "a burst": burst,
    "three bursts": lambda random: burst(random) + burst(random) + burst(random),
    "a slow warm-up": lambda random: numpy.exp(-AT / 0.05) + ar_noise(random, 0.3),
    "a slow phase that is over": lambda random: 0.3 * ((AT > 0.3) & (AT < 0.6)) + ar_noise(random, 0.3),
    "some spans with the start of an epoch": lambda random: 0.2 * (random.random(SPANS) < 0.3) + ar_noise(random, 0.3),
    "a drift of 10 %": lambda random: math.log(1.1) * AT + ar_noise(random, 0.3),
    "a drift of 30 %": lambda random: math.log(1.3) * AT + ar_noise(random, 0.3),
    "a random walk": lambda random: numpy.cumsum(random.normal(0, 0.01, SPANS)),
    "a drift and moods": lambda random: math.log(1.4) * AT + ar_noise(random, 0.9, 0.03),
    "faster steps": lambda random: -0.3 * (AT > 0.5) + ar_noise(random, 0.3),
}


@pytest.mark.parametrize(("runs", "most"), [(100, 1), pytest.param(400, 2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ORDINARY)
def test_ordinary_runs_raise_no_alarm(kind: str, runs: int, most: int) -> None:
    step_times = (numpy.exp(ORDINARY[kind](numpy.random.default_rng(seed))) for seed in range(runs))
    assert sum(find_slowdown(times, SPAN_S) is not None for times in step_times) <= most


@pytest.mark.parametrize("n", [20, 1_000])
def test_runs_of_few_and_of_many_spans_raise_none(n: int) -> None:
    runs = (ar_noise(numpy.random.default_rng(seed), 0.5, 0.1, n) for seed in range(50))
    assert [run for run in runs if find_slowdown(numpy.exp(run), 1200 / n)] == []


@pytest.mark.parametrize(("more", "least"), [(0.1, 80), (0.2, 97), (0.3, 97)])
def test_a_slower_level_is_found_where_it_began_with_an_interval(more: float, least: int) -> None:
    offsets, covered = [], []
    for seed in range(100):
        random = numpy.random.default_rng(seed)
        began = int(random.uniform(0.25, 0.8) * SPANS)
        run = ar_noise(random, 0.3) + math.log(1 + more) * (numpy.arange(SPANS) >= began)
        if change := find_slowdown(numpy.exp(run), SPAN_S):
            offsets.append(abs(change.span - began))
            covered.append(change.low < 1 + more < change.high)
    assert len(offsets) >= least
    assert numpy.median(offsets) <= 1
    assert numpy.mean(covered) >= 0.98


@pytest.mark.parametrize(("more", "is_found"), [(0.06, False), (0.1, True)])
def test_less_than_eight_percent_is_no_new_level(more: float, is_found: bool) -> None:
    quiet = ar_noise(numpy.random.default_rng(0), 0.3, 0.005)
    assert (find_slowdown(numpy.exp(quiet + math.log(1 + more) * (AT >= 0.5)), SPAN_S) is not None) is is_found


@pytest.mark.parametrize(("phi", "size"), [(0.9, 0.03), (0.97, 0.02), (0.97, 0.05)])
def test_a_run_that_becomes_three_times_slower_is_found_beside_the_moods_of_a_machine(phi: float, size: float) -> None:
    """Moods leave few spans that are independent."""
    for seed in range(50):
        random = numpy.random.default_rng(seed)
        began = int(random.uniform(0.25, 0.8) * SPANS)
        change = find_slowdown(
            numpy.exp(ar_noise(random, phi, size) + math.log(3) * (numpy.arange(SPANS) >= began)), SPAN_S
        )
        assert change and abs(change.span - began) <= 1 and change.low < 3 < change.high


@pytest.mark.parametrize("noise", [burst, lambda random: math.log(1.3) * (AT < 0.1) + ar_noise(random, 0.3)])
def test_it_is_found_beside_a_burst_and_after_an_earlier_slow_phase(noise) -> None:
    runs = (math.log(1.3) * (AT >= 0.7) + noise(numpy.random.default_rng(seed)) for seed in range(50))
    starts = [change.span for run in runs if (change := find_slowdown(numpy.exp(run), SPAN_S))]
    assert len(starts) >= 45
    assert numpy.median(numpy.abs(numpy.array(starts) - 140)) <= 1


def test_a_level_has_to_last_for_three_minutes_on_both_sides() -> None:
    times = numpy.where(numpy.arange(40) < 20, 1.0, 1.5)
    assert find_slowdown(times, 9.0) == (20, pytest.approx(1.5), pytest.approx(1.5), pytest.approx(1.5))
    assert find_slowdown(times, 4.0) is None
    assert find_slowdown(times[:29], 60.0) is None
    assert find_slowdown([], 1.0) is None
