"""WaitUntilQuiet: a training begins once the machine has been quiet for some seconds, or the time to wait is up."""

import contextlib
import math
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from batchscope import WaitUntilQuiet
from batchscope.callbacks import wait_until_quiet
from batchscope.callbacks._visits import waiting_seconds
from tests.support.command_lines import refusal


@pytest.fixture
def wait(monkeypatch):
    """A function that waits beside programs with a given share of the processor in each second; returns the seconds waited."""

    def wait_beside(shares, rank: int = 0, stage: str = "fit", minutes: float = 10.0, ranks: int = 1) -> float:
        clock, readings = [0.0], iter(shares)
        monkeypatch.setattr(time, "monotonic", lambda: clock[0])
        monkeypatch.setattr(time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
        meter = SimpleNamespace(read=lambda: SimpleNamespace(others_share=next(readings)))
        monkeypatch.setattr(wait_until_quiet, "NoiseMeter", lambda: meter)
        callback = WaitUntilQuiet(minutes)
        with contextlib.suppress(KeyboardInterrupt):
            callback.setup(Mock(is_global_zero=rank == 0, world_size=ranks), Mock(), stage)
        return waiting_seconds([callback])

    return wait_beside


def test_three_quiet_seconds_in_a_row_are_waited_for(wait, capsys):
    assert wait([0.5, 0.02, 0.02, 0.3, 0.05, 0.0, 0.09]) == 7
    assert "waiting for a quiet machine: other programs take 50 % of the processor" in capsys.readouterr().out


def test_after_the_time_the_training_begins_with_a_warning(wait, capsys):
    assert wait([0.5] * 90, minutes=1.0) == 60
    assert capsys.readouterr().err == ("warning: other programs still take the processor after 60 s: training begins\n")


def test_a_wait_that_a_signal_ends_is_known_too(wait):
    def interrupted():
        yield from [0.5, 0.5]
        raise KeyboardInterrupt

    assert wait(interrupted()) == 3


@pytest.mark.parametrize("facts", [{"rank": 1}, {"stage": "test"}])
def test_other_ranks_and_stages_wait_for_nothing(facts, wait):
    assert wait([], **facts) == 0


def test_where_no_load_can_be_read_nothing_is_waited_for(wait):
    assert wait([math.nan] * 3) == 3


@pytest.mark.parametrize("rank", [0, 1])
def test_several_ranks_do_not_begin_a_wait_that_may_be_longer_than_they_wait_for_each_other(rank, wait):
    message = refusal(wait, [], rank=rank, ranks=2, minutes=30.0)
    assert message.startswith("callbacks.wait_until_quiet.minutes: got 30, takes less than 30 with several ranks")
    assert wait([], rank=rank, ranks=2, minutes=30.0, stage="test") == 0
    assert wait([0.0] * 3, ranks=2, minutes=29.0) == wait([0.0] * 3, minutes=30.0) == 3
