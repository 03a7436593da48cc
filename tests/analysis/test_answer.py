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


def by_size(key: str, values: dict[int, float]) -> dict[str, Any]:
    return {"metrics": lambda size: {key: values[size]}}


ACCURACY = by_size("test/acc", {8: 0.72, 64: 0.70, 2048: 0.20}) | {"test_samples": 360, "noise": 0.0002}
ENOUGH = "64 is enough: it gives at least 90 % of the best rate."


@pytest.mark.parametrize(
    ("rates", "facts", "size", "line"),
    [
        # The fastest is what all others are shown to be slower than.
        ({8: 1000, 64: 3000, 512: 4000}, {}, 512, "512 is the fastest; 64 gives 75 % of it."),
        # The smallest size that is shown to reach 90 % is recommended.
        ({8: 1000, 64: 3800, 512: 4000}, {}, 64, ENOUGH),
        # Equal sizes are not called faster, and a slower one between them is not called equal.
        ({64: 4000, 256: 2000, 512: 4000}, {"noise": 0.03, "seed": 4}, 64, ENOUGH),
        # A smaller size that may reach it makes the answer undecided.
        (
            {8: 1000, 64: 3600, 512: 4000},
            {"noise": 0.08, "windows": 6, "seed": 1},
            None,
            "Undecided between 64 and 512: ",
        ),
        # Of trained runs only those that train as well.
        (
            {8: 5e3, 64: 3e4, 2048: 9e4},
            ACCURACY,
            64,
            "64 is the fastest of those with the best test/acc; 8 gives 17 % of",
        ),
        # The noise of one loss is not known.
        (
            {8: 1000, 64: 4000},
            by_size("test/loss", {8: 0.1, 64: 0.12}),
            None,
            "Undecided between 8 and 64: 8 has the best",
        ),
        (
            {8: 1000, 64: 4000},
            {"others": 0.45},
            None,
            "The machine was busy: other programs took 45 % of the processor. No",
        ),
    ],
)
def test_the_rules(tmp_path: Path, rates: dict[int, float], facts: dict[str, Any], size: int | None, line: str):
    found = timed(tmp_path, rates, **facts)
    assert found.size == size
    assert found.lines[0].startswith(line)
    assert any(claim["kind"] == "fastest" for claim in found.claims) == ("is the fastest" in line)
    assert any(claim["kind"] == "reaches" for claim in found.claims) == (size is not None)
    assert bool(found.repeat) == (size is None)


def test_the_interval_that_is_said_is_the_one_in_doubt(tmp_path: Path):
    """64 is enough for sure; 1,024 may be faster, because other programs slowed it."""
    write_measured(tmp_path, {64: 16.2, 256: 64.0})
    write_measured(tmp_path, {1024: 257.0}, first=2, others=0.2)
    found = answered(tmp_path)
    assert found is not None
    assert found.lines[0].startswith("Undecided between 64 and 1,024: 1,024 gives ")
    assert found.lines[0].endswith(" % of the rate of 256; 110 % would be worth it.")


def test_doubt_never_leads_to_a_larger_size(tmp_path: Path):
    for seed in range(10):
        found = timed(tmp_path / str(seed), {64: 3800, 512: 4000}, noise=0.1, windows=5, seed=seed)
        assert found.size in (None, 64)


def test_the_price_of_a_faster_size_that_trains_worse_is_named(tmp_path: Path):
    found = timed(tmp_path, {8: 5_000, 64: 30_000, 2048: 90_000}, **ACCURACY)
    assert "2,048 is 3.00 times as fast and loses 50 points after 1 epoch." in found.lines
    assert {"kind": "worse", "batch_size": 2048, "metric": "test/acc"} in found.claims


@pytest.mark.parametrize(
    ("facts", "repeat", "between"),
    [
        ({"noise": 0.08, "windows": 5, "seed": 3}, ["experiment=throughput", "data.batch_size=64,512"], [64, 512]),
        (by_size("test/loss", {8: 0.1, 64: 0.12, 512: 0.1}), ["seed=0,1,2", "data.batch_size=8,64"], [8, 64]),
        ({"others": 0.45}, ["experiment=throughput", "data.batch_size=8,64,512"], None),
    ],
)
def test_an_open_answer_has_the_options_that_decide_it(
    tmp_path: Path, facts: dict[str, Any], repeat: list[str], between: list[int] | None
):
    found = timed(tmp_path, {8: 1000, 64: 3900, 512: 4000}, **facts)
    assert found.repeat == repeat
    assert (found.decision.between if found.decision else None) == between
    assert found.candidate == (min(between) if between else None)
    assert found.decision or found.vague == [8, 64, 512]


# --- what is not known ---------------------------------------------------------------------------------------------


def test_a_size_of_three_steps_without_an_interval_is_never_recommended(tmp_path: Path):
    write_measured(tmp_path, {8: 8.0, 64: 32.0})
    write_run(tmp_path / "2", 512, 10.0)
    write_steps(tmp_path / "2", [[10.0] * 3])
    found = answered(tmp_path)
    assert found is not None
    assert (found.size, found.candidate) == (None, 64)
    assert 512 in found.vague


def test_a_smaller_size_that_is_not_known_is_no_candidate(tmp_path: Path):
    write_measured(tmp_path, {64: 32.0, 512: 200.0})
    write_run(tmp_path / "2", 8, 3.0)
    found = answered(tmp_path)
    assert found is not None
    assert (found.size, found.candidate) == (None, 512)


def test_records_without_windows_have_no_answer_and_one_size_has_none_at_all(tmp_path: Path):
    write_run(tmp_path / "0", 8, 10.0)
    assert answered(tmp_path) is None
    write_run(tmp_path / "1", 64, 10.0)
    found = answered(tmp_path)
    assert found is not None
    assert (found.size, found.candidate) == (None, None)
    assert found.lines == ["No rate is known well enough to compare sizes: the runs measured too few steps."]
    assert found.repeat == ["experiment=throughput", "data.batch_size=8,64"]


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


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        ({}, "The rate still rises at 512: 1,024 may be faster."),
        ({"train_samples": 600}, "The rate still rises at 512; the training set has 600."),
        ({"out_of_memory": 1024}, "The rate still rises at 512, and 1,024 ran out of memory."),
    ],
)
def test_whether_a_larger_size_may_be_faster(tmp_path: Path, facts: dict[str, Any], line: str):
    if size := facts.pop("out_of_memory", None):
        write_run(tmp_path / "9", size, status="out_of_memory", error="OutOfMemoryError")
    found = timed(tmp_path, {64: 2000, 512: 4000}, **facts)
    assert found.lines[-1] == line
    assert "Accuracy was not measured: train these sizes before you choose." in found.lines
