"""The summary of a run in words: the few rows that every run ends with, and the details."""

import math

import pytest

from batchscope.callbacks._report import rank_facts
from batchscope.callbacks._run_words import details, headline

PARTS_MS = {"data_wait": 0.05, "transfer": 0.02, "forward": 0.31, "backward": 0.52, "optimizer": 0.21, "other": 0.13}
ARITHMETIC = {"kind": "compute", "share": 0.57, "certainty": "clear", "evidence": "57 % of the step is arithmetic"}
ADVICE = {"advice": "trainer.precision=bf16-mixed", "advice_effect": "was measured to compute faster here"}


def summary(**facts):
    """A step of 1.24 ms with 512 samples, on a CPU, and whatever else is known."""
    rate = 512 / 1.24e-3
    cost = {"updates": 1, "batch_size": 512, "step_ms": 1.24, "step_ms_median": 1.24, "parts_ms": PARTS_MS}
    cost |= {"samples_per_sec": rate, "samples_per_sec_mean": rate, "batches_per_sec": 1e3 / 1.24}
    return {**cost, "title": "cnn · mnist", "device": "cpu", "device_name": "", "precision": "32-true", **facts}


EVERYTHING = summary(
    device="cuda",
    device_name="NVIDIA H200",
    precision="bf16-mixed",
    **rank_facts([1.0, 2.5]),
    samples_per_sec_mean=333_333.0,
    samples_per_sec_fit=290_123.0,
    step_ms_p99=2.5,
    step_ms_interval=[1.2, 1.3],
    ended="time limit",
    stalls=2,
    stall_seconds=0.412,
    windows=20,
    disturbed_windows=8,
    undisturbed_steps=40,
    others_share=0.2,
    communication_ms=0.31,
    gradient_bytes=1_700_000,
    flops_per_sec=1.03e13,
    peak_flops_per_sec=5.3e13,
    mfu=0.194,
    utilization_pct=98.0,
    memory_peak_gib=0.4,
    memory_reserved_gib=0.6,
    throttled_pct=34.0,
    joules_per_sample=0.9e-3,
    bottleneck=ARITHMETIC | ADVICE,
    missing={"energy": "there is no counter"},
)


def test_a_run_ends_with_five_rows_and_several_ranks_and_a_gpu_have_one_each() -> None:
    shared = [
        "step    1.24 ms: forward 25, backward 42, optimizer 17, rest 16 %",
        "limit   arithmetic (57 % of the step)",
        "try     trainer.precision=bf16-mixed",
    ]
    first, speed, *others = headline(summary(bottleneck=ARITHMETIC | ADVICE))
    assert (first, speed, others) == ("cnn · mnist · batch 512 · cpu", "speed   413,000 samples/s", shared)
    shared[1:1] = [
        "ranks   work of a step 2.50 ms on the slowest (rank 1), 1.00 on the fastest",
        "device  a kernel ran in 98 % of the time, clocks lowered in 34 % of the time, peak memory 0.400 GiB",
    ]
    first, speed, *others = headline(EVERYTHING)
    assert first == "cnn · mnist · batch 2 × 512 · cuda (NVIDIA H200) · bf16-mixed"
    assert speed == (
        "speed   333,000 samples/s beside other programs that took 20 % of the processor (413,000 at the median step)"
    )
    assert others == shared


FAST = {"samples_per_sec_mean": 3330.0, "samples_per_sec": 3900.0}
LOADED = "3,330 samples/s beside other programs that took 38 % of the processor"
BUSY = "other programs took 43 % of the processor for most of the time: close them and run again"
UNTIMED = rank_facts([math.nan, math.nan])  # of ranks whose wait for gradients is not known
UNCLEAR = {"kind": "unclear", "certainty": "unclear", "share": 0.0, "shares": {}, "evidence": BUSY, "busy": True}
ROWS = [
    (FAST | {"samples_per_sec": 3480.0}, "speed", "3,330 samples/s"),  # no more than the noise
    (FAST, "speed", "3,330 samples/s (3,900 at the median step)"),
    (FAST | {"others_share": 0.09}, "speed", "3,330 samples/s (3,900 at the median step)"),
    (FAST | {"others_share": 0.38}, "speed", f"{LOADED} (3,900 at the median step)"),
    ({"others_share": 0.1}, "speed", "413,000 samples/s beside other programs that took 10 % of the processor"),
    ({"others_share": 0.09}, "speed", "413,000 samples/s"),
    ({"samples_per_sec": 0.1234, "samples_per_sec_mean": 0.1234}, "speed", "0.123 samples/s"),
    ({"parts_ms": {"forward": 96, "optimizer": 4}}, "step", "1.24 ms: forward 96, rest 4 %"),
    ({"parts_ms": {"forward": 50, "backward": 50}, "step_ms": 38.0}, "step", "38.0 ms: forward 50, backward 50 %"),
    ({"parts_ms": {"data_wait": 99.9, "forward": 0.1}}, "step", "1.24 ms: data 100 %"),
    ({"missing": {"bottleneck": "the clock has jumped"}}, "limit", "unknown: the clock has jumped"),
    ({"bottleneck": UNCLEAR}, "busy", BUSY),
    ({"bottleneck": UNCLEAR}, "limit", None),
    (UNTIMED, "ranks", None),
]


@pytest.mark.parametrize(("facts", "row", "words"), ROWS)
def test_a_row_says_what_is_known_of_a_run(facts, row: str, words: str | None) -> None:
    rows = {line[:8].rstrip(): line[8:] for line in headline(summary(**facts))[1:]}
    assert rows.get(row) == words


def test_the_programs_that_took_most_are_named_where_their_load_is_said() -> None:
    facts = summary(**FAST, others_share=0.38)
    assert headline(facts, "chrome")[1] == f"speed   {LOADED}, mostly chrome (3,900 at the median step)"
    assert "chrome" not in " ".join(headline(facts | {"others_share": 0.09}, "chrome"))


@pytest.mark.parametrize("facts", [{}, {"updates": 9, "step_ms": 1.0}], ids=["no time", "no analysis and no samples"])
def test_a_summary_without_a_verdict_says_why(facts) -> None:
    facts |= {"missing": {"bottleneck": "no batch was trained"}}
    assert headline(facts) == ["speed   unknown: no batch was trained"]
    assert details(facts) == ["no bottleneck: no batch was trained"]


def test_the_details_have_every_number_and_the_evidence() -> None:
    assert details(EVERYTHING) == [
        "cuda (NVIDIA H200) · bf16-mixed · 1 step measured",
        (
            "median step 1.24 ms (1.20 to 1.30, at its time limit); mean 1.24 ms = data 0.0500 + transfer 0.0200 + "
            "forward 0.310 + backward 0.520 + optimizer 0.210 + other 0.130"
        ),
        (
            "413,000 samples/s at the median step · 333,000 over all steps · 290,000 from start to end · "
            "p99 step 2.50 ms · pauses took 0.412 s · 10.3 TFLOP/s · MFU 19.4 % · peak measured here 53 TFLOP/s · "
            "a kernel ran in 98 % of the time · clocks lowered in 34 % of the time · "
            "peak memory 0.400 GiB · reserved 0.600 GiB · 900 µJ/sample · "
            "0.310 ms of the mean step wait for gradients · 1.7 MB of gradients"
        ),
        "8 of 20 windows slowed from outside, other programs took 20 % of the processor; the median is of the others",
        (
            "2 ranks, global batch 1,024, samples/s of all ranks; work of a step 2.50 ms on the slowest (rank 1), "
            "1.00 on the fastest"
        ),
        "limit: 57 % of the step is arithmetic",
        "trainer.precision=bf16-mixed: was measured to compute faster here",
        "no energy: there is no counter",
    ]


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        ({"throttled_pct": 0.0}, "413,000 samples/s at the median step · 413,000 over all steps"),
        ({"bottleneck": UNCLEAR}, f"busy: {BUSY}"),
        (UNTIMED, "2 ranks, global batch 1,024, samples/s of all ranks"),
        (UNTIMED | {"batches_per_sec": 2e3 / 1.24}, "2 ranks, global batch 2,048, samples/s of all ranks"),
    ],
)
def test_what_is_not_known_is_left_out_of_the_details(facts, line: str) -> None:
    assert details(summary(**facts))[-1] == line
