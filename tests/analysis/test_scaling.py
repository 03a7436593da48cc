"""Runs on several devices, compared with runs on one that differ in nothing else."""

import pytest

from batchscope.analysis.read import find
from batchscope.analysis.report import write_report
from batchscope.analysis.scaling import doubts, efficiencies, headlines
from batchscope.analysis.text_table import to_text
from tests.support.synthetic_runs import write_run


def on(folder, devices, rate, *, threads=1, batch_size=64, seed=0, communication_ms=None):
    facts = {"samples_per_sec": rate}
    if devices > 1:
        facts |= {"processes": devices}
    if communication_ms is not None:
        facts |= {"communication_ms": communication_ms}
    options = {"trainer.devices": devices, "trainer.strategy": "ddp"}
    hardware = {"torch_threads": threads}
    write_run(folder, batch_size, 10.0, options=options, throughput=facts, hardware=hardware, seed=seed)


def test_efficiency_is_the_rate_over_that_of_as_many_single_devices(tmp_path):
    on(tmp_path / "0", 1, 1000)
    on(tmp_path / "1", 2, 1700, communication_ms=1.5)
    on(tmp_path / "2", 4, 3000)
    runs = find([tmp_path]).runs
    assert efficiencies(runs) == pytest.approx({"1": 0.85, "2": 0.75})
    assert runs[1].values["communication_share"] == pytest.approx(0.15)
    assert headlines(runs)[0] == (
        "cnn: 2 devices with 64 samples each reach 1.70× the samples/s of one, a scaling efficiency of 85 %; "
        "they wait for gradients in 15 % of a step."
    )


def test_only_runs_with_the_same_batch_for_each_device_are_compared(tmp_path):
    on(tmp_path / "0", 1, 1000, batch_size=64)
    on(tmp_path / "1", 2, 1700, batch_size=32)
    assert efficiencies(find([tmp_path]).runs) == {}


def test_of_repeated_runs_on_one_device_the_median_counts(tmp_path):
    for seed, rate in enumerate((900, 1000, 5000)):
        on(tmp_path / str(seed), 1, rate, seed=seed)
    on(tmp_path / "3", 2, 1800)
    assert efficiencies(find([tmp_path]).runs) == pytest.approx({"3": 0.9})


def test_fewer_threads_for_each_process_are_said(tmp_path):
    on(tmp_path / "0", 1, 1000, threads=2)
    on(tmp_path / "1", 2, 1000, threads=1)
    assert doubts(find([tmp_path]).runs) == ["1: each process had 1 thread; the run on one device had 2"]


def test_the_report_has_it_as_a_line_and_two_columns(tmp_path):
    on(tmp_path / "0", 1, 1000)
    on(tmp_path / "1", 2, 1700, communication_ms=1.5)
    report = write_report([tmp_path], tmp_path / "report")
    assert "2 devices with 64 samples each reach 1.70×" in report.text
    header = to_text(find([tmp_path]), 300).splitlines()[0]
    assert "scaling efficiency %" in header and "comm %" in header
    assert "scaling_efficiency,communication_share" in (tmp_path / "report/sweep.csv").read_text()
