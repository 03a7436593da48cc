"""Measure one training at several batch sizes, on each kind of device of this machine, for `batchscope choose`.

Each size is a timed run, as with experiment=throughput.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..errors import UserError
from ..files import as_write_error, new_folder
from ..options.compose import compose_command_line
from ..options.overrides import parse, text_of
from ..options.purpose import ENDLESS, timed_experiment
from .loop import Loop
from .plans import Job

_DEFAULT_SIZES = (8, 32, 128, 512)
_ACCELERATORS = {"cpu": "cpu", "cuda": "gpu", "mps": "mps"}


def timed_overrides(overrides: Sequence[str]) -> list[str]:
    """Return the options of timed runs: experiment=throughput on top of the user's experiment, and the batch sizes."""
    parsed = parse(list(overrides))
    experiments = [override.value() for override in parsed if override.key_or_group == "experiment"]
    names = [str(value).strip("[]") for value in experiments if value]
    typed = [text_of(override) for override in parsed if override.key_or_group != "experiment"]
    has_sizes = any(override.key_or_group == "data.batch_size" for override in parsed)
    sizes = [] if has_sizes else [f"data.batch_size={','.join(map(str, _DEFAULT_SIZES))}"]
    fixed = ["logger=none", "callbacks.progress=null", "hydra.sweeper.params=null"]  # a config may define a sweep
    return [timed_experiment(names), *fixed, *typed, *sizes]


def measure_on_devices(
    words: Sequence[str], kinds: Sequence[str], folder: Path, epochs: int | None = None
) -> list[Path]:
    """Measure a training on each kind of device (`cpu`, `cuda`, `mps`), and return a folder of runs for each.

    `words` come from `timed_overrides`; limits of the training's length are overridden. The records keep `epochs`, the length
    that the answer is for. UserError if fewer than two sizes can be measured on a device.
    """
    with as_write_error("choose", folder):
        folder = new_folder(folder)
    for kind in kinds:
        device = [f"trainer.accelerator={_ACCELERATORS[kind]}", *(["trainer.devices=1"] if kind == "cpu" else [])]
        line = compose_command_line([*words, *map("=".join, ENDLESS.items()), *device], True)  # devices=[1] is a GPU
        jobs = []
        for number, (config, composition) in enumerate(zip(line.configs, line.compositions, strict=True)):
            title = f"{kind}, run {number + 1} of {len(line.configs)}: data.batch_size={composition.data.batch_size}"
            job = Job.composed(folder / kind / str(number), composition, composition.hydra, title, config)
            jobs.append(replace(job, record_fields=job.record_fields | {"asked_epochs": epochs}))
        if sum(record["status"] == "finished" for record in Loop("choose").do(jobs)) < 2:
            raise UserError(
                f"choose: fewer than two batch sizes were measured on {kind}; where they do not fit, write smaller "
                "ones: data.batch_size=1,4"
            )
    return [folder / kind for kind in kinds]
