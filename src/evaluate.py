"""An alias: `python -m batchscope.evaluate` is `batchscope evaluate`."""

from .cli.evaluate import main

if __name__ == "__main__":
    main()
