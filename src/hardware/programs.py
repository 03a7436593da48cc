"""The other programs of the same user that use the processor during a run: their names and their shares."""

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

LEAST_SHARE = 0.02  # of the processor; programs below it are not named


class Process(NamedTuple):
    """The state of a process at one time."""

    pid: int
    started: float  # distinguishes it from an earlier process with the same pid
    parent: int
    group: int  # pid of the leader of its process group; 0 if the system has no groups
    name: str
    seconds: float  # of processor time, without that of its children

    @property
    def identity(self) -> tuple[int, float]:
        """The pid and the start time, which no other process has."""
        return self.pid, self.started


class ProgramWatch:
    """Samples the processor time of the user's processes, and returns the programs that took most of it since the first sample.

    A process that begins and ends between two samples is not seen.

    The processes `roots`, their descendants, and the process groups that these lead are excluded. An excluded process stays
    excluded after the end of its parent.
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
        self._sample_times: list[float] = []  # of the first and the last sample
        self._excluded: set[tuple[int, float]] = set()
        self._first_seconds: dict[tuple[int, float], float] = {}  # processor seconds at the first sample
        self._last_seen: dict[tuple[int, float], Process] = {}  # in the last sample that has the process

    def sample(self) -> None:
        """Read the processes."""
        processes = {process.pid: process for process in self._read()}
        excluded = self._roots | {pid for pid, process in processes.items() if process.identity in self._excluded}
        while added := {pid for pid, p in processes.items() if pid not in excluded and {p.parent, p.group} & excluded}:
            excluded |= added
        self._excluded |= {processes[pid].identity for pid in excluded if pid in processes}
        others = {process.identity: process for pid, process in processes.items() if pid not in excluded}
        if not self._sample_times:
            self._first_seconds = {identity: process.seconds for identity, process in others.items()}
        self._last_seen |= others
        self._sample_times = [*self._sample_times[:1], self._clock()]

    def top(self, n: int = 3) -> list[tuple[str, float]]:
        """Return the names of at most n programs with their shares of the processor, the largest first."""
        if len(self._sample_times) < 2 or self._sample_times[1] <= self._sample_times[0]:
            return []
        available = (self._sample_times[1] - self._sample_times[0]) * self._cores()
        shares: defaultdict[str, float] = defaultdict(float)
        for identity, process in self._last_seen.items():
            seconds = process.seconds - self._first_seconds.get(identity, 0.0)
            shares[printable(" ".join(process.name.split()))] += seconds / available
        largest = sorted(shares.items(), key=lambda item: -item[1])[:n]
        return [(name, share) for name, share in largest if share >= LEAST_SHARE]

    def words(self) -> str:
        """Return the largest programs as text: `chrome 35 %, python 20 %`; empty if no program took much."""
        return ", ".join(f"{name} {percent(share)}" for name, share in self.top())

    def most_of(self, share: float) -> str:
        """Return the name of one program, or of two, that took at least half of a share of the processor; else an empty text."""
        names, top_share = [], 0.0
        for name, program_share in self.top(2):
            names.append(name)
            top_share += program_share
            if 2 * top_share >= share:
                return " and ".join(names)
        return ""


def read_processes() -> Iterator[Process]:
    """Yield the user's processes, without those that end meanwhile or deny access; none if the user is unknown."""
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
