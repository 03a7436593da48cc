"""The public face: the names that the packages offer, what importing them costs, and docs/api.md, which is true."""

import importlib
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import batchscope
from batchscope.callbacks.throughput import ThroughputMonitor

PAGE = (Path(__file__).parents[1] / "docs" / "api.md").read_text(encoding="utf-8")
CALLBACKS = "DeviceMonitor OperationProfiler ProgressBar"
CALLBACKS += " StopOnNonFinite StopWhenKnown ThroughputMonitor TrainCurves WaitUntilQuiet"
PUBLIC = {
    "batchscope": f"{CALLBACKS} load_model read_answer read_runs",
    "batchscope.models": "LSTMCell LSTMCellModel MLP RNNCell RNNCellModel SimpleCNN StackedLSTM StackedLSTMModel"
    " TorchvisionModel unroll",
    "batchscope.data": "Adding Augment CIFAR10 CopyMemory DataModule DataSpec Digits FashionMNIST MNIST"
    " SequentialMNIST TensorDataModule",
}


@pytest.mark.parametrize("package", PUBLIC)
def test_a_package_offers_exactly_these_names_and_the_page_has_a_row_for_each(package: str) -> None:
    module, names = importlib.import_module(package), PUBLIC[package].split()
    rows = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    assert module.__all__ == names
    assert set(names) <= set(dir(module)) & {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert [getattr(module, name).__name__ for name in names] == names
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'Throughput'"):
        _ = module.Throughput


def test_a_name_is_the_class_and_the_version_is_that_of_the_project() -> None:
    assert batchscope.ThroughputMonitor is ThroughputMonitor
    assert batchscope.__version__ == importlib.metadata.version("batchscope")


def test_importing_the_packages_and_reading_a_signature_imports_neither_torch_nor_lightning() -> None:
    read = "from batchscope.options.signatures import signature_of; signature_of('lightning.Trainer').parameters['devices']"
    found = "print({'torch', 'lightning', 'torchvision', 'numpy'} & set(sys.modules))"
    code = f"import sys, {', '.join(PUBLIC)}; {read}; {found}"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"


def test_the_examples_of_the_page_run_from_top_to_bottom(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(examples) == 4
    namespace: dict[str, Any] = {"__name__": "api"}
    for number, example in enumerate(examples, start=1):
        exec(compile(example, f"docs/api.md, example {number}", "exec"), namespace)  # noqa: S102 - our own documentation
    said = capsys.readouterr().out
    assert "Classifier · batch 32 · cpu" in said
    assert "\nstep    " in said
    found = namespace["monitor"].summary  # of 64 time steps a sample
    assert found["timesteps_per_sec"] == pytest.approx(64 * found["samples_per_sec"])
