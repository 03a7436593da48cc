"""An alias: `python train.py …` and `python -m batchscope.train …` are `batchscope train …`."""

from batchscope.cli.train import main  # pyrefly: ignore[missing-import]  # this file is also run by its path

if __name__ == "__main__":
    main()
