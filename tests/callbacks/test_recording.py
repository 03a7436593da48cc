"""A fit records the operations of three updates: which updates, their FLOPs, their record, and where none is recorded."""

import time
from collections import UserDict
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from batchscope.callbacks import _measured
from batchscope.callbacks._measured import Measured
from batchscope.callbacks._table import WARMUP
from batchscope.hardware import operations
from batchscope.hardware.advice import Setting
from batchscope.hardware.calibration import Calibration
from batchscope.records.operations import OperationRow
from tests.callbacks.support import monitoring, stranger
from tests.support.third_party_modules import Stranger, loader, train

BATCH, STEPS = 4, 12
FLOPS = 3 * (2 * 4 * 16 + 2 * 16 * 1) - 2 * 4 * 16  # per sample
pytestmark = pytest.mark.usefixtures("alone")


def fit(compiled: bool = False, steps: int = STEPS, save=None, **options):
    """Train two layers, which may be compiled, and save a checkpoint at the end."""
    module, monitor = stranger(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1)), monitoring(record_operations=True)
    if compiled:
        module.layer.compile(backend="eager")
    trainer = train(module, monitor, data=loader(BATCH * 40, BATCH), max_steps=steps, **options)
    if save is not None:
        trainer.save_checkpoint(save)
    return monitor


@pytest.fixture
def noted_names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the operations that the recorder notes, in order; nothing public says in which updates it notes."""
    names = []
    note = operations.OperationRecorder._note

    def note_name(self, func, *args) -> None:
        names.append(func.overloadpacket.__name__)
        note(self, func, *args)

    monkeypatch.setattr(operations.OperationRecorder, "_note", note_name)
    return names


def test_updates_that_may_be_recorded_are_warm_up_however_short_it_is() -> None:
    module, monitor = stranger(nn.Linear(4, 1)), monitoring(record_operations=True, warmup_steps=0)
    train(module, monitor, data=loader(BATCH * 40, BATCH), max_steps=STEPS)
    assert ((monitor.table.rows["flags"] & WARMUP) > 0).tolist() == [True] * 4 + [False] * (STEPS - 4)
    assert monitor.summary["updates"] == STEPS - 4


@pytest.mark.parametrize("accumulated", [1, 3])
def test_every_batch_of_updates_2_to_4_is_recorded_and_gives_the_flops(accumulated: int, noted_names) -> None:
    monitor = fit(accumulate_grad_batches=accumulated)
    assert noted_names.count("addmm") == 3 * accumulated * 2
    assert monitor.summary["updates"] == STEPS - 5  # the warm-up holds the recorded ones
    assert monitor.summary["flops_per_sample"] == FLOPS
    assert monitor.operations.batches == pytest.approx(accumulated, abs=0.01)


@pytest.mark.parametrize("kind", [tuple, UserDict])  # the tokenizers of transformers make the second
def test_a_batch_is_no_part_of_what_autograd_saves_whatever_holds_its_tensors(kind: Any) -> None:
    x, y = torch.randn(40 * BATCH, 4), torch.randn(40 * BATCH, 1)
    batches = [
        (x, y) if kind is tuple else UserDict(x=x, y=y) for x, y in zip(x.split(BATCH), y.split(BATCH), strict=True)
    ]

    class Opening(Stranger):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch if kind is tuple else batch.values(), batch_idx)

    monitor = monitoring(record_operations=True)
    train(
        Opening(), monitor, data=DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch), max_steps=STEPS
    )
    assert monitor.memory()["parts_bytes"]["saved"] == 4 * BATCH  # the outputs that the loss needs


def test_an_operation_that_cannot_be_noted_ends_the_recording_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations.OperationRecorder, "_note", lambda *_: 1 / 0)
    summary = fit().summary
    assert summary["updates"] == STEPS - 5
    assert "ZeroDivisionError" in summary["missing"]["flops_per_sec"]


def test_a_compiled_training_runs_three_updates_uncompiled_also_after_a_stop(noted_names, tmp_path, request) -> None:
    request.addfinalizer(torch._dynamo.reset)
    summary = fit(compiled=True).summary
    assert summary["flops_per_sample"] == FLOPS
    for stopped_at, recorded in ((1, 3), (2, 2), (6, 0)):  # updates 2 to 4 of the training are recorded, not of the fit
        fit(steps=stopped_at, save=tmp_path / "stopped.ckpt")
        noted_names.clear()
        summary = fit(compiled=True, ckpt_path=tmp_path / "stopped.ckpt").summary
        assert noted_names.count("addmm") == 2 * recorded
        assert ("flops_per_sample" in summary) == bool(recorded)
    assert summary["missing"]["mfu"].startswith("the training was resumed after update 4")


def test_what_another_fit_of_the_process_has_compiled_changes_nothing_for_a_plain_one(request) -> None:
    request.addfinalizer(torch._dynamo.reset)
    fit(compiled=True)
    monitor = monitoring(record_operations=True)
    train(stranger(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1)), monitor, data=loader(48, 4), max_epochs=1)
    assert (monitor.summary["flops_per_sample"], "saved" in monitor.memory()["parts_bytes"]) == (FLOPS, True)


@pytest.mark.parametrize("is_attribute", [True, False])
def test_a_function_that_torch_compiles_runs_uncompiled_as_an_attribute_and_else_nothing_is_recorded(
    is_attribute: bool, noted_names, request
) -> None:
    request.addfinalizer(torch._dynamo.reset)
    mean = torch.compile(lambda x: x.square().mean(), backend="eager")
    module, monitor = stranger(training_step=lambda module: mean(torch.ones(3))), monitoring(record_operations=True)
    if is_attribute:
        module.mean = mean
    train(module, monitor)
    assert noted_names.count("mean") == (3 if is_attribute else 0)
    if not is_attribute:
        reason = "the step calls a function that torch.compile has compiled"
        assert monitor.summary["missing"]["flops_per_sec"] == reason


def test_the_time_in_which_torch_compiles_is_in_no_step_also_late_in_an_epoch(request) -> None:
    request.addfinalizer(torch._dynamo.reset)
    compiled = []

    def slowly(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        time.sleep(0.3)
        compiled.append(graph)
        return graph.forward

    class Layer(nn.Linear):  # torch 2.11 does not compile nn.Linear itself
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    module, monitor = stranger(), monitoring()
    module.layer = Layer(4, 1)
    module.layer.compile(backend=slowly, dynamic=False)
    train(module, monitor, data=loader(9 * BATCH + 1, BATCH), max_epochs=1)  # it compiles again for the last batch
    assert len(compiled) == 2
    assert monitor.table.rows["excluded_ms"][-1] > 300


def test_the_record_of_a_step_has_its_operations_with_parts_and_dimensions() -> None:
    monitor = fit()
    step = monitor.operations
    assert (step.batch_size, step.batches, step.device, step.precision) == (BATCH, 1, "cpu", "32-true")
    assert step.threads == torch.get_num_threads()
    products = {row.module: (row.dims, row.part) for row in step.rows if row.name == "aten.addmm"}
    assert products == {"layer.0": ((BATCH, 16, 4), "forward"), "layer.2": ((BATCH, 1, 16), "forward")}
    assert {row.part for row in step.rows if row.name == "aten.mm"} == {"backward"}
    assert "optimizer" in {row.part for row in step.rows}
    assert all(row.calls > 0 and row.bytes > 0 and row.seconds > 0 for row in step.rows)
    assert all(0 <= row.cold_bytes <= row.bytes for row in step.rows)
    assert step.batch_bytes == 4 * BATCH * (4 + 1)
    assert fit(steps=1).operations is None


def test_on_cuda_a_product_has_the_format_that_torchs_switches_say(monkeypatch: pytest.MonkeyPatch) -> None:
    formats = {"matmul": "tf32", "convolution": "ieee", "recurrent": "none"}
    monkeypatch.setattr(_measured, "float32_formats", lambda device: formats)
    names = ("aten.mm", "aten.convolution", "aten.relu")
    rows = [OperationRow(name, "m", "forward", "fp32", (4, 8), flops=float("relu" not in name)) for name in names]
    cost = {"batch_size": 4, "batches_per_sec": 100.0, "step_ms_median": 10.0}
    for device, first in (("cuda", "tf32"), ("cpu", "fp32")):
        measured = Measured("net", device, "A GPU", "32-true", cost, Setting(), operations=rows)
        assert [row.dtype for row in measured.step_operations(None).rows] == [first, "fp32", "fp32"]


def test_a_record_has_a_row_for_calls_of_the_same_dimensions_and_of_the_device_what_it_can_do() -> None:
    relu = OperationRow("aten.relu", "m", "forward", "fp32", (4, 8), 1, 0, 100, 50, 1e-6)
    wider = OperationRow("aten.relu", "m", "forward", "fp32", (4, 16), 1, 0, 200, 50, 1e-6)
    calibration = Calibration("cpu", "A CPU", "avx2", "2.9", 2, {"fp32": 1e11}, launch_us=1.5)
    cost = {"batch_size": 4, "batches_per_sec": 100.0, "step_ms_median": 10.0}
    measured = Measured("net", "cpu", "A CPU", "32-true", cost, Setting(), operations=[relu, relu, wider])
    step = measured.step_operations(calibration)
    assert [(row.dims, row.calls, row.bytes) for row in step.rows] == [((4, 8), 2, 200), ((4, 16), 1, 200)]
    assert step.calibration == {"threads": 2, "matmul_flops_per_sec": {"fp32": 1e11}, "launch_us": 1.5}
