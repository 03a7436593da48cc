"""The answer for one training: its table, its sentences, which device is first or ties, and what is assumed."""

import json
from dataclasses import replace
from functools import partial

import pytest

from batchscope.choice.device_choice import DeviceChoice
from batchscope.choice.interval import Interval, digits, exactly, time_ratio
from batchscope.choice.measured import read_training
from batchscope.choice.rows import Question, check_prices
from batchscope.choice.step import step_on
from batchscope.errors import UserError
from batchscope.hardware.datasheet import find_card
from tests.choice.trainings import mlp, write_training
from tests.support.synthetic_runs import change_record

CARDS = [find_card(name) for name in ("t4", "l4", "h100")]
FAR_APART = [find_card("t4"), find_card("h100")]
HEAVY = {"rows": partial(mlp, width=4096), "parts": (0, 0, 0.3, 0.6, 0.1, 0)}  # no waiting for data
ALIKE = [find_card(name) for name in ("h100", "h200")]  # they differ in nothing that a tiny step needs


def training(folder, **options):
    measured, _ = read_training([write_training(folder, **options)])
    return measured


@pytest.fixture(scope="module")
def light(tmp_path_factory):
    """A training of seconds on the CPU."""
    return training(tmp_path_factory.mktemp("light"))


@pytest.fixture(scope="module")
def heavy(tmp_path_factory):
    """A training of an hour on the CPU, and of seconds on a GPU."""
    return training(tmp_path_factory.mktemp("heavy"), **HEAVY)


def answer(training, cards=CARDS, **options):
    return DeviceChoice(training, Question(cards, **options))


def answer_of_times(training, monkeypatch, prices=None, **times):
    """The answer where the devices of these labels take these times."""
    choice, prices = answer(training, [*CARDS, find_card("h200")], batch_size=8), prices or {}
    rows = [
        replace(row(choice, label), total=time, training=time, cost=time * prices[label] if label in prices else None)
        for label, time in times.items()
    ]
    monkeypatch.setattr(
        "batchscope.choice.device_choice.compare_devices", lambda training, question, epochs: (rows, None, [])
    )
    return answer(training)


def row(choice, label):
    return next(row for row in choice.rows if row.label == label)


def labels(rows):
    return [row.label for row in rows]


def ends(low, high):
    return f"({digits(low)} to {digits(high)})"


def test_the_fastest_is_first_and_is_taken_the_cheapest_is_the_last_sentence(heavy):
    choice = answer(heavy, FAR_APART, epochs=20, prices={"t4": 0.5, "h100": 50.0})
    h100, t4, here = (row(choice, label) for label in ("h100", "t4", "cpu"))
    assert labels(choice.rows) == ["h100", "t4", "cpu"]
    assert (choice.recommended, choice.may_be_first, choice.tied) == (h100, [h100], [h100])
    first, second, third = choice.sentences()
    assert first.startswith(f"H100 first: 20 epochs take {h100.total} (predicted, cost {h100.cost.span()}), ")
    start = f"if H100 takes longer than {here.total - h100.training} to start"
    assert second == f"The CPU here takes {here.total} (measured), and is done first {start}."
    assert third == f"T4 is the cheapest of those with a price: {t4}."
    table = choice.table()
    assert list(table["cost"]) == [h100.cost.span(), t4.cost.span(), ""]
    assert dict(table["known"]) == dict.fromkeys(["h100", "t4"], "predicted") | {"cpu (here)": "measured"}
    assert "and start-up" not in table


def test_what_is_assumed_and_known_is_said_and_the_text_fits_the_terminal(heavy):
    lines = answer(heavy, start_up_s=60).text(200).splitlines()
    assert lines[:3] == [
        "cnn · mnist: 2 epochs of 55,000 samples at batch size 512, training steps alone",
        "measured on AMD EPYC, 2 threads; intervals of 90 %, of ratios 95 %",
        "assumed elsewhere: 60 s to start, a host as fast as this one, precision 32-true",
    ]
    for width in (60, 80, 140):
        text = answer(heavy, epochs=20, start_up_s=60, prices={"t4": 0.5}).text(width)
        assert max(map(len, text.splitlines())) <= width


def test_the_first_one_is_compared_with_the_next_and_with_the_other_place(heavy):
    choice = answer(heavy, FAR_APART)
    t4, here = (time_ratio(row(choice, label).total, choice.recommended.total) for label in ("t4", "cpu"))
    ending = f", {digits(t4.value)} times as fast as T4 {ends(t4.low, t4.high)}"
    ending += f", {digits(here.value)} times as fast as the CPU here {ends(here.low, here.high)}."
    assert choice.sentences()[0].endswith(ending)


def test_beside_other_programs_it_answers_and_says_how_much_they_took(tmp_path):
    alone, beside = (answer(training(tmp_path / str(share), others=share, windows=12, **HEAVY)) for share in (0.0, 0.6))
    assert [note for note in (*alone.notes(), *beside.notes()) if "other programs" in note] == [
        (
            "AMD EPYC, 2 threads was measured while other programs took 60 % of the processor: its intervals allow for "
            "what they took in the windows that are used"
        )
    ]
    assert beside.as_json()["recommended"] == "h100"
    quiet, busy = (row(choice, "cpu").total for choice in (alone, beside))
    assert busy.middle == pytest.approx(quiet.middle)  # no guess at a quiet machine
    assert (busy.low, busy.high) == pytest.approx((0.45 * quiet.low, quiet.high / 0.45))


def test_no_start_up_is_assumed_so_that_only_the_user_lets_one_decide(light):
    choice = answer(light, epochs=1)
    here, recommended = row(choice, "cpu"), choice.recommended
    assert recommended is not here and row(choice, "h100").total == row(choice, "h100").training
    assert "assumed elsewhere: 0 s to start" in choice.text(140)
    slow = answer(light, epochs=1, start_up_s=here.total.middle - recommended.training.middle + 60)
    assert (slow.recommended.label, slow.sentences()[0].count("times as fast as")) == ("cpu", 1)
    assert slow.sentences()[1].startswith("H100, the best elsewhere, takes ")


@pytest.mark.parametrize(
    ("elsewhere", "start"), [(Interval(30, 92, 110), "0–72 s to start"), (exactly(80), "22 s to start")]
)
def test_how_long_a_start_may_take_is_an_interval(light, monkeypatch, elsewhere, start):
    choice = answer_of_times(light, monkeypatch, t4=elsewhere, cpu=exactly(102))
    assert choice.sentences()[1].endswith(f", and is done first if T4 takes longer than {start}.")


def test_all_steps_of_all_epochs_are_the_training_and_its_start_up_is_paid_too(heavy):
    t4 = row(answer(heavy, epochs=3, batch_size=64, start_up_s=100, prices={"t4": 3.6}), "t4")
    steps = 3 * 55_000 / 64  # the last batch counts by its samples
    assert t4.training.middle == pytest.approx(steps * t4.step.seconds.middle)
    assert t4.total.middle == pytest.approx(t4.training.middle + 100)
    assert t4.cost.low == pytest.approx(0.001 * t4.total.low)


@pytest.mark.parametrize(
    ("prices", "first"), [({}, "h200"), ({"h100": 2.0, "h200": 3.0}, "h100"), ({"h200": 3.0}, "h200")]
)
def test_of_devices_that_tie_the_cheapest_is_taken_then_the_fastest(light, prices, first):
    choice = answer(light, ALIKE, batch_size=8, prices=prices)
    second = {"h100": "h200", "h200": "h100"}[first]
    assert labels(choice.tied) == choice.as_json()["tied"] == [first, second]
    assert choice.as_json()["recommended"] == first
    sentence = choice.sentences()[0]
    assert sentence.startswith(
        f"Tie of {first.upper()}, {second.upper()}: 2 epochs take {choice.recommended} on {first.upper()}"
    )


@pytest.mark.parametrize(
    ("times", "tied"),
    [
        ({"h100": exactly(100), "l4": exactly(104.9), "t4": exactly(105.1)}, ["H100", "L4"]),
        ({"h100": exactly(100), "cpu": exactly(104)}, ["the CPU here", "H100"]),
        (
            {"h100": Interval(99, 100, 101), "h200": Interval(100, 101, 102), "cpu": exactly(104.5)},
            ["the CPU here", "H100", "H200"],
        ),
    ],
    ids=["at most 5 % longer", "one that is here is named first", "all that tie are named"],
)
def test_devices_tie_within_5_percent_although_one_is_shown_to_be_faster(light, monkeypatch, times, tied):
    choice = answer_of_times(light, monkeypatch, **times)
    assert [row.name for row in choice.tied] == tied
    assert choice.sentences()[0].startswith(f"Tie of {', '.join(tied)}: 2 epochs take ")


def test_one_that_may_be_first_as_well_is_named_beside_a_tie(light, monkeypatch):
    times = {"h100": exactly(100), "h200": exactly(101), "t4": Interval(90, 120, 150)}
    choice = answer_of_times(light, monkeypatch, **times)
    sentence = "Tie of H100, H200: 2 epochs take 1.7 min (predicted) on H100; may be first as well: T4."
    assert choice.sentences()[0] == sentence


@pytest.mark.parametrize(
    ("second", "may_be"),
    [(Interval(13, 14, 15), []), (Interval(10, 14, 19), ["h200"]), (Interval(1, 14, 15), ["h200"])],
    ids=["apart", "overlapping", "whose low end alone is far"],
)
def test_another_may_be_first_where_the_ratio_of_both_intervals_does_not_exclude_it(light, monkeypatch, second, may_be):
    choice = answer_of_times(light, monkeypatch, h100=Interval(9, 10, 11), h200=second)
    assert (choice.recommended.label, choice.as_json()["may_be_first"]) == ("h100", ["h100", *may_be])
    sentence = choice.sentences()[0]
    assert sentence.startswith("Best guess H100: " if may_be else "H100 first: ")
    assert sentence.endswith("; may be first as well: H200.") == bool(may_be)


def test_another_may_be_as_cheap_where_the_ratio_of_both_costs_does_not_exclude_it(light, monkeypatch):
    times = {"h100": Interval(9, 10, 11), "l4": Interval(10, 12, 14), "t4": Interval(90, 100, 110)}
    choice = answer_of_times(light, monkeypatch, prices=dict.fromkeys(times, 36.0), **times)
    sentence = (
        "H100 is probably the cheapest of those with a price: 9.0–11 s (predicted, cost 320–400); may be as cheap: L4."
    )
    assert choice.sentences()[-1] == sentence
    choice = answer_of_times(light, monkeypatch, prices={"h100": 0.0, "t4": 36.0}, **times)
    assert choice.sentences()[-1].startswith("H100 is the cheapest of those with a price: ")


def test_one_epoch_is_assumed_in_words_where_the_runs_name_no_common_number(tmp_path):
    for number, epochs in enumerate((3, 9)):
        write_training(tmp_path / str(number), options={"trainer.max_epochs": epochs})
    training, _ = read_training([tmp_path])
    note = "The runs name no common number of epochs, and one is assumed: write --epochs."
    assert [(choice.epochs, note in choice.notes()) for choice in (answer(training), answer(training, epochs=3))] == [
        (1, True),
        (3, False),
    ]


def test_a_price_is_that_of_a_card_or_of_the_kind_of_a_device_that_is_here(tmp_path):
    here = training(tmp_path, device="cuda", name="NVIDIA L4")
    query = Question(CARDS, prices={"cuda": 1.0, "t4": 2.0})
    check_prices([source.device for source in here.sources], query)
    assert [bool(row(DeviceChoice(here, query), label).cost) for label in ("l4", "t4", "h100")] == [True, True, False]


@pytest.mark.parametrize("prices", [{"mps": 1.0}, {"cuda": 1.0}, {"a100": 1.0}, {"t4": 1.0, "a100": 1.0}])
def test_a_price_that_no_device_has_is_refused(light, prices):
    refused = "mps" if "mps" in prices else "cuda" if "cuda" in prices else "a100"
    with pytest.raises(
        UserError, match=f"--price: got {refused}=1, the price of no device .*; takes those of cpu, t4, l4"
    ):
        check_prices([source.device for source in light.sources], Question(CARDS, prices=prices))


def test_several_cpus_have_one_price(tmp_path):
    for threads in (1, 2):
        write_training(tmp_path / str(threads), threads=threads)
    training, _ = read_training([tmp_path])
    choice = DeviceChoice(training, Question(CARDS, prices={"cpu": 1.0}))
    assert [bool(row(choice, label).cost) for label in ("cpu", "cpu-2", "t4")] == [True, True, False]
    with pytest.raises(UserError, match="takes those of cpu, t4, l4, h100$"):
        check_prices([source.device for source in training.sources], Question(CARDS, prices={"mps": 1.0}))


def test_all_devices_are_compared_at_the_largest_batch_that_all_can_take(tmp_path, heavy):
    choice = answer(heavy)
    assert {row.batch_size for row in choice.rows} == {choice.as_json()["batch_size"]} == {512}
    assert {row.batch_size for row in answer(heavy, batch_size=64).rows} == {64}
    greedy = answer(training(tmp_path, memory=lambda size: {"parameters": 1e6, "saved": 0.1e9 * size}))
    assert {row.label: row.batch_size for row in greedy.rows} == dict.fromkeys(["h100", "l4", "t4", "cpu"], 64)


def test_the_best_larger_batch_is_a_line_of_its_own_unless_a_size_is_asked_for(light):
    choice = answer(light, prices={"h100": 2.0})
    larger = choice.larger_batch
    assert larger.batch_size > 512 and larger.total.middle <= 0.9 * choice.rows[0].total.middle
    at = f"{larger.name} at batch size {larger.batch_size:,}"
    assert choice.notes() == [f"a larger batch is faster, and may need more epochs: {at} takes {larger}"]
    assert choice.as_json()["larger_batch"]["batch_size"] == larger.batch_size
    assert answer(light, batch_size=512).as_json()["larger_batch"] is None


def test_a_card_is_limited_by_capacity_where_a_faster_larger_batch_does_not_fit(tmp_path):
    greedy = answer(training(tmp_path, memory=lambda size: {"parameters": 1e6, "saved": 0.1e9 * size}))
    limits = {row.label: row.step.limit for row in greedy.rows}
    assert limits == {"t4": "capacity", "l4": "capacity", "h100": "launches", "cpu": ""}
    assert dict(greedy.table()["limit"])["t4"] == "capacity"


def test_an_epoch_of_some_of_its_batches_is_said_and_timed_as_that(tmp_path):
    part, whole = (
        training(tmp_path / str(limit), options={"trainer.limit_train_batches": limit}) for limit in (100, 1.0)
    )
    few, every = answer(part, batch_size=64), answer(whole, batch_size=64)
    assert few.text(200).splitlines()[0].startswith("cnn · mnist: 2 epochs of 100 batches of the 55,000 samples at")
    assert every.text(200).splitlines()[0].startswith("cnn · mnist: 2 epochs of 55,000 samples at")
    assert few.as_json()["limit_train_batches"] == 100
    assert row(few, "cpu").training.middle == pytest.approx(row(every, "cpu").training.middle * 100 * 64 / 55_000)


def test_a_short_last_batch_counts_by_its_samples(tmp_path):
    measured = training(tmp_path, options={"trainer.limit_train_batches": 4})
    assert replace(measured, train_samples=200).steps(64) == 200 / 64  # of 4 batches the last one has 8
    assert replace(measured, train_samples=300).steps(64) == 4


@pytest.mark.parametrize(("overfit", "batches"), [(3, 3), (0.1, 86), (0.0, 100)])
def test_an_epoch_of_a_few_batches_to_overfit_has_these(tmp_path, overfit, batches):
    options = {"trainer.overfit_batches": overfit, "trainer.limit_train_batches": 100}
    assert training(tmp_path, options=options).batches(64) == batches


@pytest.mark.parametrize("limits", [(1, 1.0, 1), ([1], [1], [1]), ("all", None, {})])
def test_runs_without_a_common_limit_are_of_whole_epochs(tmp_path, limits):
    for path, limit in zip(sorted(write_training(tmp_path).iterdir()), limits, strict=True):
        change_record(path, config={"trainer": {"limit_train_batches": limit}})
    training, _ = read_training([tmp_path])
    assert training.batches(64) == 860
    doubt = "The runs differ in trainer.limit_train_batches, and whole epochs are assumed."
    assert (doubt in training.doubts) is (limits[0] == 1)


def test_whether_it_fits_stays_unknown_at_larger_sizes_where_no_run_has_counted_its_memory(tmp_path):
    for path in write_training(tmp_path).iterdir():
        change_record(path, memory=None)
    training, _ = read_training([tmp_path])
    choice = answer(training)
    assert [row.step.memory for row in (*choice.rows, choice.larger_batch)] == [None] * 5
    assert "memory" not in choice.table() and "whether a batch fits is not known" in choice.notes()[-1]


def test_a_device_that_cannot_train_it_is_left_out_with_the_reason(tmp_path):
    huge = training(tmp_path, memory=lambda size: {"parameters": 30 * 2.0**30, "saved": 1e6})
    assert answer(huge).left_out == [
        "t4 may need 48.8 GiB at batch size 512, and has 15 GiB",
        "l4 may need 48.8 GiB at batch size 512, and has 22.5 GiB",
    ]
    assert answer(huge, precision="bf16-mixed").left_out[0] == "t4 has no hardware for bf16"


def test_16_mixed_is_another_training_on_a_cpu_than_on_a_gpu(tmp_path):
    write_training(tmp_path / "cpu", precision="bf16-mixed", options={"trainer.precision": "16-mixed"})
    gpu = {"device": "cuda", "name": "NVIDIA A100", "precision": "16-mixed"}
    write_training(tmp_path / "gpu", **gpu, options={"trainer.precision": "16-mixed"})
    with pytest.raises(UserError, match=r"several trainings, which differ in trainer.precision; name the runs of one"):
        read_training([tmp_path])


def test_a_device_that_was_not_measured_at_the_common_batch_is_left_out(tmp_path):
    write_training(tmp_path / "cpu")
    write_training(tmp_path / "gpu", sizes=(1024, 2048), device="cuda", name="NVIDIA L4")
    training, _ = read_training([tmp_path])
    choice = answer(training, [find_card("l4")])
    assert (labels(choice.rows), choice.left_out) == (["l4"], ["cpu was not measured at batch size 2,048"])


def test_what_was_not_measured_or_cannot_be_predicted_is_refused(tmp_path, light):
    with pytest.raises(UserError, match=r"--batch-size: got 9; cnn · mnist was measured at 8, 64, 512"):
        answer(light, batch_size=9)
    mixed = training(tmp_path, precision="bf16-mixed")
    assert row(answer(mixed, precision="bf16-mixed"), "h100") == row(answer(mixed), "h100")
    with pytest.raises(UserError, match="--precision: cnn · mnist was measured in bf16-mixed"):
        answer(mixed, precision="tf32")


def test_a_device_that_is_here_has_one_row_and_the_narrower_prediction_is_taken(tmp_path):
    write_training(tmp_path / "cpu")
    write_training(tmp_path / "gpu", device="cuda", name="NVIDIA L4")
    training, _ = read_training([tmp_path])
    choice = answer(training, batch_size=8)
    assert sorted(labels(choice.rows)) == ["cpu", "h100", "l4", "t4"]
    steps = [step_on(source, CARDS[0], 8).seconds for source in training.sources]
    assert row(choice, "t4").step.seconds == min(steps, key=lambda seconds: seconds.high / seconds.low)


def test_json_has_every_number(heavy):
    choice = answer(heavy, epochs=20, prices={"t4": 0.5})
    parsed = json.loads(json.dumps(choice.as_json(), allow_nan=False))
    devices, t4 = {entry["label"]: entry for entry in parsed["devices"]}, row(choice, "t4")
    assert [devices["t4"][name]["high"] for name in ("training", "cost")] == [t4.training.high, t4.cost.high]
    assert t4.cost.high == pytest.approx(t4.total.high * 0.5 / 3600)
    assert {(entry["known"], entry["here"]) for entry in devices.values()} == {("predicted", False), ("measured", True)}
    assert (parsed["recommended"], parsed["epochs"], parsed["assumed"]["start_up_s"]) == ("h100", 20, 0)
