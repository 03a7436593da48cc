"""Advice names options that exist and are not set already: for every bottleneck, in every setting."""

import inspect
import random
import re
from dataclasses import replace
from functools import cache

import pytest
from lightning import Trainer
from torch.utils.data import DataLoader

from batchscope.hardware.advice import Setting, advise
from batchscope.options.compose import check_command_line

ALTERNATIVES = {
    "own": (True, False),
    "device": ("cpu", "cuda", "mps"),
    "batch_size": (None, 8, 1000),
    "train_samples": (None, 1000, 50_000),
    "faster_precision": (None, "bf16-mixed"),
    "has_gpu": (False, True),
    "devices": (1, 4),
    "cores": (1, 4),
    "pipeline": (None, "memory", "device", "workers"),
    "num_workers": (None, 0, 2, 4, 8),
    "pin_memory": (None, True, False),
    "backend": (None, "auto", "reference", "fused"),
    "channels_last": (None, True, False),
    "profiled": (False, True),
}


@cache
def is_accepted(change: str) -> bool:
    data = ["data.pipeline=workers"] if "num_workers" in change else []  # the only pipeline that takes it
    return bool(check_command_line(["model=stacked_lstm", *data, *change.split()], multirun=False))


@pytest.mark.parametrize(
    "kind", ("input", "transfer", "host", "memory", "compute", "elementwise", "communication", "unclear")
)
def test_advice_is_an_option_or_an_argument_that_exists_differs_from_what_is_set_and_gains_something(kind):
    draw = random.Random(kind)
    for _ in range(400):
        setting = Setting(**{name: draw.choice(values) for name, values in ALTERNATIVES.items()})
        ours = dict.fromkeys(("pipeline", "backend", "channels_last"))
        setting = replace(setting, **({"pin_memory": None} if setting.own else ours))
        if (advice := advise(kind, setting)) is None:
            shows_nothing = (
                setting.profiled or setting.device == "mps" or kind in ("input", "transfer", "communication")
            )
            assert not setting.own and shows_nothing
            continue
        change, _ = advice
        if setting.own:
            assert is_accepted(change)
            option, value = change.split("=")
        else:
            owner, option, value = re.fullmatch(r"(Trainer|DataLoader)\((\w+)=(.+)\)", change).groups()
            assert option in inspect.signature(Trainer if owner == "Trainer" else DataLoader).parameters
        assert str(getattr(setting, option.rpartition(".")[2], None)).lower() != value.strip("'"), (change, setting)
        assert setting.faster_precision is not None or "precision" not in change
        assert setting.has_gpu or "gpu" not in change
        assert "batch_size" not in change or setting.train_samples is None or int(value) <= setting.train_samples


DIAGNOSE = "experiment=diagnose"
CHANGES = {
    "input: workers": ("input", Setting(pipeline="workers", num_workers=0, cores=4), "data.pipeline=memory"),
    "input: nothing is left to change": ("input", Setting("cpu", 50, pipeline="memory", train_samples=50), DIAGNOSE),
    "compute: in another project": (
        "compute", Setting("cuda", own=False, faster_precision="bf16-mixed"), "Trainer(precision='bf16-mixed')",
    ),
    "compute: a GPU": ("compute", Setting("cpu", 64, has_gpu=True), "trainer.accelerator=gpu"),
    "compute: in a diagnosis": ("compute", Setting(diagnosed=True), None),
    "communication": ("communication", Setting(own=False, batch_size=8, devices=2), "DataLoader(batch_size=32)"),
    "transfer: unpinned": (
        "transfer", Setting("cuda", own=False, pin_memory=False, num_workers=2), "DataLoader(pin_memory=True)",
    ),
    "transfer: the data are on the device": ("transfer", Setting("cuda", pipeline="device"), DIAGNOSE),
    "host: a larger batch": ("host", Setting("cpu", 8, train_samples=50_000), "data.batch_size=32"),
    "memory: activations move with every sample": ("memory", Setting("cuda", 64), DIAGNOSE),
    "host: the set bounds the batch": ("host", Setting("cuda", 64, train_samples=128), DIAGNOSE),
    "elementwise: no precision was measured for it": ("elementwise", Setting(faster_precision="bf16-mixed"), DIAGNOSE),
    "host: OperationProfiler is set": ("host", Setting(own=False, profiled=True), None),
    "input: no table of operations shows a loader": ("input", Setting(own=False), None),
    "transfer: nor a copy": ("transfer", Setting(own=False), None),
    "communication: nor an exchange": ("communication", Setting(own=False), None),
    "host: on MPS operations have no time": ("host", Setting("mps", own=False), None),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_the_change_that_helps_best(name):
    kind, setting, change = CHANGES[name]
    advice = advise(kind, setting)
    assert (advice and advice[0]) == change


@pytest.mark.parametrize("kind", ["host", "communication"])
def test_a_larger_batch_is_advised_if_it_fits(kind):
    change, effect = advise(kind, Setting("cuda", 128, devices=4))
    assert change == "data.batch_size=512" and effect.endswith("if it fits in memory")
