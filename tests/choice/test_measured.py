"""The trainings, devices and batch sizes that runs have measured; and runs that cannot be used, in one line."""

import json
import math

import pytest

from batchscope.analysis.noise import SEPARATE_RUNS_SD
from batchscope.analysis.read import read_sweep
from batchscope.choice.interval import deviations
from batchscope.choice.measured import read_training
from batchscope.errors import UserError
from batchscope.records.operations import FILE, StepOperations, write_operations
from tests.choice.trainings import mlp, write_training
from tests.support.synthetic_runs import write_run


def load(folder, change=None):
    """The only training, on its only device; a function may change each record first."""
    for path in folder.rglob("run.json") if change else ():
        record = json.loads(path.read_text())
        change(record)
        path.write_text(json.dumps(record))
    training, _ = read_training([folder])
    return training, training.sources[0].sizes


def test_times_operations_and_memory_are_by_batch_size(tmp_path):
    training, sizes = load(write_training(tmp_path))
    assert (training.title, training.epochs, training.train_samples) == ("cnn · mnist", 2, 55_000)
    assert (training.precision, list(sizes), training.doubts) == ("32-true", [8, 64, 512], [])
    assert sizes[64].data_wait_s == pytest.approx(0.02 * sizes[64].seconds.middle)
    assert training.sources[0].device.names == ("AMD EPYC, 2 threads",)
    assert training.sources[0].device.memory_gib == 16
    assert sizes[64].memory_bytes == 4e6 + 3.1e5 * 64


@pytest.mark.parametrize("others", [math.nan, 0.2, 0.6])
def test_a_time_is_known_as_well_as_a_report_says_that_its_rate_is_beside_other_programs_too(tmp_path, others):
    training, sizes = load(write_training(tmp_path, windows=12, others=others), stall)
    rates = read_sweep([tmp_path]).groups[0].rates
    rate, reach = rates.rate(64), rates.reach(64)
    assert sizes[64].seconds.ends() == pytest.approx([64 / rate / (1 + reach), 64 / rate, 64 / rate * (1 + reach)])
    step_s = json.loads((tmp_path / "1" / "run.json").read_text())["throughput"]["step_ms_median"] / 1e3
    assert sizes[64].data_wait_s == pytest.approx(0.02 * step_s)  # a mean, like the time
    assert training.sources[0].others_share == rates.load
    assert (rates.load is None) == math.isnan(others)


def test_repeated_runs_are_one_size(tmp_path):
    write_training(tmp_path / "a")
    write_training(tmp_path / "b", loop_s=2e-3, seed=1, memory=lambda size: {"saved": 1e9})
    _, sizes = load(tmp_path)
    single = [load(tmp_path / name)[1][8].seconds for name in "ab"]
    assert list(sizes) == [8, 64, 512] and sizes[8].memory_bytes == 1e9
    assert sizes[8].seconds.ends() == [single[0].low, sum(interval.middle for interval in single) / 2, single[1].high]


def test_the_epochs_are_those_that_a_timed_run_was_asked_for(tmp_path):
    training, _ = load(write_training(tmp_path, options={"trainer.max_epochs": -1}, asked_epochs=15))
    assert training.epochs == 15


@pytest.mark.parametrize("length", [{"trainer.max_steps": 1000}, {"trainer.max_time": "00:00:10:00"}])
@pytest.mark.parametrize(("trained", "epochs"), [(None, None), (1, None), (2, 2)])
def test_runs_that_ended_before_their_epochs_by_another_length_were_to_train_no_number_of_them(
    tmp_path, length, trained, epochs
):
    training, _ = load(write_training(tmp_path, options=length, epochs=trained))
    assert training.epochs == epochs


def test_what_makes_a_step_another_one_makes_another_training_and_is_refused(tmp_path):
    write_training(tmp_path / "a")
    alike = {"optimizer.lr": 1.0, "trainer.max_epochs": 9, "data.seed": 1}
    write_training(tmp_path / "b", options=alike, sizes=(8, 64))
    training, _ = read_training([tmp_path])
    assert (training.title, list(training.sources[0].sizes), training.epochs) == ("cnn · mnist", [8, 64, 512], None)
    write_training(tmp_path / "c", options={"data.pipeline": "workers"})
    message = "several trainings, which differ in data.pipeline; name the runs of one"
    with pytest.raises(UserError, match=message):
        read_training([tmp_path])


def test_a_training_has_each_device_that_it_ran_on(tmp_path):
    write_training(tmp_path / "cpu")
    write_training(tmp_path / "l4", device="cuda", name="NVIDIA L4")
    write_training(tmp_path / "other", device="cuda", name="A card", hardware={"device_memory_gib": 22})
    training, _ = read_training([tmp_path])
    devices = [(source.device.names[0], source.device.memory_gib, source.device.tdp_w) for source in training.sources]
    assert devices == [("AMD EPYC, 2 threads", 16, None), ("L4", 22.5, 72), ("A card", 22, None)]


def test_the_number_of_a_gpu_makes_no_other_training(tmp_path):
    write_training(tmp_path / "cpu", options={"trainer.devices": 1})
    write_training(tmp_path / "gpu", device="cuda", name="NVIDIA L4", options={"trainer.devices": [1]})
    training, _ = read_training([tmp_path])
    assert [source.device.kind for source in training.sources] == ["cpu", "cuda"]


def test_devices_of_one_kind_have_labels_of_their_own(tmp_path):
    for threads in (1, 2):
        write_training(tmp_path / str(threads), threads=threads)
    training, _ = read_training([tmp_path])
    assert [source.device.short[0] for source in training.sources] == ["cpu", "cpu-2"]


def test_another_quota_of_the_processor_makes_another_device(tmp_path):
    for cores in (2, 8):
        write_training(tmp_path / str(cores), hardware={"cpu_cores": cores})
    training, _ = read_training([tmp_path])
    names = [(source.device.short[0], source.device.names[0]) for source in training.sources]
    assert names == [("cpu", "AMD EPYC, 2 threads"), ("cpu-2", "AMD EPYC, 2 threads on 8 cores")]


def test_accumulated_gradients_are_divided_into_batches(tmp_path):
    for number, size in enumerate((8, 64)):
        run = write_run(tmp_path / str(number), size, 10.0, options={"trainer.accumulate_grad_batches": 4})
        write_operations(run, StepOperations(size, 4.0, "cpu", "A CPU", "32-true", mlp(size), 2))
    _, sizes = load(tmp_path)
    assert sizes[8].seconds.middle == pytest.approx(2.5e-3)
    assert sizes[8].step.rows[0].calls == 0.25 and sizes[8].step.batches == 1


def test_a_batch_of_a_mean_size_has_the_time_of_its_rate_and_not_that_of_the_median_step(tmp_path):
    for number, size in enumerate((8, 64)):
        run = write_run(tmp_path / str(number), size, 10.0, throughput={"samples_per_sec": size / 0.017})
        write_operations(run, StepOperations(size, 1.0, "cpu", "A CPU", "32-true", mlp(size), 2))
    _, sizes = load(tmp_path)
    assert [sizes[size].seconds.middle for size in (8, 64)] == pytest.approx([0.017, 0.017])


def stall(record):
    record["throughput"]["step_ms"] = 2 * record["throughput"]["step_ms_median"]


def end(factor, confidence):
    """The end, as a ratio, of an interval of this confidence at 90 %, with the spread of separate runs."""
    spread = deviations(0.9) / deviations(confidence) * abs(math.log(factor))
    return math.exp(math.copysign(math.hypot(spread, deviations(0.9) * SEPARATE_RUNS_SD), math.log(factor)))


@pytest.mark.parametrize(
    ("change", "ends"),
    [
        (None, (end(0.98, 0.95), end(1.03, 0.95))),
        (lambda record: record["throughput"].pop("step_ms_interval"), (end(0.95, 0.8), end(1.1, 0.8))),
        (stall, (end(0.98, 0.95), 2.0)),
    ],
    ids=["95 % of the median", "80 % of a few steps", "slow steps count"],
)
def test_without_windows_the_ends_of_a_record_are_taken_at_the_confidence_of_all_intervals(tmp_path, change, ends):
    _, sizes = load(write_training(tmp_path, device="cuda", name="A card"), change)
    low, middle, high = sizes[64].seconds.ends()
    assert (low / middle, high / middle) == pytest.approx(ends)
    assert sizes[64].data_wait_s == pytest.approx(0.02 * middle / (2 if change is stall else 1))


def test_without_windows_a_run_on_a_cpu_is_known_no_better_than_separate_runs_agree(tmp_path):
    _, sizes = load(write_training(tmp_path))
    low, middle, high = sizes[64].seconds.ends()
    assert min(middle / low, high / middle) > math.exp(deviations(0.9) * SEPARATE_RUNS_SD)


def test_too_few_windows_beside_other_programs_are_wider_by_what_these_took(tmp_path):
    alone, beside = (load(write_training(tmp_path / str(took), windows=2, others=took))[1][64] for took in (0.0, 0.5))
    assert beside.seconds.ends() == pytest.approx([alone.seconds.low / 2, alone.seconds.middle, alone.seconds.high * 2])


@pytest.mark.parametrize(
    ("change", "doubt"),
    [
        (
            lambda record: record["config"]["data"].update(pipeline="workers", num_workers=2),
            "Workers hide the time",
        ),
        (lambda record: record["config"]["data"].pop("pipeline"), "Workers hide the time"),  # of any data
        (lambda record: record.pop("memory"), "Not every run has counted its memory"),
        (
            lambda record: record["config"]["data"].update(pipeline="device"),
            "data.pipeline=device also keeps the data set",
        ),
    ],
)
def test_what_the_runs_cannot_tell_is_a_doubt(tmp_path, change, doubt):
    training, _ = load(write_training(tmp_path), change)
    assert training.doubts[0].startswith(doubt)


def test_an_operation_whose_flops_are_not_known_is_a_doubt(tmp_path):
    missing = {"flops_per_sec": "the FLOPs of aten._fft_r2c.default are not known"}
    training, _ = load(write_training(tmp_path), lambda record: record["throughput"].update(missing=missing))
    warning = "cards are predicted as if the operation only moved its bytes, and may take far longer."
    assert not training.has_all_flops
    assert training.doubts == [f"The FLOPs of aten._fft_r2c.default are not known: {warning}"]


def test_a_set_that_lies_on_a_gpu_is_in_the_peak_that_its_allocator_has_counted(tmp_path):
    def change(record):
        record["config"]["data"]["pipeline"] = "device"
        record["memory"]["measured_bytes"] = 1e9

    training, _ = load(write_training(tmp_path, device="cuda", name="NVIDIA L4"), change)
    assert training.doubts == []


def test_data_that_no_worker_loads_hide_nothing(tmp_path):
    training, _ = load(
        write_training(tmp_path), lambda record: record["config"]["data"].update(pipeline="workers", num_workers=0)
    )
    assert training.doubts == []


@pytest.mark.parametrize(
    ("prepare", "change", "reason"),
    [
        (lambda folder: None, None, "no runs in"),
        (lambda folder: write_run(folder, status="failed", error="ValueError"), None, "measured no step: ValueError"),
        (lambda folder: write_run(folder, status=None), None, "measured no step: its record does not say why"),
        (
            write_run, lambda record: record.update(throughput={"missing": {"bottleneck": "of 4 updates none counts"}}),
            "measured no step: of 4 updates none counts",
        ),
        (lambda folder: write_training(folder, sizes=(64,)), None, "one batch size, 64, and choose needs two at least"),
        (
            lambda folder: [path.unlink() for path in write_training(folder).rglob(FILE)], None,
            "0, .*1, .*2: has no operations.json",
        ),
        (write_training, lambda record: record.update(processes=2), "several devices"),
        (write_training, lambda record: record.pop("dataset"), "how many samples an epoch has"),
        (write_training, lambda record: record["throughput"].pop("samples_per_sec"), "how many samples a step has"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_one_line(tmp_path, prepare, change, reason):
    prepare(tmp_path)
    with pytest.raises(UserError, match=reason) as caught:
        load(tmp_path, change)
    assert "\n" not in str(caught.value)


def test_runs_that_measured_nothing_are_named_beside_the_answer(tmp_path):
    write_run(write_training(tmp_path) / "3", 4096, status="out_of_memory")
    (tmp_path / "1" / FILE).write_text("{")
    training, left_out = read_training([tmp_path])
    assert list(training.sources[0].sizes) == [8, 512]
    assert left_out[0].startswith(f"{tmp_path / '1'}: {tmp_path / '1' / FILE}: cannot be read")
    assert left_out[1] == f"{tmp_path / '3'}: measured no step: out of memory"
