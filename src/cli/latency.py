"""`batchscope latency`: how long a network takes to answer a batch, by batch size, and which size is enough.

    batchscope latency ckpt=<run>/checkpoints/best.ckpt
    batchscope latency model=stacked_lstm data=mnist data.batch_size=1,8,64,512 trainer.accelerator=gpu

The sizes are visited in turn, for about half a minute in all, until it is known which size is enough. A pass is timed
from an idle device to an idle device. Its inputs are on the device and random; where only the data have the shapes they
are samples, and for a LightningModule copies of its example_input_array. Nothing is written.
"""

import argparse
from pathlib import Path

from .._imports import quick_imports
from ..errors import UserError
from ..options.check import check_config
from ..options.command_lines import for_evaluation, refuse_hydra_options, refuse_not_evaluated
from ..options.compose import apply_overrides, check_command_line
from ..options.overrides import options_and_groups, parse, text_of
from ..records.terminal import LiveLine, wrapped
from . import number
from .arguments import parse_words


def main() -> None:
    """The program: parse, measure, print."""
    options, overrides = parse_words("latency", __doc__, {"ckpt": None, "data.batch_size": None})
    size = number(1, 2**20, int)
    try:
        sizes = sorted({int(size(text)) for text in options.get("data.batch_size", "1,8,64,512").split(",")})
    except argparse.ArgumentTypeError as error:
        raise UserError(f"data.batch_size: {error}") from None
    if "ckpt" not in options and not any(word.startswith("model=") for word in overrides):
        raise UserError("latency: takes a checkpoint or a model; write ckpt=<file> or model=cnn")
    refuse_hydra_options(overrides)
    config = None if "ckpt" in options else check_command_line(overrides, multirun=False)[0]
    if config:
        refuse_not_evaluated(overrides, {})
        if typed := [name for name in ("compile", "init") if name in options_and_groups(overrides)[0]]:
            raise UserError(f"{typed[0]}: has no effect on a network that was not trained and does not train")
        trainer_overrides = [text_of(o) for o in parse(overrides) if o.key_or_group.partition(".")[0] == "trainer"]
        config = check_config(apply_overrides(for_evaluation(config), trainer_overrides))
    with quick_imports():
        from ..inference import latency, load

    trained = load.untrained(config) if config else load.restore(Path(options["ckpt"]), overrides, with_data=False)
    if config is None and trained.needs_data:
        trained = load.restore(Path(options["ckpt"]), overrides, with_data=True)
    line = LiveLine()
    try:
        result = latency.measure_latency(trained, sizes, say=line)
    finally:
        line.clear()
    print(f"{trained.name} on {result.device}, {result.precision}")
    print("\n".join([*result.lines(), *wrapped(result.sentences())]))
