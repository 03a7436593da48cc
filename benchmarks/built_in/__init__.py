"""The causes of `causes.py`: their modules, sizes and checks, the run of one, and the judgement of its verdict."""
