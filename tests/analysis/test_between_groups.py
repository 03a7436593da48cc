"""Lines about groups that differ in devices or other options: a line claims what its interval shows."""

import re

import pytest

from batchscope.analysis.between_groups import best_setting, compare_settings, crossovers
from batchscope.analysis.groups import short_names
from batchscope.analysis.read import read_sweep
from batchscope.analysis.report import analyse
from batchscope.analysis.table import setting_texts, shown_metrics
from batchscope.analysis.text import and_
from tests.support.synthetic_runs import write_measured, write_run

QUIET = {"noise": 0.0005, "drift": 0}
NOT_COMPILED, COMPILED = ({"options": {"compile": value}} for value in (False, True))
GPU, WORKERS = {"device": "cuda"}, {"options": {"compile": False, "data.pipeline": "workers"}}


@pytest.mark.parametrize(
    ("one", "two", "differs", "noise", "said"),
    [
        (
            {1: 1.0, 8: 2.0, 64: 8.0, 512: 52.0}, {1: 4.0, 8: 4.0, 64: 4.0, 512: 4.5}, GPU, QUIET,
            r"gpu ÷ cpu in samples/s is 0.25 \(.*\) at 1, 0.50 .* at 8, 2.00 .* at 64, 11.5\d .* at 512; gpu is faster from 64 on",
        ),
        ({8: 1.0, 64: 4.0}, {8: 50.0, 64: 800.0}, GPU, QUIET, r"gpu ÷ cpu in samples/s is 0.020 \(0.0\d\d to 0.0\d\d\) at 8, 0.0050 .*"),
        # A size without a shown difference does not count.
        ({8: 10.0, 64: 40.0}, {8: 9.99, 64: 4.0}, GPU, {"noise": 0.02}, ".*; gpu is faster from 64 on"),
        ({8: 10.0, 64: 40.0}, {8: 1.0, 64: 40.0}, GPU, {"noise": 0.02}, r"[^;]* at 64"),
        ({8: 10.0, 64: 40.0}, {8: 1.0, 64: 4.0}, GPU, {"windows": 1}, r"gpu ÷ cpu in samples/s is \d+.\d\d at 8, \d+.\d\d at 64"),
        ({8: 9.0, 64: 10.0}, {64: 8.0}, WORKERS, QUIET, r"workers ÷ memory in samples/s is 1.25 \(.*\) at 64; workers is faster at 64"),
        ({8: 9.0, 64: 10.0}, {64: 20.0}, COMPILED, QUIET, ".* 0.50 .* at 64; compile false is faster at 64"),
    ],
)  # fmt: skip
def test_two_are_compared_at_each_size_and_one_is_faster_where_the_intervals_show_it(
    tmp_path, one, two, differs, noise, said
):
    write_measured(tmp_path, one, **NOT_COMPILED, **noise)
    write_measured(tmp_path, two, first=len(one), **NOT_COMPILED | differs, **noise)
    (line,) = crossovers(read_sweep([tmp_path]))
    assert re.fullmatch(rf"cnn: {said}\.", line)


def test_devices_of_one_kind_are_told_apart_by_their_names(tmp_path):
    write_measured(tmp_path, {8: 20.0, 64: 40.0}, **QUIET)
    for number, name in enumerate(("T4", "A100"), 1):
        write_measured(tmp_path, {8: 20.0 / 2**number}, first=1 + number, device_name=name, **GPU, **QUIET)
    lines = crossovers(read_sweep([tmp_path]))
    assert [line.partition(" in ")[0] for line in lines] == ["cnn: T4 ÷ A CPU", "cnn: A100 ÷ A CPU", "cnn: A100 ÷ T4"]


def test_processes_of_a_cpu_are_compared_although_they_share_its_threads(tmp_path):
    for number, processes in enumerate((1, 2)):
        fields = {"options": {"trainer.devices": processes}, "hardware": {"torch_threads": 2 // processes}}
        write_measured(tmp_path, {8: 10.0 / processes, 64: 40.0 / processes}, first=2 * number, **fields, **QUIET)
    (line,) = crossovers(read_sweep([tmp_path]))
    assert line.startswith("cnn: devices 2 ÷ devices 1 in samples/s is 2.00 ")


def test_models_data_rates_of_learning_and_what_differs_in_two_things_are_not_compared(tmp_path):
    write_measured(tmp_path, {8: 10.0, 64: 20.0})
    variants = {"model": "mlp"}, {"options": {"optimizer.lr": 0.1}}, GPU | {"options": {"data.pipeline": "device"}}
    for number, fields in enumerate(variants, 2):
        write_measured(tmp_path, {8: 10.0}, first=number, **fields)
    assert crossovers(read_sweep([tmp_path])) == []
    write_measured(tmp_path, {8: 10.0}, first=5, choices={"model": "cnn", "data": "cifar10"})
    line = "The runs are on different data: their rates and metrics are not compared."
    assert compare_settings(read_sweep([tmp_path]), []) == [line]


def test_groups_at_one_batch_size_each_are_compared_as_settings(tmp_path):
    for number, fields in enumerate(({}, GPU)):
        write_measured(tmp_path, {64: 10.0 / (1 + number)}, first=number, **fields, **QUIET)
    assert crossovers(read_sweep([tmp_path])) == []
    assert compare_settings(read_sweep([tmp_path]), [])[0].startswith("cnn · gpu is the fastest: 2.00 (")


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (["val/acc"], "Of val/acc fewer than two settings have a value"),
        (["val/f1_of_mine", "val/f1_of_mine"], "Of val/f1_of_mine it is not known whether more is better"),
        ([], "No metric is known"),
    ],
)
def test_why_no_setting_is_the_best_is_said(tmp_path, names, why):
    for number, rate in enumerate((0.004, 100.0)):
        fields = {"metrics": {name: 0.5 for name in names[number : number + 1]}, "options": {"optimizer.lr": rate}}
        write_measured(tmp_path, {64: 10.0}, first=number, **fields)
    assert analyse([tmp_path]).headlines == [f"The settings differ in nothing that changes the time of a step. {why}."]


def test_a_class_that_an_option_names_makes_another_setting(tmp_path):
    for number, name in enumerate(("resnet18", "resnet50")):
        options = {"model": {"_target_": "theirs.Lit", "net": {"_target_": f"torchvision.models.{name}"}}}
        write_measured(tmp_path, {64: 10.0 / (1 + number)}, first=number, options=options, **QUIET)
    sweep = read_sweep([tmp_path])
    assert [group.label for group in sweep.groups] == [
        "cnn · torchvision.models.resnet18",
        "cnn · torchvision.models.resnet50",
    ]
    assert sweep.factors == ["model.net._target_"]
    names = {"model.net._target_": "net", "data.net": "data.net", "lr": "lr"}
    assert short_names(["model.net._target_", "lr"]) == {key: names[key] for key in ("model.net._target_", "lr")}
    assert short_names(names) == names | {"model.net._target_": "model.net"}
    assert compare_settings(sweep, [])[0].startswith("cnn · torchvision.models.resnet50 is the fastest: 2.00 (")


def test_settings_of_the_same_speed_are_compared_as_one(tmp_path):
    values = [(precision, lr) for precision in ("32-true", "bf16-mixed") for lr in (0.001, 0.004)]
    for number, (precision, lr) in enumerate(values):
        options = {"trainer.precision": precision, "optimizer.lr": lr}
        write_measured(tmp_path, {64: 10.0 if number < 2 else 5.0}, first=number, options=options, **QUIET)
    (line,) = compare_settings(read_sweep([tmp_path]), [])
    assert line.startswith("cnn · bf16-mixed is the fastest: 2.00 (")
    assert line.endswith(") times as fast as cnn · 32-true.")


TWO_PIPELINES, THREE_PIPELINES = {"memory": 10.0, "device": 5.0}, {"memory": 10.0, "device": 9.9, "workers": 30.0}
ACCURACIES = {"metrics": [{"test/acc": accuracy} for accuracy in (0.98, 0.979, 0.9)], "evaluated": {"test": 10_000}}


@pytest.mark.parametrize(
    ("step_ms", "facts", "said"),
    [
        (TWO_PIPELINES, QUIET, "cnn · device is the fastest: 2.00 (1.95 to 2.05) times as fast as cnn · memory."),
        (THREE_PIPELINES, QUIET, "cnn · device is the fastest by estimate: 1.01 (0.98 to 1.04) times as fast as cnn · memory."),
        (
            TWO_PIPELINES, {"others": 0.5, **QUIET},
            "cnn · device is the fastest beside other programs that took 50 % of the processor: 2.00 (1.95 to 2.05) times",
        ),
        (TWO_PIPELINES, {"windows": 1}, "No rate is known well enough to be compared"),
        (THREE_PIPELINES, ACCURACIES, "Best test/acc: 98.0 % with cnn · memory; cnn · device is within 0.67 points of it (one seed)."),
    ],
)  # fmt: skip
def test_a_setting_is_the_fastest_or_the_best_where_the_interval_shows_it(tmp_path, step_ms, facts, said):
    for number, (name, ms) in enumerate(step_ms.items()):
        fields = {key: value[number] if isinstance(value, list) else value for key, value in facts.items()}
        write_measured(tmp_path, {64: ms}, first=number, options={"data.pipeline": name}, seed=number, **fields)
    sweep = read_sweep([tmp_path])
    lines = compare_settings(sweep, shown_metrics(sweep))
    assert lines[0].startswith(said)
    assert len(lines) == 1 + ("metrics" in facts)


def test_the_fastest_is_so_by_estimate_as_soon_as_any_other_setting_may_be_as_fast(tmp_path):
    settings = {"memory": (5.0, 0.0), "device": (7.8, 0.0), "workers": (8.0, 0.5)}  # ms, the share of other programs
    for number, (name, (ms, others)) in enumerate(settings.items()):
        options = {"data.pipeline": name}
        write_measured(tmp_path, {64: ms}, first=number, options=options, others=others, passes=False, **QUIET)
    fastest, contenders = compare_settings(read_sweep([tmp_path]), [])
    assert fastest.startswith("cnn · memory is the fastest by estimate beside other programs")
    assert contenders == "cnn · workers may be as fast."


def test_the_table_has_a_line_for_each_setting_with_the_mean_and_the_deviation_of_its_runs(tmp_path):
    for seed, accuracy in enumerate((0.97, 0.99, 0.98)):
        fields = {"metrics": {"test/acc": accuracy}, "throughput": {"mfu": 0.25}}
        write_measured(tmp_path, {64: 10.0}, first=seed, seed=seed, **QUIET, **fields)
    write_measured(tmp_path, {64: 5.0}, first=3, options={"data.pipeline": "device"}, throughput={"mfu": 0.5})
    report = analyse([tmp_path])
    texts = setting_texts(report.sweep, report.tables)
    rows = texts[["setting", "runs", "test/acc"]].to_numpy().tolist()
    assert texts.columns.tolist() == ["setting", "runs", "test/acc", "samples/s", "±", "MFU", "÷ first"]
    assert rows == [["cnn · memory", "3", "98.00±1.00%"], ["cnn · device", "1", ""]]


def test_changes_of_one_run_are_named_by_what_they_change_and_compared_with_the_first_setting(tmp_path):
    """A change of the same speed has the ratio 1, and an unmeasured change has none."""
    same = {"trainer.precision": "32-true", "optimizer.betas": [0.9, 0.999], "optimizer.lr": 0.1}
    changes = [{}, {"trainer.precision": "bf16-mixed"}, {"optimizer.betas": [0.8, 0.9]}, {"optimizer.lr": 0.2}]
    for number, change in enumerate(changes):
        ms = 5.0 if number == 1 else 10.0
        write_measured(tmp_path, {64: ms}, first=number, options=same | change, **QUIET)
    write_run(tmp_path / "4", 64, status="failed", error="E: no", options=same | {"channels_last": False})
    report = analyse([tmp_path])
    names = ["cnn", "cnn · bf16-mixed", "cnn · betas [0.8,0.9]", "cnn · lr 0.2", "cnn · channels_last false"]
    assert report.frame["group"].tolist() == [group.label for group in report.sweep.groups] == names
    assert report.failures == "cnn · channels_last false: E: no"
    shown = report.setting_texts.set_index("setting")["÷ first"]
    assert re.fullmatch(r"2\.00 \(1\.9\d to 2\.0\d\)", shown["cnn · bf16-mixed"])
    assert re.fullmatch(r"1\.00 \(0\.9\d to 1\.0\d\)", shown["cnn · betas [0.8,0.9]"])
    assert [shown[name] for name in (names[0], *names[3:])] == ["", "1.00", ""]
    assert "÷ first: rate ÷ that of the first" in report.legend


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ((1, 2), ["cnn", "cnn · model.enc.block 2", "cnn · model.dec.block 2"]),
        (("relu", "gelu"), ["cnn · relu · relu", "cnn · gelu · relu", "cnn · relu · gelu"]),
    ],
)
def test_no_two_settings_have_one_name(tmp_path, values, names):
    usual, changed = values
    for number, (enc, dec) in enumerate(((usual, usual), (changed, usual), (usual, changed))):
        options = {"model.enc": {"block": enc}, "model.dec": {"block": dec}}
        write_measured(tmp_path, {64: 10.0}, first=number, options=options, **QUIET)
    report = analyse([tmp_path])
    assert [group.label for group in report.sweep.groups] == names
    assert report.setting_texts["setting"].tolist() == names


def test_settings_of_the_same_speed_have_the_same_ratio(tmp_path):
    values = [(pipeline, rate) for pipeline in ("memory", "device") for rate in (0.1, 0.2)]
    for number, (pipeline, rate) in enumerate(values):
        options = {"data.pipeline": pipeline, "optimizer.lr": rate}
        write_measured(tmp_path, {64: 10.0 if number < 2 else 8.0}, first=number, options=options, **QUIET)
    first, second, *ratios = analyse([tmp_path]).setting_texts["÷ first"]
    assert (first, second, ratios[0][:6]) == ("", "1.00", "1.25 (")
    assert ratios[0] == ratios[1]


@pytest.mark.parametrize("lost", [0, 1])
def test_without_a_rate_of_the_first_setting_there_is_no_ratio_to_another(tmp_path, lost):
    for number, pipeline in enumerate(("memory", "device", "workers")):
        fields = {"first": number, "options": {"data.pipeline": pipeline}}
        if number == lost:
            write_run(tmp_path / str(number), 64, status="out_of_memory", options=fields["options"])
        else:
            write_measured(tmp_path, {64: 10.0 / (1 + number)}, **fields, **QUIET)
    report = analyse([tmp_path])
    headings = ["setting", "samples/s", "±"] + (["÷ first"] if lost else [])
    assert report.setting_texts.columns.tolist() == headings
    assert ("÷ first" in report.legend) == bool(lost)


def test_settings_of_one_size_each_have_it_in_their_names(tmp_path):
    for number, size in enumerate((8, 64)):
        write_measured(tmp_path, {size: 10.0}, first=number, options={"model.width": number}, **QUIET)
    write_run(tmp_path / "2", 128, status="failed", error="E: no", options={"model.width": 2})
    report = analyse([tmp_path])
    names = [f"cnn · width {number} · batch size {size}" for number, size in enumerate((8, 64, 128))]
    assert report.setting_texts["setting"].tolist() == names
    assert report.failures == f"{names[2]}: E: no"


def test_of_sizes_and_rates_the_best_is_named(tmp_path):
    values = {(8, 0.1): 0.5, (64, 0.1): 0.4, (8, 0.01): 0.2, (64, 0.01): 0.3}
    for number, ((size, rate), loss) in enumerate(values.items()):
        fields = {"options": {"optimizer.lr": rate}, "metrics": {"test/loss": loss}}
        write_measured(tmp_path, {size: 10.0}, first=number, **fields)
    report = analyse([tmp_path])
    assert [line for line in report.remarks if line.startswith("Best")] == [report.headlines[-1]]
    assert report.headlines[-1].startswith("Best test/loss: 0.200 with cnn · lr 0.01 · batch size 8; ")


def test_the_best_setting_has_its_batch_size(tmp_path):
    for number, size in enumerate((8, 64)):
        fields = {"options": {"model.width": number}, "metrics": {"val/loss": 1 / size}}
        write_measured(tmp_path, {size: 10.0}, first=number, **fields)
    best = best_setting(read_sweep([tmp_path]), ["val/loss"])
    assert best["settings"] == {"model.width": 1, "data.batch_size": 64}


def test_names_in_a_sentence():
    """The list of slower settings is empty where all settings are alike."""
    assert [and_(names) for names in ([], [64], ["a", "b"], [8, 64, 1024])] == ["", "64", "a and b", "8, 64 and 1,024"]
    assert and_([1] * 9) == "1, 1, 1, 1, 1, 1 and 3 more"
