"""The summary of a run in words: the few rows that every run ends with, and the details."""

import pytest

from batchscope.callbacks._run_words import details, headline

PARTS_MS = {"data_wait": 0.05, "transfer": 0.02, "forward": 0.31, "backward": 0.52, "optimizer": 0.21, "other": 0.13}
ARITHMETIC = {"kind": "compute", "share": 0.57, "certainty": "clear", "evidence": "57 % of the step is arithmetic"}
ADVICE = {"advice": "trainer.precision=bf16-mixed", "advice_effect": "was measured to compute faster here"}


def summary(**facts):
    """The summary of a run on a CPU with 512 samples in a step of 1.24 ms; `facts` add entries or replace them."""
    rate = 512 / 1.24e-3
    cost = {"updates": 1, "batch_size": 512, "step_ms": 1.24, "step_ms_median": 1.24, "parts_ms": PARTS_MS}
    cost |= {"samples_per_sec": rate, "samples_per_sec_mean": rate, "batches_per_sec": 1e3 / 1.24}
    return {**cost, "title": "cnn · mnist", "device": "cpu", "device_name": "", "precision": "32-true", **facts}


ON_GPUS = summary(
    device="cuda",
    device_name="NVIDIA H200",
    precision="bf16-mixed",
    processes=2,
    slow_rank={"evidence": "rank 1 is slow: its loader takes 42 ms a step", "advice": "see what differs there"},
    samples_per_sec_mean=333_333.0,
    others_share=0.2,
    utilization_pct=98.0,
    memory_peak_gib=0.4,
    throttled_pct=34.0,
    bottleneck=ARITHMETIC | ADVICE,
)


def test_a_run_ends_with_five_rows_and_several_ranks_and_a_gpu_have_one_each() -> None:
    expected = [
        "step    1.24 ms: forward 25, backward 42, optimizer 17, rest 16 %",
        "limit   arithmetic (57 % of the step)",
        "try     trainer.precision=bf16-mixed",
    ]
    title, speed, *rows = headline(summary(bottleneck=ARITHMETIC | ADVICE))
    assert (title, speed, rows) == ("cnn · mnist · batch 512 · cpu", "speed   413,000 samples/s", expected)
    expected[1:1] = [
        "ranks   rank 1 is slow: its loader takes 42 ms a step; see what differs there",
        "device  a kernel ran in 98 % of the time, clocks lowered in 34 % of the time, peak memory 0.400 GiB",
    ]
    title, speed, *rows = headline(ON_GPUS)
    assert title == "cnn · mnist · batch 2 × 512 · cuda (NVIDIA H200) · bf16-mixed"
    assert speed == (
        "speed   333,000 samples/s beside other programs that took 20 % of the processor (413,000 at the median step)"
    )
    assert rows == expected


FAST = {"samples_per_sec_mean": 3330.0, "samples_per_sec": 3900.0}
LOADED = "3,330 samples/s beside other programs that took 38 % of the processor"
BUSY = "other programs took 43 % of the processor: close them and run again"
UNCLEAR = {"kind": "unclear", "certainty": "unclear", "share": 0.0, "shares": {}, "evidence": BUSY, "busy": True}
SIXTHS = {"data_wait": 1, "forward": 4, "backward": 1}
ROWS = [
    (FAST | {"samples_per_sec": 3480.0}, "speed", "3,330 samples/s"),  # the difference is within the noise
    (FAST, "speed", "3,330 samples/s (3,900 at the median step)"),
    (FAST | {"update_size_varies": True}, "speed", "3,330 samples/s (3,900 in undisturbed steps)"),
    (FAST | {"others_share": 0.09}, "speed", "3,330 samples/s (3,900 at the median step)"),
    (FAST | {"others_share": 0.38}, "speed", f"{LOADED} (3,900 at the median step)"),
    ({"others_share": 0.1}, "speed", "413,000 samples/s beside other programs that took 10 % of the processor"),
    ({"others_share": 0.09}, "speed", "413,000 samples/s"),
    ({"samples_per_sec": 0.1234, "samples_per_sec_mean": 0.1234}, "speed", "0.123 samples/s"),
    ({"parts_ms": {"forward": 96, "optimizer": 4}}, "step", "1.24 ms: forward 96, rest 4 %"),
    ({"parts_ms": {"forward": 50, "backward": 50}, "step_ms": 38.0}, "step", "38.0 ms: forward 50, backward 50 %"),
    ({"parts_ms": {"data_wait": 99.9, "forward": 0.1}}, "step", "1.24 ms: data 100 %"),
    ({"parts_ms": SIXTHS}, "step", "1.24 ms: data 17, forward 66, backward 17 %"),
    ({"missing": {"bottleneck": "the clock has jumped"}}, "limit", "unknown: the clock has jumped"),
    ({"bottleneck": UNCLEAR}, "load", BUSY),
    ({"bottleneck": UNCLEAR}, "limit", None),
    ({"processes": 2, "ranks_ms": {"input": [1.0, 1.1]}}, "ranks", None),
]


@pytest.mark.parametrize(("facts", "row", "words"), ROWS)
def test_a_row_says_what_is_known_of_a_run(facts, row: str, words: str | None) -> None:
    rows = {line[:8].rstrip(): line[8:] for line in headline(summary(**facts))[1:]}
    assert rows.get(row) == words


def test_the_programs_that_took_most_are_named_where_their_load_is_said() -> None:
    run = summary(**FAST, others_share=0.38)
    assert headline(run, "chrome")[1] == f"speed   {LOADED}, mostly chrome (3,900 at the median step)"
    assert "chrome" not in " ".join(headline(run | {"others_share": 0.09}, "chrome"))


@pytest.mark.parametrize("facts", [{}, {"updates": 9, "step_ms": 1.0}], ids=["no time", "no analysis and no samples"])
def test_a_summary_without_a_verdict_says_why(facts) -> None:
    facts |= {"missing": {"bottleneck": "no batch was trained"}}
    assert headline(facts) == ["speed   unknown: no batch was trained"]
    assert details(facts)[-1] == "no bottleneck: no batch was trained"


def test_the_details_have_every_number_and_the_evidence() -> None:
    run = summary(mfu=0.1941, updates=1200, step_ms_interval=[1.2, 1.3], parts_ms={"forward": 0.9, "other": 0.34})
    run["ranks_ms"] = {"input": [1.0, 42.0, 1.1]}
    assert details(run | {"bottleneck": ARITHMETIC | ADVICE, "missing": {"energy": "there is no counter"}}) == [
        "updates 1200",
        "batch_size 512",
        "step_ms 1.24",
        "step_ms_median 1.24",
        "parts_ms.forward 0.900",
        "parts_ms.other 0.340",
        "samples_per_sec 413,000",
        "samples_per_sec_mean 413,000",
        "batches_per_sec 806",
        "title cnn · mnist",
        "device cpu",
        "precision 32-true",
        "mfu 0.194",
        "step_ms_interval 1.20 to 1.30",
        "ranks_ms.input 1.00, 42.0, 1.10",
        "limit: 57 % of the step is arithmetic",
        "trainer.precision=bf16-mixed: was measured to compute faster here",
        "no energy: there is no counter",
    ]
    assert details(summary(bottleneck=UNCLEAR))[-1] == f"limit: {BUSY}"
