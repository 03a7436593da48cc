"""The commands behind `batchscope`, one a file: they parse, call, and print."""

import argparse

from ..errors import refuse_in_one_line


def command_parser(command: str, description: str | None, add_help: bool = True) -> argparse.ArgumentParser:
    """The parser of `batchscope <command>`. The description is printed as it is; a mistake is one line."""
    parser = argparse.ArgumentParser(
        f"batchscope {command}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # a misspelled flag is a mistake
        add_help=add_help,
    )
    refuse_in_one_line(parser)
    return parser


def add_config_dir(parser: argparse.ArgumentParser, where: str = "") -> None:
    """The flag `--config-dir`; `where` says in which case it is taken."""
    parser.add_argument("--config-dir", metavar="DIR", help=f"adds YAML files of your own{where}")
