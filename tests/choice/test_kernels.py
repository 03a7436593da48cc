"""A kernel's time on a device: what is predicted, what is only bounded, and how measurements correct it."""

import dataclasses
import subprocess
import sys

import pytest

from batchscope.choice.device import Device
from batchscope.choice.kernels import BOUND, FILE, PREDICTED, coefficients, predict, roof_seconds, widening
from batchscope.choice.work import Work

CARD = Device("card", "cuda", 24e9, 600e9, {"fp32": 15e12, "fp16": 100e12}, 60, 6e6, 1.5e9, 64, 200.0)


def linear(m: int, n: int, k: int, **changes: object) -> Work:
    work = Work("linear", "aten.addmm", (m, n, k), 2.0 * m * n * k, 4.0 * (m * k + k * n + m * n))
    return dataclasses.replace(work, **changes)


def elementwise(count: int) -> Work:
    return Work("elementwise", "aten.add", (1024, count // 1024), float(count), 12.0 * count)


LARGE = linear(8192, 4096, 4096)


@pytest.mark.parametrize("work", [LARGE, linear(128, 10, 512), elementwise(2**26)])
def test_the_middle_lies_in_the_interval_and_above_the_roof(work: Work) -> None:
    interval, how = predict(work, CARD)
    assert how == PREDICTED
    assert 0 < interval.low < interval.middle < interval.high
    assert interval.middle > roof_seconds(work, CARD)


def test_a_large_product_reaches_a_good_part_of_the_peak() -> None:
    assert 0.4 < roof_seconds(LARGE, CARD) / predict(LARGE, CARD)[0].middle < 1


def test_a_power_limited_card_does_not_reach_the_share_of_the_peak_that_others_reach() -> None:
    limited = dataclasses.replace(CARD, tdp_w=60.0)
    assert predict(LARGE, limited)[0].middle > 1.5 * predict(LARGE, CARD)[0].middle
    assert predict(elementwise(2**26), limited)[0] == predict(elementwise(2**26), CARD)[0]


def test_a_product_that_fills_a_part_of_a_wave_takes_as_long_as_a_whole_one() -> None:
    few, many = linear(128, 128, 256), linear(256, 256, 256)
    assert predict(many, CARD)[0].middle < 1.3 * predict(few, CARD)[0].middle


def test_the_shortest_kernel_takes_some_microseconds() -> None:
    assert 2e-6 < predict(elementwise(1024), CARD)[0].middle < 1e-5


def test_a_reduction_reads_rows_again_that_the_cache_does_not_hold() -> None:
    def seconds(kind: str, length: int) -> float:
        work = Work(kind, kind, (2**26 // length, length), 2.0**26, 8.0 * 2**26)
        return predict(work, CARD)[0].middle

    for kind in ("layer_norm", "softmax"):
        assert seconds(kind, 2**15) > 1.3 * seconds(kind, 512)
    assert seconds("elementwise", 2**15) == seconds("elementwise", 512)


def test_measurements_on_the_device_shift_and_narrow_the_interval() -> None:
    before = predict(LARGE, CARD)[0]
    works = [linear(1024 * i, 2048, 2048) for i in range(1, 11)]
    measured = [(work, CARD, 1.3 * predict(work, CARD)[0].middle) for work in works]
    after = predict(LARGE, CARD, measured)[0]
    assert 1.15 * before.middle < after.middle < 1.3 * before.middle
    assert after.high / after.middle < before.high / before.middle
    bmm = Work("bmm", "aten.bmm", (16, 512, 512, 64), 2.0 * 16 * 512 * 512 * 64, 4.0 * 16 * (2 * 512 * 64 + 512 * 512))
    relative = predict(bmm, CARD, measured)[0].middle / predict(bmm, CARD)[0].middle
    assert 1.02 < relative < after.middle / before.middle


def test_one_measurement_moves_a_prediction_less_than_ten_of_them() -> None:
    measured = [(linear(2048, 2048, 2048), CARD, 1.3 * predict(linear(2048, 2048, 2048), CARD)[0].middle)]
    assert predict(LARGE, CARD)[0].middle < predict(LARGE, CARD, measured)[0].middle
    assert predict(LARGE, CARD, measured)[0].middle < predict(LARGE, CARD, measured * 10)[0].middle


def test_measurements_of_another_device_are_left_out() -> None:
    other = dataclasses.replace(CARD, name="another")
    assert predict(LARGE, CARD, [(LARGE, other, 1.0)]) == predict(LARGE, CARD)


@pytest.mark.parametrize(
    "work",
    [
        linear(8192, 4096, 4096, part="backward"),
        linear(8192, 4096, 4096, precision="fp16"),
        linear(8192, 4096, 4096, kind="convolution", dims=()),
        linear(8192, 4096, 4096, kind="recurrent", dims=()),
    ],
    ids=["backward", "other precision", "convolution", "recurrent"],
)
def test_what_was_never_measured_has_a_wider_interval(work: Work) -> None:
    interval, how = predict(work, CARD)
    usual = predict(LARGE, CARD)[0]
    assert how == PREDICTED
    assert interval.high / interval.middle > 1.05 * usual.high / usual.middle


def test_a_device_unlike_the_fitted_ones_has_a_wider_interval() -> None:
    larger = dataclasses.replace(CARD, bytes_per_sec=8e12, flops_per_sec={"fp32": 200e12}, tdp_w=1500.0)
    assert widening(CARD, coefficients()) == 1
    assert widening(larger, coefficients()) > 1.5
    usual, wide = predict(elementwise(2**28), CARD)[0], predict(elementwise(2**28), larger)[0]
    assert wide.high / wide.middle > usual.high / usual.middle


def test_a_datasheet_with_gaps_has_a_wider_interval() -> None:
    gaps = dataclasses.replace(CARD, sms=None, l2_bytes=None, clock_hz=None, cores_per_sm=None, tdp_w=None)
    usual, wide = predict(LARGE, CARD)[0], predict(LARGE, gaps)[0]
    assert wide.high / wide.middle > usual.high / usual.middle


@pytest.mark.parametrize("kind", ["rocm", "mps", "tpu", "cpu"])
def test_another_vendors_device_has_a_bound_at_best(kind: str) -> None:
    device = dataclasses.replace(CARD, kind=kind)
    interval, how = predict(LARGE, device)
    assert how == BOUND
    assert interval.low == interval.middle == roof_seconds(LARGE, device) < interval.high


def test_an_operation_or_a_precision_of_which_nothing_is_known_has_a_bound() -> None:
    assert predict(dataclasses.replace(LARGE, kind="other", dims=()), CARD)[1] == BOUND
    assert predict(linear(64, 64, 64, precision="bf16"), CARD)[1] == BOUND


def test_a_card_without_tf32_computes_in_fp32() -> None:
    assert predict(linear(64, 64, 64, precision="tf32"), CARD)[0].middle == pytest.approx(
        predict(linear(64, 64, 64), CARD)[0].middle, rel=0.1
    )


def test_a_devices_name_changes_nothing() -> None:
    assert predict(LARGE, dataclasses.replace(CARD, name="Tesla T4")) == predict(LARGE, CARD)


def test_no_time_falls_below_the_roof_by_much_where_the_cache_is_small() -> None:
    assert predict(LARGE, CARD)[0].low >= 0.9 * roof_seconds(LARGE, CARD)


def test_the_coefficients_are_small_and_name_their_source() -> None:
    assert FILE.stat().st_size < 100_000
    assert "NeuSight" in coefficients().source


def test_a_prediction_imports_no_torch() -> None:
    code = "import sys, batchscope.choice.kernels as k; k.coefficients(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
