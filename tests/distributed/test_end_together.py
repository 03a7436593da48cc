"""Ranks meet and end together: child processes never outlive the process that started them."""

import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch.distributed

from batchscope.distributed import agreement, rendezvous
from batchscope.errors import Interrupted, UserError


def sleepers(count: int) -> list[subprocess.Popen]:
    """Start processes that would end long after a test."""
    return [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in range(count)]


def trainer(processes: list[Any]) -> Any:
    return SimpleNamespace(strategy=SimpleNamespace(launcher=SimpleNamespace(procs=processes)), is_global_zero=True)


def test_all_ranks_share_one_time_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_GRACE_S", 0.5)
    processes, started = sleepers(3), time.monotonic()
    with agreement.end_together(trainer([*processes])):
        pass
    assert time.monotonic() - started < 1.4
    assert [process.returncode for process in processes] == [-9] * 3


@pytest.mark.parametrize("agreed", [True, False])
def test_ranks_that_have_not_agreed_on_a_signal_get_no_time_to_end_by_themselves(agreed, monkeypatch) -> None:
    monkeypatch.setattr(agreement, "_GRACE_S", 0.5)
    monkeypatch.setattr(agreement, "_FAILURE_GRACE_S", 0.0)
    processes, started = sleepers(1), time.monotonic()
    with pytest.raises(Interrupted), agreement.end_together(trainer([*processes])):
        raise Interrupted(signal.SIGTERM, agreed)
    assert (processes[0].returncode, time.monotonic() - started >= 0.5) == (-9, agreed)


def test_a_signal_while_it_waits_leaves_no_rank_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = sleepers(2)
    real = processes[0].wait

    def interrupted(timeout: float | None = None) -> int:
        processes[0].wait = real
        raise KeyboardInterrupt

    processes[0].wait = interrupted
    with pytest.raises(KeyboardInterrupt), agreement.end_together(trainer([*processes])):
        pass
    assert [process.returncode for process in processes] == [-9, -9]


@pytest.mark.parametrize(("backend", "error", "aborts"), [
    ("nccl", RuntimeError("Connection closed by peer"), 1), ("gloo", RuntimeError("Connection closed by peer"), 0),
    ("nccl", UserError("an error of all ranks"), 0), ("nccl", Interrupted(signal.SIGINT), 0),
])  # fmt: skip
def test_what_nccl_waits_for_is_aborted_before_lightning_ends(backend, error, aborts, monkeypatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: backend)
    monkeypatch.setattr(agreement, "_GRACE_S", 0.0)  # in which a rank ends by itself
    abort = Mock()
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_abort_process_group", abort)
    watched = sleepers(1)
    of_two = trainer(watched)
    of_two.world_size = 2
    with pytest.raises(type(error)), agreement.end_together(of_two):
        agreement.abort_waiting(of_two, Mock(), error)
        (lost,) = of_two.strategy.launcher.procs
        # Lightning's watcher kills this process by the list, while it may still upload its last points.
        assert not watched
        raise error
    assert (abort.call_count, lost.returncode) == (aborts, -9)


@pytest.mark.parametrize(("backend", "watches"), [("nccl", True), ("gloo", False)])
def test_lightning_kills_for_a_lost_rank_where_nothing_else_notices_that(backend, watches, monkeypatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: backend)
    watched = [Mock()]
    agreement.record_lost_ranks(of_two := trainer(watched))
    assert (bool(watched), len(of_two.strategy.launcher.procs)) == (watches, 1)


def test_processes_that_cannot_meet_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_store", None)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rendezvous, "_TIMEOUT", rendezvous.timedelta(seconds=0.2))
    with pytest.raises(UserError, match=r"^the 2 processes do not meet at 127.0.0.1:1: Dist"):
        rendezvous._rendezvous_store(SimpleNamespace(launcher="torchrun", rank=1, world_size=2))
