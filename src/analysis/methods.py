"""What was done, from the records of a report: facts with their names, and one sentence to quote in a paper.

Facts describe the runs that measured something, or all runs where none did. A value that the runs share stands once; of
varying values all are listed. What no record says is left out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial

from ..errors import printable
from ..records.formatting import count, memory, option_value
from ..records.metrics import metric
from ..records.rates import RATE
from ..records.values import at, number, positive, table
from .groups import SweepResults, setting_text
from .run import BATCH_SIZE, HARDWARE, LEARNING_RATE, SEED, Run
from .text import and_

# Settings that a fact states whether they vary or not.
_STATED = ("model", "data", "optimizer", *HARDWARE, BATCH_SIZE, LEARNING_RATE, SEED)
_STATED += ("trainer.precision", "trainer.max_epochs", "optimizer.schedule", "optimizer.lr_scaling")
_PACKAGES = {"batchscope": "batchscope", "torch": "PyTorch", "lightning": "Lightning"}  # that the sentence names
_MOST = 20  # values that are listed


@dataclass(frozen=True)
class Methods:
    """What was done."""

    facts: dict[str, str]  # by name, in the order in which they are shown
    commands: list[str]  # the commands that started the runs, as typed
    sentence: str  # to quote; empty where nothing was measured


def methods(sweep: SweepResults) -> Methods:
    """Return what the records say of how the runs were made."""
    measured = [run for run in sweep.runs if run.status == "finished" or RATE in run.values]
    runs = sorted(measured or sweep.runs, key=lambda run: run.batch_size or 0)
    joined = partial(_joined_texts, runs)
    facts = {
        "date": _date(sweep.runs),
        "model": joined(_model),
        "data": joined(_data),
        "batch size": joined(_batch_size),
        "training": _training(runs),
        "optimizer": _optimizer(runs),
        "seed": joined(lambda run: option_value(run.settings[SEED]) if SEED in run.settings else ""),
        "precision": joined(lambda run: run.precision),
    }
    for key in (key for key in sweep.factors if key not in _STATED):
        facts[key] = joined(lambda run, key=key: option_value(run.settings.get(key)))
    facts |= {"device": joined(_device), "versions": "; ".join(_distinct_texts(runs, _versions))}
    commands = _distinct_texts(sweep.runs, lambda run: str(run.record.get("command") or ""))
    sentence = _sentence(facts | {"software": "; ".join(_distinct_texts(runs, _software))}, runs) if measured else ""
    return Methods({name: text for name, text in facts.items() if text}, commands, sentence)


def _sentence(facts: dict[str, str], runs: Sequence[Run]) -> str:
    """Return the sentence for a paper: `We trained mlp (535,818 parameters) on mnist (…) for 2 epochs with AdamW …`."""
    has_trained = any(map(is_trained, runs))
    sentence = f"We {'trained' if has_trained else 'timed training steps of'} {facts['model']}"
    words = {"data": " on", "training": " for", "optimizer": " with", "batch size": ", at batch size"}
    words |= {"seed": ", seed", "precision": ", precision", "device": ", on", "software": ", with"}
    for name, word in words.items():
        plural = "s" if name in ("batch size", "seed") and " and " in facts[name] else ""
        sentence += f"{word}{plural} {facts[name]}" if facts[name] and (has_trained or name != "training") else ""
    has_rates = any(RATE in run.values for run in runs)
    return f"{sentence}; rates leave out warm-up, validation and checkpoints." if has_rates else f"{sentence}."


def _joined_texts(runs: Sequence[Run], text: Callable[[Run], str]) -> str:
    """Join the distinct texts of runs: `32, 64 and 128`; of more than 20, the others are counted."""
    return and_(_distinct_texts(runs, text), most=_MOST)


def _distinct_texts(runs: Sequence[Run], text: Callable[[Run], str]) -> list[str]:
    """Return the distinct texts of runs, each in one line; empty texts are left out."""
    return [*dict.fromkeys(printable(" ".join(words.split())) for words in map(text, runs) if words)]


def _date(runs: Sequence[Run]) -> str:
    """Return `2026-11-28, 06:58 to 06:59 UTC`, or `2026-11-28, 23:58 to 2026-11-29, 00:03 UTC`."""
    moments = [str(run.record[key]) for run in runs for key in ("started", "finished") if run.record.get(key)]
    try:
        times = sorted(datetime.fromisoformat(moment) for moment in moments)
    except (ValueError, TypeError):  # a damaged record, or times with and without a time zone
        return ""
    if not times:
        return ""
    day = "" if times[0].date() == times[-1].date() else f"{times[-1]:%Y-%m-%d}, "
    return f"{times[0]:%Y-%m-%d, %H:%M} to {day}{times[-1]:%H:%M %Z}".strip()


def _model(run: Run) -> str:
    """Return `cnn (SimpleCNN, 421,642 parameters)`."""
    kind, size = str(at(run.record, "model.class") or ""), positive(at(run.record, "model.parameters"))
    details = [kind if kind.lower() != run.model.lower() else "", f"{size:,.0f} parameters" if size else ""]
    return _with_details(run.model, details)


def _data(run: Run) -> str:
    """Return `mnist (55,000 training, 5,000 validation and 10,000 test samples)`."""
    validated, tested = (positive(at(run.record, f"evaluated.{stage}")) for stage in ("val", "test"))
    sizes = {"training": run.train_samples, "validation": validated, "test": tested}
    samples = and_([f"{size:,.0f} {name}" for name, size in sizes.items() if size])
    return _with_details(run.dataset or str(run.settings.get("data") or ""), [f"{samples} samples" if samples else ""])


def _with_details(name: str, details: Sequence[str]) -> str:
    known = ", ".join(filter(None, details))
    return f"{name} ({known})" if name and known else name or known


def _batch_size(run: Run) -> str:
    """Return `64`, or `64 (an update of 256)` where several batches make an update."""
    size, update = run.batch_size, run.values.get("global_batch_size")  # only if it is another number
    return _with_details(f"{size:,}" if size else "", [f"an update of {update:,.0f}" if update else ""])


def is_trained(run: Run) -> bool:
    """Whether the fit of a run came to its end, and was not a timed one."""
    has_fit = run.status == "finished" or run.record.get("epochs") is not None  # if the test failed
    return has_fit and not at(run.record, "throughput.ended")


def _training(runs: Sequence[Run]) -> str:
    """Say how long was trained: `2 epochs (860 updates)`, or `timed alone, for 120 to 1,430 steps`."""
    if trained := [run for run in runs if is_trained(run)]:
        return _with_details(_span(trained, "epochs", "epoch"), [_span(trained, "steps", "update")])
    steps = _span(runs, "throughput.updates", "step")
    return f"timed alone, for {steps}" if steps else ""


def _span(runs: Sequence[Run], path: str, unit: str) -> str:
    """Return the range of a number of the records: `2 epochs`, `120 to 1,430 steps`; empty where all are 0 or unknown."""
    counts = sorted(round(value) for run in runs if (value := number(at(run.record, path))) is not None)
    if not counts or not counts[-1]:
        return ""
    return (f"{counts[0]:,} to " if counts[0] < counts[-1] else "") + count(counts[-1], unit)


def _optimizer(runs: Sequence[Run]) -> str:
    """Return `AdamW (learning rate 0.004, not scaled with the batch size, schedule one_cycle)`, without what is not known."""
    joined, rate_text = partial(_joined_texts, runs), metric("learning_rate").text
    name = joined(lambda run: str(at(run.record, "config.optimizer._target_") or "").rpartition(".")[2])
    asked = joined(lambda run: rate_text(run.asked_rate) if run.asked_rate else "")
    rates = sorted({run.values["learning_rate"] for run in runs if "learning_rate" in run.values})
    used = " to ".join(dict.fromkeys(map(rate_text, [*rates[:1], *rates[-1:]])))
    scaling, schedule = joined(_scaling), joined(lambda run: str(run.settings.get("optimizer.schedule") or ""))
    has_option = any("optimizer.lr_scaling" in run.settings for run in runs)  # else only several sizes tell
    is_not_scaled = len(rates) == 1 and (has_option or len({run.batch_size for run in runs}) > 1)
    details = [
        f"learning rate {asked or used}" if asked or used else "",
        f"{scaling} to {used}" if scaling else "not scaled with the batch size" if is_not_scaled else "",
        f"schedule {schedule}" if schedule else "",
    ]
    return _with_details(name, details)


def _scaling(run: Run) -> str:
    """Return the rule by which the learning rate followed the batch size; empty where it was not scaled."""
    rule, reference = (at(run.record, f"lr_scaling.{key}") for key in ("rule", "reference_batch_size"))
    return f"scaled by {rule} from batch size {reference}" if rule in ("sqrt", "linear") else ""


def _device(run: Run) -> str:
    """Return `Intel(R) Xeon(R) Processor (cpu, 2 cores, 2 threads, 23.5 GiB)`."""
    hardware, threads = table(run.record.get("hardware")), run.settings.get("threads")
    cores, memory_key = hardware.get("cpu_cores"), "memory_gib" if run.device == "cpu" else "device_memory_gib"
    details = [
        run.device,
        f"{run.processes} processes" if run.processes > 1 else "",
        setting_text("cores", cores) if positive(cores) else "",
        setting_text("threads", threads) if positive(threads) else "",
        memory(size * 2**30) if (size := positive(hardware.get(memory_key))) else "",
        f"host {hardware['cpu']}" if run.device != "cpu" and hardware.get("cpu") else "",
    ]
    return _with_details(str(run.settings.get("device_name") or ""), details)


def _versions(run: Run) -> str:
    return ", ".join(f"{package} {version}" for package, version in table(run.record.get("versions")).items())


def _software(run: Run) -> str:
    versions = table(run.record.get("versions"))
    return and_([f"{name} {versions[key]}" for key, name in _PACKAGES.items() if key in versions])
