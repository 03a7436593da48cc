"""Prediction: works of operations, times of kernels on a card, times of steps on another device, texts of intervals.

The times follow from the formulas and the fitted coefficients. After a change of either, write the new times here.
"""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from batchscope.choice import memory
from batchscope.choice.interval import (
    CONFIDENCE,
    SURE,
    Interval,
    convert_interval,
    deviations,
    digits,
    exactly,
    time_ratio,
)
from batchscope.choice.kernels import coefficients, predict, roof_seconds
from batchscope.choice.measured import read_training
from batchscope.choice.scale import interpolate, nearest_sizes, rows_at
from batchscope.choice.step import Source, step_here, step_on
from batchscope.choice.work import Work, adapt_to_device, expand_row
from batchscope.errors import UserError
from batchscope.hardware.datasheet import Datasheet, find_card
from batchscope.records.operations import OperationRow, StepOperations
from tests.choice.trainings import convolution, elementwise, lstm, mlp, product, write_training


@pytest.mark.parametrize(
    ("name", "dims", "flops", "kind"),
    [
        ("aten.addmm", (64, 10, 128), 2.0 * 64 * 10 * 128, "linear"),
        ("aten.bmm", (4, 64, 10, 128), 8.0, "bmm"),
        ("aten.convolution", (64, 8, 9, 9, 4, 3, 3), 8.0, "convolution"),
        ("aten._softmax", (64, 10), 0, "softmax"),
        ("aten.native_layer_norm", (64, 10), 0, "layer_norm"),
        ("aten._to_copy", (64, 10), 0, "copy"),
        ("aten._fused_adamw_", (4, 1000), 0, "elementwise"),
        ("aten._scaled_dot_product_flash_attention", (64, 10), 8.0, "other"),
        ("aten.mm", (3,), 8.0, "linear"),  # not the dimensions of its kind
    ],
)
def test_an_operation_has_its_kind_and_the_numbers_of_a_call(name, dims, flops, kind):
    (work,) = expand_row(OperationRow(name, "m", "forward", "fp32", dims, 2.0, 2 * flops, 200.0))
    known_dims = () if len(dims) == 1 else dims
    assert work == Work(kind, name, known_dims, flops, 100.0, 2.0)


def test_a_batch_norm_reads_its_input_twice_and_a_recurrent_kernel_is_its_products_step_by_step():
    norm = convolution(8)[1]
    for name in (norm.name, "aten.cudnn_batch_norm"):  # on a GPU
        (work,) = expand_row(replace(norm, name=name))
        assert work.bytes == 1.5 * norm.bytes
    forward, backward = (list(expand_row(row)) for row in lstm(16, steps=64, features=32, hidden=128))
    assert [(work.kind, work.dims, work.calls) for work in forward] == [
        ("linear", (64 * 16, 512, 32), 1),
        ("linear", (16, 512, 128), 64),
        ("elementwise", (16, 512), 64),
    ]
    half = list(expand_row(replace(lstm(16, steps=64, features=32, hidden=128)[0], dtype="bf16")))
    assert [work.bytes for work in half] == [work.bytes / 2 for work in forward]
    for works, row in zip((forward, backward), lstm(16), strict=True):
        assert sum(work.flops * work.calls for work in works) == pytest.approx(row.flops)


LINEAR, RELU = product("m", "forward", 64, 64, 64), elementwise("aten.relu", "m", "forward", 64, 64)


@pytest.mark.parametrize(
    ("row", "card", "precision", "recorded_on", "computed"),
    [
        (LINEAR, "a100", None, "cpu", "fp32"),
        (LINEAR, "a100", "tf32", "cpu", "tf32"),
        (LINEAR, "a100", "bf16-mixed", "cpu", "bf16"),
        (convolution(8)[0], "a100", None, "cpu", "tf32"),  # torch's default
        (convolution(8)[0], "a100", None, "cuda", "fp32"),  # whose record would name TF32
        (convolution(8)[0], "v100", None, "cpu", "fp32"),
        (RELU, "a100", "bf16-mixed", "cpu", "fp32"),
    ],
)
def test_a_work_is_computed_in_the_precision_that_torch_takes_on_the_card(row, card, precision, recorded_on, computed):
    (work,) = expand_row(row)
    adapted = adapt_to_device(work, find_card(card), precision, recorded_on)
    assert (adapted.precision, adapted.bytes) == (computed, work.bytes / (2 if precision == "bf16-mixed" else 1))
    with pytest.raises(UserError, match="has no hardware for bf16"):
        adapt_to_device(*expand_row(LINEAR), find_card("t4"), "bf16-mixed")


CARD = Datasheet(
    ("card",), ("card",), 16, 600e9, {"fp32": 15e12, "fp16": 100e12}, {}, sms=60, l2_mib=6, cores_per_sm=64, tdp_w=200.0
)
LIMITED = replace(CARD, tdp_w=60.0)
UNLIKE = replace(CARD, memory_bytes_per_sec=8e12, flops_per_sec={"fp32": 200e12}, tdp_w=1500.0)


def linear(m: int, n: int, k: int, **changes) -> Work:
    return replace(Work("linear", "aten.addmm", (m, n, k), 2.0 * m * n * k, 4.0 * (m * k + k * n + m * n)), **changes)


def row_work(kind: str, columns: int, count: int = 2**26) -> Work:
    return Work(kind, f"aten.{kind}", (count // columns, columns), float(count), 8.0 * count)


LARGE = linear(8192, 4096, 4096)
KERNELS = {  # a work on a card → µs: the low end, the middle, the high end
    "a large product": (LARGE, CARD, (16493.0, 25295.0, 39136.0)),
    "power is short": (LARGE, LIMITED, (52672.0, 81199.0, 125630.0)),
    "a card unlike the fitted ones": (LARGE, UNLIKE, (1741.4, 3252.2, 6089.0)),
    "backward": (replace(LARGE, part="backward"), CARD, (16493.0, 25295.0, 41761.0)),
    "another precision": (replace(LARGE, precision="fp16"), CARD, (2473.9, 3248.2, 6276.8)),
    "a convolution without dimensions": (
        replace(LARGE, kind="convolution", dims=()),
        CARD,
        (16493.0, 25223.0, 51832.0),
    ),
    "a convolution, as the product of its patches": (
        replace(LARGE, kind="convolution", dims=(8, 4096, 32, 32, 1024, 2, 2)),
        CARD,
        (16493.0, 26672.0, 54930.0),
    ),
    "twice as many FLOPs, as two": (
        replace(LARGE, kind="convolution", dims=(8, 4096, 32, 32, 1024, 2, 2), flops=2 * LARGE.flops),
        CARD,
        (32985.0, 53026.0, 109030.0),
    ),
    "few pixels of many channels, which fill no card": (
        replace(LARGE, kind="convolution", dims=(1, 512, 4, 4, 512, 3, 3), flops=7.55e7, bytes=9.5e6),
        CARD,
        (138.42, 284.44, 2071.9),
    ),
    "unknown": (replace(LARGE, kind="other", dims=()), CARD, (16493.0, 25223.0, 86298.0)),
    "a part of a recurrent kernel": (replace(LARGE, name="aten.mkldnn_rnn_layer"), CARD, (16493.0, 25295.0, 64178.0)),
    "a part of a wave": (linear(128, 128, 256), CARD, (5.0012, 7.7098, 56.352)),
    "a wave": (linear(256, 256, 256), CARD, (5.2474, 8.0893, 54.106)),
    "a batch of products": (Work("bmm", "aten.bmm", (64, 256, 64, 64), 1.34e8, 1e7), CARD, (23.179, 36.332, 78.77)),
    "elementwise": (row_work("elementwise", 512), CARD, (938.85, 1131.8, 1364.4)),
    "a copy": (row_work("copy", 512), CARD, (882.35, 1131.8, 1451.8)),
    "a launch": (row_work("elementwise", 512, 1024), CARD, (2.5095, 3.0252, 3.6469)),
    "layer norm of rows that the cache does not hold": (row_work("layer_norm", 2**15), CARD, (1406.5, 1738.6, 2149.0)),
    "softmax of rows that the cache does not hold": (row_work("softmax", 2**15), CARD, (1682.7, 2243.1, 2990.2)),
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_takes_what_the_formulas_say_and_never_less_than_its_roof(name):
    work, card, expected = KERNELS[name]
    other_works = [LARGE, row_work("softmax", 64), linear(64, 64, 64, kind="convolution", dims=())]
    for works in ([work], [*other_works, work]):  # a work takes as long among other works as alone
        low, middle, high = (float(end) for end in predict(works, card)[:, -1])
        assert [1e6 * seconds for seconds in (low, middle, high)] == pytest.approx(expected, rel=1e-3)
    assert low < middle < high and middle > roof_seconds(work, card)
    assert low >= 0.9 * roof_seconds(work, card) or work.bytes < 6 * 2**20


@pytest.mark.parametrize("dims", [(0, 8, 0, 0, 4, 3, 3), (64, 8, 9, 4, 3), (64, 8, 9, 9, 9, 1, 3, 3, 3)])
@pytest.mark.filterwarnings("error")
def test_a_convolution_of_any_dimensions_and_without_flops_takes_a_time(dims):
    work = replace(LARGE, kind="convolution", dims=dims, flops=0.0)
    assert 0 < predict([work], CARD)[1, 0] < 1


def test_the_packages_coefficients_name_their_source():
    assert "NeuSight" in coefficients().source


def recorded(size, rows):
    return StepOperations(size, 1.0, "cpu", "A CPU", "32-true", rows)


STEPS = {size: recorded(size, mlp(size)) for size in (8, 64, 512)}


@pytest.mark.parametrize(("size", "around"), [(1, (8, 64)), (8, (8, 64)), (65, (64, 512)), (4096, (64, 512))])
def test_work_that_is_linear_in_the_batch_size_is_exact_everywhere(size, around):
    assert nearest_sizes([512, 8, 64], size) == around
    for row, expected in zip(rows_at(STEPS, size), mlp(size), strict=True):
        assert (row.name, row.module, row.dims) == (expected.name, expected.module, expected.dims)
        assert row.flops == pytest.approx(expected.flops) and row.bytes == pytest.approx(expected.bytes)
        assert row.calls == 1


def test_a_number_never_falls_below_what_it_cannot():
    assert interpolate({64: 1.0, 128: 3.0}, 1) == 0.0
    assert math.isnan(interpolate({64: 1.0, 128: math.nan}, 256))  # an unknown number stays unknown
    first, second = (elementwise("aten.x", "", "forward", rows, 8) for rows in (64, 16))
    (row,) = rows_at({64: recorded(64, [first]), 128: recorded(128, [second])}, 4096)
    assert (row.bytes, row.dims) == (0.1 * second.bytes, (1, 8))


def test_two_sizes_with_other_operations_give_those_of_the_nearer_one():
    small, large = product("m", "forward", 64, 8, 8), elementwise("aten.other", "m", "forward", 512, 8)
    optimizer = mlp(64)[-1]  # whose work does not grow
    steps = {64: recorded(64, [small, optimizer]), 512: recorded(512, [large])}
    doubled = {name: 2 * getattr(small, name) for name in ("flops", "bytes", "cold_bytes", "seconds")}
    assert rows_at(steps, 128) == [replace(small, **doubled, dims=()), optimizer]  # their shape is not known
    assert [row.name for row in rows_at(steps, 1024)] == ["aten.other"]


NO_WAIT = (0, 0, 0.3, 0.6, 0.1, 0)
wide, emulated = partial(mlp, width=4096), lambda batch: [replace(row, dtype="bf16") for row in mlp(batch)]
TRAININGS = {
    "mlp": {},
    "wide": {"rows": wide, "parts": NO_WAIT},
    "lstm": {"rows": lstm},
    "convolution": {"rows": convolution},
    "starved": {"parts": (0.8, 0.0, 0.1, 0.1, 0, 0)},
    "on an L4": {"device": "cuda", "name": "NVIDIA L4"},
    "wide on an L4": {"device": "cuda", "name": "NVIDIA L4", "rows": wide, "parts": NO_WAIT},
    "emulated on a T4": {"device": "cuda", "name": "Tesla T4", "rows": emulated},
}  # fmt: skip


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Source]:
    folders = {name: write_training(tmp_path_factory.mktemp("run"), **options) for name, options in TRAININGS.items()}
    return {name: read_training([folder])[0].sources[0] for name, folder in folders.items()}


def test_the_copy_of_a_batch_is_of_its_recorded_bytes_and_may_be_the_limit(sources):
    card, source = find_card("h100"), sources["mlp"]
    sizes = {
        size: replace(measured, step=replace(measured.step, batch_bytes=10**6 * size))
        for size, measured in source.sizes.items()
    }
    step = step_on(replace(source, sizes=sizes), card, 4096)
    assert step.limit == "data"
    assert step.seconds.middle > 4096e6 / 12e9 > 10 * step_on(source, card, 4096).seconds.middle


def test_a_set_that_lies_on_the_device_is_copied_in_no_step(tmp_path):
    options = {"data.pipeline": "device"}
    write_training(tmp_path, rows=convolution, parts=NO_WAIT, options=options)
    source = read_training([tmp_path])[0].sources[0]
    limits = [
        step_on(case, find_card("h100"), 300).limit for case in (source, replace(source, has_data_on_device=False))
    ]
    assert limits == ["launches", "data"]


def test_what_a_gpu_waits_for_data_is_not_taken_for_the_time_of_its_kernels(sources):
    source = sources["wide on an L4"]
    times = {8: (6e-3, 2e-3), 64: (16e-3, 12e-3), 512: (85e-3, 80e-3)}  # seconds of a step, and of its wait for data
    sizes = {
        size: replace(source.sizes[size], seconds=exactly(step), data_wait_s=waiting)
        for size, (step, waiting) in times.items()
    }
    assert step_on(replace(source, sizes=sizes), find_card("t4"), 512).limit == "data"


def test_a_precision_holds_for_every_operation_with_flops():
    (work,) = expand_row(
        OperationRow("aten._scaled_dot_product_flash_attention", "m", "forward", "fp32", (), 1, 8e9, 1e6)
    )
    assert adapt_to_device(work, find_card("h100"), "bf16-mixed").precision == "bf16"
    with pytest.raises(UserError, match="has no hardware for bf16"):
        adapt_to_device(work, find_card("t4"), "bf16-mixed")
    tf32 = replace(work, precision="tf32")  # as it was recorded on another card
    assert [adapt_to_device(tf32, find_card(card), None).precision for card in ("a100", "t4")] == ["tf32", "fp32"]


def test_a_measured_step_is_as_it_was_measured(sources):
    step = step_here(sources["mlp"], 64)
    assert (step.seconds, step.limit) == (sources["mlp"].sizes[64].seconds, "")
    assert step.memory == exactly(4e6 + 3.1e5 * 64)


PREDICTED = {  # a training, a card, a batch size, a precision → the limit, and ms: the low end, the middle, the high end
    ("mlp", "h100", 8, None): ("launches", (0.42703, 1.08, 2.7141)),
    ("wide", "t4", 8192, None): ("arithmetic", (400.42, 651.79, 1057.1)),
    ("wide", "a100", 4096, None): ("arithmetic", (58.304, 81.487, 142.22)),
    ("wide", "a100", 4096, "bf16-mixed"): ("arithmetic", (4.5379, 11.461, 24.889)),
    ("lstm", "h100", 8, None): ("launches", (0.46532, 1.1658, 5.0676)),
    ("convolution", "h100", 300, None): ("data", (2.3492, 7.6049, 18.353)),
    ("starved", "h100", 512, None): ("data", (12.804, 25.605, 51.219)),
    ("on an L4", "h100", 8, None): ("launches", (0.15903, 0.29471, 1.7338)),
    ("wide on an L4", "h100", 512, None): ("arithmetic", (7.6415, 10.735, 36.935)),
    ("emulated on a T4", "h100", 512, None): ("data", (0.46146, 0.875, 2.8900)),
}


@pytest.mark.parametrize("case", PREDICTED, ids=lambda case: " ".join(map(str, case)))
def test_a_step_takes_the_longer_of_its_kernels_and_its_host(case, sources):
    name, card, size, precision = case
    limit, expected = PREDICTED[case]
    step = step_on(sources[name], find_card(card), size, precision)
    assert [1e3 * seconds for seconds in step.seconds.ends()] == pytest.approx(expected, rel=1e-3)
    assert step.limit == limit


def test_a_gpu_adds_its_context_and_a_part_of_what_was_counted(sources):
    estimate = memory.estimate_gpu_bytes(1e9)
    assert (estimate + memory.CONTEXT * -1).ends() == pytest.approx([1e9, 1.2e9, 1.6e9])
    assert step_on(sources["mlp"], CARD, 128).memory == memory.estimate_gpu_bytes(4e6 + 3.1e5 * 128)


def test_a_peak_that_a_gpu_measured_is_the_middle_of_what_another_one_needs(sources):
    peak = 4e6 + 3.1e5 * 8
    source = sources["on an L4"]
    assert step_here(source, 8).memory == exactly(peak)
    sizes = {size: replace(measured, is_peak=True) for size, measured in source.sizes.items()}
    needs = step_on(replace(source, sizes=sizes), find_card("h100"), 8).memory + memory.CONTEXT * -1
    assert needs.ends() == pytest.approx([peak / 1.2, peak, peak * 1.6 / 1.2])


@pytest.mark.parametrize(
    ("interval", "text"),
    [
        (Interval(63, 90, 120) + Interval(63, 90, 120), "2.1–4.0 min"),
        (exactly(49), "49 s"),
        (Interval(3500, 4500, 6000) * 2, "1.9–3.3 h"),
        (Interval(0.0021, 0.003, 0.0044), "2.1–4.4 ms"),
        (Interval(2.1e-6, 3e-6, 4.4e-6), "2.1–4.4 µs"),
        (Interval(200000, 300000, 900000), "2.3–10 d"),
    ],
)
def test_a_time_has_one_unit_and_two_digits(interval, text):
    assert str(interval) == text
    assert [digits(value) for value in (24_123, 0.0152, 0, 9.96)] == ["24,000", "0.015", "0", "10"]


def test_an_interval_of_another_confidence_is_converted_in_logarithms():
    wide, narrow = convert_interval(1 / 1.5, 1, 2, 0.95), convert_interval(1 / 1.5, 1, 2, 0.8)
    assert wide.high == pytest.approx(2 ** (1.64485 / 1.95996), rel=1e-5)
    assert narrow.low == pytest.approx(1.5 ** -(1.64485 / 1.28155), rel=1e-5)
    assert convert_interval(1, 1, 1, 0.95, error=0.1).high == pytest.approx(math.exp(0.1 * 1.64485), rel=1e-5)
    assert convert_interval(5e-324, 1e300, 1.7e308, 0.5).middle == 1e300  # the numbers of a damaged record


def test_the_interval_of_a_ratio_of_lognormal_times_holds_the_true_one_as_often_as_it_says():
    random, spread, cases, held = np.random.default_rng(0), 0.3, 4000, 0
    estimates = spread * np.sqrt(random.chisquare(5, cases) / 5)  # the spread of five fitted devices
    for error, estimate in zip(random.normal(0, spread, cases), estimates, strict=True):
        middle, reach = math.exp(error), math.exp(deviations(CONFIDENCE) * estimate)
        ratio = time_ratio(Interval(middle / reach, middle, middle * reach), exactly(1))
        held += ratio.low <= 1 <= ratio.high
    assert held / cases == pytest.approx(SURE, abs=0.01)


def test_a_ratio_to_a_time_that_may_be_nothing_is_not_known():
    ratio = time_ratio(Interval(2, 3, 4), Interval(0, 1, 2))
    assert (ratio.value, ratio.low, ratio.high) == (3, 0, math.inf)
    assert (Interval(5, 7, 9) - Interval(1, 2, 6)).ends() == [0, 5, 8]
