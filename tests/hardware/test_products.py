"""Matrix products on a device: what is timed, for how long, and what is left out; by a fake clock, and once for real."""

from statistics import median

import pytest
import torch

from batchscope.hardware import microbenchmarks
from batchscope.hardware import products as module
from batchscope.hardware.products import Product, products, time_products

CPU = torch.device("cpu")
SMALL = [Product(16, 16, 16), Product(7, 3, 7, True), Product(7, 3, 7, True, True)]
PEAK = 1e11


@pytest.fixture
def fake_timer(monkeypatch):
    """A call takes `seconds` by the fake clock, and computes nothing; `blocks` are the numbers of calls in a block."""
    blocks = []
    timer = {"seconds": 1e-4}

    def time_block(run, times):
        blocks.append(times)
        return timer["seconds"] * times

    monkeypatch.setattr(microbenchmarks, "time_runs", time_block)
    timer["blocks"] = blocks
    return timer


def timings(requested, seconds=1e3, peak=PEAK, say=lambda text: None):
    return time_products(requested, CPU, peak, seconds, say)


def test_a_short_product_is_timed_in_blocks_of_many_calls_for_half_a_second_after_a_first_call(fake_timer):
    timing = timings(SMALL[:1])[SMALL[0]]
    assert fake_timer["blocks"][:3] == [1, 1, 50]  # the first call, an estimate, and blocks of 5 ms
    assert timing.product == pytest.approx([1e-4] * len(timing.product))
    assert timing.calls == 50 * len(timing.product) == pytest.approx(5000, rel=0.02)
    assert (list(timing.copy), list(timing.creation)) == ([], [])


def test_a_long_product_is_timed_three_times_and_twice_where_the_time_is_short(fake_timer):
    fake_timer["seconds"] = 4.0
    assert timings(SMALL[:1])[SMALL[0]].calls == 3
    assert timings(SMALL[:1], seconds=7.0)[SMALL[0]].calls == 2


def test_the_creation_of_matrices_is_timed_where_a_loop_creates_them(fake_timer):
    timing_by_product = timings(SMALL)
    assert [len(timing_by_product[product].creation) for product in SMALL] == [0, 0, 5]


def test_a_product_that_would_take_too_long_is_left_out_by_the_peak_then_by_the_rate_of_the_last_one(fake_timer):
    large, larger = Product(1024, 1024, 1024), Product(1600, 1600, 1600)
    assert timings([larger], seconds=0.1) == {}  # two products take 0.16 s by the peak
    fake_timer["seconds"] = 4.0  # 200 times as long as by the peak
    assert [*timings([large, larger], seconds=30.0)] == [large]


def test_a_product_whose_matrices_do_not_fit_is_left_out(fake_timer, monkeypatch):
    def refuse(run, times):
        raise RuntimeError("not enough memory")

    monkeypatch.setattr(microbenchmarks, "time_runs", refuse)
    assert timings(SMALL) == {}


def test_it_says_what_it_measures(fake_timer):
    lines = []
    timings(SMALL, say=lines.append)
    assert lines == [f"measuring products on cpu: {product} …" for product in SMALL]


def test_a_real_run_multiplies_and_larger_matrices_take_longer(monkeypatch):
    monkeypatch.setattr(module, "LOOPS", ((70, 30),))
    monkeypatch.setattr(module, "_ENOUGH_S", 0.05)
    timing_by_product = timings(products([16, 256]))
    assert len(timing_by_product) == 4
    times = {product: median(timing.product) for product, timing in timing_by_product.items()}
    assert times[Product(256, 256, 256)] > times[Product(16, 16, 16)]
    assert all(1e-9 < seconds < 1 for seconds in times.values())
