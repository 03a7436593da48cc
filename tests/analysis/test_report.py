"""The whole report: what it prints, what it writes and replaces, and that it says what it could not do."""

import json
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from batchscope.analysis import Report, analyse, write_report
from batchscope.errors import UserError
from tests.support.fuzzing import HOSTILE
from tests.support.synthetic_runs import change_record, write_curve, write_measured, write_run

USE = {"utilization_pct": 50.0, "processor_time_pct": 60.0, "memory_peak_gib": 1.0, "mfu": 0.1}
FORBIDDEN = r"\b(stretch(es)?|disturbed|turns?|rounds?|time was up|stalls?|whole fit|floor)\b"


def sweep_of(folder: Path, rates: dict[int, float], **facts: Any) -> Path:
    """A sweep of sizes with these rates."""
    return write_measured(folder, {size: 1e3 * size / rate for size, rate in rates.items()}, **facts)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the report below is written."""
    return tmp_path_factory.mktemp("out")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, out: Path) -> Report:
    """On one model on two devices, trained, with a run that ran out of memory."""
    folder = tmp_path_factory.mktemp("sweep")

    def use(size: int) -> dict[str, float]:
        return {**USE, "mfu": size / 1e4, "processor_time_pct": 60 + size / 10, "memory_peak_gib": size / 100}

    facts: dict[str, Any] = {"throughput": use, "test_samples": 10_000}
    accuracy = {32: 0.985, 64: 0.984, 128: 0.983, 256: 0.95}
    facts["metrics"] = lambda size: {"test/acc": accuracy[size]}
    sweep_of(folder, {32: 3000, 64: 4800, 128: 6000, 256: 7000}, **facts)
    sweep_of(folder, {32: 2000, 64: 8000, 128: 16000, 256: 24000}, first=4, device="cuda", **facts)
    write_run(folder / "8", 512, device="cuda", status="out_of_memory", error="OutOfMemoryError: out of memory")
    for number in range(4):
        write_curve(folder / str(number), [(10, 0.9), (20, 0.95)], 8.0)
    return write_report([folder], out)


# --- the terminal --------------------------------------------------------------------------------------------------


def test_a_timed_sweep_is_a_block_with_the_answer(tmp_path: Path):
    mfu = {1: 0.025, 8: 0.13, 64: 0.37, 512: 0.44}
    folder = sweep_of(
        tmp_path / "s", {1: 220, 8: 1100, 64: 3230, 512: 3850}, noise=0.0002, drift=0.01,
        throughput=lambda size: {"mfu": mfu[size]},
    )  # fmt: skip
    write_run(folder / "4", 1024, status="out_of_memory", error="OutOfMemoryError")
    said = analyse([folder]).text.splitlines()
    assert said[0] == "5 runs: 4 finished, 1 out of memory; on A CPU; data: mnist"
    words = [line.split() for line in said[2:6]]
    assert words[0] == ["cnn", "1", "8", "64", "512"]
    assert [float(cell.replace(",", "")) for cell in words[1][1:]] == pytest.approx([220, 1100, 3230, 3850], rel=0.01)
    assert words[2][0] == "±"
    assert words[3] == ["MFU", "2.5%", "13%", "37%", "44%"]
    assert said[6] == "→ 512 is the fastest; 64 gives 84 % of it."
    assert said[7] == "  Accuracy was not measured: train these sizes before you choose."
    assert said[-1] == "failed   1,024: out of memory"


def test_a_trained_sweep_has_its_metric_and_an_accelerator_its_memory(report: Report, out: Path):
    rows = [line.split()[0] for line in report.text.splitlines() if line]
    assert (rows.count("test/acc"), rows.count("memory")) == (2, 1)
    assert "→ 128 is the fastest of those with the best test/acc; 64 gives 80 % of it." in report.text
    assert "→ cnn: gpu is faster than cpu from a batch size between 32 and 64 on" in report.text
    assert report.printed.splitlines()[-1].endswith(f"{out.name}/report.html")


def test_an_undecided_sweep_prints_the_command_that_decides_it(tmp_path: Path):
    folder = sweep_of(tmp_path / "s", {8: 1000, 64: 3600, 512: 4000}, noise=0.08, windows=6, seed=1)
    for number, size in enumerate((8, 64, 512)):
        overrides = [f"data.batch_size={size}", "model=cnn", "data.root=/my data", "experiment=mnist", "x=\x1b; rm"]
        change_record(folder / str(number), overrides=overrides)
    said = analyse([folder]).text
    assert "→ Undecided between 64 and 512: " in said
    (line,) = [line for line in said.splitlines() if line.startswith("  repeat   ")]
    assert line.endswith(
        " -m model=cnn 'data.root=/my data' 'x=\ufffd; rm' 'experiment=[mnist,throughput]' data.batch_size=64,512"
    )


@pytest.mark.parametrize(
    ("given", "command", "printed"),
    [
        (["experiment=mynet"], "batchscope train --config-dir=conf -m …", "--config-dir=conf -m 'experiment=[mynet,throughput]'"),
        (["experiment=[a,throughput]"], "batchscope train -m …", "train -m 'experiment=[a,throughput]'"),
        (["trainer.max_steps=8", "+trainer.max_time=1"], "batchscope train --config-dir 'my conf' -m", "'--config-dir=my conf' -m experiment=throughput"),
        (["seed=1"], "batchscope 'train", "train -m seed=1 experiment=throughput"),
        (["~callbacks.device"], "", "train -m '~callbacks.device' experiment=throughput"),
    ],
    ids=["own project", "timed already", "its own length", "a torn command", "a callback left out"],
)  # fmt: skip
def test_the_command_that_repeats_a_sweep_trains_the_same_and_times_it(
    tmp_path: Path, given: list[str], command: str, printed: str
):
    for number, size in enumerate((8, 64)):
        write_measured(tmp_path / "s", {size: 10.0}, first=number, others=0.45)
        change_record(tmp_path / "s" / str(number), overrides=[*given, f"data.batch_size={size}"], command=command)
    said = analyse([tmp_path / "s"]).text
    assert said.splitlines()[-1].endswith(f"{printed} data.batch_size=8,64")


@pytest.mark.parametrize("kind", ["batch sizes", "settings"])
def test_a_busy_machine_has_no_recommendation_but_the_command_that_repeats_the_sweep(tmp_path: Path, kind: str):
    for number, (size, pipeline) in enumerate(((8, "memory"), (64, "device"))):
        options = {"data.pipeline": pipeline} if kind == "settings" else {}
        overrides = ["model=cnn", f"data.pipeline={pipeline}"] if options else ["model=cnn", f"data.batch_size={size}"]
        write_measured(tmp_path / "s", {8 if options else size: 10.0}, first=number, others=0.45, options=options)
        change_record(tmp_path / "s" / str(number), overrides=overrides)
    said = write_report([tmp_path / "s"], tmp_path / "out").text
    assert "→ The machine was busy: other programs took 45 % of the processor. No " in said
    assert "is the fastest" not in said
    end = (
        "model=cnn data.pipeline=memory,device" if kind == "settings" else "experiment=throughput data.batch_size=8,64"
    )
    assert said.splitlines()[-1].startswith("  repeat   ") and said.splitlines()[-1].endswith(end)
    for name in ("report.md", "report.html"):
        assert end in (tmp_path / "out" / name).read_text()


def test_where_nothing_is_known_no_number_stands_beside_it(tmp_path: Path):
    said = analyse([sweep_of(tmp_path / "s", {8: 1000, 64: 4000}, windows=3, noise=2.0)]).text
    assert not re.search(r"\d{3} ?%", said)
    (line,) = [line for line in said.splitlines() if line.startswith("±")]
    assert "?" in line


def test_many_sizes_are_several_blocks_and_a_long_label_is_cut(tmp_path: Path):
    rates = {2**n: 1000 + 100 * n for n in range(18)}
    said = analyse([sweep_of(tmp_path / "s", rates, model="a_long_name_" * 12)]).text
    assert max(len(line) for line in said.splitlines() if not line.startswith("  repeat ")) <= 80
    assert sum(line.startswith("batch size ") for line in said.splitlines()) >= 2
    assert "131,072" in said


def test_no_line_is_wider_than_80_columns_but_commands_and_no_word_is_the_program_s_own(report: Report, out: Path):
    assert all(len(line) <= 80 or line.startswith("  repeat ") for line in report.text.splitlines())
    for text in (report.printed, (out / "report.md").read_text()):
        assert not re.search(FORBIDDEN, text, re.IGNORECASE)


def test_one_run_repetitions_and_failures_are_said(tmp_path: Path):
    write_run(tmp_path / "one", 64, 10.0)
    report = analyse([tmp_path / "one"])
    assert (report.exit_code, report.headlines) == (
        0, ["One run only: 6,400 samples/s at batch size 64. Several batch sizes are needed for a recommendation."],
    )  # fmt: skip
    for number in range(2):
        write_measured(tmp_path / "same", {32: 10.0}, first=number)
    assert analyse([tmp_path / "same"]).headlines == ["Nothing but the seed varied, so there is nothing to compare."]
    for number in range(3):
        write_run(tmp_path / "failed" / str(number), 32 * 2**number, status="failed", error="ValueError: no")
    report = analyse([tmp_path / "failed"])
    assert (report.exit_code, report.headlines) == (
        1, ["No run finished, so there is nothing to recommend. Most often: ValueError: no."],
    )  # fmt: skip
    assert "failed   32, 64, 128: ValueError: no" in report.text


def test_runs_without_a_rate_and_a_damaged_step_file_are_notes(tmp_path: Path):
    folder = sweep_of(tmp_path / "s", {8: 1000, 64: 2000})
    (folder / "1" / "steps.npz").write_bytes(b"no archive")
    write_run(folder / "2", 32, metrics={"test/acc": 0.9})
    notes = analyse([folder]).notes
    assert any(note.startswith("1: ") and "steps.npz: cannot be read" in note for note in notes)
    assert "finished without a rate: 2" in notes


# --- the files -----------------------------------------------------------------------------------------------------


def test_everything_is_written(report: Report, out: Path):
    assert {path.name for path in out.iterdir()} == {
        "report.md", "report.html", "sweep.csv", "tensorboard", "throughput.png", "utilisation.png",
        "step_time.png", "memory.png", "accuracy.png", "validation.png",
    }  # fmt: skip
    assert all(file.exists() for file in report.files)


def test_the_markdown_begins_with_the_answer(report: Report, out: Path):
    markdown = (out / "report.md").read_text()
    assert markdown.splitlines()[2] == (
        "- cnn · cpu: 128 is the fastest of those with the best test/acc; 64 gives 80 % of it."
    )
    assert "![Samples per second against batch size](throughput.png)" in markdown


def test_a_row_has_one_estimate_of_the_step_and_the_rate_and_it_is_that_of_the_answer(tmp_path: Path):
    folder = sweep_of(tmp_path / "s", {32: 1000, 64: 2000})
    for number in range(2):  # the record's own numbers are of other steps
        record = json.loads((folder / str(number) / "run.json").read_text())
        record["throughput"] |= {"step_ms_median": 40.0, "samples_per_sec": 25 * 32 * 2**number}
        change_record(folder / str(number), throughput=record["throughput"])
    report = write_report([folder], tmp_path / "out")
    frame = pd.read_csv(tmp_path / "out" / "sweep.csv")
    rates = report.answers[0].rates
    assert frame["samples_per_sec"].tolist() == pytest.approx([rates.rate(32), rates.rate(64)])
    assert (frame["samples_per_sec"] * frame["step_ms_typical"] / 1e3).tolist() == pytest.approx([32, 64])
    assert "median step" not in (tmp_path / "out" / "report.md").read_text()


def test_tensorboard_has_few_scalars_by_batch_size(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = sweep_of(tmp_path / "s", {32: 1000, 64: 2000}, throughput=lambda size: {**USE, "mfu": size / 1e4})
    write_report([folder], tmp_path / "out")
    events = EventAccumulator(str(tmp_path / "out/tensorboard/cnn")).Reload()
    assert set(events.Tags()["scalars"]) == {"sweep/samples_per_sec", "sweep/mfu"}  # the others are constant
    assert [point.step for point in events.Scalars("sweep/mfu")] == [32, 64]


def test_what_an_earlier_report_wrote_is_removed_and_nothing_else(tmp_path: Path):
    curves = sweep_of(tmp_path / "one", {32: 1000, 64: 2000}, model="mlp")
    for number in range(2):
        write_curve(curves / str(number), [(10, 0.9), (20, 0.95)], 8.0)
    out = tmp_path / "out"
    write_report([curves], out)
    mine = out / "tensorboard" / "mlp" / "events.out.tfevents.1.my-host.1"
    for path in (mine, out / "memory.png", out / "mine.png"):
        path.write_bytes(b"mine")
    write_report([sweep_of(tmp_path / "two", {32: 1000, 64: 2000})], out)
    assert not (out / "validation.png").exists()
    assert [path.read_bytes() for path in (mine, out / "memory.png", out / "mine.png")] == [b"mine"] * 3
    assert [path.name for path in mine.parent.iterdir()] == [mine.name]
    assert "validation.png" not in (out / "report.md").read_text()


def test_a_report_needs_no_torch(tmp_path: Path):
    folder = sweep_of(tmp_path / "s", {32: 1000, 64: 2000}, throughput=USE)
    program = (
        "import sys; from batchscope.analysis import analyse; import batchscope.cli.report; "
        f"analyse([{str(folder)!r}]).text; "
        "print([m for m in ('torch', 'lightning', 'hydra') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_names_of_any_characters_break_no_table_no_plot_and_are_no_html(tmp_path: Path):
    names = ["a|b\n# c", "\ud800<img src=x>", "\x1b[31m模型 $x$ $y$", "é" * 300]
    for number, name in enumerate(names):
        sweep_of(tmp_path / "s", {32: 1000, 64: 2000}, first=2 * number, model=name, device_name=name)
    with warnings.catch_warnings(action="error"):
        report = write_report([tmp_path / "s"], tmp_path / "out")
    page = (tmp_path / "out" / "report.md").read_text()
    assert len([line for line in page.splitlines() if line.startswith("| ")]) == 2 + 2 * len(names)
    assert "a\\|b # c" in page and "<img" not in page and "\n# c" not in page
    assert {"throughput.png", "step_time.png"} <= {file.name for file in report.files}


def test_hostile_records_neither_crash_nor_inject(tmp_path: Path):
    """Each field of a record in turn, at every depth, holds what it should not."""
    plain = write_measured(tmp_path / "s", {32: 10.0, 64: 12.0}, throughput=USE, metrics={"test/acc": 0.9})
    record = json.loads((plain / "0" / "run.json").read_text())
    fields = [(key, sub) for key, value in record.items() if isinstance(value, dict) for sub in value]
    fields += [(key, None) for key in record if key not in ("schema", "config")]
    for number, (key, sub) in enumerate(fields, 2):
        write_measured(tmp_path / "s", {32: 10.0}, first=number)
        changed = json.loads(json.dumps(record))
        value = HOSTILE[number % len(HOSTILE)]
        changed[key] = value if sub is None else {**changed[key], sub: value}
        (tmp_path / "s" / str(number) / "run.json").write_text(json.dumps(changed))
    report = write_report([tmp_path / "s"], tmp_path / "out")
    assert report.printed.replace("\n", "").isprintable()
    for name in ("report.html", "report.md"):
        text = (tmp_path / "out" / name).read_text()
        assert "<script>alert" not in text and "<img" not in text and "\x1b" not in text


# --- where it goes -------------------------------------------------------------------------------------------------


def test_nothing_to_report_writes_nothing_and_a_place_that_cannot_be_written_is_one_line(tmp_path: Path):
    with pytest.raises(UserError, match="no runs in"):
        write_report([tmp_path], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    folder = sweep_of(tmp_path / "s", {32: 1000, 64: 2000})
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="out: cannot be written: Not a directory"):
        write_report([folder], tmp_path / "file" / "out")


@pytest.mark.parametrize("name", ["report.md", "sweep.csv", "throughput.png", "tensorboard", "tensorboard/cnn-cpu"])
def test_a_link_out_of_the_reports_folder_is_refused(name: str, tmp_path: Path):
    folder = sweep_of(tmp_path / "theirs", {32: 1000, 64: 2000})
    victim = tmp_path / "elsewhere" / "mine"
    victim.parent.mkdir()
    victim.write_text("mine")
    link = folder / "report" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(victim)
    with pytest.raises(UserError, match=f"{name}: is a link that leads out of the report's folder"):
        write_report([folder], folder / "report")
    assert victim.read_text() == "mine"
    assert list(victim.parent.iterdir()) == [victim]


def test_a_reports_folder_behind_a_link_out_of_what_is_reported_is_refused(tmp_path: Path):
    folder = sweep_of(tmp_path / "theirs", {32: 1000, 64: 2000})
    (tmp_path / "elsewhere").mkdir()
    (folder / "report").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="report: is behind a link that leads out of"):
        write_report([folder], folder / "report")
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert write_report([folder], tmp_path / "elsewhere").files  # as it was typed


def test_a_report_replaces_its_files_and_writes_through_none(tmp_path: Path):
    folder = sweep_of(tmp_path / "mine", {32: 1000, 64: 2000}, throughput=USE)
    out = folder / "report"
    out.mkdir()
    names = ("report.md", "report.html", "sweep.csv", "throughput.png")
    for name in names:
        (out / f"{name}.before").write_text("before")
        (out / name).hardlink_to(out / f"{name}.before")
    write_report([folder], out)
    assert [(out / f"{name}.before").read_text() for name in names] == ["before"] * len(names)
    assert all((out / name).stat().st_size > 6 for name in names)
