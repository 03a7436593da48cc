"""The judgement of a verdict: what is right, and what contradicts its own numbers; and the list of built-in causes."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from built_in import verdicts
from built_in.cases import CASES
from causes import holds, in_a_process, judge

KINDS = {"input", "host", "memory", "compute"}
PARTS = {"data_wait": 1.0, "transfer": 0.0, "forward": 4.0, "backward": 4.0, "optimizer": 0.5, "other": 0.5}  # 10 ms


def against(kind: str, share: float, shares: dict[str, float] | None = None, **summary: Any) -> list[str]:
    found = {"kind": kind, "share": share} | ({"shares": shares} if shares else {})
    return verdicts.contradictions(found, {"parts_ms": PARTS, **summary}, bandwidth=20e9)


@pytest.mark.parametrize(
    ("expected", "kind", "right"),
    [
        (("host",), "host", True),
        (("host",), "memory", False),
        (("host",), "unclear", False),
        (("host", "compute"), "compute", True),
        (("host", "compute"), "unclear", True),
        (("host", "compute"), "input", False),
    ],
)
def test_unclear_is_right_for_a_mixed_case_alone(expected: tuple[str, ...], kind: str, right: bool):
    assert verdicts.is_right(expected, {"kind": kind}) is right


@pytest.mark.parametrize("nothing", [None, {}])
def test_no_verdict_is_wrong_and_contradicts_nothing(nothing: Any):
    assert not verdicts.is_right(("host", "compute"), nothing)
    assert verdicts.contradictions(nothing, {}, 20e9) == []


def test_a_verdict_that_its_numbers_bear_out():
    step = {"memory_bytes": 160e6, "floor_ms": {"memory": 8.0, "compute": 0.1, "launch": 0.1}}
    assert against("memory", 0.85, {"memory": 0.85, "host": 0.15}, step=step, mfu=0.01) == []


@pytest.mark.parametrize(
    ("found", "summary", "words"),
    [
        (("host", 0.4, {"host": 0.4, "memory": 0.6}), {}, "memory 60%"),
        (("host", 0.7, {"host": 0.5, "memory": 0.4}), {}, "the share is 70%, among the shares 50%"),
        (("host", 0.7, {"host": 0.7, "memory": 0.5}), {}, "add up to 120%"),
        (("host", 1.2), {}, "a share of 1.2"),
        (("input", 0.5), {}, "the step's data_wait only 10%"),
        (("compute", 0.9), {"mfu": 0.004}, "compute at 0.4% of the peak"),
        (("memory", 0.9), {"step": {"memory_bytes": 0}}, "memory at 0.0% of the bandwidth"),
        (("host", 0.4), {"step": {"floor_ms": {"memory": 0.0, "compute": 6.0}}}, "but compute at least 60%"),
    ],
)
def test_numbers_that_contradict_a_verdict(found: tuple, summary: dict[str, Any], words: str):
    said = against(*found, **summary)
    assert any(words in each for each in said), said


def test_traffic_in_strides_reaches_a_few_percent_of_the_bandwidth():
    step = {"memory_bytes": 5e6, "floor_ms": {"memory": 0.1, "compute": 0.0, "launch": 0.1}}
    assert against("memory", 0.9, step=step) == []
    assert against("memory", 0.9, step=step | {"memory_bytes": 5e5}) == ["memory at 0.3% of the bandwidth"]


def test_bytes_on_paper_stand_in_for_counted_ones():
    found = {"kind": "memory", "share": 0.9}
    assert verdicts.contradictions(found, {"parts_ms": PARTS}, 20e9, paper=5e5)
    assert not verdicts.contradictions(found, {"parts_ms": PARTS}, 20e9, paper=100e6)


def test_there_are_causes_of_every_kind_and_each_has_a_reason_and_a_check():
    single = [case.expected[0] for case in CASES.values() if len(case.expected) == 1]
    assert len(CASES) >= 30
    assert set(single) == KINDS
    assert all(kind in KINDS for case in CASES.values() for kind in case.expected)
    for name, case in CASES.items():
        assert case.why, name
        assert case.ablation or case.flops or case.bytes, name


def test_a_run_that_failed_is_judged_wrong():
    judged = judge(CASES["60 tiny layers"], {"error": "killed"})
    assert not judged["right"]
    assert judged["verdict"] is None


def test_a_check_holds_within_its_limits():
    case = CASES["half input, half compute"]
    assert holds(case, "ablation", 0.5)
    assert not holds(case, "ablation", 0.95)
    assert not holds(case, "ablation", 0.1)
    assert holds(CASES["square products"], "of torch.mm", 0.5)
    assert not holds(CASES["square products"], "of torch.mm", 0.05)


@pytest.mark.slow
def test_a_case_runs_in_a_process_of_its_own(tmp_path: Path):
    found = in_a_process("sleep in training_step", threads=1, steps=12, checks=1, folder=str(tmp_path))
    judged = judge(CASES["sleep in training_step"], found)
    assert judged["right"], judged
    assert judged["contradictions"] == []
    assert judged["checks"]["ablation"] < 0.5
