"""Runs take turns in rounds until their rates are known; what decides it, with runs that are pretended."""

import random
from collections.abc import Mapping
from typing import Any

import pytest

from batchscope.sweep.turns import REPEATS, SECONDS_A_RUN, TURN_S, take_turns
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


def test_runs_that_do_not_vary_are_done_after_three_rounds(clock: Clock) -> None:
    runs = [Pretended(clock, 8, 0.010), Pretended(clock, 64, 0.020)]
    take_turns(runs, clock)
    assert [run.rounds for run in runs] == [[0, 1, 2]] * 2
    assert [run.reason for run in runs] == ["known to ± 5 %", "known to ± 2 %"]  # the second one is the fastest
    assert clock.now == 100 + 6 * TURN_S


def test_only_sizes_near_the_best_go_on(clock: Clock) -> None:
    slow, near, best = (Pretended(clock, size, 0.01, spread=0.025) for size in (10, 95, 100))
    take_turns([slow, near, best], clock)
    assert slow.reason == "known to ± 5 %"
    assert {near.reason, best.reason} == {"known to ± 2 %"}
    assert len(slow.rounds) < min(len(near.rounds), len(best.rounds))


def test_what_slows_a_round_is_not_in_the_comparison(clock: Clock) -> None:
    slow = {number: factor for number, factor in enumerate([1, 1.06, 1, 0.97, 1.05, 1, 0.98, 1.04] * 5)}
    together = [Pretended(clock, size, 0.01, slow=slow) for size in (95, 100)]
    take_turns(together, clock)
    apart = [Pretended(clock, 95, 0.01, slow=slow), Pretended(clock, 100, 0.01, spread=0.05)]
    take_turns(apart, clock)
    assert together[0].reason == "known to ± 2 %"
    assert len(together[0].rounds) < len(apart[0].rounds)


def test_the_order_changes_from_round_to_round(clock: Clock) -> None:
    orders: list[list[int]] = []

    def turned(of: list[Pretended]) -> None:
        random.Random(len(orders)).shuffle(of)
        orders.append([run.batch_size for run in of])

    runs = [Pretended(clock, size, 0.01) for size in (1, 2, 3, 4)]
    take_turns(runs, clock, shuffle=turned)
    assert len(orders) == 3
    assert len({tuple(order) for order in orders}) > 1
    assert all(sorted(order) == [1, 2, 3, 4] for order in orders)


def test_a_disturbed_turn_is_repeated_in_its_round(clock: Clock) -> None:
    run = Pretended(clock, 8, 0.01, disturbed=lambda turn: turn == 2)
    take_turns([run], clock)
    assert run.rounds == [0, 1, 1, 2]


def test_a_machine_that_is_always_disturbed_is_measured_as_it_is(clock: Clock) -> None:
    runs = [Pretended(clock, size, 0.01, disturbed=lambda turn: True) for size in (8, 80)]
    take_turns(runs, clock)
    assert sum(len(run.rounds) for run in runs) == 2 * 3 + 2 * REPEATS
    assert all(run.reason for run in runs)


def test_the_time_of_all_runs_has_an_end(clock: Clock) -> None:
    runs = [Pretended(clock, size, 0.01, spread=0.9) for size in (8, 80)]
    take_turns(runs, clock)
    assert [run.reason for run in runs] == ["time was up"] * 2
    assert 2 * SECONDS_A_RUN <= clock.now - 100 <= 2 * SECONDS_A_RUN + 2 * TURN_S


def test_a_run_that_ends_leaves_the_turns_to_the_others(clock: Clock) -> None:
    ends, stays = Pretended(clock, 8, 0.01, turns=1), Pretended(clock, 80, 0.01)
    take_turns([ends, stays], clock)
    assert (ends.rounds, ends.reason) == ([0], "")
    assert stays.reason == "known to ± 2 %"


def test_a_run_that_never_has_a_turn_ends_nothing_else(clock: Clock) -> None:
    never, stays = Pretended(clock, 8, 0.01, turns=0), Pretended(clock, 80, 0.01)
    take_turns([never, stays], clock)
    assert (never.reason, stays.reason) == ("", "known to ± 2 %")


def test_steps_that_are_not_known_are_waited_for_until_the_time_is_up(clock: Clock) -> None:
    run = Pretended(clock, 8, float("nan"))
    take_turns([run], clock)
    assert run.reason == "time was up"


def test_no_runs_take_no_turns(clock: Clock) -> None:
    take_turns([], clock)
