"""The numbers of one run: by name, and left out where the record does not have them."""

import json

import pytest

from batchscope.analysis.read import find
from tests.support.synthetic_runs import write_curve, write_run


def test_values_of_the_wrong_kind_are_unknown(tmp_path):
    facts = {"samples_per_sec": [1], "step_ms_median": "fast", "parts_ms": [1], "mfu": True}
    folder = write_run(tmp_path / "0", 64, 10.0, throughput=facts)
    record = json.loads((folder / "run.json").read_text())
    record |= {"hardware": None, "metrics": 3, "seconds": "long", "versions": [], "dataset": "mnist"}
    (folder / "run.json").write_text(json.dumps(record))
    (run,) = find([tmp_path]).runs
    assert not {"samples_per_sec", "step_ms_median", "mfu", "seconds"} & run.values.keys()
    assert "forward_ms_mean" not in run.values
    assert (run.metrics, run.device) == ({}, "")


def test_the_metrics_of_any_module_are_named_by_their_stage(tmp_path):
    write_run(tmp_path / "0", metrics={"test_acc": 0.5, "val/loss": 1.0, "train_loss_epoch": 2.0, "f1": 3.0})
    (run,) = find([tmp_path]).runs
    assert run.metrics == {"test/acc": 0.5, "val/loss": 1.0, "train/loss_epoch": 2.0, "f1": 3.0}


def test_the_rate_is_of_the_median_step(tmp_path):
    write_run(tmp_path / "0", 64, 10.0, throughput={"step_ms": 50.0, "samples_per_sec_mean": 1280.0})
    (run,) = find([tmp_path]).runs
    assert run.values["samples_per_sec_mean"] == 1280
    assert run.values["samples_per_sec"] == pytest.approx(6400)


@pytest.mark.parametrize("option", [{"trainer.accumulate_grad_batches": 4}, {"global_batch_size": 256}])
def test_a_step_of_accumulated_batches_counts_all_their_samples(tmp_path, option):
    write_run(tmp_path / "0", 64, 40.0, options=option, throughput={"samples_per_sec": 6400.0})
    (run,) = find([tmp_path]).runs
    assert run.values["samples_per_sec"] == pytest.approx(6400)
    assert (run.batch_size, run.values["global_batch_size"]) == (64, 256)
    assert run.samples_after(215) == 55_000  # the last update of an epoch takes what is left


def test_a_batch_that_the_dataset_could_not_fill_counts_as_what_it_held(tmp_path):
    write_run(tmp_path / "0", 4096, 10.0, throughput={"batch_size": 1000})
    sweep = find([tmp_path])
    assert sweep.runs[0].batch_size == 1000
    assert sweep.notes == ["a batch of 4,096 is larger than the training set: it held 1,000"]


def test_every_process_has_a_batch_of_its_own(tmp_path):
    write_run(tmp_path / "0", 64, 10.0, throughput={"batch_size": 64, "processes": 2})
    (run,) = find([tmp_path]).runs
    assert (run.batch_size, run.global_batch_size) == (64, 128)
    assert run.values["samples_per_sec"] == pytest.approx(12800)


# --- a validation metric in the course of training


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
