"""A kernel's time on a card: what moves it, and what widens its interval."""

import dataclasses
import subprocess
import sys

import pytest

from batchscope.choice.interval import Interval
from batchscope.choice.kernels import FILE, coefficients, predict, roof_seconds, widening
from batchscope.choice.work import Work
from batchscope.hardware.datasheet import Datasheet

CARD = Datasheet(
    ("card",), ("card",), 16, 600e9, {"fp32": 15e12, "fp16": 100e12}, {}, sms=60, l2_mib=6, cores_per_sm=64, tdp_w=200.0
)


def linear(m: int, n: int, k: int, **changes: object) -> Work:
    work = Work("linear", "aten.addmm", (m, n, k), 2.0 * m * n * k, 4.0 * (m * k + k * n + m * n))
    return dataclasses.replace(work, **changes)


def elementwise(count: int) -> Work:
    return Work("elementwise", "aten.add", (1024, count // 1024), float(count), 12.0 * count)


def one(work: Work, card: Datasheet = CARD) -> Interval:
    return Interval(*predict([work], card)[:, 0])


def width(work: Work, card: Datasheet = CARD) -> float:
    found = one(work, card)
    return found.high / found.middle


LARGE = linear(8192, 4096, 4096)


@pytest.mark.parametrize("work", [LARGE, linear(128, 10, 512), elementwise(2**26)])
def test_the_middle_lies_in_the_interval_and_above_the_roof(work: Work) -> None:
    found = one(work)
    assert 0 < found.low < found.middle < found.high
    assert found.middle > roof_seconds(work, CARD)
    assert found.low >= 0.9 * roof_seconds(work, CARD) or work.bytes < 6 * 2**20


def test_several_works_have_the_times_that_they_have_alone() -> None:
    works = [LARGE, elementwise(2**20), linear(64, 64, 64, kind="convolution", dims=()), linear(64, 64, 64)]
    assert predict(works, CARD).T.tolist() == [pytest.approx(one(work).ends()) for work in works]


def test_a_large_product_reaches_a_good_part_of_the_peak_unless_power_is_short() -> None:
    assert 0.4 < roof_seconds(LARGE, CARD) / one(LARGE).middle < 1
    limited = dataclasses.replace(CARD, tdp_w=60.0)
    assert one(LARGE, limited).middle > 1.5 * one(LARGE).middle
    assert one(elementwise(2**26), limited) == one(elementwise(2**26))


def test_a_product_that_fills_a_part_of_a_wave_takes_as_long_as_a_whole_one() -> None:
    assert one(linear(256, 256, 256)).middle < 1.3 * one(linear(128, 128, 256)).middle


def test_the_shortest_kernel_takes_some_microseconds() -> None:
    assert 2e-6 < one(elementwise(1024)).middle < 1e-5


@pytest.mark.parametrize(("kind", "again"), [("layer_norm", True), ("softmax", True), ("elementwise", False)])
def test_a_reduction_reads_rows_again_that_the_cache_does_not_hold(kind: str, again: bool) -> None:
    short, long = (one(Work(kind, kind, (2**26 // n, n), 2.0**26, 8.0 * 2**26)).middle for n in (512, 2**15))
    assert (long > 1.3 * short) == again


@pytest.mark.parametrize(
    "work",
    [
        linear(8192, 4096, 4096, part="backward"),
        linear(8192, 4096, 4096, precision="fp16"),
        linear(8192, 4096, 4096, kind="convolution", dims=()),
        linear(8192, 4096, 4096, kind="other", dims=()),
        linear(8192, 4096, 4096, name="aten.mkldnn_rnn_layer"),
    ],
    ids=["backward", "other precision", "convolution", "unknown", "recurrent"],
)
def test_what_was_never_measured_has_a_wider_interval(work: Work) -> None:
    assert width(work) > 1.05 * width(LARGE)


def test_a_card_unlike_the_fitted_ones_has_a_wider_interval() -> None:
    larger = dataclasses.replace(CARD, memory_bytes_per_sec=8e12, flops_per_sec={"fp32": 200e12}, tdp_w=1500.0)
    assert widening(CARD, coefficients()) == 1 and widening(larger, coefficients()) > 1.5
    assert width(LARGE) < width(LARGE, larger)


def test_a_cards_name_changes_nothing() -> None:
    assert one(LARGE, dataclasses.replace(CARD, names=("Tesla T4",))) == one(LARGE)


def test_the_coefficients_are_small_and_name_their_source() -> None:
    assert FILE.stat().st_size < 100_000
    assert "NeuSight" in coefficients().source


def test_a_choice_from_records_imports_no_torch() -> None:
    code = "import sys, batchscope.cli.choose; print({'torch', 'lightning', 'matplotlib'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
