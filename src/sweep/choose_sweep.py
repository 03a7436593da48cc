"""A short sweep of one training over batch sizes, on each device that is here, for `batchscope choose`.

Each size is a timed run as of experiment=throughput.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..errors import UserError
from ..files import new_folder, writing
from ..options.compose import compose_command_line
from ..options.overrides import parse, text_of
from ..options.purpose import ENDLESS, timed_experiment
from .loop import Loop
from .plans import Job

_SIZES = (8, 32, 128, 512)  # where the user lists none
_ACCELERATORS = {"cpu": "cpu", "cuda": "gpu", "mps": "mps"}


def timed(overrides: Sequence[str]) -> list[str]:
    """The options of timed runs: experiment=throughput on top of the experiment that the user names, and the sizes."""
    parsed = parse(list(overrides))
    chosen = [option.value() for option in parsed if option.key_or_group == "experiment"]
    names = [str(value).strip("[]") for value in chosen if value]
    kept = [text_of(option) for option in parsed if option.key_or_group != "experiment"]
    given = {option.key_or_group: option.value() for option in parsed}
    usual = [] if "data.batch_size" in given else [f"data.batch_size={','.join(map(str, _SIZES))}"]
    fixed = ["logger=none", "callbacks.progress=null", "hydra.sweeper.params=null"]  # of a config that is a sweep
    return [timed_experiment(names), *fixed, *kept, *usual]


def measure(words: Sequence[str], kinds: Sequence[str], folder: Path, epochs: int | None = None) -> list[Path]:
    """Measure a training on each kind of device: `cpu`, `cuda`, `mps`; returns their folders of runs.

    `words` are those of `timed`, without the lengths in them. The records note for how many `epochs` the answer is asked.
    UserError if fewer than two sizes can be measured on one.
    """
    with writing("choose", folder):
        folder = new_folder(folder)
    for kind in kinds:
        device = [f"trainer.accelerator={_ACCELERATORS[kind]}", *(["trainer.devices=1"] if kind == "cpu" else [])]
        line = compose_command_line([*words, *map("=".join, ENDLESS.items()), *device], True)  # devices=[1] is a GPU
        jobs = []
        for number, (config, composition) in enumerate(zip(line.configs, line.compositions, strict=True)):
            title = f"{kind}, run {number + 1} of {len(line.configs)}: data.batch_size={composition.data.batch_size}"
            job = Job.composed(folder / kind / str(number), composition, composition.hydra, title, config)
            jobs.append(replace(job, facts=job.facts | {"asked_epochs": epochs}))
        if sum(record["status"] == "finished" for record in Loop("choose").do(jobs)) < 2:
            raise UserError(
                f"choose: fewer than two batch sizes were measured on {kind}; where they do not fit, write smaller "
                "ones: data.batch_size=1,4"
            )
    return [folder / kind for kind in kinds]
