"""An alias: `python -m batchscope.hardware` is `batchscope hardware`."""

from ..cli.hardware import main

if __name__ == "__main__":
    main()
