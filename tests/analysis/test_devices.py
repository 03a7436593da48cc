"""Devices compared as measured: crossovers, and what several devices reach together."""

from pathlib import Path
from typing import Any

import pytest

from batchscope.analysis.devices import crossovers, scaling, scaling_lines, scaling_notes
from batchscope.analysis.read import find
from tests.support.synthetic_runs import write_measured


def headlines(folder: Path, one: dict[int, float], two: dict[int, float], **facts: Any) -> list[str]:
    """Of a CPU and a GPU with these steps in ms."""
    write_measured(folder, one, **facts)
    write_measured(folder, two, first=len(one), device="cuda", **facts)
    return [crossover.headline for crossover in crossovers(find([folder]).groups)]


QUIET = {"noise": 0.0005, "drift": 0}


def test_a_crossover_lies_between_the_sizes_that_were_measured(tmp_path: Path):
    (line,) = headlines(tmp_path, {1: 1.0, 8: 2.0, 64: 8.0, 512: 52.0}, {1: 4.0, 8: 4.0, 64: 4.0, 512: 4.5}, **QUIET)
    assert line == (
        "cnn: gpu is faster than cpu from a batch size between 8 and 64 on, up to 11.6 times as fast (at 512)."
    )


def test_up_to_is_the_largest_ratio_and_not_that_of_the_last_size(tmp_path: Path):
    (line,) = headlines(tmp_path, {8: 10.0, 64: 40.0, 512: 50.0}, {8: 5.0, 64: 4.0, 512: 25.0}, **QUIET)
    assert line == (
        "cnn: gpu is faster than cpu at every size that ran on both (8 to 512), up to 10.0 times as fast (at 64)."
    )


def test_a_size_at_which_no_difference_is_shown_is_not_counted(tmp_path: Path):
    (line,) = headlines(tmp_path, {8: 10.0, 64: 40.0}, {8: 9.99, 64: 4.0}, noise=0.02)
    assert line.startswith("cnn: gpu is faster than cpu at 64, ")


def test_no_difference_is_no_crossover(tmp_path: Path):
    (line,) = headlines(tmp_path, {8: 10.0, 64: 40.0}, {8: 10.0, 64: 40.0}, noise=0.05)
    assert line == "cnn: no difference between cpu and gpu is shown at any size that ran on both (8 to 64)."


def test_without_windows_no_device_is_called_faster(tmp_path: Path):
    (line,) = headlines(tmp_path, {8: 10.0, 64: 40.0}, {8: 1.0, 64: 4.0}, windows=1)
    assert "no difference" in line


def test_two_cards_are_compared_by_their_names(tmp_path: Path):
    write_measured(tmp_path, {8: 10.0, 64: 20.0}, device="cuda", device_name="T4", **QUIET)
    write_measured(tmp_path, {8: 5.0, 64: 5.0}, first=2, device="cuda", device_name="A100", **QUIET)
    (found,) = crossovers(find([tmp_path]).groups)
    assert found.headline == (
        "cnn: A100 is faster than T4 at every size that ran on both (8 to 64), up to 4.00 times as fast (at 64)."
    )
    assert found.as_dict()["devices"] == ["T4", "A100"]


def test_three_devices_are_told_apart_by_their_names(tmp_path: Path):
    write_measured(tmp_path, {8: 20.0}, **QUIET)
    for number, name in enumerate(("T4", "A100"), 1):
        write_measured(tmp_path, {8: 20.0 / 2**number}, first=number, device="cuda", device_name=name, **QUIET)
    said = [crossover.headline for crossover in crossovers(find([tmp_path]).groups)]
    at = "at the one size that ran on both (8)"
    assert said == [
        f"cnn: T4 is faster than A CPU {at}, 2.00 times as fast.",
        f"cnn: A100 is faster than A CPU {at}, 4.00 times as fast.",
        f"cnn: A100 is faster than T4 {at}, 2.00 times as fast.",
    ]


def test_models_are_not_compared(tmp_path: Path):
    write_measured(tmp_path, {8: 10.0})
    write_measured(tmp_path, {8: 10.0}, first=1, device="cuda", model="mlp")
    assert crossovers(find([tmp_path]).groups) == []


# --- several devices together --------------------------------------------------------------------------------------


def on(folder: Path, number: int, devices: int, ms: float, threads: int = 1, **facts: Any) -> None:
    options = {"trainer.devices": devices, "trainer.strategy": "ddp"}
    throughput = {"processes": devices, **({"communication_ms": 1.5} if devices > 1 else {})}
    hardware = {"torch_threads": threads}
    write_measured(
        folder, {64: ms}, first=number, options=options, throughput=throughput, hardware=hardware, **QUIET, **facts
    )  # fmt: skip


def test_efficiency_is_the_rate_over_that_of_as_many_single_devices(tmp_path: Path):
    on(tmp_path, 0, 1, 10.0)
    on(tmp_path, 1, 2, 12.5)
    runs = find([tmp_path]).runs
    found = scaling(runs)
    assert found["1"].value == pytest.approx(1.6, rel=0.01)
    (line,) = scaling_lines(runs, found)
    assert line.startswith("cnn: 2 devices with 64 samples each reach 1.60 times the samples/s of one (1.5")
    assert line.endswith("a scaling efficiency of 80 %; they wait for gradients in 12 % of a step.")


def test_of_runs_without_windows_the_interval_is_said_to_be_unknown(tmp_path: Path):
    on(tmp_path, 0, 1, 10.0, windows=1)
    on(tmp_path, 1, 2, 12.5, windows=1)
    runs = find([tmp_path]).runs
    assert "(its interval is unknown)" in scaling_lines(runs, scaling(runs))[0]


def test_fewer_threads_for_each_process_are_a_note(tmp_path: Path):
    on(tmp_path, 0, 1, 10.0, threads=2)
    on(tmp_path, 1, 2, 10.0, threads=1)
    runs = find([tmp_path]).runs
    assert scaling_notes(runs, scaling(runs)) == ["1: each process had 1 thread; the run on one device had 2"]
