"""What the page of a report hides of the machine: home folders where a path begins."""

import pytest

from batchscope.analysis import analyse, page, plots
from tests.support.synthetic_runs import write_rates


@pytest.fixture(autouse=True)
def home(monkeypatch):
    monkeypatch.setattr(page, "_HOME", "/data/users/me")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/data/users/me/x: no such file", "~/x: no such file"),
        ("data.root=/data/users/me, (/home/alice/x) and '/Users/bob'", "data.root=~, (~/x) and '~'"),
        ("file:///home/alice/x [/root/y]", "file://~/x [~/y]"),
        ("/data/users/me.", "~."),
        # Another path that holds the same names.
        ("/mnt/home/user/x", "/mnt/home/user/x"),
        ("/mnt/data/users/me/x", "/mnt/data/users/me/x"),
        ("../root/x and a/root and ~/home/x", "../root/x and a/root and ~/home/x"),
        ("/data/users/mentor", "/data/users/mentor"),
    ],
)
def test_a_home_folder_is_replaced_where_a_path_begins(text, shown):
    assert page.anonymous(text) == shown


def test_a_page_shows_its_commands_so(tmp_path):
    report = analyse([write_rates(tmp_path, {8: 1000, 64: 6000}, command="data.root=/home/alice/data x=<b>")])
    assert "<pre>data.root=~/data x=&lt;b&gt;</pre>" in page.page(report, {})


def test_a_picture_names_no_home_folder_and_its_runs(tmp_path):
    svg = '<svg viewBox="0 0 1 1"><g id="axes_1"/><g id="run-3_4"><text>/home/alice/x</text></g></svg>'
    report = analyse([write_rates(tmp_path, {8: 1000, 64: 6000})])
    shown = page.page(report, {"memory": plots.Picture({}, f'<?xml version="1.0"?>\n{svg}')})
    assert ' viewBox="0 0 1 1"><g/><g data-runs="3 4"><text>~/x</text></g></svg>' in shown
