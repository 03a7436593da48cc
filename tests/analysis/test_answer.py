"""Which batch size is recommended, by rates, quality or the time to a target, and what is claimed."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.special import ndtri

from batchscope.analysis import analyse, plots
from batchscope.analysis.answer import decide
from batchscope.analysis.noise import Ratio
from batchscope.analysis.quality import find_quality
from batchscope.analysis.read import read_sweep
from batchscope.analysis.selection import Selection
from batchscope.analysis.table import quality_metrics
from batchscope.records.correct import write_correct
from tests.support.synthetic_runs import change_record, write_measured, write_rates, write_run

TIMED, SEEDS = "experiment=throughput data.batch_size=", "seed=0,1,2 data.batch_size="
UNTESTED = "No metric of a validation or a test is known: the speed alone decides."
UNTRAINED = "Accuracy was not measured: train these sizes before you choose."


def decide_folder(folder):
    """The answer for the only group in a folder."""
    sweep = read_sweep([folder])
    (group,) = sweep.groups
    return decide(group, quality_metrics(sweep))


ACCURACY = {"evaluated": {"test": 10_000}, "epochs": 1, "noise": 0.0002, "learning_rate": 0.004}
ACCURACY["metrics"] = {size: {"test/acc": value} for size, value in ((8, 0.985), (64, 0.984), (2048, 0.95))}.get
DOUBT = ACCURACY | {"evaluated": {"test": 500}, "epochs": 2, "learning_rate": {8: 0.004, 64: 0.01}.get}
LOSS = {"metrics": {8: {"test/loss": 0.1}, 64: {"test/loss": 0.12}}.get}
ALIKE = {"metrics": {8: {"test/loss": 0.1}, 64: {"test/loss": 0.101}}.get}
UNKNOWN = "how far that differs by chance is not known (one seed)."
FEW_WINDOWS, NO_WINDOWS = {"more": {512: 51200}, "windows": 1}, {"more": {8: 2667}, "windows": 0}
OUT_OF_MEMORY = {"more": {1024: 1}, "status": "out_of_memory", "throughput": {"samples_per_sec": None}}
MAE = {8: {"test/mae": 3.0}, 64: {"test/mae": 2.0}}
SEPARATE = {"noise": 0.8, "windows": 6, "passes": False}
RISES = "512 still rises"
LOAD = "beside other programs that took 45 % of the processor"
# The rates, and fields of the runs (`more`: the rates of the runs that have these fields); the chosen size and the rule,
# the options of the runs that would tell more, and how the lines of the answer begin, in order.
RULES = {
    "the fastest is what all others are shown to be slower than": (
        {8: 1000, 64: 3000, 512: 4000}, {}, 512, "shown", "",
        ["512: faster than all others in this sweep.", f"64 gives 73 to 78 % of the rate of 512; {RISES}: 1,024 may be faster.", UNTESTED],
    ),
    "the smallest that reaches 90 % is enough": (
        {8: 1000, 64: 3800, 512: 4000}, {}, 64, "shown", "",
        ["64: 95 % of the best measured rate (512), at least 92 % in this sweep.", "8 gives 24 to 26 % of the rate of 512."],
    ),
    "a size whose share is 91 % is chosen although it may be 85 %": (
        {8: 1000, 64: 3650, 512: 4000}, {"noise": 0.05, "seed": 2}, 64, "shown", "",
        ["64: 91 % of the best measured rate (512), at least 85 % in this sweep."],
    ),
    "of equal sizes the smallest is chosen": (
        {64: 4000, 256: 2000, 512: 4000}, {"noise": 0.03, "seed": 4}, 64, "shown", "",
        ["64: 100 % of the best measured rate (512), at least 95 % in this sweep."],
    ),
    "separate runs have a best guess, and a timed sweep knows more": (
        {64: 3900, 512: 4000}, {**SEPARATE, "seed": 2}, 512, "best_guess", f"{TIMED}64,512",
        ["Best guess 512: the best measured rate, at least 73 % of any other in this sweep; no size is sure of 80 %."],
    ),
    "of separate runs that were timed already, seeds would tell more": (
        {64: 3900, 512: 4000}, {**SEPARATE, "seed": 2, "options": {"callbacks.until_known": {"seconds": 10}}}, 512, "best_guess",
        "experiment=throughput seed=0,1,2 data.batch_size=64,512", ["Best guess 512"],
    ),
    "unless an option kept them apart": (
        {64: 3900, 512: 4000}, {**SEPARATE, "seed": 2, "options": {"callbacks.until_known": {"seconds": 10}, "timing": False}},
        512, "best_guess", "experiment=throughput timing=auto data.batch_size=64,512", ["Best guess 512"],
    ),
    "separate runs that differ by too much are undecided": (
        {64: 3900, 512: 4000}, {**SEPARATE, "seed": 1}, None, "undecided", f"{TIMED}64,512",
        ["Undecided: 512 was the fastest in this sweep, but of no size is it known that it reaches 60 % of the best rate."],
    ),
    "of trained runs only those that train as well; a faster one has its price": (
        {8: 5e3, 64: 3e4, 2048: 9e4}, ACCURACY, 64, "shown", "",
        [
            "64: the fastest of the sizes within 0.50 points of the best test/acc in this sweep.",
            "8 gives 16 to 17 % of the rate of 64.",
            "2,048 is 3.00 times as fast as 64 and loses 3.5 points against 8 at the same learning rate.",
            "Best test/acc: 98.5 % at 8; 64 is within 0.50 points of it (one seed).",
        ],
    ),
    "a price is at the same learning rate where its two sizes had one": (
        {8: 5e3, 64: 3e4, 2048: 9e4}, ACCURACY | {"learning_rate": {8: 0.004, 64: 0.01, 2048: 0.004}.get}, 64, "shown", "",
        ["64: ", "2,048 is 3.00 times as fast as 64 and loses 3.5 points against 8 at the same learning rate."],
    ),
    "in doubt a size is not taken, and seeds would tell": (
        {8: 5e3, 64: 3e4}, DOUBT, 8, "best_guess", f"{SEEDS}8,64",
        [
            "Best guess 8: the only size with the best test/acc.",
            "64 is 6.00 times as fast as 8 and may lose up to 2.0 points against 8.",
            "Best test/acc: 98.5 % at 8; 64 may be within 0.50 points of it (one seed).",
        ],
    ),
    "a size in doubt that is slower has no price": (
        {8: 3e4, 64: 5e3}, DOUBT, 8, "best_guess", f"{SEEDS}8,64",
        ["Best guess 8: the only size with the best test/acc.", "Best test/acc: 98.5 % at 8"],
    ),
    "the noise of one loss is not known": (
        {8: 1000, 64: 4000}, LOSS, 8, "best_guess", f"{SEEDS}8,64",
        [
            "Best guess 8: the only size with the best test/loss.",
            "64 is 4.00 times as fast as 8 and loses 0.0200 of test/loss against 8 by estimate.",
            f"Best test/loss: 0.100 at 8; {UNKNOWN}",
        ],
    ),
    "by estimate two losses are as good": (
        {8: 1000, 64: 4000}, ALIKE, 64, "best_guess", f"{SEEDS}8,64",
        [
            "Best guess 64: faster than all others in this sweep.",
            f"Best test/loss: 0.100 at 8; 64 is within 0.00200 of it; {UNKNOWN}",
        ],
    ),
    "sizes that met the same load are compared beside it": (
        {8: 1000, 64: 4000}, {"others": 0.45}, 64, "shown", "",
        [f"64: faster than all others in this sweep {LOAD}.", "8 gives", UNTESTED, "On a quiet machine the rates and MFU may be higher."],
    ),
    "records without windows have none": (
        {8: 800, 64: 6400}, {"windows": 0}, None, "undecided", f"{TIMED}8,64", ["No rate is known well enough"],
    ),
    "a size with too few windows is not compared": (
        {8: 1000, 64: 2000}, FEW_WINDOWS, 64, "shown", "",
        ["64: the fastest of the sizes whose rate is known in this sweep.", "Not known well enough to be compared: 512."],
    ),
    "nor is one without windows": (
        {64: 2000, 512: 2560}, NO_WINDOWS, 512, "shown", "", ["512: the fastest of", "Not known well enough to be compared: 8."],
    ),
    "a larger size than the training set is not": (
        {64: 2000, 512: 4000}, {"train_samples": 600}, 512, "shown", "", ["512", f"64 gives 49 to 51 % of the rate of 512; {RISES}."],
    ),
    "a larger size was killed": (
        {64: 2000, 512: 4000}, {"more": {1024: 1}, "status": "killed", "throughput": {"samples_per_sec": None}}, 512, "shown", "",
        ["512", f"64 gives 49 to 51 % of the rate of 512; {RISES}."],
    ),
    "of separate runs it is said which ran beside other programs": (
        {64: 2000, 512: 4000}, {"others": 0.45, "passes": False}, 512, "shown", "",
        ["512: ", UNTESTED, "Of 64 and 512 the rates are those beside other programs that took 45 % of the processor at most."],
    ),
    "metrics of runs that ended when their speed was known are not final": (
        {8: 1000, 64: 4000}, {**LOSS, "throughput": {"ended": "known to ± 5 %"}}, 64, "shown", "", ["64: faster", "8 gives", UNTRAINED],
    ),
    "a metric without a direction hides no loss": (
        {8: 1000, 64: 4000}, {"metrics": {8: MAE[8] | LOSS["metrics"](8), 64: MAE[64] | LOSS["metrics"](64)}.get}, 8, "best_guess",
        f"{SEEDS}8,64", ["Best guess 8: the only size with the best test/loss."],
    ),
    "a metric that one size alone has decides nothing": (
        {8: 1000, 64: 4000}, {"metrics": {8: MAE[8] | ALIKE["metrics"](8), 64: MAE[64]}.get}, 64, "shown", "",
        ["64: faster", "8 gives", "Of test/loss fewer than two sizes have a value: the speed alone decides."],
    ),
    "nor does one of which no direction is known": (
        {8: 1000, 64: 4000}, {"metrics": {8: MAE[8] | {"val/loss": 0.1}, 64: MAE[64] | {"val/loss": 0.2}}.get}, 64, "shown", "",
        ["64: faster", "8 gives", "Of test/mae it is not known whether more is better: the speed alone decides."],
    ),
    "of the size with the best metric no rate is known": (
        {8: 1000, 64: 4000}, {**LOSS, "windows": 0}, None, "undecided", f"{TIMED}8,64", ["No rate is known well enough", f"Best test/loss: 0.100 at 8; {UNKNOWN}"],
    ),
    "no rate was measured": (
        {8: 1000, 64: 4000}, {**LOSS, "windows": 0, "throughput": {"samples_per_sec": None}}, None, "undecided", f"{TIMED}8,64",
        ["No rate was measured.", f"Best test/loss: 0.100 at 8; {UNKNOWN}"],
    ),
    "a rise that is not shown is not said": (
        {64: 3900, 512: 4150}, {"noise": 0.1, "seed": 3}, 64, "shown", "", ["64: ", UNTESTED],
    ),
    "a larger size ran out of memory": (
        {64: 2000, 512: 4000}, OUT_OF_MEMORY, 512, "shown", "", ["512", f"64 gives 49 to 51 % of the rate of 512; {RISES}, and 1,024 ran out of memory."],
    ),
    "a smaller size alone ran out of memory": (
        {64: 2000, 512: 4000}, {**OUT_OF_MEMORY, "more": {32: 1}}, 512, "shown", "", ["512", f"64 gives 49 to 51 % of the rate of 512; {RISES}: 1,024 may be faster."],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", RULES)
def test_the_rules(case, tmp_path):
    rates, fields, size, rule, repeat, lines = RULES[case]
    more = fields.get("more", {})
    write_rates(tmp_path, rates, **({} if more else fields))
    write_rates(tmp_path, more, first=len(rates), **{key: value for key, value in fields.items() if key != "more"})
    answer = decide_folder(tmp_path)
    assert (answer.size, answer.rule, answer.repeat) == (size, rule, repeat)
    remaining = iter(answer.lines)
    assert answer.lines[0].startswith(lines[0])
    assert all(any(line.startswith(expected) for line in remaining) for expected in lines), answer.lines
    kinds = [claim["kind"] for claim in answer.claims]
    assert kinds.count("share") == (size is not None)
    assert ("interval" in kinds) == any(" gives " in line for line in answer.lines)
    assert ("worse" in kinds) == any("loses" in line and "estimate" not in line for line in answer.lines)


def test_a_user_says_what_share_is_enough(tmp_path):
    write_rates(tmp_path, {8: 1000, 64: 3800, 512: 4000}, options={"enough": 0.98})
    (group,) = read_sweep([tmp_path]).groups
    assert [decide(group, (), enough).size for enough in (0.9, 0.98, 0.2)] == [64, 512, 8]
    assert analyse([tmp_path]).answers[0].size == 512


def test_a_user_says_by_how_much_a_size_may_train_worse(tmp_path):
    write_rates(tmp_path, {8: 5e3, 64: 3e4, 2048: 9e4}, **ACCURACY, options={"margin": 0.04})
    (group,) = read_sweep([tmp_path]).groups
    assert [decide(group, ["test/acc"], margin=margin).size for margin in (None, 1e-6, 0.04)] == [64, 8, 2048]
    assert analyse([tmp_path]).answers[0].size == 2048


def test_a_size_is_what_a_batch_held_and_one_size_has_no_answer(tmp_path):
    """The training set has 88 samples: batches of 128 and of 256 samples both hold 88, and count as repeats."""
    write_measured(tmp_path, {32: 32.0}, train_samples=88)
    assert decide_folder(tmp_path).lines == []
    write_measured(tmp_path, {32: 32.0, 64: 40.0}, train_samples=88)
    write_measured(tmp_path, {128: 41.0, 256: 41.0}, first=2, throughput={"batch_size": 88}, train_samples=88)
    for number in "23":
        change_record(tmp_path / number, batch_size=88)
    answer = decide_folder(tmp_path)
    assert (answer.size, [*answer.overall.shares]) == (88, [32, 64, 88])
    assert "a batch of 128 is larger than the training set: it held 88" in read_sweep([tmp_path]).notes


@pytest.mark.parametrize(
    ("samples", "words"), [(88, ""), (90, "88 still rises"), (890, "88 still rises: 176 may be faster")]
)
def test_a_batch_of_the_whole_training_set_does_not_still_rise(samples, words, tmp_path):
    write_measured(tmp_path, {32: 32.0, 88: 40.0}, train_samples=samples)
    text = " ".join(decide_folder(tmp_path).lines)
    assert words in text and ("still rises" in text) is bool(words)


def test_of_a_loader_that_makes_smaller_batches_than_asked_for_it_is_not_said_that_its_training_set_is_small(tmp_path):
    write_measured(tmp_path, {64: 10.0}, throughput={"batch_size": 40})
    assert read_sweep([tmp_path]).notes == []


ACC, TEST_LOSS = "test/acc", "test/loss"
MOVED_BY_SEED = {8: [1.0, 0.5, 0.75], 64: [1.01, 0.51, 0.76]}  # the seed moves the loss, by as much at both sizes
# By size the values of all seeds; their metric, the number of samples, the asked margin; the margin, the candidates,
# and the price of the largest size.
QUALITIES = {
    "one seed has twice the variance of its samples": (
        {8: [0.95], 64: [0.945], 512: [0.90]}, ACC, 10_000, None, 0.01, [8, 64], "loses 5.0 points against 8",
    ),
    "a test of few samples leaves a doubt": ({8: [0.95], 64: [0.945]}, ACC, 300, None, 0.01, [8], "may lose up to 4.8 points against 8"),
    "sizes that tie are all the best": ({8: [0.95], 64: [0.95]}, ACC, 300, None, 0.01, [8, 64], ""),
    "a worse size whose loss is not shown": ({8: [0.95], 64: [0.935]}, ACC, 300, None, 0.01, [8], "loses 1.5 points against 8 by estimate"),
    "where the best is hardly ever wrong, a third of its error counts": (
        {8: [0.99], 64: [0.985]}, ACC, 10_000, None, 0.1 / 30, [8], "loses 0.50 points against 8",
    ),
    "the same of an accuracy that was logged in percent": (
        {8: [99.0], 64: [98.5]}, ACC, 10_000, None, 0.1 / 30, [8], "loses 0.50 points against 8",
    ),
    "but two samples at least": ({8: [1.0], 64: [1.0]}, ACC, 1000, None, 0.002, [8, 64], ""),
    "and one point at most": ({8: [1.0], 64: [0.98]}, ACC, 50, None, 0.01, [8], "loses 2.0 points against 8 by estimate"),
    "what moves all sizes of a seed is no noise": (MOVED_BY_SEED, TEST_LOSS, 1000, None, 0.015, [8, 64], ""),
    "unless the sizes have other seeds": (
        {8: MOVED_BY_SEED[8], 64: MOVED_BY_SEED[64][:2]}, TEST_LOSS, 1000, None, 0.015, [8], "may lose up to 0.630 of test/loss against 8",
    ),
    "seeds that differ by nothing have the noise of their tests": (
        {8: [0.95] * 3, 64: [0.945] * 3}, ACC, 300, None, 0.01, [8, 64], "",
    ),
    "seeds that differ by more than their tests": (
        {8: [0.95, 0.99, 0.91], 64: [0.94, 0.90, 0.98]}, ACC, 10_000, None, 0.01, [8], "may lose up to 6.2 points against 8",
    ),
    "a margin of an accuracy is asked for": ({8: [0.95], 64: [0.93]}, ACC, 10_000, 0.02, 0.02, [8, 64], ""),
}  # fmt: skip
NOISE_UNKNOWN = {
    "a margin of a loss is a part of it": ({8: [0.1], 64: [0.14]}, TEST_LOSS, 1000, 0.5, 0.05, [8, 64], ""),
    "the noise of one loss is not known": ({8: [0.1], 64: [0.5]}, TEST_LOSS, 1000, None, 0.002, [8], "loses 0.400 of test/loss against 8 by estimate"),
    "nor that of an unknown number of samples": ({8: [0.5], 64: [0.1]}, ACC, None, None, 0.01, [8], "loses 40 points against 8 by estimate"),
}  # fmt: skip


@pytest.mark.parametrize("case", QUALITIES | NOISE_UNKNOWN)
def test_a_size_is_a_candidate_where_its_loss_is_small_and_surely_not_large(case, tmp_path):
    values, key, samples, asked_margin, margin, candidates, price = (QUALITIES | NOISE_UNKNOWN)[case]
    write_measured(tmp_path, {8: 10.0}, first=90, windows=1, status="interrupted")  # has no number of samples
    for seed in range(max(map(len, values.values()))):
        metrics = {size: {key: by_seed[seed]} for size, by_seed in values.items() if seed < len(by_seed)}
        fields = {"evaluated": {"test": samples}, "metrics": metrics.get, "seed": seed, "windows": 1}
        write_measured(tmp_path, dict.fromkeys(metrics, 10.0), first=10 * seed, **fields)
    quality = find_quality(read_sweep([tmp_path]).groups[0].sizes, key, asked_margin)
    assert (quality.best, quality.seeds, quality.candidates) == (8, len(values[8]), candidates)
    assert quality.margin == pytest.approx(margin)
    assert (quality.sure is None) == (case in NOISE_UNKNOWN)
    last = max(values)
    assert (quality.price(last) if last not in candidates else "") == price


@pytest.mark.parametrize(("means", "is_known"), [(None, True), (["loss", "acc"], True), (["loss"], False)])
def test_an_accuracy_that_is_a_mean_over_classes_has_no_noise_of_samples(means, is_known, tmp_path):
    fields = {"evaluated": {"test": 1000}, "metrics": {8: {ACC: 0.9}, 64: {ACC: 0.8}}.get, "sample_means": means}
    write_measured(tmp_path, {8: 10.0, 64: 10.0}, windows=1, **fields)
    quality = find_quality(read_sweep([tmp_path]).groups[0].sizes, ACC)
    assert (quality.sure is not None) == is_known


def test_a_sweep_ends_where_it_is_three_points_surer_than_the_rule_asks():
    shares = {64: Ratio(0.92, 0.82, 1.03), 512: Ratio(1.0, 1.0, 1.0)}
    selection = Selection(64, "shown", 512, 0.9, shares, {64: 0.82, 512: 1.0})
    assert not selection.is_settled(2)
    assert replace(selection, sure={64: 0.84, 512: 1.0}).is_settled(2)


def write_tested(folder, number, size, right, *, accuracy=None, **fields):
    """A run whose test answers are right where `right` is true."""
    accuracy = float(np.mean(right)) if accuracy is None else accuracy
    fields |= {"metrics": {ACC: accuracy}, "evaluated": {"test": len(right)}}
    write_measured(folder, {size: 10.0}, first=number, windows=1, **fields)
    write_correct(folder / str(number), np.array(right))


OTHER_DATA = {"dataset": {"name": "mnist", "fingerprint": "1"}}
UNKNOWN_DATA = {"dataset": {"name": "mnist", "fingerprint": "unknown"}}


@pytest.mark.parametrize(
    ("one", "two", "candidates"),
    [
        ({}, {}, [8, 64]),
        # Tests whose samples may differ are independent.
        ({}, OTHER_DATA, [8]),
        (UNKNOWN_DATA, UNKNOWN_DATA, [8]),
        # A file with another accuracy than the record's is ignored.
        ({}, {"accuracy": 0.9425}, [8]),
    ],
)
def test_two_tests_of_the_same_samples_differ_by_those_that_one_of_them_answers_right(tmp_path, one, two, candidates):
    right = np.arange(400) < 380
    write_tested(tmp_path, 0, 8, right, **one)
    write_tested(tmp_path, 1, 64, right & (np.arange(400) > 1), **two)
    quality = find_quality(read_sweep([tmp_path]).groups[0].sizes, ACC)
    assert (quality.loss(64), quality.candidates) == (pytest.approx(0.0075 if "accuracy" in two else 0.005), candidates)
    if candidates == [8, 64]:  # McNemar's variance of 2 samples, with half a sample more on either side, times 2
        assert quality.sure[64] == pytest.approx((2 + 1.645 * math.sqrt(2 * (3 - 4 / 400))) / 400, rel=1e-3)


def test_the_sure_losses_of_all_sizes_hold_together(tmp_path):
    right = np.arange(400) < 380
    for number, size in enumerate([8, 16, 32]):
        write_tested(tmp_path, number, size, right)
    write_tested(tmp_path, 3, 64, right & (np.arange(400) > 1))
    quality = find_quality(read_sweep([tmp_path]).groups[0].sizes, ACC)
    reach = ndtri(0.95 ** (1 / 3)) * math.sqrt(2 * (3 - 4 / 400))  # three comparisons, each as with two sizes
    assert quality.sure[64] == pytest.approx((2 + reach) / 400, rel=1e-3)


def test_runs_that_repeat_a_seed_are_one_seed(tmp_path):
    sizes = {8: 0.985, 64: 0.984}
    for first in (0, 2):
        fields = ACCURACY | {"metrics": lambda size: {"test/acc": sizes[size]}}
        write_rates(tmp_path, {8: 5e3, 64: 3e4}, first=first, **fields)
    report = analyse([tmp_path])
    (table,) = report.tables
    assert table["runs"].tolist() == [2, 2] and "test/acc_sd" not in table.dropna(axis="columns")
    single = analyse([write_rates(tmp_path / "once", {8: 5e3, 64: 3e4}, **fields)]).tables[0]
    assert table["test/acc_low"].tolist() == pytest.approx(single["test/acc_low"].tolist())
    assert "± " not in "".join(line for line in report.text.splitlines() if line.startswith("test/acc"))


def test_a_candidate_without_a_known_rate_is_not_called_none(tmp_path):
    values = {8: {"test/acc": 0.985}, 64: {"test/acc": 0.9849}}
    fields = ACCURACY | {"metrics": values.get}
    write_rates(tmp_path, {8: 1000}, **fields)
    write_rates(tmp_path, {64: 2000}, first=1, **fields, windows=1)
    line = decide_folder(tmp_path).lines[0]
    assert line.endswith("8: the only size within 0.50 points of the best test/acc whose rate is known.")


def test_a_size_that_was_tested_and_not_timed_is_compared_by_its_metric_alone(tmp_path):
    write_rates(tmp_path, {64: 1000, 512: 4000}, **ACCURACY | {"metrics": {"test/acc": 0.95}})
    write_run(tmp_path / "2", 8, metrics={"test/acc": 0.985}, evaluated={"test": 10_000})
    report = analyse([tmp_path])
    assert report.answers[0].quality.candidates == [8]
    assert report.answers[0].lines[0].startswith("No rate of the sizes with the best test/acc is known well enough")
    assert ["test/acc", "98.5%", "95.0%", "95.0%"] in [line.split() for line in report.text.splitlines()]
    assert report.answers[0].group.without_rate == {8: "no rate was measured"}


def test_equal_answers_are_not_without_noise_and_a_damaged_file_is_a_note(tmp_path):
    for number, size in enumerate((8, 64)):
        write_tested(tmp_path, number, size, np.arange(400) < 380)
    quality = find_quality(read_sweep([tmp_path]).groups[0].sizes, ACC)
    assert 0 < quality.sure[8] == quality.sure[64] < 0.01
    (tmp_path / "1" / "correct.npy").write_bytes(b"torn")
    report = analyse([tmp_path])
    assert any(note.startswith("1: ") and "correct.npy: cannot be read" in note for note in report.notes)


def test_a_metric_without_direction_or_that_no_run_has_decides_nothing(tmp_path):
    write_measured(tmp_path, {8: 10.0, 64: 10.0}, windows=1, metrics={"test/temperature": 1.0})
    sizes = read_sweep([tmp_path]).groups[0].sizes
    assert find_quality(sizes, "test/temperature") is find_quality(sizes, "test/acc") is None


SCALED = {"rule": "sqrt", "batch_size": 64, "reference_batch_size": 256}
FIRST, TIME_OVER = "reached val/acc 90 % first", "the time limit"


def write_trained(folder, seconds_by_size, ended="", below=None, best=0.8, **fields):
    """A run for each size, trained to val/acc 0.9 in these seconds, or ended after 5 s where they are None.

    `below`: by size, the time of the last validation below the target, as a share of the seconds (0.9 by default).
    """

    def target(size):
        seconds = seconds_by_size[size] or 5.0
        record = {"metric": "val/acc", "value": 0.9, "best": best, "steps": round(100 * seconds), "seconds": seconds}
        return record | {"after_seconds": (below or {}).get(size, 0.9) * seconds, "ended": ended}

    fields |= {"steps": 500, "target": target, "time_to_target_s": seconds_by_size.get}
    write_measured(folder, dict.fromkeys(seconds_by_size, 10.0), **fields)


@pytest.mark.parametrize(
    ("runs", "facts", "size", "lines"),
    [
        (
            [{16: 4.0, 64: 2.0, 256: None}], {}, 64,
            [
                f"64 {FIRST} (one seed), after 2 s of training and",
                "256 did not reach it.",
            ],
        ),
        # Two sizes whose arrivals lie within one validation interval tie.
        ([{16: 4.0, 64: 2.0, 256: 2.1}], {}, None, [f"Best guess: 64 {FIRST} (one seed)"]),
        ([{16: None, 64: None}], {}, None, ["No run reached val/acc 90 %: the best was 80 %. Take an easier"]),
        ([{16: None, 64: None}], {"best": 0.8996}, None, ["No run reached val/acc 90 %: the best was 89.96 %. Take"]),
        # A size whose time limit was over earlier may have been first.
        (
            [{16: 7.0, 64: None}], {"ended": TIME_OVER}, None,
            [f"Best guess: 16 {FIRST} (one seed)", "64 did not reach it."],
        ),
        # The typical time over seeds gives the guess, and all seeds together decide.
        ([{16: 4.0, 64: 2.0}, {16: 2.0, 64: 4.0}], {}, None, [f"Best guess: 16 {FIRST} (2 seeds)"]),
        (
            [{16: 4.0, 64: 2.0}, {16: 4.2, 64: 2.2}, {16: 4.4, 64: 2.4}], {}, 64,
            [f"64 {FIRST} (3 seeds), after 2.2 s of training"],
        ),
        # The first size is known without any rate.
        ([{16: 4.0, 64: 2.0}], {"windows": 0}, 64, [f"64 {FIRST} (one seed), after 2 s"]),
        # Of several learning rates the best one counts.
        (
            [{16: 4.0, 64: 3.0}, {16: 1.0}], {"options": {"optimizer.lr": 0.1}}, 16,
            [f"16 {FIRST} (one seed), after 1 s of training and 1,600 samples, at optimizer.lr=0.1."],
        ),
        # The rate is named as it is typed, and as it was for this size.
        (
            [{16: 4.0, 64: 2.0}], {"learning_rate": 0.002, "lr_scaling": SCALED}, 64,
            [f"64 {FIRST} (one seed), after 2 s of training and 12,800 samples, at optimizer.lr=0.004 (scaled to 0.002)."],
        ),
    ],
)  # fmt: skip
def test_the_size_that_reached_the_target_first_is_the_answer(runs, facts, size, lines, tmp_path):
    for number, times in enumerate(runs):
        has_other_rate = "options" in facts  # the last run has another learning rate and the same seed
        run_fields = {} if has_other_rate and number == 0 else facts
        write_trained(tmp_path, times, first=3 * number, seed=0 if has_other_rate else number, **run_fields)
    answer = decide_folder(tmp_path)
    assert answer.arrivals.winner == size
    assert (answer.size, answer.rule) == (
        (size, "shown") if size else (answer.size, "best_guess" if answer.size else "undecided")
    )
    assert [line[: len(expected)] for line, expected in zip(answer.lines, lines, strict=True)] == lines
    assert answer.repeat == ""


def test_of_a_size_that_few_seeds_have_reached_the_table_says_how_many(tmp_path):
    for seed, times in enumerate([{16: None, 64: 2.0}, {16: None, 64: None}]):
        write_trained(tmp_path, times, first=2 * seed, seed=seed)
    report = analyse([tmp_path])
    rows = [line.split() for line in report.text.splitlines()]
    assert ["s", "to", "target", "not", "within", "5.00", "s", "1", "of", "2", "seeds"] in rows
    columns = ["seeds", "arrived", "not_reached_after_s"]
    assert report.tables[0][columns].to_numpy().tolist() == [[2, 0, 5.0], [2, 1, 5.0]]


def test_the_report_has_a_table_a_plot_and_columns(tmp_path):
    write_trained(tmp_path, {16: 4.0, 64: 2.0, 256: None})
    report = analyse([tmp_path])
    rows = [line.split() for line in report.text.splitlines()]
    assert ["s", "to", "target", "4.00", "2.00", "not", "within", "5.00", "s"] in rows
    assert ["samples", "6,400", "12,800"] in rows
    bars = plots.figures(report)["time_to_target"].axes[0].collections  # since the last validation below the target
    assert [tuple(bar.get_segments()[0][:, 1]) for bar in bars] == [pytest.approx((3.6, 4)), pytest.approx((1.8, 2))]
    assert {"time_to_target_s", "samples_to_target"} <= set(report.frame.columns)


def test_a_bar_begins_at_the_last_validation_below_the_target_and_without_one_there_is_none(tmp_path):
    write_trained(tmp_path, {16: 4.0, 64: 2.0}, below={16: 0.1, 64: 0.0})
    bars = plots.figures(analyse([tmp_path]))["time_to_target"].axes[0].collections
    assert [tuple(bar.get_segments()[0][:, 1]) for bar in bars] == [pytest.approx((0.4, 4)), pytest.approx((2, 2))]
