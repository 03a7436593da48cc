"""How well rates are known: windows of runs → the rate of each setting, and the interval of a ratio of two.

A window is a short time of successive steps (windows.py). The log time of a sample in a window of run r in pass p is

    y = a_r + d_p + e

d_p is what made a whole pass slow or fast, so drift is in no ratio of settings that share passes. A pass counts for all of its
settings. Within a pass each window meets another load. Of batch sizes, which are compared at equal load, the model is

    y = a_r + d_p + b · (x - mean of x) + e

x is the share of the processor that others took in the window, and b, one slope for all, is estimated within passes (analysis
of covariance). Nothing is extrapolated: rates are those at the mean load of all windows. The error of b widens a ratio in
proportion to the difference of its settings' mean loads. b is not estimated where fewer than ten degrees of freedom are left. It
would be wrong for settings that have a part in what others get of the processor, such as the number of threads.

The variance of the noise e is that of a run's own windows, moderated by that of a typical run (Smyth 2004), and widened by the
autocorrelation: beside a load, runs of small batches are noisier than others by a multiple, and a few windows alone tell a
variance badly. Runs that share no pass with others (two sessions, or a new pair of processes in each pass) are in blocks of
their own. What a block differs by is taken out, too, so repeated runs count by what they differ by within blocks. Processes of
the same thing differ by something that no window shows: a measured constant is assumed.

Settings that share no passes were measured one after the other, and the machine may have changed meanwhile. By how much
such runs differ is estimated from what the two halves of each run differ by, or from repeated runs if these differ by more.
What changes more slowly than a run shows in neither: a measured constant is assumed, too. Of such runs disturbed
windows are left out, and other programs may have lowered a rate by what they took of the processor: the interval reaches that
much further.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from scipy.sparse.linalg import lsqr
from scipy.special import stdtrit

from ..records.rates import LOAD_SAID

CONFIDENCE = 0.9  # of the interval of a single rate or ratio
STATED = 0.95  # that all comparisons of one statement hold together
FEWEST = 3  # windows of a run, and passes that two settings share: fewer have no spread to speak of
USUAL_SHARE = 0.05  # of the processor, taken by others and the hypervisor when a machine is quiet
_VAGUE = 1e4  # the ratio of an interval's ends from which on it says nothing
BETWEEN = 0.1  # standard deviation of log rates between separate runs, as on a CPU (benchmarks/compare.py)
_FEW = 4  # degrees of freedom of repeated runs, below which they do not decide alone what runs differ by
PROCESSES = 0.01  # the same between processes that share passes (benchmarks/results/diagnose.md)
_LARGEST = 700  # whose exponential is a number
WORTH = 10.0  # degrees of freedom of what is not estimated
_TYPICAL = 4.0  # degrees of freedom by which the typical run moderates a run's variance (benchmarks/simulated.py)
_ROUNDING = 1e-20  # smaller squares of log times are not noise
_EXACT = 1e-12  # the relative error of least squares
_MOST_ALIKE = 0.8  # autocorrelation of neighbours: of few values, more cannot be told from drift


def ratio_text(value: float, digits: int = 2) -> str:
    """A ratio with so many decimals: `1.21`; below 0.1 with two significant digits: `0.012`."""
    return f"{value:.{digits}f}" if value >= 0.1 else f"{value:#.2g}"


@dataclass(frozen=True)
class Ratio:
    """A ratio and its interval, which is from 0 to infinity where nothing is known of its spread."""

    value: float
    low: float
    high: float

    @property
    def reach(self) -> float:
        """How far the interval reaches to either side, as a fraction of the ratio."""
        return max(self.high / self.value, self.value / self.low if self.low > 0 else math.inf) - 1

    @property
    def span(self) -> str:
        """`1.21 to 1.62`; empty where the interval says nothing."""
        if not self.low or self.high >= _VAGUE * self.low:
            return ""
        digits = 3 if min(abs(self.low - 1), abs(self.high - 1)) < 0.005 else 2  # whether it holds 1 is to be seen
        return f"{ratio_text(self.low, digits)} to {ratio_text(self.high, digits)}"


class _Spread(NamedTuple):
    """A variance and its degrees of freedom; infinite where it is not known."""

    variance: float = math.inf
    freedom: float = 1.0


class Rates:
    """The rates of settings that are compared with each other. A setting is a batch size, or a side of a comparison.

    Args:
        windows: with the columns of `windows_of`. Of a run that shares passes these alone count: a training that goes on
            after them is alone.
        between: a standard deviation that separate runs of the same thing are taken to differ by, in logs, where settings
            share no passes. It counts as ten repeated runs beside those that there are.
        processes: a standard deviation, in logs, that processes of the same thing differ by although they share passes.
        at_equal_load: whether settings that share passes are compared at equal load, see above.
    """

    def __init__(
        self,
        windows: pd.DataFrame,
        between: float | None = None,
        processes: float = 0.0,
        at_equal_load: bool = False,
    ):
        self._processes = processes
        self.settings: list[int] = list(dict.fromkeys(windows["setting"]))
        used = _used(windows)
        self._component = _connected(used["setting"], used["pass_"], FEWEST)
        # A setting with passes is not compared by runs that share none, nor by what runs did after them.
        is_shared = used.groupby("pass_")["setting"].transform("nunique") > 1
        sharing = used["run"][is_shared].unique()

        def counted(of: pd.DataFrame) -> pd.DataFrame:
            is_alone = ~of["setting"].map(self._shares_passes).astype(bool)
            return of[is_alone | of["run"].isin(sharing) & of["pass_"].notna()]

        used, self.windows = counted(used), counted(windows)
        runs = used.groupby("run", sort=False)
        self._setting_of = runs["setting"].first()  # of each run
        self._center: dict[int, float] = runs["log_s"].mean().to_dict()  # of each run
        self._spread: dict[int, _Spread] = {}  # of a run beside others of its component
        self._load: dict[int, float] = {}  # of a setting: what the error of the slope means for it
        blocks = 0  # beyond the first of each component
        for number in set(self._component.values()):
            members = used[used["setting"].map(self._component) == number]
            if members["setting"].nunique() > 1:
                center, spread, more, load = _within_passes(members, at_equal_load)
                for setting, of_setting in members.groupby("setting")["run"].unique().items():
                    self._load[int(str(setting))] = float(np.mean([load.get(run, 0.0) for run in of_setting]))
                self._center |= center
                blocks += more
            else:
                spread = _alone(members)
            self._spread |= spread
        self._repeats = _of_repeats(self._by_setting(self._center), blocks)
        apart = _pooled(self._repeats, None if between is None else _Spread(between**2, WORTH))
        self._between = max((one for one in (_of_halves(used), apart) if one), default=_Spread())
        taken = used["taken"].sub(USUAL_SHARE).clip(0, 0.9)
        self._slowed = taken.groupby(used["setting"]).mean().to_dict()

    def rate(self, setting: int) -> float:
        """Samples a second."""
        return math.exp(-float(np.mean(self._by_setting(self._center)[setting])))

    def reach(self, setting: int, others: bool = True) -> float:
        """How far the 90 % interval of a rate reaches, as a fraction of it; infinite where it is not known.

        `others`: with what other programs may have lowered it by.
        """
        spread = self._of(setting, self._shares_passes(setting))
        variance = spread.variance + self._load.get(setting, 0.0) ** 2
        half = stdtrit(spread.freedom, (1 + CONFIDENCE) / 2) * math.sqrt(variance)
        half -= math.log1p(-self._slowed[setting]) if others else 0.0
        return math.expm1(half) if half < _LARGEST else math.inf

    def ratio(self, a: int, b: int, confidence: float = CONFIDENCE) -> Ratio:
        """The rate of a ÷ that of b. Of settings that share no passes, others may have slowed one alone: that is allowed for."""
        if a == b:
            return Ratio(1.0, 1.0, 1.0)
        value = self.rate(a) / self.rate(b)
        together = self.together(a, b)
        one, two = self._of(a, together), self._of(b, together)
        variance = one.variance + two.variance
        variance += (self._load[a] - self._load[b]) ** 2 if together else 0.0
        if not math.isfinite(variance):
            return Ratio(value, 0.0, math.inf)
        half = stdtrit(min(one.freedom, two.freedom), (1 + confidence) / 2) * math.sqrt(variance)
        low, high = (half - (0.0 if together else math.log1p(-self._slowed[setting])) for setting in (b, a))
        return Ratio(value, value * math.exp(-min(low, _LARGEST)), value * math.exp(min(high, _LARGEST)))

    def together(self, a: int, b: int) -> bool:
        """Whether two settings were measured in the same passes, and not one after the other."""
        return self._component[a] == self._component[b]

    @property
    def load(self) -> float | None:
        """The mean share of the processor that other programs took, if it is worth a word."""
        return mean_load(self.windows)

    @property
    def passes(self) -> int:
        """In how many passes settings were measured side by side, of all such sets of settings the most; 0 where no two were."""
        shared = self.windows[self.windows["setting"].map(self._shares_passes).astype(bool)]
        passes = shared.groupby(shared["setting"].map(self._component))["pass_"].nunique()
        return int(passes.max()) if len(passes) else 0

    @property
    def is_side_by_side(self) -> bool:
        """Whether all settings were measured in the same passes."""
        return len(self._component) > 1 and len(set(self._component.values())) == 1

    def _shares_passes(self, setting: int) -> bool:
        return list(self._component.values()).count(self._component[setting]) > 1

    def _by_setting(self, of_run: dict[int, float]) -> dict[int, list[float]]:
        return {s: [of_run[run] for run in self._setting_of.index[self._setting_of == s]] for s in self.settings}

    def _of(self, setting: int, together: bool) -> _Spread:
        """The spread of a setting's center, beside settings with the same passes (`together`) or others."""
        spreads = [self._spread[run] for run in self._setting_of.index[self._setting_of == setting]]
        noise = _Spread(sum(one.variance for one in spreads) / len(spreads), min(one.freedom for one in spreads))
        repeats = self._repeats or noise
        if self._repeats and not math.isfinite(noise.variance):  # too few windows, which repeated runs make up for
            noise = self._repeats
        elif self._repeats and self._repeats.freedom < _FEW:  # hardly known: the windows' noise counts beside them
            repeats = _pooled(self._repeats, noise._replace(freedom=WORTH)) or noise
        found = max(noise, repeats if together else self._between)
        beyond = self._processes**2 if together else 0.0
        return _Spread(found.variance / len(spreads) + beyond, found.freedom)


def mean_load(windows: pd.DataFrame) -> float | None:
    """The mean share of the processor that other programs took in some windows, if it is worth a word."""
    share = float(windows["taken"].mean()) if len(windows) else 0.0
    return share if share >= LOAD_SAID else None


def simultaneous(comparisons: int) -> float:
    """The confidence of a two-sided interval each end of which is one of so many bounds that hold together (Šidák)."""
    return 2 * STATED ** (1 / max(comparisons, 1)) - 1


def _used(windows: pd.DataFrame) -> pd.DataFrame:
    """All windows of passes, and the undisturbed ones of runs alone.

    Of a run alone with hardly any undisturbed windows, all count if every run of its setting is such a run, otherwise none.
    """
    in_passes = windows["pass_"].notna()
    quiet = in_passes | ~windows["disturbed"].astype(bool)
    of_run = quiet.groupby(windows["run"])
    is_lost = ~of_run.transform("all") & (of_run.transform("sum") < FEWEST)
    return windows[(quiet & ~is_lost) | is_lost.groupby(windows["setting"]).transform("all")]


def _connected(members: pd.Series, passes: pd.Series, fewest: int) -> dict[int, int]:
    """A number for each member: those that share so many passes, directly or by others, have the same."""
    names = list(dict.fromkeys(members))
    present = pd.crosstab(members, passes).reindex(names, fill_value=0).clip(upper=1).to_numpy(dtype=int)
    common = present @ present.T
    return dict(zip(names, connected_components(common >= fewest)[1].tolist(), strict=True))


def _within_passes(
    windows: pd.DataFrame, at_equal_load: bool
) -> tuple[dict[int, float], dict[int, _Spread], int, dict[int, float]]:
    """Center and spread of each run by least squares, in each block a number for each run and each pass; more blocks; load."""
    cells = windows.groupby(["setting", "run", "pass_"], sort=False)[["log_s", "taken"]].mean().reset_index()
    block = cells["run"].map(_connected(cells["run"], cells["pass_"], 1)).to_numpy()
    freedom = len(cells) - cells["run"].nunique() - cells["pass_"].nunique() + int(block.max()) + 1
    load: dict[int, float] = {}
    if at_equal_load and freedom > WORTH and (found := _slope(cells, block, freedom - 1)):
        slope, load = found
        freedom -= 1
        cells["log_s"] -= slope * (cells["taken"] - cells["taken"].mean())
    center, residuals = {}, {}
    for _, members in cells.groupby(block):
        of_run, e = _two_way(members["log_s"], members["run"], members["pass_"])
        center |= of_run
        residuals |= dict(list(e.groupby(members["run"])))
    spread = _spreads({int(run): e.to_numpy() for run, e in residuals.items()}, freedom)
    if block.max():
        firsts = cells.assign(block=block).drop_duplicates("run")
        y = firsts["run"].map(center)
        of_setting, e = _two_way(y, firsts["setting"], firsts["block"])
        center = dict(zip(firsts["run"].astype(int), firsts["setting"].map(of_setting) + e, strict=True))
    return center, spread, int(block.max()), load


def _slope(cells: pd.DataFrame, block: np.ndarray, freedom: int) -> tuple[float, dict[int, float]] | None:
    """By how much the log time grows with what others take, within runs and passes; None of equal loads.

    The noise of a loaded window is larger than that of a quiet one, so the variance is at least the one that allows for that
    (White 1980).
    """
    x, y = (
        np.concatenate([_two_way(of[name], of["run"], of["pass_"])[1] for _, of in cells.groupby(block)])
        for name in ("taken", "log_s")
    )
    differs = cells.groupby("run")["taken"].mean() - cells["taken"].mean()
    if (square := float((x**2).sum())) <= len(x) * _ROUNDING:
        return None
    slope = float((x * y).sum()) / square
    e = y - slope * x
    variance = max(float((e**2).sum()) / square, len(x) * float(((x * e) ** 2).sum()) / square**2) / freedom
    return slope, (differs * math.sqrt(variance)).to_dict()


def _two_way(y: pd.Series, rows: pd.Series, columns: pd.Series) -> tuple[dict[int, float], pd.Series]:
    """The effect of each row by least squares on rows and columns, whose effects add up to 0; and the residuals."""
    row, of_rows = pd.factorize(rows)
    column = pd.factorize(columns)[0]
    cells = np.tile(np.arange(len(y)), 2)
    design = coo_array((np.ones(2 * len(y)), (cells, np.concatenate([row, len(of_rows) + column]))))
    effects = lsqr(design.tocsr(), y.to_numpy(dtype=float), atol=_EXACT, btol=_EXACT, conlim=0)[0]
    level = effects[len(of_rows) :].mean()
    return {
        int(name): float(value + level) for name, value in zip(of_rows, effects, strict=False)
    }, y - design @ effects


def _alone(windows: pd.DataFrame) -> dict[int, _Spread]:
    """The spread of each run of one setting, by its windows alone."""
    residuals = {int(str(run)): (y - y.mean()).to_numpy() for run, y in windows.groupby("run", sort=False)["log_s"]}
    return _spreads(residuals, sum(len(e) - 1 for e in residuals.values()))


def _spreads(residuals: dict[int, np.ndarray], freedom: int) -> dict[int, _Spread]:
    """The spread of the mean of each run's windows, of which all residuals have so many degrees of freedom together.

    n windows whose neighbours correlate say as much as n / k independent ones, k = (1 + alike) / (1 - alike). Their own
    variance is too small by (n / k - 1) / (n / k) · n / (n - 1), because they move together.
    """
    alike = _autocorrelation(list(residuals.values()))
    k = (1 + alike) / (1 - alike)
    total = sum(map(len, residuals.values()))
    own = {run: float((e**2).sum()) / len(e) * total / freedom for run, e in residuals.items()} if freedom > 0 else {}
    typical = float(np.median(list(own.values()) or [math.inf]))
    found = {}
    for run, e in residuals.items():
        n, of_run = len(e), freedom * len(e) / total
        if freedom <= 0 or n < FEWEST or n <= k:
            found[run] = _Spread()
            continue
        variance = (_TYPICAL * typical + of_run * own[run]) / (_TYPICAL + of_run)
        degrees = min(_TYPICAL + of_run, freedom) / k
        found[run] = _Spread(variance * (n - 1) / n / (n / k - 1), max(degrees, 1))
    return found


def _autocorrelation(series: list[np.ndarray]) -> float:
    """Of neighbours, pooled over series of unit variance.

    The estimate of a series of n values is low by (1 + 3 · the truth) / n (Kendall 1954).
    """
    known = [e / math.sqrt(square) for e in series if (square := float((e**2).mean()) if len(e) else 0.0) > _ROUNDING]
    if not known:
        return 0.0
    estimate = sum(float((e[1:] * e[:-1]).sum()) for e in known) / sum(map(len, known))
    n = sum(map(len, series)) / len(series)
    return min(max(estimate + (1 + 3 * max(estimate, 0.0)) / n, 0.0), _MOST_ALIKE)


def _of_halves(windows: pd.DataFrame) -> _Spread | None:
    """By what runs differ that follow each other, from the halves of each run; None without a run that can be halved."""
    squares = []
    for _, y in windows.groupby("run", sort=False)["log_s"]:
        if len(y) > FEWEST:
            squares.append((y.iloc[: len(y) // 2].mean() - y.iloc[len(y) // 2 :].mean()) ** 2 / 2)
    return _Spread(float(np.mean(squares)), len(squares)) if squares else None


def _of_repeats(centers: dict[int, list[float]], blocks: int) -> _Spread | None:
    """By what repeated runs of a setting differ; None without any. `blocks` have been taken out of the centers."""
    freedom = sum(len(values) - 1 for values in centers.values()) - blocks
    squares = sum(float(np.var(values)) * len(values) for values in centers.values())
    return _Spread(squares / freedom, freedom) if freedom > 0 else None


def _pooled(*spreads: _Spread | None) -> _Spread | None:
    """One estimate of several of the same variance; None without any."""
    known = [one for one in spreads if one is not None]
    freedom = sum(one.freedom for one in known)
    return _Spread(sum(one.variance * one.freedom for one in known) / freedom, freedom) if known else None
