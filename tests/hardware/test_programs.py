"""Which programs take the processor: fabricated processes, and a real process that keeps a core busy."""

import os
import subprocess
import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest

from batchscope.hardware import programs
from batchscope.hardware.programs import Process, ProgramWatch
from tests.support.waiting import wait_until

RUN, SHELL = 100, 1  # the PID of the run, which is left out, and of its parent


def process(pid, name, seconds, parent=SHELL, group=None, started=0.0):
    return Process(pid, started, parent, group or pid, name, seconds)


def watch(*samples, cores=2.0, seconds=10.0):
    """A ProgramWatch after these samples (lists of running processes), which follow each other by `seconds`."""
    times = iter([number * seconds for number in range(len(samples))])
    lists = iter(samples)
    watched = ProgramWatch([RUN], lambda: next(lists), lambda: next(times), lambda: cores)
    for _ in samples:
        watched.sample()
    return watched


def test_programs_are_named_by_their_share_of_the_processor_since_the_first_sample():
    before = [process(2, "chrome", 50.0), process(3, "python", 7.0), process(4, "idle", 9.0)]
    after = [process(2, "chrome", 57.0), process(3, "python", 11.0), process(4, "idle", 9.3)]
    watched = watch(before, after)
    assert watched.top() == [("chrome", 0.35), ("python", 0.2)]
    assert watched.words() == "chrome 35 %, python 20 %"


def test_processes_of_one_name_are_one_program():
    assert watch([], [process(2, "chrome", 1.0), process(3, "chrome", 3.0)]).top() == [("chrome", 0.2)]


def test_the_largest_programs_are_named_and_no_small_one():
    seconds_by_name = {"a": 3.0, "b": 5.0, "c": 4.0, "d": 1.0, "e": 0.39}
    after = [process(pid, name, seconds) for pid, (name, seconds) in enumerate(seconds_by_name.items(), 2)]
    assert [name for name, _ in watch([], after).top()] == ["b", "c", "a"]
    assert [name for name, _ in watch([], after).top(9)] == ["b", "c", "a", "d"]


OWN = {
    "itself": process(RUN, "python", 9.0),
    "a child": process(101, "worker", 9.0, RUN),
    "of a child": process(103, "worker", 9.0, 101),
    "of its group, and adopted": process(104, "worker", 9.0, 1, RUN),
}


@pytest.mark.parametrize("name", OWN)
def test_the_processes_of_the_run_are_left_out(name):
    family = [process(RUN, "python", 0.0), process(101, "worker", 0.0, RUN)]
    after = {member.pid: member for member in (*family, process(2, "chrome", 2.0), OWN[name])}
    assert watch(family, [*after.values()]).top() == [("chrome", 0.1)]


def test_a_process_whose_parent_has_ended_is_still_the_runs():
    family = [process(RUN, "python", 0.0), process(101, "worker", 0.0, RUN)]
    assert watch(family, [process(RUN, "python", 0.0), process(101, "worker", 9.0, SHELL)]).top() == []


def test_what_shares_a_group_with_the_run_is_another_program_where_the_run_does_not_lead_it():
    """As in a shell script, all of whose jobs are in the group of the shell."""
    family = [process(RUN, "python", 0.0, SHELL, SHELL)]
    assert watch(family, [*family, process(2, "make", 2.0, SHELL, SHELL)]).top() == [("make", 0.1)]


def test_a_process_that_has_ended_counts_as_far_as_it_was_seen():
    assert watch([], [process(2, "make", 4.0)], []).top() == [("make", 0.1)]


def test_a_number_that_is_used_again_is_another_process():
    assert watch([process(2, "old", 9.0)], [process(2, "new", 2.0, started=5.0)]).top() == [("new", 0.1)]


@pytest.mark.parametrize("samples", [[], [[process(2, "chrome", 9.0)]]])
def test_nothing_is_known_before_the_second_sample(samples):
    assert (watch(*samples).top(), watch(*samples).words()) == ([], "")


@pytest.mark.parametrize(("share", "names"), [(0.4, "a"), (0.6, "a and b"), (0.8, "")])
def test_a_load_is_mostly_of_the_fewest_programs_that_took_half_of_it(share, names):
    after = [process(2, "a", 4.0), process(3, "b", 3.0), process(4, "c", 2.0)]
    assert watch([], after).most_of(share) == names


def test_a_name_is_safe_to_print():
    assert watch([], [process(2, "a\x1b[31m\nb", 2.0)]).words() == "a\ufffd[31m b 10 %"


@pytest.fixture
def busy():
    """A process that keeps a core busy."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        yield child
        child.kill()


def spent(child):
    return sum(psutil.Process(child.pid).cpu_times()[:2])


def test_a_real_program_is_seen_unless_it_is_the_runs(busy):
    all_programs, without_own = ProgramWatch([]), ProgramWatch([os.getpid()])
    begun, at_least = time.monotonic(), spent(busy) + 0.15
    all_programs.sample()
    without_own.sample()
    wait_until(lambda: spent(busy) >= at_least, "the process computes nothing")
    all_programs.sample()
    without_own.sample()
    name, core_seconds = psutil.Process(busy.pid).name(), (time.monotonic() - begun) * programs.usable_cores()
    share = dict(all_programs.top(99))[name] - dict(without_own.top(99)).get(name, 0.0)
    assert share * core_seconds >= 0.1
    child = {process.pid: process for process in programs.read_processes()}[busy.pid]
    assert (child.name, child.parent) == (name, os.getpid())


@pytest.mark.parametrize("error", [psutil.NoSuchProcess(2), psutil.AccessDenied(2), ProcessLookupError()])
def test_a_process_that_ends_or_is_refused_while_it_is_read_is_left_out(error, monkeypatch):
    ended, own_pid = SimpleNamespace(oneshot=nullcontext, uids=Mock(side_effect=error)), os.getpid()
    fields = {"create_time": 1.0, "ppid": 1, "name": "python", "cpu_times": (2.0, 1.0)}
    fields["uids"] = SimpleNamespace(real=os.getuid())
    own_process = SimpleNamespace(
        pid=own_pid, oneshot=nullcontext, **{name: Mock(return_value=value) for name, value in fields.items()}
    )
    monkeypatch.setattr(psutil, "pids", lambda: [2, own_pid])
    monkeypatch.setattr(psutil, "Process", {2: ended, own_pid: own_process}.__getitem__)
    assert [(process.pid, process.seconds) for process in programs.read_processes()] == [(own_pid, 3.0)]


@pytest.mark.parametrize("error", [psutil.AccessDenied(2), OSError("no mapping between account names and IDs")])
def test_where_nobody_tells_the_user_no_program_is_known(error, monkeypatch):
    monkeypatch.setattr(programs, "user_and_group", Mock(side_effect=error))
    assert [*programs.read_processes()] == []
