"""`batchscope --shell-completion`: what makes a shell complete the words of `batchscope train`.

    eval "$(batchscope --shell-completion install=bash)"      # also zsh, fish; uninstall=bash undoes it

The completion is Hydra's: groups, choices and options of the installed configs.
"""

import os
import re
import sys
from collections.abc import Sequence

from .. import _hydra
from ..errors import UserError
from ..options.groups import CONFIGS

_QUERY = re.compile(r"query=(bash|fish|zsh)")  # from the shell, with what has been typed so far in COMP_LINE
_TAKEN = re.compile(r"(un)?install=(bash|fish|zsh)")


def complete(words: list[str], commands: Sequence[str]) -> None:
    """Print the shell's code, or the words that may come next.

    Raises:
        UserError: for other words than `install=<shell>`, `uninstall=<shell>` and the shell's own question.
    """
    is_query = len(words) == 1 and _QUERY.fullmatch(words[0]) and "COMP_LINE" in os.environ
    if not is_query and not (len(words) == 1 and _TAKEN.fullmatch(words[0])):
        takes = "takes install=bash, install=zsh, install=fish, or uninstall=…"
        raise UserError(f"--shell-completion: {takes}", exit_code=2)
    sys.argv[0] = "batchscope"  # the program that Hydra names in its code
    if is_query:
        typed = os.environ["COMP_LINE"].split(maxsplit=1)[1:]
        rest = "".join(typed)
        command, space, options = rest.partition(" ")
        if not space:
            print("\n".join(name for name in commands if name.startswith(command)))
            return
        if command != "train":
            return
        os.environ["COMP_LINE"] = f"batchscope {options}"
    _hydra.complete(CONFIGS, words)
