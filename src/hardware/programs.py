"""Which other programs of the same user take the processor while a run is measured: their names and their shares."""

import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import psutil

from .._system import user_and_group
from ..errors import printable
from ..records.formatting import percent
from .processor import usable_cores

LEAST_SHARE = 0.02  # of the processor; a program that took less is not named


class Process(NamedTuple):
    """What is known of a process at a moment."""

    pid: int
    started: float  # tells it from an earlier process of the same number
    parent: int
    group: int  # the number of the process that leads its group, 0 where there are none
    name: str
    seconds: float  # of processor time, without its children's

    @property
    def identity(self) -> tuple[int, float]:
        """What no other process has."""
        return self.pid, self.started


class ProgramWatch:
    """Samples the processor time of the user's processes, and says which programs took most of it since the first sample.

    A process that begins and ends between two samples is not seen.

    Left out are the processes `roots`, their descendants and the groups that these lead. Who was left out once stays
    so, also when its parent has ended.
    """

    def __init__(
        self,
        roots: Iterable[int],
        read: Callable[[], Iterable[Process]] | None = None,
        clock: Callable[[], float] = time.monotonic,
        cores: Callable[[], float] = usable_cores,
    ):
        self._roots = frozenset(roots)
        self._read, self._clock, self._cores = read or read_processes, clock, cores
        self._times: list[float] = []  # of the first and the last sample
        self._own: set[tuple[int, float]] = set()
        self._before: dict[tuple[int, float], float] = {}  # seconds at the first sample
        self._seen: dict[tuple[int, float], Process] = {}  # as it was last

    def sample(self) -> None:
        """Read the processes."""
        processes = {process.pid: process for process in self._read()}
        own = self._roots | {pid for pid, process in processes.items() if process.identity in self._own}
        while more := {pid for pid, each in processes.items() if pid not in own and {each.parent, each.group} & own}:
            own |= more
        self._own |= {processes[pid].identity for pid in own if pid in processes}
        others = {process.identity: process for pid, process in processes.items() if pid not in own}
        if not self._times:
            self._before = {identity: process.seconds for identity, process in others.items()}
        self._seen |= others
        self._times = [*self._times[:1], self._clock()]

    def top(self, n: int = 3) -> list[tuple[str, float]]:
        """The names of at most n programs and the share of the processor that each took, the largest first."""
        if len(self._times) < 2 or self._times[1] <= self._times[0]:
            return []
        available = (self._times[1] - self._times[0]) * self._cores()
        shares: defaultdict[str, float] = defaultdict(float)
        for identity, process in self._seen.items():
            taken = process.seconds - self._before.get(identity, 0.0)
            shares[printable(" ".join(process.name.split()))] += taken / available
        largest = sorted(shares.items(), key=lambda item: -item[1])[:n]
        return [(name, share) for name, share in largest if share >= LEAST_SHARE]

    def words(self) -> str:
        """`chrome 35 %, python 20 %`; empty if no program took much."""
        return ", ".join(f"{name} {percent(share)}" for name, share in self.top())

    def most_of(self, share: float) -> str:
        """The program, or the two, that took half or more of a share of the processor; empty if these are not known."""
        names, taken = [], 0.0
        for name, part in self.top(2):
            names.append(name)
            taken += part
            if 2 * taken >= share:
                return " and ".join(names)
        return ""


def read_processes() -> Iterator[Process]:
    """The user's processes; one that ends meanwhile or is refused is left out, and all where nobody tells the user."""
    try:
        user, _ = user_and_group(psutil.Process(os.getpid()))
    except (OSError, psutil.Error):
        return
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error), (process := psutil.Process(pid)).oneshot():
            owner, group = user_and_group(process)
            if owner == user:
                seconds = sum(process.cpu_times()[:2])
                yield Process(pid, process.create_time(), process.ppid(), group, process.name(), seconds)
