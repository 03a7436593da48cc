"""The launcher that makes `python train.py …` work from the repository's root; the program is src/train.py."""

from batchscope.train import main

if __name__ == "__main__":
    main()
