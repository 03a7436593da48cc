"""`batchscope hardware`: measure every device of this machine, and compare the devices.

    batchscope hardware
    batchscope hardware --device cpu --json

The comparison is a product of a matrix with its own transpose, summed up, 100 times. A GPU shows its speed on the large
matrix and not on the small one. Between them is the size at which the fastest device changes.
"""

import argparse
import json
import sys
from collections.abc import Sequence

from ..errors import UserError, did_you_mean, exit_on_user_error
from . import command_parser

_KINDS = ("cpu", "cuda", "mps")


def main() -> None:
    """The command line."""
    exit_on_user_error(lambda: run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> None:
    """Measure, compare, print.

    Raises:
        UserError: for a device that does not exist or that this machine does not have.
    """
    options = _parser().parse_args(arguments)
    if options.device not in (None, "gpu", *_KINDS):
        near = did_you_mean(options.device, _KINDS)
        raise UserError(f"--device: got '{options.device}', takes cpu, cuda or mps.{near}")
    from ..hardware import comparison  # torch takes seconds to import

    found = comparison.measure(options.device, options.refresh, options.quick)
    print(json.dumps(comparison.as_json(*found), indent=2) if options.json else comparison.as_text(*found))


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("hardware", __doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    parser.add_argument("--device", help="cpu, cuda or mps; by default every device of this machine")
    parser.add_argument("--refresh", action="store_true", help="measure again, and replace what is in the cache")
    parser.add_argument("--quick", action="store_true", help="take less time, at less accuracy; nothing is cached")
    return parser
