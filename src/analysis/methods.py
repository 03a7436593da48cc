"""What was done, from the records of a report: facts with their names, and one sentence to quote in a paper.

What the runs agree in is said once; of what varies all values are listed. What no record says is left out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ..errors import printable
from ..records.formatting import count, option_value
from ..records.metrics import metric
from ..records.rates import RATE
from ..records.values import at, number, positive, table
from .groups import SweepResults, setting_words
from .run import BATCH_SIZE, HARDWARE, LEARNING_RATE, SEED, Run
from .text import and_

_OWN_ROW = (
    "model",
    "data",
    "optimizer",
    *HARDWARE,
    BATCH_SIZE,
    LEARNING_RATE,
    SEED,
    "trainer.precision",
    "trainer.max_epochs",
)
_PACKAGES = {"batchscope": "batchscope", "torch": "PyTorch", "lightning": "Lightning"}  # that the sentence names
_MOST = 12  # values that are listed


@dataclass(frozen=True)
class Methods:
    """What was done."""

    facts: dict[str, str]  # by their names, in the order in which they are shown
    commands: list[str]  # that started the runs, as they were typed
    sentence: str  # to quote


def methods(sweep: SweepResults) -> Methods:
    """What the records say of how the runs were made."""
    runs = sweep.runs
    varied = [key for key in sweep.factors if key not in _OWN_ROW]
    facts = {
        "date": _date(runs),
        "model": _each(runs, _model),
        "data": _each(runs, _data),
        "batch size": _each(runs, lambda run: f"{run.batch_size:,}" if run.batch_size else ""),
        "training": _training(runs),
        "optimizer": _optimizer(runs),
        "seed": _each(runs, lambda run: option_value(run.settings[SEED]) if SEED in run.settings else ""),
        "precision": _each(runs, lambda run: run.precision),
        **{key: _each(runs, lambda run, key=key: option_value(run.settings.get(key, "not set"))) for key in varied},
        "device": _each(runs, _device),
        "versions": _each(runs, lambda run: _versions(table(run.record.get("versions"))), "; "),
    }
    commands = dict.fromkeys(" ".join(str(run.record["command"]).split()) for run in runs if run.record.get("command"))
    known = {name: printable(text) for name, text in facts.items() if text}
    return Methods(known, [printable(command) for command in commands], printable(_sentence(runs)))


def _values(runs: Sequence[Run], text: Callable[[Run], str]) -> list[str]:
    """The texts of some runs, each once, smaller numbers first."""
    found = [*dict.fromkeys(" ".join(each.split()) for run in runs if (each := text(run)))]
    is_number = all(each.replace(",", "").replace(".", "", 1).isdigit() for each in found)
    found = sorted(found, key=lambda each: float(each.replace(",", ""))) if is_number else found
    return found if len(found) <= _MOST else [*found[: _MOST - 1], f"{len(found) - _MOST + 1} more"]


def _each(runs: Sequence[Run], text: Callable[[Run], str], between: str = ", ") -> str:
    return between.join(_values(runs, text))


def _date(runs: Sequence[Run]) -> str:
    """`2026-11-28, 06:58 to 06:59 UTC`."""
    moments = [str(run.record[key]) for run in runs for key in ("started", "finished") if run.record.get(key)]
    try:
        times = sorted(datetime.fromisoformat(moment) for moment in moments)
    except (ValueError, TypeError):  # a damaged record; one with and one without a zone
        return ""
    if not times:
        return ""
    first, last = times[0], times[-1]
    end = f"{last:%H:%M}" if last.date() == first.date() else f"{last:%Y-%m-%d, %H:%M}"
    span = f"{first:%H:%M} to {end}" if end != f"{first:%H:%M}" else end
    return f"{first:%Y-%m-%d}, {span} {first:%Z}".strip()


def _model(run: Run) -> str:
    """`mlp (MLP, 535,818 parameters)`."""
    kind, size = at(run.record, "model.class"), positive(at(run.record, "model.parameters"))
    facts = [str(kind) if kind and str(kind).lower() != run.model.lower() else "", _parameters(size)]
    words = ", ".join(filter(None, facts))
    return f"{run.model} ({words})" if words else run.model


def _parameters(size: float | None) -> str:
    return f"{size:,.0f} parameters" if size else ""


def _data(run: Run) -> str:
    """`mnist (55,000 training, 5,000 validation and 10,000 test samples)`."""
    tested = {
        name: positive(at(run.record, f"evaluated.{key}")) for key, name in (("val", "validation"), ("test", "test"))
    }
    sizes = {"training": run.train_samples, **tested}
    known = and_([f"{size:,.0f} {name}" for name, size in sizes.items() if size])
    name = run.dataset or str(run.settings.get("data") or "")
    return f"{name} ({known} samples)" if known else name


def _trained(run: Run) -> bool:
    return run.status == "finished" and not at(run.record, "throughput.ended")


def _training(runs: Sequence[Run]) -> str:
    """How long was trained: `2 epochs`, or `timed alone, for 120 to 1,430 steps`."""
    epochs = _each(runs, lambda run: _epochs(run) if _trained(run) else "")
    timed = sorted(
        int(steps) for run in runs if not _trained(run) and (steps := number(at(run.record, "throughput.updates")))
    )
    span = (
        f"{timed[0]:,} to {timed[-1]:,} steps"
        if timed and timed[0] < timed[-1]
        else f"{timed[0]:,} steps"
        if timed
        else ""
    )
    return "; ".join(filter(None, (epochs, f"timed alone, for {span}" if span else "")))


def _epochs(run: Run) -> str:
    epochs, steps = (number(run.record.get(key)) for key in ("epochs", "steps"))
    return count(round(epochs), "epoch") if epochs else count(round(steps), "step") if steps else ""


def _optimizer(runs: Sequence[Run]) -> str:
    """`AdamW, learning rate 0.004, schedule one_cycle, lr_scaling none`."""
    asked = _each(runs, lambda run: metric("learning_rate").text(run.asked_rate) if run.asked_rate else "")
    used = _each(
        runs, lambda run: metric("learning_rate").text(rate) if (rate := run.values.get("learning_rate")) else ""
    )
    schedule = _each(runs, lambda run: str(run.settings.get("optimizer.schedule") or ""))
    scaling = _each(runs, _scaling)
    parts = [
        _each(runs, _optimizer_class),
        f"learning rate {asked or used}" if asked or used else "",
        f"schedule {schedule}" if schedule else "",
        f"{scaling}{f' to {used}' if used and used != asked and not scaling.startswith('not') else ''}"
        if scaling
        else "",
    ]
    return ", ".join(filter(None, parts))


def _optimizer_class(run: Run) -> str:
    return str(at(run.record, "config.optimizer._target_") or "").rpartition(".")[2]


def _scaling(run: Run) -> str:
    """How the learning rate followed the batch size; empty where the record does not say."""
    rule = at(run.record, "lr_scaling.rule") or run.settings.get("optimizer.lr_scaling")
    reference = at(run.record, "lr_scaling.reference_batch_size")
    if rule in (None, "none"):
        return "not scaled with the batch size" if rule else ""
    return f"scaled by {rule} from batch size {reference}" if reference else f"scaled by {rule}"


def _device(run: Run) -> str:
    """`Intel(R) Xeon(R) Processor (cpu, 2 cores, 2 threads)`."""
    hardware = table(run.record.get("hardware"))
    cores, own, memory = (positive(hardware.get(key)) for key in ("cpu_cores", "device_memory_gib", "memory_gib"))
    threads = run.settings.get("threads")
    parts = [
        run.device,
        f"{run.processes} processes" if run.processes > 1 else "",
        count(round(cores), "core") if cores else "",
        setting_words("threads", threads) if isinstance(threads, int) else "",
        f"{own or memory:.3g} GiB" if own or memory else "",
        f"host {hardware['cpu']}" if run.device != "cpu" and hardware.get("cpu") else "",
    ]
    name = str(run.settings.get("device_name") or "")
    return f"{name} ({', '.join(filter(None, parts))})" if name else ", ".join(filter(None, parts))


def _versions(versions: dict[str, Any]) -> str:
    return ", ".join(f"{package} {version}" for package, version in versions.items())


def _sentence(runs: Sequence[Run]) -> str:
    """What a paper says of the runs: `We trained mlp (535,818 parameters) on mnist (…) for 2 epochs with AdamW …`."""
    trained, rated = any(map(_trained, runs)), any(RATE in run.values for run in runs)
    sizes = and_(_values(runs, lambda run: f"{run.batch_size:,}" if run.batch_size else ""))
    seeds = and_(_values(runs, lambda run: option_value(run.settings[SEED]) if SEED in run.settings else ""))
    data = and_(_values(runs, _data))
    versions: dict[str, Any] = next((of for run in runs if (of := table(run.record.get("versions")))), {})
    software = [f"{name} {versions[package]}" for package, name in _PACKAGES.items() if package in versions]
    length = _training(runs) if trained else ""
    optimizer, _, rest = _optimizer(runs).partition(", ")
    parts = [
        f"We {'trained' if trained else 'timed training steps of'} {and_(_values(runs, _model))}",
        f"on {data}" if data else "",
        f"for {length}" if length else "",
        f"with {optimizer}{f' ({rest})' if rest else ''}," if optimizer else "",
        f"at batch size{'s' if ' and ' in sizes else ''} {sizes}," if sizes else "",
        f"seed{'s' if ' and ' in seeds else ''} {seeds}," if seeds else "",
        f"precision {precision}," if (precision := and_(_values(runs, lambda run: run.precision))) else "",
        f"on {device}," if (device := and_(_values(runs, _device))) else "",
        f"with {and_(software)}" if software else "",
    ]
    said = " ".join(filter(None, parts)).rstrip(",")
    return f"{said}; rates leave out warm-up, validation and checkpoints." if rated else f"{said}."
