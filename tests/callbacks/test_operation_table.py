"""The tables of an explanation fit the terminal."""

from dataclasses import replace

import pytest

from batchscope.callbacks._operation_table import as_text
from batchscope.records.explanation import Explanation, Gap
from tests.support.explanations import cost, explanation

NUMBERS = {"calls": 1234, "flops": 1.23e9, "bytes": 1.23e8, "cold_bytes": 1.23e7, "seconds": 1.23, "floor_seconds": 0.5}
EVIDENCE = (
    "86 % of the step is arithmetic: 4 GFLOP, at 41 % of the peak measured here; most of it in convolution_backward"
)


def wide() -> Explanation:
    """A step whose names and lines are long."""
    long = "model.encoder.layers.11.self_attention.output_projection"
    operations = [
        cost(long, "backward", "aten._scaled_dot_product_flash_attention_for_cpu_backward", **NUMBERS),
        cost("model.features.0", "forward", "aten.convolution", **NUMBERS),
        cost("", "optimizer", "aten._fused_adamw_", **NUMBERS),
    ]
    found = {"kind": "compute", "share": 0.86, "certainty": "clear", "evidence": EVIDENCE}
    gaps = [Gap("aten._scaled_dot_product_flash_attention_for_cpu_backward", "aten.convolution", 1e-3, 2, 1e-3)]
    return replace(
        explanation(*operations), bottleneck=found, gaps=gaps, notes=["the trace is " + "very " * 40 + "long"]
    )


@pytest.mark.parametrize("width", [70, 80, 99, 100, 120, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    assert max(map(len, as_text(wide(), width=width).splitlines())) <= width


def test_a_wide_terminal_shows_every_column_and_the_whole_evidence_in_a_line() -> None:
    text = as_text(wide(), width=200)
    assert "  bytes  from memory  bound/time" in text
    assert EVIDENCE in text
    assert "backward" in text


def test_a_narrow_terminal_leaves_bytes_out_and_cuts_modules_from_the_left() -> None:
    lines = as_text(wide(), width=80).splitlines()
    (heading,) = [line for line in lines if line.startswith("costliest operations")]
    assert heading.split()[2:] == ["module", "part", "share", "time", "FLOPs", "bound/time"]
    (row,) = [line for line in lines if "…" in line and " bwd " in line]
    assert "output_projection"[-12:] in row
    assert any(line.startswith("host: Python, autograd") for line in lines)


def test_the_verdict_is_a_line_and_a_busy_machine_stands_in_its_place() -> None:
    assert f"\nlimit: {EVIDENCE}\n" in as_text(wide(), width=200)
    busy = {"kind": "unclear", "certainty": "unclear", "busy": True, "evidence": "other programs took 43 %"}
    assert "\nbusy: other programs took 43 %\n" in as_text(replace(wide(), bottleneck=busy), width=200)


def test_the_width_is_that_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert as_text(wide()) == as_text(wide(), width=80)


def test_a_text_line_is_wrapped_and_keeps_its_words() -> None:
    text = as_text(wide(), width=80)
    assert EVIDENCE not in text
    assert EVIDENCE in " ".join(text.split())
