"""The training time after which each batch size has reached a target, and the sentences on it."""

from pathlib import Path

import pytest

from batchscope.analysis.answer import Answer, answer
from batchscope.analysis.read import find
from batchscope.analysis.report import write_report
from tests.support.synthetic_runs import change_record, write_curve, write_measured

SIZES = (16, 64, 256)


OTHERS_WON, TIME_OVER = "other runs were faster", "the time limit"


def trained(
    folder: Path,
    times: dict[int, float | None],
    seed: int = 0,
    first: int = 0,
    noise: float = 0,
    ended: str = OTHERS_WON,
) -> Answer:
    """Runs that were trained to val/acc 0.9: each time in seconds, or None for one that was ended after 5 s.

    Every time is known to a tenth.
    """
    write_measured(folder, {size: 10.0 for size in times}, first=first, seed=seed, steps=500)
    for number, seconds in enumerate(times.values(), first):
        steps = round(100 * (seconds or 5.0))
        target = {"metric": "val/acc", "value": 0.9, "reached": seconds is not None, "best": 0.8, "steps": steps}
        target |= {"seconds": seconds or 5.0, "after_seconds": 0.9 * (seconds or 5.0)}
        target |= {} if seconds else {"ended": ended}
        change_record(folder / str(number), target=target, time_to_target_s=seconds)
        if noise:
            change_record(
                folder / str(number), noise_scale={"samples": noise, "low": 0.95 * noise, "high": 1.05 * noise}
            )
    (group,) = find([folder]).groups
    found = answer(group)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("times", "size", "lines"),
    [
        (
            {16: 4.0, 64: 2.0, 256: None},
            64,
            [
                "64 reached val/acc 90.0 % first (one seed), after 2 s of training and 12,800 samples, at optimizer.lr=0.004.",
                "Not reached while others could win: 256.",
            ],
        ),
        # Validations that lie between them do not tell two sizes apart.
        (
            {16: 4.0, 64: 2.0, 256: 2.1},
            None,
            ["64 or 256 reached val/acc 90.0 % first: which of them is not told apart."],
        ),
        (
            {16: None, 64: None},
            None,
            ["No run reached val/acc 90.0 %: the best was 80.0 %. Take an easier target, or give"],
        ),
    ],
)
def test_the_first_size_is_the_answer(
    times: dict[int, float | None], size: int | None, lines: list[str], tmp_path: Path
):
    found = trained(tmp_path, times)
    assert found.size == size
    assert [line[: len(expected)] for line, expected in zip(found.lines, lines, strict=True)] == lines


def test_of_several_learning_rates_the_best_one_counts(tmp_path: Path) -> None:
    trained(tmp_path, {16: 4.0, 64: 3.0})
    write_measured(tmp_path, {16: 10.0}, first=2, steps=500, options={"optimizer.lr": 0.1})
    target = {"metric": "val/acc", "value": 0.9, "reached": True, "steps": 100, "seconds": 1.0, "after_seconds": 0.9}
    change_record(tmp_path / "2", target=target, time_to_target_s=1.0)
    (group,) = find([tmp_path]).groups
    assert "at optimizer.lr=0.1" in answer(group).lines[0]


def test_a_size_whose_time_was_over_before_may_have_won(tmp_path: Path) -> None:
    found = trained(tmp_path, {16: 7.0, 64: None}, ended=TIME_OVER)
    assert found.size is None
    assert found.lines == [
        "16 reached val/acc 90.0 % first of those that did.",
        "Stopped while still in time: 64. Give more time by search.minutes.",
    ]


def test_seeds_that_differ_are_said_to(tmp_path: Path) -> None:
    for seed, times in enumerate(({16: 4.0, 64: 2.0}, {16: 2.0, 64: 4.0})):
        found = trained(tmp_path, times, seed=seed, first=2 * seed)
    assert found.lines == ["16 or 64 reached val/acc 90.0 % first: which of them depends on the seed."]


def test_the_first_size_is_known_where_no_rate_is(tmp_path: Path) -> None:
    trained(tmp_path, {16: 4.0, 64: 2.0})
    for run in ("0", "1"):
        (tmp_path / run / "steps.npz").unlink()
    (group,) = find([tmp_path]).groups
    found = answer(group)
    assert found is not None
    assert found.lines[0].startswith("64 reached val/acc 90.0 % first")
    assert found.repeat == []


def test_most_seeds_decide(tmp_path: Path) -> None:
    for seed, times in enumerate(({16: 4.0, 64: 2.0}, {16: 4.2, 64: 2.2}, {16: 3.0, 64: 3.5})):
        found = trained(tmp_path, times, seed=seed, first=2 * seed)
    assert found.lines[0].startswith("64 reached val/acc 90.0 % first with 2 of 3 seeds, after 2.2 s of training")


@pytest.mark.parametrize(
    ("points", "said"),
    [
        (  # 16 reaches 90 % in its second validation, 64 in its fourth, and 256 never does
            {
                16: [(100, 0.8), (200, 0.91), (300, 0.97), (400, 0.98)],
                64: [(100, 0.5), (200, 0.7), (300, 0.8), (400, 0.9)],
                256: [(100, 0.1), (200, 0.2), (300, 0.3), (400, 0.35)],
            },
            [
                "16 reached val/acc 90.0 % first (one seed), after 2 s of training and 3,200 samples, at optimizer.lr=0.004."
            ],
        ),
        # Validations at the same times do not tell sizes apart.
        ({16: [(200, 0.8), (400, 0.91)], 64: [(200, 0.8), (400, 0.92)]}, []),
        ({16: [(400, 0.91)], 64: [(100, 0.8), (400, 0.92)]}, []),
    ],
)
def test_trained_runs_are_compared_at_the_value_that_half_of_the_sizes_reach(
    points: dict[int, list[tuple[int, float]]], said: list[str], tmp_path: Path
) -> None:
    write_measured(tmp_path, {size: 10.0 for size in points}, steps=400)
    for number, of_size in enumerate(points.values()):
        write_curve(tmp_path / str(number), of_size, 10.0)
    (group,) = find([tmp_path]).groups
    found = answer(group)
    assert found is not None
    assert [line for line in found.lines if "reached" in line] == said


def test_the_report_has_a_table_a_plot_and_columns(tmp_path: Path) -> None:
    trained(tmp_path, {16: 4.0, 64: 2.0, 256: None}, noise=300)
    report = write_report([tmp_path], tmp_path / "report")
    rows = [line.split() for line in report.text.splitlines()]
    assert ["s", "to", "target", "4.00", "2.00", ">", "5.00"] in rows
    assert ["samples", "6,400", "12,800"] in rows
    assert (tmp_path / "report/time_to_target.png").exists()
    assert {"time_to_target_s", "samples_to_target", "noise_scale"} <= set(report.frame.columns)
