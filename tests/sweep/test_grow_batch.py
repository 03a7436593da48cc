"""The search for a batch size: close to what trying every size would find, in a handful of runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchscope.errors import UserError
from batchscope.sweep.grow_batch import grow_batch
from batchscope.sweep.plans import Job, RunFailed
from batchscope.sweep.search import BatchSizeSearch, search_of
from tests.support.command_lines import composed
from tests.support.synthetic_runs import write_measured
from tests.sweep.conftest import job, play

POWERS = [2**k for k in range(3, 15)]
End = Callable[[int], dict[str, Any]]  # of a batch size: how its run ends


def rate(samples_per_sec: float) -> dict[str, Any]:
    return {"throughput": {"samples_per_sec": samples_per_sec}}


def device(floor: float, slope: float = 1e-6, memory: int = 2**40) -> End:
    """A device whose step takes floor + slope · batch seconds, with so much memory."""
    return lambda size: rate(size / (floor + slope * size)) if size <= memory else {"status": "out_of_memory"}


def search(
    folder: Path, end: End, samples: int | None = None, update: int | None = None, timed: bool = False, **options: Any
) -> tuple[int | None, list[str]]:
    """The size that is found, and the folders of the runs."""
    ran = []

    def do(one: Job) -> dict[str, Any]:
        size = one.config["data"]["batch_size"]
        ran.append(str(one.run_dir.relative_to(folder)))
        assert one.facts["overrides"][-1] == f"data.batch_size={size}"
        record = {"status": "finished", "dataset": {"train_samples": samples}, "throughput": {}, "config": one.config}
        return {**record, **end(size)}

    one = job(folder, ".", timed=timed, global_batch_size=update)
    return play(grow_batch(one, BatchSizeSearch(**options)), do), ran


def test_a_search_that_names_no_class_is_this_one() -> None:
    found = search_of(composed("search={start: 4}"))
    assert isinstance(found, BatchSizeSearch) and found.start == 4


@pytest.mark.parametrize("knee", [2**k for k in range(10)])
def test_it_finds_what_an_exhaustive_sweep_would_recommend_within_a_step_of_two(knee: int, tmp_path: Path) -> None:
    rates = {size: size / (knee + size) for size in POWERS}
    exhaustive = min(size for size in POWERS if rates[size] >= 0.95 * max(rates.values()))
    found, ran = search(tmp_path, device(1e-6 * knee))
    assert str(found) in ran
    assert exhaustive / 2 <= found <= exhaustive * 2
    assert len(ran) <= 8


@pytest.mark.parametrize(
    ("end", "options", "found", "tried"),
    [
        (device(8e-6), {}, 128, [8, 32, 128, 512, 64]),  # the size that was left out below the answer
        (device(1.0, memory=300), {}, 256, [8, 32, 128, 512, 256]),  # where memory ends, the size below
        (device(1.0, memory=100), {}, 64, [8, 32, 128, 64]),
        (device(1, 1, memory=4), {}, None, [8]),  # no size fits
        (device(0), {"start": 16}, 16, [16, 64]),  # a larger batch is never faster
        (device(1e3, 1e-9), {"max_runs": 3}, 128, [8, 32, 128]),  # it still rises
        (device(1.0), {"samples": 4000}, 4000, [8, 32, 128, 512, 2048, 4000]),  # the whole training set
        (device(1.0), {"samples": 1500}, 1500, [8, 32, 128, 512, 1500, 750]),
        (device(1.0), {"samples": 512}, 512, [8, 32, 128, 512, 256]),
        (device(1.0), {"samples": 50, "start": 64}, 50, [64]),  # what the first batch held
        (device(1.0), {"update": 1000}, 1000, [8, 25, 100, 250, 1000, 500]),  # of a constant update each is a part
        (lambda size: {**rate(size), "processes": 4}, {"samples": 4000}, 1000, [8, 32, 128, 512, 1000]),  # a share each
    ],
)
def test_batches_grow_by_four_until_they_are_no_faster_or_do_not_fit(end, options, found, tried, tmp_path) -> None:
    assert search(tmp_path, end, **options) == (found, [str(size) for size in tried])


def test_the_answer_is_what_a_report_recommends_also_where_the_search_is_started_again(tmp_path: Path) -> None:
    """64 reaches 91 % of the fastest, which a report calls enough and the rates alone do not."""
    step_ms = {8: 10.0, 32: 20.0, 64: 22.0, 128: 41.0, 256: 81.0, 512: 160.0}

    def measure(size: int) -> dict[str, Any]:
        write_measured(tmp_path / str(size), {size: step_ms[size]}, drift=0)
        return rate(1e3 * size / step_ms[size])

    found = search(tmp_path, measure)
    assert found[0] == 64
    write_measured(tmp_path / "again", {512: 80.0}, drift=0)  # a run that came later the first time
    assert search(tmp_path, measure)[1] == found[1]


@pytest.mark.parametrize(
    ("end", "error", "said"),
    [
        *(({"status": one, "error": "ValueError: a bug"}, RunFailed, "a bug") for one in ("failed", "killed", "refused")),
        ({}, UserError, r"search: needs the rate of a run, and .*32 has none"),
    ],
)  # fmt: skip
def test_a_run_without_a_rate_ends_the_search_and_is_told(end, error, said, tmp_path: Path, capsys) -> None:
    with pytest.raises(error, match=said):
        search(tmp_path, lambda size: rate(size) if size < 32 else end)
    why = f"the search ends: {end.get('status')} does not say whether the batch fits"
    assert (why in capsys.readouterr().err) is bool(end)


def test_undecided_sizes_are_measured_once_more_side_by_side(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("batchscope.sweep.grow_batch.undecided_in", lambda folders: [32, 64])
    assert search(tmp_path, rate, 4000)[1][-1] == "4000"  # not where the runs cannot wait for each other
    assert search(tmp_path, rate, 4000, timed=True)[1][-2:] == ["again/32", "again/64"]
