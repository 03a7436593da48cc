"""What runs have measured: by device and batch size; and what cannot be used, in one line."""

import json

import pytest

from batchscope.choice.measured import measured
from batchscope.choice.step import workload
from batchscope.errors import UserError
from batchscope.records.operations import FILE, StepOperations, write_operations
from tests.choice.trainings import mlp, write_training
from tests.support.synthetic_runs import write_run


def test_times_and_operations_are_by_batch_size(tmp_path):
    (found,) = measured(write_training(tmp_path))
    assert sorted(found.seconds) == sorted(found.steps) == sorted(found.waiting) == [8, 64, 512]
    assert found.precision == "32-true" and found.memory.fixed == 4e6
    assert found.waiting[64] == pytest.approx(0.02 * found.seconds[64].middle)


def test_repeated_runs_are_one_size(tmp_path):
    write_training(tmp_path / "a")
    write_training(tmp_path / "b", loop_s=2e-3, seed=1)
    (found,) = measured(tmp_path)
    assert sorted(found.seconds) == [8, 64, 512]
    assert found.seconds[8].high - found.seconds[8].low > 1e-3


def test_accumulated_gradients_are_divided_into_batches(tmp_path):
    for number, size in enumerate((8, 64)):
        place = write_run(tmp_path / str(number), size, 10.0, options={"trainer.accumulate_grad_batches": 4})
        write_operations(place, StepOperations(size, 4.0, "cpu", "A CPU", "32-true", mlp(size), 2))
    (found,) = measured(tmp_path)
    assert found.seconds[8].middle == pytest.approx(2.5e-3)
    assert found.steps[8].rows[0].calls == 0.25 and found.steps[8].batches == 1


def test_a_gpu_has_measured_the_rest_and_elsewhere_the_largest_operation_stands_for_it(tmp_path):
    (gpu,) = measured(write_training(tmp_path / "gpu"))
    parts = {"parameters": 1e6, "gradients": 1e6, "optimizer": 2e6, "saved": 3e5}
    (cpu,) = measured(write_training(tmp_path / "cpu", memory=lambda size: parts))
    assert (gpu.memory.by_size[64], gpu.memory.moving) == (3.1e5 * 64, {})
    largest = max(row.bytes for row in mlp(64) if row.part == "backward")
    assert (cpu.memory.by_size[64], cpu.memory.moving[64]) == (3e5, largest)


def test_without_a_count_activations_are_taken_from_the_traffic(tmp_path):
    (found,) = measured(write_training(tmp_path, memory=lambda size: {"parameters": 1e6}))
    assert not found.memory.is_counted and found.memory.at(512) > found.memory.at(8) > 1e6


def test_a_known_gpu_has_its_datasheet_and_an_unknown_one_its_calibration(tmp_path):
    write_training(tmp_path / "a", device="cuda", name="NVIDIA L4")
    write_training(tmp_path / "b", device="cuda", name="NVIDIA A10G", hardware={"device_memory_gib": 22.0})
    devices = {found.device.name: found.device for found in measured(tmp_path)}
    assert devices["L4"].tdp_w == 72
    assert devices["NVIDIA A10G"].memory_bytes == 22 * 2**30 and devices["NVIDIA A10G"].bytes_per_sec == 30e9


def without_operations(folder):
    for path in folder.rglob(FILE):
        path.unlink()


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (lambda folder: None, "no runs in"),
        (
            lambda folder: write_run(folder / "0", status="failed", error="ValueError"),
            "no run in it has measured its steps",
        ),
        (lambda folder: write_training(folder, sizes=(64,)), "has one batch size, 64; choose needs two at least"),
        (lambda folder: without_operations(write_training(folder)), "was measured before runs left one.*run it again"),
        (
            lambda folder: (write_training(folder / "a"), write_training(folder / "b", model="lstm")),
            r"has 2 trainings \(.*\); give the folder of one",
        ),
        (lambda folder: (write_training(folder) / "1" / FILE).write_text("{"), "operations.json: cannot be read"),
    ],
)
def test_what_cannot_be_used_is_one_line(tmp_path, prepare, reason):
    prepare(tmp_path)
    with pytest.raises(UserError, match=reason) as caught:
        measured(tmp_path)
    assert "\n" not in str(caught.value)


def test_several_devices_at_a_time_are_refused(tmp_path):
    write_training(tmp_path)
    for path in tmp_path.rglob("run.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"processes": 2}))
    with pytest.raises(UserError, match="trained on several devices"):
        measured(tmp_path)


def changed(folder, change):
    for path in folder.rglob("run.json"):
        record = json.loads(path.read_text())
        change(record)
        path.write_text(json.dumps(record))
    return folder


def test_slow_steps_count_towards_the_high_end(tmp_path):
    def stall(record):
        record["throughput"]["step_ms"] = 2 * record["throughput"]["step_ms_median"]

    (found,) = measured(changed(write_training(tmp_path), stall))
    assert found.seconds[64].high == pytest.approx(2 * found.seconds[64].middle)


def test_a_run_of_few_steps_has_their_10th_and_90th_percentile(tmp_path):
    (found,) = measured(changed(write_training(tmp_path), lambda record: record["throughput"].pop("step_ms_interval")))
    low, middle, high = found.seconds[64].low, found.seconds[64].middle, found.seconds[64].high
    assert (low, high) == pytest.approx((0.95 * middle, 1.1 * middle))


def test_waiting_that_other_programs_made_long_at_one_size_is_not_believed(tmp_path):
    write_training(tmp_path)
    changed(tmp_path / "1", lambda record: record["throughput"]["parts_ms"].update(data_wait=500.0))
    (found,) = measured(tmp_path)
    assert found.waiting[64] <= found.waiting[512]


def test_a_run_that_other_programs_disturbed_all_the_time_says_how_much(tmp_path):
    busy = {"windows": 8, "disturbed_windows": 8, "others_share": 0.86}
    (quiet,), _ = (measured(write_training(tmp_path / name)) for name in "ab")
    assert quiet.busy is None
    (found,) = measured(changed(tmp_path / "b", lambda record: record["throughput"].update(busy)))
    assert found.busy == 0.86


def test_workers_that_a_step_hides_are_a_doubt(tmp_path):
    (found,) = measured(write_training(tmp_path, options={"data.pipeline": "workers"}))
    assert any("data.pipeline=workers: a step here hides" in note for note in found.notes)


def test_a_fast_device_without_a_datasheet_has_its_calibration(tmp_path):
    fast = {"matmul_flops_per_sec": {"fp32": 30e12}, "memory_bytes_per_sec": 2e12}
    for number, size in enumerate((8, 64)):
        place = write_run(tmp_path / str(number), size, 10.0, device="cuda", device_name="A card")
        write_operations(place, StepOperations(size, 1.0, "cuda", "A card", "32-true", mlp(size), None, fast))
    (found,) = measured(tmp_path)
    assert (found.device.flops_per_sec, found.device.bytes_per_sec) == ({"fp32": 30e12}, 2e12)


def test_without_a_calibration_a_step_is_measured_all_the_same(tmp_path):
    for number, size in enumerate((8, 64)):
        place = write_run(tmp_path / str(number), size, 10.0)
        write_operations(place, StepOperations(size, 1.0, "cpu", "A CPU", "32-true", mlp(size), 2))
    found = workload(tmp_path)
    assert found.on(found.device, 64).seconds.middle == pytest.approx(10e-3)
    assert found.on(found.device, 32).seconds.low > 0
