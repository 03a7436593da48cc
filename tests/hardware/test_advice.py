"""Advice names options that exist and are not set already: for every bottleneck, in every setting."""

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
from batchscope.options.compose import check_command_line

each_kind = pytest.mark.parametrize(
    "kind", ("input", "transfer", "host", "memory", "compute", "elementwise", "communication", "unclear")
)
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
OWN = ALTERNATIVES | {
    "pipeline": ("memory", "device", "workers"),
    "num_workers": (None, 0, 2, 8),
    "backend": (None, "auto", "reference", "fused"),
    "channels_last": (None, True, False),
}
STRANGER = ALTERNATIVES | {
    "num_workers": (None, 0, 2, 4, 8),
    "pin_memory": (None, True, False),
    "is_stream": (False, True),
    "own": (False,),
}
CALLS = {"Trainer": Trainer, "DataLoader": DataLoader}


def advised(kind: str, alternatives: dict[str, tuple[Any, ...]]) -> Iterator[tuple[Setting, str]]:
    """Settings for which there is advice, with the change: of nothing that the machine has not, or gains nothing by."""
    draw = random.Random(kind)
    for _ in range(500):
        setting = Setting(**{name: draw.choice(values) for name, values in alternatives.items()})
        if found := advise(kind, setting):
            assert setting.faster_precision is not None or "precision" not in found.change
            assert setting.accelerators or "gpu" not in found.change
            assert setting.devices_here > setting.devices or "devices" not in found.change
            larger = re.search(r"batch_size=(\d+)", found.change)
            assert not larger or setting.train_samples is None or int(larger[1]) <= setting.train_samples
            yield setting, found.change


@cache
def is_accepted(change: str) -> bool:
    return bool(check_command_line(["model=stacked_lstm", *change.split()], multirun=False, run_dir="x"))


@each_kind
def test_an_own_run_is_advised_in_options_that_exist_and_differ_from_what_is_set(kind: str) -> None:
    for setting, change in advised(kind, OWN):
        assert is_accepted(change)
        option, _, value = change.partition("=")
        assert str(getattr(setting, option.rpartition(".")[2], None)).lower() != value, f"{change} {setting}"


@each_kind
def test_another_project_is_advised_in_arguments_of_its_trainer_and_its_loader(kind: str) -> None:
    for setting, change in advised(kind, STRANGER):
        found = re.fullmatch(r"(Trainer|DataLoader)\((\w+)=(.+)\)", change)
        assert found, change
        owner, argument, value = found.groups()
        assert argument in inspect.signature(CALLS[owner]).parameters
        assert repr(getattr(setting, argument, None)) != value, f"{change} {setting}"
        assert argument != "num_workers" or not setting.is_stream or value == "1"


DIAGNOSE = "experiment=diagnose"
LARGE_OPTIMIZER = Setting("cuda", 64, train_samples=128, optimizer_traffic=True, faster_precision="bf16-mixed")
CHANGES = {
    "input: workers": ("input", Setting(pipeline="workers", num_workers=0, cores=4), "data.pipeline=memory"),
    "input: nothing is left to change": ("input", Setting("cpu", 50, pipeline="memory", train_samples=50), DIAGNOSE),
    "input: in another project": ("input", Setting(own=False, num_workers=0, cores=4), "DataLoader(num_workers=2)"),
    "input: each worker would read a whole stream": (
        "input", Setting(own=False, num_workers=0, cores=4, is_stream=True), "DataLoader(num_workers=1)",
    ),
    "compute: in another project": (
        "compute", Setting("cuda", own=False, faster_precision="bf16-mixed"), "Trainer(precision='bf16-mixed')",
    ),
    "compute: TF32, before another precision": (
        "compute", Setting("cuda", tf32_is_faster=True, faster_precision="bf16-mixed"),
        'torch.set_float32_matmul_precision("high")',
    ),
    "compute: more devices": ("compute", Setting("cuda", 64, devices=1, devices_here=4), "trainer.devices=4"),
    "compute: in a diagnosis": ("compute", Setting(experiment="diagnose"), None),
    "communication: in another project": (
        "communication", Setting(own=False, devices=2), "Trainer(accumulate_grad_batches=2)",
    ),
    "transfer: unpinned": (
        "transfer", Setting("cuda", own=False, pin_memory=False, num_workers=2), "DataLoader(pin_memory=True)",
    ),
    "transfer: the data are on the device": ("transfer", Setting("cuda", pipeline="device"), DIAGNOSE),
    "host: a larger batch": ("host", Setting("cpu", 8, train_samples=50_000), "data.batch_size=32"),
    "memory: activations move with every sample": ("memory", Setting("cuda", 64), DIAGNOSE),
    "memory: an optimizer's is once a step, and the set bounds the batch": (
        "memory", LARGE_OPTIMIZER, "data.batch_size=128",
    ),
    "elementwise: no precision was measured for it": ("elementwise", Setting(faster_precision="bf16-mixed"), DIAGNOSE),
    "unclear": ("unclear", Setting(), DIAGNOSE),
    "a bottleneck that is not known": ("magic", Setting(), None),
    "a hook that prepares the batch": (
        "input", Setting(num_workers=0, cores=4, preparing="transfer_batch_to_device"),
        "move the work of transfer_batch_to_device into the dataset",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_the_change_that_helps_best(name: str) -> None:
    kind, setting, change = CHANGES[name]
    found = advise(kind, setting)
    assert found == change or found.change == change


def test_what_a_change_does_is_said() -> None:
    assert advise("host", Setting("cpu", 8)) == ("data.batch_size=32", "launches as many operations for more samples")
