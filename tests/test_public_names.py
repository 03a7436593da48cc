"""The public names of the packages, the cost of importing them, and the correctness of docs/api.md."""

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
CALLBACKS += " StopOnNonFinite StopWhenKnown ThroughputMonitor TrainCurves UserError WaitUntilQuiet"
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


SIGNATURE = (
    "from batchscope.options.signatures import signature_of; signature_of('lightning.Trainer').parameters['devices']"
)
# The statements of a process in order, and the modules that are not imported by then.
LIGHT = {
    "commands": {
        f"import {', '.join(PUBLIC)}": "torch lightning torchvision numpy",
        SIGNATURE: "torch lightning torchvision numpy",
        "import batchscope.attached; batchscope.attached.callbacks()": "torch lightning",  # of every script with a Trainer
        "import batchscope.cli.choose": "torch lightning matplotlib",
    },
    "reports": {
        "import batchscope.analysis.write, batchscope.cli.report": "torch lightning hydra",
        "import batchscope.choice.pictures": "torch lightning",
    },
}


@pytest.mark.parametrize("process", LIGHT)
def test_what_needs_no_torch_imports_none(process: str) -> None:
    lines = [f"{code}; print({{*{heavy.split()}}} & {{*sys.modules}})" for code, heavy in LIGHT[process].items()]
    program = "\n".join(["import sys", *lines])
    assert subprocess.check_output([sys.executable, "-c", program], text=True).splitlines() == ["set()"] * len(lines)


def test_the_examples_of_the_page_run_from_top_to_bottom(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(examples) == 4
    namespace: dict[str, Any] = {"__name__": "api"}
    for number, example in enumerate(examples, start=1):
        exec(compile(example, f"docs/api.md, example {number}", "exec"), namespace)  # noqa: S102 - our own documentation
    output = capsys.readouterr().out
    assert "Classifier · batch 32 · cpu" in output
    assert "\nstep    " in output
    summary = namespace["monitor"].summary  # of 64 time steps a sample
    assert summary["timesteps_per_sec"] == pytest.approx(64 * summary["samples_per_sec"])
