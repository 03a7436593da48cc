"""An alias: `python train.py …` and `python -m batchscope.train …` are `batchscope train …`."""

from batchscope.cli.train import main as train  # pyrefly: ignore[missing-import]  # this file is also run by its path
from batchscope.errors import exit_on_user_error  # pyrefly: ignore[missing-import]


def main() -> None:
    """Run `batchscope train`; a UserError ends the program with one line and an exit code."""
    exit_on_user_error(train)


if __name__ == "__main__":
    main()
