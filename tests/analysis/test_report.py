"""The whole report: what it writes, and that it says what it could not do instead of failing."""

import json
import subprocess
import sys
import warnings
from datetime import UTC, datetime

import pytest

from batchscope.analysis import write_report
from batchscope.errors import UserError
from tests.support.synthetic_runs import overlapped, serial, write_curve, write_run, write_sweep

DEVICE = {"throughput": {"utilization_pct": 50.0, "memory_peak_gib": 1.0, "mfu": 0.1}}


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """One model on two devices, with a run that ran out of memory."""
    folder = write_sweep(
        tmp_path_factory.mktemp("sweep"), [32, 64, 128, 256], serial(4, 0.1), metrics={"test/acc": 0.98}, **DEVICE
    )
    write_sweep(folder, [32, 64, 128, 256], overlapped(4, 0.01), first=4, device="cuda", **DEVICE)
    write_run(folder / "8", 512, device="cuda", status="out_of_memory", error="OutOfMemoryError: out of memory")
    for n in range(4):
        write_curve(folder / str(n), [(10, 0.9), (20, 0.95)], 8.0)
    return folder


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """Where the report of `full` was written, twice."""
    return tmp_path_factory.mktemp("out")


@pytest.fixture(scope="module")
def report(full, out):
    with pytest.MonkeyPatch.context() as changed:  # the first one without its plots, which take long
        changed.setattr("batchscope.analysis.plots.draw", lambda analyses, out: ([], []))
        changed.setattr("batchscope.analysis.plots.cards", lambda analyses: {})
        write_report([full], out)
    return write_report([full], out)


def test_everything_is_written(report, out):
    assert report.exit_code == 0
    assert {path.name for path in out.iterdir()} == {
        "report.md", "report.html", "sweep.csv", "sweep.json",
        "throughput.png", "step_time.png", "device.png", "validation.png", "tensorboard",
    }  # fmt: skip
    assert all(file.exists() for file in report.files)
    assert {path.name for path in (out / "tensorboard").iterdir()} == {"cnn_cpu", "cnn_gpu", "report"}


def test_the_recommendation_comes_first(report, out):
    markdown = (out / "report.md").read_text()
    assert markdown.splitlines()[2].startswith("- **cnn · cpu: data.batch_size=256 reaches")
    assert "9 runs: 8 finished, 1 out of memory; on A CPU, A GPU; data: mnist." in markdown
    assert "![Samples per second against batch size](throughput.png)" in markdown


def test_the_json_holds_what_the_text_says(report, out):
    found = json.loads((out / "sweep.json").read_text())
    assert [r["batch_size"] for r in found["recommendations"]] == [r.batch_size for r in report.recommendations]
    assert found["crossovers"][0]["kind"] == "always"
    assert len(found["rows"]) == 9
    assert found["fits"][0]["floor_ms"] == pytest.approx(4, rel=0.02)


def test_tensorboard_has_the_batch_size_as_step_and_is_replaced_by_the_next_report(report, out):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(out / "tensorboard" / "cnn_cpu")).Reload()
    tags = {
        f"sweep/{name}"
        for name in ("samples_per_sec", "step_ms_median", "processor_time_pct", "mfu", "memory_peak_gib", "seconds")
    }
    assert set(events.Tags()["scalars"]) == tags
    points = events.Scalars("sweep/step_ms_median")
    assert [(point.step, point.value) for point in points] == [
        (b, pytest.approx(4 + 0.1 * b)) for b in (32, 64, 128, 256)
    ]
    said = EventAccumulator(str(out / "tensorboard" / "report")).Reload()
    assert set(said.Tags()["images"]) == {
        f"sweep/{name}" for name in ("throughput", "step_time", "device", "validation")
    }
    (text,) = said.Tensors("sweep/report")
    assert text.tensor_proto.string_val[0].decode().startswith("- **cnn · cpu: data.batch_size=256 reaches")


def test_the_events_for_tensorboard_have_the_time_at_which_the_sweep_ended(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = write_sweep(tmp_path / "sweep", [32, 64], serial(4, 0.1))
    record = json.loads((folder / "1" / "run.json").read_text())
    (folder / "1" / "run.json").write_text(json.dumps({**record, "started": "2040-11-22T09:00:00+00:00"}))
    write_report([folder], tmp_path / "out")
    ended = datetime(2040, 11, 22, 9, 0, 30, tzinfo=UTC).timestamp()
    for run, tag in (("cnn", "scalars"), ("report", "images")):
        events = EventAccumulator(str(tmp_path / "out" / "tensorboard" / run)).Reload()
        read = events.Scalars if tag == "scalars" else events.Images
        assert {event.wall_time for name in events.Tags()[tag] for event in read(name)} == {ended}


def test_a_report_needs_no_torch(tmp_path):
    folder = write_sweep(tmp_path / "sweep", [32, 64], serial(4, 0.1), **DEVICE)
    program = (
        "import sys; from batchscope.analysis import write_report; import batchscope.report; "
        f"write_report([{str(folder)!r}], {str(tmp_path / 'out')!r}); "
        "print([m for m in ('torch', 'lightning', 'hydra') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_names_of_any_characters_break_no_table_no_plot_and_are_no_html(tmp_path):
    names = ["a|b\n# c", "\ud800", "<img src=x>", "\x1b[31m", "é" * 300]
    for number, name in enumerate(names):
        write_sweep(tmp_path / "x", [32, 64], serial(4, 0.1), first=2 * number, model=name, device_name=name)
    with warnings.catch_warnings(action="error"):
        report = write_report([tmp_path / "x"], tmp_path / "out")
    page = (tmp_path / "out" / "report.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + 2 * len(names)
    assert "a\\|b # c" in page and "<img" not in page and "\n# c" not in page
    assert {"throughput.png", "step_time.png"} <= {file.name for file in report.files}


def test_one_run(tmp_path):
    write_run(tmp_path / "run", 64, 10.0)
    report = write_report([tmp_path / "run"], tmp_path / "out")
    assert report.exit_code == 0
    assert report.headlines == [
        "One run only: 6,400 samples/s at batch size 64. Several batch sizes are needed for a recommendation."
    ]
    assert "no throughput plot: it needs two batch sizes" in report.notes


@pytest.mark.usefixtures("words_alone")
def test_a_rate_without_a_batch_size_is_not_compared(tmp_path):
    facts = {"batch_size": None, "samples_per_sec": 6400.0}
    for n in range(2):
        write_run(tmp_path / str(n), 64, 10.0, options={"data.batch_size": "many"}, throughput=facts)
    report = write_report([tmp_path], tmp_path / "out")
    assert "finished without a throughput summary: 0, 1" in report.notes


@pytest.mark.usefixtures("words_alone")
def test_a_sweep_over_something_else(tmp_path):
    write_run(tmp_path / "0", 64, 10.0)
    write_run(tmp_path / "1", 64, 5.0, options={"data.pipeline": "device"})
    report = write_report([tmp_path], tmp_path / "out")
    assert report.exit_code == 0
    assert report.headlines[0].startswith("Fastest: cnn · device")
    assert "no batch size is recommended: data.batch_size was the same in all runs" in report.notes


@pytest.mark.usefixtures("words_alone")
def test_all_failed(tmp_path):
    for n in range(3):
        write_run(tmp_path / str(n), 32 * 2**n, status="failed", error="ValueError: no")
    report = write_report([tmp_path], tmp_path / "out")
    assert report.exit_code == 1
    assert report.headlines == ["No run finished, so there is nothing to recommend. Most often: ValueError: no."]
    assert "ValueError: no" in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.usefixtures("words_alone")
def test_runs_without_a_throughput_summary(tmp_path):
    write_run(tmp_path / "0", 32, metrics={"test/acc": 0.9})
    write_run(tmp_path / "1", 64, metrics={"test/acc": 0.8})
    report = write_report([tmp_path], tmp_path / "out")
    assert report.exit_code == 0
    assert report.headlines == ["Best test/acc: cnn · batch size 32, 90.0 %."]
    assert "finished without a throughput summary: 0, 1" in report.notes


@pytest.mark.usefixtures("words_alone")
def test_runs_on_different_data_are_listed_not_compared(tmp_path):
    write_run(tmp_path / "0", 64, 10.0, metrics={"test/acc": 0.9})
    folder = write_run(tmp_path / "1", 64, 10.0, metrics={"test/acc": 0.99})
    record = json.loads((folder / "run.json").read_text())
    record["choices"]["data"] = "cifar10"
    (folder / "run.json").write_text(json.dumps(record))
    report = write_report([tmp_path], tmp_path / "out")
    assert report.headlines == ["The runs are on different data: there is nothing to compare."]


@pytest.mark.usefixtures("words_alone")
def test_unlike_numbers_of_samples_are_a_note(tmp_path):
    for n, size in enumerate((32, 64)):
        write_run(tmp_path / str(n), size, 10.0, metrics={"test/acc": 0.9}, steps=25)
    notes = write_report([tmp_path], tmp_path / "out").notes
    assert "cnn: metrics are not compared between sizes that saw different numbers of samples" in notes


@pytest.mark.usefixtures("words_alone")
def test_repetitions_alone(tmp_path):
    for n in range(2):
        write_run(tmp_path / str(n), 32, 10.0)
    assert "nothing varied: the runs repeat one another" in write_report([tmp_path], tmp_path / "out").notes


@pytest.mark.usefixtures("words_alone")
def test_runs_that_differ_in_their_seed_alone_have_a_mean_and_a_spread(tmp_path):
    for seed, (ms, accuracy) in enumerate(((10.0, 0.97), (8.0, 0.99), (12.5, 0.98))):
        write_run(tmp_path / str(seed), 64, ms, seed=seed, metrics={"test/acc": accuracy})
    report = write_report([tmp_path], tmp_path / "out")
    numbers = "test/acc 98.00 ± 1.00 % (97.00 to 99.00); 6,510 ± 1,440 (5,120 to 8,000) samples/s"
    assert report.headlines == [f"cnn, 3 seeds at batch size 64, mean ± standard deviation (range): {numbers}."]


@pytest.mark.usefixtures("words_alone")
def test_repeats_of_several_options_are_compared_by_their_medians_and_each_has_its_spread(tmp_path):
    for n, ms in enumerate((10.0, 20.0, 30.0, 40.0)):
        write_run(tmp_path / str(n), 64, ms, seed=n % 2, options={"data.pipeline": ("memory", "device")[n // 2]})
    first, second, third = write_report([tmp_path], tmp_path / "out").headlines
    assert first.startswith("Fastest: cnn · memory, 4,800 samples/s")
    spread = "mean ± standard deviation (range): 4,800 ± 2,260 (3,200 to 6,400) samples/s."
    assert second == f"cnn · memory, 2 seeds at batch size 64, {spread}"
    assert third.startswith("cnn · device, 2 seeds")


@pytest.mark.usefixtures("words_alone")
def test_of_repeats_only_one_of_which_was_measured_there_is_one_run(tmp_path):
    write_run(tmp_path / "0", 64, 10.0, seed=0)
    write_run(tmp_path / "1", 64, status="failed", error="ValueError: no", seed=1)
    report = write_report([tmp_path], tmp_path / "out")
    assert report.headlines == ["One measured run only: nothing to compare it with."]


@pytest.mark.usefixtures("words_alone")
def test_a_rate_of_steps_that_differ_by_more_than_a_factor_of_two_is_called_unreliable(tmp_path):
    folder = write_sweep(tmp_path, [32, 64, 128], serial(4, 0.1))
    assert not any("not reliable" in note for note in write_report([folder], tmp_path / "before").notes)
    write_run(folder / "1", 64, 10.0, throughput={"step_ms_p10": 8.0, "step_ms_p90": 16.1})
    [note] = [note for note in write_report([folder], tmp_path / "after").notes if "not reliable" in note]
    assert note.startswith("cnn: the rate at 64 is not reliable")


def test_nothing_to_report_writes_nothing(tmp_path):
    with pytest.raises(UserError, match="no runs in"):
        write_report([tmp_path], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_place_that_cannot_be_written_is_one_line(full, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        write_report([full], tmp_path / "file" / "out")


@pytest.mark.parametrize("name", ["report.md", "sweep.csv", "throughput.png", "tensorboard", "tensorboard/cnn-cpu"])
def test_a_link_out_of_the_reports_folder_is_refused(name, tmp_path):
    folder = write_sweep(tmp_path / "theirs", [32, 64, 128], serial(4, 0.1), **DEVICE)
    victim = tmp_path / "elsewhere" / "events.out.tfevents.1"
    victim.parent.mkdir()
    victim.write_text("mine")
    link = folder / "report" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(victim if link.suffix else victim.parent)
    with pytest.raises(UserError, match=f"{name}: is a link that leads out of the report's folder"):
        write_report([folder], folder / "report")
    assert victim.read_text() == "mine"
    assert list(victim.parent.iterdir()) == [victim]


@pytest.mark.usefixtures("words_alone")
def test_a_reports_folder_behind_a_link_out_of_what_is_reported_is_refused(tmp_path):
    folder = write_sweep(tmp_path / "theirs", [32, 64, 128], serial(4, 0.1), **DEVICE)
    (tmp_path / "elsewhere").mkdir()
    (folder / "report").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="report: is behind a link that leads out of"):
        write_report([folder], folder / "report")
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert write_report([folder], tmp_path / "elsewhere").files  # as it was typed


def test_a_report_replaces_its_files_and_writes_through_none(tmp_path):
    folder = write_sweep(tmp_path / "mine", [32, 64, 128], serial(4, 0.1), **DEVICE)
    out = folder / "report"
    out.mkdir()
    names = ("report.md", "report.html", "sweep.csv", "sweep.json", "throughput.png")
    for name in names:
        (out / f"{name}.before").write_text("before")
        (out / name).hardlink_to(out / f"{name}.before")
    write_report([folder], out)
    assert [(out / f"{name}.before").read_text() for name in names] == ["before"] * len(names)
    assert all((out / name).stat().st_size > 6 for name in names)


@pytest.mark.usefixtures("words_alone")
def test_a_folder_that_was_typed_may_lie_behind_a_link(tmp_path):
    folder = write_sweep(tmp_path / "project" / "sweep", [32, 64, 128], serial(4, 0.1), **DEVICE)
    (tmp_path / "disk").mkdir()
    (tmp_path / "project" / "outputs").symlink_to(tmp_path / "disk")
    write_report([folder.parent], folder.parent / "outputs" / "compared")
    assert (tmp_path / "disk" / "compared" / "report.md").is_file()


@pytest.mark.usefixtures("words_alone")
def test_a_rate_that_is_hardly_known_is_a_note_and_so_is_a_disturbed_run(tmp_path):
    folder = write_sweep(tmp_path, [32, 64, 128], serial(4, 0.1))
    wide = {"step_ms_interval": [8.0, 13.0], "step_ms_p10": 4.0, "step_ms_p90": 16.1}
    write_run(folder / "1", 64, 10.0, throughput={**wide, "stretches": 4, "disturbed_stretches": 4})
    (folder / "2" / "steps.npz").write_bytes(b"no archive")
    notes = write_report([folder], tmp_path / "out").notes
    assert any(note.startswith("cnn: the rate at 64 is not known to ± 10 %") for note in notes)
    assert any("the rate at 64 may be too low" in note for note in notes)
    assert not any("not reliable" in note for note in notes)
    assert any(note.startswith("2: ") and "steps.npz: cannot be read" in note for note in notes)
