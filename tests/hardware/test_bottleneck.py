"""What limits a run: the shares of a step, the verdict, its certainty and its evidence."""

import math

import pytest

from batchscope.callbacks._run_summary import Seen, bottleneck_facts
from batchscope.hardware.advice import Setting
from batchscope.hardware.bottleneck import Step, find_bottleneck
from batchscope.hardware.contention import Noise
from batchscope.hardware.evidence import limit_row
from batchscope.hardware.floor import Roofs, step_floor
from batchscope.hardware.operations import Operation

MS = 1e-3
CPU = Roofs(asynchronous=False, flops_per_sec={"fp32": 100e9}, bytes_per_sec=20e9, launch_s=2e-6, page_fault_s=0.7e-6)
GPU = Roofs(asynchronous=True, flops_per_sec={"fp32": 50e12, "bf16": 500e12}, bytes_per_sec=2e12, launch_s=5e-6)


def product(ms: float, gflop: float = 1.0, cold: float = 0.0, **others) -> Operation:
    return Operation("aten.mm", "forward", "net", "fp32", 1, gflop * 1e9, cold, cold, ms * MS, **others)


def elementwise(ms: float, cold: float = 0.0, name: str = "mul", **others) -> Operation:
    return Operation(f"aten.{name}", "forward", "net", "fp32", 1, 0.0, max(cold, 4e6), cold, ms * MS, **others)


def tiny(calls: int, us: float = 5.0) -> Operation:
    return Operation("aten.add", "backward", "net", "fp32", calls, 0.0, 100.0 * calls, 0.0, calls * us * 1e-6)


def verdict(operations=(), parts=None, roofs=CPU, device="cpu", **others):
    return find_bottleneck(Step(parts or {"forward": 10}, device=device, operations=operations, roofs=roofs, **others))


CASES = {  # the operations of a step on a CPU of 10 ms, unless the parts say otherwise → the kind and its share
    "products near the peak": ([product(9, gflop=0.6)], {}, "compute", 0.9),
    "products far from the peak are arithmetic, too": ([product(9, gflop=0.05)], {}, "compute", 0.89),  # 0.1 ms a call
    "small products": ([product(0.09, gflop=0.0001)] * 100, {}, "host", 0.96),
    "a matrix times a vector": ([product(9, gflop=0.08, cold=160e6)], {}, "memory", 0.9),
    "elementwise work on large tensors": ([elementwise(9, cold=128e6)], {}, "memory", 0.9),
    "elementwise work in the cache": ([elementwise(9)], {}, "elementwise", 0.9),
    "look-ups in a large table": ([elementwise(9, cold=4e6, scattered_bytes=4e6, name="embedding")], {}, "memory", 0.9),
    "strides through large tensors": (
        [elementwise(9, cold=4e6, scattered_bytes=64e6, name="cumsum")],
        {},
        "memory",
        0.9,
    ),
    "a copy at a tenth of the bandwidth": ([elementwise(9, cold=20e6, name="clone")], {}, "memory", 0.9),
    "special functions on large tensors": ([elementwise(9, cold=20e6, name="lgamma")], {}, "elementwise", 0.9),
    "page faults of other threads alone": ([elementwise(9, page_faults=12_000)], {}, "elementwise", 0.9),
    "page faults of fresh memory": ([elementwise(9, page_faults=12_000, waited_faults=12_000)], {}, "memory", 0.84),
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


def test_time_is_divided_between_memory_and_compute_where_both_need_as_much():
    found = verdict([product(10, gflop=0.5, cold=100e6)])  # 5 ms at either roof
    assert found.shares["memory"] == found.shares["compute"] == pytest.approx(0.5)
    assert found.certainty == "probable"


def test_a_short_operation_that_needs_its_time_at_the_roofs_is_no_overhead():
    short = Operation("aten.mm", "forward", "", "fp32", 100, 100 * 1e6, 0, 0, 100 * 20e-6)  # 10 of 20 µs each
    assert verdict([short], {"forward": 2}).kind == "compute"


def test_operations_that_were_timed_in_a_slower_moment_are_scaled_to_the_step():
    found = verdict([product(8), elementwise(8, cold=128e6)])
    assert found.shares["memory"] == found.shares["compute"] == pytest.approx(0.5, abs=0.01)
    assert "the operations took 1.6 times as long while they were recorded as a step has for them" in found.evidence


def test_operations_that_took_far_longer_while_they_were_recorded_are_no_evidence():
    found = verdict([product(87)])
    assert found.kind == "unclear"
    assert "because the operations took 8.7 times as long while they were recorded" in found.evidence


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
    "busy, by its counters": ([product(0.1, gflop=50)], {"forward": 10}, 0.95, "compute", "clear"),
    "idle, by its counters": ([product(0.1, gflop=50)], {"forward": 10}, 0.12, "host", "clear"),
    "neither floor explains the step": ([product(0.1, gflop=5)], {"forward": 10}, None, "unclear", "unclear"),
    "the host waits for data, the device does not": (
        [product(0.1, gflop=200)], {"data_wait": 12, "forward": 8}, 0.97, "compute", "clear",
    ),
    "the device waits for data": ([product(0.1, gflop=20)], {"data_wait": 15, "forward": 5}, 0.12, "input", "clear"),
}  # fmt: skip


@pytest.mark.parametrize("case", GPU_CASES)
def test_an_asynchronous_device_is_judged_by_its_busy_share_or_by_the_floors(case):
    operations, parts, busy, kind, certainty = GPU_CASES[case]
    found = verdict(operations, parts, GPU, "cuda", busy=busy)
    assert (found.kind, found.certainty) == (kind, certainty)


def test_waiting_and_copying_count_up_to_the_devices_idle_time():
    found = verdict([product(0.1, gflop=200)], {"data_wait": 12, "forward": 8}, GPU, "cuda", busy=0.97)
    assert found.shares["input"] == pytest.approx(0.03)


def test_a_devices_own_counters_tell_memory_from_arithmetic():
    work = [product(0.1, gflop=100), elementwise(0.1, cold=1e9)]
    assert verdict(work, {"forward": 10}, GPU, "cuda", busy=0.9).kind == "compute"
    assert verdict(work, {"forward": 10}, GPU, "cuda", busy=0.9, memory_busy=0.7, tensor_busy=0.1).kind == "memory"


BUSY, QUIET = Noise(0.4, 0.03, 0.0), Noise(0.02, 0.01, 0.4)


def test_where_others_took_a_quarter_of_the_processor_in_most_windows_there_is_no_verdict_but_what_to_do():
    found = verdict([product(9, gflop=0.6)], windows=[BUSY, QUIET, BUSY])
    assert (found.kind, found.certainty, found.busy, found.shares) == ("unclear", "unclear", True, {})
    assert found.evidence == "other programs took 43 % of the processor: close them and run again"
    assert limit_row(vars(found)) == ("busy", found.evidence)


def test_a_hypervisor_that_took_most_of_it_is_named():
    found = verdict([product(9, gflop=0.6)], windows=[Noise(0.02, 0.4, 0.1)])
    assert found.evidence == "the hypervisor took 42 % of the processor: run again when the machine is quieter"


@pytest.mark.parametrize("windows", [[], [Noise()], [QUIET, BUSY, QUIET], [Noise(0.2, 0.05, 0.3)]])
def test_a_verdict_needs_no_quiet_machine_in_every_window(windows):
    assert verdict([product(9, gflop=0.6)], windows=windows).kind == "compute"


def test_a_kernel_that_runs_all_the_time_on_few_multiprocessors_leaves_nothing_to_the_host():
    cost = {"parts_ms": {"forward": 10.0}, "work_ms_median": 10.0, "step_ms_median": 10.0, "step_ms_p90": 10.0}
    read = {"device": "cuda", "updates": 100, "batch_size": 8, "utilization_pct": 100.0, "sm_activity_pct": 15.0}
    found = bottleneck_facts(cost | read, None, Seen([product(0.1)]), Setting("cuda"))["bottleneck"]
    assert found["shares"].get("host", 0.0) == 0.0


@pytest.mark.parametrize("factor", [3.0, 0.3])
def test_operations_of_steps_that_do_not_stand_for_the_others_are_not_used(factor):
    found = verdict([product(9, gflop=0.6)], changed=factor)
    assert (found.kind, found.certainty) == ("unclear", "unclear")
    assert found.evidence == (
        f"of the step not known 100 %, because the steps changed: the median step takes {factor:g} times as long as those "
        "whose operations were recorded"
    )
    assert verdict([product(2)], {"data_wait": 8, "forward": 2}, changed=factor).kind == "input"


DOUBTS = {
    "only 3 steps measured": {"steps": 3},
    "other programs used 35 % of the processor meanwhile": {"others": 0.35},
    "one step in ten takes 2.1 times the median": {"spread": 2.1},
    "the device is not calibrated": {"roofs": None},
    "waiting for other ranks is not measured without CommunicationMonitor": {"communication_ms": None},
}


@pytest.mark.parametrize("doubt", DOUBTS)
def test_thin_evidence_makes_the_verdict_probable_and_says_why(doubt):
    found = verdict([product(8, gflop=0.6), elementwise(2, cold=40e6)], **DOUBTS[doubt])
    assert (found.kind, found.certainty) == ("compute", "probable")
    assert found.evidence.endswith(f"; {doubt}")


def test_a_device_that_is_not_calibrated_is_a_doubt_whichever_the_second_share_is():
    found = verdict([elementwise(9, cold=128e6)], {"data_wait": 1, "forward": 9}, roofs=None)
    assert (found.kind, found.certainty) == ("memory", "probable")


def test_launches_that_take_longer_than_the_device_limit_it():
    work = [product(0.1, gflop=130), tiny(1800)]  # 2.6 ms of arithmetic, 9 ms of launches
    assert verdict(work, {"forward": 10}, GPU, "cuda").kind == "host"


def test_on_a_gpu_the_rate_is_that_of_the_device_and_not_of_the_hosts_calls():
    found = verdict([elementwise(0.1, cold=10e9)], {"forward": 10}, GPU, "cuda")
    assert "moving 10 GB through memory, at 1 TB/s of the 2 TB/s measured here" in found.evidence


def test_a_copy_to_mps_may_wait_for_the_device_and_is_no_verdict():
    assert verdict([tiny(5)], {"transfer": 9, "forward": 1}, GPU, "mps").kind == "unclear"


def test_two_causes_that_are_nearly_as_large_are_both_named():
    found = verdict([product(5.2, gflop=0.3), elementwise(4.8, cold=80e6)])
    assert (found.kind, found.certainty) == ("compute", "probable")
    assert "memory is nearly as much (48 %)" in found.evidence


def test_three_even_causes_are_unclear_and_the_shares_are_said():
    parts = {"data_wait": 3.4, "forward": 6.6}
    found = verdict([product(3.3, gflop=0.2), elementwise(3.3, cold=60e6)], parts)
    assert (found.kind, found.certainty) == ("unclear", "unclear")
    assert found.evidence == "of the step input 34 %, memory 33 %, compute 33 %"


def test_without_operations_the_work_is_unknown_and_the_verdict_says_so():
    found = verdict(parts={"forward": 9, "other": 1})
    assert found.kind == "unclear"
    assert found.evidence == "of the step host 10 %, not known 90 %, because no step's operations were recorded"


def test_without_operations_the_parts_may_still_tell():
    assert verdict(parts={"data_wait": 8, "forward": 2}).kind == "input"
    assert verdict(parts={"forward": 2, "other": 8}).kind == "host"
    assert verdict(parts={"forward": 4, "backward": 5, "other": 1}, mfu=0.4).kind == "compute"
    assert verdict(parts={"forward": 5}, device="cuda", busy=0.1).kind == "host"
    assert verdict(parts={"forward": 2, "other": 8}, device="mps").kind == "unclear"


@pytest.mark.parametrize("parts", [{}, {"forward": 0.0}, {"forward": math.nan}, {"forward": 2, "backward": -1}])
def test_a_step_without_a_time_has_no_bottleneck(parts):
    assert find_bottleneck(Step(parts, operations=[tiny(5)])) is None


EVIDENCE = {
    "80 % of the step is waiting for data: 8 ms of 10 ms": ([product(1)], {"data_wait": 8, "forward": 2}),
    "90 % of the step is moving 64 MB through memory out of order (1.02 GB in whole cache lines), at 7.11 GB/s of the 20 GB/s "
    "measured here; most of it in cumsum of net": (
        [elementwise(9, cold=64e6, scattered_bytes=1024e6, name="cumsum")],
        {},
    ),
    "90 % of the step is arithmetic: 600 MFLOP, at 67 % of the peak measured here; most of it in mm of net": (
        [product(9, gflop=0.6)],
        {},
    ),
    "80 % of the step is moving 128 MB through memory, at 16 GB/s of the 20 GB/s measured here; most of it in mul of net": (
        [elementwise(8, cold=128e6)],
        {},
    ),
    "90 % of the step is elementwise and similar operations: 1 operation on 4 MB; most of it in exp of net": (
        [elementwise(9, name="exp")],
        {},
    ),
    "84 % of the step is page faults: 12,000, for freshly allocated memory; most of it in mul of net": (
        [elementwise(9, page_faults=12_000, waited_faults=12_000)],
        {},
    ),
    "89 % of the step is arithmetic: 10 MFLOP, at 1 % of the peak measured here; most of it in mm of net": (
        [product(9, gflop=0.01)],
        {},
    ),
    "90 % of the step is overhead: 9 ms of Python, autograd and framework around 1 operation": ([product(1)], {}),
    "100 % of the step is overhead: 5 ms of Python, autograd and framework around 1,000 operations, and 1,000 operations "
    "that are mostly their call, 5 µs each": ([tiny(1000)], {}),
    "100 % of the step is overhead: 1,000 operations that are mostly their call, 12 µs each": ([tiny(1000, us=12)], {}),
}


def test_a_hook_that_prepares_the_batch_is_named():
    found = verdict([product(1)], {"data_wait": 8, "forward": 2}, preparing="on_after_batch_transfer")
    assert found.kind == "input"
    assert found.evidence == "80 % of the step is preparing the batch in on_after_batch_transfer: 8 ms of 10 ms"


@pytest.mark.parametrize("line", EVIDENCE)
def test_the_evidence_is_one_line_with_the_numbers_of_the_verdict(line):
    operations, parts = EVIDENCE[line]
    assert verdict(operations, parts).evidence == line


def test_most_of_it_is_more_than_half_of_it_and_otherwise_the_largest_has_its_share():
    layers = [Operation("aten.mm", "forward", f"layer{n}", "fp32", 1, 0.06e9, 0, 0, 0.9 * MS) for n in range(10)]
    found = verdict([*layers[:9], Operation("aten.mm", "forward", "conv2", "fp32", 1, 0.07e9, 0, 0, 1 * MS)])
    assert "most of it" not in found.evidence
    assert found.evidence.endswith("; largest: mm of conv2, 11 % of it")


def test_arithmetic_has_flops():
    found = verdict([elementwise(8.6, name="exp")])
    assert found.kind == "elementwise"
    assert "FLOP" not in found.evidence and "arithmetic" not in found.evidence
    assert limit_row(vars(found)) == ("limit", "elementwise and similar operations (86 % of the step)")


def test_arithmetic_of_operations_that_were_not_recorded_is_known_by_the_peak():
    found = verdict(parts={"forward": 4, "backward": 5, "other": 1}, mfu=0.4)
    assert found.evidence.startswith("90 % of the step is arithmetic, at 40 % of the peak measured here")


def test_a_share_of_a_mixed_step_is_that_of_its_own_operations_alone():
    found = verdict([product(5, gflop=0.3), elementwise(4)])
    assert (found.kind, found.share) == ("compute", pytest.approx(0.5, abs=0.01))
    assert found.shares["elementwise"] == pytest.approx(0.4, abs=0.01)


@pytest.mark.parametrize(
    ("found", "row"),
    [
        ({"kind": "compute", "certainty": "clear", "share": 0.57}, ("limit", "arithmetic (57 % of the step)")),
        (
            {"kind": "input", "certainty": "probable", "share": 0.4},
            ("limit", "probably waiting for data (40 % of the step)"),
        ),
        (
            {
                "kind": "unclear",
                "certainty": "unclear",
                "share": 0.3,
                "shares": {"compute": 0.3, "host": 0.25, "input": 0.01},
            },
            ("limit", "unclear: arithmetic 30 %, Python and framework overhead 25 %, unknown 44 %"),
        ),
    ],
)
def test_a_verdict_is_one_row(found, row):
    assert limit_row({"evidence": "", **found}) == row


def test_the_floor_of_a_cpu_is_the_sum_of_the_largest_needs():
    floor = step_floor([product(9, gflop=0.5), elementwise(9, cold=40e6), tiny(100)], CPU)
    assert (floor.compute, floor.memory, floor.launch) == pytest.approx((5 * MS, 2 * MS, 0.2 * MS))
    assert floor.total == pytest.approx(7.2 * MS)


def test_the_floor_of_an_asynchronous_device_is_the_larger_of_its_own_and_the_hosts():
    work = [product(0.1, gflop=50), elementwise(0.1, cold=4e9)]
    assert step_floor(work, GPU).total == pytest.approx(3 * MS)
    assert step_floor([*work, tiny(1000)], GPU).total == pytest.approx(1002 * 5e-6)


def test_an_operation_of_a_type_without_a_peak_is_held_against_the_highest():
    odd = Operation("aten.mm", "forward", "", "other", 1, 100e9, 0, 0, 1.0)
    assert CPU.compute_seconds(odd) == pytest.approx(1.0)
