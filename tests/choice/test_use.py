"""The use of each device by batch size: MFU, samples/s, the end of memory, the sentence, the pictures."""

from dataclasses import replace
from functools import partial

import pytest
from matplotlib.colors import to_hex

from batchscope.choice.interval import Interval, exactly
from batchscope.choice.measured import read_training
from batchscope.choice.pictures import draw_products, draw_use
from batchscope.choice.products import measured_line, predicted_line
from batchscope.choice.rows import Question
from batchscope.choice.use import UseLine, use_lines, use_sentence
from batchscope.cli.choose import USUAL
from batchscope.hardware.datasheet import find_card
from batchscope.hardware.products import Timed, products
from tests.choice.trainings import CALIBRATION, GFLOPS, mlp, write_training
from tests.support.devices import CPU

CARDS = [find_card(name) for name in ("t4", "h100")]


def training(folder, **options):
    (measured, _) = read_training([write_training(folder, **options)])
    return measured


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """The lines of a training with wide layers; 8 samples do not fill a GPU."""
    rows = partial(mlp, width=4096)
    return use_lines(
        training(tmp_path_factory.mktemp("wide"), rows=rows, parts=(0, 0, 0.3, 0.6, 0.1, 0)), Question(CARDS)
    )


def line(label, **shares):
    sizes = {int(size.strip("b")): exactly(share) for size, share in shares.items()}
    times = {size: exactly(1.0 / share.middle) for size, share in sizes.items()}
    rates = {size: exactly(size * share.middle) for size, share in sizes.items()}
    return UseLine(label, label == "cpu", times, rates, sizes, False)


def test_mfu_is_the_time_of_the_flops_at_the_peak_over_the_time_of_the_step(wide):
    cpu, t4, h100 = wide
    assert [(use.label, use.here) for use in wide] == [("cpu", True), ("t4", False), ("h100", False)]
    flops = sum(row.flops for row in mlp(512, width=4096))
    for use, peak in ((cpu, GFLOPS), (t4, CARDS[0].flops_per_sec["fp32"]), (h100, CARDS[1].flops_per_sec["fp32"])):
        assert use.shares[512].middle == pytest.approx(flops / use.times[512].middle / peak)
        assert use.rates[512].middle == pytest.approx(512 / use.times[512].middle)
        assert use.shares[512].low <= use.shares[512].middle <= use.shares[512].high
    assert h100.shares[8].middle < 0.1 < h100.shares[512].middle


def test_a_card_has_the_doublings_too_and_ends_where_its_memory_may_not_hold_the_batch(tmp_path, wide):
    assert list(wide[0].times) == [8, 64, 512]
    assert list(wide[2].times) == [8, 64, 512, 1024, 2048, 4096]
    assert not any(use.memory_ends for use in wide)
    greedy = use_lines(
        training(tmp_path, memory=lambda size: {"parameters": 1e6, "saved": 0.1e9 * size}), Question(CARDS)
    )
    assert [(max(use.times), use.memory_ends) for use in greedy] == [(512, False), (64, True), (512, True)]


NO_PEAK = {
    "none": {},
    "too low": CALIBRATION | {"disturbed": "others were busy"},
    "damaged": CALIBRATION | {"matmul_flops_per_sec": {"fp32": 0.0, "bf16": "fast"}},
}


@pytest.mark.parametrize("calibration", NO_PEAK.values(), ids=NO_PEAK)
def test_a_card_that_cannot_train_it_has_no_line_and_a_device_without_a_peak_no_mfu(calibration, tmp_path):
    measured = training(tmp_path)
    assert [use.label for use in use_lines(measured, Question(CARDS, precision="bf16-mixed"))] == ["cpu", "h100"]
    sources = [
        replace(
            source,
            sizes={size: replace(m, step=replace(m.step, calibration=calibration)) for size, m in source.sizes.items()},
        )
        for source in measured.sources
    ]
    cpu, *cards = use_lines(replace(measured, sources=sources), Question(CARDS))
    assert (cpu.shares, len(cpu.rates)) == ({}, 3)
    assert all(card.shares for card in cards)


def test_a_peak_that_others_lowered_in_one_run_is_that_of_another(tmp_path):
    measured = training(tmp_path)
    (source,) = measured.sources
    lowered = replace(source.sizes[8].step, calibration=CALIBRATION | {"disturbed": "others were busy"})
    sizes = {**source.sizes, 8: replace(source.sizes[8], step=lowered)}
    cpu, *_ = use_lines(replace(measured, sources=[replace(source, sizes=sizes)]), Question(CARDS))
    assert list(cpu.shares) == [8, 64, 512]


@pytest.mark.parametrize(
    ("cpu", "h100", "said"),
    [
        (
            {"b64": 0.0625, "b1024": 0.125},
            {"b64": 0.03125, "b1024": 0.25, "b4096": 1.0},
            "is 3.1 % used at 64, and half full from about 2,000 (2,000 to 2,000); it is faster than this CPU from about 260 (260 to 260), 2.0 times at 1,024 (2.0 to 2.0)",
        ),
        (
            {"b64": 0.01, "b1024": 0.01},
            {"b64": 0.03, "b1024": 0.12},
            "is 3.0 % used at 64, and 12 % at 1,024, the largest size predicted; it is faster than this CPU at every size, 12 times at 1,024 (12 to 12)",
        ),
        (
            {"b64": 0.9, "b1024": 0.9},
            {"b64": 0.6, "b1024": 0.7},
            "is 60 % used at 64, and at least half full at every size; it is faster than this CPU at no size",
        ),
    ],
)
def test_one_sentence_says_how_much_of_the_fastest_card_is_used_and_where_it_passes(cpu, h100, said):
    assert use_sentence([line("cpu", **cpu), line("t4", b64=0.001), line("h100", **h100)]) == f"An H100 {said}."


def test_of_another_device_that_is_here_the_largest_size_was_measured():
    sentence = use_sentence([line("cpu", b64=0.01), replace(line("cuda", b64=0.12), here=True)])
    assert sentence.startswith("This CUDA is 12 % used at 64, and 12 % at 64, the largest size measured; ")


def test_a_card_that_may_be_slower_at_some_size_is_only_probably_faster():
    times = {8: Interval(10.0, 50.0, 250.0), 64: Interval(4.0, 5.0, 6.0)}
    sentence = use_sentence([line("cpu", b8=0.01, b64=0.01), replace(line("h100", b8=0.02, b64=0.2), times=times)])
    assert "; it is probably faster than this CPU at every size, surely from about " in sentence


def test_a_card_that_may_be_faster_at_some_size_is_only_probably_faster_at_none():
    times = {8: exactly(200.0), 64: Interval(60.0, 120.0, 240.0)}
    sentence = use_sentence([line("cpu", b8=0.01, b64=0.01), replace(line("h100", b8=0.02, b64=0.2), times=times)])
    assert sentence.endswith("; it is probably faster than this CPU at no size.")


def test_a_card_that_may_be_less_than_half_full_is_only_probably_at_least_half_full():
    h100 = replace(line("h100", b8=0.6), shares={8: Interval(0.4, 0.6, 0.8)})
    assert " and probably at least half full at every size; " in use_sentence([line("cpu", b8=0.01), h100])


def test_a_training_with_operations_whose_flops_are_not_known_has_no_mfu(tmp_path):
    lines = use_lines(replace(training(tmp_path), has_all_flops=False), Question(CARDS))
    assert [(use.label, use.shares) for use in lines] == [("cpu", {}), ("t4", {}), ("h100", {})]
    assert len(looks(drawn(draw_use, lines)[0])) == 3  # drawn by their rates


def test_the_sentence_takes_the_batch_size_that_was_asked_for_and_is_empty_without_a_card(wide):
    assert " used at 8, " in use_sentence(wide)
    assert " used at 512, " in use_sentence(wide, 512)
    assert use_sentence(wide[:1]) == ""


def drawn(draw, lines):
    """The upper and the lower axes of a picture."""
    return draw(lines).axes


def looks(axes):
    """By label, whether a device's markers are filled and its line solid."""
    lines = {artist.get_label(): artist for artist in axes.lines if "," in str(artist.get_label())}
    return {
        label: (to_hex(artist.get_markerfacecolor()) != "#ffffff", artist.get_linestyle() == "-")
        for label, artist in lines.items()
    }


def test_measured_and_predicted_are_never_drawn_alike(wide):
    wanted = products([16, 4096])
    timings = {mm: Timed([1e-6 + mm.flops / 1e11] * 6, [], [1e-3] * 5 if mm.creates else [], 1000) for mm in wanted}
    cpu = measured_line(CPU, timings)
    lines = [cpu, *(predicted_line(wanted, card, cpu) for card in CARDS)]
    expected = {"cpu, measured": (True, True), "t4, predicted": (False, False), "h100, predicted": (False, False)}
    for axes in (*drawn(draw_use, wide), drawn(draw_products, lines)[0]):
        assert looks(axes) == expected
        assert len(axes.collections) >= 3  # an interval for each value, a band for each card


def test_the_cpu_and_the_cards_that_are_predicted_by_default_have_a_colour_each():
    above, _ = drawn(draw_use, [line("cpu", b64=0.01, b1024=0.5), *(line(card, b64=0.1, b1024=1.0) for card in USUAL)])
    series = [artist for artist in above.lines if "," in str(artist.get_label())]
    assert len({artist.get_color() for artist in series}) == len(series) == 8


def test_the_pictures_name_the_limits_and_the_end_of_memory_and_mark_the_crossing():
    cpu, t4 = line("cpu", b64=0.01, b1024=0.5), line("t4", b64=0.005, b1024=1.0)
    above, _ = drawn(draw_use, [cpu, replace(t4, memory_ends=True)])
    labels = above.get_legend_handles_labels()[1]
    assert {"memory ends", "first to pass the cpu"} <= {*labels}
    assert "first to pass the cpu" not in drawn(draw_use, [cpu])[0].get_legend_handles_labels()[1]
    wanted = products([16, 4096])
    measured = measured_line(CPU, {mm: Timed([1e-6 + mm.flops / 1e11] * 6, [], [], 1000) for mm in wanted})
    above, below = drawn(draw_products, [measured, predicted_line(wanted, CARDS[0], measured)])
    assert {"limit: launches", "limit: memory", "limit: arithmetic"} <= {*above.get_legend_handles_labels()[1]}
    assert [label.get_text() for label in below.get_yticklabels()] == ["cpu", "t4"]


def test_a_device_without_mfu_is_drawn_by_its_rate_alone():
    cpu = replace(line("cpu", b64=0.01, b1024=0.5), shares={})
    above, below = drawn(draw_use, [cpu, line("t4", b64=0.02, b1024=1.0)])
    assert (len(looks(above)), {*looks(below)} >= {"t4, predicted"}) == (2, True)


def test_the_title_of_a_picture_names_no_home_folder():
    figure = draw_use([line("cpu", b64=0.01, b1024=0.5)], subject="/home/alice/net · mnist")
    assert figure.get_suptitle() == "~/net · mnist"
