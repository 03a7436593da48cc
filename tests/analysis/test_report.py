"""The report: its text, the files that it writes and replaces, its page, its plots, and its notes on failures."""

import contextlib
import itertools
import json
import math
import re
import socket
import warnings
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from batchscope import read_answer, read_runs
from batchscope._system import command_line
from batchscope.analysis import analyse, plots, table, tensorboard, write_report
from batchscope.analysis.anonymous import anonymise
from batchscope.analysis.compare import Comparison
from batchscope.analysis.page import page
from batchscope.analysis.report import Picture
from batchscope.analysis.table import run_texts
from batchscope.analysis.text import reach_text
from batchscope.errors import UserError
from batchscope.records.step_parts import PARTS
from tests.support.fuzzing import HOSTILE
from tests.support.synthetic_runs import change_record, write_measured, write_rates, write_run, write_steps

RATES = {32: 1000, 64: 2000}


@contextlib.contextmanager
def one_plot_in_every_format():
    """Draw the throughput plot alone in each format: to save a plot takes longer than to analyse a sweep."""
    save = plots.saved

    def saved(figure, name, kind):
        is_needed = name == "throughput" or kind == "page"
        return save(figure, name, kind) if is_needed else f"{name} as {kind}".encode()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(plots, "saved", saved)
        yield


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The report on a trained model on two devices, with a run that ran out of memory."""
    folder = tmp_path_factory.mktemp("sweep")

    def usage(size):
        percent = {"utilization_pct": 50.0, "processor_time_pct": 60 + size / 10}
        return {**percent, "mfu": size / 1e4, "memory_peak_gib": size / 100}

    accuracy = {32: 0.985, 64: 0.984, 128: 0.983, 256: 0.95}
    fields = {"throughput": usage, "evaluated": {"test": 10_000}, "metrics": lambda size: {"test/acc": accuracy[size]}}
    write_rates(folder, {32: 3000, 64: 4800, 128: 6000, 256: 7000}, **fields)
    write_rates(folder, {32: 2000, 64: 8000, 128: 16000, 256: 24000}, first=4, device="cuda", **fields)
    write_run(folder / "8", 512, device="cuda", status="out_of_memory", error="OutOfMemoryError: out of memory")
    with one_plot_in_every_format():
        return write_report([folder], tmp_path_factory.mktemp("out"))


@pytest.fixture
def out(report):
    """The folder of the report."""
    return report.files[0].parent


def test_a_timed_sweep_is_a_block_with_the_answer(tmp_path):
    rates, mfu = {1: 220, 8: 1100, 64: 3230, 512: 3850}, {1: 0.025, 8: 0.13, 64: 0.37, 512: 0.44}
    throughput = lambda size: {"mfu": mfu[size], "memory_peak_gib": 0.5 + size / 1000}
    write_rates(tmp_path, rates, noise=0.0002, drift=0.01, throughput=throughput)
    write_run(tmp_path / "4", 1024, status="out_of_memory", error="OutOfMemoryError")
    lines = analyse([tmp_path]).text.splitlines()
    assert lines[0] == "5 runs: 4 finished, 1 out of memory; on A CPU; data: mnist"
    words = [line.split() for line in lines[2:8]]
    assert words[0] == ["cnn", "1", "8", "64", "512", "1,024"]
    assert [float(cell.replace(",", "")) for cell in words[1][1:]] == pytest.approx([*rates.values()], rel=0.01)
    assert words[2][0] == "±"
    assert words[3] == ["gain", "+400%", "+194%", "+19%"]
    assert words[4] == ["MFU", "2.5%", "13%", "37%", "44%"]
    assert words[5] == ["GiB", "0.501", "0.508", "0.564", "1.01"]
    assert lines[8] == "±: 90 % interval in this sweep; MFU: model FLOPs utilization of measured peak"
    assert lines[9:13] == [
        "→ 512: faster than all others in this sweep.",
        "  64 gives 81 to 87 % of the rate of 512; 512 still rises, and 1,024 ran out of",
        "    memory.",
        "  No metric of a validation or a test is known: the speed alone decides.",
    ]
    assert lines[-1] == "failed   1,024: out of memory"


def test_a_gain_that_rounds_to_nothing_has_no_sign(tmp_path):
    rates = {8: 1000, 64: 1002, 512: 999, 1024: 1020, 2048: 900}
    text = analyse([write_rates(tmp_path, rates, noise=0.0002, drift=0)]).text
    assert ["gain", "0%", "0%", "+2%", "-12%"] in [line.split() for line in text.splitlines()]


def test_an_accuracy_that_was_logged_in_percent_is_shown_as_one(tmp_path):
    accuracy = {32: 98.4, 64: 99.0}
    write_rates(tmp_path, RATES, metrics=lambda size: {"test/acc": accuracy[size]})
    report = analyse([tmp_path])
    assert ["test/acc", "98.4%", "99.0%"] in [line.split() for line in report.text.splitlines()]
    assert "Best test/acc: 99.0 % at 64" in " ".join(report.headlines)
    assert report.frame["test/acc"].tolist() == pytest.approx([0.984, 0.99])
    assert report.answers[0].quality.is_share
    drawn = plots.figures(report)["accuracy"]
    low, high = drawn.axes[0].get_ylim()
    assert [point.get_ydata()[0] for point in points(drawn)] == pytest.approx([98.4, 99.0]) and low < 98 and high > 99


def test_options_of_one_last_name_are_told_apart(tmp_path):
    for number, (encoder_layers, decoder_layers) in enumerate(((1, 1), (1, 2), (2, 1))):
        options = {"model.encoder.layers": encoder_layers, "model.decoder.layers": decoder_layers}
        write_run(tmp_path / str(number), 8, 3.0, options=options)
    report = analyse([tmp_path])
    assert {"model.encoder.layers", "model.decoder.layers"} <= {*run_texts(report.sweep, report.frame)}
    assert report.sweep.groups[1].label == "cnn · model.decoder.layers 2"


@pytest.mark.parametrize("sizes", [(100, 120), (96, 192, 200), tuple(2**n for n in range(12))])
def test_the_axis_of_sizes_has_the_numbers_of_sizes_that_ran(tmp_path, sizes):
    write_rates(tmp_path, {size: 1000 + size for size in sizes})
    for width, most in ((7.0, 12), (3.3, 6)):
        ticks = plots.figures(analyse([tmp_path]), width)["throughput"].axes[0].get_xticks()
        assert {sizes[0]} < {*ticks} <= {*sizes} and len(ticks) <= most


def test_sizes_of_which_none_has_ended_are_no_settings_of_one_size(tmp_path):
    for number, size in enumerate((16, 32, 64)):
        write_run(tmp_path / str(number), size, status="interrupted", error="Interrupted: stopped by SIGTERM")
    text = analyse([tmp_path]).text
    assert "setting" not in text and "→ No run finished" in text
    assert text.endswith("failed   16, 32, 64: Interrupted: stopped by SIGTERM")


def test_a_loss_is_shown_beside_a_metric_of_which_no_direction_is_known(tmp_path):
    write_rates(tmp_path, RATES, metrics={"test/f_beta_thing": 0.5, "test/loss": 0.1})
    report = analyse([tmp_path])
    assert report.metrics == ["test/loss", "test/f_beta_thing"]
    assert ["test/loss", "0.100", "0.100"] in [line.split() for line in report.text.splitlines()]


def test_a_size_that_failed_has_no_number_of_another_size(tmp_path):
    for status in ("killed", "failed", "interrupted", "running"):
        write_run(tmp_path / status / "0", 20, status=status, error=f"E: {status}")
        write_rates(tmp_path / status, {50: 923}, first=1)
        report = analyse([tmp_path / status])
        assert report.headlines == ["Only 50 was measured, so there is nothing to compare."]
        lines = [line.split() for line in report.text.splitlines()]
        assert ["cnn", "20", "50"] in lines
        assert [len(line) for line in lines if line[:1] == ["samples/s"]] == [2]
        assert "failed   20: " in report.text
        assert report.tables[0].loc[20].isna().all()


def test_the_terminal_the_markdown_the_page_the_files_and_the_plots_have_the_same_numbers(tmp_path, no_plots):
    """A run without MFU (its machine was busy) is left out of the means of its size."""
    mfu = {32: 0.2, 64: 0.4, 128: 0.45}
    write_rates(tmp_path, {32: 3000, 64: 6000, 128: 6600}, throughput=lambda size: {"mfu": mfu[size]})
    write_rates(tmp_path, {128: 2000}, first=3, passes=False)  # the size was measured once alone
    report = write_report([tmp_path], tmp_path / "out")
    (sizes,) = report.tables
    assert sizes["mfu"].tolist() == pytest.approx([*mfu.values()], rel=0.05)
    cells = [line.split()[1:] for line in report.text.splitlines() if line[:9] in ("samples/s", "MFU      ")]
    columns = dict(zip(sizes.index, zip(*cells, strict=True), strict=True))
    markdown = (tmp_path / "out" / "report.md").read_text()
    for size, texts in columns.items():
        row = rf"^\| {size} \| {re.escape(texts[0])} \|.*\| {re.escape(texts[1])} \|"
        assert re.search(row, markdown, re.MULTILINE)
        row = rf">{size}</td><td[^>]*>{re.escape(texts[0])}</td>.*>{re.escape(texts[1])}</td>"
        assert re.search(row, page(report))
    (group,) = read_answer(tmp_path / "out")["groups"]
    assert [row["mfu"] for row in group["sizes"]] == pytest.approx(sizes["mfu"].tolist())
    assert [row["samples_per_sec"] for row in group["sizes"]] == pytest.approx(sizes["samples_per_sec"].tolist())
    drawn = plots.figures(report)
    assert [p.get_ydata()[0] for p in points(drawn["utilisation"])] == pytest.approx((100 * sizes["mfu"]).tolist())
    assert [p.get_ydata()[0] for p in points(drawn["throughput"])] == pytest.approx(sizes["samples_per_sec"].tolist())
    runs = read_runs(tmp_path).set_index("run")
    assert runs["samples_per_sec"].tolist()[:2] == pytest.approx(sizes["samples_per_sec"].tolist()[:2])
    assert runs["mfu"].tolist()[:2] == pytest.approx(sizes["mfu"].tolist()[:2])


def test_beside_a_load_rates_and_mfu_are_marked_and_their_intervals_shown(tmp_path):
    report = analyse([write_rates(tmp_path, {8: 1000, 64: 4000}, others=0.6, throughput={"mfu": 0.5})])
    rows = {line.split()[0]: line.split()[1:] for line in report.text.splitlines() if line}
    assert all(cell.endswith("?") for cell in rows["samples/s"] + rows["MFU"])
    assert all(int(cell[:-1]) > 100 for cell in rows["±"])  # 1 / (1 - 0.55) at least
    bars = plots.figures(report)["throughput"].axes[0].collections
    assert [bar.get_segments()[0][1, 1] > 2 * bar.get_segments()[0][0, 1] for bar in bars] == [True, True]


def test_an_interval_that_reaches_to_three_times_a_rate_is_no_number():
    assert [reach_text(reach) for reach in (0.004, 0.98, 1.99, 2.0, math.inf, math.nan)] == [
        "0.400%",
        "98%",
        "199%",
        *"???",
    ]


def test_one_run_has_one_rate(tmp_path):
    """The rate of the record is that of its median step."""
    report = analyse([write_rates(tmp_path, {8: 1000}, throughput={"samples_per_sec": 3000.0, "step_ms_median": 2.67})])
    assert f"{report.frame['samples_per_sec'][0]:,.0f} samples/s at batch size 8" in report.text


def test_columns_of_the_terminal_stand_on_the_right(tmp_path):
    lines = analyse([write_rates(tmp_path, {8: 1000, 64: 3000, 512: 4000})]).text.splitlines()
    block = lines[2 : lines.index("±: 90 % interval in this sweep")]
    assert len({len(line) for line in block}) == 1


def test_runs_that_were_not_visited_have_the_rate_of_the_visited_run_with_the_same_speed(tmp_path):
    rates = {32: 1000, 64: 2000, 128: 2100}
    write_rates(tmp_path, rates, options={"optimizer.lr": 0.1})
    write_measured(tmp_path, dict.fromkeys(rates, 9.0), first=3, passes=False, windows=4, options={"optimizer.lr": 0.2})
    report = analyse([tmp_path])
    visited, unvisited = report.tables
    for name in ("samples_per_sec", "mfu", "forward_ms_mean"):
        assert unvisited[name].equals(visited[name])
    assert [(answer.size, answer.rule, answer.group.rates.passes) for answer in report.answers] == [
        (64, "shown", 12)
    ] * 2
    write_measured(tmp_path / "b", dict.fromkeys(rates, 9.0), passes=False, options={"optimizer.lr": 0.3})
    report = analyse([tmp_path])
    (unvisited,) = (
        sizes for group, sizes in zip(report.sweep.groups, report.tables, strict=True) if group.label.endswith("0.3")
    )
    # A run of another sweep has its own rate.
    assert unvisited["samples_per_sec"].tolist() == pytest.approx([size / 9e-3 for size in rates], rel=0.1)


def test_a_run_without_a_batch_size_is_a_failure_and_no_row(tmp_path):
    """The fit of a script failed before its data was loaded."""
    write_rates(tmp_path, {8: 1000}, options={"lr": 0.1})
    for number, rate in enumerate((10, 20), 1):
        failed = write_run(tmp_path / str(number), 8, status="failed", error="E: no", options={"lr": rate})
        config = json.loads((failed / "run.json").read_text())["config"]
        change_record(failed, config=config | {"data": {}})
    text = analyse([tmp_path]).text
    assert "failed   cnn · lr 10, cnn · lr 20: E: no" in text


def test_a_metric_of_any_name_and_many_windows_break_no_report(tmp_path, no_plots):
    fields = {"metrics": {"test/acc\x1b": 0.5}}
    write_rates(tmp_path, RATES, **fields)
    assert write_report([tmp_path], tmp_path / "out").answers
    runs = [
        write_steps(write_run(tmp_path / "many" / str(n), 2**n, 10.0), [[10.0]] * 4000, rounds=range(4000))
        for n in (5, 6)
    ]
    assert analyse([runs[0].parent]).answers[0].size == 64


def test_the_answer_is_a_file_for_programs(report, out, monkeypatch):
    answer = read_answer(out)
    monkeypatch.chdir(out)
    assert read_answer(".") == answer
    assert (answer["schema"], answer["enough"], answer["lines"]) == (1, 0.9, report.headlines)
    cpu, gpu = answer["groups"]
    assert (cpu["label"], cpu["model"], cpu["device"], gpu["device"]) == ("cnn · cpu", "cnn", "cpu", "gpu")
    assert (cpu["chosen"], cpu["rule"], cpu["best"], cpu["sure_share"]) == (128, "shown", 128, 1.0)
    assert {claim["kind"] for claim in cpu["claims"]} == {"share", "interval", "at_least", "worse"}
    assert (cpu["metric"], cpu["margin"], cpu["candidates"]) == ("test/acc", pytest.approx(0.005), [32, 64, 128])
    assert [row["loss"] for row in cpu["sizes"]] == pytest.approx([0, 0.001, 0.002, 0.035])
    assert all(row["loss"] < row["sure_loss"] < row["loss"] + 0.01 for row in cpu["sizes"])
    assert gpu["sizes"][-1] == {"batch_size": 512, "reason": "out of memory"}
    row = cpu["sizes"][2]
    assert row["batch_size"] == 128 and row["low"] < row["samples_per_sec"] < row["high"]
    assert sum(row[f"{part}_ms_mean"] for part in PARTS) == pytest.approx(1e3 * 128 / 6000)


def test_an_answer_that_cannot_be_read_is_one_line_with_the_command_that_writes_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "report").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "answer.json").write_text("{")
    for text, message in (
        (None, "cannot be read: No such file"),
        ("{", "no answer"),
        ('{"schema": 7}', "no answer"),
        ('{"schema": 1}', "no answer"),
    ):
        if text is not None:
            (tmp_path / "report" / "answer.json").write_text(text)
        with pytest.raises(UserError, match=f"{message}.*; batchscope report . writes it"):
            read_answer(tmp_path)
    with pytest.raises(UserError, match="batchscope report . writes it"):
        read_answer("report")
    with pytest.raises(UserError, match="no answer.*; make the report again with --out=out"):
        read_answer("out")


def test_a_trained_sweep_has_its_metric(report, out):
    rows = [line.split()[0] for line in report.text.splitlines() if line]
    assert (rows.count("test/acc"), rows.count("GiB")) == (2, 2)
    assert "→ 128: the fastest of the sizes within 0.50 points of the best test/acc in this sweep." in " ".join(
        report.text.split()
    )
    assert "→ cnn: gpu ÷ cpu in samples/s is 0.67" in report.text and "; gpu is faster from 64 on." in report.markdown
    assert report.printed.splitlines()[-1].endswith(f"{out.name}/report.html")
    assert all(len(line) <= 80 for line in report.text.splitlines())


# --- the learning rate -----------------------------------------------------------------------------------------------

ACCURACY = {"test/acc": 0.98}
SCALED_BY_SQRT = {
    "learning_rate": lambda size: 0.004 * (size / 128) ** 0.5,
    "lr_scaling": lambda size: {"rule": "sqrt", "batch_size": size, "reference_batch_size": 128},
}


def rows_by_heading(report):
    """The cells of each row of the terminal's table, by the row's heading."""
    return {line[:9]: line[9:].split() for line in report.text.splitlines() if line}


def test_rates_that_follow_the_batch_size_have_a_row_and_a_column_and_a_note_has_the_rule(tmp_path, no_plots):
    write_rates(tmp_path, {32: 3000, 128: 6000, 512: 7000}, metrics=ACCURACY, **SCALED_BY_SQRT)
    report = write_report([tmp_path], tmp_path / "out")
    assert rows_by_heading(report)["scaled lr"] == ["0.002", "0.004", "0.008"]
    assert "scaled by sqrt from batch size 128 to 0.002 to 0.008" in report.methods.facts["optimizer"]
    for text in (report.markdown, page(report)):
        assert "scaled lr" in text and "0.008" in text
    (group,) = read_answer(tmp_path / "out")["groups"]
    assert [row["learning_rate"] for row in group["sizes"]] == pytest.approx([0.002, 0.004, 0.008])


BY_OPTION = {"learning_rate": lambda size: size / 1e4, "options": lambda size: {"optimizer.lr": size / 1e4}}
BY_MODULE_OPTION = {**BY_OPTION, "options": lambda size: {"model.lr": size / 1e4, "optimizer": None}}


@pytest.mark.parametrize(
    ("facts", "is_own", "has_column", "is_fixed"),
    [
        ({"learning_rate": 0.004, "metrics": ACCURACY}, False, False, True),
        ({**BY_OPTION, "metrics": ACCURACY}, False, False, False),  # optimizer.lr has a column
        ({**BY_MODULE_OPTION, "metrics": ACCURACY}, True, False, False),  # model.lr has one
        ({**SCALED_BY_SQRT}, False, True, False),  # timed, not trained
        ({"learning_rate": 0.01, "metrics": ACCURACY}, True, False, True),
        ({"learning_rate": 0.01}, True, False, True),
        ({"metrics": ACCURACY}, True, False, False),  # the record of several optimizers has no rate
        (
            {"learning_rate": lambda size: size / 1e3, "metrics": ACCURACY},
            True,
            True,
            False,
        ),  # the module has its own rule
    ],
)
def test_what_is_said_of_rates_that_no_rule_has_scaled(facts, is_own, has_column, is_fixed, tmp_path):
    write_rates(tmp_path, {32: 3000, 128: 6000}, **facts)
    for number in "01":
        change_record(tmp_path / number, model={"class": "Tutorial", "parameters": 5, "lightning_module": is_own})
    report = analyse([tmp_path])
    assert ("scaled lr" in rows_by_heading(report), "scaled lr" in report.markdown) == (has_column, has_column)
    assert ("not scaled with the batch size" in report.methods.facts["optimizer"]) == is_fixed


def test_the_rate_that_a_search_names_is_the_one_to_type(tmp_path):
    """At 512 samples the optimizer's rate is twice the named rate; a new run with the named rate doubles it, too."""
    for number, rate in enumerate((0.001, 0.002)):
        fields = {"learning_rate": 2 * rate, "lr_scaling": SCALED_BY_SQRT["lr_scaling"], "evaluated": {"val": 5000}}
        metrics = {"metrics": {"val/acc": 0.9 + 20 * rate}}
        write_rates(tmp_path, {512: 7000}, first=number, options={"optimizer.lr": rate}, **fields, **metrics)
    report = analyse([tmp_path])
    assert any("lr 0.002" in line and "val/acc" in line for line in report.headlines)
    assert len(report.headlines) == 1  # no line on samples/s: a step takes the same time
    rates = run_texts(report.sweep, report.frame)[["lr", "scaled lr"]]
    assert rates.to_numpy().tolist() == [["0.001", "0.002"], ["0.002", "0.004"]]


def test_a_sweep_over_an_option_of_a_module_is_answered_by_the_validation_and_the_value(tmp_path, no_plots):
    losses = {0.1: 0.5, 0.01: 0.2, 0.001: 0.4}
    for number, (rate, loss) in enumerate(losses.items()):
        fields = {"options": {"model.lr": rate}, "metrics": {"val_loss": loss, "test_loss": 1 - loss}}
        write_rates(tmp_path, {64: 1000 + number}, first=number, others=0.5, passes=False, **fields)
    report = write_report([tmp_path], tmp_path / "report")
    assert report.headlines[0].startswith("Best val/loss: 0.200 with cnn · lr 0.01; ")
    best = {"metric": "val/loss", "value": 0.2, "settings": {"model.lr": 0.01}}
    assert read_answer(tmp_path)["best_setting"] == best
    frame = read_runs(tmp_path)
    assert frame.nlargest(1, "samples_per_sec")["model.lr"].tolist() == [0.001]
    assert dict(zip(frame["model.lr"], frame["val/loss"], strict=True)) == losses


def test_the_options_that_would_tell_more_stand_below_the_answer(tmp_path):
    fields, options = {"passes": False}, "experiment=throughput data.batch_size=8,64"
    report = analyse([write_rates(tmp_path / "ours", {8: 1000, 64: 1010}, **fields)])
    assert "→ Best guess " in report.text
    assert report.text.splitlines()[-1] == f"  for more   {options}"
    assert f"    {options}" in report.markdown.splitlines()
    assert f"{options}</pre>" in page(report)
    words, timing_off = ["experiment=[mnist_99,throughput]", "data.batch_size=8"], {"timing": False}
    fields |= {"overrides": ["experiment=mnist_99", *words[1:]]}
    text = analyse([write_rates(tmp_path / "plainly", {8: 1000, 64: 1010}, options=timing_off, **fields)]).text
    assert text.splitlines()[-1] == f"  for more   {command_line([words[0]])} timing=auto data.batch_size=8,64"
    fields["overrides"] = ["experiment=mine", "trainer.max_epochs=1", *words[1:]]
    search = {"search": {"sizes": [8, 64]}}
    text = analyse([write_rates(tmp_path / "searching", {8: 1000, 64: 1010}, options=search, **fields)]).text
    assert text.splitlines()[-1] == "  for more   experiment=throughput trainer.max_epochs=-1 data.batch_size=8,64"
    report = analyse([write_rates(tmp_path / "theirs", {8: 1000, 64: 1010}, options={"script": "theirs.py"}, **fields)])
    assert "→ Best guess " in report.text and "for more" not in report.text  # a script takes no options


def test_where_nothing_is_known_no_number_stands_beside_it(tmp_path):
    text = analyse([write_rates(tmp_path, {8: 1000, 64: 4000}, windows=3, noise=2.0)]).text
    assert not re.search(r"\d{3} ?%", text)
    (line,) = [line for line in text.splitlines() if line.startswith("± ")]
    assert "?" in line and "?: wider than ± 10 %" in text


@pytest.mark.parametrize(
    ("cells", "legend_text"),
    [
        ({"setting": "why?", "samples/s": "1,000"}, ""),
        ({"samples/s": "1,000?"}, "?: wider than ± 10 %"),
        ({"gain": "-12%?"}, "?: wider than ± 10 %"),
        ({"±": "?"}, "±: 90 % interval in this sweep; ? alone: not known"),
    ],
)
def test_a_question_mark_is_explained_behind_a_number_and_alone(cells, legend_text):
    assert table.legend(pd.DataFrame([cells])) == legend_text


def test_many_sizes_are_several_blocks_and_a_long_label_is_cut(tmp_path):
    text = analyse([write_rates(tmp_path, {2**n: 1000 + 100 * n for n in range(18)}, model="a_long_name_" * 12)]).text
    assert max(len(line) for line in text.splitlines() if not line.startswith("  for more ")) <= 80
    assert sum(line.startswith("batch size ") for line in text.splitlines()) >= 2
    assert "131,072" in text


@pytest.mark.parametrize(
    ("sizes", "facts", "code", "headline"),
    [
        ([64], {}, 0, "One run only: 6,400 samples/s at batch size 64. There is nothing to compare."),
        ([64, 64], {}, 0, "All runs repeat one setting, so there is nothing to compare."),
        ([32, 64], {"status": "failed"}, 1, "No run finished, so there is nothing to recommend. Most often: E: no."),
    ],
)
def test_one_run_repetitions_and_failures_are_said(tmp_path, sizes, facts, code, headline):
    for number, size in enumerate(sizes):
        write_run(tmp_path / str(number), size, None if facts else 10.0, seed=number, error="E: no", **facts)
    report = analyse([tmp_path])
    assert (report.exit_code, report.headlines[0][: len(headline)], len(report.headlines)) == (code, headline, 1)
    assert ("failed   32, 64: E: no" in report.text) == bool(facts)


def test_a_setting_that_was_not_measured_is_not_said_to_change_nothing(tmp_path):
    for number, rate in enumerate((0.1, 0.2)):
        write_run(tmp_path / str(number), 64, 10.0, options={"optimizer.lr": rate})
    write_run(tmp_path / "2", 64, status="failed", error="E: no", options={"data.pipeline": "device"})
    headlines = ["Fewer than two settings were measured, so there is nothing to compare."]
    assert analyse([tmp_path]).headlines == headlines


def test_the_mfu_of_a_run_without_a_rate_is_its_own_and_that_of_no_size(tmp_path):
    """The run shared the passes of the sweep, and stands for the speed of the other run."""
    runs = [{"throughput": {"mfu": 0.5, "samples_per_sec": None}}, {"throughput": {"mfu": 0.25}, "passes": False}]
    for number, fields in enumerate(runs):
        write_rates(tmp_path, RATES, first=2 * number, options={"optimizer.lr": 0.1 + number}, **fields)
    report = analyse([tmp_path])
    assert report.frame["mfu"].tolist()[:2] == [0.5, 0.5]
    assert report.tables[1]["samples_per_sec"].notna().all() and report.tables[1]["mfu"].isna().all()


def test_runs_without_a_rate_and_a_damaged_step_file_are_notes(tmp_path):
    write_rates(tmp_path, RATES)
    (tmp_path / "1" / "steps.npz").write_bytes(b"no archive")
    write_run(tmp_path / "2", 32, metrics={"test/acc": 0.9})
    notes = analyse([tmp_path]).notes
    assert any(note.startswith("1: ") and "steps.npz: cannot be read" in note for note in notes)
    assert "finished without a rate: 2" in notes


def test_a_run_that_became_slower_or_starts_workers_in_each_epoch_is_a_note(tmp_path, no_plots):
    slower = {"since_unix": 1.8e9, "until_unix": 1.8e9 + 600, "step": 6001, "step_ms": [12.0, 15.6]}
    epoch = {"seconds": 8.0, "starting_workers_s": 3.0, "advice": "DataLoader(persistent_workers=True)"}
    write_run(tmp_path / "1", 64, 12.0, throughput={"slower": slower, "epoch": epoch})
    write_run(tmp_path / "2", 128, 20.0)
    first, second = analyse([tmp_path]).notes
    assert re.fullmatch(r"1: steps are slower since \d\d:\d\d \(step 6,001\): a step 12.0 → 15.6 ms", first)
    assert second == "1: an epoch of 8 s begins with 3 s of starting workers: DataLoader(persistent_workers=True)"


def test_everything_is_written_and_the_markdown_begins_with_the_answer(report, out):
    plot_names = ("throughput", "utilisation", "step_time", "memory", "accuracy")
    assert {path.name for path in out.iterdir()} == {
        "report.md", "report.html", "answer.json", "sweep.csv", "tensorboard",
        *(f"{name}.{kind}" for name in plot_names for kind in ("png", "svg", "pdf")),
    }  # fmt: skip
    assert all(file.exists() for file in report.files)
    assert (out / "sweep.csv").read_text().count("\n") == 10
    lines = (out / "report.md").read_text().splitlines()
    assert (
        lines[2] == "- cnn · cpu: 128: the fastest of the sizes within 0.50 points of the best test/acc in this sweep."
    )
    assert "![Samples per second against batch size](throughput.png)" in lines


def test_a_row_has_one_estimate_of_the_step_and_the_rate_and_it_is_that_of_the_answer(tmp_path):
    """The record's own numbers are those of other steps."""
    median = {"step_ms_median": 40.0}
    report = analyse([write_rates(tmp_path, RATES, throughput=lambda size: {**median, "samples_per_sec": 25 * size})])
    rates, frame = report.answers[0].group.rates, report.frame
    assert frame["samples_per_sec"].tolist() == pytest.approx([rates.rate(32), rates.rate(64)])
    assert (frame["samples_per_sec"] * frame["step_ms_typical"] / 1e3).tolist() == pytest.approx([32, 64])
    assert "median step" not in report.markdown


def test_what_an_earlier_report_wrote_is_replaced_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(
        plots, "draw", lambda *_: {"throughput": Picture("a caption", {"png": b"drawn"}, '<svg width="1"></svg>')}
    )
    out = tmp_path / "two" / "report"
    throughput = {"throughput": lambda size: {"mfu": size / 1e4, "processor_time_pct": 60.0}}
    for name, fields in (("one", {"model": "mlp"}), ("two", throughput)):
        write_rates(tmp_path / name, RATES, **fields)
    write_report([tmp_path / "one"], out)
    events_of_user = out / "tensorboard" / "mlp" / "events.out.tfevents.1.my-host.1"
    for path in (events_of_user, out / "memory.png", out / "mine.png"):
        path.write_bytes(b"mine")
    names = ("report.md", "report.html", "sweep.csv", "throughput.png")
    for name in names:  # a report writes through no link
        (tmp_path / name).hardlink_to(out / name)
    contents = [(tmp_path / name).read_bytes() for name in names]
    write_report([tmp_path / "two"], out)
    assert [(tmp_path / name).read_bytes() for name in names] == contents
    assert not any((out / name).samefile(tmp_path / name) for name in names)
    assert [path.read_bytes() for path in (events_of_user, out / "memory.png", out / "mine.png")] == [b"mine"] * 3
    assert [path.name for path in events_of_user.parent.iterdir()] == [events_of_user.name]
    events = EventAccumulator(str(out / "tensorboard/cnn")).Reload()
    assert set(events.Tags()["scalars"]) == {"sweep/samples_per_sec", "sweep/mfu"}  # the others are constant
    assert [point.step for point in events.Scalars("sweep/mfu")] == [32, 64]


def test_a_sweep_in_tensorboard_has_the_loss_beside_the_accuracy(tmp_path, no_plots):
    write_rates(tmp_path, RATES, metrics=lambda size: {"test/acc": 0.9 + size / 1e3, "test/loss": size / 1e3})
    write_report([tmp_path], tmp_path / "report")
    events = EventAccumulator(str(tmp_path / "report/tensorboard/cnn")).Reload()
    assert set(events.Tags()["scalars"]) == {"sweep/samples_per_sec", "sweep/test/acc", "sweep/test/loss"}


MARKUP = "</script></svg><img src=x onerror=alert(1)>"


def test_names_of_any_characters_break_no_table_no_plot_and_are_no_markup(tmp_path):
    names = ["a|b\n# c", f'\ud800$$x$$ id="{MARKUP}', "\x1b[31m模型 $x$ $y$", "é" * 300]
    for number, name in enumerate(names):
        write_rates(tmp_path / "s", RATES, first=2 * number, model=name, device_name=name)
    write_run(tmp_path / "s" / "8", 1024, status="failed", error=f"ValueError: {MARKUP}")
    with warnings.catch_warnings(action="error"), one_plot_in_every_format():
        report = write_report([tmp_path / "s"], tmp_path / "out")
    markdown, html = ((tmp_path / "out" / name).read_text() for name in ("report.md", "report.html"))
    assert len([line for line in markdown.splitlines() if line.startswith("| ")]) == 4 * len(names)
    assert "## a|b # c" in markdown and "<img" not in markdown + html and "\n# c" not in markdown
    assert "&lt;img src=x" in html and html.count("</script>") == 1
    for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
        ET.fromstring(svg)
    assert {"throughput.png", "step_time.png"} <= {file.name for file in report.files}


def test_the_table_of_runs_has_the_bottleneck_of_each(tmp_path):
    for number, bottleneck in enumerate(({"kind": "host"}, {"kind": "memory", "certainty": "probable"}, {"kind": 5})):
        write_run(tmp_path / str(number), 8 * 2**number, 10.0, throughput={"bottleneck": bottleneck})
    report = analyse([tmp_path])
    assert run_texts(report.sweep, report.frame)["limit"].tolist() == ["host", "probably memory", ""]
    assert read_runs(tmp_path)["bottleneck"].tolist()[:2] == ["host", "probably memory"]


def test_hostile_records_neither_crash_nor_inject(tmp_path, no_plots):
    """Each field of a record, at every depth, holds a hostile value in one of the runs."""
    fields = {"throughput": {"mfu": 0.1, "bottleneck": {"kind": "host"}}}
    write_measured(tmp_path / "s", {32: 10.0, 64: 12.0}, metrics={"test/acc": 0.9}, **fields)
    record = json.loads((tmp_path / "s" / "0" / "run.json").read_text())
    paths = [(key, subkey) for key, value in record.items() if isinstance(value, dict) for subkey in value]
    paths += [(key, None) for key in record if key not in ("schema", "config")]
    for number, (key, subkey) in enumerate(paths, 2):
        write_run(tmp_path / "s" / str(number))
        value = HOSTILE[number % len(HOSTILE)]
        hostile = record | {key: value if subkey is None else record[key] | {subkey: value}}
        change_record(tmp_path / "s" / str(number), **hostile)
    report = write_report([tmp_path / "s"], tmp_path / "out")
    comparisons = []
    for number in range(2, 2 + len(paths)):
        with contextlib.suppress(UserError):  # the run was not measured
            comparisons.append(Comparison(tmp_path / "s" / "0", tmp_path / "s" / str(number)).text)
    assert report.printed.replace("\n", "").isprintable()
    for text in (report.printed, report.markdown, *comparisons):
        assert not re.search(r"stretch|disturbed|\bturn|\brounds?\b|time was up|stall|whole fit|floor", text)
    for text in (report.markdown, page(report)):
        assert "<script>alert" not in text and "<img" not in text and "\x1b" not in text


def points(figure, is_ring=False, panel=0):
    """The markers of single sizes, or the rings around these markers."""
    single = [line for line in figure.axes[panel].lines if len(line.get_xdata()) == 1]
    return [line for line in single if (line.get_markerfacecolor() == "none") == is_ring]


@pytest.fixture(scope="module")
def figures(report):
    return plots.figures(report)


def test_intervals_are_drawn_whole_and_mfu_and_busy_time_have_a_panel_each(report, figures):
    axes = figures["throughput"].axes[0]
    low, high = axes.get_ylim()
    sizes = [(group.rates, size) for group in report.sweep.groups for size in group.sizes]
    for bar, (rates, size) in zip(axes.collections, sizes, strict=True):
        limits = bar.get_segments()[0][:, 1]
        reach = 1 + rates.reach(size)
        assert list(limits) == pytest.approx([rates.rate(size) / reach, rates.rate(size) * reach])
        assert low < limits[0] < limits[1] < high
    panels = {0: [0.32, 0.64, 1.28, 2.56] * 2, 1: [63.2, 66.4, 72.8, 85.6], 2: [50] * 4}  # MFU, of the CPU, of the GPU
    for panel, values in panels.items():
        heights = [point.get_ydata()[0] for point in points(figures["utilisation"], panel=panel)]
        assert heights == pytest.approx(values, rel=0.05)
    (bar, *_), (group, *_) = figures["utilisation"].axes[0].collections, report.sweep.groups
    low, high = bar.get_segments()[0][:, 1]
    assert high / low == pytest.approx((1 + group.rates.reach(32)) ** 2)


def test_a_title_says_what_ran_where_and_marks_are_explained(tmp_path, figures):
    assert {figure.get_suptitle() for figure in figures.values()} == {"cnn on mnist · A CPU and A GPU · 32-true"}
    assert figures["throughput"].axes[0].get_title("left") == "bars: 90 % intervals; ring: the answer"
    imprecise = plots.figures(analyse([write_rates(tmp_path, {8: 1000, 64: 4000}, others=0.6)]))["throughput"].axes[0]
    assert [text.get_text() for text in imprecise.texts] == ["?", "?"]
    assert "?: wider than ± 10 %" in imprecise.get_title("left")


def test_an_axis_starts_at_zero_has_plain_numbers_and_exaggerates_no_accuracy(figures, tmp_path):
    low, high = figures["accuracy"].axes[0].get_ylim()
    assert (high - low >= 10, high < 101) == (True, True)
    assert figures["memory"].axes[0].get_ylim()[0] == 0
    (axes,) = plots.figures(analyse([write_rates(tmp_path, {8: 1000, 64: 1500})]))["throughput"].axes
    assert axes.get_ylim()[0] == 0
    for panel in (axes, figures["throughput"].axes[0]):
        panel.figure.canvas.draw()
        labels = [label.get_text() for label in panel.get_yticklabels() if label.get_text()]
        assert len(labels) >= 3 and all(re.fullmatch(r"[\d,.]+", label) for label in labels)


def test_an_axis_of_zeros_alone_has_a_scale(tmp_path):
    report = analyse([write_rates(tmp_path, RATES, device="cuda", throughput={"utilization_pct": 0.0})])
    assert plots.figures(report)["utilisation"].axes[0].get_ylim() == (0, 1)


def legend(folder):
    """The names in the legend of the plot that has several panels."""
    (figure_legend,) = plots.figures(analyse([folder]))["utilisation"].legends
    return [text.get_text() for text in figure_legend.get_texts()]


def test_a_legend_names_the_groups_of_all_panels(tmp_path):
    for number, mfu in enumerate(({"mfu": 0.5}, {})):
        use = {"processor_time_pct": 50.0, **mfu}
        write_rates(tmp_path, RATES, first=2 * number, model=("cnn", "mlp")[number], throughput=use)
    assert legend(tmp_path) == ["cnn", "mlp"]


def test_long_names_in_a_legend_that_begin_alike_have_their_ends(tmp_path):
    names = ["cnn", *(f"{'long_name_' * 12}{end}" for end in ("one", "two"))]
    for number, name in enumerate(names):
        write_rates(tmp_path, RATES, first=2 * number, model=name, throughput={"mfu": 0.5})
    assert legend(tmp_path) == ["cnn", *(f"…{name[-59:]}" for name in names[1:])]


def test_many_groups_look_unlike_each_other_and_have_markers_that_can_be_told_apart(tmp_path):
    for number in range(9):
        write_rates(tmp_path, RATES, first=2 * number, model=f"net{number}")
    markers = points(plots.figures(analyse([tmp_path]))["throughput"])
    assert len({(marker.get_color(), marker.get_marker()) for marker in markers}) == 9
    assert min(marker.get_markersize() for marker in markers) >= 5


def test_the_parts_of_a_step_are_drawn_of_six_groups_and_the_others_named(tmp_path):
    for number in range(8):
        write_rates(tmp_path, RATES, first=2 * number, model=f"net{number}")
    figure = plots.figures(analyse([tmp_path]))["step_time"]
    assert len(figure.axes) == 6
    assert " ".join(figure.get_suptitle().split()).endswith("not drawn: net6 and net7")


@pytest.mark.parametrize("width", [3.3, 3.8, 7.0])
def test_the_names_below_the_bars_of_steps_do_not_overlap(tmp_path, width):
    write_rates(tmp_path, {2**n: 1000 + 100 * n for n in range(7, 19)}, noise=0.2)
    figure = plots.figures(analyse([tmp_path]), width)["step_time"]
    figure.canvas.draw()
    boxes = [label.get_window_extent() for label in figure.axes[0].get_xticklabels()]
    assert len(boxes) >= 3 and all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))


def test_an_accuracy_has_the_interval_of_its_tested_samples_and_of_its_seeds(tmp_path):
    fields = {"evaluated": {"test": 10_000}, "metrics": {"test/acc": 0.9}}
    write_rates(tmp_path, RATES, **fields)
    (sizes,) = analyse([tmp_path]).tables
    half = 1.645 * (0.9 * 0.1 / 1e4) ** 0.5
    assert sizes.loc[32, ["test/acc_low", "test/acc_high"]].tolist() == pytest.approx(
        [0.9 - half, 0.9 + half], abs=1e-4
    )
    write_rates(tmp_path, RATES, first=2, seed=1, **(fields | {"metrics": {"test/acc": 0.8}}))
    (sizes,) = analyse([tmp_path]).tables
    assert sizes.loc[32, "test/acc_high"] - sizes.loc[32, "test/acc_low"] > 0.08
    write_rates(tmp_path / "loss", RATES, metrics={"test/loss": 0.3})  # one run shows no spread of a loss
    (sizes,) = analyse([tmp_path / "loss"]).tables
    assert sizes["test/loss_low"].isna().all()


def test_files_of_figures_are_fit_for_print(report, out):
    png = (out / "throughput.png").read_bytes()
    assert int.from_bytes(png[16:20], "big") == 2100  # pixels: 7 inches at 300 dpi
    assert b"/Subtype /Type3" not in (out / "throughput.pdf").read_bytes()
    svg = (out / "throughput.svg").read_text()
    assert ET.fromstring(svg).get("width") == "504pt" and 'id="run-' not in svg


def test_the_recommended_size_has_a_ring(figures):
    assert [ring.get_xdata()[0] for ring in points(figures["throughput"], is_ring=True)] == [128, 128]


def test_what_is_drawn_of_a_run_has_its_id_and_of_one_size_nothing_is_drawn(tmp_path, figures):
    for figure in figures.values():
        artists = [artist for axes in figure.axes for artist in (*axes.lines, *axes.patches)]
        assert {f"run-{number}" for number in range(8)} <= {artist.get_gid() for artist in artists}
    report = analyse([write_rates(tmp_path, {64: 1000})])
    assert plots.draw(report) == {}


def tags(html):
    return re.findall(r"<[^>]*>", html)


def test_the_answer_comes_first_and_nothing_is_loaded_from_elsewhere(report, out):
    html = (out / "report.html").read_text()
    head, _, body = html.partition("<body>")
    order = ('<section id="answer">', "<table>", "<svg", '<table role="grid">')
    assert sorted(order, key=body.index) == list(order)
    assert "Content-Security-Policy\" content=\"default-src 'none'; script-src 'unsafe-inline'" in head
    assert not [tag for tag in tags(html) if re.search(r'<(link|iframe|object|base|img)\b| src=| on\w+="', tag)]
    assert set(re.findall(r'xlink:href="(.)', html)) == {"#"}
    assert len(html) < 2e6
    downloads = re.findall(r'<a class="button" download="([^"]+)" href="data:', html)
    assert downloads == [file.name for file in report.files if file.suffix in (".png", ".svg", ".pdf")]


def test_each_run_is_marked_in_its_row_which_the_keyboard_reaches_and_in_every_plot(report, out):
    html = (out / "report.html").read_text()
    marked = Counter(number for numbers in re.findall(r'data-runs="([\d ]+)"', html) for number in numbers.split())
    assert marked["8"] == 1  # this run has a row and no plot
    assert all(marked[str(number)] >= 10 for number in range(8)) and len(marked) == 9
    assert all('tabindex="0"' in tag for tag in tags(html) if tag.startswith("<tr data-runs"))
    assert all('aria-label="' in tag for tag in tags(html) if tag.startswith("<svg"))
    ids = re.findall(r' id="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:xlink:href="|url\()#([^")]+)', html)) <= set(ids)


def test_it_names_no_home_folder_and_no_host(tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "wotan.example.org")
    home = str(Path.home())
    for number, name in enumerate((home, "/home/alice", "/Users/bob", "/root", "wotan", "wotan.example.org")):
        error = f"OSError: {name}/data: no such file" if name.startswith("/") else f"ValueError: lost {name}:29500"
        write_run(tmp_path / str(number), 2**number, status="failed", error=error)
    text = page(analyse([tmp_path])).partition("<body>")[2]
    assert "~/data: no such file" in text and "lost this-host:29500" in text
    assert not [word for word in ("alice", "bob", "wotan", "/root", home) if word in text]
    assert anonymise("/home/alice/x /Users/bob", host=True) == "~/x ~"


def test_a_host_whose_name_is_the_word_of_a_setting_is_hidden_in_errors_alone(tmp_path, monkeypatch, no_plots):
    monkeypatch.setattr(socket, "gethostname", lambda: "memory")
    write_rates(tmp_path, {32: 1000}, options={"data.pipeline": "device"})
    write_run(tmp_path / "1", 32, 10.0, status="failed", error="ValueError: lost memory:29500")
    write_report([tmp_path], tmp_path / "out")
    markdown, html, csv = ((tmp_path / "out" / name).read_text() for name in ("report.md", "report.html", "sweep.csv"))
    assert "- data.pipeline: device and memory" in markdown.splitlines() and ">device and memory</td>" in html
    assert "<td>memory</td>" in html and "lost this-host:29500</td>" in html
    assert ",cnn · memory,memory," in csv and csv.endswith("lost this-host:29500\n")


def test_a_host_of_any_name_breaks_no_page(report, monkeypatch):
    expected_tags = tags(page(report))
    for host in ("data", "run-0", "svg"):
        monkeypatch.setattr(socket, "gethostname", lambda name=host: name)
        after = page(report)
        assert (tags(after), "data: mnist" in after) == (expected_tags, True)


def test_nothing_to_report_writes_nothing_and_a_place_that_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(UserError, match="no runs in"):
        write_report([tmp_path], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("")
    write_run(tmp_path / "s", 32, 10.0)
    with pytest.raises(UserError, match="out: cannot be written: Not a directory"):
        write_report([tmp_path / "s"], tmp_path / "file" / "out")


@pytest.mark.parametrize("name", ["report.md", "sweep.csv", "throughput.png", "tensorboard", "tensorboard/cnn-cpu", ""])
def test_a_link_out_of_the_reports_folder_is_refused(name, tmp_path):
    folder, link = write_run(tmp_path / "theirs", 32, 10.0), tmp_path / "theirs" / "report" / name
    (tmp_path / "elsewhere").mkdir()
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(tmp_path / "elsewhere" / name.rpartition(".")[0])
    message = f"{name}: is a link that leads out of" if name else "report: is behind a link that leads out of"
    with pytest.raises(UserError, match=message):
        write_report([folder], folder / "report")
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert write_report([folder], tmp_path / "elsewhere").files  # a link that the user typed is followed


def test_groups_whose_names_differ_in_case_alone_share_no_folder_of_tensorboard(tmp_path, monkeypatch):
    """macOS and Windows take `CNN` and `cnn` for one folder."""
    monkeypatch.setattr(tensorboard, "_scalars", lambda sizes: {"samples_per_sec": {1: 1.0, 2: 2.0}})
    groups = [SimpleNamespace(label=f"model={name}", number=number) for number, name in enumerate(("CNN", "cnn"))]
    tensorboard.write(groups, [None, None], tmp_path)
    assert len({path.name.casefold() for path in tmp_path.iterdir()}) == 2
