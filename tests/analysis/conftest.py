"""What the tests of this folder share."""

import pytest

from batchscope.analysis import plots, report


@pytest.fixture
def pictures_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports without `report.html` and the cards of TensorBoard, for tests of plots."""
    monkeypatch.setattr(report, "_why_no_html", lambda: "no report.html")
    monkeypatch.setattr(plots, "cards", lambda analyses: {})


@pytest.fixture
def words_alone(pictures_alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports without any picture, which take most of the time, for tests of what a report says."""
    monkeypatch.setattr(plots, "draw", lambda analyses, out: ([], []))
