"""What limits a run: the shares of a step, the verdict, its certainty and its evidence."""

import math

import pytest

from batchscope.hardware.bottleneck import Step, find_bottleneck
from batchscope.hardware.calibration import Calibration
from batchscope.hardware.evidence import limit_row
from batchscope.records.operations import OperationRow

MS = 1e-3
CPU = Calibration("cpu", "a CPU", None, "2", 1, {"fp32": 100e9}, memory_bytes_per_sec=20e9, launch_us=2.0)
GPU = Calibration("cuda", "a GPU", None, "2", None, {"fp32": 50e12, "bf16": 500e12}, 2e12, launch_us=5.0)


def product(ms: float, gflop: float = 1.0, cold: float = 0.0, module: str = "net") -> OperationRow:
    return OperationRow("aten.mm", module, "forward", "fp32", (), 1, gflop * 1e9, cold, cold, ms * MS)


def elementwise(ms: float, cold: float = 0.0, name: str = "mul") -> OperationRow:
    return OperationRow(f"aten.{name}", "net", "forward", "fp32", (), 1, 0.0, max(cold, 4e6), cold, ms * MS)


def tiny(calls: int, us: float = 5.0) -> OperationRow:
    return OperationRow("aten.add", "net", "backward", "fp32", (), calls, 0.0, 100.0 * calls, 0.0, calls * us * 1e-6)


def verdict(operations=(), parts=None, calibration=CPU, device="cpu", **others):
    known = {"device": device, "operations": operations, "calibration": calibration}
    return find_bottleneck(Step(parts or {"forward": 10}, **known, **others))


CASES = {  # the operations of a step on a CPU of 10 ms, unless the parts say otherwise → the kind and its share
    "products near the peak": ([product(9, gflop=0.6)], {}, "compute", 0.9),
    "products far from the peak are arithmetic, too": ([product(9, gflop=0.05)], {}, "compute", 0.89),  # 0.1 ms a call
    "small products": ([product(0.09, gflop=0.0001)] * 100, {}, "host", 0.96),
    "a matrix times a vector": ([product(9, gflop=0.08, cold=160e6)], {}, "memory", 0.9),
    "elementwise work on large tensors": ([elementwise(9, cold=128e6)], {}, "memory", 0.9),
    "strides at a fiftieth of the bandwidth": ([elementwise(9, cold=3.6e6, name="cumsum")], {}, "memory", 0.9),
    "elementwise work mostly in the cache": ([elementwise(9, cold=1.8e6)], {}, "elementwise", 0.9),
    "elementwise work in the cache": ([elementwise(9)], {}, "elementwise", 0.9),
    "many small operations": ([tiny(1000)], {}, "host", 1.0),
    "a wait in Python": ([product(1)], {}, "host", 0.9),
    "a loader that is slow": ([product(3)], {"data_wait": 7, "forward": 3}, "input", 0.7),
    "other ranks": ([product(3)], {"forward": 3, "backward": 7}, "communication", 0.7),
    "copies": ([product(3)], {"transfer": 7, "forward": 3}, "transfer", 0.7),
}


@pytest.mark.parametrize("case", CASES)
def test_the_largest_share_of_a_step_on_a_cpu_is_its_bottleneck(case):
    operations, parts, kind, share = CASES[case]
    waiting = 7.0 if kind == "communication" else 0.0
    found = verdict(operations, parts, communication_ms=waiting)
    assert (found.kind, found.certainty) == (kind, "clear")
    assert found.share == pytest.approx(share, abs=0.005)
    assert sum(found.shares.values()) == pytest.approx(1)


def test_a_short_operation_that_needs_its_time_at_the_peaks_is_no_overhead():
    short = OperationRow("aten.mm", "", "forward", "fp32", (), 100, 100 * 1e6, 0, 0, 100 * 20e-6)  # 10 of 20 µs each
    assert verdict([short], {"forward": 2}).kind == "compute"


def test_operations_that_were_timed_in_a_slower_moment_are_scaled_to_the_step():
    found = verdict([product(8), elementwise(8, cold=128e6)])
    assert found.shares["memory"] == found.shares["compute"] == pytest.approx(0.5, abs=0.01)
    assert "the operations took 1.6 times as long while they were recorded as a step has for them" in found.evidence


def test_what_a_few_long_steps_add_to_the_mean_is_not_known():
    found = verdict([product(5, gflop=0.3)], {"data_wait": 2, "forward": 8}, work_ms=6)
    assert found.shares == pytest.approx(
        {"input": 0.2, "transfer": 0, "communication": 0, "memory": 0, "compute": 0.5, "elementwise": 0, "host": 0.1}
    )
    assert (found.kind, found.certainty) == ("compute", "clear")


GPU_CASES = {  # operations, parts, busy share → kind, certainty
    "arithmetic that fills the device": ([product(0.1, gflop=250)], {"forward": 10}, None, "compute", "clear"),
    "traffic that fills the device": ([elementwise(0.1, cold=10e9)], {"forward": 10}, None, "memory", "clear"),
    "launches": ([tiny(1500)], {"forward": 10}, None, "host", "clear"),
    "launches take longer than the device": ([product(0.1, 130), tiny(1800)], {"forward": 10}, None, "host", "clear"),
    "launches that need longer than the waits leave": (
        [tiny(5000)], {"data_wait": 6, "forward": 4}, None, "input", "clear",
    ),
    "busy, by its counters": ([product(0.1, gflop=50)], {"forward": 10}, 0.95, "compute", "clear"),
    "idle, by its counters": ([product(0.1, gflop=50)], {"forward": 10}, 0.12, "host", "clear"),
    "no need explains the step": ([product(0.1, gflop=5)], {"forward": 10}, None, "unclear", "unclear"),
    "the host waits for data, the device does not": (
        [product(0.1, gflop=200)], {"data_wait": 12, "forward": 8}, 0.97, "compute", "clear",
    ),
    "the device waits for data": ([product(0.1, gflop=20)], {"data_wait": 15, "forward": 5}, 0.12, "input", "clear"),
}  # fmt: skip


@pytest.mark.parametrize("case", GPU_CASES)
def test_an_asynchronous_device_is_judged_by_its_busy_share_or_by_its_needs(case):
    operations, parts, busy, kind, certainty = GPU_CASES[case]
    found = verdict(operations, parts, GPU, "cuda", busy=busy)
    assert (found.kind, found.certainty) == (kind, certainty)
    assert sum(found.shares.values()) <= 1 + 1e-9


def test_waiting_and_copying_count_up_to_the_devices_idle_time():
    found = verdict([product(0.1, gflop=200)], {"data_wait": 12, "forward": 8}, GPU, "cuda", busy=0.97)
    assert found.shares["input"] == pytest.approx(0.03)


def test_a_copy_to_mps_may_wait_for_the_device_and_is_no_verdict():
    assert verdict([tiny(5)], {"transfer": 9, "forward": 1}, GPU, "mps").kind == "unclear"


def test_where_others_took_a_quarter_of_the_processor_in_most_windows_there_is_no_verdict_but_what_to_do():
    found = verdict([product(9, gflop=0.6)], others_shares=[0.43, 0.03, 0.43])
    assert (found.kind, found.certainty, found.busy, found.shares) == ("unclear", "unclear", True, {})
    assert found.evidence == "other programs took 43 % of the processor: close them and run again"
    assert limit_row(vars(found)) == ("busy", found.evidence)


@pytest.mark.parametrize("others_shares", [[], [math.nan], [0.03, 0.43, 0.03], [0.25]])
def test_a_verdict_needs_no_quiet_machine_in_every_window(others_shares):
    assert verdict([product(9, gflop=0.6)], others_shares=others_shares).kind == "compute"


NOT_RECORDED = {  # what makes the recorded operations no evidence → why, as the verdict says it
    "three times as long": (
        {"changed": 3.0},
        "the steps changed: the median step takes 3 times as long as those whose",
    ),
    "a third as long": ({"changed": 0.3}, "the steps changed: the median step takes 0.3 times as long as those whose"),
    "slow while recorded": ({"work_ms": 1.03}, "the operations took 8.7 times as long while they were recorded"),
    "none": ({"operations": ()}, "no step's operations were recorded"),
}


@pytest.mark.parametrize("case", NOT_RECORDED)
def test_operations_that_do_not_stand_for_the_steps_are_not_used(case):
    given, why = NOT_RECORDED[case]
    found = verdict(**{"operations": [product(9, gflop=0.6)], **given})
    assert (found.kind, found.certainty) == ("unclear", "unclear")
    assert f"unknown 100 %, because {why}" in found.evidence
    assert verdict(**{"operations": [product(2)], **given}, parts={"data_wait": 8, "forward": 2}).kind == "input"


def test_without_operations_the_parts_may_still_tell():
    assert verdict(parts={"forward": 2, "other": 8}).kind == "host"
    assert verdict(parts={"forward": 5}, device="cuda", busy=0.1).kind == "host"
    assert verdict(parts={"forward": 2, "other": 8}, device="mps").kind == "unclear"
    by_peak = verdict(parts={"forward": 4, "backward": 5, "other": 1}, mfu=0.4)
    assert by_peak.evidence.startswith("90 % of the step is arithmetic, at 40 % of the peak measured here")
    of_ranks = verdict(parts={"forward": 4, "backward": 5, "other": 1}, mfu=0.4, communication_ms=3)
    assert (of_ranks.shares["communication"], of_ranks.shares["compute"]) == pytest.approx((0.3, 0.6))


@pytest.mark.parametrize("parts", [{}, {"forward": 0.0}, {"forward": math.nan}, {"forward": 2, "backward": -1}])
def test_a_step_without_a_time_has_no_bottleneck(parts):
    assert find_bottleneck(Step(parts, operations=[tiny(5)])) is None


DOUBTS = {
    "only 3 steps measured": {"steps": 3},
    "other programs took 15 % of the processor": {"others_shares": [0.15]},
    "one step in ten takes 2.1 times the median": {"spread": 2.1},
    "the device is not calibrated": {"calibration": None},
    "waiting for other ranks is not measured here": {"communication_ms": None},
}


@pytest.mark.parametrize("doubt", DOUBTS)
def test_thin_evidence_makes_the_verdict_probable_and_says_why(doubt):
    found = verdict([product(8, gflop=0.6), elementwise(2, cold=40e6)], **DOUBTS[doubt])
    assert (found.kind, found.certainty) == ("compute", "probable")
    assert found.evidence.endswith(f"; {doubt}")


def test_two_causes_that_are_nearly_as_large_are_both_named():
    found = verdict([product(5.2, gflop=0.3), elementwise(4.8, cold=80e6)])
    assert (found.kind, found.certainty) == ("compute", "probable")
    assert "memory is nearly as much (48 %)" in found.evidence


def test_three_even_causes_are_unclear_and_the_shares_are_said():
    parts = {"data_wait": 3.4, "forward": 6.6}
    found = verdict([product(3.3, gflop=0.2), elementwise(3.3, cold=60e6)], parts)
    assert (found.kind, found.certainty) == ("unclear", "unclear")
    assert found.evidence == "waiting for data 34 %, memory traffic 33 %, arithmetic 33 %"


EVIDENCE = {
    "80 % of the step is waiting for data: 8 ms of 10 ms": ([product(1)], {"data_wait": 8, "forward": 2}),
    "90 % of the step is arithmetic: 600 MFLOP, at 67 % of the peak measured here; 100 % of it in mm of net": (
        [product(9, gflop=0.6)],
        {},
    ),
    "80 % of the step is moving 128 MB through memory, at 16 GB/s of the 20 GB/s measured here; 100 % of it in mul of net": (
        [elementwise(8, cold=128e6)],
        {},
    ),
    "90 % of the step is moving 9 MB through memory, at 1 GB/s of the 20 GB/s measured here (slow: fresh memory, strides, "
    "look-ups, or a costly function of each value); 100 % of it in cumsum of net": (
        [elementwise(9, cold=9e6, name="cumsum")],
        {},
    ),
    "90 % of the step is elementwise and similar operations: 1 operation on 4 MB; 100 % of it in exp of net": (
        [elementwise(9, name="exp")],
        {},
    ),
    "90 % of the step is Python and framework overhead around 1 operation: 9 ms of 10 ms": ([product(1)], {}),
    "50 % of the step is arithmetic: 300 MFLOP, at 60 % of the peak measured here; 80 % of it in mm of large": (
        [product(4, 0.24, module="large"), product(1, 0.06), elementwise(3.9)],
        {},
    ),
}


@pytest.mark.parametrize("line", EVIDENCE)
def test_the_evidence_is_one_line_with_the_numbers_of_the_verdict(line):
    operations, parts = EVIDENCE[line]
    assert verdict(operations, parts).evidence == line


def test_the_evidence_names_the_devices_rate_and_a_hook_that_prepares_the_batch():
    found = verdict([elementwise(0.1, cold=10e9)], {"forward": 10}, GPU, "cuda")  # not the rate of the host's calls
    assert "moving 10 GB through memory, at 1 TB/s of the 2 TB/s measured here" in found.evidence
    found = verdict([product(1)], {"data_wait": 8, "forward": 2}, preparing="on_after_batch_transfer")
    assert found.evidence == "80 % of the step is preparing the batch in on_after_batch_transfer: 8 ms of 10 ms"


ROWS = [
    ({"kind": "compute", "certainty": "clear", "share": 0.57}, "arithmetic (57 % of the step)"),
    ({"kind": "input", "certainty": "probable", "share": 0.4}, "probably waiting for data (40 % of the step)"),
    ({"kind": "unclear", "certainty": "unclear", "share": 0.3, "evidence": "unknown 70 %"}, "unclear: unknown 70 %"),
]  # fmt: skip


@pytest.mark.parametrize(("found", "row"), ROWS)
def test_a_verdict_is_one_row(found, row):
    assert limit_row({"evidence": "", **found}) == ("limit", row)
