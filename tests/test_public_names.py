"""The public face: which names the packages offer, and that importing them costs nothing until one is used."""

import importlib
import importlib.metadata
import subprocess
import sys

import pytest

CALLBACKS = [
    "DeviceMonitor",
    "MemoryMonitor",
    "NoiseScaleMonitor",
    "OperationProfiler",
    "PredictionImages",
    "ProgressBar",
    "StopOnNonFinite",
    "StopWhenKnown",
    "ThroughputMonitor",
    "TrainCurves",
]
PUBLIC = {
    "batchscope": [*CALLBACKS, "load_model"],
    "batchscope.callbacks": CALLBACKS,
    "batchscope.models": [
        "LSTMCell",
        "LSTMCellModel",
        "MLP",
        "RNNCell",
        "RNNCellModel",
        "SimpleCNN",
        "StackedLSTM",
        "StackedLSTMModel",
        "TorchvisionModel",
        "torch_state_dict",
        "unroll",
    ],
    "batchscope.data": [
        "Adding",
        "Augment",
        "CIFAR10",
        "CopyMemory",
        "DataModule",
        "DataSpec",
        "Digits",
        "FashionMNIST",
        "MNIST",
        "SequentialMNIST",
        "TensorDataModule",
    ],
}


@pytest.mark.parametrize("package", PUBLIC)
def test_a_package_offers_exactly_these_names(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__all__ == PUBLIC[package]
    assert set(PUBLIC[package]) <= set(dir(module))
    for name in PUBLIC[package]:
        assert getattr(module, name).__name__ == name


@pytest.mark.parametrize("package", PUBLIC)
def test_a_name_that_is_not_there_is_an_attribute_error(package: str) -> None:
    module = importlib.import_module(package)
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'Throughput'"):
        _ = module.Throughput


def test_both_ways_lead_to_the_same_class() -> None:
    import batchscope
    from batchscope.callbacks.throughput import ThroughputMonitor

    assert batchscope.ThroughputMonitor is batchscope.callbacks.ThroughputMonitor is ThroughputMonitor


def test_importing_the_packages_imports_neither_torch_nor_lightning() -> None:
    code = f"import sys, {', '.join(PUBLIC)}; print({{'torch', 'lightning', 'numpy'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_version_is_that_of_the_project() -> None:
    import batchscope

    assert batchscope.__version__ == importlib.metadata.version("batchscope")
