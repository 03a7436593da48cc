"""A result names the machine on which it was measured."""

import importlib.util
import json
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location(
    "harness", Path(__file__).resolve().parents[2] / "benchmarks" / "harness.py"
)
harness = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(harness)


@pytest.mark.parametrize(("data", "named"), [({}, "here, today"), ({"machine": "there, then"}, "there, then")])
def test_a_table_made_again_keeps_the_machine_and_date_of_the_measurement(
    data: dict[str, str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(harness, "machine", lambda: "here, today")
    harness.write_result("speed", "| table |", data)
    assert (tmp_path / "speed.md").read_text() == f"| table |\n\n{named}\n"
    assert json.loads((tmp_path / "speed.json").read_text()) == {"machine": named}
