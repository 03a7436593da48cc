"""`experiment=diagnose`: a baseline, and each change that may help beside it.

What can wait is visited side by side; other runs follow each other, and the baseline follows them. Every run is a run of a
sweep: in a process of its own, in a folder of its own, and kept when the diagnosis is started again. The report is that of any
sweep over settings, of which the baseline is the first. Hydra starts a diagnosis as a sweep of one job.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from typing_extensions import override

from .._system import affinity
from ..errors import UserError
from ..options.check import check_config
from ..options.compose import apply_overrides
from ..options.overrides import as_override, set_by
from ..options.ranks import ranks_asked
from ..options.signatures import class_attribute
from ..records.values import at, positive
from .plans import Job, Plan, Search
from .visits import can_wait

_MIXED = {"cpu": ("bf16-mixed",), "cuda": ("bf16-mixed", "16-mixed"), "mps": ("16-mixed",)}
_PIPELINES = ("memory", "device", "workers")
Change = dict[str, Any]  # the options that it sets, by their full names; the baseline sets none


class Diagnosis(Search):
    """Changes of one run are tried beside it, each alone."""

    @override
    def plan(self, job: Job) -> Plan:
        """The runs of a diagnosis, in folders below the job's own. UserError for a baseline that fails or has no rate."""
        changes: list[Change] = [{}, *changes_to_try(job.config, job.facts["overrides"])]
        if not can_wait(job.config):
            changes.append({})  # the baseline again, which shows drift
        job = replace(job, seconds=positive(at(job.config, "callbacks.until_known.seconds")))
        jobs = []
        for number, change in enumerate(changes):
            title = f"run {number + 1} of {len(changes)}: {' '.join(words_of(change)) or 'baseline'}"
            jobs.append(job.below(str(number), change, title))
        baseline, *_ = yield jobs  # a change that is refused is a result, and in the table
        jobs[0].rate(baseline)  # there is nothing to compare with a baseline that has none


def words_of(change: Change) -> list[str]:
    """The options as a command line has them."""
    return [as_override(*option) for option in change.items()]


def changes_to_try(config: Mapping[str, Any], overrides: Sequence[str]) -> list[Change]:
    """The changes to try beside a baseline. `config` is the baseline's; what its `overrides` set stays as it is."""
    options, groups = set_by(overrides)
    fixed = options | ({"trainer.accelerator", "trainer.devices"} if "trainer" in groups else set())
    tried: list[Change] = []
    for change in _candidates(config):
        if not fixed & change.keys() and change not in tried and _goes_with(config, change):
            tried.append(change)
    return tried


def _goes_with(config: Mapping[str, Any], change: Change) -> bool:
    """Whether a change goes together with a configuration, such as more workers with data of the user's own."""
    try:
        check_config(apply_overrides(dict(config), words_of(change)))
    except UserError:
        return False
    return True


def _candidates(config: Mapping[str, Any]) -> Iterator[Change]:
    """Each change that can have an effect on this machine. Imports torch."""
    from ..hardware.devices import available, taken

    data, model, trainer, kinds = config["data"], config["model"], config["trainer"], available()
    device, devices = taken(trainer.get("accelerator"))
    processes = ranks_asked(config) or devices
    is_full = str(trainer.get("precision") or "32-true") in ("32", "32-true")
    on_cpu = device == "cpu"
    pipeline, workers = data.get("pipeline"), data.get("num_workers") or 0
    pipeline = "memory" if on_cpu and pipeline == "device" else pipeline  # on a CPU they are the same
    more_workers = min(max(2, 2 * workers), len(affinity()))
    images_alone = class_attribute(model["_target_"], "accepts") in (("image",), ["image"])
    table: list[tuple[str, Any, bool]] = [  # an option, its new value, whether that can have an effect
        *(("trainer.precision", new, True) for new in (_MIXED[device] if is_full else ("32-true",))),
        *(
            ("data.pipeline", new, pipeline in _PIPELINES and new != pipeline and not (on_cpu and new == "device"))
            for new in _PIPELINES
        ),
        ("data.num_workers", more_workers, "num_workers" in data and more_workers > workers and pipeline in (None, "workers")),
        ("channels_last", not config.get("channels_last"), images_alone and device != "mps"),
        ("model.backend", "fused", model.get("backend") == "reference"),
        ("trainer.accelerator", "gpu", on_cpu and "cuda" in kinds),
        ("trainer.accelerator", "mps", on_cpu and "mps" in kinds),
        ("trainer.devices", devices, devices > processes and trainer.get("strategy", "auto") == "auto"),
    ]  # fmt: skip
    yield from ({option: value} for option, value, has_effect in table if has_effect)
