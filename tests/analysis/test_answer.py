"""The rules by which a batch size is recommended, and what the sentences claim."""

from pathlib import Path
from typing import Any

import pytest

from batchscope.analysis.answer import Answer, answer
from batchscope.analysis.read import find
from batchscope.analysis.table import shown_metrics
from tests.support.synthetic_runs import write_measured, write_run, write_steps


def answered(folder: Path) -> Answer | None:
    """The answer for the one group in a folder."""
    sweep = find([folder])
    (group,) = sweep.groups
    return answer(group, shown_metrics(sweep))


def timed(folder: Path, rates: dict[int, float], **facts: Any) -> Answer:
    """The answer for sizes with these rates."""
    write_measured(folder, {size: 1e3 * size / rate for size, rate in rates.items()}, **facts)
    found = answered(folder)
    assert found is not None
    return found


# --- 1. what is not known does not decide -------------------------------------------------------------------------


def test_a_size_of_three_steps_without_an_interval_is_never_recommended(tmp_path: Path):
    write_measured(tmp_path, {8: 8.0, 64: 32.0})
    write_run(tmp_path / "2", 512, 10.0)
    write_steps(tmp_path / "2", [[10.0] * 3])
    found = answered(tmp_path)
    assert found is not None
    assert found.size is None
    assert found.candidate == 64
    assert 512 in found.vague


def test_a_smaller_size_that_is_not_known_is_no_candidate(tmp_path: Path):
    write_measured(tmp_path, {64: 32.0, 512: 200.0})
    write_run(tmp_path / "2", 8, 3.0)
    found = answered(tmp_path)
    assert found is not None
    assert (found.size, found.candidate) == (None, 512)


def test_records_without_windows_have_no_answer_and_the_command_that_measures(tmp_path: Path):
    for number, size in enumerate((8, 64)):
        write_run(tmp_path / str(number), size, 10.0)
    found = answered(tmp_path)
    assert found is not None
    assert (found.size, found.candidate) == (None, None)
    assert found.lines == ["No rate is known well enough to compare sizes: the runs measured too few steps."]
    assert found.repeat == ["experiment=throughput", "data.batch_size=8,64"]


def test_one_size_has_no_answer(tmp_path: Path):
    write_measured(tmp_path, {8: 8.0})
    assert answered(tmp_path) is None


# --- 2. a sentence is as strong as the interval -------------------------------------------------------------------


def test_a_size_is_the_fastest_where_all_others_are_shown_to_be_slower(tmp_path: Path):
    found = timed(tmp_path, {8: 1000, 64: 3000, 512: 4000})
    assert found.size == 512
    assert found.lines[0] == "512 is the fastest; 64 gives 75 % of it."
    assert {"kind": "fastest", "batch_size": 512, "among": [8, 64, 512]} in found.claims


def test_equal_sizes_are_not_called_faster_and_a_slower_one_between_them_is_not_called_equal(tmp_path: Path):
    """No span of sizes is named: what lies between two equal sizes may be slower."""
    found = timed(tmp_path, {64: 4000, 256: 2000, 512: 4000}, noise=0.03, seed=4)
    assert found.size == 64
    assert found.lines[0] == "64 is enough: no other size is more than 10 % faster."
    assert not any(claim["kind"] == "fastest" for claim in found.claims)
    assert not any("equal" in line or " to 512" in line for line in found.lines)


def test_a_share_that_is_not_known_to_10_percent_is_a_bound(tmp_path: Path):
    write_measured(tmp_path, {64: 64.0, 512: 128.0})
    write_measured(tmp_path, {8: 80.0}, first=2, noise=0.3, seed=5, passes=False)
    found = answered(tmp_path)
    assert found is not None
    assert found.size == 512
    (claim,) = [claim for claim in found.claims if claim["kind"] in ("share", "at_most")]
    assert claim["batch_size"] == 64
    assert 8 in found.vague
    assert "Not known to ± 10 %, and marked with ?: the rate at 8." in found.lines


# --- 3. the smallest size that is shown to reach 90 % -------------------------------------------------------------


def test_the_smallest_size_that_reaches_90_percent_is_recommended(tmp_path: Path):
    found = timed(tmp_path, {8: 1000, 64: 3800, 512: 4000})
    assert found.size == 64
    assert found.lines[0] == "64 is enough: no other size is more than 10 % faster."
    assert {"kind": "reaches", "batch_size": 64, "share": 0.9, "among": [8, 64, 512]} in found.claims


def test_a_smaller_size_that_may_reach_it_makes_the_answer_undecided(tmp_path: Path):
    found = timed(tmp_path, {8: 1000, 64: 3600, 512: 4000}, noise=0.08, windows=6, seed=1)
    assert found.size is None
    assert found.decision is not None
    assert found.decision.between == [64, 512]
    assert found.candidate == 64
    assert found.lines[0].startswith("Undecided between 64 and 512: 64 gives ")
    assert found.repeat == ["experiment=throughput", "data.batch_size=64,512"]


def test_doubt_never_leads_to_a_larger_size(tmp_path: Path):
    for seed in range(10):
        found = timed(tmp_path / str(seed), {64: 3800, 512: 4000}, noise=0.1, windows=5, seed=seed)
        assert found.size in (None, 64)


def test_a_size_that_nobody_asked_for_is_not_recommended(tmp_path: Path):
    """The training set has 88 samples: a batch of 128 and one of 256 hold 88."""
    write_measured(tmp_path, {32: 32.0, 64: 40.0}, train_samples=88)
    for number, asked in enumerate((128, 256), 2):
        run = write_run(tmp_path / str(number), asked, 41.0, throughput={"batch_size": 88}, train_samples=88)
        write_steps(run, [[41.0] * 5] * 12, rounds=range(12))
    found = answered(tmp_path)
    assert found is not None
    assert found.size == 64
    assert not any("88 is" in line for line in found.lines)
    assert "a batch of 128 is larger than the training set: it held 88" in find([tmp_path]).notes


# --- 4. trained runs -----------------------------------------------------------------------------------------------


def test_only_sizes_that_train_as_well_are_recommended(tmp_path: Path):
    accuracy = {8: 0.72, 64: 0.70, 2048: 0.20}
    found = timed(
        tmp_path, {8: 5_000, 64: 30_000, 2048: 90_000}, test_samples=360, noise=0.0002,
        metrics=lambda size: {"test/acc": accuracy[size]},
    )  # fmt: skip
    assert found.size == 64
    assert found.lines[0] == "64 is the fastest of those with the best test/acc; 8 gives 17 % of it."
    assert "2,048 is 3.00 times as fast and loses 50 points after this epoch." in found.lines
    assert {"kind": "worse", "batch_size": 2048, "metric": "test/acc"} in found.claims


def test_where_one_loss_each_is_known_the_answer_waits_for_seeds(tmp_path: Path):
    loss = {8: 0.10, 64: 0.12}
    found = timed(tmp_path, {8: 1000, 64: 4000}, metrics=lambda size: {"test/loss": loss[size]})
    assert found.size is None
    assert found.lines[0] == (
        "Undecided between 8 and 64: 8 has the best test/loss, and how far that differs by chance is not known."
    )
    assert found.repeat == ["seed=0,1,2", "data.batch_size=8,64"]


def test_without_a_metric_the_answer_says_what_to_train(tmp_path: Path):
    assert "Accuracy was not measured: train both before you choose." in timed(tmp_path, {64: 3000, 512: 4000}).lines


# --- 5. a busy machine ---------------------------------------------------------------------------------------------


def test_on_a_busy_machine_there_is_no_answer_but_what_to_do(tmp_path: Path):
    found = timed(tmp_path, {8: 1000, 64: 4000}, others=0.45)
    assert (found.size, found.candidate, found.decision) == (None, None, None)
    (line,) = found.lines
    assert line.startswith("The machine was busy: other programs took 45 % of the processor. No batch size is ")
    assert found.vague == [8, 64]
    assert found.repeat == ["experiment=throughput", "data.batch_size=8,64"]


# --- larger sizes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        ({}, "The rate still rises at 512: 1,024 may be faster."),
        ({"train_samples": 512}, "The rate still rises at 512, which is the whole training set."),
        ({"train_samples": 600}, "The rate still rises at 512; the training set has 600."),
    ],
)
def test_whether_a_larger_size_may_be_faster(tmp_path: Path, facts: dict[str, Any], line: str):
    assert timed(tmp_path, {64: 2000, 512: 4000}, **facts).lines[-1] == line


def test_where_memory_ends_is_said(tmp_path: Path):
    write_run(tmp_path / "9", 1024, status="out_of_memory", error="OutOfMemoryError")
    assert timed(tmp_path, {64: 2000, 512: 4000}).lines[-1] == (
        "The rate still rises at 512, and 1,024 ran out of memory."
    )
