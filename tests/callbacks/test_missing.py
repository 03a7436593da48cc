"""A summary without a bottleneck, FLOP/s or MFU says why, and a complete one misses nothing."""

import warnings
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from batchscope.callbacks import _measurement
from batchscope.callbacks._run_words import details
from batchscope.callbacks.throughput import ThroughputMonitor
from batchscope.hardware.calibration import Calibration
from tests.callbacks.support import Unseen, World, stranger
from tests.support.third_party_modules import Stranger, loader, train

pytestmark = pytest.mark.usefixtures("alone")
MEASURED = Calibration("cpu", "a processor", None, torch.__version__, 2, {"fp32": 1e9})


class Doing(Stranger):
    """A module whose step is a function of the module, the batch and the number of the batch."""

    def __init__(self, step) -> None:
        super().__init__()
        self.step = step

    def training_step(self, batch, batch_idx: int):
        return self.step(self, batch, batch_idx)


class Filling(Stranger):
    """A module whose first steps have a forward pass and no loss, as where a buffer is filled first."""

    def training_step(self, batch, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return loss if batch_idx >= 4 else None


def growing(after: int) -> Stranger:
    """A module whose steps compute 30 products of 384×384 from the update `after` on, and hardly anything before."""
    x = torch.ones(384, 384)
    return stranger(training_step=lambda module: [x @ x for _ in range(30 if module.global_step >= after else 0)])


def profiled() -> Stranger:
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    return stranger(on_fit_start=lambda _: profile.__enter__(), on_fit_end=lambda _: profile.__exit__(None, None, None))


class Row(NamedTuple):
    missing: dict[str, str]
    module: Stranger = Stranger()
    fit: dict[str, Any] = {}
    monitor: dict[str, Any] = {}
    calibration: Calibration | None = MEASURED
    clock: World | None = None


def no_flops(reason: str) -> dict[str, str]:
    return {"flops_per_sec": reason, "mfu": reason}


UNSEEN = (
    "Lightning has counted no optimizer step: no batch was trained, or a module that optimises by hand does not step the "
    "optimizers of self.optimizers()"
)
ODD = "no step counts: each was profiled or recorded, the clock has jumped, or another rank has stopped measuring"
NO_TENSORS = (
    "no tensor was found in the batch, which is searched through tuples, lists and dicts; batch_size_fn of "
    "ThroughputMonitor (callbacks.throughput.batch_size_fn) says how many samples it has"
)
DISTURBED = Calibration("cpu", "a processor", None, "2", 2, {"fp32": 1e9}, disturbed="others were busy")
TEXTS = DataLoader([f"text {n}" for n in range(8)], batch_size=2, collate_fn=list)
ROWS = {
    "nothing": Row({}),
    "updates that Lightning does not count": Row({"bottleneck": UNSEEN}, Unseen()),
    "no batch": Row({"bottleneck": "no batch was trained"}, fit={"limit_train_batches": 0}),
    "only warm-up": Row({"bottleneck": "of 5 updates none came after the warm-up of 5"}, fit={"max_steps": 5}),
    "only recorded steps": Row(
        {"bottleneck": "of 4 updates none came after the warm-up of 4"},
        fit={"max_steps": 4},
        monitor={"warmup_steps": 1},
    ),
    "a clock that stands still": Row({"bottleneck": ODD}, clock=World()),
    "steps that the user profiles": Row({"bottleneck": ODD}, profiled()),
    "a peak that was not measured": Row(
        {"mfu": "the device's peak at precision 32-true was not measured"}, calibration=None
    ),
    "a peak at another precision": Row(
        {"mfu": "the device's peak at precision 64-true was not measured"},
        Doing(lambda module, batch, _: module.layer(batch[0].double()).mean()),
        fit={"precision": "64-true"},
    ),
    "a disturbed peak": Row({"mfu": "others were busy"}, calibration=DISTURBED),
    "an operation without a formula": Row(
        no_flops("the FLOPs of aten._fft_r2c.default are not known"),
        Doing(lambda module, batch, _: torch.fft.rfft(module.layer(batch[0])).abs().mean()),
    ),
    "different FLOPs": Row(
        no_flops("the recorded updates take different numbers of FLOPs a sample"),
        Doing(lambda module, batch, number: module.layer(batch[0].repeat(1 + number, 1)).square().mean()),
    ),
    "updates without a backward pass first": Row(
        no_flops("no backward pass ran in the updates 2 to 4"),
        Filling(),
        fit={"max_epochs": 1, "data": loader(64)},
    ),
    "one of three updates without a backward pass": Row(
        no_flops("the recorded updates take different numbers of FLOPs a sample"),
        Doing(lambda module, batch, number: None if number == 2 else module.layer(batch[0]).mean()),
    ),
    "steps that change later": Row(
        no_flops("the steps have changed since their FLOPs were recorded"), growing(12), fit={"max_steps": 20}
    ),
    "recording that is not wanted": Row(no_flops("record_operations=False"), monitor={"record_operations": False}),
    "batches without tensors": Row(
        no_flops(NO_TENSORS) | {"samples_per_sec": NO_TENSORS},
        Doing(lambda module, batch, _: module.layer(torch.ones(len(batch), 4)).mean()),
        fit={"data": TEXTS},
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ROWS)
def test_what_is_missing_has_its_reason(name: str, monkeypatch, calibrated, capsys) -> None:
    row = ROWS[name]
    calibrated[0] = row.calibration
    if row.clock is not None:
        monkeypatch.setattr(_measurement, "clock_for", lambda device: row.clock)
    monitor = ThroughputMonitor(**{"calibrate": False, **row.monitor})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(row.module, monitor, **row.fit)
    summary, output = monitor.summary, " ".join(capsys.readouterr().out.split())
    assert summary.get("missing", {}) == row.missing
    reasons = {f"no {key}: {reason}" for key, reason in row.missing.items()}
    assert {line for line in details(summary) if line.startswith("no ")} == reasons
    refusal = "The FLOPs of Doing cannot be counted, so there is no FLOP/s and no MFU: "
    is_warned = isinstance(row.module, Doing) and "flops_per_sec" in row.missing
    assert any(refusal in str(warning.message) for warning in caught) == is_warned
    if "bottleneck" in row.missing:
        assert list(summary) == ["missing"] and monitor.step_times() is None
        # Without a batch Lightning does not start the fit.
        assert f"speed unknown: {row.missing['bottleneck']}" in output or "no batch" in name
    else:
        assert summary["step_ms_median"] > 0 and "bottleneck" in summary
        assert {"flops_per_sec", "mfu", "samples_per_sec"} - summary.keys() == row.missing.keys()


@pytest.mark.filterwarnings("error:The FLOPs of")
def test_flops_that_cannot_be_counted_end_no_measurement_where_warnings_are_errors() -> None:
    row = ROWS["different FLOPs"]
    train(row.module, monitor := ThroughputMonitor(calibrate=False), **row.fit)
    assert monitor.failure is None and monitor.summary["missing"] == row.missing


def test_a_verdict_on_steps_that_changed_is_unclear() -> None:
    train(growing(10), monitor := ThroughputMonitor(calibrate=False), max_steps=20)
    bottleneck = monitor.summary["bottleneck"]
    assert bottleneck["kind"] == "unclear"
    assert "because the steps changed: without waits a batch takes" in bottleneck["evidence"]
