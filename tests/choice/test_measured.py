"""What runs have measured: trainings, devices and batch sizes; and what cannot be used, in one line."""

import json

import pytest

from batchscope.choice.measured import read_trainings
from batchscope.errors import UserError
from batchscope.records.operations import FILE, StepOperations, write_operations
from tests.choice.trainings import mlp, write_training
from tests.support.synthetic_runs import write_run


def only(*folders):
    """The one training, on one device."""
    ((training,), _) = read_trainings(folders)
    return training, training.sources[0].sizes


def changed(folder, change):
    for path in folder.rglob("run.json"):
        record = json.loads(path.read_text())
        change(record)
        path.write_text(json.dumps(record))
    return folder


def test_times_operations_and_memory_are_by_batch_size(tmp_path):
    training, sizes = only(write_training(tmp_path))
    assert (training.title, training.epochs, training.train_samples) == ("cnn · mnist", 2, 55_000)
    assert (training.precision, list(sizes)) == ("32-true", [8, 64, 512])
    low, middle, high = sizes[64].seconds.ends()
    assert (low, high, sizes[64].waiting) == pytest.approx((0.98 * middle, 1.03 * middle, 0.02 * middle))
    assert training.sources[0].device.names == ("AMD EPYC, 2 threads",)
    assert training.sources[0].device.memory_gib == 16


def test_repeated_runs_are_one_size(tmp_path):
    write_training(tmp_path / "a")
    write_training(tmp_path / "b", loop_s=2e-3, seed=1)
    _, sizes = only(tmp_path)
    assert list(sizes) == [8, 64, 512]
    assert sizes[8].seconds.high - sizes[8].seconds.low > 1e-3


def test_folders_of_single_runs_are_one_training(tmp_path):
    write_training(tmp_path)
    assert list(only(*(tmp_path / name for name in "012"))[1]) == [8, 64, 512]


def test_a_folder_of_two_models_has_two_trainings(tmp_path):
    write_training(tmp_path / "a", sizes=(8, 64))
    write_training(tmp_path / "b", model="lstm")
    write_training(tmp_path / "c", model="lstm", options={"model.hidden_size": 256})
    titles = {training.title: list(training.sources[0].sizes) for training in read_trainings([tmp_path])[0]}
    assert titles == {
        "cnn · mnist": [8, 64],
        "lstm · mnist · model.hidden_size=128": [8, 64, 512],
        "lstm · mnist · model.hidden_size=256": [8, 64, 512],
    }


@pytest.mark.parametrize(
    ("options", "trainings"),
    [
        ({"optimizer.lr": 1.0, "trainer.max_epochs": 9, "data.seed": 1}, 1),
        ({"data.pipeline": "workers"}, 2),
        ({"trainer.precision": "bf16-mixed"}, 2),
        ({"optimizer._target_": "torch.optim.SGD"}, 2),
    ],
)
def test_what_makes_a_step_another_one_makes_another_training(tmp_path, options, trainings):
    write_training(tmp_path / "a")
    write_training(tmp_path / "b", options=options)
    assert len(read_trainings([tmp_path])[0]) == trainings


def test_a_training_has_each_device_that_it_ran_on(tmp_path):
    write_training(tmp_path / "cpu")
    write_training(tmp_path / "gpu", device="cuda", name="NVIDIA L4")
    write_training(tmp_path / "other", device="cuda", name="A card", hardware={"device_memory_gib": 22.0})
    training, _ = only(tmp_path)
    devices = {source.device.short[0]: source.device for source in training.sources[:2]}
    assert (set(devices), devices["l4"].tdp_w) == ({"cpu", "l4"}, 72)
    assert (training.sources[2].device.names, training.sources[2].device.memory_gib) == (("A card",), 22)


def test_accumulated_gradients_are_divided_into_batches(tmp_path):
    for number, size in enumerate((8, 64)):
        place = write_run(tmp_path / str(number), size, 10.0, options={"trainer.accumulate_grad_batches": 4})
        write_operations(place, StepOperations(size, 4.0, "cpu", "A CPU", "32-true", mlp(size), 2))
    _, sizes = only(tmp_path)
    assert sizes[8].seconds.middle == pytest.approx(2.5e-3)
    assert sizes[8].step.rows[0].calls == 0.25 and sizes[8].step.batches == 1


def test_a_gpu_has_measured_the_rest_and_elsewhere_the_largest_operation_stands_for_it(tmp_path):
    _, gpu = only(write_training(tmp_path / "gpu"))
    parts = {"parameters": 1e6, "gradients": 1e6, "optimizer": 2e6, "saved": 3e5}
    _, cpu = only(write_training(tmp_path / "cpu", memory=lambda size: parts))
    assert (gpu[64].counted, gpu[64].moving) == (4e6 + 3.1e5 * 64, 0)
    assert (cpu[64].counted, cpu[64].moving) == (4.3e6, max(row.bytes for row in mlp(64) if row.part == "backward"))


def stall(record):
    record["throughput"]["step_ms"] = 2 * record["throughput"]["step_ms_median"]


@pytest.mark.parametrize(
    ("change", "ends"),
    [(stall, (0.98, 2.0)), (lambda record: record["throughput"].pop("step_ms_interval"), (0.95, 1.1))],
    ids=["slow steps count", "few steps have their percentiles"],
)
def test_the_ends_of_a_step(tmp_path, change, ends):
    _, sizes = only(changed(write_training(tmp_path), change))
    low, middle, high = sizes[64].seconds.ends()
    assert (low / middle, high / middle) == pytest.approx(ends)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda record: record["throughput"].update(windows=8, disturbed_windows=5, others_share=0.86),
            "Measured on a busy machine: other programs took up to 86 %",
        ),
        (lambda record: record["config"]["data"].update(pipeline="workers"), "data.pipeline=workers hides how long"),
        (lambda record: record.pop("memory"), "Not every run has counted its memory"),
    ],
)
def test_what_the_runs_cannot_tell_is_a_doubt(tmp_path, change, said):
    assert only(write_training(tmp_path / "a"))[0].doubts == []
    training, _ = only(changed(write_training(tmp_path / "b"), change))
    assert training.doubts[0].startswith(said)
    assert training.busy == ("busy" in said)


def without_operations(folder):
    for path in folder.rglob(FILE):
        path.unlink()


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (lambda folder: None, "no runs in"),
        (lambda folder: folder.rmdir(), "no such folder"),
        (
            lambda folder: write_run(folder / "0", status="failed", error="ValueError"),
            "0: measured no step: ValueError",
        ),
        (lambda folder: write_training(folder, sizes=(64,)), "one batch size, 64, and choose needs two at least"),
        (lambda folder: without_operations(write_training(folder)), "0, .*1, .*2: has no operations.json"),
        (lambda folder: changed(write_training(folder), lambda record: record.update(processes=2)), "several devices"),
        (lambda folder: changed(write_training(folder), lambda record: record.pop("dataset")), "how many samples"),
    ],
)
def test_what_cannot_be_used_is_one_line(tmp_path, prepare, reason):
    prepare(tmp_path)
    with pytest.raises(UserError, match=reason) as caught:
        read_trainings([tmp_path])
    assert "\n" not in str(caught.value)


def test_runs_that_measured_nothing_are_named_beside_the_answer(tmp_path):
    write_run(write_training(tmp_path) / "3", 4096, status="out_of_memory")
    (tmp_path / "1" / FILE).write_text("{")
    training, left_out = read_trainings([tmp_path])
    assert list(training[0].sources[0].sizes) == [8, 512]
    assert left_out[0].startswith(f"{tmp_path / '1'}: {tmp_path / '1' / FILE}: cannot be read")
    assert left_out[1] == f"{tmp_path / '3'}: measured no step: out of memory"
