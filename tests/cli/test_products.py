"""`batchscope hardware --products` and `choose --plot`: what is printed and drawn, a busy machine, and what is refused."""

import json
import re
from pathlib import Path

import pytest

from batchscope.cli import choose
from batchscope.hardware import measure, processor, products
from batchscope.hardware.calibration import Calibration
from batchscope.hardware.measure import identity
from batchscope.hardware.processor import Noise
from batchscope.hardware.products import Product, Timed
from tests.choice.trainings import write_training
from tests.cli.conftest import contents
from tests.support.command_lines import answer

RUN = ("hardware", "--device", "cpu", "--products")


@pytest.fixture
def no_pictures(monkeypatch):
    """The file of a picture holds a few words: rendering takes longer than all else."""
    monkeypatch.setattr("batchscope.analysis.plots.saved", lambda figure, name, kind: f"{name} as {kind}".encode())


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A processor with 1e11 FLOP/s whose load a test sets; measurements take no time. Files are written below `tmp_path` alone."""

    def timed(wanted, device, peak, seconds, say):
        say("measuring …")
        durations = {product: 1e-6 + product.flops / 1e11 + 0.4 * product.creates for product in wanted}
        return {
            product: Timed([seconds] * 6, [], [0.4] * 5 if product.creates else [], 3 if seconds > 1 else 1000)
            for product, seconds in durations.items()
        }

    def calibrate(device):
        return Calibration(**identity(device), matmul_flops_per_sec={"fp32": 1e11}, launch_us=1.0)

    noise = {"share": 0.02}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measure, "calibrate", calibrate)
    monkeypatch.setattr(products, "time_products", timed)
    monkeypatch.setattr(processor.NoiseMeter, "read", lambda meter: Noise(noise["share"], 0.0))
    return noise


def test_a_table_notes_one_sentence_and_a_picture(fake, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    result = answer(*RUN, "--cards", "t4,h100", "--plot", "deep/products.png")
    assert result.code == 0
    head, _, rest = result.out.partition("\n\n")
    assert head.startswith("measured on cpu (") and " ".join(head.split()).endswith("intervals of 90 %, of ratios 95 %")
    lines = rest.splitlines()
    assert lines[0].split() == ["cpu", "(here)", "cpu:", "of", "peak", "t4", "h100", "copy", "to", "a", "card"]
    assert [line.split()[0] for line in lines[1:10]] == [f"{size:,}" for size in products.SIZES]
    assert "cpu: 100 of 7000×3000, created before: 3 passes measured, and scaled" in lines
    assert ") this CPU is first; at 7000×3000 an H100 takes 1/" in " ".join(result.out.split("Below n ≈ ")[1].split())
    assert lines[-1] == "picture  deep/products.png"
    assert (tmp_path / "deep" / "products.png").read_bytes().startswith(b"\x89PNG")
    assert "busy" not in result.out


def test_what_is_printed_fits_the_terminal(fake, no_pictures, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    result = answer(*RUN, "--sizes", "16,64", "--cards", "t4,h100", "--plot", "x.svg")
    assert max(map(len, result.out.splitlines())) <= 60


def test_the_picture_is_below_outputs_where_no_file_is_named(fake, no_pictures, tmp_path):
    result = answer(*RUN, "--sizes", "16,64")
    (picture,) = (tmp_path / "outputs" / "hardware").glob("*/products.png")
    assert result.out.splitlines()[-1] == f"picture  {picture.relative_to(tmp_path)}"


def test_json_is_one_document(fake, no_pictures):
    result = answer(*RUN, "--json", "--sizes", "16,64,16", "--cards", "h100", "--plot", "x.svg")
    document = json.loads(result.out)
    cpu, h100 = document["devices"]
    assert (document["schema"], cpu["label"], h100["label"]) == (1, "cpu", "h100")
    assert list(cpu["times"]) == ["16", "64"]
    assert document["sentence"] and document["sentence"] in " ".join(result.err.split())
    assert result.err.splitlines()[-1] == "picture  x.svg"


def test_a_picture_with_a_prediction_has_what_it_does_not_know(fake):
    answer(*RUN, "--sizes", "16,64", "--cards", "h100", "--plot", "x.svg")
    assert "Predictions do not know" in Path("x.svg").read_text(encoding="utf-8")


def test_a_busy_processor_is_said(fake, no_pictures):
    fake["share"] = 0.43
    assert "cpu: other programs took 43 % of the processor: its times are too long\n" in answer(*RUN).out


def test_where_no_size_can_be_measured_one_line_says_so(fake, monkeypatch):
    monkeypatch.setattr(products, "time_products", lambda *arguments: {})
    result = answer(*RUN, "--sizes", "4096")
    assert (result.code, result.out) == (1, "")
    assert result.err.endswith("error: --sizes: none can be measured in 36 s; give smaller ones\n")


def test_a_tiny_run_measures_for_real(fake, no_pictures, monkeypatch):
    monkeypatch.setattr(products, "LOOPS", ((70, 30),))
    monkeypatch.setattr(products, "_ENOUGH_S", 0.05)
    monkeypatch.setattr(products, "time_products", REAL)
    result = answer(*RUN, "--sizes", "16,32", "--json", "--cards", "t4")
    assert result.code == 0
    points = json.loads(result.out)["devices"][0]["points"]
    assert list(points) == ["16", "32", *(str(Product(70, 30, 70, True, how)) for how in (False, True))]
    assert all(0 < point["seconds"]["low"] <= point["seconds"]["high"] < 10 for point in points.values())


REAL = products.time_products
REFUSED = {
    "--products --device tpu": (2, "argument --device: invalid choice: 'tpu' (choose from "),
    "--products --sizes 0": (2, "argument --sizes: takes a whole number from 1 to 1,000,000, got '0'"),
    "--products --sizes 16,": (2, "argument --sizes: takes a whole number from 1 to 1,000,000, got ''"),
    "--products --sizes 1.5": (2, "argument --sizes: takes a whole number from 1 to 1,000,000, got '1.5'"),
    "--products --plot x.doc": (2, "argument --plot: takes a file that ends with .png, .svg or .pdf, got 'x.doc'"),
    "--sizes 16": (2, "--sizes: belongs to --products"),
    "--cards t4": (2, "--cards: belongs to --products"),
    "--plot x.png": (2, "--plot: belongs to --products"),
    "--products --cards h101": (1, "--cards: got 'h101', which is no known card. Did you mean 'h100'?"),
    "--products --sizes 1000000000": (
        2,
        "argument --sizes: takes a whole number from 1 to 1,000,000, got '1000000000'",
    ),
    "--products --device cpu --sizes 1000000": (
        1,
        "--sizes: got 1,000,000; its matrices take 11,200 GiB and do not fit in memory: cpu has ",
    ),
    "--products --cards tpu": (1, "--cards: got 'tpu', which is no known card. Predicted are NVIDIA's "),
    "--products --cards ,": (1, "--cards: got '', which is no known card. Predicted are NVIDIA's "),
    "--products --device cpu --plot file/x.png": (1, "--plot: 'file/x.png' cannot be written: "),
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_wrong_line_is_refused_in_one_line_before_anything_is_measured_or_written(words, fake, tmp_path, monkeypatch):
    code, message = REFUSED[words]
    (tmp_path / "file").write_text("")
    answer("hardware", "--device", "cpu")  # so that the calibration is cached
    before = contents(tmp_path)
    monkeypatch.setattr(products, "time_products", None)
    result = answer("hardware", *words.split())
    assert (result.code, result.out, result.err.count("\n")) == (code, "", 1)
    assert result.err.startswith(f"error: {message}")
    assert contents(tmp_path) == before


def test_a_choice_draws_a_picture_and_says_what_it_shows(tmp_path, no_pictures):
    write_training(tmp_path / "sweep")
    result = answer("choose", tmp_path / "sweep", "--devices", "t4,h100", "--plot", tmp_path / "use.png")
    assert (result.code, result.out.count(" used at 8, and ")) == (0, 1)
    assert result.out.splitlines()[-1] == f"picture  {tmp_path / 'use.png'}"
    assert {path.name for path in tmp_path.glob("*.png")} == {"use.png"}


def test_a_report_has_the_use_of_cards_where_it_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr("batchscope.analysis.plots.figures", lambda *_: {})  # no other plots
    sweep = write_training(tmp_path / "sweep")
    assert answer("report", sweep, "--cards", "t4,h100").code == 0
    page = (sweep / "report" / "report.html").read_text()
    assert page.count("predicted on cards. An H100 is ") == 2  # once for a screen reader
    assert 'download="use.pdf"' in page and "h100, predicted" in page
    assert "(use.png)" in (sweep / "report" / "report.md").read_text()
    assert {path.name for path in (sweep / "report").glob("use.*")} == {"use.png", "use.svg", "use.pdf"}


def test_a_report_on_a_card_that_is_not_known_is_refused_before_it_is_written(tmp_path):
    sweep = write_training(tmp_path / "sweep")
    result = answer("report", sweep, "--cards", "h1000")
    assert (result.code, result.err.count("\n"), (sweep / "report").exists()) == (1, 1, False)
    assert result.err.startswith("error: --cards: got 'h1000', which is no known card. Did you mean 'h100'?")


def test_a_picture_that_cannot_be_written_is_one_line(tmp_path, no_pictures):
    write_training(tmp_path / "sweep")
    (tmp_path / "file").write_text("")
    result = answer("choose", tmp_path / "sweep", "--devices", "t4", "--plot", tmp_path / "file" / "use.png")
    assert (result.code, result.err.count("\n")) == (1, 1)
    assert re.match(r"error: --plot: '.*' cannot be written: ", result.err)


def test_a_choice_without_a_size_that_surely_fits_says_that_nothing_is_drawn(tmp_path, monkeypatch):
    write_training(tmp_path / "sweep")
    monkeypatch.setattr(choose, "use_lines", lambda *_: [])
    result = answer("choose", tmp_path / "sweep", "--devices", "t4", "--plot", tmp_path / "use.png")
    assert (result.code, result.err) == (0, "warning: --plot: no device has a size that surely fits\n")
    assert not (tmp_path / "use.png").exists()


def test_the_json_of_a_choice_has_the_use_where_a_picture_is_asked_for(tmp_path, no_pictures):
    write_training(tmp_path / "sweep")
    plain = answer("choose", tmp_path / "sweep", "--json")
    assert "use" not in json.loads(plain.out)
    result = answer("choose", tmp_path / "sweep", "--json", "--batch-size", "64", "--plot", tmp_path / "use.png")
    use = json.loads(result.out)["use"]
    assert {"cpu", "h100"} <= {device["label"] for device in use["devices"]}
    assert " used at 64, " in use["sentence"]
    assert result.err.splitlines()[-1] == f"picture  {tmp_path / 'use.png'}"
