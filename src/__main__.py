"""The program: `batchscope train model=cnn`. `python -m batchscope …` is the same.

A command's module is imported only when the command is used, so that a wrong command is refused at once.
"""

import importlib
import importlib.util
import os
import shlex
import sys

from . import __version__
from .errors import UserError, did_you_mean, exit_on_user_error

# command → its line of help; its module is `cli/<command>.py`
COMMANDS = {
    "train": "train one model, or with -m a sweep of runs: batchscope train model=cnn",
    "new": "write a project of your own, to train your model on your data: batchscope new mynet",
    "evaluate": "test a checkpoint: batchscope evaluate ckpt=<run>/checkpoints/best.ckpt",
    "run": "measure any Lightning script, unchanged: batchscope run theirs.py --their --flags",
    "predict": "what a network answers: batchscope predict ckpt=<file> input=<images>",
    "export": "a network as a file for other programs: batchscope export ckpt=<file>",
    "latency": "how long a network takes to answer, by batch size: batchscope latency ckpt=<file>",
    "report": "compare runs in a table, plots and a recommendation: batchscope report <sweep>",
    "compare": "tell whether one run, or its repeats, is slower than another: batchscope compare <a> <b>",
    "explain": "show where the time of a step goes: batchscope explain <run>",
    "choose": "tell which device to take, with time and cost: batchscope choose model=cnn data=mnist",
    "hardware": "measure what this machine can do: batchscope hardware",
}
_HELP = """usage: batchscope <command> …

Train networks, and see what every step cost and why.

{commands}

batchscope <command> --help lists what a command takes; batchscope --version prints the version."""


def main() -> None:
    """Run the command that the first argument names."""
    exit_on_user_error(_main)


def _main() -> None:
    word = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if word in ("-h", "--help"):
        print(_HELP.format(commands="\n".join(f"  {name:10} {text}" for name, text in COMMANDS.items())))
    elif word == "--version":
        print(f"batchscope {__version__}")
    elif word in COMMANDS:
        # Lightning starts the other ranks of a run with the module of `__main__.__spec__` and `sys.argv[1:]`:
        # `python -m batchscope.train …`.
        del sys.argv[1]
        if word == "train":  # so that other ranks, too, import from the current folder last and not first
            os.environ["PYTHONSAFEPATH"] = "1"
        sys.modules["__main__"].__spec__ = importlib.util.find_spec("batchscope.train")
        importlib.import_module(f"batchscope.cli.{word}").main()
    elif "=" in word and not word.startswith("-"):
        message = f"{word}: an option comes after a command; write batchscope train {shlex.quote(word)}"
        raise UserError(message, exit_code=2)
    else:
        suggestion = did_you_mean(word, COMMANDS)
        raise UserError(f"{word}: no such command.{suggestion} batchscope takes {', '.join(COMMANDS)}", exit_code=2)


if __name__ == "__main__":
    main()
