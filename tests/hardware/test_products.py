"""Products of matrices on a device: what is timed, how long, what is left out; by a fake clock, and once for real."""

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
def seconds_of_a_call(monkeypatch):
    """What each call takes by the fake clock, by the number of timed blocks; nothing is computed."""
    blocks = []
    took = {"seconds": 1e-4}

    def fake(run, times):
        blocks.append(times)
        return took["seconds"] * times

    monkeypatch.setattr(microbenchmarks, "time_runs", fake)
    took["blocks"] = blocks
    return took


def measured(wanted, seconds=1e3, peak=PEAK, say=lambda text: None):
    return time_products(wanted, CPU, peak, seconds, say)


def test_a_short_product_is_timed_in_blocks_of_many_calls_for_half_a_second_after_a_first_call(seconds_of_a_call):
    found = measured(SMALL[:1])[SMALL[0]]
    assert seconds_of_a_call["blocks"][:3] == [1, 1, 50]  # the first call, an estimate, and blocks of 5 ms
    assert found.product == pytest.approx([1e-4] * len(found.product))
    assert found.calls == 50 * len(found.product) == pytest.approx(5000, rel=0.02)
    assert (list(found.copy), list(found.creation)) == ([], [])


def test_a_long_product_is_timed_three_times_and_twice_where_the_time_is_short(seconds_of_a_call):
    seconds_of_a_call["seconds"] = 4.0
    assert measured(SMALL[:1])[SMALL[0]].calls == 3
    assert measured(SMALL[:1], seconds=7.0)[SMALL[0]].calls == 2


def test_the_creation_of_matrices_is_timed_where_a_loop_creates_them(seconds_of_a_call):
    found = measured(SMALL)
    assert [len(found[product].creation) for product in SMALL] == [0, 0, 5]


def test_a_product_that_would_take_too_long_is_left_out_by_the_peak_then_by_the_rate_of_the_last_one(seconds_of_a_call):
    large, larger = Product(1024, 1024, 1024), Product(1600, 1600, 1600)
    assert measured([larger], seconds=0.1) == {}  # two take 0.16 s by the peak
    seconds_of_a_call["seconds"] = 4.0  # 200 times as long as by the peak
    assert [*measured([large, larger], seconds=30.0)] == [large]


def test_a_product_whose_matrices_do_not_fit_is_left_out(seconds_of_a_call, monkeypatch):
    def refuse(run, times):
        raise RuntimeError("not enough memory")

    monkeypatch.setattr(microbenchmarks, "time_runs", refuse)
    assert measured(SMALL) == {}


def test_it_says_what_it_measures(seconds_of_a_call):
    said = []
    measured(SMALL, say=said.append)
    assert said == [f"measuring products on cpu: {product} …" for product in SMALL]


def test_a_real_run_multiplies_and_larger_matrices_take_longer(monkeypatch):
    monkeypatch.setattr(module, "LOOPS", ((70, 30),))
    monkeypatch.setattr(module, "_ENOUGH_S", 0.05)
    found = measured(products([16, 256]))
    assert len(found) == 4
    times = {product: median(timed.product) for product, timed in found.items()}
    assert times[Product(256, 256, 256)] > times[Product(16, 16, 16)]
    assert all(1e-9 < seconds < 1 for seconds in times.values())
