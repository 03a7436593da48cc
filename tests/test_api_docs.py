"""docs/api.md: its examples run and print a summary, and it names what the packages offer."""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "api.md").read_text(encoding="utf-8")


def test_the_examples_run_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(examples) == 4
    namespace: dict[str, Any] = {"__name__": "api"}
    for number, example in enumerate(examples, start=1):
        exec(compile(example, f"docs/api.md, example {number}", "exec"), namespace)  # noqa: S102 - our own documentation
    said = capsys.readouterr().out
    assert "Classifier · batch 32 · cpu" in said
    assert "\nstep    " in said
    found = namespace["monitor"].summary  # of 64 time steps a sample
    assert found["timesteps_per_sec"] == pytest.approx(64 * found["samples_per_sec"])


@pytest.mark.parametrize("package", ["batchscope", "batchscope.callbacks", "batchscope.models", "batchscope.data"])
def test_every_public_name_has_a_row(package: str) -> None:
    rows = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert set(import_module(package).__all__) <= named
