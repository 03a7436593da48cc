"""Several seeds: the mean and the spread of each setting, and a recommendation that does not take seeds for settings."""

import json
from pathlib import Path

import pytest

from batchscope.analysis.read import find
from batchscope.analysis.report import write_report
from batchscope.analysis.seeds import cells, repeated
from tests.support.synthetic_runs import write_run

ACCURACY = (0.980, 0.990, 0.991)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three seeds at each of two batch sizes of two models; the last run has failed."""
    folder = tmp_path_factory.mktemp("seeds")
    number = 0
    for model in ("cnn", "mlp"):
        for size, ms in ((64, 10.0), (128, 12.0)):
            for seed, accuracy in enumerate(ACCURACY):
                failed = {"status": "failed", "error": "lost"} if number == 11 else {}
                facts = {"metrics": {"test/acc": accuracy - (size == 128) * 0.01}} if not failed else {}
                write_run(folder / str(number), size, ms + seed, model=model, seed=seed, **facts, **failed)
                number += 1
    return folder


def test_seeds_are_no_settings(sweep: Path) -> None:
    found = find([sweep])
    assert [group.label for group in found.groups] == ["cnn", "mlp"]
    assert [list(group.sizes) for group in found.groups] == [[64, 128], [64, 128]]


def test_each_setting_has_mean_deviation_and_range(sweep: Path) -> None:
    headings, first, *_ = cells(repeated(find([sweep])))
    assert headings == [
        *("setting", "batch size", "runs", "test/acc, mean ± sd (range)", "samples/s, mean ± sd (range)")
    ]
    assert first == ["cnn", "64", "3 seeds", "98.70 ± 0.61 % (98.00 to 99.10)", "5,850 ± 534 (5,330 to 6,400)"]


def test_a_number_that_a_run_lacks_says_of_how_many_it_is(sweep: Path) -> None:
    *_, last = cells(repeated(find([sweep])))
    assert last[:4] == ["mlp", "128", "3 seeds", "97.50 ± 0.71 % (97.00 to 98.00), n=2"]


def test_a_setting_that_ran_once_has_no_spread(tmp_path: Path) -> None:
    write_run(tmp_path / "0", 64, 10.0)
    write_run(tmp_path / "1", 128, 10.0)
    assert cells(repeated(find([tmp_path]))) == []


def test_table_page_and_terminal_show_it_and_one_size_is_recommended_for_each_model(
    sweep: Path, tmp_path: Path
) -> None:
    report = write_report([sweep], tmp_path / "out")
    assert [each.group for each in report.recommendations] == ["cnn", "mlp"]
    for text in (
        report.text,
        (tmp_path / "out" / "report.md").read_text(),
        (tmp_path / "out" / "report.html").read_text(),
    ):
        assert "98.70 ± 0.61 %" in text
        assert "(98.00 to 99.10)" in text
    found = json.loads((tmp_path / "out" / "sweep.json").read_text())["repeated"][0]
    assert (found["group"], found["batch_size"], found["seeds"]) == ("cnn", 64, 3)
    assert found["test/acc"] == {"n": 3, "mean": pytest.approx(0.987), "sd": pytest.approx(0.006083, rel=1e-3),
                                 "min": 0.98, "max": 0.991}  # fmt: skip
