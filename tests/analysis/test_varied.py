"""Sweeps over another option than the batch size."""

from batchscope.analysis.read import find
from batchscope.analysis.varied import compare_options
from tests.support.synthetic_runs import write_run


def test_options_that_are_no_numbers_are_compared(tmp_path):
    write_run(tmp_path / "0", 64, 10.0, metrics={"test/acc": 0.98})
    write_run(tmp_path / "1", 64, 5.0, metrics={"test/acc": 0.97}, options={"data.pipeline": "device"})
    assert compare_options(find([tmp_path])) == [
        "Fastest: cnn · device, 12,800 samples/s, 2.00× faster than cnn · memory.",
        "Best test/acc: cnn · memory, 98.0 %.",
    ]
