"""Advice names options that exist and are not set already: for every bottleneck, in every setting."""

import ast
import inspect
import random
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from lightning import Trainer
from torch.utils.data import DataLoader

from batchscope.hardware.advice import Setting, advise
from batchscope.options.check import check_config
from batchscope.options.compose import apply_overrides, check_command_line
from batchscope.options.tree import flatten

KINDS = ("input", "transfer", "host", "memory", "compute", "elementwise", "communication", "unclear")
ALTERNATIVES: dict[str, tuple[Any, ...]] = {
    "device": ("cpu", "cuda", "mps"),
    "batch_size": (None, 8, 1000),
    "accumulate_grad_batches": (1, 2, 64),
    "train_samples": (None, 1000, 50_000),
    "faster_precision": (None, "bf16-mixed"),
    "accelerators": ((), ("gpu",)),
    "devices": (1, 4),
    "devices_here": (1, 4),
    "cores": (None, 1, 4),
    "optimizer_traffic": (False, True),
}
# What only a run by this project's own options has, and what only another project's loader has.
OWN: dict[str, tuple[Any, ...]] = {
    "pipeline": ("memory", "device", "workers"),
    "num_workers": (None, 0, 2, 8),
    "backend": (None, "auto", "reference", "fused"),
    "channels_last": (None, True, False),
}
STRANGER: dict[str, tuple[Any, ...]] = {
    "num_workers": (None, 0, 2, 4, 8),
    "pin_memory": (None, True, False),
    "is_stream": (False, True),
    "own": (False,),
}


def settings(kind: str, only: dict[str, tuple[Any, ...]]) -> Iterator[Setting]:
    """Settings of all kinds, drawn once."""
    draw = random.Random(kind)
    for _ in range(500):
        yield Setting(**{name: draw.choice(values) for name, values in (ALTERNATIVES | only).items()})


def advised(kind: str, only: dict[str, tuple[Any, ...]]) -> Iterator[tuple[Setting, str]]:
    """The settings for which there is advice, with the change: of nothing that the machine has not, or gains nothing by."""
    for setting in settings(kind, only):
        if found := advise(kind, setting):
            assert setting.faster_precision is not None or "precision" not in found.change
            assert setting.accelerators or "gpu" not in found.change
            assert setting.devices_here > setting.devices or "devices" not in found.change
            yield setting, found.change


@cache
def config_of_a_run() -> dict[str, Any]:
    (config,) = check_command_line(["model=stacked_lstm"], multirun=False, run_dir="x")
    return config


@cache
def accepts(option: str, value: str) -> bool:
    """Whether a command line takes it: it is in the composed configuration, and the value is allowed."""
    if option == "experiment":
        (config,) = check_command_line([f"experiment={value}"], multirun=False, run_dir="x")
        return bool(config["search"])
    assert option in dict(flatten(config_of_a_run()))
    return bool(check_config(apply_overrides(config_of_a_run(), [f"{option}={value}"])))


OPTION = re.compile(r"(?<![\w.(])((?:[a-z_]+\.)?[a-z_]+)=([\w-]+)")
CALL = re.compile(r"(?:Trainer|DataLoader)\((?:[^()]|\(\))*\)")
CALLS = {"Trainer": Trainer, "DataLoader": DataLoader}


def arguments(text: str) -> Iterator[tuple[str, str, str]]:
    """Of each call in a sentence its name, and the name and the value of each argument."""
    for found in CALL.findall(text):
        call = ast.parse(found, mode="eval").body
        yield from ((call.func.id, keyword.arg, ast.unparse(keyword.value)) for keyword in call.keywords)


@pytest.mark.parametrize("kind", KINDS)
def test_an_own_run_is_advised_in_options_that_exist_and_differ_from_what_is_set(kind: str) -> None:
    seen = set()
    for setting, text in advised(kind, OWN):
        found = OPTION.findall(text)
        assert " ".join(f"{option}={value}" for option, value in found) == text  # bare options
        changed = []
        for option, value in found:
            assert accepts(option, value)
            now = getattr(setting, option.rpartition(".")[2], None)
            changed.append(str(now).lower() != value)
            if option == "data.batch_size":
                assert setting.train_samples is None or int(value) <= setting.train_samples
        assert any(changed) and all(changed), f"{text} {setting}"
        seen |= {option for option, _ in found}
    assert seen


@pytest.mark.parametrize("kind", KINDS)
def test_another_project_is_advised_in_arguments_of_its_trainer_and_its_loader(kind: str) -> None:
    seen = set()
    for setting, text in advised(kind, STRANGER):
        found = list(arguments(text))
        assert found, text
        assert not OPTION.search(CALL.sub("", text)) and "pipeline" not in text and "data." not in text, text
        for owner, argument, value in found:
            assert argument in inspect.signature(CALLS[owner]).parameters
            assert repr(getattr(setting, argument, None)) != value, f"{text} {setting}"
            if argument == "batch_size":
                assert setting.train_samples is None or int(value) <= setting.train_samples
            if argument == "num_workers":
                assert not setting.is_stream or value == "1"
        seen |= {argument for _, argument, _ in found}
    assert seen


DIAGNOSE = ("experiment=diagnose", "tries the changes that may help, one at a time")
PROFILE = (
    "Trainer(callbacks=[ThroughputMonitor(), OperationProfiler()])",
    "shows the operations and modules that take the time",
)
MORE_WORKERS = "prepares more batches at the same time"
CASES: dict[str, tuple[str, Setting, tuple[str, str] | None]] = {
    "input: workers": (
        "input",
        Setting(pipeline="workers", num_workers=0, cores=4),
        ("data.pipeline=memory", "takes each batch from tensors in memory at once"),
    ),
    "input: nothing is left to change": (
        "input",
        Setting(pipeline="memory", batch_size=50, train_samples=50),
        DIAGNOSE,
    ),
    "input: another project's loader": (
        "input",
        Setting(own=False, num_workers=0, cores=4),
        ("DataLoader(num_workers=2)", MORE_WORKERS),
    ),
    "input: each worker would read a whole stream": (
        "input",
        Setting(own=False, num_workers=0, cores=4, is_stream=True),
        ("DataLoader(num_workers=1)", MORE_WORKERS),
    ),
    "compute: another precision, in another project": (
        "compute",
        Setting(own=False, device="cuda", faster_precision="bf16-mixed"),
        ("Trainer(precision='bf16-mixed')", "was measured to compute faster here"),
    ),
    "compute: TF32, before another precision": (
        "compute",
        Setting(device="cuda", tf32_is_faster=True, faster_precision="bf16-mixed"),
        (
            'torch.set_float32_matmul_precision("high")',
            "computes matrix products in TF32, which was measured to be faster here",
        ),
    ),
    "communication: in another project": (
        "communication",
        Setting(own=False, devices=2),
        ("Trainer(accumulate_grad_batches=2)", "exchanges gradients half as often"),
    ),
    "transfer: unpinned": (
        "transfer",
        Setting(own=False, device="cuda", pin_memory=False, num_workers=2),
        ("DataLoader(pin_memory=True)", "copies batches from page-locked memory"),
    ),
    "transfer: the data are on the device": ("transfer", Setting(device="cuda", pipeline="device"), DIAGNOSE),
    "host: a larger batch": (
        "host",
        Setting(batch_size=8, train_samples=50_000, pipeline="memory"),
        ("data.batch_size=32", "launches as many operations for more samples"),
    ),
    "memory: activations move with every sample": ("memory", Setting(device="cuda", batch_size=64), DIAGNOSE),
    "memory: an optimizer's traffic is once a step, and the training set bounds the batch": (
        "memory",
        Setting(device="cuda", batch_size=64, train_samples=128, optimizer_traffic=True, faster_precision="bf16-mixed"),
        ("data.batch_size=128", "moves the optimizer's bytes less often for the same samples"),
    ),
    "compute: more devices": (
        "compute",
        Setting(device="cuda", devices=1, devices_here=4, batch_size=64),
        ("trainer.devices=4", "divides the arithmetic"),
    ),
    "compute: in a diagnosis": ("compute", Setting(experiment="diagnose"), None),
    "elementwise: no precision was measured for it": ("elementwise", Setting(faster_precision="bf16-mixed"), DIAGNOSE),
    "unclear": ("unclear", Setting(), DIAGNOSE),
    "a bottleneck that is not known": ("magic", Setting(), None),
}


@pytest.mark.parametrize("name", CASES)
def test_the_best_change_and_what_it_does(name: str) -> None:
    kind, setting, expected = CASES[name]
    assert advise(kind, setting) == expected


def test_a_hook_that_prepares_the_batch_belongs_into_the_dataset() -> None:
    found = advise("input", Setting(num_workers=0, cores=4, preparing="on_after_batch_transfer"))
    assert found == (
        "move the work of on_after_batch_transfer into the dataset",
        "where the loader's workers do it while the model trains",
    )
