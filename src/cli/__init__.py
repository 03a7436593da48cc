"""The commands of `batchscope`, one a file: they parse, call, and print. This file has what several of them share."""

import argparse
import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..errors import refuse_in_one_line
from ..options import CONFIG_DIR
from ..records.read import replacing
from ..records.terminal import wrapped


def command_parser(name: str, description: str | None, add_help: bool = True) -> argparse.ArgumentParser:
    """Return the parser of `batchscope <name>`, which prints the description unchanged, and a mistake in one line.

    Every command takes `--config-dir`, by default CONFIG_DIR of the environment. Parsing it puts it into use.
    """
    parser = argparse.ArgumentParser(
        f"batchscope {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # a misspelled flag is a mistake
        add_help=add_help,
    )
    refuse_in_one_line(parser)
    parser.add_argument(
        "--config-dir",
        type=_use_config_dir,
        default=os.environ.get(CONFIG_DIR) or None,
        metavar="DIR",
        help=f"adds YAML files of your own; {CONFIG_DIR} in the environment does the same on every line",
    )
    return parser


def _use_config_dir(folder: str) -> None:
    from ..options.groups import use_config_dir  # brings OmegaConf, which not every command needs

    use_config_dir(folder, CONFIG_DIR if folder == os.environ.get(CONFIG_DIR) else "--config-dir")


def folders_and_options(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split words into names of folders and options. The name of an existing folder may have an equals sign."""
    folders = [word for word in words if os.path.exists(word) or ("=" not in word and not word.startswith("~"))]
    return folders, [word for word in words if word not in folders]


def number(least: float, most: float, kind: type[int] | type[float] = float) -> Callable[[str], float]:
    """Return an argparse type: a number between two bounds, inclusive."""

    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):
            if least <= kind(text) <= most:
                return kind(text)
        noun = "a whole number" if kind is int else "a number"
        raise argparse.ArgumentTypeError(f"takes {noun} from {least:,} to {most:,}, got {text!r}")

    return parse


def default_folder(name: str) -> Path:
    """Return the folder that a command writes to by default, named by the command and the time."""
    return Path("outputs") / name / time.strftime("%Y-%m-%d_%H-%M-%S")


def fraction(text: str) -> float:
    """Parse a share, as an argparse type: `5%`, `5 %` or `0.05`."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(%?)", text.strip())
    share = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    if not 0 <= share <= (10 if match and match[2] else 1):
        raise argparse.ArgumentTypeError(f"takes a share such as 5% or 0.05, got {text!r}")
    return share


def picture(text: str) -> Path:
    """Parse the path of a picture, as an argparse type; the suffix is one of three formats."""
    if Path(text).suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"takes a file that ends with .png, .svg or .pdf, got {text!r}")
    return Path(text)


def draw(name: str, lines: Sequence[Any], path: Path, sentence: str, to_stderr: bool, **options: str) -> None:
    """Write the picture that `choice.pictures.<name>` draws, and print its sentence and its path. Raises WriteError."""
    from ..analysis import plots  # matplotlib takes a second to import
    from ..choice import pictures

    with replacing(path, "--plot") as file:
        file.write(plots.saved(getattr(pictures, name)(lines, **options), path.stem, path.suffix[1:]))
    text = "\n".join(["", *wrapped(filter(None, [sentence])), f"picture  {path}"])
    print(text, file=sys.stderr if to_stderr else sys.stdout, flush=True)
