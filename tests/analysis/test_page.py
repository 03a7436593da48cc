"""The page of a report and its plots hide home folders of the machine where a path begins."""

import base64
import re
from dataclasses import replace
from pathlib import PureWindowsPath

import pytest

from batchscope.analysis import analyse, anonymous, page, plots, write_report
from batchscope.analysis.report import Picture
from tests.support.synthetic_runs import write_rates


@pytest.fixture(autouse=True)
def home(monkeypatch):
    monkeypatch.setattr(anonymous, "_HOME", "/data/users/me")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/data/users/me/x: no such file", "~/x: no such file"),
        ("data.root=/data/users/me, (/home/alice/x) and '/Users/bob'", "data.root=~, (~/x) and '~'"),
        ("file:///home/alice/x [/root/y]", "file://~/x [~/y]"),
        ("/data/users/me.", "~."),
        (r"'C:\\Users\\bob\\x' and c:/users/max", r"'~\\x' and ~"),  # a record from Windows
        ("data.root=/mnt/c/Users/bob/x", "data.root=~/x"),  # the same folder in WSL
        # Other paths that contain the same names.
        ("/mnt/home/user/x", "/mnt/home/user/x"),
        ("/mnt/data/users/me/x", "/mnt/data/users/me/x"),
        ("../root/x and a/root and ~/home/x", "../root/x and a/root and ~/home/x"),
        ("/data/users/mentor", "/data/users/mentor"),
    ],
)
def test_a_home_folder_is_replaced_where_a_path_begins(text, shown):
    assert anonymous.anonymise(text) == shown


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("batchscope train model=cnn", "batchscope train model=cnn"),
        ("batchscope train data.root=/home/alice/data", 'batchscope train data.root="$HOME"/data'),
        ("/data/users/me/train.py '+a=[1, 2]'", "\"$HOME\"/train.py '+a=[1, 2]'"),
        ("batchscope train 'data.root=/home/alice/my data'", "batchscope train 'data.root='\"$HOME\"'/my data'"),
        ("batchscope train x='/home/alice/", "batchscope train x=''\"$HOME\"'/"),  # an open quote
    ],
)
def test_a_command_for_the_clipboard_has_a_home_folder_that_a_shell_replaces(command, shown):
    assert anonymous.anonymous_command(command) == shown


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (r"train data.root=C:\Users\max\mnist", r"train data.root=%USERPROFILE%\mnist"),
        (r"train data.root=C:/Users/max/mnist", r"train data.root=%USERPROFILE%/mnist"),
        (r"train data.root=c:\users\MAX\mnist", r"train data.root=%USERPROFILE%\mnist"),
        (r"train data.root=C:/Users/bob/mnist", r"train data.root=%USERPROFILE%/mnist"),
        ("train \"data.root='C:\\Users\\max\\my data'\"", "train \"data.root='%USERPROFILE%\\my data'\""),
    ],
)
def test_of_windows_it_is_one_that_cmd_replaces(command, shown, monkeypatch):
    monkeypatch.setattr(anonymous, "_HOME", r"C:\Users\max")
    monkeypatch.setattr(anonymous, "Path", PureWindowsPath)
    assert anonymous.anonymous_command(command) == shown


def test_a_page_shows_its_commands_so(tmp_path):
    report = analyse([write_rates(tmp_path, {8: 1000, 64: 6000})])
    report.answers[0] = replace(report.answers[0], repeat="data.root=/home/alice/data x=<b>")
    shown = "<pre>data.root=&quot;$HOME&quot;/data x=&lt;b&gt;</pre>"
    assert shown in page.page(report)


def test_a_plot_names_no_home_folder_in_any_format(tmp_path, monkeypatch):
    draw_figures = plots.figures  # all have the same title
    monkeypatch.setattr(plots, "figures", lambda *arguments: {"throughput": draw_figures(*arguments)["throughput"]})
    for number, name in enumerate(("alice", "bob")):
        write_rates(
            tmp_path / name,
            {8: 1000, 64: 6000},
            first=2 * number,
            choices={"model": f"/home/{name}/net", "data": "mnist"},
        )
    report = analyse([tmp_path])
    report.pictures.update(pictures := plots.draw(report))
    embedded = page.page(report)
    images = [base64.b64decode(data) for data in re.findall(r'base64,([^"]+)"', embedded)]
    texts = [picture.on_page.encode() for picture in pictures.values()]
    assert len(images) == 3 * len(pictures) and any(b"~/net" in text for text in texts)
    assert not any(name in content for content in (*images, *texts) for name in (b"alice", b"/home/"))


def test_the_texts_of_a_report_name_no_home_folder(tmp_path, no_plots):
    command = "batchscope train -m data.root=/home/alice/data"
    for number, name in enumerate(("alice", "bob")):
        fields = {"choices": {"model": f"/home/{name}/net", "data": "mnist"}, "command": command}
        write_rates(tmp_path / name, {8: 1000, 64: 6000}, first=2 * number, **fields)
    write_report([tmp_path], tmp_path / "report")
    names = ("report.md", "report.html", "answer.json", "sweep.csv")
    texts = {name: (tmp_path / "report" / name).read_text() for name in names}
    assert '    batchscope train -m data.root="$HOME"/data' in texts["report.md"].splitlines()
    assert not any(hidden in text for text in texts.values() for hidden in ("/alice", "/bob", "/home/"))
    assert {path.name for path in (tmp_path / "report" / "tensorboard").iterdir()} == {"net", "net_2"}


def test_a_page_without_plots_has_no_heading_for_them(tmp_path):
    report = analyse([write_rates(tmp_path, {8: 1000, 64: 6000})])
    assert "<h2>Plots</h2>" not in page.page(report)
    report.pictures["memory"] = Picture("", {}, "<svg />")
    assert "<h2>Plots</h2>" in page.page(report)


def test_a_picture_names_its_runs(tmp_path):
    svg = '<svg viewBox="0 0 1 1"><g id="axes_1"/><g id="run-3_4"><text>~/x</text></g></svg>'
    report = analyse([write_rates(tmp_path, {8: 1000, 64: 6000})])
    report.pictures["memory"] = Picture("", {}, f'<?xml version="1.0"?>\n{svg}')
    shown = page.page(report)
    assert ' viewBox="0 0 1 1"><g/><g data-runs="3 4"><text>~/x</text></g></svg>' in shown
