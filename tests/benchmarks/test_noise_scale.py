"""The benchmark of the noise scale, in small: estimates against the truth over the whole set."""

import importlib.util
import re
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location(
    "benchmark_of_noise_scale", Path(__file__).resolve().parents[2] / "benchmarks" / "noise_scale.py"
)
benchmark = importlib.util.module_from_spec(_spec)


@pytest.mark.slow
def test_every_estimate_is_near_the_truth(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(_spec.origin).parent)
    _spec.loader.exec_module(benchmark)
    benchmark.main(["--smallest"])
    biases = re.findall(r"([+-][\d.]+) %", capsys.readouterr().out)
    assert len(biases) == 3
    assert all(abs(float(bias)) < 20 for bias in biases)
