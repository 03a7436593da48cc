"""A short measurement of one training at a few batch sizes, on each device that is here, for `batchscope choose`.

Each size is a timed run as of experiment=throughput, in a process of its own. What a run prints goes into a log file in its folder.
"""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ..errors import UserError
from ..files import new_folder, writing
from ..options.compose import compose_command_line, config_in
from ..options.overrides import parse, text_of
from ..options.update import largest_part
from ..records.formatting import duration
from .loop import Loop
from .plans import Job, Plan, median_step

BATCH_SIZE = "data.batch_size"
SIZES = (8, 32, 128, 512)
SECONDS_A_RUN = 4.0  # of measured steps, at most
SECONDS_A_DEVICE = 75.0  # no further size is begun if it would end later
_STEPS_AT_LEAST = 15  # of a run: warm-up, recorded operations, and six measured ones
_START_S = 4.0  # of a run, without its steps
_ACCELERATORS = {"cpu": "cpu", "cuda": "gpu", "mps": "mps"}


def own_sizes(overrides: Sequence[str]) -> tuple[list[str], list[int]]:
    """The options without `data.batch_size=…`, and the sizes that it lists; none where it is left out."""
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
    return rest, sorted(sizes)


def timed(overrides: Sequence[str]) -> list[str]:
    """The options of a timed run: experiment=throughput on top of the experiment that the user names."""
    parsed = parse(list(overrides))
    chosen = [option.value() for option in parsed if option.key_or_group == "experiment"]
    names = [str(value).strip("[]") for value in chosen if value]
    kept = [text_of(option) for option in parsed if option.key_or_group != "experiment"]
    short = [f"callbacks.until_known.seconds={SECONDS_A_RUN}", "logger=none", "callbacks.progress=null"]
    experiment = f"[{','.join([*names, 'throughput'])}]" if names else "throughput"
    return [f"experiment={experiment}", *short, *kept]


def measure(
    overrides: Sequence[str],
    sizes: Sequence[int],
    kinds: Sequence[str],
    folder: Path,
    say: Callable[[str], None],
) -> list[Path]:
    """Measure a training on each kind of device: `cpu`, `cuda`, `mps`; returns their folders of runs.

    Without sizes, these are `SIZES` as far as there is time. UserError if a run fails, or fewer than two sizes fit.
    """
    with writing("choose", folder):
        folder = new_folder(folder)
    for kind in kinds:
        Loop("choose").run(sizes_for_choose(overrides, sizes, kind, folder, say))
    return [folder / kind for kind in kinds]


def sizes_for_choose(
    overrides: Sequence[str], sizes: Sequence[int], kind: str, folder: Path, say: Callable[[str], None]
) -> Plan[None]:
    """The runs on one kind of device, with growing batches; see `measure`."""
    began, seconds, fitted = time.monotonic(), 0.0, 0
    device = _job(overrides, kind, folder / kind)
    usual = [size for size in SIZES if largest_part(device.config, 1, size) == size]
    for number, size in enumerate(sizes or usual):
        left = SECONDS_A_DEVICE - (time.monotonic() - began)
        if not sizes and fitted >= 2 and 4 * _STEPS_AT_LEAST * seconds + _START_S > left:
            say(f"{kind}: batch size {size} would take too long")
            break
        say(f"{kind}: measuring batch size {size}")
        job = device.below(str(number), {BATCH_SIZE: size}, "")
        (record,) = yield [job]
        if record["status"] == "out_of_memory":
            say(f"{kind}: batch size {size} does not fit into memory")
            break
        seconds, fitted = median_step(job, record, f"choose: the run with {BATCH_SIZE}={size}"), fitted + 1
        say(f"{kind}: {duration(seconds)} a step of {size}")
    if fitted < 2:
        raise UserError(f"choose: fewer than two batch sizes fit on {kind}; write smaller ones: {BATCH_SIZE}=1,4")


def _job(overrides: Sequence[str], kind: str, run_dir: Path) -> Job:
    """The timed run on a kind of device, with a batch size that is still to be set."""
    words = [*timed(overrides), f"{BATCH_SIZE}=1", f"trainer.accelerator={_ACCELERATORS[kind]}"]
    (composition,) = compose_command_line(words, False).compositions
    facts = {"choices": dict(composition.hydra.runtime.choices), "overrides": list(overrides)}
    return Job(run_dir, config_in(os.path.relpath(run_dir), composition), facts)
