"""`report.html`: one file that a browser shows without network, in which runs are picked and sorted by clicking."""

import re
import shutil
import socket
import subprocess
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest

from batchscope.analysis import analyse, plots, write_report
from batchscope.analysis.page import anonymous
from batchscope.analysis.page import page as rendered
from tests.support.synthetic_runs import write_curve, write_measured, write_run

USE = {"processor_time_pct": 96.0, "memory_peak_gib": 1.5, "mfu": 0.2}


def page_of(folder: Path, out: Path) -> str:
    write_report([folder], out)
    return (out / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two models, one of which is faster, and a run without result."""
    folder = tmp_path_factory.mktemp("sweep")
    for number, (model, ms) in enumerate((("cnn", 0.1), ("mlp", 0.2))):
        steps = {size: 4 + ms * size for size in (16, 64, 256)}
        write_measured(folder, steps, first=3 * number, model=model, metrics={"test/acc": 0.9}, throughput=USE)
    write_run(folder / "6", 1024, status="out_of_memory", error="OutOfMemoryError: out of memory")
    for number in range(6):
        write_curve(folder / str(number), [(10, 0.9), (20, 0.95)], 8.0)
    return page_of(folder, tmp_path_factory.mktemp("out"))


class Elements(HTMLParser):
    """The attributes of all elements of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_the_answer_comes_first(page: str):
    body = page.partition("<body>")[2]
    assert body.index('<section id="answer">') < body.index("<svg") < body.index("<table")


def test_nothing_is_loaded_from_elsewhere(page: str):
    head = page.partition("<body>")[0]
    assert "Content-Security-Policy\" content=\"default-src 'none'; script-src 'unsafe-inline'" in head
    for tag, attributes in Elements(page).found:
        assert tag not in ("link", "iframe", "object", "base", "img")
        assert "src" not in attributes
        assert not any(name.startswith("on") for name in attributes)
        assert attributes.get("xlink:href", "#").startswith("#")
    assert len(page) < 1e6


def test_each_run_is_marked_in_its_row_which_the_keyboard_reaches_and_in_every_plot(page: str):
    elements = Elements(page).found
    marked = {number: 0 for number in range(7)}
    for tag, attributes in elements:
        for number in (attributes.get("data-runs") or "").split():
            marked[int(number)] += 1
            assert tag != "tr" or attributes["tabindex"] == "0"
    assert marked[6] == 1  # it has a row alone
    assert all(marked[number] >= 10 for number in range(6))
    assert all(attributes["aria-label"] for tag, attributes in elements if tag == "svg")
    ids = [attributes["id"] for _, attributes in elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:xlink:href="|url\()#([^")]+)', page)) <= set(ids)


def test_it_names_no_home_folder_and_no_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "wotan.example.org")
    home = str(Path.home())
    for number, place in enumerate((home, "/home/alice", "/Users/bob", "/root", "wotan", "wotan.example.org")):
        error = f"OSError: {place}/data: no such file" if place.startswith("/") else f"ValueError: lost {place}:29500"
        write_run(tmp_path / str(number), 2**number, status="failed", error=error)
    text = page_of(tmp_path, tmp_path / "out").partition("<body>")[2]
    assert "~/data: no such file" in text and "lost this-host:29500" in text
    for word in ("alice", "bob", "wotan", "/root", home):
        assert word not in text


def test_a_host_of_any_name_breaks_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    report = analyse([write_measured(tmp_path, {16: 6.0, 64: 11.0}, throughput=USE)])
    pictures = plots.draw(report.sweep, report.answers, report.metrics)
    before = rendered(report, pictures)
    for host in ("data", "run-0", "svg", "cnn"):
        monkeypatch.setattr(socket, "gethostname", lambda name=host: name)
        after = rendered(report, pictures)
        assert Elements(after).found == Elements(before).found
        assert "data: mnist" in after
    assert anonymous("/home/alice/x /Users/bob", host=True) == "~/x ~"


def test_what_a_record_says_is_text_and_never_markup(tmp_path: Path):
    hostile = "</script></svg><img src=x onerror=alert(1)>"
    facts = {"model": f"cnn{hostile}", "device_name": f"A CPU $$x$$ {hostile}"}
    folder = write_measured(tmp_path / "s", {16: 6.0, 64: 11.0}, **facts)
    write_measured(folder, {16: 6.0, 64: 11.0}, first=2)  # a second group, so that plots have legends
    write_run(folder / "4", 1024, status="failed", error=f"ValueError: {hostile}", model=f"cnn{hostile}")
    text = page_of(folder, tmp_path / "out")
    assert "<img" not in text
    assert "&lt;img src=x" in text
    assert text.count("</script>") == 1
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ET.fromstring(svg)


@pytest.mark.slow  # starts a browser, where there is one
@pytest.mark.parametrize("width", [400, 1400])
def test_a_browser_shows_it(width: int, page: str, tmp_path: Path):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("there is no Chromium")
    (tmp_path / "report.html").write_text(page, encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    command = [browser, *options, f"--window-size={width},2000", "--dump-dom", f"file://{tmp_path}/report.html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "</html>" in done.stdout and 'id="answer"' in done.stdout
