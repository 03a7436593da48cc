"""docs/api.md: its examples run, and it names what the packages offer."""

import re
from importlib import import_module
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


def test_the_examples_run_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    examples = re.findall(
        r"^```python\n(.*?)^```", (DOCS / "api.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    assert len(examples) >= 6
    namespace: dict[str, object] = {"__name__": "api"}
    for number, example in enumerate(examples, start=1):
        exec(compile(example, f"docs/api.md, example {number}", "exec"), namespace)  # noqa: S102 - our own documentation


@pytest.mark.parametrize("package", ["batchscope", "batchscope.callbacks", "batchscope.models", "batchscope.data"])
def test_every_public_name_has_a_row(package: str) -> None:
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert set(import_module(package).__all__) <= named
