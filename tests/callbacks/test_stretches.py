"""Stretches: where they begin and end, which steps are in them, and which of them are disturbed."""

import math

import numpy
import pytest
import torch

from batchscope.callbacks import _stretches
from batchscope.callbacks._cost_summary import COLUMNS, CostSummary
from batchscope.callbacks._stretches import OUTSIDE, Stretches, median_words, noise_words
from batchscope.hardware.contention import Noise

CPU = torch.device("cpu")
QUIET, LOUD = Noise(0.0, 0.0, 0.5, 0.0), Noise(0.6, 0.05, 0.0, 40.0)


class Time:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Time:
    return Time()


@pytest.fixture(autouse=True)
def noises(monkeypatch: pytest.MonkeyPatch) -> list[Noise]:
    """What the meter reads at the ends of stretches; quiet where the list is empty."""
    found: list[Noise] = []

    class Meter:
        def __init__(self, device: torch.device):
            self.opened = True

        def read(self) -> Noise:
            self.opened = not self.opened
            return QUIET if self.opened or not found else found.pop(0)

    class Probe:
        def __init__(self, *args: object):
            pass

        def read(self) -> float:
            return math.nan

    monkeypatch.setattr(_stretches, "NoiseMeter", Meter)
    monkeypatch.setattr(_stretches, "SpeedProbe", Probe)
    return found


def train(stretches: Stretches, clock: Time, *seconds: float, start: int = 0) -> list[int]:
    """Updates of so many seconds; returns before which of them a stretch began."""
    began = []
    for update, each in enumerate(seconds, start):
        if stretches.is_due(update):
            stretches.begin(update)
            began.append(update)
        clock.now += each
    return began


def test_a_stretch_begins_after_the_warm_up_and_every_quarter_of_a_second(clock: Time) -> None:
    stretches = Stretches(CPU, 3, clock)
    assert train(stretches, clock, *[0.1] * 12) == [3, 6, 9]
    assert stretches.current is stretches.all[-1]
    assert stretches.end(12).end == 12
    assert stretches.of_updates(numpy.arange(14)).tolist() == [-1] * 3 + [0] * 3 + [1] * 3 + [2] * 3 + [-1] * 2


def test_each_long_step_is_a_stretch(clock: Time) -> None:
    assert train(Stretches(CPU, 1, clock), clock, *[2.0] * 4) == [1, 2, 3]


def test_a_long_run_has_longer_stretches(clock: Time) -> None:
    stretches = Stretches(CPU, 1, clock)
    train(stretches, clock, *[0.5] * 20_000)
    assert len(stretches.all) < 500
    assert stretches.all[-2].seconds == pytest.approx(0.02 * 10_000, rel=0.1)


def test_a_clock_that_jumps_back_begins_another_stretch(clock: Time) -> None:
    stretches = Stretches(CPU, 1, clock)
    assert train(stretches, clock, 0.1, 0.1, -50, 0.1, 0.1) == [1, 3]
    assert stretches.all[0].seconds == 0


def test_who_gives_turns_begins_and_ends_stretches(clock: Time) -> None:
    stretches = Stretches(CPU, 1, clock)
    stretches.by_turns = True
    assert train(stretches, clock, *[1.0] * 4) == []
    stretches.begin(4, turn=7)
    clock.now += 3.0
    ended = stretches.end(6)
    assert (ended.round, ended.first, ended.end, ended.seconds) == (7, 4, 6, 3.0)
    assert stretches.end(6) is None
    stretches.begin(9, turn=8)
    assert stretches.of_updates(numpy.array([5, 6, 8, 9])).tolist() == [0, -1, -1, 1]


def test_a_stretch_without_an_update_is_dropped(clock: Time) -> None:
    stretches = Stretches(CPU, 0, clock)
    stretches.begin(5)
    assert stretches.end(5) is None
    assert stretches.all == []
    assert stretches.facts() == {}


def test_the_facts_are_over_the_time_of_all_stretches(clock: Time, noises: list[Noise]) -> None:
    stretches = Stretches(CPU, 0, clock)
    noises += [Noise(0.8, 0.0, 0.0), Noise(), Noise(0.0, 0.04, 0.9)]
    for update, seconds in enumerate((1.0, 5.0, 3.0)):
        stretches.begin(update, OUTSIDE)
        clock.now += seconds
    stretches.end(3)
    shares = {"others_share": pytest.approx(0.2), "steal_share": pytest.approx(0.03)}
    assert stretches.facts() == {"stretches": 3, "disturbed_stretches": 1, **shares}


def test_on_an_accelerator_a_window_counts_as_busy_only_if_it_was_slowed(clock: Time, noises: list[Noise]) -> None:
    stretches = Stretches(CPU, 0, clock)
    cores_are_free, slowed = Noise(0.4, 0.0, 0.5), Noise(0.4, 0.0, 0.1)
    noises += [cores_are_free, slowed]
    for update in range(2):
        stretches.begin(update)
        clock.now += 1.0
    stretches.end(2)
    assert stretches.noise(slowed_alone=False) == [cores_are_free, slowed]
    assert [each.others_share for each in stretches.noise(slowed_alone=True)] == [0.0, 0.4]


def test_a_slow_probe_is_slower_than_those_of_most_stretches(clock: Time) -> None:
    stretches = Stretches(CPU, 0, clock)
    for update in range(6):
        stretches.begin(update)
    stretches.end(6)
    for stretch, seconds in zip(stretches.all, [1.0, 1.1, math.nan, 1.5, 1.05, 0.9], strict=True):
        stretch.probe_s = seconds
    assert stretches.disturbed().tolist() == [False, False, False, True, False, False]


def cost_of(clock: Time, noises: list[Noise], loud: int, quiet: int) -> CostSummary:
    """So many disturbed steps of 30 ms, then quiet ones of 10 ms: a stretch each."""
    noises += [LOUD] * loud + [QUIET] * quiet
    stretches = Stretches(CPU, 0, clock)
    cost = CostSummary(warmup=0, stretches=stretches)
    for update in range(loud + quiet):
        stretches.begin(update)
        clock.now += 1.0
        ms = 30.0 if update < loud else 10.0
        cost.add(numpy.array([[{"forward": ms, "samples": 4, "batches": 1}.get(name, 0.0) for name in COLUMNS]]))
    stretches.end(loud + quiet)
    return cost


def test_disturbed_steps_leave_the_median_and_stay_in_the_mean(clock: Time, noises: list[Noise]) -> None:
    cost = cost_of(clock, noises, loud=10, quiet=6)
    summary = cost.summary()
    assert (summary["step_ms_median"], summary["work_ms_median"], summary["step_ms_p99"]) == (10, 10, 10)
    assert (summary["step_ms_interval"], summary["undisturbed_steps"]) == ([10, 10], 6)
    assert summary["samples_per_sec"] == pytest.approx(400)
    assert summary["undisturbed_share"] == pytest.approx(60 / 360)
    assert summary["updates"] == 16
    assert summary["step_ms"] == pytest.approx((10 * 30 + 6 * 10) / 16)


def test_where_too_few_steps_are_undisturbed_all_are_taken(clock: Time, noises: list[Noise]) -> None:
    cost = cost_of(clock, noises, loud=10, quiet=5)
    assert cost.summary()["step_ms_median"] == 30
    assert "undisturbed_steps" not in cost.summary()
    known = cost.steps.known()
    assert (len(known.step_ms), known.clean_ms.tolist(), known.seconds) == (15, [10] * 5, pytest.approx(0.35))


def test_the_steps_of_a_run_are_kept_in_their_stretches(clock: Time, noises: list[Noise]) -> None:
    times = cost_of(clock, noises, loud=2, quiet=1).steps.times()
    assert times is not None
    assert times.step_s == pytest.approx([0.03, 0.03, 0.01])
    assert times.stretch.tolist() == [0, 1, 2]
    assert times.disturbed.tolist() == [1, 1, 0]
    assert times.others_share.tolist() == [0.6, 0.6, 0.0]
    assert times.involuntary_switches.tolist() == [40, 40, 0]
    assert times.round.tolist() == [OUTSIDE] * 3
    assert times.parts_s.sum(1) == pytest.approx(times.step_s)


def test_the_facts_of_a_turn(clock: Time, noises: list[Noise]) -> None:
    cost = cost_of(clock, noises, loud=1, quiet=1)
    stretches = cost.steps._stretches
    expected = {"others_share": 0.6, "steal_share": 0.05, "median_s": 0.03, "steps": 1, "disturbed": True}
    assert cost.steps.facts_of(stretches.all[0]) == expected


@pytest.mark.parametrize("broken", [math.nan, -3.0, math.inf])
def test_a_step_that_a_clock_has_broken_is_in_nothing(broken: float) -> None:
    cost = CostSummary(warmup=0)
    rows = [[{"forward": ms, "samples": 4, "batches": 1}.get(n, 0.0) for n in COLUMNS] for ms in (10, broken, 12, 11)]
    assert cost.add(numpy.array(rows)).tolist() == [False, False, True, True]  # nor the first of a fit
    assert (cost.summary()["step_ms_median"], cost.summary()["updates"]) == (11, 3)


def test_a_run_without_stretches_has_one(clock: Time) -> None:
    cost = CostSummary(warmup=0)
    assert cost.steps.times() is None
    cost.add(numpy.array([[{"forward": 10.0, "samples": 4, "batches": 1}.get(name, 0.0) for name in COLUMNS]]))
    times = cost.steps.times()
    assert (times.stretch.tolist(), times.step_s.tolist()) == ([0], pytest.approx([0.01]))
    assert "step_ms_interval" not in cost.summary()  # of one step


def test_the_words_say_what_slowed_the_windows_and_which_steps_the_median_is_of() -> None:
    summary = {"stretches": 20, "disturbed_stretches": 3, "others_share": 0.2, "steal_share": 0.004}
    assert noise_words(summary).endswith("; the others have too few steps, so the median is of all")
    summary |= {"undisturbed_steps": 40}
    words = (
        "3 of 20 windows slowed from outside, other programs used 20 % of the processor; the median is of the others"
    )
    assert noise_words(summary) == words
    assert noise_words(summary | {"disturbed_stretches": 0}) is noise_words({}) is None


def test_the_median_has_its_interval_and_why_the_run_ended() -> None:
    summary = {"step_ms_median": 12.34, "step_ms_interval": [12.1, 12.51], "ended": "known to ± 5 %"}
    assert median_words(summary) == "12.3 ms (12.1 to 12.5, known to ± 5 %)"
    assert median_words(summary | {"step_ms_interval": []}) == "12.3 ms (known to ± 5 %)"
    assert median_words({"step_ms_median": 12.34}) == "12.3 ms"
    assert median_words({"step_ms_median": 12.34, "ended": "time limit"}) == "12.3 ms (at its time limit)"
