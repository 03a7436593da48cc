"""Part 3: one run, the sweep over batch sizes on CPU and GPU, and a run that does not fit into memory."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness import sweep_line

from batchscope.analysis import analyse
from batchscope.records.read import FILE, read

from . import ROOT, Result, Setting

SIZES = [2**power for power in range(5, 14)]  # 32 to 8,192
PLOTS = ("*.png", "*.md", "sweep.csv")
SMALL = ("callbacks.throughput.calibrate=false", "model.channels=[4,8]")  # of a rehearsal


def run(setting: Setting) -> Result:
    """`python train.py model=cnn trainer.accelerator=gpu data.batch_size=512`: what it prints, and its record."""
    place = _fresh(setting.work / "run")
    words = [
        "model=cnn",
        f"trainer.accelerator={setting.accelerator}",
        f"data.batch_size={64 if setting.small else 512}",
    ]
    words += [*setting.data(), *(["trainer.max_epochs=1", *SMALL] if setting.small else [])]
    words += ["callbacks.progress=null", f"hydra.run.dir={place}"]
    done = subprocess.run([sys.executable, "train.py", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()[-1]
        )
    record = read(place)
    said = done.stdout.strip() + ("\n\n" + done.stderr.strip() if done.stderr.strip() else "")
    facts = {key: record.get(key) for key in ("throughput", "memory", "metrics", "hardware", "fit_seconds")}
    claims = {"test accuracy above 98 %": record["metrics"].get("test/acc", 0) > 0.98}
    return Result(f"```text\n{said.replace(str(setting.work), '…')}\n```", facts, claims)


def batch_sizes(setting: Setting) -> Result:
    """One sweep over batch sizes on both devices; its report and plots go to the folder of the results."""
    place = _fresh(setting.work / "sweep")
    sizes = (8, 32) if setting.small else SIZES
    devices = "cpu" if setting.small else "cpu,gpu"
    options = ["experiment=throughput", "model=cnn", f"trainer.accelerator={devices}", *setting.data(64)]
    options += [f"data.batch_size={','.join(map(str, sizes))}"]
    options += ["callbacks.until_known.seconds=0.3", *SMALL] if setting.small else []
    lines_of_report = _sweep(place, options)
    kept = setting.out / "sweep"
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    for pattern in PLOTS:
        for file in (place / "report").glob(pattern):
            shutil.copy(file, kept)
    records = sorted(_records(place), key=lambda record: (_device(record), _batch(record)))
    lines = [
        "| device | batch | status | samples/s | median step | utilisation | SM activity | power | MFU | bottleneck |"
    ]
    lines.append("| --- | ---: | --- " + "| ---: " * 6 + "| --- |")
    lines += map(_row, records)
    rates: dict[str, dict[int, float]] = {}
    for record in records:
        if rate := (record.get("throughput") or {}).get("samples_per_sec"):
            rates.setdefault(_device(record), {})[_batch(record)] = rate
    crossing = next(
        (size for size, rate in rates.get("cuda", {}).items() if rate > rates.get("cpu", {}).get(size, rate)), None
    )
    lines += ["", f"The GPU is faster from batch {crossing} on." if crossing else "The GPU is faster at no size.", ""]
    lines += [f"- {line}" for line in lines_of_report]
    finished = sum(record["status"] == "finished" for record in records)
    claims = {f"all {len(records)} runs finished": finished == len(records) == len(sizes) * len(devices.split(","))}
    return Result("\n".join(lines), {"rates": rates, "crossing": crossing, "report": lines_of_report}, claims)


def out_of_memory(setting: Setting) -> Result:
    """A sweep of which one run needs more memory than any card has: it is a row, and the others go on."""
    if setting.small:
        return Result("Not tried: a CPU has no memory of its own that runs out.")
    place = _fresh(setting.work / "out-of-memory")
    options = ["experiment=throughput", "model=torchvision", "model.name=resnet152", "model.image_size=224"]
    # 1,536 images take some 400 GB, and no tensor among them has more elements than 32 bits can count.
    _sweep(place, [*options, "trainer.accelerator=gpu", *setting.data(), "data.batch_size=8,1536,16"])
    found = {_batch(record): record for record in _records(place)}
    lines = ["| batch | status | what was said |", "| ---: | --- | --- |"]
    lines += [f"| {size:,} | {found[size]['status']} | {_error(found[size])} |" for size in sorted(found)]
    states = {size: record["status"] for size, record in found.items()}
    expected = {8: "finished", 16: "finished", 1536: "out_of_memory"}
    return Result(
        "\n".join(lines), states, {"the large run is out of memory, and both others finished": states == expected}
    )


def _sweep(place: Path, options: list[str]) -> list[str]:
    """Do a sweep; the sentences of its report."""
    done = subprocess.run(
        sweep_line(place, options), check=False, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    if not (place / "report" / "sweep.csv").is_file():
        raise RuntimeError((done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1])
    return analyse([place]).headlines


def _records(place: Path) -> list[dict[str, Any]]:
    return [read(path.parent) for path in place.rglob(FILE)]


def _fresh(place: Path) -> Path:
    shutil.rmtree(place, ignore_errors=True)
    return place


def _device(record: dict[str, Any]) -> str:
    asked = {"gpu": "cuda"}.get(record["config"]["trainer"]["accelerator"], "cpu")
    return (record.get("hardware") or {}).get("device", asked)  # a run that never began has none


def _batch(record: dict[str, Any]) -> int:
    return record["config"]["data"]["batch_size"]


def _error(record: dict[str, Any]) -> str:
    error = record.get("error") or ""
    said = error.get("message", "") if isinstance(error, dict) else str(error)
    return (said.splitlines() or [""])[0].replace("|", "/")[:300]


def _row(record: dict[str, Any]) -> str:
    cost, bottleneck = record.get("throughput") or {}, (record.get("throughput") or {}).get("bottleneck") or {}

    def shown(key: str, form: str) -> str:
        return format(cost[key], form) if isinstance(cost.get(key), int | float) else ""

    cells = [_device(record), f"{_batch(record):,}", record["status"], shown("samples_per_sec", ",.0f")]
    cells += [
        shown("step_ms_median", ".3g") and f"{shown('step_ms_median', '.3g')} ms",
        shown("utilization_pct", ".0f"),
    ]
    cells += [shown("sm_activity_pct", ".0f"), shown("power_w", ".0f"), shown("mfu", ".3f")]
    return f"| {' | '.join([*cells, bottleneck.get('kind', '')])} |"
