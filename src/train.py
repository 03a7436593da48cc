"""`python train.py model=cnn data.batch_size=128`: one run, or with `-m` a sweep of runs.

The command line is checked before torch is imported, which takes seconds.
"""

from batchscope.cli import train as command
from batchscope.errors import exit_on_user_error


def main() -> None:
    """Run the command."""
    exit_on_user_error(command.main)


if __name__ == "__main__":
    main()
