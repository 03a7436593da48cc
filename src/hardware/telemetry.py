"""What the training device and the process are doing, read by a thread of its own a few times a second.

| Key | Unit | Meaning |
| --- | --- | --- |
| `device/utilization_pct` | % | NVIDIA, AMD: share of a window of 1/6 to 1 s in which any kernel ran, however small. CPU: share of the cores it may use that the process and its children kept busy |
| `device/sm_activity_pct` | % | share of the streaming multiprocessors that were busy; NVIDIA Hopper and later |
| `device/memory_used_gib` | GiB | NVIDIA, AMD: the whole device, whoever uses it. MPS: what the driver gave this process |
| `device/power_w` | W | of the whole device; NVIDIA's newer ones report the mean of the last second |
| `device/energy_j` | J | a counter that only grows, of the whole device; NVIDIA Volta and later |
| `device/sm_clock_mhz` | MHz | of the compute units |
| `device/memory_clock_mhz` | MHz | of the memory |
| `device/throttled` | 0 or 1 | whether power, heat or the hardware holds the clocks down; clocks that somebody set do not count |
| `host/cpu_pct` | % | of the process; 100 is one core fully busy |
| `host/rss_gib` | GiB | memory of the process that is in RAM |

A reading that the device does not offer is left out, never 0. A query that the driver refuses is dropped at its first
failure, with one warning a process. Nothing here raises into the training.
"""

import contextlib
import os
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import psutil
import torch

UTILIZATION = "device/utilization_pct"
SM_ACTIVITY = "device/sm_activity_pct"
MEMORY_USED = "device/memory_used_gib"
POWER = "device/power_w"
ENERGY = "device/energy_j"
SM_CLOCK = "device/sm_clock_mhz"
MEMORY_CLOCK = "device/memory_clock_mhz"
THROTTLED = "device/throttled"
CPU = "host/cpu_pct"
RSS = "host/rss_gib"

MIN_INTERVAL_S = 0.1  # NVML's own readings are renewed no faster, and the thread holds the interpreter while it reads
MIN_SPAN_S = 0.05  # CPU times of other processes tick at 10 ms: a rate over less time is mostly rounding
MIN_GPM_SPAN_S = 0.1  # how far apart NVML wants two samples of its performance counters
CHILDREN_EVERY_S = 2.0
PATIENCE_S = 1.0  # a driver that hangs must not hang the run
MOST_WATTS = 2000  # see AmdProbe
KEPT_SAMPLES = 4096  # of those that nobody drains: 17 minutes at 4 Hz
_LOST = (15, 16)  # NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED
# nvmlClocksEventReason: idle, applications clocks and display clocks are nothing that goes wrong.
_NOT_THROTTLING = 0x1 | 0x2 | 0x100
_GIB = 2**30

Clock = Callable[[], float]
Query = Callable[[], float | None]
_warned: set[str] = set()


class Probe(Protocol):
    """Something that can be read a few times a second."""

    def read(self) -> dict[str, float]:
        """What can be read now; rates are over the time since the read before."""
        ...


class Sample(NamedTuple):
    """Readings and when they were taken, by the sampler's clock."""

    timestamp: float
    readings: dict[str, float]


def warn_once(kind: str, message: str) -> None:
    """Warn once a process for each kind; silent where warnings are errors, since a display must not end a run."""
    if kind not in _warned:
        _warned.add(kind)
        with contextlib.suppress(Warning):
            warnings.warn(message, RuntimeWarning, stacklevel=2)


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


# --- probes ----------------------------------------------------------------------------------------------------------


class QueryProbe:
    """Queries by key, each with its own guard: one that fails is never asked again.

    Args:
        queries: key → a function that gives the reading, or None for none this time.
    """

    def __init__(self, queries: Mapping[str, Query]):
        self._queries = dict(queries)

    def read(self) -> dict[str, float]:
        """What the remaining queries say; nothing once the device is lost."""
        readings = {}
        for key, query in list(self._queries.items()):
            try:
                value = query()
                if value is not None:
                    readings[key] = float(value)
            except Exception as error:  # noqa: BLE001 - every library has its own, and none may end a run
                if getattr(error, "value", None) in _LOST:
                    self._queries.clear()
                    warn_once("lost", f"the device no longer answers ({error}): its readings end here")
                    return {}
                del self._queries[key]
                warn_once(key, f"{key} is left out: {_reason(error)}")
        return readings


class NvidiaProbe(QueryProbe):
    """An NVIDIA GPU, through NVML; of a MIG instance what NVML says of instances.

    Args:
        device: as torch counts them; NVML counts differently under CUDA_VISIBLE_DEVICES, so it is found by its UUID.
        clock: seconds, for the spacing of performance counters.

    Raises:
        ImportError: without nvidia-ml-py.
        pynvml.NVMLError: without a driver, or for a device that NVML does not know.
    """

    def __init__(self, device: torch.device, clock: Clock = time.perf_counter):
        import pynvml as nvml

        nvml.nvmlInit()
        handle = _nvml_handle(nvml, device)
        super().__init__(
            {
                UTILIZATION: lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
                MEMORY_USED: lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used / _GIB,
                POWER: lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
                ENERGY: lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000,
                SM_CLOCK: lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
                MEMORY_CLOCK: lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
                THROTTLED: lambda: bool(_clock_reasons(nvml, handle) & ~_NOT_THROTTLING),
            }
        )
        # An older binding does not know the counters, and an older driver or device does not offer them.
        with contextlib.suppress(nvml.NVMLError, AttributeError):
            if nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
                self._queries[SM_ACTIVITY] = _SmActivity(nvml, handle, clock)


def _nvml_handle(nvml: Any, device: torch.device) -> Any:
    """The NVML handle of one of torch's devices: torch gives the UUID bare, NVML wants it with its prefix."""
    index = torch.cuda.current_device() if device.index is None else device.index
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    # A process sees one MIG instance at most, so its name there is the device's.
    names = [visible] if visible.startswith("MIG-") else []
    names += [uuid if uuid.startswith("GPU-") else f"GPU-{uuid}", f"MIG-{uuid}", uuid]
    for name in names[:-1]:
        with contextlib.suppress(nvml.NVMLError):
            return nvml.nvmlDeviceGetHandleByUUID(name)
    return nvml.nvmlDeviceGetHandleByUUID(names[-1])


def _clock_reasons(nvml: Any, handle: Any) -> int:
    try:
        return nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    except nvml.NVMLError_FunctionNotFound:  # older drivers know it by its older name
        return nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)


class _SmActivity:
    """The SM activity between two calls, by NVML's performance counters (GPM)."""

    def __init__(self, nvml: Any, handle: Any, clock: Clock):
        self._nvml, self._handle, self._clock = nvml, handle, clock
        self._earlier, self._later = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
        for sample in (self._earlier, self._later):
            weakref.finalize(self, _free, nvml, sample).atexit = False
        self._request = nvml.c_nvmlGpmMetricsGet_t()
        self._request.version = nvml.NVML_GPM_METRICS_GET_VERSION
        self._request.numMetrics = 1
        self._request.metrics[0].metricId = nvml.NVML_GPM_METRIC_SM_UTIL
        self._taken: float | None = None

    def __call__(self) -> float | None:
        taken, self._taken = self._taken, self._clock()
        self._earlier, self._later = self._later, self._earlier
        self._nvml.nvmlGpmSampleGet(self._handle, self._later)
        if taken is None or self._taken - taken < MIN_GPM_SPAN_S:
            return None
        self._request.sample1, self._request.sample2 = self._earlier, self._later
        self._nvml.nvmlGpmMetricsGet(self._request)
        metric = self._request.metrics[0]
        return metric.value if metric.nvmlReturn == 0 else None


def _free(nvml: Any, sample: Any) -> None:
    with contextlib.suppress(nvml.NVMLError):  # of a device that was lost
        nvml.nvmlGpmSampleFree(sample)


class AmdProbe(QueryProbe):
    """An AMD GPU, through what torch asks of AMD's library; that answers 0 for a power or clock it does not know.

    torch's documentation promises the power in mW, and its releases so far give W: no GPU draws more than 2 kW, so
    what is above that is mW.

    Args:
        device: as torch counts them.
    """

    def __init__(self, device: torch.device):
        def power() -> float | None:
            reading = torch.cuda.power_draw(device)
            return (reading / 1000 if reading > MOST_WATTS else reading) or None

        super().__init__(
            {
                UTILIZATION: lambda: torch.cuda.utilization(device),
                MEMORY_USED: lambda: torch.cuda.device_memory_used(device) / _GIB,
                POWER: power,
                SM_CLOCK: lambda: torch.cuda.clock_rate(device) or None,
            }
        )


class MpsProbe(QueryProbe):
    """Apple's GPU: torch offers its memory, and nothing else without administrator's rights."""

    def __init__(self) -> None:
        super().__init__({MEMORY_USED: lambda: torch.mps.driver_allocated_memory() / _GIB})


class CpuProbe(QueryProbe):
    """The CPU as the training device: the share of its cores that the process and its children kept busy.

    Children are looked up every 2 s, or more rarely where that takes long; the work of a child before it is first
    seen, and after it was last seen, is not counted.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Clock = time.perf_counter):
        self._clock = clock
        self._process = psutil.Process()
        self._cores = usable_cores()
        self._children: dict[psutil.Process, float] = {}
        self._look_at = -float("inf")
        self._seen: tuple[float, float] | None = None
        super().__init__({UTILIZATION: self._utilization})

    def _utilization(self) -> float | None:
        now, own = self._clock(), time.process_time()
        children = self._children_seconds(now)
        before, self._seen = self._seen, (now, own)
        if before is None or now - before[0] < MIN_SPAN_S:
            return None
        return min(100.0, 100 * (own - before[1] + children) / ((now - before[0]) * self._cores))

    def _children_seconds(self, now: float) -> float:
        """CPU seconds that the children known at the last call have used since."""
        used = 0.0
        for child, before in list(self._children.items()):
            try:
                self._children[child] = _cpu_seconds(child)
                used += self._children[child] - before
            except psutil.Error:
                del self._children[child]
        if now >= self._look_at:
            started = time.perf_counter()
            for child in self._process.children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    self._children.setdefault(child, _cpu_seconds(child))
            # The whole process table is read: at most one part in 500 of the time may go into that.
            self._look_at = now + max(CHILDREN_EVERY_S, 500 * (time.perf_counter() - started))
        return used


class ProcessProbe(QueryProbe):
    """The training process: its CPU use and its memory.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Clock = time.perf_counter):
        self._clock = clock
        self._seen: tuple[float, float] | None = None
        process = psutil.Process()
        super().__init__({CPU: self._cpu, RSS: lambda: process.memory_info().rss / _GIB})

    def _cpu(self) -> float | None:
        now = (self._clock(), time.process_time())
        before, self._seen = self._seen, now
        if before is None or now[0] - before[0] < MIN_SPAN_S:
            return None
        return 100 * (now[1] - before[1]) / (now[0] - before[0])


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def usable_cores() -> float:
    """How many cores this process may use: its affinity, or less where its control group has a quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return min(cores, int(quota) / int(period))
    except (OSError, ValueError):  # no control groups of version 2, or no quota ("max")
        return cores


def probes_for(device: torch.device) -> list[Probe]:
    """What can be read of a training device and of this process; never raises."""
    probes: list[Probe] = [ProcessProbe()]
    if device.type == "cpu":
        probes.append(CpuProbe())
    elif device.type == "mps":
        probes.append(MpsProbe())
    elif device.type == "cuda" and torch.version.hip:
        probes.append(AmdProbe(device))
    elif device.type == "cuda":
        try:
            probes.append(NvidiaProbe(device))
        except Exception as error:  # noqa: BLE001 - a library or a driver that is missing or broken in its own way
            warn_once("nvml", f"no readings of {device}, NVML is not to be had: {_reason(error)}")
    return probes


# --- sampling --------------------------------------------------------------------------------------------------------


class Window:
    """Means, maxima and energy of samples taken one after another, each standing for the time since the one before."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._sums: dict[str, tuple[float, float, float]] = {}  # key → Σ value·seconds, Σ seconds, maximum
        self._counted = (0.0, 0.0)  # joules by the counter, seconds they were counted over
        self._last: Sample | None = None

    def open(self, sample: Sample) -> None:
        """Begin a stretch of time. What the sample says is of the time before, so it only gives the counter's state."""
        self._last = sample

    def add(self, sample: Sample) -> None:
        """Let the sample stand for the time since the last one."""
        last, self._last = self._last, sample
        seconds = sample.timestamp - last.timestamp if last else 0.0
        if seconds <= 0:
            return
        self.seconds += seconds
        for key, value in sample.readings.items():
            if key == ENERGY:
                continue
            total, weight, highest = self._sums.get(key, (0.0, 0.0, value))
            self._sums[key] = (total + value * seconds, weight + seconds, max(highest, value))
        if ENERGY in sample.readings and ENERGY in last.readings:
            joules = sample.readings[ENERGY] - last.readings[ENERGY]
            if joules >= 0:  # otherwise the driver was reloaded
                self._counted = (self._counted[0] + joules, self._counted[1] + seconds)

    def summary(self) -> dict[str, float | str]:
        """See `Sampler.summary`."""
        if not self.seconds:
            return {}
        result: dict[str, float | str] = {"seconds": self.seconds}
        for key, (total, weight, highest) in list(self._sums.items()):  # the thread may be adding
            result[named(key, "mean")] = total / weight
            result[named(key, "max")] = highest
        joules, seconds = self._sums.get(POWER, (0.0, 0.0, 0.0))[:2]
        if self._counted[1] and self._counted[1] >= seconds:
            result |= {"energy_j": self._counted[0], "energy_source": "counter"}
        elif seconds:
            result |= {"energy_j": joules, "energy_source": "power_integral"}
        return result


def named(key: str, word: str) -> str:
    """A key with a word before its unit: `device/power_w`, `mean` → `device/power_mean_w`."""
    name, _, unit = key.rpartition("_")
    return f"{name}_{word}_{unit}" if name else f"{key}_{word}"


class Sampler:
    """Reads probes at a steady pace in a daemon thread.

    Args:
        probes: what is read.
        interval_s: seconds between samples, 0.1 at least.
        clock: seconds.
    """

    def __init__(self, probes: Sequence[Probe], interval_s: float = 0.25, clock: Clock = time.perf_counter):
        self.interval_s = max(interval_s, MIN_INTERVAL_S)
        self._probes = list(probes)
        self._clock = clock
        self._thread: threading.Thread | None = None
        self._reset()

    def start(self) -> None:
        """Begin anew: a new window, a first sample, a new thread. Does nothing while it is running."""
        if self._thread is None or not self._thread.is_alive():  # in a forked child it is not
            self._reset()
            self._pid = os.getpid()
            self.resume()
            thread = threading.Thread(target=self._run, args=(self._ended,), name="telemetry", daemon=True)
            thread.start()
            self._thread = thread

    def stop(self) -> None:
        """Take a last sample and end the thread; what was read stays. May be called again, or without a start."""
        if self._thread is None or self._pid != os.getpid():
            return
        self._ended.set()
        self.pause()
        self._thread.join(timeout=PATIENCE_S)
        self._thread = None

    def pause(self) -> None:
        """Take a sample, then no more until `resume`: the time between is not part of the summary."""
        self._sample(last=True)

    def resume(self) -> None:
        """Go on after `pause`."""
        with self._turn() as mine:
            if mine and self.paused:
                self._window.open(self._read())
                self.paused = False

    def restart(self) -> None:
        """Begin a new summary: the time until now is not part of it. Samples that nobody has drained stay."""
        with self._turn() as mine:
            if mine:
                self._window = Window()
                if not self.paused:
                    self._window.open(self._read())

    def sample(self) -> None:
        """Take a sample now, unless paused."""
        self._sample()

    def latest(self) -> dict[str, float]:
        """The last sample's readings; empty before the first."""
        return dict(self._latest)

    def drain(self) -> list[Sample]:
        """The samples since the last call, each `(timestamp, readings)`; of very many the latest."""
        samples = []
        while self._samples:
            samples.append(self._samples.popleft())
        return samples

    def summary(self) -> dict[str, float | str]:
        """Means weighted by time and maxima since `start` or `restart`, without the paused time; empty before the first
        sample.

        `device/power_w` becomes `device/power_mean_w` and `device/power_max_w`, other keys likewise. `energy_j` is
        joules, with `energy_source` `counter` (the device's own) or `power_integral` (power by time); both are left
        out where there is neither. `seconds` is the time covered.
        """
        return self._window.summary()

    def _reset(self) -> None:
        self.paused = True
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._window = Window()
        self._samples: deque[Sample] = deque(maxlen=KEPT_SAMPLES)
        self._latest: dict[str, float] = {}

    def _sample(self, last: bool = False) -> None:
        with self._turn() as mine:
            if mine and not self.paused:
                sample = self._read()
                self._window.add(sample)
                self._samples.append(sample)
                self._latest = sample.readings
                self.paused = last

    @contextlib.contextmanager
    def _turn(self) -> Iterator[bool]:
        """The lock, or False where the thread does not come back from a driver."""
        mine = self._lock.acquire(timeout=PATIENCE_S)
        try:
            yield mine
        finally:
            if mine:
                self._lock.release()

    def _run(self, ended: threading.Event) -> None:
        while not ended.wait(self.interval_s):
            self.sample()

    def _read(self) -> Sample:
        readings: dict[str, float] = {}
        for probe in list(self._probes):
            try:
                readings |= probe.read()
            except Exception as error:  # noqa: BLE001 - a measurement must not end a run
                self._probes.remove(probe)
                kind = type(probe).__name__
                warn_once(kind, f"{kind} is left out: {_reason(error)}")
        return Sample(self._clock(), readings)
