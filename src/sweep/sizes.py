"""A short sweep of one training over batch sizes, on each device that is here, for `batchscope choose`.

Each size is a timed run as of experiment=throughput.
"""

from collections.abc import Sequence
from pathlib import Path

from .._system import relative
from ..errors import UserError
from ..files import new_folder, writing
from ..options.compose import compose, compose_command_line, config_in
from ..options.overrides import parse, text_of
from .loop import Loop
from .plans import Job

BATCH_SIZE = "data.batch_size"
_SIZES = (8, 32, 128, 512)  # where the user lists none
_ACCELERATORS = {"cpu": "cpu", "cuda": "gpu", "mps": "mps"}


def own_sizes(overrides: Sequence[str]) -> tuple[list[str], list[int]]:
    """The options without `data.batch_size=…`, and the sizes that it lists, or the usual ones.

    Raises:
        UserError: if it lists fewer than two, or fewer than two of the usual ones divide `global_batch_size`.
    """
    rest: list[str] = []
    sizes: set[int] = set()
    for option in parse(list(overrides)):
        if option.key_or_group != BATCH_SIZE:
            rest.append(text_of(option))
            continue
        values = [text.strip() for text in text_of(option).partition("=")[2].split(",")]
        sizes = {int(text) for text in values if text.isdecimal()} - {0}
        if len(sizes) < max(2, len(values)):
            raise UserError(
                f"{BATCH_SIZE}: choose needs several sizes, to tell what a step costs from what a sample costs; write "
                f"{BATCH_SIZE}=32,128, or leave it out"
            )
    if sizes:
        return rest, sorted(sizes)
    update = compose(rest).get("global_batch_size")
    usual = [size for size in _SIZES if not isinstance(update, int) or update % size == 0]
    if len(usual) < 2:
        raise UserError(
            f"{BATCH_SIZE}: choose needs several sizes, and of {', '.join(map(str, _SIZES))} fewer than two divide "
            f"global_batch_size={update}; list sizes that do"
        )
    return rest, usual


def timed(overrides: Sequence[str]) -> list[str]:
    """The options of a timed run: experiment=throughput on top of the experiment that the user names."""
    parsed = parse(list(overrides))
    chosen = [option.value() for option in parsed if option.key_or_group == "experiment"]
    names = [str(value).strip("[]") for value in chosen if value]
    kept = [text_of(option) for option in parsed if option.key_or_group != "experiment"]
    experiment = f"[{','.join([*names, 'throughput'])}]" if names else "throughput"
    return [f"experiment={experiment}", "logger=none", "callbacks.progress=null", *kept]


def measure(overrides: Sequence[str], sizes: Sequence[int], kinds: Sequence[str], folder: Path) -> list[Path]:
    """Measure a training on each kind of device: `cpu`, `cuda`, `mps`; returns their folders of runs.

    UserError if fewer than two sizes can be measured on one.
    """
    with writing("choose", folder):
        folder = new_folder(folder)
    for kind in kinds:
        listed = f"{BATCH_SIZE}={','.join(map(str, sizes))}"
        words = [*timed(overrides), listed, f"trainer.accelerator={_ACCELERATORS[kind]}"]
        jobs = []
        for number, composition in enumerate(compose_command_line(words, True).compositions):
            place, size = folder / kind / str(number), f"{BATCH_SIZE}={sizes[number]}"
            facts = {"choices": dict(composition.hydra.runtime.choices), "overrides": [*overrides, size]}
            title = f"{kind}, run {number + 1} of {len(sizes)}: {size}"
            jobs.append(Job(place, config_in(relative(place), composition), facts, title))
        if sum(record["status"] == "finished" for record in Loop("choose").do(jobs)) < 2:
            raise UserError(
                f"choose: fewer than two batch sizes were measured on {kind}; where they do not fit, write smaller "
                f"ones: {BATCH_SIZE}=1,4"
            )
    return [folder / kind for kind in kinds]
