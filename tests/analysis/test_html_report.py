"""`report.html`: one file that a browser shows without network, in which runs are picked and sorted by clicking."""

import itertools
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from batchscope.analysis import write_report
from batchscope.analysis.html_plots import Plots
from batchscope.analysis.read import find
from batchscope.analysis.recommend import Analysis
from tests.support.synthetic_runs import serial, write_curve, write_run, write_sweep

SIZES = [16, 64, 256]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Two models, one of which is faster, and a run without result."""
    folder = tmp_path_factory.mktemp("sweep")
    facts = {"processor_time_pct": 96.0, "memory_peak_gib": 1.5}
    write_sweep(folder, SIZES, serial(4, 0.1), metrics={"test/acc": 0.98}, throughput=facts)
    write_sweep(folder, SIZES, serial(4, 0.2), first=3, model="mlp", metrics={"test/acc": 0.97}, throughput=facts)
    write_run(folder / "6", 1024, status="out_of_memory", error="OutOfMemoryError: out of memory")
    for n in range(6):
        write_curve(folder / str(n), [(10, 0.9), (20, 0.95)], 8.0)
    return folder


@pytest.fixture(scope="module")
def report(sweep, tmp_path_factory):
    return write_report([sweep], tmp_path_factory.mktemp("out"))


@pytest.fixture(scope="module")
def file(report):
    return next(file for file in report.files if file.name == "report.html")


def body(text: str) -> str:
    return text.rpartition("<body>")[2]


def test_the_recommendation_comes_first(report, file):
    said = body(file.read_text(encoding="utf-8"))
    places = [said.index(f"<p>{headline}</p>") for headline in report.headlines if not headline.startswith(" ")]
    assert places == sorted(places)
    assert places[-1] < said.index("data-root-id")


def test_nothing_is_loaded_from_elsewhere(file):
    text = file.read_text(encoding="utf-8")
    head = text.partition("<script")[0]
    assert "Content-Security-Policy\" content=\"default-src 'none';" in head
    assert '<script src="' not in text and "<link" not in head
    assert file.stat().st_size < 3e6


def test_it_names_no_home_folder_and_no_host(tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "wotan.example.org")
    home = str(Path.home())
    for n, place in enumerate((home, "/home/alice", "/Users/bob", "/root", "wotan", "wotan.example.org")):
        error = f"OSError: {place}/data: no such file" if place.startswith("/") else f"ValueError: lost {place}:29500"
        write_run(tmp_path / str(n), 2**n, status="failed", error=error)
    report = write_report([tmp_path], tmp_path / "out")
    said = body((tmp_path / "out" / "report.html").read_text(encoding="utf-8"))
    assert report.exit_code == 1
    assert "~/data: no such file" in said and "lost this-host:29500" in said
    for word in ("alice", "bob", "wotan", "/root", home):
        assert word not in said


def test_what_a_record_says_is_text_and_never_markup(tmp_path):
    hostile = "</script><img src=x onerror=alert(1)>"
    folder = write_sweep(tmp_path, SIZES, serial(4, 0.1), model=f"cnn{hostile}", device_name=f"A CPU $$x$$ {hostile}")
    write_run(folder / "3", 1024, status="failed", error=f"ValueError: {hostile}", model=f"cnn{hostile}")
    write_report([folder], tmp_path / "out")
    text = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "<img src=x" not in text
    assert "&lt;img src=x" in text


def test_a_legend_of_many_groups_makes_the_plot_higher(tmp_path):
    for number in range(12):
        write_sweep(tmp_path, SIZES, serial(4, 0.1), first=3 * number, model=f"a_model_with_a_long_name_{number}")
    sweep = find([tmp_path])
    (plot,) = Plots(sweep.runs, [Analysis(group) for group in sweep.groups], []).throughput()
    assert plot.height >= 300 + 12 * 28
    assert plot.legend[0].ncols == 1


def test_a_sweep_without_a_batch_size_to_compare_has_its_table(tmp_path):
    write_run(tmp_path / "0", 64, 10.0)
    write_run(tmp_path / "1", 64, 5.0, options={"data.pipeline": "device"})
    report = write_report([tmp_path], tmp_path / "out")
    assert "report.html" in {file.name for file in report.files}
    assert "data-root-id" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow  # a process that imports everything but Bokeh
def test_without_bokeh_the_report_says_so_and_has_the_rest(sweep, tmp_path):
    program = (
        "import sys; sys.modules['bokeh'] = None\n"
        "from batchscope.analysis import write_report\n"
        f"report = write_report([{str(sweep)!r}], {str(tmp_path / 'out')!r})\n"
        "print([note for note in report.notes if 'report.html' in note], [f.name for f in report.files])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "no report.html: " in done.stdout
    assert "'report.html'" not in done.stdout
    assert (tmp_path / "out" / "report.md").is_file()


# --- in a browser ---------------------------------------------------------------------------------------------------

CHROMIUM = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-headless-shell", "google-chrome"))), None
)
# The indices of the picked runs.
PICKED = "() => Bokeh.documents[0].get_model_by_name('runs').selected.indices"


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium; `CHROMIUM` names its program."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    if CHROMIUM is None:
        pytest.skip("needs Chromium: apt-get install chromium-headless-shell, or CHROMIUM=<its program>")
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=300_000)
        yield found
        found.close()


@pytest.fixture
def page(browser, file):
    """The report in a window of a laptop. What it asks for and what goes wrong in it is kept."""
    page = browser.new_page(viewport={"width": 1280, "height": 720})
    page.set_default_timeout(300_000)
    page.asked, page.wrong = [], []
    page.on("request", lambda request: page.asked.append(request.url))
    page.on("pageerror", lambda error: page.wrong.append(str(error)))
    page.on("console", lambda said: page.wrong.append(said.text) if said.type == "error" else None)
    page.goto(file.as_uri())
    page.wait_for_function("() => window.Bokeh && Bokeh.documents.length && Bokeh.documents[0].is_idle")
    page.locator(".slick-row").first.wait_for()
    yield page
    page.close()


def first_cells(page) -> list[str]:
    """The first cell of each row, from top to bottom."""
    rows = page.locator(".slick-row").all()
    return [row.locator(".slick-cell").first.inner_text() for row in sorted(rows, key=lambda r: r.bounding_box()["y"])]


@pytest.mark.slow
def test_it_shows_without_network_and_without_errors_in_the_width_of_a_laptop(page):
    assert [url for url in page.asked if not url.startswith(("file:", "blob:", "data:"))] == []
    assert page.wrong == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280
    assert page.locator("#recommendation").bounding_box()["y"] < 100
    assert page.locator("canvas").count() >= 4


@pytest.mark.slow
def test_on_a_phone_the_plots_stand_below_each_other(page):
    page.set_viewport_size({"width": 400, "height": 800})
    page.wait_for_timeout(1000)
    boxes = [plot.bounding_box() for plot in page.locator(".bk-Figure").all()]
    assert len(boxes) >= 4
    assert all(box["width"] > 300 for box in boxes)
    assert all(below["y"] >= above["y"] + above["height"] for above, below in itertools.pairwise(boxes))
    assert page.evaluate("document.documentElement.scrollWidth") <= 400


@pytest.mark.slow
def test_a_click_on_a_heading_sorts_by_its_numbers(page):
    assert first_cells(page) == list("0123456")
    heading = page.locator(".slick-header-column", has_text="samples/s").first
    heading.click()
    slowest_first = [run for run in first_cells(page) if run != "6"]  # which has no rate
    heading.click()
    fastest_first = [run for run in first_cells(page) if run != "6"]
    assert fastest_first == ["2", "1", "5", "4", "0", "3"]  # 8,650, 6,150, 4,640, 3,810, 2,860 and 2,220 samples/s
    assert slowest_first == fastest_first[::-1]


@pytest.mark.slow
def test_a_click_on_a_row_picks_its_run_in_the_plots(page):
    page.locator(".slick-row", has_text="mlp").first.locator(".slick-cell").nth(1).click()
    page.wait_for_function(f"() => ({PICKED})().length")
    assert page.evaluate(PICKED) == [3]
    page.locator(".slick-row").first.locator(".slick-cell").first.click()
    page.wait_for_function(f"() => ({PICKED})()[0] === 0")


@pytest.mark.slow
def test_a_click_on_a_point_picks_its_row(page):
    place = page.evaluate(
        """() => {
            const views = [...Object.values(Bokeh.index)].flatMap((root) => [...root.children()])
            const all = (view) => [view, ...[...(view.child_views ?? [])].flatMap(all)]
            const plot = Object.values(Bokeh.index).flatMap(all).find((view) => view.model.type === "Figure")
            const box = plot.el.getBoundingClientRect()
            const frame = plot.frame
            return {x: box.x + frame.x_scale.compute(64), y: box.y + frame.y_scale.compute(1e3 * 64 / 10.4)}
        }"""
    )
    page.mouse.click(place["x"], place["y"])
    page.wait_for_function(f"() => ({PICKED})().length")
    assert page.evaluate(PICKED) == [1]
    assert page.locator(".slick-cell.selected").count() > 0
