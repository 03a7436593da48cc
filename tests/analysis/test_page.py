"""What the page of a report hides of the machine: home folders where a path begins, in commands by what a shell expands."""

import html
import shlex
import subprocess
from dataclasses import replace

import pytest

from batchscope.analysis import analyse, page
from batchscope.analysis.statements import Statement
from tests.support.synthetic_runs import write_rates


@pytest.fixture(autouse=True)
def home(monkeypatch):
    monkeypatch.setattr(page, "_HOME", "/data/users/me")
    return "/data/users/me"


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


WORDS = [
    "hydra.sweep.dir=/data/users/me/my sweeps/1",
    "--config-dir=/data/users/me/conf",
    "data.roots=[/data/users/me/a,/data/users/me/b c]",
    "data.root='/data/users/me/$x'",
    "/data/users/me/.venv/bin/python",
    "data.cache=/mnt/data/users/me/x",
    "~callbacks.device",
    "relative=out/1",
]


@pytest.mark.parametrize("word", WORDS)
def test_a_command_without_the_home_folder_means_the_same_to_the_shell(word, home):
    shown = page.anonymous_command(shlex.join(["echo", word]))
    assert home not in shown.replace("/mnt" + home, "")
    words = subprocess.check_output(["sh", "-c", f"printf '%s\\n' {shown}"], env={"HOME": home}, text=True)
    assert words.splitlines() == ["echo", word]


@pytest.mark.parametrize("folder", ["/home/shared", "/Users/bob", "/root"])
def test_the_home_folder_of_another_user_is_no_folder_in_a_command(folder):
    assert page.anonymous_command(f"train data.root={folder}/mnist") == "train data.root='<home>'/mnist"


def test_the_home_folder_of_root_is_its_own(monkeypatch):
    monkeypatch.setattr(page, "_HOME", "/root")
    assert page.anonymous_command("train data.root=/root/mnist") == 'train data.root="$HOME"/mnist'


def test_a_page_shows_its_commands_so(tmp_path):
    command = shlex.join(["train", "data.root=/home/alice/my data"])
    report = replace(
        analyse([write_rates(tmp_path, {8: 1000, 64: 6000})]), statements=[Statement(["Line."], None, command)]
    )
    shown = page.page(report, {})
    assert html.escape("train data.root='<home>''/my data'") in shown and "alice" not in shown
