"""Runs take turns in rounds until their rates are known; what decides it, with runs that are pretended."""

import random
from collections.abc import Mapping
from typing import Any

import pytest

from batchscope.sweep.turns import MIN_ROUNDS, TURN_S, Limits, take_turns
from tests.support.devices import Clock


class Pretended:
    """A run whose steps take so long, with a spread from turn to turn; `slow` are factors of the rounds."""

    def __init__(
        self, clock: Clock, batch_size: int, step_s: float, spread: float = 0.0, turns: int = 10**6, **how: Any
    ):
        self.clock, self.batch_size, self.step_s, self.spread, self.turns = clock, batch_size, step_s, spread, turns
        self.slow: Mapping[int, float] = how.get("slow", {})
        self.disturbed = how.get("disturbed", lambda turn: False)
        self.rounds: list[int] = []
        self.reason: str | None = None
        self._random = random.Random(batch_size)

    def turn(self, number: int, seconds: float) -> dict[str, Any] | None:
        assert self.reason is None
        if len(self.rounds) == self.turns:
            return None
        self.rounds.append(number)
        self.clock.now += seconds
        step_s = self.step_s * (1 + self.spread * self._random.uniform(-1, 1)) * self.slow.get(number, 1)
        disturbed = self.disturbed(len(self.rounds))
        return {"median_s": step_s, "samples": self.batch_size, "steps": 9, "disturbed": disturbed}

    def stop(self, reason: str) -> None:
        assert self.reason is None
        self.reason = reason


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_runs_that_do_not_vary_are_done_after_six_rounds(clock: Clock) -> None:
    runs = [Pretended(clock, 8, 0.010), Pretended(clock, 64, 0.020)]
    take_turns(runs, clock=clock)
    assert [run.rounds for run in runs] == [[0, 1, 2, 3, 4, 5]] * 2
    assert [run.reason for run in runs] == ["known to ± 5 %", "known to ± 2 %"]  # the second one is the fastest
    assert clock.now == pytest.approx(100 + 12 * TURN_S)


def test_the_precision_and_the_time_are_the_users(clock: Clock) -> None:
    rough, known = (Pretended(clock, 8, 0.01, spread=0.1) for _ in range(2))
    take_turns([rough], Limits(precision=0.5), clock)
    take_turns([known], Limits(seconds=20), clock)
    assert rough.reason == "known to ± 20 %"
    assert len(known.rounds) == 20 / TURN_S


def test_rounds_are_numbered_from_a_number_on(clock: Clock) -> None:
    run = Pretended(clock, 8, 0.01)
    take_turns([run], clock=clock, first_round=70)
    assert run.rounds == list(range(70, 70 + MIN_ROUNDS))


def test_only_sizes_near_the_best_go_on(clock: Clock) -> None:
    slow, near, best = (Pretended(clock, size, 0.01, spread=0.027) for size in (10, 95, 100))
    take_turns([slow, near, best], Limits(seconds=60), clock)
    assert slow.reason == "known to ± 5 %"
    assert {near.reason, best.reason} == {"known to ± 2 %"}
    assert len(slow.rounds) < len(best.rounds)


@pytest.mark.slow
def test_what_slows_a_round_is_not_in_the_comparison(clock: Clock) -> None:
    slow = {number: factor for number, factor in enumerate([1, 1.06, 1, 0.97, 1.05, 1, 0.98, 1.04] * 5)}
    together = [Pretended(clock, size, 0.01, slow=slow) for size in (95, 100)]
    take_turns(together, Limits(seconds=60), clock)
    apart = [Pretended(clock, 95, 0.01, slow=slow), Pretended(clock, 100, 0.01, spread=0.05)]
    take_turns(apart, Limits(seconds=60), clock)
    assert together[0].reason == "known to ± 2 %"
    assert len(together[0].rounds) < len(apart[0].rounds)


def test_the_order_changes_from_round_to_round(clock: Clock) -> None:
    orders: list[list[int]] = []

    def turned(of: list[Any]) -> None:
        random.Random(len(orders)).shuffle(of)
        orders.append([one.run.batch_size for one in of])

    runs = [Pretended(clock, size, 0.01) for size in (1, 2, 3, 4)]
    take_turns(runs, clock=clock, shuffle=turned)
    assert len(orders) == MIN_ROUNDS
    assert len({tuple(order) for order in orders}) > 1
    assert all(sorted(order) == [1, 2, 3, 4] for order in orders)


def test_a_disturbed_turn_is_repeated_in_its_round(clock: Clock) -> None:
    run = Pretended(clock, 8, 0.01, disturbed=lambda turn: turn == 2)
    take_turns([run], clock=clock)
    assert run.rounds == [0, 1, 1, 2, 3, 4, 5]


def test_a_machine_that_is_always_disturbed_is_measured_as_it_is(clock: Clock) -> None:
    runs = [Pretended(clock, size, 0.01, disturbed=lambda turn: True) for size in (8, 80)]
    take_turns(runs, clock=clock)
    repeated = 2 * Limits().seconds / TURN_S  # as long as the turns that count
    assert sum(len(run.rounds) for run in runs) == pytest.approx(2 * MIN_ROUNDS + repeated, abs=1)
    assert all(run.reason for run in runs)


def test_while_the_machine_is_busy_nobody_trains(clock: Clock) -> None:
    waits: list[float] = []

    def wait(most: float) -> None:
        waits.append(most)
        clock.now += 2.0

    run = Pretended(clock, 8, 0.01, disturbed=lambda turn: turn in (2, 3))
    take_turns([run], clock=clock, wait=wait)
    assert run.rounds == [0, 1, 1, 1, 2, 3, 4, 5]
    assert waits == [pytest.approx(Limits().seconds), pytest.approx(Limits().seconds - 2.0 - TURN_S)]


def test_the_time_of_all_runs_has_an_end(clock: Clock) -> None:
    runs = [Pretended(clock, size, 0.01, spread=0.9) for size in (8, 80)]
    take_turns(runs, clock=clock)
    assert [run.reason for run in runs] == ["time was up"] * 2
    limit = 2 * Limits().seconds
    assert limit <= clock.now - 100 <= limit + 2 * TURN_S


def test_a_run_that_does_not_compete_leaves_time_to_those_that_do(clock: Clock) -> None:
    slow, *near = (Pretended(clock, size, 0.01, spread=0.16) for size in (8, 79, 80))
    take_turns([slow, *near], clock=clock)
    assert len(slow.rounds) < min(len(run.rounds) for run in near)
    assert slow.reason == "time was up"


def test_a_run_that_ends_leaves_the_turns_to_the_others(clock: Clock) -> None:
    ends, stays = Pretended(clock, 8, 0.01, turns=1), Pretended(clock, 80, 0.01)
    take_turns([ends, stays], clock=clock)
    assert (ends.rounds, ends.reason) == ([0], "")
    assert stays.reason == "known to ± 2 %"


def test_a_run_that_never_has_a_turn_ends_nothing_else(clock: Clock) -> None:
    never, stays = Pretended(clock, 8, 0.01, turns=0), Pretended(clock, 80, 0.01)
    take_turns([never, stays], clock=clock)
    assert (never.reason, stays.reason) == ("", "known to ± 2 %")


def test_steps_that_are_not_known_are_waited_for_until_the_time_is_up(clock: Clock) -> None:
    run = Pretended(clock, 8, float("nan"))
    take_turns([run], clock=clock)
    assert run.reason == "time was up"


def test_no_runs_take_no_turns(clock: Clock) -> None:
    take_turns([], clock=clock)
