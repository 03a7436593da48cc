"""The search for a batch size: close to what trying every size would find, in a handful of runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchscope.errors import UserError
from batchscope.records.read import read
from batchscope.sweep import runner as sweep
from batchscope.sweep.search import BatchSizeSearch, recommended_in
from tests.support.synthetic_runs import write_measured

POWERS = [2**k for k in range(3, 15)]


def device(floor: float, slope: float, memory: int = 2**40):
    """Samples/s of a device whose step takes floor + slope · batch seconds; None where the batch does not fit."""

    def rate(size: int) -> float | None:
        return size / (floor + slope * size) if size <= memory else None

    return rate


def recorded(rate):
    """The measure to search with, and the list of what it was asked for."""
    asked: list[int] = []

    def measure(size: int) -> float | None:
        asked.append(size)
        return rate(size)

    return measure, asked


@pytest.mark.parametrize("knee", [2**k for k in range(10)])
def test_it_finds_what_an_exhaustive_sweep_would_recommend_within_a_step_of_two(knee: int):
    rate = device(floor=1e-6 * knee, slope=1e-6)
    best = max(rate(size) for size in POWERS)
    exhaustive = min(size for size in POWERS if rate(size) >= 0.95 * best)
    measure, asked = recorded(rate)
    found = BatchSizeSearch().find(measure)
    assert found in asked
    assert exhaustive / 2 <= found <= exhaustive * 2
    assert len(asked) <= 8


def test_batches_grow_by_four_and_the_size_left_out_below_the_answer_is_tried_last():
    measure, asked = recorded(device(floor=8e-6, slope=1e-6))
    BatchSizeSearch().find(measure)
    assert asked == [8, 32, 128, 512, 64]


def test_where_memory_ends_the_size_below_is_tried():
    measure, asked = recorded(device(floor=1.0, slope=1e-6, memory=300))
    assert BatchSizeSearch().find(measure) == 256
    assert asked == [8, 32, 128, 512, 256]


def test_a_size_that_did_not_run_is_never_the_answer():
    measure, _ = recorded(device(floor=1.0, slope=1e-6, memory=100))
    assert BatchSizeSearch().find(measure) == 64


def test_no_size_that_fits_is_no_answer():
    assert BatchSizeSearch().find(device(1, 1, memory=4)) is None


def test_where_a_larger_batch_is_never_faster_the_first_is_the_answer():
    measure, asked = recorded(device(floor=0, slope=1e-6))
    assert BatchSizeSearch(start=16).find(measure) == 16
    assert asked == [16, 64]


def test_it_stops_at_max_runs_while_throughput_still_rises():
    measure, asked = recorded(device(floor=1e3, slope=1e-9))
    assert BatchSizeSearch(max_runs=3).find(measure) == 128
    assert asked == [8, 32, 128]


def test_the_last_size_is_the_whole_training_set_and_none_is_larger():
    measure, asked = recorded(device(floor=1.0, slope=1e-6))
    assert BatchSizeSearch().find(measure, limit=lambda: 4000) == 4000
    assert asked == [8, 32, 128, 512, 2048, 4000]  # no power of two is left out between the last two


def test_half_of_the_training_set_is_tried_where_the_steps_left_it_out():
    measure, asked = recorded(device(floor=1.0, slope=1e-6))
    BatchSizeSearch().find(measure, limit=lambda: 1500)
    assert asked == [8, 32, 128, 512, 1500, 750]


def test_a_first_size_beyond_the_training_set_is_one_run_and_the_answer_is_what_it_held():
    measure, asked = recorded(device(floor=1.0, slope=1e-6))
    assert BatchSizeSearch(start=64).find(measure, limit=lambda: 50) == 50
    assert asked == [64]


def test_a_training_set_of_exactly_one_of_the_sizes_is_measured_once():
    measure, asked = recorded(device(floor=1.0, slope=1e-6))
    assert BatchSizeSearch().find(measure, limit=lambda: 512) == 512
    assert asked == [8, 32, 128, 512, 256]


def test_a_failure_ends_the_search():
    def measure(size: int) -> float:
        if size == 32:
            raise RuntimeError("a bug")
        return float(size)

    with pytest.raises(RuntimeError, match="a bug"):
        BatchSizeSearch().find(measure)


def test_the_answer_is_what_a_report_recommends_for_the_runs(tmp_path: Path) -> None:
    """64 reaches 91 % of the fastest, which a report calls enough and the rates alone do not."""
    step_ms = {8: 10.0, 32: 20.0, 64: 22.0, 128: 41.0, 256: 81.0, 512: 160.0}

    def measure(size: int) -> float:
        write_measured(tmp_path / str(size), {size: step_ms[size]}, drift=0)
        return 1e3 * size / step_ms[size]

    assert BatchSizeSearch().find(measure, recommended=lambda: recommended_in(tmp_path)) == 64
    assert BatchSizeSearch().find(measure) == 128
    assert recommended_in(tmp_path / "nowhere") is None


# --- the runs of a search -----------------------------------------------------------------------------------------


def search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: Callable[[int], dict[str, Any]]) -> list[int]:
    """The sizes that a sweep's search runs, where `end` says how the run of a size ends."""
    sizes = []

    def run(run_dir: Path, digest: str, server: Any) -> dict[str, Any]:
        size = read(run_dir)["config"]["data"]["batch_size"]
        sizes.append(size)
        return {"status": "finished", "dataset": {"train_samples": 4000}, "throughput": {}, **end(size)}

    monkeypatch.setattr(sweep, "run_in_subprocess", run)
    config = {
        "search": {"_target_": "batchscope.sweep.search.BatchSizeSearch"},
        "data": {"batch_size": 1},
        "trainer": {"devices": 1, "num_nodes": 1},
        "run_dir": str(tmp_path),
    }
    sweep.SweepRunner(tmp_path, ["the run"]).search(0, tmp_path, config, {"choices": {}, "overrides": []})
    return sizes


def rate(samples_per_sec: float, **others: float) -> dict[str, Any]:
    return {"throughput": {"samples_per_sec": samples_per_sec, **others}}


def test_the_training_set_of_the_first_run_bounds_the_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert search(tmp_path, monkeypatch, lambda size: rate(size)) == [8, 32, 128, 512, 2048, 4000]


def test_the_training_set_is_shared_among_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = search(tmp_path, monkeypatch, lambda size: {**rate(size), "processes": 4})
    assert sizes == [8, 32, 128, 512, 1000]


def test_the_rates_are_compared_and_not_the_mean_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = search(tmp_path, monkeypatch, lambda size: rate(size, samples_per_sec_mean=1.0))
    assert sizes[:3] == [8, 32, 128]


def test_out_of_memory_is_a_size_that_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = search(tmp_path, monkeypatch, lambda size: rate(size) if size < 512 else {"status": "out_of_memory"})
    assert sizes == [8, 32, 128, 512, 256]


@pytest.mark.parametrize("status", ["failed", "interrupted", "killed"])
def test_any_other_failure_ends_the_search_and_is_told(
    status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []

    def end(size: int) -> dict[str, Any]:
        seen.append(size)
        return rate(size) if size < 32 else {"status": status, "error": "ValueError: a bug"}

    with pytest.raises(sweep.RunFailed, match="a bug"):
        search(tmp_path, monkeypatch, end)
    assert seen == [8, 32]
    said = capsys.readouterr().err
    assert f"{status}: ValueError: a bug" in said
    assert f"the search ends: {status} does not say whether the batch fits" in said


def test_a_run_without_a_rate_ends_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"search: needs the rate of a run, and .*8 has none"):
        search(tmp_path, monkeypatch, lambda size: {})
