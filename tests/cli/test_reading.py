"""`batchscope report`, `compare` and `choose`: what they print about records, and their exit codes."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from batchscope.cli import fraction
from batchscope.errors import UserError
from batchscope.hardware import devices
from batchscope.sweep import choose_sweep
from tests.choice.trainings import write_training
from tests.support.command_lines import answer
from tests.support.runs import record
from tests.support.synthetic_runs import change_record, write_rates, write_run, write_steps, write_sweep

pytestmark = pytest.mark.usefixtures("no_plots")

# --- report ----------------------------------------------------------------------------------------------------------


def test_it_prints_the_table_and_the_recommendation_and_says_where_the_report_is(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    sweep = write_sweep(Path("sweep"), [32, 64, 128], lambda size: 4 + 0.1 * size)
    result = answer("report", sweep / "0", sweep / "1", "--out", "compared")
    assert (result.code, result.out.splitlines()[-1]) == (0, "report   compared/report.html")
    assert not [*sweep.rglob("report")]
    result = answer("report", sweep)
    assert (result.code, result.out.splitlines()[-1]) == (0, "report   sweep/report/report.html")
    assert "3 runs: 3 finished" in result.out
    assert "→ No rate is known well enough to compare sizes: single steps were not" in result.out
    assert (sweep / "report" / "sweep.csv").exists()
    assert "note: report" not in answer("report", sweep).out  # a second report does not read the first


@pytest.mark.parametrize("status", ["failed", "finished"])
def test_what_a_record_says_sends_nothing_to_the_terminal_but_text(tmp_path, status):
    escape = "\x1b]0;title\x07\x9b2J"
    words = {"model": f"cnn{escape}", "device_name": escape, "error": f"it fails {escape}"}
    write_run(tmp_path / "run", 8, 3.0, status=status, options={"data.root": escape}, **words)
    result = answer("report", tmp_path / "run", "--out", tmp_path / "report")
    assert result.code == 0
    assert "]0;title" in result.out
    for text in (result.out, (tmp_path / "report" / "report.md").read_text()):
        assert text.replace("\n", "").isprintable()


def test_a_report_that_cannot_be_written_is_one_line(tmp_path):
    write_rates(tmp_path, {8: 1000, 64: 3800, 512: 4000})
    (tmp_path / "report").write_text("a file")
    result = answer("report", tmp_path)
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith(f"error: {tmp_path}/report: cannot be ")


def test_last_is_the_sweep_that_was_written_last(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    result = answer("report", "last")
    assert (result.code, result.err) == (1, "error: report: got 'last', and there is no sweep in outputs/sweeps\n")
    for age, name in enumerate(("newest", "older")):
        run = write_rates(Path("outputs/sweeps", name), {8: 1000, 64: 3800}) / "0" / "run.json"
        for path in run.parents[1].glob("*/run.json"):
            os.utime(path, (1e9 - age, 1e9 - age))
    assert answer("report", "last").out.splitlines()[-1] == "report   outputs/sweeps/newest/report/report.html"
    write_rates(Path("outputs/sweeps/search/0"), {8: 1000, 64: 3800})  # whose runs are below its one job
    assert answer("report", "last").out.splitlines()[-1] == "report   outputs/sweeps/search/report/report.html"
    write_rates(Path("last"), {8: 1000, 64: 3800})  # a folder of this name is a folder
    assert answer("report", "last").out.splitlines()[-1] == "report   last/report/report.html"


@pytest.mark.parametrize(
    ("kind", "begin"),
    [
        ("png", b"\x89PNG"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("pdf", b"%PDF"), ("svg", b"<?xml"))),
    ],
)
def test_one_plot_is_written_as_wide_as_it_is_asked_for(kind, begin, tmp_path):
    write_rates(tmp_path, {8: 1000, 64: 3800, 512: 4000})
    path = tmp_path / "figures" / f"throughput.{kind}"
    result = answer("report", tmp_path, f"--figure={path}", "--width=84mm")
    assert (result.code, result.out, path.read_bytes()[:4]) == (0, f"figure   {path}\n", begin[:4])
    assert not (tmp_path / "report").exists()
    if kind == "png":
        assert int.from_bytes(path.read_bytes()[16:20], "big") == pytest.approx(300 * 84 / 25.4, abs=1)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--figure=thruput.pdf"], 2, "--figure: got 'thruput.pdf'; there are throughput, accuracy, "),
        (["--figure=memory.gif"], 2, "--figure: got 'memory.gif'; there are throughput, "),
        (["--figure=accuracy.pdf"], 1, "--figure: these runs have no accuracy; they have throughput, step_time"),
        (
            ["--figure=throughput.pdf", "--width=3"],
            2,
            "argument --width: takes 2in to 20in, such as 3.3in or 84mm, got '3'",
        ),
        (["--width=3in"], 2, "--width: is the width of a plot; add --figure=throughput.pdf"),
        (["--figure=throughput.pdf", "--out=x"], 2, "--out and --figure: only one of them at a time"),
    ],
)
def test_a_plot_that_cannot_be_drawn_is_one_line(words, code, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rates(tmp_path / "s", {8: 1000, 64: 3800})
    result = answer("report", "s", *words)
    assert (result.code, result.err.startswith(f"error: {message}"), result.err.count("\n")) == (code, True, 1)
    assert not [*tmp_path.glob("*.pdf")]


# --- compare ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path):
    steps = np.exp(0.02 * np.random.default_rng(0).standard_normal((8, 10)))
    return [write_steps(write_run(tmp_path / name, 64, ms), ms * steps) for name, ms in (("a", 10.0), ("b", 16.0))]


def test_a_slowdown_is_exit_code_3_and_its_absence_0(runs):
    result = answer("compare", *runs)
    assert (result.code, result.out[:48]) == (3, "B is slower: a sample takes 1.60 times as long (")
    assert answer("compare", *runs[::-1]).code == 0
    assert answer("compare", *runs, "--max-slowdown", "70%").code == 0


@pytest.mark.parametrize(("text", "value"), [("0.05", 0.05), ("12.5 %", 0.125), ("0", 0.0), ("200%", 2.0)])
def test_a_share_is_a_percentage_or_a_fraction(text, value):
    assert fraction(text) == pytest.approx(value)


def test_hostile_numbers_and_steps_are_no_traceback(runs):
    cost = {"step_ms_interval": ["a", None], "others_share": "\x1b[2J", "samples_per_sec_mean": 1e400}
    cost |= {"parts_ms": {"forward": float("nan")}, "updates": [], "samples_per_sec_mean": -1}
    fields = {"versions": {"torch": "\x1b[31m2.9", "x": ["y"] * 3, "n": None}, "rerun": {"of": ["x"], "pair": True}}
    change_record(runs[1], throughput=record(runs[1])["throughput"] | cost, **fields)
    (runs[1] / "steps.npz").write_bytes(b"PK\x03\x04")
    result = answer("compare", *runs)
    assert result.code in (0, 3) and "\x1b" not in result.out
    assert "steps.npz: cannot be read" in " ".join(result.out.split())


def test_rerun_compares_the_new_runs(monkeypatch, runs):
    def rerun(folders, out, max_pairs, seconds, pythons, overrides, max_slowdown):
        assert (max_pairs, seconds, pythons[1], overrides) == (5, 2.0, "other", ["data.root=x"])
        return folders[::-1]

    monkeypatch.setattr("batchscope.sweep.rerun.rerun", rerun)
    words = ["--rerun", "--passes", 5, "--seconds", 2, "--python-b", "other", "data.root=x"]
    result = answer("compare", *runs, *words)
    assert (result.code, result.out[:11]) == (0, "B is faster")


# --- choose ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def sweep(monkeypatch, tmp_path):
    """A folder `sweep` in the working directory."""
    monkeypatch.chdir(tmp_path)
    return write_training(Path("sweep"))


def choose_json(*words):
    """The JSON document of `choose`."""
    return json.loads(answer("choose", *words, "--json").out)


def test_a_table_a_recommendation_and_nothing_written(sweep, tmp_path):
    lines = answer("choose", "sweep", "--devices", "t4,h100", "--epochs", 3).out.splitlines()
    assert lines[0] == "cnn · mnist: 3 epochs of 55,000 samples at batch size 512, training steps alone"
    header = next(number for number, line in enumerate(lines) if line.endswith(" known"))
    assert sorted(line.split()[0] for line in lines[header + 1 : header + 4]) == ["cpu", "h100", "t4"]
    starts = ("Tie of H100, T4: 3 epochs take ", "Best guess H100: 3 epochs take ")
    assert any(line.startswith(starts) for line in lines)
    assert [path.name for path in tmp_path.iterdir()] == ["sweep"]


def test_options_change_the_answer(sweep):
    words = ["--price", "H200=5", "--price", "cpu=0.02", "--start-up", 60]
    words += ["--precision", "16-mixed", "--batch-size", 64]
    choice = choose_json("sweep/0", "sweep/1", "sweep/2", *words)  # the folders of a sweep's runs are one training
    devices = {device["label"]: device for device in choice["devices"]}
    assert {"cpu", "t4", "h100", "h200"} <= {*devices}
    assert devices["cpu"]["cost"]["middle"] > 0 and devices["t4"]["cost"] is None
    assert (choice["epochs"], choice["assumed"]) == (2, {"start_up_s": 60.0, "precision": "16-mixed"})
    assert {device["batch_size"] for device in choice["devices"]} == {64}
    assert len(choose_json("sweep", "--devices", "all")["devices"]) > 20


def test_a_folder_of_two_models_is_refused_in_one_line(sweep):
    write_training(Path("sweep") / "lstm", model="lstm")
    result = answer("choose", "sweep", "--devices", "t4")
    assert (result.code, result.out) == (1, "")
    assert "the runs are of several trainings, which differ in model" in result.err


def test_runs_that_are_left_out_are_one_block_below_the_answer(sweep):
    write_run(sweep / "3", 4096, status="out_of_memory")
    write_run(sweep / "4", 8192, status="failed", error="ValueError")
    assert answer("choose", "sweep", "--devices", "t4").out.splitlines()[-3:] == [
        "",
        f"left out: {sweep / '3'}: measured no step: out of memory",
        f"left out: {sweep / '4'}: measured no step: ValueError",
    ]


def test_options_are_measured_and_the_answer_says_where(sweep, monkeypatch):
    arguments = []

    def measure(words, kinds, folder, epochs):
        arguments.extend([words, list(kinds)])
        print("what is measured")
        return [write_training(folder / kind, asked_epochs=epochs) for kind in kinds]

    monkeypatch.setattr(choose_sweep, "measure_on_devices", measure)
    options = ["model=mlp", "trainer.accelerator=cpu", "trainer.devices=[1]", "trainer.max_epochs=9"]
    result = answer("choose", "data.batch_size=8,64", *options)
    assert arguments == [choose_sweep.timed_overrides(["data.batch_size=8,64", *options]), ["cpu"]]
    assert "9 epochs of 55,000 samples" in result.out and "9 epochs of 55,000 samples" in answer("choose", "last").out
    assert result.out.splitlines()[-1].startswith("measured outputs/choose/")
    assert result.err == "what is measured\n"


def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_measured(sweep, monkeypatch):
    monkeypatch.setattr(choose_sweep, "measure_on_devices", None)
    Path("file").write_text("")
    result = answer("choose", "model=mlp", "trainer.accelerator=cpu", "--plot", "file/use.png")
    assert (result.code, result.err.count("\n")) == (1, 1)
    assert result.err.startswith("error: --plot: 'file/use.png' cannot be written: ")


def test_what_was_measured_is_named_before_a_picture_is_drawn(sweep, monkeypatch):
    def measure(words, kinds, folder, epochs):
        Path("use.png").mkdir()
        return [write_training(folder / kind, asked_epochs=epochs) for kind in kinds]

    monkeypatch.setattr(choose_sweep, "measure_on_devices", measure)
    result = answer("choose", "model=mlp", "trainer.accelerator=cpu", "--plot", "use.png")
    assert (result.code, result.out.splitlines()[-1].startswith("measured outputs/choose/")) == (1, True)


@pytest.mark.parametrize(("gpu", "card"), [(0, "l4"), (1, "b200")])
def test_the_gpu_that_is_asked_for_is_the_one_that_has_a_price(gpu, card, monkeypatch):
    def measure(*_):
        raise UserError("all that is asked for is known")

    monkeypatch.setattr(devices, "available", lambda: ["cpu", "cuda"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: ("NVIDIA L4", "NVIDIA B200")[device.index or 0])
    monkeypatch.setattr(choose_sweep, "measure_on_devices", measure)
    words = ["model=mlp", "trainer.accelerator=gpu", f"trainer.devices=[{gpu}]", "--devices=t4"]
    assert answer("choose", *words, f"--price={card}=5").err == "error: all that is asked for is known\n"
    assert answer("choose", *words, "--price=h200=5").err.endswith(f"; takes those of {card}, cuda, t4\n")


def test_every_gpu_of_several_is_refused_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr(devices, "available", lambda: ["cpu", "cuda"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(choose_sweep, "measure_on_devices", None)
    message = "error: trainer.devices: choose compares single devices; leave it at 1\n"
    assert answer("choose", "model=mlp", "trainer.devices=auto") == (1, "", message)
