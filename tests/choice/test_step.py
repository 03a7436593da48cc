"""A step on another device: the longer of its kernels and its host, bounds on what is not NVIDIA's, and what is refused."""

import pytest

from batchscope.choice.catalogue import find_device
from batchscope.choice.kernel_sum import Kernels
from batchscope.choice.step import AT_BEST, workload, workloads
from batchscope.errors import UserError
from tests.choice.trainings import convolution, lstm, mlp, write_training

CARDS = ("t4", "l4", "a100", "h100", "rtx4090")


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    return workload(write_training(tmp_path_factory.mktemp("mlp")))


def test_a_workload_says_what_was_measured_and_where(training):
    assert (training.title, training.batch_sizes, training.train_samples) == ("cnn · mnist", (8, 64, 512), 55_000)
    assert training.device.name == "AMD EPYC, 2 threads"
    assert training.device.flops_per_sec == {"fp32": 100e9} and training.device.memory_bytes == 16 * 2**30
    low, middle, high = training.measured[64].low, training.measured[64].middle, training.measured[64].high
    assert low == pytest.approx(0.98 * middle) and high == pytest.approx(1.03 * middle)


def test_a_measured_size_is_measured_and_another_one_lies_between(training):
    known, between = training.on(training.device, 64), training.on(training.device, 200)
    assert (known.how, known.seconds) == ("measured", training.measured[64])
    assert between.how == "predicted from cpu"
    assert training.measured[64].middle < between.seconds.low < between.seconds.high < training.measured[512].middle


def test_a_host_is_that_of_a_gpu_and_changes_nothing_here(training):
    assert training.on(training.device, 64, host="slow") == training.on(training.device, 64)


def test_a_tiny_batch_takes_the_same_on_every_gpu_because_the_host_launches_it(training):
    steps = [training.on(find_device(name), 8) for name in CARDS]
    assert {step.limit for step in steps} == {"launches"}
    assert {step.how for step in steps} == {"predicted from cpu"}
    middles = [step.seconds.middle for step in steps]
    assert max(middles) / min(middles) < 1.05
    assert 1e-3 < min(middles) < 3e-3  # a loop of 1 ms, and some 20 launches


def test_a_named_host_changes_what_launches_take(training):
    gpu = find_device("h100")
    fast, slow = (training.on(gpu, 8, host=host).seconds for host in ("fast", "slow"))
    assert slow.middle == pytest.approx(3 * fast.middle, rel=0.1)
    assert fast.high / fast.low < training.on(gpu, 8).seconds.high / training.on(gpu, 8).seconds.low
    assert training.on(gpu, 8, host="8us").seconds.middle == training.on(gpu, 8, host="typical").seconds.middle


def test_a_large_batch_is_faster_on_a_larger_gpu(tmp_path):
    large = workload(write_training(tmp_path, rows=lambda batch: mlp(batch, 4096), parts=(0, 0, 0.3, 0.6, 0.1, 0)))
    steps = [large.on(find_device(name), 8192) for name in ("t4", "a100", "h100")]
    assert [step.limit for step in steps] == ["compute"] * 3
    times = [step.seconds.middle for step in steps]
    assert times[0] > 2 * times[1] > 2 * times[2]


@pytest.mark.parametrize("rows", [mlp, lstm, convolution])
@pytest.mark.parametrize("name", ["t4", "h100", "mi300x", "m2-max", "tpu-v5e"])
@pytest.mark.parametrize("size", [1, 64, 300, 5000])
def test_nothing_is_below_its_floor_and_ends_are_in_order(tmp_path, rows, name, size):
    found = workload(write_training(tmp_path, rows=rows))
    step, device = found.on(find_device(name), size), find_device(name)
    assert 0 < step.seconds.low <= step.seconds.middle <= step.seconds.high
    flops = sum(row.flops for row in rows(size))
    assert step.seconds.low >= 0.999 * flops / max(device.flops_per_sec.values())
    assert step.memory_bytes.low <= step.memory_bytes.middle <= step.memory_bytes.high


@pytest.mark.parametrize("name", ["mi300x", "m2-max", "tpu-v5e"])
def test_other_makers_devices_are_bounds(training, name):
    step = training.on(find_device(name), 4096)
    assert step.how == AT_BEST
    assert step.seconds.low == step.seconds.middle < step.seconds.high


def test_a_recurrent_kernel_takes_a_launch_on_the_device_for_every_time_step(tmp_path):
    short, long = (workload(write_training(tmp_path / str(t), rows=lambda b, t=t: lstm(b, t))) for t in (16, 512))
    gpu = find_device("h100")
    assert long.on(gpu, 8).seconds.middle > 4 * 512 * 2e-6
    assert long.on(gpu, 8).seconds.middle > 2 * short.on(gpu, 8).seconds.middle
    assert long.on(gpu, 8).seconds.high / long.on(gpu, 8).seconds.low > 3  # nobody has measured these


def test_waiting_for_data_counts(tmp_path):
    slow = workload(write_training(tmp_path, parts=(0.8, 0.0, 0.1, 0.1, 0, 0)))
    step = slow.on(find_device("h100"), 512)
    assert step.limit == "data"
    assert step.seconds.middle > 0.8 * slow.measured[512].middle


def test_convolutions_use_tf32_where_a_card_has_it(tmp_path):
    rows = convolution(512)
    with_tf32, without = (Kernels(find_device(name)).of(rows).floor for name in ("a100", "v100"))
    assert without > 5 * with_tf32  # 15.7 against 156 TFLOP/s, less what memory bounds


def test_mixed_precision_is_faster_and_takes_less_memory(tmp_path):
    large = workload(write_training(tmp_path, rows=lambda batch: mlp(batch, 4096), parts=(0, 0, 0.3, 0.6, 0.1, 0)))
    gpu = find_device("a100")
    fp32, bf16 = large.on(gpu, 4096), large.on(gpu, 4096, precision="bf16-mixed")
    assert bf16.seconds.middle < fp32.seconds.middle / 3
    assert bf16.memory_bytes.middle < fp32.memory_bytes.middle
    assert large.largest_batch_size(gpu, "bf16-mixed") >= large.largest_batch_size(gpu)


def test_a_card_without_the_precision_is_refused(training):
    with pytest.raises(UserError, match="Tesla T4 has no hardware for bf16"):
        training.on(find_device("t4"), 64, precision="bf16-mixed")
    assert training.on(find_device("t4"), 64, precision="16-mixed").seconds.middle > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host": "threadripper"}, "--host: got 'threadripper', takes fast, typical, slow"),
        ({"host": "0us"}, "--host: got '0us'"),
        ({"precision": "bf16-mixd"}, "--precision: got 'bf16-mixd'.*Did you mean 'bf16-mixed'"),
        ({"precision": "64-true"}, "--precision: 64-true cannot be predicted"),
    ],
)
def test_what_is_unknown_is_one_line(training, options, message):
    with pytest.raises(UserError, match=message) as caught:
        training.on(find_device("a100"), 64, **options)
    assert "\n" not in str(caught.value)


def test_the_largest_batch_fits_and_the_next_ones_may_not(training):
    for name in ("t4", "h100", "m1"):
        device = find_device(name)
        largest = training.largest_batch_size(device)
        assert training.on(device, largest).fits and not training.on(device, largest + 2).fits
    assert training.largest_batch_size(find_device("h100")) > training.largest_batch_size(find_device("t4"))


def test_a_device_holds_what_it_has_trained_with(tmp_path):
    greedy = workload(write_training(tmp_path, memory=lambda size: {"parameters": 1e6, "saved": 1e9 * size}))
    assert greedy.largest_batch_size(greedy.device) == 512 and greedy.on(greedy.device, 512).fits
    assert greedy.largest_batch_size(find_device("t4")) < 16


def test_a_single_run_is_known_at_its_own_size(tmp_path):
    write_training(tmp_path, sizes=(64,))
    single = workload(tmp_path / "0")
    assert single.on(find_device("a100"), 64).seconds.middle > 0
    assert single.largest_batch_size(find_device("a100")) > 64
    with pytest.raises(UserError, match="batch size 128: only 64 was measured; a sweep"):
        single.on(find_device("a100"), 128)


def test_a_sweep_over_devices_is_a_workload_for_each(tmp_path):
    write_training(tmp_path / "cpu")
    write_training(tmp_path / "gpu", device="cuda", name="NVIDIA L4")
    assert sorted(each.device.name for each in workloads(tmp_path)) == ["AMD EPYC, 2 threads", "L4"]
    with pytest.raises(UserError, match="several devices"):
        workload(tmp_path)


def test_from_one_gpu_to_another_the_host_is_the_same(tmp_path):
    measured = workload(write_training(tmp_path, device="cuda", name="NVIDIA L4"))
    step = measured.on(find_device("h100"), 8)
    assert step.how == "predicted from l4" and step.limit == "launches"
    assert step.seconds.high <= 1.3 * measured.measured[8].middle
