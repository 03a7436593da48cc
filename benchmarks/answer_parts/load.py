"""Foreign load: processes beside a measurement that take a share of the processor.

    python load.py light <seed> <parent's pid>

A process of this file follows a schedule of busy and idle times, and ends when its parent has ended.
"""

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

CONDITIONS = ("quiet", "light", "bursts")
Schedule = Iterator[tuple[float, float]]  # seconds busy, then seconds idle


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def light(seed: int, count: int = 1) -> Schedule:
    """Busy for 10 to 20 % of the machine, which has so many cores, in slices of 2 to 8 ms; another share each second."""
    dice, processes = random.Random(seed), -(-count // 5)
    while True:
        share, spent = dice.uniform(0.1, 0.2) * count / processes, 0.0
        while spent < 1:
            busy = dice.uniform(0.002, 0.008)
            spent += busy / share
            yield busy, busy / share - busy


def bursts(seed: int, count: int = 1) -> Schedule:
    """Busy in bursts of 0.2 to 3 s, half of the time."""
    dice = random.Random(seed)
    while True:
        yield dice.uniform(0.2, 3), dice.uniform(0.2, 3)


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {"light": light, "bursts": bursts}


def processes_of(condition: str, count: int) -> int:
    """How many processes make the load on so many cores: a light one needs a fifth of them, a burst takes all."""
    return {"quiet": 0, "light": -(-count // 5), "bursts": count}[condition]


@contextlib.contextmanager
def beside(condition: str, seed: int) -> Iterator[None]:
    """Make the load of a condition; its processes are gone afterwards. Those of `bursts` have the same bursts."""
    count = cores()
    seeds = [seed if condition == "bursts" else 1000 * seed + n for n in range(processes_of(condition, count))]
    words = [[sys.executable, __file__, condition, str(each), str(os.getpid())] for each in seeds]
    started = [subprocess.Popen(each) for each in words]
    try:
        yield
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()


def main(condition: str, seed: int, parent: int) -> None:
    """Follow the schedule by the clock, so that processes with the same seed stay together."""
    now = time.monotonic()
    for busy, idle in SCHEDULES[condition](seed, cores()):
        while time.monotonic() < now + busy:
            pass
        now += busy + idle
        if os.getppid() != parent:
            return
        time.sleep(max(now - time.monotonic(), 0))
        now = max(now, time.monotonic() - 1)  # one that was starved does not make up for more than a second


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
