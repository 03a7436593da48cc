"""How well rates are known: windows of runs → the rate of each setting, and the interval of the ratio of two rates.

A window is a short time of successive steps (windows.py). The log time of a sample in a window of run r in pass p is

    y = a_r + d_p + e

d_p is the effect of the whole pass, so drift is in no ratio of settings that share passes. All windows of a pass count,
disturbed ones too. Within a pass each window meets another load. For batch sizes, which are compared at equal load, the model is

    y = a_r + d_p + b · (x - mean of x) + e

x is the share of the processor that other programs took in the window, and b, one slope for all, is estimated within passes
(analysis of covariance). Nothing is extrapolated: rates are those at the mean load of all windows. The error of b widens a
ratio in proportion to the difference of its settings' mean loads. b is not estimated where fewer than ten degrees of freedom
are left. It would be wrong for settings that themselves change what other programs get, such as the number of threads.

The variance of the noise e is estimated from the run's own windows, moderated by that of a typical run (Smyth 2004), and widened
by the autocorrelation: beside a load, the noise of small batches is a multiple of that of others, and a few windows alone tell a
variance badly. Runs that share no pass with others (two sessions, or a new pair of processes in each pass) form blocks. The
effect of a block is removed, too, so repeated runs count by their differences within blocks. Processes of the same thing differ
by something that no window shows: a measured constant is assumed.

Settings that share no passes were measured one after the other, and the machine may have changed meanwhile. The variance
between such runs is estimated from the differences of the two halves of each run, or from repeated runs if these differ by
more. Neither shows what changes more slowly than a run: a measured constant is assumed, too. Disturbed windows of such runs are
left out. Other programs may have lowered a rate by the share of the processor that they took: intervals reach that much further.
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

from ..records.rates import REPORTED_LOAD

CONFIDENCE = 0.9  # of the interval of a single rate or ratio
STATED = 0.95  # the confidence that all comparisons of one statement hold together
FEWEST = 3  # the least number of windows of a run, and of shared passes of two settings: fewer have hardly a spread
USUAL_SHARE = 0.05  # the share of the processor that other programs and the hypervisor take of a quiet machine
_VAGUE = 1e4  # an interval whose ends have this ratio, or a larger one, says nothing
SEPARATE_RUNS_SD = 0.1  # standard deviation of log rates between separate runs, as on a CPU (benchmarks/compare.py)
PROCESSES_SD = 0.01  # the same between processes that share passes (benchmarks/results/diagnose.md)
_FEW = 4  # with fewer degrees of freedom, repeated runs do not decide alone what runs differ by
_LARGEST = 700  # a larger number has no finite exponential
WORTH = 10.0  # degrees of freedom of an assumed variance
_TYPICAL = 4.0  # degrees of freedom by which the typical run moderates a run's variance (benchmarks/simulated.py)
_ROUNDING = 1e-20  # smaller squares of log times are rounding errors, not noise
_TOLERANCE = 1e-12  # the relative error of least squares
_MOST_CORRELATED = 0.8  # the largest autocorrelation of neighbours: in few values, more cannot be told from drift


def ratio_text(value: float, digits: int = 2) -> str:
    """Return a ratio with so many decimals: `1.21`; below 0.1 with two significant digits: `0.012`."""
    return f"{value:.{digits}f}" if value >= 0.1 else f"{value:#.2g}"


@dataclass(frozen=True)
class Ratio:
    """A ratio and its interval, which is from 0 to infinity where the spread is not known."""

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
        digits = 3 if min(abs(self.low - 1), abs(self.high - 1)) < 0.005 else 2  # to show whether 1 is in the interval
        return f"{ratio_text(self.low, digits)} to {ratio_text(self.high, digits)}"


class _Spread(NamedTuple):
    """A variance and its degrees of freedom; infinite where it is not known."""

    variance: float = math.inf
    freedom: float = 1.0


class Rates:
    """The rates of settings that are compared with each other. A setting is a batch size, or a side of a comparison.

    Args:
        windows: with the columns of `window_table`. Of a run that shares passes, only the windows in passes count: after
            them, its training goes on alone.
        between: the assumed standard deviation of log rates between separate runs of the same thing, where settings share
            no passes. It counts as ten repeated runs beside those that there are.
        processes: the standard deviation of log rates between processes of the same thing that share passes.
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
        used = _used_windows(windows)
        self._component = _connected(used["setting"], used["pass_"], FEWEST)
        # Settings that share passes are compared by the windows in these passes alone: not by other runs, nor by later windows.
        is_shared = used.groupby("pass_")["setting"].transform("nunique") > 1
        runs_in_passes = used["run"][is_shared].unique()

        def compared(windows: pd.DataFrame) -> pd.DataFrame:
            is_alone = ~windows["setting"].map(self._shares_passes).astype(bool)
            return windows[is_alone | windows["run"].isin(runs_in_passes) & windows["pass_"].notna()]

        used, self.windows = compared(used), compared(windows)
        runs = used.groupby("run", sort=False)
        self._runs: dict[int, list[int]] = {setting: [] for setting in self.settings}  # of each setting
        for run, setting in runs["setting"].first().items():
            self._runs[setting].append(int(str(run)))
        self._center: dict[int, float] = runs["log_s"].mean().to_dict()  # of each run: the log time of a sample
        self._spread: dict[int, _Spread] = {}  # of each run, among the runs of its component
        self._slope_error: dict[int, float] = {}  # of each setting: its shift by one standard error of the slope
        extra_blocks = 0  # beyond the first of each component
        for component in set(self._component.values()):
            members = used[used["setting"].map(self._component) == component]
            if members["setting"].nunique() > 1:
                center, spread, more_blocks, slope_error = _fit_passes(members, at_equal_load)
                for setting, setting_runs in members.groupby("setting")["run"].unique().items():
                    errors = [slope_error.get(run, 0.0) for run in setting_runs]
                    self._slope_error[int(str(setting))] = float(np.mean(errors))
                self._center |= center
                extra_blocks += more_blocks
            else:
                spread = _window_spreads(members)
            self._spread |= spread
        centers = {setting: [self._center[run] for run in runs] for setting, runs in self._runs.items()}
        self._repeats = _repeats_spread(centers, extra_blocks)
        assumed = _pooled(self._repeats, None if between is None else _Spread(between**2, WORTH))
        self._between = max((spread for spread in (_halves_spread(used), assumed) if spread), default=_Spread())
        excess_load = used["taken"].sub(USUAL_SHARE).clip(0, 0.9)
        self._load_allowance = excess_load.groupby(used["setting"]).mean().to_dict()

    def rate(self, setting: int) -> float:
        """Return the rate of a setting in samples/s."""
        return math.exp(-float(np.mean([self._center[run] for run in self._runs[setting]])))

    def reach(self, setting: int, allow_load: bool = True) -> float:
        """Return how far the 90 % interval of a rate reaches, as a fraction of the rate; infinite where that is not known.

        With `allow_load`, the interval includes by how much other programs may have lowered the rate.
        """
        spread = self._setting_spread(setting, self._shares_passes(setting))
        variance = spread.variance + self._slope_error.get(setting, 0.0) ** 2
        half = stdtrit(spread.freedom, (1 + CONFIDENCE) / 2) * math.sqrt(variance)
        half -= math.log1p(-self._load_allowance[setting]) if allow_load else 0.0
        return math.expm1(half) if half < _LARGEST else math.inf

    def ratio(self, a: int, b: int, confidence: float = CONFIDENCE) -> Ratio:
        """Return the rate of a ÷ that of b; if they share no passes, with an allowance for a load beside one of them alone."""
        if a == b:
            return Ratio(1.0, 1.0, 1.0)
        value = self.rate(a) / self.rate(b)
        together = self.together(a, b)
        spread_a, spread_b = self._setting_spread(a, together), self._setting_spread(b, together)
        variance = spread_a.variance + spread_b.variance
        variance += (self._slope_error[a] - self._slope_error[b]) ** 2 if together else 0.0
        if not math.isfinite(variance):
            return Ratio(value, 0.0, math.inf)
        half = stdtrit(min(spread_a.freedom, spread_b.freedom), (1 + confidence) / 2) * math.sqrt(variance)
        low, high = (half - (0.0 if together else math.log1p(-self._load_allowance[s])) for s in (b, a))
        return Ratio(value, value * math.exp(-min(low, _LARGEST)), value * math.exp(min(high, _LARGEST)))

    def together(self, a: int, b: int) -> bool:
        """Whether two settings were measured in the same passes, and not one after the other."""
        return self._component[a] == self._component[b]

    @property
    def load(self) -> float | None:
        """The mean share of the processor that other programs took; None below REPORTED_LOAD."""
        return mean_load(self.windows)

    @property
    def passes(self) -> int:
        """The number of passes in which settings were measured side by side, the largest of all components; 0 without any."""
        shared = self.windows[self.windows["setting"].map(self._shares_passes).astype(bool)]
        passes = shared.groupby(shared["setting"].map(self._component))["pass_"].nunique()
        return int(passes.max()) if len(passes) else 0

    @property
    def is_side_by_side(self) -> bool:
        """Whether all settings were measured in the same passes."""
        return len(self._component) > 1 and len(set(self._component.values())) == 1

    def _shares_passes(self, setting: int) -> bool:
        return list(self._component.values()).count(self._component[setting]) > 1

    def _setting_spread(self, setting: int, together: bool) -> _Spread:
        """Return the spread of a setting's center, among settings with the same passes (`together`) or among separate ones."""
        spreads = [self._spread[run] for run in self._runs[setting]]
        variance = sum(spread.variance for spread in spreads) / len(spreads)
        noise = _Spread(variance, min(spread.freedom for spread in spreads))
        repeats = self._repeats or noise
        if self._repeats and not math.isfinite(noise.variance):  # too few windows, which repeated runs make up for
            noise = self._repeats
        elif self._repeats and self._repeats.freedom < _FEW:  # too few repeated runs: the noise of windows counts, too
            repeats = _pooled(self._repeats, noise._replace(freedom=WORTH)) or noise
        larger = max(noise, repeats if together else self._between)
        between_processes = self._processes**2 if together else 0.0
        return _Spread(larger.variance / len(spreads) + between_processes, larger.freedom)


def mean_load(windows: pd.DataFrame) -> float | None:
    """Return the mean share of the processor that other programs took in the windows; None below REPORTED_LOAD."""
    share = float(windows["taken"].mean()) if len(windows) else 0.0
    return share if share >= REPORTED_LOAD else None


def simultaneous(comparisons: int) -> float:
    """Return the confidence of a two-sided interval, each end of which is one of so many bounds that hold together (Šidák)."""
    return 2 * STATED ** (1 / max(comparisons, 1)) - 1


def _used_windows(windows: pd.DataFrame) -> pd.DataFrame:
    """Return all windows in passes, and the undisturbed windows of runs alone.

    A run alone with hardly any of them counts with all of its windows if every run of its setting is such a run, else with none.
    """
    is_quiet = windows["pass_"].notna() | ~windows["disturbed"].astype(bool)
    by_run = is_quiet.groupby(windows["run"])
    is_lost = ~by_run.transform("all") & (by_run.transform("sum") < FEWEST)
    return windows[(is_quiet & ~is_lost) | is_lost.groupby(windows["setting"]).transform("all")]


def _connected(members: pd.Series, passes: pd.Series, fewest: int) -> dict[int, int]:
    """Return the number of each member's component: members that share so many passes, also through others, are connected."""
    (row, names), (column, pass_names) = pd.factorize(members), pd.factorize(passes)
    present = np.zeros((len(names), len(pass_names) + 1), dtype=int)  # the last column is of no pass
    present[row, column] = 1
    common = present[:, :-1] @ present[:, :-1].T
    return dict(zip(names.tolist(), connected_components(common >= fewest)[1].tolist(), strict=True))


_PassFit = tuple[dict[int, float], dict[int, _Spread], int, dict[int, float]]


def _fit_passes(windows: pd.DataFrame, at_equal_load: bool) -> _PassFit:
    """Fit an effect of each run and of each pass by least squares in each block, and for `at_equal_load` the slope of the load.

    Returns center and spread of each run, the number of blocks beyond the first, and the error of each center by the slope.
    """
    cells = windows.groupby(["setting", "run", "pass_"], sort=False)[["log_s", "taken"]].mean().reset_index()
    block = cells["run"].map(_connected(cells["run"], cells["pass_"], 1)).to_numpy()
    freedom = len(cells) - cells["run"].nunique() - cells["pass_"].nunique() + int(block.max()) + 1
    slope_error: dict[int, float] = {}
    if at_equal_load and freedom > WORTH and (load_slope := _load_slope(cells, block, freedom - 1)):
        slope, slope_error = load_slope
        freedom -= 1
        cells["log_s"] -= slope * (cells["taken"] - cells["taken"].mean())
    center, residuals = {}, {}
    for _, members in cells.groupby(block):
        run_effects, e = _two_way(members["log_s"], members["run"], members["pass_"])
        center |= run_effects
        residuals |= dict(list(e.groupby(members["run"])))
    spread = _mean_spreads({int(run): e.to_numpy() for run, e in residuals.items()}, freedom)
    if block.max():
        runs = cells.assign(block=block).drop_duplicates("run")
        y = runs["run"].map(center)
        setting_effects, e = _two_way(y, runs["setting"], runs["block"])
        center = dict(zip(runs["run"].astype(int), runs["setting"].map(setting_effects) + e, strict=True))
    return center, spread, int(block.max()), slope_error


def _load_slope(cells: pd.DataFrame, block: np.ndarray, freedom: int) -> tuple[float, dict[int, float]] | None:
    """Return the slope of the log time on the load, within runs and passes, and its error for each run; None for equal loads.

    Loaded windows have more noise than quiet ones: the variance is at least the one that allows for this (White 1980).
    """
    x, y = (
        np.concatenate([_two_way(rows[name], rows["run"], rows["pass_"])[1] for _, rows in cells.groupby(block)])
        for name in ("taken", "log_s")
    )
    excess_load = cells.groupby("run")["taken"].mean() - cells["taken"].mean()
    if (square := float((x**2).sum())) <= len(x) * _ROUNDING:
        return None
    slope = float((x * y).sum()) / square
    e = y - slope * x
    variance = max(float((e**2).sum()) / square, len(x) * float(((x * e) ** 2).sum()) / square**2) / freedom
    return slope, (excess_load * math.sqrt(variance)).to_dict()


def _two_way(y: pd.Series, rows: pd.Series, columns: pd.Series) -> tuple[dict[int, float], pd.Series]:
    """Return the effect of each row, and the residuals, by least squares on rows and columns; column effects add up to 0."""
    row, row_names = pd.factorize(rows)
    column = pd.factorize(columns)[0]
    cells = np.tile(np.arange(len(y)), 2)
    design = coo_array((np.ones(2 * len(y)), (cells, np.concatenate([row, len(row_names) + column]))))
    effects = lsqr(design.tocsr(), y.to_numpy(dtype=float), atol=_TOLERANCE, btol=_TOLERANCE, conlim=0)[0]
    level = effects[len(row_names) :].mean()
    row_effects = {int(name): float(effect + level) for name, effect in zip(row_names, effects, strict=False)}
    return row_effects, y - design @ effects


def _window_spreads(windows: pd.DataFrame) -> dict[int, _Spread]:
    """Return the spread of each run of one setting, by its windows alone."""
    residuals = {int(str(run)): (y - y.mean()).to_numpy() for run, y in windows.groupby("run", sort=False)["log_s"]}
    return _mean_spreads(residuals, sum(len(e) - 1 for e in residuals.values()))


def _mean_spreads(residuals: dict[int, np.ndarray], freedom: int) -> dict[int, _Spread]:
    """Return the spread of the mean of each run's windows; all residuals together have so many degrees of freedom.

    n windows whose neighbours have the correlation r say as much as n / k independent ones, k = (1 + r) / (1 - r). Their own
    variance is too small by (n / k - 1) / (n / k) · n / (n - 1), because they move together.
    """
    r = _autocorrelation(list(residuals.values()))
    k = (1 + r) / (1 - r)
    total = sum(map(len, residuals.values()))
    own = {run: float((e**2).sum()) / len(e) * total / freedom for run, e in residuals.items()} if freedom > 0 else {}
    typical = float(np.median(list(own.values()) or [math.inf]))
    spreads = {}
    for run, e in residuals.items():
        n, run_freedom = len(e), freedom * len(e) / total
        if freedom <= 0 or n < FEWEST or n <= k:
            spreads[run] = _Spread()
            continue
        variance = (_TYPICAL * typical + run_freedom * own[run]) / (_TYPICAL + run_freedom)
        moderated_freedom = min(_TYPICAL + run_freedom, freedom) / k
        spreads[run] = _Spread(variance * (n - 1) / n / (n / k - 1), max(moderated_freedom, 1))
    return spreads


def _autocorrelation(series: list[np.ndarray]) -> float:
    """Return the autocorrelation of neighbours, pooled over series that are scaled to unit variance.

    The estimate of a series of n values is low by (1 + 3 · the truth) / n (Kendall 1954).
    """
    scaled = [e / math.sqrt(square) for e in series if (square := float((e**2).mean()) if len(e) else 0.0) > _ROUNDING]
    if not scaled:
        return 0.0
    estimate = sum(float((e[1:] * e[:-1]).sum()) for e in scaled) / sum(map(len, scaled))
    n = sum(map(len, series)) / len(series)
    return min(max(estimate + (1 + 3 * max(estimate, 0.0)) / n, 0.0), _MOST_CORRELATED)


def _halves_spread(windows: pd.DataFrame) -> _Spread | None:
    """Return the spread of runs that follow each other, by the halves of each run; None without a run that can be halved."""
    squares = []
    for _, y in windows.groupby("run", sort=False)["log_s"]:
        if len(y) > FEWEST:
            squares.append((y.iloc[: len(y) // 2].mean() - y.iloc[len(y) // 2 :].mean()) ** 2 / 2)
    return _Spread(float(np.mean(squares)), len(squares)) if squares else None


def _repeats_spread(centers: dict[int, list[float]], blocks: int) -> _Spread | None:
    """Return the spread of repeated runs by the centers of each setting, free of so many block effects; None without repeats."""
    freedom = sum(len(values) - 1 for values in centers.values()) - blocks
    squares = sum(float(np.var(values)) * len(values) for values in centers.values())
    return _Spread(squares / freedom, freedom) if freedom > 0 else None


def _pooled(*spreads: _Spread | None) -> _Spread | None:
    """Pool the known estimates of one variance; None without any."""
    known = [spread for spread in spreads if spread is not None]
    freedom = sum(spread.freedom for spread in known)
    return _Spread(sum(spread.variance * spread.freedom for spread in known) / freedom, freedom) if known else None
