"""Matrix products: times of a device that is here, predictions of cards, crossings, and the sentence."""

import json
import math
from dataclasses import replace

import pytest

from batchscope.choice.crossing import Line, as_json, crossings, nearest_crossing, threshold_crossing
from batchscope.choice.interval import Interval, exactly
from batchscope.choice.kernels import predict
from batchscope.choice.products import measured_line, predicted_line, sentence, table
from batchscope.choice.work import Work
from batchscope.hardware.datasheet import find_card
from batchscope.hardware.products import Product, Timed, products
from tests.support.devices import CPU, HOST

WANTED = products([16, 256, 4096])
SPREAD = (0.97, 1.0, 1.05, 0.98, 1.02, 0.99, 1.03)


def timings(seconds, samples=7, creation=()):
    return Timed([seconds * factor for factor in SPREAD[:samples]], (), [*creation], 1000)


def a_cpu(**options):
    """A processor with 1 µs for a call, 1e11 FLOP/s, and 10 ns for the creation of a number."""
    measurements = {}
    for product in WANTED:
        creation = [1e-8 * product.k * (product.m + product.n)] * 5 if product.creates else ()
        measurements[product] = timings(1e-6 + product.flops / 1e11 + sum(creation[:1]), creation=creation)
    return measured_line(CPU, measurements, **options)


def a_line(label, **times):
    return Line(label, label == "cpu", {int(size.strip("n")): time for size, time in times.items()})


def test_the_products_are_squares_and_two_loops_smallest_first():
    assert list(map(str, WANTED)) == [
        "16",
        "100 of 70×30, created before",
        "100 of 70×30, created in the loop",
        "256",
        "4,096",
        "100 of 7000×3000, created before",
        "100 of 7000×3000, created in the loop",
    ]
    assert (Product(2, 3, 4).flops, Product(2, 3, 4).bytes) == (48, 4 * (6 + 12 + 8))


def test_a_measured_time_is_the_median_of_its_samples_and_few_samples_or_a_load_make_its_interval_wider():
    product = Product(256, 256, 256)
    many, few = (measured_line(HOST, {product: timings(1e-3, samples)}).times[256] for samples in (7, 3))
    assert many.middle == few.middle == pytest.approx(1e-3)
    assert few.high - few.low > many.high - many.low > 2 * 0.16e-3  # both include the spread of separate runs
    busy = measured_line(HOST, {product: timings(1e-3)}, 0.4).times[256]
    assert (busy.low, busy.middle, busy.high) == (pytest.approx(0.6 * many.low), many.middle, many.high)


def test_the_share_is_that_of_the_measured_peak_and_the_limit_takes_longest_by_the_peaks():
    points = a_cpu().points
    assert points["4,096"].share == pytest.approx(1.0, rel=0.01)
    assert points["16"].share < 0.1
    limits = {name: point.limit for name, point in points.items()}
    assert (limits["16"], limits["256"], limits["4,096"]) == ("launches", "arithmetic", "arithmetic")
    slow_memory = replace(CPU, memory_bytes_per_sec=1e8)
    assert measured_line(slow_memory, {Product(256, 256, 256): timings(1.0)}).points["256"].limit == "memory"


def test_a_card_is_predicted_by_the_kernel_model_of_choose_and_a_small_product_by_its_launch():
    h100 = find_card("h100")
    line = predicted_line(WANTED, h100, a_cpu())
    kernel = predict([Work("linear", "aten.mm", (4096,) * 3, 2.0 * 4096**3, 12.0 * 4096**2)], h100)[:, 0]
    assert line.times[4096].ends() == pytest.approx(kernel, rel=0.01)
    assert 3e-6 < line.times[16].middle < 8e-6
    assert line.points["16"].limit == "launches"
    assert line.points["4,096"].share == pytest.approx(2 * 4096**3 / kernel[1] / h100.flops_per_sec["fp32"], rel=0.01)


def test_a_loop_that_creates_its_matrices_also_takes_the_creation_on_the_host_and_the_copies():
    points = predicted_line(WANTED, find_card("h100"), a_cpu()).points
    before, inside = (points[f"100 of 7000×3000, created {how}"] for how in ("before", "in the loop"))
    assert inside.seconds.middle == pytest.approx(0.42 + inside.copy.middle, rel=0.05)
    assert inside.seconds.middle > 50 * before.seconds.middle


def test_a_loop_whose_creation_was_not_measured_is_not_predicted():
    here = a_cpu()
    points = {name: point for name, point in here.points.items() if "in the loop" not in name}
    assert {*predicted_line(WANTED, find_card("t4"), replace(here, points=points)).points} == {*points}


@pytest.mark.parametrize(
    ("first", "second", "at"),
    [
        ((1, 10, 100), (10, 10.001, 10), 10.0),
        ((1, 10, 1000), (10, 100, 100), 10 * math.sqrt(10)),  # on a log scale
        ((2, 20, 200), (1, 1, 1), 0.0),
        ((1, 1, 1), (2, 2, 2), math.inf),
    ],
    ids=["at a size", "between two", "faster everywhere", "faster nowhere"],
)
def test_the_crossing_is_the_size_from_which_on_the_other_device_stays_faster(first, second, at):
    lines = [
        a_line(label, n1=exactly(small), n10=exactly(middle), n100=exactly(large))
        for label, (small, middle, large) in (("cpu", first), ("t4", second))
    ]
    crossing = crossings(lines)["t4"]
    assert crossing.middle == crossing.low == crossing.high == pytest.approx(at, rel=1e-3)


def test_a_crossing_is_as_wide_as_both_times_are_and_devices_without_a_common_size_have_none():
    cpu = a_line("cpu", n10=Interval(0.9, 1, 1.1), n100=Interval(90, 100, 110), n1000=Interval(9e3, 1e4, 1.1e4))
    card = a_line("t4", n10=Interval(5, 10, 20), n100=Interval(5, 10, 20), n1000=Interval(5, 10, 20))
    at = crossings([cpu, card])["t4"]
    assert at.low < at.middle < at.high
    assert at.middle == pytest.approx(10 * math.sqrt(10))
    assert crossings([cpu, a_line("t4", n7=exactly(1))])["t4"].middle == math.inf
    assert nearest_crossing([cpu]).middle == math.inf
    shares = {1: exactly(0.25), 4: exactly(1.0)}
    assert threshold_crossing(shares, ("high", "middle", "low"), 0.5).middle == pytest.approx(2.0)


def say(first, second):
    """The sentence where a CPU and an H100 take these seconds for 16, 256, 4,096 and a pass of the large loop."""
    names = ["16", "256", "4,096", "100 of 7000×3000, created before"]
    by_name = {str(product): product for product in WANTED}
    cpu = measured_line(CPU, {by_name[name]: timings(time) for name, time in zip(names, first, strict=True)})
    cpu_points = {str(product): point for product in WANTED if (point := cpu.points.get(str(product)))}
    points = {name: replace(cpu_points[name], seconds=exactly(time)) for name, time in zip(names, second, strict=True)}
    times = {point.product.n: point.seconds for point in points.values() if not point.product.loop}
    return sentence([cpu, replace(cpu, label="h100", here=False, times=times, points=points)])


def test_one_sentence_says_where_the_first_device_stops_being_first_and_what_a_card_takes():
    text = say((1e-6, 1e-3, 1.0, 4.0), (1e-5, 1e-5, 0.01, 0.1))
    at = 16 * 16 ** (1 / 3)  # from a ratio of 1/10 at n = 16 to 100 at n = 256, on a log scale
    assert text == (
        f"Below n ≈ {at:.0f} (36 to 45) this CPU is first; at 7000×3000 an H100 takes 1/40 of its time (1/52 to 1/31)."
    )


@pytest.mark.parametrize(("factor", "how"), [(0.1, "never"), (10, "always")])
def test_a_device_that_is_first_at_all_sizes_or_at_none_has_no_crossing(factor, how):
    times = (1e-6, 1e-3, 1.0, 4.0)
    text = say(times, [factor * time for time in times])
    assert text.startswith(f"From n = 16 to 4,096 this CPU is {how} first; at 7000×3000 an H100 takes ")
    assert (" 10 of its time (" in text) == (how == "always")


@pytest.mark.parametrize(("factor", "how"), [(0.95, "probably never"), (1.05, "probably always")])
def test_what_the_intervals_do_not_exclude_is_only_probable(factor, how):
    times = (1e-6, 1e-3, 1.0, 4.0)
    assert say(times, [factor * time for time in times]).startswith(f"From n = 16 to 4,096 this CPU is {how} first; ")


def test_the_nearest_of_crossings_that_are_alike_is_the_one_with_the_nearest_end():
    cpu, wide = a_line("cpu", n1=exactly(1)), a_line("h100", n1=Interval(0.5, 2, 8))
    assert nearest_crossing([cpu, a_line("t4", n1=exactly(2)), wide]).ends() == [0, math.inf, math.inf]


def test_a_device_alone_is_compared_with_nothing():
    assert sentence([a_cpu()]) == ""


def test_devices_without_a_product_in_common_are_not_compared():
    small, large = (measured_line(CPU, {Product(n, n, n): timings(1e-3)}) for n in (256, 4096))
    assert sentence([small, large]) == ""


def test_the_table_has_a_row_for_each_product_with_the_time_of_100_passes_and_one_column_of_copies():
    cpu = a_cpu()
    frame = table([cpu, *(predicted_line(WANTED, find_card(name), cpu) for name in ("t4", "h100"))])
    assert list(frame) == ["cpu (here)", "cpu: of peak", "t4", "h100", "copy to a card"]
    assert list(frame.index) == list(map(str, sorted(WANTED, key=lambda product: (product.loop, product.flops))))
    loop = "100 of 7000×3000, created before"
    assert frame.loc[loop, "cpu (here)"] == str(cpu.points[loop].seconds * 100)
    assert frame.loc["4,096", "cpu: of peak"] == "100 %"


def test_json_has_every_number_and_no_infinity():
    cpu = a_cpu()
    lines = [cpu, predicted_line(WANTED, find_card("h100"), cpu)]
    document = json.loads(json.dumps(as_json(lines, "said"), allow_nan=False))
    assert [(device["label"], device["here"]) for device in document["devices"]] == [("cpu", True), ("h100", False)]
    assert document["devices"][1]["points"]["16"]["seconds"]["high"] == lines[1].times[16].high
    assert (document["sentence"], {*document["crossings"]["h100"]}) == ("said", {"low", "middle", "high"})
    never = as_json([cpu, replace(cpu, label="h100", times={16: exactly(1e3)})], "")
    assert never["crossings"]["h100"]["middle"] is None
