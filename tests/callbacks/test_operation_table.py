"""The tables of an explanation fit the terminal."""

from dataclasses import replace

import pytest

from batchscope.callbacks._operation_table import explanation_text
from batchscope.records.explanation import Explanation, Gap
from tests.support.explanations import cost, explanation

NUMBERS = {"calls": 1234, "flops": 1.23e9, "bytes": 1.23e8, "cold_bytes": 1.23e7, "seconds": 1.23, "floor_seconds": 0.5}
EVIDENCE = "86 % of the step is arithmetic: 4 GFLOP, at 41 % of the peak measured here; most of it in convolution"


def wide() -> Explanation:
    """A step whose names and lines are long."""
    attention = "aten._scaled_dot_product_flash_attention_for_cpu_backward"
    operations = [
        cost("model.encoder.layers.11.self_attention.output_projection", "backward", attention, **NUMBERS),
        cost("model.features.0", "forward", "aten.convolution", **NUMBERS),
        cost("", "optimizer", "aten._fused_adamw_", **NUMBERS),
    ]
    found = {"kind": "compute", "share": 0.86, "certainty": "clear", "evidence": EVIDENCE}
    gaps, notes = [Gap(attention, "aten.convolution", 1e-3, 2, 1e-3)], ["the trace is " + "very " * 40 + "long"]
    return replace(explanation(*operations), bottleneck=found, gaps=gaps, notes=notes)


@pytest.mark.parametrize("width", [80, 100, 200])
def test_no_line_is_wider_than_the_terminal_and_no_word_is_lost(width: int) -> None:
    text = explanation_text(wide(), width=width)
    assert max(map(len, text.splitlines())) <= width
    assert f"limit: {EVIDENCE}" in " ".join(text.split())


def test_every_module_has_its_numbers_and_a_long_path_keeps_its_end() -> None:
    lines = explanation_text(wide(), width=80).splitlines()
    (heading,) = [line for line in lines if line.startswith("module")]
    assert heading.split() == ["module", "share", "time", "calls", "FLOPs", "bytes", "bound/time"]
    (row,) = [line for line in lines if "…" in line and " bwd " in line]
    assert "attention_for_cpu_backward" in row
    (row,) = [line for line in lines if line.startswith("model.features.0 ")]
    assert row.split()[1:] == ["12", "%", "1.23", "s", "1,234", "1.23", "G", "123", "MB", "41", "%"]


def test_the_width_is_that_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert explanation_text(wide()) == explanation_text(wide(), width=80)
