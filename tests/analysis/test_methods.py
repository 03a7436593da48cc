"""The methods of a report: its facts and its sentence come from the records; what no record has is left out."""

import pytest

from batchscope.analysis import analyse
from batchscope.analysis.page import page
from tests.support.synthetic_runs import change_record, write_rates, write_run

COMMAND = "batchscope train -m model=cnn data.batch_size=32,64 'tags=[a b]'"
FIELDS = {
    "command": COMMAND,
    "started": "2026-01-02T10:00:00+00:00",
    "finished": "2026-01-02T10:05:00+00:00",
    "model": {"class": "SimpleCNN", "parameters": 421642},
    "evaluated": {"val": 5000, "test": 10000},
    "epochs": 2,
    "learning_rate": 0.004,
    "metrics": {"test/acc": 0.9},
    "hardware": {"cpu_cores": 4},
    "versions": {"batchscope": "0.2.0", "torch": "2.11.0", "lightning": "2.6.6"},
}


@pytest.fixture
def record(tmp_path):
    """The runs of two batch sizes, each with its own seed."""
    write_rates(tmp_path, {32: 3000}, **(fields := {key: value for key, value in FIELDS.items() if key != "model"}))
    write_rates(tmp_path, {64: 4800}, first=1, seed=1, **fields)
    for number in "01":
        change_record(tmp_path / number, model=FIELDS["model"])
    return tmp_path


def test_facts_that_agree_are_said_once_and_those_that_vary_are_listed(record):
    assert analyse([record]).methods.facts == {
        "date": "2026-01-02, 10:00 to 10:05 UTC",
        "model": "cnn (SimpleCNN, 421,642 parameters)",
        "data": "mnist (55,000 training, 5,000 validation and 10,000 test samples)",
        "batch size": "32 and 64",
        "training": "2 epochs (1,718 to 3,437 updates)",
        "optimizer": "AdamW (learning rate 0.004, not scaled with the batch size)",
        "seed": "0 and 1",
        "precision": "32-true",
        "device": "A CPU (cpu, 4 cores, 2 threads, 16 GiB)",
        "versions": "batchscope 0.2.0, torch 2.11.0, lightning 2.6.6",
    }


def test_a_date_has_a_second_day_where_the_runs_end_on_another_one(record):
    change_record(record / "1", finished="2026-01-03T00:03:00+00:00")
    assert analyse([record]).methods.facts["date"] == "2026-01-02, 10:00 to 2026-01-03, 00:03 UTC"


def test_one_sentence_is_there_to_quote(record):
    assert analyse([record]).methods.sentence == (
        "We trained cnn (SimpleCNN, 421,642 parameters) on mnist (55,000 training, 5,000 validation and 10,000 test "
        "samples) for 2 epochs (1,718 to 3,437 updates) with AdamW (learning rate 0.004, "
        "not scaled with the batch size), at batch sizes 32 and 64, seeds 0 and 1, precision "
        "32-true, on A CPU (cpu, 4 cores, 2 threads, 16 GiB), with batchscope 0.2.0, PyTorch 2.11.0 and Lightning 2.6.6; "
        "rates leave out warm-up, validation and checkpoints."
    )


def test_the_command_is_whole_and_can_be_copied(record):
    report = analyse([record])
    assert f"    {COMMAND}" in report.markdown.splitlines()
    shown = COMMAND.replace("'", "&#x27;")
    assert f'<pre>{shown}</pre><button type="button">copy</button>' in page(report)


@pytest.mark.parametrize(
    ("scaling", "text"),
    [
        (
            {"rule": "sqrt", "batch_size": 512, "reference_batch_size": 128},
            "scaled by sqrt from batch size 128 to 0.008",
        ),
        (None, "not scaled with the batch size"),
    ],
)
def test_the_scaling_of_the_learning_rate_is_said(scaling, text, tmp_path):
    options = {"optimizer.lr_scaling": "auto" if scaling else "none"}
    rate = 0.008 if scaling else 0.004
    write_rates(tmp_path, {512: 3000}, options=options, learning_rate=rate, lr_scaling=scaling)
    assert analyse([tmp_path]).methods.facts["optimizer"] == f"AdamW (learning rate 0.004, {text})"


@pytest.mark.parametrize(("sizes", "text"), [((64,), ""), ((64, 128), ", not scaled with the batch size")])
def test_a_rate_of_nobodys_option_is_known_not_to_be_scaled_by_several_sizes_alone(sizes, text, tmp_path):
    write_rates(tmp_path, dict.fromkeys(sizes, 3000), learning_rate=0.004)
    assert analyse([tmp_path]).methods.facts["optimizer"] == f"AdamW (learning rate 0.004{text})"


def test_runs_that_were_timed_alone_are_not_called_trained(tmp_path):
    throughput = {"ended": "known", "updates": 1200}
    write_rates(tmp_path, {32: 3000, 64: 4000}, throughput=throughput)
    methods = analyse([tmp_path]).methods
    assert methods.facts["training"] == "timed alone, for 1,200 steps"
    assert methods.sentence.startswith("We timed training steps of cnn on mnist (55,000 training samples) with AdamW")


def test_an_option_that_varies_is_a_fact(tmp_path):
    for number, pipeline in enumerate(("memory", "device")):
        write_rates(tmp_path, {32: 3000}, first=number, options={"data.pipeline": pipeline})
    assert analyse([tmp_path]).methods.facts["data.pipeline"] == "memory and device"


def test_what_no_record_says_is_left_out(tmp_path):
    write_run(tmp_path / "0", status="failed", error="E: no")
    change_record(tmp_path / "0", hardware={}, versions={}, started="yesterday", choices={}, config={"model": {}})
    methods = analyse([tmp_path]).methods
    assert (methods.facts, methods.commands) == ({"model": "model"}, [])
    assert methods.sentence == ""  # nothing was measured
    assert "To quote" not in page(analyse([tmp_path])) and "To quote" not in analyse([tmp_path]).markdown


def test_an_epoch_of_a_part_of_the_data_is_told_by_its_updates(tmp_path):
    write_rates(tmp_path, {256: 3000}, epochs=1, steps=100)
    assert analyse([tmp_path]).methods.facts["training"] == "1 epoch (100 updates)"


def test_a_run_that_failed_in_its_test_was_trained(tmp_path):
    write_rates(tmp_path, {32: 3000}, status="failed", epochs=2, error="E: no")
    assert analyse([tmp_path]).methods.sentence.startswith("We trained cnn")


def test_runs_of_several_versions_name_all_of_them(record):
    change_record(record / "1", versions={"torch": "2.15.0"})
    assert (
        "with batchscope 0.2.0, PyTorch 2.11.0 and Lightning 2.6.6; PyTorch 2.15.0"
        in analyse([record]).methods.sentence
    )


def test_a_rate_that_was_not_scaled_is_not_called_scaled(tmp_path):
    write_rates(tmp_path, {64: 3000}, options={"optimizer.lr_scaling": "auto"}, learning_rate=0.004)
    assert analyse([tmp_path]).methods.facts["optimizer"].endswith("not scaled with the batch size)")
