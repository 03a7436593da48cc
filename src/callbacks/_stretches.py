"""The stretches of a run: short bouts of steps, each with what disturbed the machine meanwhile."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy
import torch
from numpy.typing import NDArray

from ..hardware.contention import Noise, NoiseMeter, is_disturbed
from ..hardware.speed_probe import SpeedProbe
from ..records.formatting import count, percent, significant
from ..records.intervals import TIME_LIMIT

STRETCH_S = (
    0.25  # the shortest; of a shorter one the shares are mostly rounding, since the system counts ticks of 10 ms
)
TELLING_S = 0.15  # of less, these ticks are too few for a share
_GROWTH = 0.02  # of the time so far: a long run has longer stretches instead of more and more of them
OUTSIDE = -1  # the round of a stretch that is no turn

Clock = Callable[[], float]


@dataclass
class Stretch:
    """Successive updates, from number `first` (counted from 0) up to the next stretch's first or `end`."""

    first: int
    round: int
    start_unix: float
    began: float
    end: int | None = None  # the number of the update after its last one; None while it lasts
    seconds: float = 0.0
    noise: Noise = field(default_factory=Noise)
    probe_s: float = math.nan


class Stretches:
    """Divides a run into stretches, and reads the noise at their borders, which lie between two updates.

    Stretches follow each other by the clock, until `take_turns`: then they are begun and ended by who gives the turns.

    Args:
        device: that trains.
        first: the update (counted from 0) before which the first stretch begins: those before are warm-up.
        clock, unix: the time, and the time of day.
    """

    def __init__(self, device: torch.device, first: int, clock: Clock = time.perf_counter, unix: Clock = time.time):
        self.all: list[Stretch] = []
        self.by_turns = False
        self.first = first
        self._device = device
        self._clock, self._unix = clock, unix
        self._began = clock()
        self._meter: NoiseMeter | None = None
        self._probe = SpeedProbe(device, clock)

    @property
    def current(self) -> Stretch | None:
        """The one that lasts."""
        return self.all[-1] if self.all and self.all[-1].end is None else None

    def is_due(self, update: int) -> bool:
        """Whether a stretch should end or begin before this update."""
        if self.by_turns or update < self.first:
            return False
        current, now = self.current, self._clock()
        if current is None:
            return True
        if now < current.began:  # the clock has jumped back
            return True
        return update > current.first and now - current.began >= max(STRETCH_S, _GROWTH * (now - self._began))

    def begin(self, update: int, turn: int = OUTSIDE) -> None:
        """Begin a stretch with this update; the one that lasts ends."""
        self.end(update)
        if self._meter is None:
            self._meter = NoiseMeter(self._device)
        else:
            self._meter.read()  # what happened since the last stretch is in none
        self.all.append(Stretch(update, turn, self._unix(), self._clock()))

    def end(self, update: int) -> Stretch | None:
        """End the stretch that lasts before this update; None if none lasts. One without an update is dropped."""
        current = self.current
        if current is None or self._meter is None:
            return None
        current.seconds = max(self._clock() - current.began, 0.0)
        current.noise = self._meter.read()
        current.probe_s = self._probe.read()
        current.end = update
        if update <= current.first:
            self.all.pop()
            return None
        return current

    def of_updates(self, numbers: NDArray[numpy.int64]) -> NDArray[numpy.int64]:
        """The index of the stretch of each update, by their numbers (N,); -1 for one in none."""
        if not self.all:
            return numpy.full(len(numbers), -1)
        found = numpy.searchsorted([stretch.first for stretch in self.all], numbers, "right") - 1
        ends = numpy.array([numpy.inf if stretch.end is None else stretch.end for stretch in self.all])
        return numpy.where(numbers < ends[found], found, -1)

    def disturbed(self) -> NDArray[numpy.bool_]:
        """Which stretches are, by the rule in hardware/contention.py; the one that lasts is not known to be."""
        probes = [stretch.probe_s for stretch in self.all if not math.isnan(stretch.probe_s)]
        usual = median(probes) if probes else math.nan
        return numpy.array([is_disturbed(stretch.noise, stretch.probe_s, usual) for stretch in self.all], bool)

    def noise(self, slowed_alone: bool) -> list[Noise]:
        """What disturbed each ended stretch that is long enough to tell; with `slowed_alone` nothing if by the rule none did."""
        found = zip(self.all, self.disturbed(), strict=True)
        known = [(each.noise, bad) for each, bad in found if each.end is not None and each.seconds >= TELLING_S]
        return [noise if bad or not slowed_alone else Noise(0.0, 0.0) for noise, bad in known]

    def facts(self) -> dict[str, Any]:
        """For the run's summary: how many stretches there are, how many disturbed, and the shares over all of them."""
        ended = [stretch for stretch in self.all if stretch.end is not None]
        if not ended:
            return {}
        facts: dict[str, Any] = {"stretches": len(ended), "disturbed_stretches": int(self.disturbed().sum())}
        for name in ("others_share", "steal_share"):
            known = [(getattr(each.noise, name), each.seconds) for each in ended]
            known = [(share, seconds) for share, seconds in known if not math.isnan(share) and seconds > 0]
            if known:
                facts[name] = sum(share * s for share, s in known) / sum(s for _, s in known)
        return facts


def median_words(summary: Mapping[str, Any]) -> str:
    """The median step with its interval, and why a timed run has ended: `12.3 ms (12.1 to 12.5, known to ± 5 %)`."""
    interval = " to ".join(map(significant, summary.get("step_ms_interval", ())))
    ended = summary.get("ended")
    ended = "at its time limit" if ended == TIME_LIMIT else ended
    within = ", ".join(filter(None, (interval, ended)))
    return f"{significant(summary['step_ms_median'])} ms" + (f" ({within})" if within else "")


def noise_words(summary: Mapping[str, Any]) -> str | None:
    """A line on windows that something else has slowed, for a run's details; None if there were none."""
    bad, windows = summary.get("disturbed_stretches", 0), summary.get("stretches", 0)
    if not bad:
        return None
    shares = [
        f", {who} {percent(summary[key])} of the processor"
        for key, who in (("others_share", "other programs used"), ("steal_share", "the hypervisor took"))
        if summary.get(key, 0.0) >= 0.01
    ]
    enough = "undisturbed_steps" in summary
    median_is = "the median is of the others" if enough else "the others have too few steps, so the median is of all"
    return f"{bad} of {count(windows, 'window')} slowed from outside{''.join(shares)}; {median_is}"
