"""A step on another device: the longer of its kernels and its host, and the memory that it takes."""

from dataclasses import replace

import pytest

from batchscope.choice import launches, memory
from batchscope.choice.cards import find_card
from batchscope.choice.interval import exactly
from batchscope.choice.measured import read_trainings
from batchscope.choice.step import step_here, step_on
from batchscope.records.operations import OperationRow
from tests.choice.trainings import convolution, lstm, mlp, write_training

CARDS = ("t4", "l4", "a100", "h100", "rtx4090")
H100 = find_card("h100")


def source(folder, **facts):
    ((training,), _) = read_trainings([write_training(folder, **facts)])
    return training.sources[0]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return source(tmp_path_factory.mktemp("mlp"))


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    waits_for_nothing = (0, 0, 0.3, 0.6, 0.1, 0)
    return source(tmp_path_factory.mktemp("large"), rows=lambda batch: mlp(batch, 4096), parts=waits_for_nothing)


def test_a_measured_step_is_as_it_was_measured(small):
    step = step_here(small, 64)
    assert (step.seconds, step.limit) == (small.sizes[64].seconds, "")
    assert step.memory == exactly(4e6 + 3.1e5 * 64)


def test_a_tiny_batch_takes_the_same_on_every_gpu_because_the_host_launches_it(small):
    steps = [step_on(small, find_card(name), 8) for name in CARDS]
    assert {step.limit for step in steps} == {"launches"}
    middles = [step.seconds.middle for step in steps]
    assert max(middles) / min(middles) < 1.05
    assert 1e-3 < min(middles) < 3e-3  # a loop of 1 ms, and some 20 launches


def test_a_large_batch_is_faster_on_a_larger_gpu(large):
    steps = [step_on(large, find_card(name), 8192) for name in ("t4", "a100", "h100")]
    assert [step.limit for step in steps] == ["compute"] * 3
    times = [step.seconds.middle for step in steps]
    assert times[0] > 2 * times[1] > 2 * times[2]


def test_mixed_precision_is_faster(large):
    fp32, bf16 = (step_on(large, find_card("a100"), 4096, precision=each).seconds for each in (None, "bf16-mixed"))
    assert bf16.middle < fp32.middle / 3


@pytest.mark.parametrize("rows", [mlp, lstm, convolution])
@pytest.mark.parametrize("name", ["t4", "h100"])
@pytest.mark.parametrize("size", [1, 64, 300, 5000])
def test_nothing_is_below_what_the_datasheet_allows_and_ends_are_in_order(tmp_path, rows, name, size):
    card = find_card(name)
    step = step_on(source(tmp_path, rows=rows), card, size)
    for low, middle, high in (step.seconds.ends(), step.memory.ends()):
        assert 0 < low <= middle <= high
    assert step.seconds.low >= 0.9 * sum(row.flops for row in rows(size)) / max(card.flops_per_sec.values())


def test_a_recurrent_kernel_takes_a_launch_on_the_device_for_every_time_step(tmp_path):
    short, long = (source(tmp_path / str(steps), rows=lambda b, t=steps: lstm(b, t)) for steps in (16, 512))
    step = step_on(long, H100, 8).seconds
    assert step.middle > 4 * 512 * 2e-6
    assert step.middle > 2 * step_on(short, H100, 8).seconds.middle
    assert step.high / step.low > 3  # nobody has measured these


def test_waiting_for_data_counts(tmp_path):
    slow = source(tmp_path, parts=(0.8, 0.0, 0.1, 0.1, 0, 0))
    step = step_on(slow, H100, 512)
    assert step.limit == "data"
    assert step.seconds.middle > 0.8 * slow.sizes[512].seconds.middle


def test_from_one_gpu_to_another_the_host_is_the_same(tmp_path):
    measured = source(tmp_path, device="cuda", name="NVIDIA L4")
    step = step_on(measured, H100, 8)
    assert step.limit == "launches"
    assert step.seconds.high <= 1.3 * measured.sizes[8].seconds.middle


def test_a_precision_that_the_card_here_emulates_corrects_nothing(tmp_path):
    measured = source(
        tmp_path, device="cuda", name="Tesla T4", rows=lambda batch: [replace(row, dtype="bf16") for row in mlp(batch)]
    )
    assert step_on(measured, H100, 512).seconds.middle > 0


def test_what_goes_through_cudnn_counts_for_several_launches():
    assert launches.launched(mlp(8)) == 16
    assert launches.launched(convolution(8)) == 24


@pytest.mark.parametrize(("rest", "seconds"), [(-1.0, 8e-4), (0.0, 8e-4), (2e-3, 2e-3), (0.5, 1e-2)])
def test_what_operations_hide_and_what_other_processes_took_is_not_the_loop(rest, seconds):
    assert launches.beside_operations(exactly(rest), 100).middle == pytest.approx(seconds)


def test_a_resnet_50_takes_about_what_was_published():
    convolutions = [
        OperationRow(f"aten.{name}", "", part, "fp32", (), 53)
        for name in ("convolution", "native_batch_norm")
        for part in ("forward", "backward")
    ]
    rest = [OperationRow("aten.relu", "", "forward", "fp32", (), 420 - 4 * 53)]
    beside = launches.beside_operations(exactly(0.0), 420)
    seconds = launches.BELOW_AUTOGRAD * launches.launched([*convolutions, *rest]) + launches.elsewhere(beside)
    assert seconds.low < 12e-3 and seconds.high > 20e-3  # a host of today, and one of 2017


def test_a_gpu_adds_its_context_and_what_the_backward_pass_moves_for_a_moment():
    still, moving = memory.on_gpu(1e9, 0.0), memory.on_gpu(1e9, 3e8)
    assert still.low == moving.low == 1e9 + memory.CONTEXT.low
    assert moving.middle - still.middle == pytest.approx(1.08 * 1e8)
    assert moving.high - still.high == pytest.approx(1.25 * 5e8)


def test_gradients_of_all_time_steps_at_once_are_within_the_interval():
    rnn_cell = memory.on_gpu(1.706e6, 1.655e6)  # 100 time steps; a count of its tensors gave 3.71 MB
    assert rnn_cell.low < 3.71e6 + memory.CONTEXT.middle < rnn_cell.high
