"""What is said of groups that differ in devices, `compile` or other options: each sentence as strong as its interval."""

from pathlib import Path
from typing import Any

import pytest

from batchscope.analysis.between_groups import compare_settings, crossovers, scaling_efficiencies
from batchscope.analysis.read import find
from batchscope.analysis.table import run_table, settings_table, shown_metrics
from batchscope.analysis.text import and_
from tests.support.synthetic_runs import change_record, write_measured

QUIET = {"noise": 0.0005, "drift": 0}


def headlines(folder: Path) -> list[str]:
    return crossovers(find([folder]))


EVERY = "at every size that ran on both (8 to 64)"


@pytest.mark.parametrize(
    ("cpu", "gpu", "noise", "said"),
    [
        (
            {1: 1.0, 8: 2.0, 64: 8.0, 512: 52.0}, {1: 4.0, 8: 4.0, 64: 4.0, 512: 4.5}, QUIET,
            "gpu is faster than cpu from a batch size between 8 and 64 on, 11.6 times as fast at 512.",
        ),
        # The largest ratio is not that of the last size.
        ({8: 40.0, 64: 50.0}, {8: 4.0, 64: 25.0}, QUIET, f"gpu is faster than cpu {EVERY}, 10.0 times as fast at 8."),
        # A size at which no difference is shown does not count.
        ({8: 10.0, 64: 40.0}, {8: 9.99, 64: 4.0}, {"noise": 0.02}, "gpu is faster than cpu at 64, "),
        (
            {8: 10.0, 64: 40.0}, {8: 10.0, 64: 40.0}, {"noise": 0.05},
            "no difference between cpu and gpu is shown at any size that ran on both (8 to 64).",
        ),
        ({8: 10.0, 64: 40.0}, {8: 1.0, 64: 4.0}, {"windows": 1}, "no difference between cpu and gpu is shown"),
    ],
)  # fmt: skip
def test_a_device_is_faster_where_the_interval_shows_it(
    tmp_path: Path, cpu: dict[int, float], gpu: dict[int, float], noise: dict[str, Any], said: str
):
    write_measured(tmp_path, cpu, **noise)
    write_measured(tmp_path, gpu, first=len(cpu), device="cuda", **noise)
    (line,) = headlines(tmp_path)
    assert line.startswith(f"cnn: {said}")


def test_devices_of_one_kind_are_told_apart_by_their_names(tmp_path: Path):
    write_measured(tmp_path, {8: 20.0}, **QUIET)
    for number, name in enumerate(("T4", "A100"), 1):
        write_measured(tmp_path, {8: 20.0 / 2**number}, first=number, device="cuda", device_name=name, **QUIET)
    at = "at every size that ran on both (8)"
    assert headlines(tmp_path) == [
        f"cnn: T4 is faster than A CPU {at}, 2.00 times as fast at 8.",
        f"cnn: A100 is faster than A CPU {at}, 4.00 times as fast at 8.",
        f"cnn: A100 is faster than T4 {at}, 2.00 times as fast at 8.",
    ]


def test_models_are_not_compared_and_neither_is_what_differs_in_two_things(tmp_path: Path):
    write_measured(tmp_path, {8: 10.0})
    write_measured(tmp_path, {8: 10.0}, first=1, device="cuda", model="mlp")
    write_measured(tmp_path, {8: 10.0}, first=2, device="cuda", options={"data.pipeline": "device"})
    assert headlines(tmp_path) == []


@pytest.mark.parametrize(
    ("ms", "said"),
    [
        (
            8.0,
            "compile=true is faster than compile=false at every size that ran on both (64), 1.25 times as fast at 64.",
        ),
        (10.0, "no difference between compile=false and compile=true is shown at any size that ran on both (64)."),
        (
            20.0,
            "compile=false is faster than compile=true at every size that ran on both (64), 2.00 times as fast at 64.",
        ),
    ],
)
def test_what_compile_gains(tmp_path: Path, ms: float, said: str):
    for number, (time, compiled) in enumerate(((10.0, False), (ms, True))):
        write_measured(tmp_path, {64: time}, first=number, noise=0.002, drift=0, seed=number)
        config = find([tmp_path / str(number)]).runs[0].record["config"]
        change_record(tmp_path / str(number), config=config | {"compile": compiled, "seed": 0})
    assert headlines(tmp_path) == [f"cnn: {said}"]


def test_efficiency_is_the_rate_over_that_of_as_many_single_devices(tmp_path: Path):
    for number, (devices, ms) in enumerate(((1, 10.0), (2, 12.5), (4, 12.5))):
        options = {
            "trainer.devices": devices,
            "trainer.strategy": "ddp",
            "trainer.max_epochs": 3 if devices == 4 else 2,
        }
        facts = {"options": options, "throughput": {"processes": devices}}
        write_measured(tmp_path, {64: ms}, first=number, **facts, **QUIET)
    assert scaling_efficiencies(find([tmp_path]).runs) == {1: pytest.approx(0.8, rel=0.01)}  # of 4, no counterpart


# --- options, each at one batch size --------------------------------------------------------------------------------


def sentences(folder: Path, step_ms: dict[str, float], **facts: Any) -> list[str]:
    """On runs that differ in their pipeline."""
    for number, (name, ms) in enumerate(step_ms.items()):
        own = {key: fact[number] if isinstance(fact, list) else fact for key, fact in facts.items()}
        write_measured(folder, {64: ms}, first=number, options={"data.pipeline": name}, seed=number, **own)
    sweep = find([folder])
    return compare_settings(sweep, shown_metrics(sweep))


TWO, THREE = {"memory": 10.0, "device": 5.0}, {"memory": 10.0, "device": 9.9, "workers": 30.0}


@pytest.mark.parametrize(
    ("step_ms", "facts", "said"),
    [
        (TWO, QUIET, "cnn · device is the fastest: 2.00 times as fast as cnn · memory."),
        (TWO, {"noise": 0.1, "drift": 0, "passes": False}, "cnn · device is the fastest: at least 1."),
        (
            {"memory": 10.0, "device": 8.9}, {"noise": 0.2, "windows": 40, "drift": 0},
            "cnn · device is the fastest: faster than cnn · memory.",
        ),
        (
            THREE, {"noise": 0.05},
            "No difference in speed is shown between cnn · memory and cnn · device; slower than cnn · memory: cnn · w",
        ),
        (TWO, {"others": 0.5}, "The machine was busy: other programs took 50 % of the processor. No setting is called"),
        (TWO, {"windows": 1}, "No rate is known well enough to be compared"),
    ],
)  # fmt: skip
def test_a_setting_is_the_fastest_where_the_interval_shows_it(
    tmp_path: Path, step_ms: dict[str, float], facts: dict[str, Any], said: str
):
    (line,) = sentences(tmp_path, step_ms, **facts)
    assert line.startswith(said)


def test_the_best_metric_names_those_that_are_not_shown_to_be_worse(tmp_path: Path):
    metrics = [{"test/acc": accuracy} for accuracy in (0.98, 0.979, 0.9)]
    lines = sentences(tmp_path, THREE, metrics=metrics, test_samples=10_000)
    assert lines[-1] == "Best test/acc: 98.0 % with cnn · memory; cnn · device is not shown to be worse (one seed)."


def test_runs_on_different_data_are_not_compared(tmp_path: Path):
    write_measured(tmp_path, {64: 10.0})
    write_measured(tmp_path, {64: 10.0}, first=1)
    change_record(tmp_path / "1", choices={"model": "cnn", "data": "cifar10"})
    assert compare_settings(find([tmp_path]), []) == [
        "The runs are on different data: their rates and metrics are not compared."
    ]


def test_the_table_has_a_line_for_each_setting_with_the_mean_and_the_deviation_of_its_runs(tmp_path: Path):
    for seed, accuracy in enumerate((0.97, 0.99, 0.98)):
        facts = {"metrics": {"test/acc": accuracy}, "throughput": {"mfu": 0.25}}
        write_measured(tmp_path, {64: 10.0}, first=seed, seed=seed, noise=0.001, drift=0, **facts)
    write_measured(tmp_path, {64: 5.0}, first=3, options={"data.pipeline": "device"}, throughput={"mfu": 0.5})
    heading, *lines = settings_table(find([tmp_path]), ["test/acc"])
    assert heading == ["setting", "runs", "samples/s", "±", "MFU", "test/acc"]
    assert [line[:2] + line[5:] for line in lines] == [
        ["cnn · memory", "3", "98.00±1.00%"],
        ["cnn · device", "1", ""],
    ]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([], ""),
        ([64], "64"),
        (["a", "b"], "a and b"),
        ([8, 64, 1024], "8, 64 and 1,024"),
        ([1] * 9, "1, 1, 1, 1, 1, 1 and 3 more"),
    ],
)
def test_names_in_a_sentence(names: list[str | int], said: str) -> None:
    """Of settings that are all alike, none is slower."""
    assert and_(names) == said


def test_the_efficiency_of_a_run_stands_beside_its_own_name(tmp_path: Path):
    """Folders of one name in two places."""
    for devices, ms in ((1, 10.0), (2, 12.5)):
        options, throughput = {"trainer.devices": devices, "trainer.strategy": "ddp"}, {"processes": devices}
        write_measured(tmp_path / f"{devices}/sweep", {64: ms}, options=options, throughput=throughput, **QUIET)
    frame = run_table(find([tmp_path / "1/sweep", tmp_path / "2/sweep"]))
    assert list(frame["scaling_efficiency"].isna()) == [True, False]
