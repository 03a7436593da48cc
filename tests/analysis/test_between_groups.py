"""What is said of groups that differ in devices or other options: each line as strong as its interval."""

import pytest

from batchscope.analysis.between_groups import compare_settings, crossovers
from batchscope.analysis.read import find
from batchscope.analysis.report import analyse
from batchscope.analysis.table import run_table, setting_texts, shown_metrics
from batchscope.analysis.text import and_
from tests.support.synthetic_runs import write_measured

QUIET = {"noise": 0.0005, "drift": 0}
NOT_COMPILED, COMPILED = ({"options": {"compile": value}} for value in (False, True))
GPU, WORKERS = {"device": "cuda"}, {"options": {"compile": False, "data.pipeline": "workers"}}
BOTH = "at every size that ran on both"


@pytest.mark.parametrize(
    ("one", "two", "differs", "noise", "said"),
    [
        (
            {1: 1.0, 8: 2.0, 64: 8.0, 512: 52.0}, {1: 4.0, 8: 4.0, 64: 4.0, 512: 4.5}, GPU, QUIET,
            "gpu is faster than cpu from a batch size between 8 and 64 on, 11.6 times as fast at 512.",
        ),
        # The largest ratio is not that of the last size.
        (
            {8: 40.0, 64: 50.0}, {8: 4.0, 64: 25.0}, GPU, QUIET,
            f"gpu is faster than cpu {BOTH} (8 to 64), 10.0 times as fast at 8.",
        ),
        # A size at which no difference is shown does not count.
        ({8: 10.0, 64: 40.0}, {8: 9.99, 64: 4.0}, GPU, {"noise": 0.02}, "gpu is faster than cpu at 64, "),
        (
            {8: 10.0, 64: 40.0}, {8: 10.0, 64: 40.0}, GPU, {"noise": 0.05},
            "no difference between cpu and gpu is shown at any size that ran on both (8 to 64).",
        ),
        ({8: 10.0, 64: 40.0}, {8: 1.0, 64: 4.0}, GPU, {"windows": 1}, "no difference between cpu and gpu is shown"),
        ({8: 9.0, 64: 10.0}, {64: 8.0}, WORKERS, QUIET, f"workers is faster than memory {BOTH} (64), 1.25 times"),
        (
            {8: 9.0, 64: 10.0}, {64: 20.0}, COMPILED, QUIET,
            f"compile false is faster than compile true {BOTH} (64), 2.00 times",
        ),
    ],
)  # fmt: skip
def test_one_of_two_is_faster_where_the_interval_shows_it(tmp_path, one, two, differs, noise, said):
    write_measured(tmp_path, one, **NOT_COMPILED, **noise)
    write_measured(tmp_path, two, first=len(one), **NOT_COMPILED | differs, **noise)
    (line,) = crossovers(find([tmp_path]))
    assert line.startswith(f"cnn: {said}")


def test_devices_of_one_kind_are_told_apart_by_their_names(tmp_path):
    write_measured(tmp_path, {8: 20.0, 64: 40.0}, **QUIET)
    for number, name in enumerate(("T4", "A100"), 1):
        write_measured(tmp_path, {8: 20.0 / 2**number}, first=1 + number, device_name=name, **GPU, **QUIET)
    assert crossovers(find([tmp_path])) == [
        f"cnn: T4 is faster than A CPU {BOTH} (8), 2.00 times as fast at 8.",
        f"cnn: A100 is faster than A CPU {BOTH} (8), 4.00 times as fast at 8.",
        f"cnn: A100 is faster than T4 {BOTH} (8), 2.00 times as fast at 8.",
    ]


def test_models_data_rates_of_learning_and_what_differs_in_two_things_are_not_compared(tmp_path):
    write_measured(tmp_path, {8: 10.0, 64: 20.0})
    others = {"model": "mlp"}, {"options": {"optimizer.lr": 0.1}}, GPU | {"options": {"data.pipeline": "device"}}
    for number, facts in enumerate(others, 2):
        write_measured(tmp_path, {8: 10.0}, first=number, **facts)
    assert crossovers(find([tmp_path])) == []
    write_measured(tmp_path, {8: 10.0}, first=5, choices={"model": "cnn", "data": "cifar10"})
    line = "The runs are on different data: their rates and metrics are not compared."
    assert compare_settings(find([tmp_path]), []) == [line]


def test_groups_at_one_batch_size_each_are_compared_as_settings(tmp_path):
    for number, facts in enumerate(({}, GPU)):
        write_measured(tmp_path, {64: 10.0 / (1 + number)}, first=number, **facts, **QUIET)
    assert crossovers(find([tmp_path])) == []
    assert compare_settings(find([tmp_path]), [])[0].startswith("cnn · gpu is the fastest: 2.00 (")


def test_efficiency_is_the_rate_over_that_of_as_many_single_devices_and_stands_beside_its_run(tmp_path):
    for devices, ms in ((1, 10.0), (2, 12.5), (4, 12.5)):
        options = {"trainer.devices": devices, "trainer.strategy": "ddp", "trainer.max_epochs": 2 + (devices == 4)}
        facts = {"options": options, "throughput": {"processes": devices}}
        write_measured(tmp_path / f"{devices}/sweep", {64: ms}, **facts, **QUIET)
    frame = run_table(find([tmp_path / f"{devices}/sweep" for devices in (1, 2, 4)]))
    nan = float("nan")  # of 4, no counterpart
    assert list(frame["scaling_efficiency"].astype(float)) == pytest.approx([nan, 0.8, nan], rel=0.01, nan_ok=True)


TWO, THREE = {"memory": 10.0, "device": 5.0}, {"memory": 10.0, "device": 9.9, "workers": 30.0}
ACCURACIES = {"metrics": [{"test/acc": accuracy} for accuracy in (0.98, 0.979, 0.9)], "evaluated": {"test": 10_000}}


@pytest.mark.parametrize(
    ("step_ms", "facts", "said"),
    [
        (TWO, QUIET, "cnn · device is the fastest: 2.00 (1.95 to 2.05) times as fast as cnn · memory."),
        (THREE, QUIET, "cnn · device is the fastest by estimate: 1.01 (0.98 to 1.04) times as fast as cnn · memory."),
        (
            TWO, {"others": 0.5, **QUIET},
            "cnn · device is the fastest beside other programs that took 50 % of the processor: 2.00 (1.95 to 2.05) times",
        ),
        (TWO, {"windows": 1}, "No rate is known well enough to be compared"),
        (THREE, ACCURACIES, "Best test/acc: 98.0 % with cnn · memory; cnn · device is within 0.7 points of it (one seed)."),
    ],
)  # fmt: skip
def test_a_setting_is_the_fastest_or_the_best_where_the_interval_shows_it(tmp_path, step_ms, facts, said):
    for number, (name, ms) in enumerate(step_ms.items()):
        own = {key: fact[number] if isinstance(fact, list) else fact for key, fact in facts.items()}
        write_measured(tmp_path, {64: ms}, first=number, options={"data.pipeline": name}, seed=number, **own)
    sweep = find([tmp_path])
    lines = compare_settings(sweep, shown_metrics(sweep))
    assert lines[0].startswith(said)
    assert len(lines) == 1 + ("metrics" in facts)


def test_the_table_has_a_line_for_each_setting_with_the_mean_and_the_deviation_of_its_runs(tmp_path):
    for seed, accuracy in enumerate((0.97, 0.99, 0.98)):
        facts = {"metrics": {"test/acc": accuracy}, "throughput": {"mfu": 0.25}}
        write_measured(tmp_path, {64: 10.0}, first=seed, seed=seed, **QUIET, **facts)
    write_measured(tmp_path, {64: 5.0}, first=3, options={"data.pipeline": "device"}, throughput={"mfu": 0.5})
    found = analyse([tmp_path])
    texts = setting_texts(found.sweep, found.tables)
    rows = texts[["setting", "runs", "test/acc"]].to_numpy().tolist()
    assert texts.columns.tolist() == ["setting", "runs", "samples/s", "±", "MFU", "test/acc"]
    assert rows == [["cnn · memory", "3", "98.00±1.00%"], ["cnn · device", "1", ""]]


def test_names_in_a_sentence():
    """Of settings that are all alike, none is slower."""
    assert [and_(names) for names in ([], [64], ["a", "b"], [8, 64, 1024])] == ["", "64", "a and b", "8, 64 and 1,024"]
    assert and_([1] * 9) == "1, 1, 1, 1, 1, 1 and 3 more"
