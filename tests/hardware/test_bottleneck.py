"""What limits a run: the shares of a step, the verdict, its certainty and its evidence; and the lower bound of a step."""

import math
from dataclasses import replace
from functools import partial

import pytest

from batchscope.hardware.bottleneck import Step, find_bottleneck
from batchscope.hardware.calibration import Calibration, least_seconds
from batchscope.hardware.evidence import limit_row
from batchscope.records.operations import OperationRow
from batchscope.records.step_parts import PARTS

CPU = Calibration("cpu", "a CPU", None, "2", 1, {"fp32": 100e9}, 20e9, launch_us=2.0, cache_bytes=10_000_000)
GPU = Calibration("cuda", "a GPU", None, "2", None, {"fp32": 50e12, "bf16": 500e12}, 2e12, 5.0, cache_bytes=50_000_000)


def product(ms=0.0, gflop=1.0, cold_mb=0.0, calls=1, name="mm", module="net") -> OperationRow:
    """One operation of a step; an elementwise operation moves at least 4 MB."""
    moved = max(cold_mb, 0.0 if gflop or calls > 1 else 4.0)
    quantities = {"flops": gflop * 1e9, "bytes": moved * 1e6, "cold_bytes": cold_mb * 1e6, "seconds": ms / 1e3}
    return OperationRow(f"aten.{name}", module, "forward", "fp32", calls=calls, **quantities)


mul = partial(product, gflop=0.0, name="mul")


def on_cpu(*operations, calibration=CPU, device="cpu", **fields) -> Step:
    """A step with a forward pass of 10 ms, unless the fields name parts in ms."""
    parts = {part: fields.pop(part) for part in PARTS if part in fields} or {"forward": 10}
    return Step(parts, operations=operations, calibration=calibration, device=device, **fields)


on_gpu = partial(on_cpu, calibration=GPU, device="cuda")
VERDICTS = {  # a step → the kind of its bottleneck, and its share
    "products far from the peak are arithmetic, too": (on_cpu(product(9, 0.05)), "compute", 0.89),  # 0.1 ms a call
    "small products": (on_cpu(*[product(0.09, 0.0001)] * 100), "host", 0.96),
    "short products that need half of their time": (on_cpu(product(2, 0.1, calls=100), forward=2), "compute", 1.0),
    "a matrix times a vector": (on_cpu(product(9, 0.08, cold_mb=160)), "memory", 0.9),
    "elementwise work mostly in the cache": (on_cpu(mul(9, cold_mb=1.8)), "elementwise", 0.9),
    "many small operations": (on_cpu(mul(5, calls=1000)), "host", 1.0),
    "a loader, although the steps changed": (on_cpu(product(9), data_wait=40, forward=10, changed=3.0), "input", 0.8),
    "other ranks": (on_cpu(product(3), forward=3, backward=7, communication_ms=7), "communication", 0.7),
    "others took a little": (on_cpu(product(9, 0.6), others_share=0.03), "compute", 0.9),
    "no operations, but a long rest": (on_cpu(forward=2, other=8), "host", 0.8),
    "GPU: arithmetic that fills it": (on_gpu(product(0.1, 250)), "compute", 1.0),
    "GPU: launches": (on_gpu(mul(7.5, calls=1500)), "host", 1.0),
    "GPU: launches take longer than it": (on_gpu(product(0.1, 130), mul(9, calls=1800)), "host", 0.9),
    "GPU: launches need more than is left": (on_gpu(mul(25, calls=5000), data_wait=6, forward=4), "input", 0.6),
    "GPU: busy, by its counters": (on_gpu(product(0.1, 50), busy=0.95), "compute", 0.95),
    "GPU: idle, by its counters": (on_gpu(product(0.1, 50), busy=0.12), "host", 0.88),
    "GPU: idle, without operations": (on_gpu(forward=5, busy=0.1), "host", 0.9),
    "GPU: only its host waits for data": (on_gpu(product(0.1, 200), data_wait=12, forward=8, busy=0.97), "compute", 0.97),
    "GPU: it waits for data": (on_gpu(product(0.1, 20), data_wait=15, forward=5, busy=0.12), "input", 0.75),
    "GPU: other ranks": (
        on_gpu(product(0.1, 50), forward=2, backward=8, communication_ms=7, busy=1.0), "communication", 0.7,
    ),
    "GPU: compiled, busy and well fed": (on_gpu(forward=4, backward=6, busy=0.95, mfu=0.5), "compute", 0.95),
    "GPU: compiled and idle": (on_gpu(forward=4, backward=6, busy=0.3, mfu=0.1), "host", 0.7),
    "GPU: no need explains the step": (on_gpu(product(0.1, 5)), "unclear", 0.01),
    "MPS: the rest may wait for it": (on_gpu(mul(0.025, calls=5), other=10, device="mps"), "unclear", 0.0),
    "MPS: nothing is known of the rest": (on_cpu(other=10, device="mps"), "unclear", 0.0),
    "MPS: near its peak": (on_cpu(data_wait=1, other=9, device="mps", mfu=0.4), "compute", 0.9),
}  # fmt: skip


@pytest.mark.parametrize("case", VERDICTS)
def test_the_largest_share_of_a_step_is_its_bottleneck(case):
    step, kind, share = VERDICTS[case]
    limit = find_bottleneck(step)
    assert (limit.kind, limit.share) == (kind, pytest.approx(share, abs=0.005))
    assert limit.certainty == ("unclear" if kind == "unclear" else "clear" if step.operations else limit.certainty)


SHARES = {  # a step → all its shares
    "waits count up to the device's idle time": (
        on_gpu(product(0.1, 200), data_wait=12, forward=8, busy=0.97), {"input": 0.03, "compute": 0.97},
    ),
    "exposed exchange is no arithmetic": (
        on_cpu(forward=4, backward=5, other=1, mfu=0.4, communication_ms=3),
        {"communication": 0.3, "compute": 0.6, "host": 0.1},
    ),
    "operations of a slower moment": (on_cpu(product(8), mul(8, cold_mb=128)), {"memory": 0.5, "compute": 0.5}),
    "what long steps add to the mean is not known": (
        on_cpu(product(5, 0.3), data_wait=2, forward=8, work_ms=6), {"input": 0.2, "compute": 0.5, "host": 0.1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SHARES)
def test_a_step_is_divided(case):
    step, expected = SHARES[case]
    shares = find_bottleneck(step).shares
    assert {kind: share for kind, share in shares.items() if share} == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("parts", [{}, {"forward": 0.0}, {"forward": math.nan}, {"forward": 2, "backward": -1}])
def test_a_step_without_a_time_has_no_bottleneck(parts):
    assert find_bottleneck(Step(parts, operations=[mul(5)])) is None


MOST = product(8, 0.6), mul(2, cold_mb=40)
DOUBTS = {
    "the device may compute while the host waits": on_gpu(product(0.1, 250), data_wait=2, other=8, device="mps"),
    "only 3 steps measured": on_cpu(*MOST, steps=3),
    "other programs took 15 % of the processor": on_cpu(*MOST, others_share=0.15),
    "the device's peaks are not known": on_cpu(*MOST, calibration=None),
    "waiting for other ranks is not measured here": on_cpu(*MOST, communication_ms=None),
    "memory is nearly as much (48 %)": on_cpu(product(5.2, 0.3), mul(4.8, cold_mb=80)),
}


@pytest.mark.parametrize("doubt", DOUBTS)
def test_thin_evidence_makes_the_verdict_probable_and_says_why(doubt):
    bottleneck = find_bottleneck(DOUBTS[doubt])
    assert (bottleneck.kind, bottleneck.certainty) == ("compute", "probable")
    assert bottleneck.evidence.endswith(f"; {doubt}")


def test_the_evidence_holds_nothing_against_peaks_that_others_have_lowered():
    bottleneck = find_bottleneck(on_cpu(*MOST, calibration=replace(CPU, disturbed="others were busy")))
    assert (bottleneck.kind, bottleneck.certainty) == ("compute", "probable")
    assert "measured here" not in bottleneck.evidence


@pytest.mark.parametrize(("busy", "kind"), [(None, "unclear"), (0.95, "compute")])
def test_peaks_that_others_have_lowered_tell_no_time_and_divide_one_that_is_known(busy, kind):
    lowered = replace(GPU, disturbed="others were busy")
    assert find_bottleneck(on_gpu(product(0.1, 250), calibration=lowered, busy=busy)).kind == kind


EVIDENCE = {
    "80 % of the step is waiting for data: 8 ms of 10 ms": on_cpu(data_wait=8, forward=2),
    "unknown 100 %, because no step's operations were recorded": on_cpu(),
    "unknown 100 %, because the recorded operations took 8.7 times as long as a step without its waits": (
        on_cpu(product(9, 0.6), work_ms=1.03)
    ),
    "unknown 100 %, because the steps changed: without waits a batch takes 2.1 times as long as those whose operations were "
    "recorded": on_cpu(product(9, 0.6), changed=2.1),
    "unknown 100 %, because the steps changed: without waits a batch takes 0.48 times as long as those whose operations were "
    "recorded": on_cpu(product(9, 0.6), changed=0.48),
    "90 % of the step is arithmetic: 600 MFLOP, at 67 % of the peak measured here; 100 % of it in mm of net": on_cpu(
        product(9, 0.6)
    ),
    "90 % of the step is arithmetic, at 25 % of the peak measured here": on_cpu(forward=9, other=1, mfu=0.25),
    "80 % of the step is moving 128 MB through memory, at 16 GB/s of the 20 GB/s measured here; 100 % of it in mul of net": (
        on_cpu(mul(8, cold_mb=128))
    ),
    # Not the rate of the host's calls:
    "100 % of the step is moving 10 GB through memory, at 1 TB/s of the 2 TB/s measured here; 100 % of it in mul of net": (
        on_gpu(mul(0.1, cold_mb=10_000))
    ),
    "90 % of the step is elementwise and similar operations: 1 operation on 4 MB; 100 % of it in mul of net": (
        on_cpu(mul(9))
    ),
    "90 % of the step is Python and framework overhead around 1 operation: 9 ms of 10 ms": on_cpu(product(1)),
    "50 % of the step is arithmetic: 300 MFLOP, at 60 % of the peak measured here; 80 % of it in mm of large": on_cpu(
        product(4, 0.24, module="large"), product(1, 0.06), mul(3.9)
    ),
    "waiting for data 34 %, memory traffic 33 %, arithmetic 33 %": on_cpu(
        product(3.3, 0.2), mul(3.3, cold_mb=60), data_wait=3.4, forward=6.6
    ),
    "other programs took 43 % of the processor: close them and run again": on_cpu(product(9, 0.6), others_share=0.43),
}


@pytest.mark.parametrize("line", EVIDENCE)
def test_the_evidence_is_one_line_with_the_numbers_of_the_verdict(line):
    bottleneck = find_bottleneck(EVIDENCE[line])
    assert bottleneck.evidence == line
    assert bottleneck.busy == line.startswith("other programs")
    assert (bottleneck.certainty == "unclear") == ("% of the step" not in line)


def test_a_verdict_is_one_row():
    verdict = {"kind": "compute", "share": 0.57, "certainty": "clear", "evidence": "unknown 70 %"}
    assert limit_row(verdict) == ("limit", "arithmetic (57 % of the step)")
    assert limit_row(verdict | {"certainty": "probable"}) == ("limit", "probably arithmetic (57 % of the step)")
    assert limit_row(verdict | {"kind": "unclear"}) == ("limit", "unclear: unknown 70 %")
    assert limit_row(verdict | {"kind": "unclear", "busy": True}) == ("load", "unknown 70 %")


WORK = [product(gflop=50), mul(cold_mb=4100)]
BOUNDS = {  # a device and an operation → the lower bound in seconds
    "arithmetic": (CPU, product(gflop=0.5), 5e-3),
    "traffic": (CPU, mul(cold_mb=60), 2e-3),
    "launches": (CPU, mul(calls=100), 0.2e-3),
    "without what the cache may hold before and after each call": (CPU, mul(cold_mb=60, calls=3), 6e-6),
    "no launches where the host runs ahead": (GPU, mul(calls=1000), 0.0),
    "a type without a peak is held against the highest": (GPU, replace(product(gflop=500), dtype="other"), 1e-3),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_no_operation_is_faster_than_its_lower_bound(name):
    device, operation, seconds = BOUNDS[name]
    assert least_seconds(operation, device) == pytest.approx(seconds)
