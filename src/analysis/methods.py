"""What was done, from the records of a report: facts with their names, and one sentence to quote in a paper.

They are of the runs that measured something, or of all where none did. What these agree in is said once; of what varies all
values are listed. What no record says is left out.
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
from .groups import SweepResults, setting_words
from .run import BATCH_SIZE, HARDWARE, LEARNING_RATE, SEED, Run
from .text import and_

# What has a row, whether it varies or not.
_HAVE_ROWS = ("model", "data", "optimizer", *HARDWARE, BATCH_SIZE, LEARNING_RATE, SEED)
_HAVE_ROWS += ("trainer.precision", "trainer.max_epochs", "optimizer.schedule", "optimizer.lr_scaling")
_PACKAGES = {"batchscope": "batchscope", "torch": "PyTorch", "lightning": "Lightning"}  # that the sentence names
_MOST = 20  # values that are listed


@dataclass(frozen=True)
class Methods:
    """What was done."""

    facts: dict[str, str]  # by their names, in the order in which they are shown
    commands: list[str]  # that started the runs, as they were typed
    sentence: str  # to quote; empty where nothing was measured


def methods(sweep: SweepResults) -> Methods:
    """What the records say of how the runs were made."""
    measured = [run for run in sweep.runs if run.status == "finished" or RATE in run.values]
    runs = sorted(measured or sweep.runs, key=lambda run: run.batch_size or 0)
    each = partial(_each, runs)
    facts = {
        "date": _date(sweep.runs),
        "model": each(_model),
        "data": each(_data),
        "batch size": each(_batch_size),
        "training": _training(runs),
        "optimizer": _optimizer(runs),
        "seed": each(lambda run: option_value(run.settings[SEED]) if SEED in run.settings else ""),
        "precision": each(lambda run: run.precision),
    }
    for key in (key for key in sweep.factors if key not in _HAVE_ROWS):
        facts[key] = each(lambda run, key=key: option_value(run.settings.get(key)))
    facts |= {"device": each(_device), "versions": "; ".join(_once(runs, _versions))}
    commands = _once(sweep.runs, lambda run: str(run.record.get("command") or ""))
    sentence = _sentence(facts | {"software": "; ".join(_once(runs, _software))}, runs) if measured else ""
    return Methods({name: text for name, text in facts.items() if text}, commands, sentence)


def _sentence(facts: dict[str, str], runs: Sequence[Run]) -> str:
    """What a paper says: `We trained mlp (535,818 parameters) on mnist (…) for 2 epochs with AdamW …`."""
    is_of_trainings = any(map(is_trained, runs))
    said = f"We {'trained' if is_of_trainings else 'timed training steps of'} {facts['model']}"
    words = {"data": " on", "training": " for", "optimizer": " with", "batch size": ", at batch size"}
    words |= {"seed": ", seed", "precision": ", precision", "device": ", on", "software": ", with"}
    for name, word in words.items():
        plural = "s" if name in ("batch size", "seed") and " and " in facts[name] else ""
        said += f"{word}{plural} {facts[name]}" if facts[name] and (is_of_trainings or name != "training") else ""
    has_rates = any(RATE in run.values for run in runs)
    return f"{said}; rates leave out warm-up, validation and checkpoints." if has_rates else f"{said}."


def _each(runs: Sequence[Run], text: Callable[[Run], str]) -> str:
    """What is said of some runs, and of many things how many more there are: `32, 64 and 128`."""
    return and_(_once(runs, text), most=_MOST)


def _once(runs: Sequence[Run], text: Callable[[Run], str]) -> list[str]:
    """What is said of some runs, in one line each, once."""
    return [*dict.fromkeys(printable(" ".join(said.split())) for run in runs if (said := text(run)))]


def _date(runs: Sequence[Run]) -> str:
    """`2026-11-28, 06:58 to 06:59 UTC`, or `2026-11-28, 23:58 to 2026-11-29, 00:03 UTC`."""
    moments = [str(run.record[key]) for run in runs for key in ("started", "finished") if run.record.get(key)]
    try:
        times = sorted(datetime.fromisoformat(moment) for moment in moments)
    except (ValueError, TypeError):  # a damaged record; one with and one without a zone
        return ""
    if not times:
        return ""
    day = "" if times[0].date() == times[-1].date() else f"{times[-1]:%Y-%m-%d}, "
    return f"{times[0]:%Y-%m-%d, %H:%M} to {day}{times[-1]:%H:%M %Z}".strip()


def _model(run: Run) -> str:
    """`cnn (SimpleCNN, 421,642 parameters)`."""
    kind, size = str(at(run.record, "model.class") or ""), positive(at(run.record, "model.parameters"))
    facts = [kind if kind.lower() != run.model.lower() else "", f"{size:,.0f} parameters" if size else ""]
    return _with(run.model, facts)


def _data(run: Run) -> str:
    """`mnist (55,000 training, 5,000 validation and 10,000 test samples)`."""
    validated, tested = (positive(at(run.record, f"evaluated.{stage}")) for stage in ("val", "test"))
    sizes = {"training": run.train_samples, "validation": validated, "test": tested}
    known = and_([f"{size:,.0f} {name}" for name, size in sizes.items() if size])
    return _with(run.dataset or str(run.settings.get("data") or ""), [f"{known} samples" if known else ""])


def _with(name: str, facts: Sequence[str]) -> str:
    known = ", ".join(filter(None, facts))
    return f"{name} ({known})" if name and known else name or known


def _batch_size(run: Run) -> str:
    """`64`, or `64 (an update of 256)` where several batches make an update."""
    update = run.values.get("global_batch_size")  # where it is another number
    return _with(f"{run.batch_size:,}" if run.batch_size else "", [f"an update of {update:,.0f}" if update else ""])


def is_trained(run: Run) -> bool:
    """Whether a run was trained to an end of its own, and not to be timed."""
    has_fit = run.status == "finished" or run.record.get("epochs") is not None  # of a failure in the test
    return has_fit and not at(run.record, "throughput.ended")


def _training(runs: Sequence[Run]) -> str:
    """How long was trained: `2 epochs (860 updates)`, or `timed alone, for 120 to 1,430 steps`."""
    if trained := [run for run in runs if is_trained(run)]:
        return _with(_span(trained, "epochs", "epoch"), [_span(trained, "steps", "update")])
    timed = _span(runs, "throughput.updates", "step")
    return f"timed alone, for {timed}" if timed else ""


def _span(runs: Sequence[Run], path: str, unit: str) -> str:
    """The numbers at a path of the records: `2 epochs`, `120 to 1,430 steps`; empty where all are 0 or unknown."""
    known = sorted(round(value) for run in runs if (value := number(at(run.record, path))) is not None)
    if not known or not known[-1]:
        return ""
    return (f"{known[0]:,} to " if known[0] < known[-1] else "") + count(known[-1], unit)


def _optimizer(runs: Sequence[Run]) -> str:
    """`AdamW (learning rate 0.004, not scaled with the batch size, schedule one_cycle)`, as far as it is known."""
    each, rate = partial(_each, runs), metric("learning_rate").text
    asked = each(lambda run: rate(run.asked_rate) if run.asked_rate else "")
    values = sorted({run.values["learning_rate"] for run in runs if "learning_rate" in run.values})
    used = " to ".join(dict.fromkeys(map(rate, [*values[:1], *values[-1:]])))
    scaling, schedule = each(_scaling), each(lambda run: str(run.settings.get("optimizer.schedule") or ""))
    has_option = any("optimizer.lr_scaling" in run.settings for run in runs)  # else only several sizes tell
    is_not_scaled = len(values) == 1 and (has_option or len({run.batch_size for run in runs}) > 1)
    facts = [
        f"learning rate {asked or used}" if asked or used else "",
        f"{scaling} to {used}" if scaling else "not scaled with the batch size" if is_not_scaled else "",
        f"schedule {schedule}" if schedule else "",
    ]
    return _with(each(lambda run: str(at(run.record, "config.optimizer._target_") or "").rpartition(".")[2]), facts)


def _scaling(run: Run) -> str:
    """The rule by which the learning rate followed the batch size; empty where none did."""
    rule, reference = (at(run.record, f"lr_scaling.{key}") for key in ("rule", "reference_batch_size"))
    return f"scaled by {rule} from batch size {reference}" if rule in ("sqrt", "linear") else ""


def _device(run: Run) -> str:
    """`Intel(R) Xeon(R) Processor (cpu, 2 cores, 2 threads, 23.5 GiB)`."""
    hardware, threads = table(run.record.get("hardware")), run.settings.get("threads")
    cores, of_device = hardware.get("cpu_cores"), "memory_gib" if run.device == "cpu" else "device_memory_gib"
    facts = [
        run.device,
        f"{run.processes} processes" if run.processes > 1 else "",
        setting_words("cores", cores) if positive(cores) else "",
        setting_words("threads", threads) if positive(threads) else "",
        memory(size * 2**30) if (size := positive(hardware.get(of_device))) else "",
        f"host {hardware['cpu']}" if run.device != "cpu" and hardware.get("cpu") else "",
    ]
    return _with(str(run.settings.get("device_name") or ""), facts)


def _versions(run: Run) -> str:
    return ", ".join(f"{package} {version}" for package, version in table(run.record.get("versions")).items())


def _software(run: Run) -> str:
    versions = table(run.record.get("versions"))
    return and_([f"{name} {versions[key]}" for key, name in _PACKAGES.items() if key in versions])
