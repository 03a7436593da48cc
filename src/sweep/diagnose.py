"""`experiment=diagnose`: compare a baseline with each single change of an option that may help.

Runs that can wait are visited side by side. Other runs follow each other, and the baseline is run again at the end. As
in any sweep, every run has its own process and folder, and is kept when the diagnosis is started again. The report is
that of a sweep over settings, of which the baseline is the first. Hydra starts a diagnosis as a sweep of one job.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from typing_extensions import override

from .._system import affinity
from ..errors import UserError
from ..options.check import check_config
from ..options.compose import apply_overrides
from ..options.overrides import as_override, options_and_groups
from ..options.ranks import ranks_asked
from ..options.signatures import class_attribute
from ..records.values import at, positive
from .plans import Job, Plan, Search
from .visits import can_wait

_MIXED = {"cpu": ("bf16-mixed",), "cuda": ("bf16-mixed", "16-mixed"), "mps": ("16-mixed",)}
_PIPELINES = ("memory", "device", "workers")
Change = dict[str, Any]  # full name of an option → its value; empty for the baseline


class Diagnosis(Search):
    """Measures a run beside changes of it, each of which is made alone."""

    @override
    def plan(self, job: Job) -> Plan:
        """Yield the runs, in subfolders of the job's folder. UserError if the baseline fails or has no rate."""
        changes: list[Change] = [{}, *changes_to_try(job.config, job.record_fields["overrides"])]
        if not can_wait(job.config):
            changes.append({})  # a second run of the baseline shows drift
        job = replace(job, seconds=positive(at(job.config, "callbacks.until_known.seconds")))
        jobs = []
        for number, change in enumerate(changes):
            title = f"run {number + 1} of {len(changes)}: {' '.join(overrides_for(change)) or 'baseline'}"
            jobs.append(job.below(str(number), change, title))
        baseline_record, *_ = yield jobs  # the table shows a refused change, too
        jobs[0].rate(baseline_record)  # raises UserError without a rate: there is nothing to compare with


def overrides_for(change: Change) -> list[str]:
    """Return a change as overrides of a command line."""
    return [as_override(*option) for option in change.items()]


def changes_to_try(config: Mapping[str, Any], overrides: Sequence[str]) -> list[Change]:
    """Return the changes of a baseline's `config` that are tried. Options that `overrides` set are not changed."""
    options, groups = options_and_groups(overrides)
    fixed = options | ({"trainer.accelerator", "trainer.devices"} if "trainer" in groups else set())
    changes: list[Change] = []
    for change in _candidates(config):
        if not fixed & change.keys() and change not in changes and _is_valid(config, change):
            changes.append(change)
    return changes


def _is_valid(config: Mapping[str, Any], change: Change) -> bool:
    """Whether a configuration accepts a change: a user's own data may refuse more workers."""
    try:
        check_config(apply_overrides(dict(config), overrides_for(change)))
    except UserError:
        return False
    return True


def _candidates(config: Mapping[str, Any]) -> Iterator[Change]:
    """Yield each change that can have an effect on this machine. Imports torch."""
    from ..hardware.devices import available, selected_device

    data, model, trainer, kinds = config["data"], config["model"], config["trainer"], available()
    device, devices = selected_device(trainer.get("accelerator"))
    processes = ranks_asked(config) or devices
    is_float32 = str(trainer.get("precision") or "32-true") in ("32", "32-true")
    on_cpu = device == "cpu"
    pipeline, workers = data.get("pipeline"), data.get("num_workers") or 0
    pipeline = "memory" if on_cpu and pipeline == "device" else pipeline  # on a CPU they are the same
    more_workers = min(max(2, 2 * workers), len(affinity()))
    takes_only_images = class_attribute(model["_target_"], "accepts") in (("image",), ["image"])
    table: list[tuple[str, Any, bool]] = [  # an option, its new value, whether the value can have an effect
        *(("trainer.precision", value, True) for value in (_MIXED[device] if is_float32 else ("32-true",))),
        *(
            ("data.pipeline", name, pipeline in _PIPELINES and name != pipeline and not (on_cpu and name == "device"))
            for name in _PIPELINES
        ),
        ("data.num_workers", more_workers, "num_workers" in data and more_workers > workers and pipeline in (None, "workers")),
        ("channels_last", not config.get("channels_last"), takes_only_images and device != "mps"),
        ("model.backend", "fused", model.get("backend") == "reference"),
        ("trainer.accelerator", "gpu", on_cpu and "cuda" in kinds),
        ("trainer.accelerator", "mps", on_cpu and "mps" in kinds),
        ("trainer.devices", devices, devices > processes and trainer.get("strategy", "auto") == "auto"),
    ]  # fmt: skip
    yield from ({option: value} for option, value, has_effect in table if has_effect)
