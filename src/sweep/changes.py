"""Which changes a diagnosis tries: each names options that exist, differ from what is set, and can have an effect."""

import re
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from .._system import affinity
from ..errors import UserError
from ..options.check import check_config
from ..options.compose import apply_overrides
from ..options.overrides import as_override, set_by
from ..options.signatures import class_attribute
from ..options.update import ranks_asked
from ..records.formatting import option_value

_MIXED = {"cpu": ("bf16-mixed",), "cuda": ("bf16-mixed", "16-mixed"), "mps": ("16-mixed",)}
_PIPELINES = ("memory", "device", "workers")


Change = dict[str, Any]  # the options that it sets, by their full names; the baseline sets none


def words_of(change: Change) -> list[str]:
    """The options as a command line has them."""
    return [as_override(*option) for option in change.items()]


def folder_of(change: Change) -> str:
    """A name for the run's folder: `batch_size-256`."""
    parts = (f"{name.rpartition('.')[2]}-{option_value(value)}" for name, value in change.items())
    return re.sub(r"[^\w.+-]+", "_", "+".join(parts))


@dataclass(frozen=True)
class Machine:
    """What this machine offers to a run on one of its devices."""

    device: str = "cpu"  # the kind that the run uses, as torch names it
    accelerators: Sequence[str] = ("cpu",)  # the kinds that there are
    devices: int = 1  # of the kind that the run uses
    cores: int = 1  # that the process may use


def this_machine(config: Mapping[str, Any]) -> Machine:
    """What this machine offers to a run of this configuration. Imports torch."""
    import torch

    from ..hardware.devices import available

    kinds = available()
    device = "cpu" if config["trainer"].get("accelerator") == "cpu" else kinds[-1]  # Lightning takes a GPU if it can
    return Machine(
        device=device,
        accelerators=kinds,
        devices=torch.cuda.device_count() if device == "cuda" else 1,
        cores=len(affinity()),
    )


def fixed_options(overrides: Sequence[str]) -> set[str]:
    """The options that a command line sets; a choice of `trainer` sets the devices."""
    options, groups = set_by(overrides)
    return options | ({"trainer.accelerator", "trainer.devices"} if "trainer" in groups else set())


def changes_to_try(
    config: Mapping[str, Any], machine: Machine, fixed: AbstractSet[str], batch_factors: Sequence[int]
) -> tuple[list[Change], list[str]]:
    """The changes to try beside a baseline, and a line on each that may help and is not tried.

    `config` is the baseline's. The `fixed` options, which the user has set, stay as they are.
    """
    tried: list[Change] = []
    not_tried: list[str] = []
    for change in _candidates(config, machine, batch_factors):
        set_by_user = " and ".join(option for option in change if option in fixed)
        if why_not := _refusal(config, change) or (set_by_user and f"you have set {set_by_user}"):
            not_tried.append(f"not tried: {' '.join(words_of(change))}: {why_not}")
        elif change not in tried:
            tried.append(change)
    return tried, not_tried


def _refusal(config: Mapping[str, Any], change: Change) -> str:
    """Why the configuration does not go together with a change, as `global_batch_size`; empty where it does."""
    try:
        check_config(apply_overrides(dict(config), words_of(change)))
    except UserError as error:
        return str(error)
    return ""


def _candidates(config: Mapping[str, Any], machine: Machine, batch_factors: Sequence[int]) -> Iterator[Change]:
    """Each change that can have an effect."""
    processes = ranks_asked(config) or machine.devices
    yield from _batches(config, processes, batch_factors)
    data, model, trainer = config["data"], config["model"], config["trainer"]
    is_full = str(trainer.get("precision") or "32-true") in ("32", "32-true")
    on_cpu = machine.device == "cpu"
    pipeline, workers = data.get("pipeline"), data.get("num_workers") or 0
    pipeline = "memory" if on_cpu and pipeline == "device" else pipeline  # on a CPU they are the same
    more_workers = min(max(2, 2 * workers), machine.cores)
    images_alone = class_attribute(model["_target_"], "accepts") in (("image",), ["image"])
    table: list[tuple[str, Any, bool]] = [  # an option, its new value, whether that can have an effect
        *(("trainer.precision", new, True) for new in (_MIXED[machine.device] if is_full else ("32-true",))),
        *(
            ("data.pipeline", new, pipeline in _PIPELINES and new != pipeline and not (on_cpu and new == "device"))
            for new in _PIPELINES
        ),
        ("data.num_workers", more_workers, "num_workers" in data and more_workers > workers and pipeline in (None, "workers")),
        ("channels_last", not config.get("channels_last"), images_alone and machine.device != "mps"),
        ("model.backend", "fused", model.get("backend") == "reference"),
        ("trainer.accelerator", "gpu", on_cpu and "cuda" in machine.accelerators),
        ("trainer.accelerator", "mps", on_cpu and "mps" in machine.accelerators),
        ("trainer.devices", machine.devices, machine.devices > processes and trainer.get("strategy", "auto") == "auto"),
    ]  # fmt: skip
    yield from ({option: value} for option, value, has_effect in table if has_effect)


def _batches(config: Mapping[str, Any], processes: int, factors: Sequence[int]) -> Iterator[Change]:
    size, update = config["data"].get("batch_size") or 1, config["global_batch_size"]
    yield from ({"data.batch_size": size * factor} for factor in factors if factor > 1)
    whole = update // processes if update else size * config["trainer"].get("accumulate_grad_batches", 1)
    if whole > size:
        yield {"data.batch_size": whole} | ({} if update else {"trainer.accumulate_grad_batches": 1})
