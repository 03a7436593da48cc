"""The summary of a run is a pure function of what was measured and of the machine; a file replays it."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from batchscope.callbacks import _setting
from batchscope.callbacks._measured import FILE, Flops, Measured, read_measured, write_measured
from batchscope.callbacks._report import report
from batchscope.callbacks._setting import read_setting
from batchscope.callbacks.device import DeviceMonitor
from batchscope.errors import UserError
from batchscope.hardware.advice import Setting
from batchscope.hardware.slow_rank import BLOCKS
from batchscope.options.compose import check_command_line
from batchscope.records.operations import OperationRow
from tests.callbacks.support import monitoring, stranger
from tests.support.devices import CPU
from tests.support.third_party_modules import Stranger, loader, train

COST = {"parts_ms": {"data_wait": 8.0, "forward": 2.0}, "work_ms_median": 2.0, "step_ms": 10.0}
COST |= {"step_ms_median": 4.0, "step_ms_p90": 11.0, "updates": 100, "batch_size": 8}
COST |= {"samples": 4_000, "seconds": 8.0, "samples_per_sec": 500.0}
WAITING = Measured("net", "cpu", "a processor", "32-true", COST, Setting(pipeline="workers", num_workers=0, cores=4))
PRODUCT = OperationRow("aten.mm", "", "forward", "fp32", flops=3e9)


def test_a_file_replays_the_report_of_a_fit(calibrated, tmp_path: Path) -> None:
    calibrated[0] = CPU
    train(Stranger(), monitor := monitoring(record_operations=True), DeviceMonitor(), max_epochs=3)
    write_measured(tmp_path, monitor.measured, monitor.calibration)
    replayed, machine = read_measured(tmp_path)
    assert report(replayed, machine) == monitor.summary
    assert {"bottleneck"} <= monitor.summary.keys()
    assert list(replayed.operations) == list(monitor.measured.operations)


def ranks(*loads_ms: float):
    """A run with a step of 60 ms, on ranks whose loaders take `loads_ms`."""
    rank_times = [
        {"input_ms": [ms] * BLOCKS, "transfer_ms": [0.1] * BLOCKS, "compute_ms": [10.0] * BLOCKS} for ms in loads_ms
    ]
    parts = {"data_wait": loads_ms[0], "backward": 60.0 - loads_ms[0]}
    cost = COST | {"step_ms": 60.0, "parts_ms": parts, "communication_ms": 50.0 - loads_ms[0]}
    return replace(WAITING, ranks=rank_times, cost=cost)


def test_the_flops_of_a_device_are_those_of_its_own_samples() -> None:
    one_rank = replace(WAITING, flops=Flops(1e6))
    two_ranks = replace(ranks(5, 5), flops=Flops(1e6))  # its samples/s are those of both ranks
    assert report(one_rank, None)["flops_per_sec"] == 2 * report(two_ranks, None)["flops_per_sec"] == 5e8


def test_a_file_replays_which_rank_is_slow(tmp_path: Path) -> None:
    write_measured(tmp_path, ranks(5, 35), None)
    summary = report(*read_measured(tmp_path))
    assert summary == report(ranks(5, 35), None)
    assert (summary["processes"], summary["ranks_ms"]["input"]) == (2, [5, 35])
    assert (summary["slow_rank"]["rank"], summary["slow_rank"]["excess_ms"]) == (1, 30)
    assert "slow_rank" not in report(ranks(5, 5), None)


def test_a_wait_for_a_slow_rank_has_no_other_advice() -> None:
    assert report(ranks(5, 35), None)["bottleneck"]["kind"] == "communication"
    assert "advice" not in report(ranks(5, 35), None)["bottleneck"]
    assert "advice" in report(ranks(5, 5), None)["bottleneck"]
    assert "advice" in report(ranks(45, 5), None)["bottleneck"]  # the rank of this report is the slow one
    slight = report(ranks(5, 12), None)  # 7 ms of 45 that are waited for
    assert slight["slow_rank"]["rank"] == 1 and "advice" in slight["bottleneck"]


def test_the_time_of_kernels_takes_the_place_of_what_the_driver_says_of_the_last_second() -> None:
    driver = {"device/utilization_mean_pct": 80.0}
    on_gpu = replace(WAITING, device="cuda", sampled=driver, kernel_s=0.002)
    assert report(on_gpu, None)["utilization_pct"] == 20.0
    assert report(replace(on_gpu, kernel_s=None), None)["utilization_pct"] == 80.0


@pytest.mark.parametrize(("samples", "kind", "host"), [(512, "compute", 0.4), (300, "host", 0.53)])
def test_the_mean_step_of_short_batches_has_their_share_of_the_work_and_all_of_the_host(samples, kind, host) -> None:
    step_ms = 4.0 + 6.0 * samples / 512  # of which 4 are the host's
    cost = COST | {"step_ms": step_ms, "parts_ms": {"forward": step_ms}, "work_ms_median": 10.0, "step_ms_median": 10.0}
    cost |= {"batch_size": 512, "samples": 100 * samples, "samples_per_sec": 51_200.0}
    products = [replace(PRODUCT, seconds=0.006, calls=1.0)]
    measured = replace(WAITING, cost=cost, operations=products)
    bottleneck = report(measured, None)["bottleneck"]
    assert (bottleneck["kind"], bottleneck["shares"]["host"]) == (kind, pytest.approx(host, abs=0.01))
    on_gpu = report(replace(measured, device="cuda", kernel_s=0.006), None)
    # The kernels of a short batch may take as long as those of a whole one.
    assert on_gpu.get("utilization_pct") == (60 if samples == 512 else None)


def test_waits_of_a_few_steps_limit_a_gpu_whose_kernels_fill_the_median_step() -> None:
    parts = {"data_wait": 30.0, "forward": 10.0}
    cost = COST | {"parts_ms": parts, "work_ms_median": 10.0, "step_ms": 40.0, "step_ms_median": 10.0}
    summary = report(replace(WAITING, device="cuda", cost=cost, kernel_s=0.0095), None)
    assert (summary["bottleneck"]["kind"], summary["bottleneck"]["share"]) == ("input", 0.75)


def test_of_an_apple_gpu_the_parts_that_nobody_can_time_are_absent_with_the_reason() -> None:
    peak = replace(CPU, device="mps", device_name="Apple M2")
    cost = COST | {"parts_ms": {"data_wait": 1.0, "other": 9.0}, "work_ms_median": 9.0}
    on_mps = replace(WAITING, device="mps", cost=cost, flops=Flops(1e8, is_given=True))
    summary = report(on_mps, peak)
    assert summary["mfu"] == 0.5  # the samples/s and the calibrated peak are known
    assert summary["bottleneck"]["kind"] == "compute"
    assert summary["missing"]["parts_ms"].endswith("cannot be read: transfer, forward, backward, optimizer")
    assert "utilization_pct" not in summary


@pytest.mark.parametrize("change", [{"launch_us": -1}, {"cache_bytes": math.nan}, {"speed": 3}])
def test_a_file_whose_calibration_is_none_is_refused(change, tmp_path: Path) -> None:
    write_measured(tmp_path, WAITING, CPU)
    content = json.loads((tmp_path / FILE).read_text())
    content["machine"] |= change
    (tmp_path / FILE).write_text(json.dumps(content))
    with pytest.raises(UserError, match=f"{FILE}: cannot be read: "):
        read_measured(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", '{"schema": 0}', '{"schema": 3, "measured": {"operations": [[]]}}'])
def test_a_file_that_is_damaged_or_of_another_schema_is_refused_in_one_line(content: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(content)
    with pytest.raises(UserError, match=f"{FILE}: cannot be read: "):
        read_measured(tmp_path)


def test_what_was_sampled_of_the_device_has_its_name_in_the_summary() -> None:
    sampled = {"energy_j": 50.0, "seconds": 10.0, "device/memory_peak_gib": 0.5}
    summary = report(replace(WAITING, sampled=sampled), None)
    assert summary["joules_per_sample"] == pytest.approx(5.0 * 8.0 / 4_000)
    assert summary["memory_peak_gib"] == 0.5
    sampled = {"device/processor_time_mean_pct": 96.0, "device/throttled_mean_pct": 3.0}
    summary = report(replace(WAITING, sampled=sampled), None)
    assert (summary["processor_time_pct"], summary["throttled_pct"]) == (96.0, 3.0)


def test_the_record_of_a_run_on_a_busy_machine_has_no_verdict_and_no_advice() -> None:
    bottleneck = report(WAITING, None)["bottleneck"]
    assert (bottleneck["kind"], bottleneck["advice"]) == ("input", "data.pipeline=memory")
    assert bottleneck["advice_effect"] == "takes each batch from tensors in memory at once"
    assert "busy" not in bottleneck
    bottleneck = report(replace(WAITING, cost=COST | {"others_share": 0.43}), None)["bottleneck"]
    assert (bottleneck["kind"], bottleneck["certainty"], bottleneck["busy"]) == ("unclear", "unclear", True)
    assert bottleneck["evidence"] == "other programs took 43 % of the processor: close them and run again"
    assert "advice" not in bottleneck


@pytest.mark.parametrize(("starting_s", "advice"), [(4.0, "kept"), (1.0, "data.pipeline=memory")])
def test_workers_that_are_started_anew_are_advised_to_be_kept_where_that_is_most_of_the_wait(
    starting_s, advice
) -> None:
    epoch = {"seconds": 8.0, "starting_workers_s": starting_s, "advice": "kept"}
    bottleneck = report(replace(WAITING, fit_time={"epoch": epoch}), None)["bottleneck"]
    assert (bottleneck["kind"], bottleneck["share"], bottleneck["advice"]) == ("input", 0.8, advice)


@pytest.mark.parametrize(("part", "is_advised"), [("forward", True), ("optimizer", False)])
def test_a_lower_precision_is_advised_unless_most_bytes_are_the_optimizers(part: str, is_advised: bool) -> None:
    cost = COST | {"parts_ms": {"forward": 10.0}, "work_ms_median": 10.0}
    rows = [OperationRow("aten.add", "", part, "fp32", calls=1, bytes=1e9, cold_bytes=1e9, seconds=0.01)]
    machine = replace(CPU, matmul_flops_per_sec={"fp32": 1e11, "bf16": 4e11})
    bottleneck = report(replace(WAITING, cost=cost, operations=rows), machine)["bottleneck"]
    assert bottleneck["kind"] == "memory"
    assert (bottleneck["advice"] == "trainer.precision=bf16-mixed") == is_advised


def test_no_table_of_operations_is_advised_where_they_cannot_be_recorded() -> None:
    cost = COST | {"parts_ms": {"other": 10.0}, "work_ms_median": 10.0}
    foreign = replace(WAITING, cost=cost, setting=Setting(own=False))
    assert "advice" not in report(replace(foreign, not_recorded="the step is compiled"), None)["bottleneck"]
    assert "OperationProfiler" in report(replace(foreign, operations=[PRODUCT]), None)["bottleneck"]["advice"]


def test_a_kernel_that_runs_all_the_time_leaves_nothing_to_the_host() -> None:
    cost = COST | {"parts_ms": {"forward": 10.0}, "work_ms_median": 10.0}
    fields = {"sampled": {"device/utilization_mean_pct": 100.0}, "operations": [replace(PRODUCT, seconds=1e-4)]}
    bottleneck = report(replace(WAITING, device="cuda", cost=cost, **fields), None)["bottleneck"]
    assert bottleneck["shares"].get("host", 0.0) == 0.0


class Stream(IterableDataset):
    """The samples of a loader, without a length."""

    def __iter__(self):
        samples = loader().dataset
        return (samples[number] for number in range(20))


WORKERS = "data.pipeline=workers"


@pytest.mark.parametrize(
    ("data", "overrides", "expected"),
    [
        (loader(), None, {"batch_size": 4, "num_workers": 0, "train_samples": 20}),
        (DataLoader(list(loader()), batch_size=None), None, {"batch_size": None, "num_workers": 0}),
        ({"a": loader(), "b": loader()}, None, {"batch_size": None, "num_workers": None}),
        (loader(), [], {"batch_size": 128, "train_samples": 20, "diagnosed": False}),
        (loader(), ["experiment=diagnose"], {"batch_size": 128, "diagnosed": True}),
        (loader(), [WORKERS], {"num_workers": 2}),
        (DataLoader(Stream(), 4), [WORKERS], {"num_workers": None, "train_samples": None}),
    ],
    ids=[
        "loader",
        "own batches",
        "several loaders",
        "a run's options",
        "a run of a diagnosis",
        "workers",
        "a stream",
    ],
)
def test_the_advice_knows_a_run_or_a_dataloader_and_guesses_no_other(data, overrides, expected, monkeypatch) -> None:
    def note_setting(module) -> None:
        settings.append(read_setting(module.trainer, 100))

    monkeypatch.setattr(_setting, "usable_cores", lambda: 0.5)  # as in a container with half a core
    module, settings = stranger(on_train_end=note_setting), []
    if isinstance(data, dict):
        module.training_step = lambda batch, batch_idx: Stranger.training_step(module, batch["a"], batch_idx)
    if overrides is not None:
        (module.batchscope_config,) = check_command_line(overrides, multirun=False)
    train(module, data=data)
    assert (settings[0].own, settings[0].cores) == (overrides is not None, 1)
    assert {key: getattr(settings[0], key) for key in expected} == expected


@pytest.mark.parametrize(("usable", "cores"), [(32, 8), (4, 4)], ids=["shared", "bound"])
def test_the_ranks_of_a_machine_share_its_cores_unless_each_is_bound_to_its_own(usable, cores, monkeypatch) -> None:
    monkeypatch.setattr(_setting, "usable_cores", lambda: usable)
    monkeypatch.setattr(_setting, "affinity", lambda: set(range(usable)))
    launcher = SimpleNamespace(cpu_affinity=lambda: list(range(32)))
    monkeypatch.setattr(_setting.psutil, "Process", lambda pid: launcher)
    device = SimpleNamespace(root_device=torch.device("cpu"))
    trainer = SimpleNamespace(strategy=device, world_size=8, num_nodes=2, callbacks=[])
    trainer.lightning_module = trainer.train_dataloader = None
    assert read_setting(trainer, 100).cores == cores


@pytest.mark.parametrize("processes", [1, 2])
def test_a_gpu_is_advised_to_a_run_of_one_process(processes: int, monkeypatch) -> None:
    monkeypatch.setattr(_setting, "available", lambda: ["cpu", "cuda"])
    trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cpu")), callbacks=[])
    trainer.world_size, trainer.num_nodes, trainer.lightning_module, trainer.train_dataloader = processes, 1, None, None
    assert read_setting(trainer, 100).has_gpu == (processes == 1)


def test_no_batch_size_is_advised_where_it_is_no_option_of_the_data() -> None:
    module, settings = stranger(on_train_end=lambda module: settings.append(read_setting(module.trainer, 100))), []
    (module.batchscope_config,) = check_command_line([], multirun=False)
    del module.batchscope_config["data"]["batch_size"]
    train(module)
    assert settings[0].batch_size is None
