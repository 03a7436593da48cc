"""An alias: `python -m batchscope.report` is `batchscope report`."""

from .cli.report import main

if __name__ == "__main__":
    main()
