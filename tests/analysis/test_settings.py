"""Sentences on options, seeds and `compile`, each as strong as its interval."""

import re
from pathlib import Path
from typing import Any

import pytest

from batchscope.analysis.read import find
from batchscope.analysis.settings import compare_settings, compile_gains, seeds_line
from batchscope.analysis.table import shown_metrics
from batchscope.analysis.text import settings_table
from tests.support.synthetic_runs import change_record, write_measured


def pipelines(folder: Path, step_ms: dict[str, float], **facts: Any) -> list[str]:
    """The sentences on runs that differ in their pipeline."""
    for number, (name, ms) in enumerate(step_ms.items()):
        write_measured(folder, {64: ms}, first=number, options={"data.pipeline": name}, seed=number, **facts)
    return sentences(folder)


def sentences(folder: Path) -> list[str]:
    sweep = find([folder])
    return compare_settings(sweep, shown_metrics(sweep))


def test_the_fastest_setting_and_by_how_much(tmp_path: Path):
    (line,) = pipelines(tmp_path, {"memory": 10.0, "device": 5.0}, noise=0.0002, drift=0)
    assert line == "cnn · device is the fastest: 2.00 times as fast as cnn · memory."


def test_a_ratio_that_is_hardly_known_is_a_lower_bound(tmp_path: Path):
    (line,) = pipelines(tmp_path, {"memory": 10.0, "device": 5.0}, noise=0.1, drift=0, passes=False)
    assert line.startswith("cnn · device is the fastest: at least 1.")


def test_where_the_interval_holds_equality_no_setting_is_called_faster(tmp_path: Path):
    (line,) = pipelines(tmp_path, {"memory": 10.0, "device": 9.9, "workers": 30.0}, noise=0.05)
    assert line == (
        "No difference in speed is shown between cnn · memory and cnn · device; slower than cnn · memory: cnn · workers."
    )


def test_a_busy_machine_compares_nothing(tmp_path: Path):
    (line,) = pipelines(tmp_path, {"memory": 10.0, "device": 5.0}, others=0.5)
    assert line.startswith("The machine was busy: other programs took 50 % of the processor.")


def test_the_best_metric_names_those_that_are_not_shown_to_be_worse(tmp_path: Path):
    for number, (name, accuracy) in enumerate({"memory": 0.98, "device": 0.979, "workers": 0.9}.items()):
        facts = {"options": {"data.pipeline": name}, "metrics": {"test/acc": accuracy}, "test_samples": 10_000}
        write_measured(tmp_path, {64: 10.0}, first=number, **facts)
    assert sentences(tmp_path)[-1] == "Best test/acc: 98.0 % with cnn · memory; not shown to be worse: cnn · device."


def test_runs_on_different_data_are_not_compared(tmp_path: Path):
    write_measured(tmp_path, {64: 10.0})
    write_measured(tmp_path, {64: 10.0}, first=1)
    change_record(tmp_path / "1", choices={"model": "cnn", "data": "cifar10"})
    assert sentences(tmp_path) == ["The runs are on different data: their rates and metrics are not compared."]


def test_seeds_have_a_mean_and_a_standard_deviation(tmp_path: Path):
    for seed, accuracy in enumerate((0.97, 0.99, 0.98)):
        write_measured(
            tmp_path, {64: 10.0}, first=seed, seed=seed, noise=0.01, drift=0, metrics={"test/acc": accuracy}
        )  # fmt: skip
    (group,) = find([tmp_path]).groups
    line = seeds_line(group, ["test/acc"])
    assert re.match(r"cnn, 3 seeds, mean ± standard deviation: 6,4\d0 ± \d", line)
    assert line.endswith("samples/s; test/acc 98.00 ± 1.00 %.")


def test_the_table_has_a_line_for_each_setting(tmp_path: Path):
    pipelines(tmp_path, {"memory": 10.0, "device": 5.0}, noise=0.001, drift=0, throughput={"mfu": 0.25})
    sweep = find([tmp_path])
    heading, *lines = settings_table(sweep, [])
    assert heading.split() == ["setting", "runs", "samples/s", "±", "MFU"]
    assert [line.split()[:2] for line in lines] == [["cnn", "·"]] * 2
    assert all(line.endswith("25%") for line in lines)


@pytest.mark.parametrize(
    ("ms", "said"),
    [
        (8.0, "compile=true is 1.25 times as fast; compiling took 20 s, as long as 10,"),
        (10.0, "compile=true is not shown to change the rate; compiling took 20 s."),
        (20.0, "compile=true is slower: without it the run is 2.00 times as fast."),
    ],
)
def test_what_compile_gains(tmp_path: Path, ms: float, said: str):
    for number, (time, compiled) in enumerate(((10.0, False), (ms, True))):
        write_measured(tmp_path, {64: time}, first=number, noise=0.002, drift=0, seed=number)
        config = find([tmp_path / str(number)]).runs[0].record["config"]
        config |= {"compile": compiled, "seed": 0}
        change_record(tmp_path / str(number), config=config, compilation={"seconds": 20.0})
    (line,) = compile_gains(find([tmp_path]))
    assert line.startswith(f"cnn at batch size 64: {said}")
