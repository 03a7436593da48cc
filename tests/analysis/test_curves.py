"""A validation metric against training time and samples, from the step file."""

import pytest

from batchscope.analysis.read import find
from tests.support.synthetic_runs import write_curve, write_run


def test_a_last_batch_of_an_epoch_counts_as_what_it_held(tmp_path):
    folder = write_run(tmp_path / "0", 40000, 10.0, steps=4)  # of 55,000 samples: two steps an epoch
    write_curve(folder, [(2, 0.9), (3, 0.92), (4, 0.95)], 10.0)
    (run,) = find([tmp_path]).runs
    assert run.values["samples_seen"] == 110000
    assert list(run.curve["samples"]) == [55000, 95000, 110000]


@pytest.mark.parametrize("content", ["", "step\n", "a,b\n1,2\n", "step,val/acc\n1,\n", "step,val/acc\nx,y\n\x00"])
def test_a_curve_that_says_nothing_is_none(tmp_path, content):
    folder = write_run(tmp_path / "0", 64, 10.0)
    (folder / "csv").mkdir()
    (folder / "csv" / "metrics.csv").write_text(content)
    assert find([tmp_path]).runs[0].curve is None


def test_a_curve_counts_training_time_and_samples(tmp_path):
    folder = write_run(tmp_path / "0", 64, 10.0)
    write_curve(folder, [(10, 0.9), (20, 0.95)], 10.0)
    curve = find([tmp_path]).runs[0].curve
    assert list(curve["seconds"]) == pytest.approx([0.1, 0.2])
    assert list(curve["samples"]) == [640, 1280]


def test_the_most_telling_validation_metric_is_the_curve_and_one_of_unknown_direction_is_none(tmp_path):
    folder = write_run(tmp_path / "0", 64, 10.0)
    (folder / "csv").mkdir()
    (folder / "csv" / "metrics.csv").write_text("step,time/step_ms,val/f1,val/loss,val/acc\n1,10,,,\n0,,0.9,0.2,0.5\n")
    (run,) = find([tmp_path]).runs
    curve = run.curve
    assert (curve.attrs["metric"], list(curve["value"])) == ("val/acc", [0.5])
