"""What varied between runs, and which of them differ in batch size alone."""

import json

import pytest

from batchscope.analysis.read import find
from tests.support.synthetic_runs import change_record, serial, write_run, write_sweep

T = serial(4, 0.1)


def test_batch_size_seed_folders_and_callbacks_divide_no_group(tmp_path):
    write_sweep(tmp_path, [32, 64], T)
    write_sweep(tmp_path, [32, 64], T, first=2, seed=1, options={"data.root": "elsewhere", "callbacks.progress": None})
    sweep = find([tmp_path])
    assert sweep.factors == ["data.batch_size", "seed"]
    assert [group.label for group in sweep.groups] == ["cnn"]


def test_labels_name_what_sets_a_group_apart_and_no_more(tmp_path):
    write_sweep(tmp_path, [32], T)
    write_sweep(tmp_path, [32], T, first=1, device="cuda")
    write_sweep(tmp_path, [32], T, first=2, model="mlp", options={"model.hidden_size": 256})
    assert [group.label for group in find([tmp_path]).groups] == ["cnn · cpu", "cnn · gpu", "mlp · cpu"]
    write_sweep(tmp_path, [32], T, first=3, options={"trainer.precision": "bf16-mixed", "model.hidden_size": 64})
    sweep = find([tmp_path])
    assert sweep.factors == ["model", "device", "model.hidden_size", "trainer.precision"]
    assert sweep.groups[-1].label == "cnn · cpu · hidden_size 64 · bf16-mixed"


def test_a_learning_rate_that_grows_with_the_batch_divides_no_group(tmp_path):
    for n, size in enumerate((32, 64, 128)):
        write_run(tmp_path / str(n), size, T(size), options={"optimizer.lr": size / 1e4})
    sweep = find([tmp_path])
    assert "optimizer.lr" in sweep.factors
    assert len(sweep.groups) == 1


def test_a_learning_rate_of_its_own_divides(tmp_path):
    write_sweep(tmp_path, [32, 64], T, options={"optimizer.lr": 0.1})
    write_sweep(tmp_path, [32, 64], T, first=2, options={"optimizer.lr": 0.2})
    assert [group.label for group in find([tmp_path]).groups] == ["cnn · lr 0.1", "cnn · lr 0.2"]


def test_an_option_that_some_runs_do_not_have_divides(tmp_path):
    write_sweep(tmp_path, [32, 64], T)
    write_sweep(tmp_path, [32, 64], T, first=2, options={"optimizer.amsgrad": True})
    assert [group.label for group in find([tmp_path]).groups] == ["cnn", "cnn · amsgrad true"]


def test_the_learning_rates_that_a_search_for_a_target_tries_divide_no_group(tmp_path):
    for n, rate in enumerate((0.1, 0.2)):
        run = write_run(tmp_path / str(n), 32, T(32), options={"optimizer.lr": rate, "target": 0.9})
        change_record(run, target={"metric": "val/acc", "value": 0.9})
    write_sweep(tmp_path, [32], T, first=2, options={"optimizer.lr": 0.1})
    write_sweep(tmp_path, [32], T, first=3, options={"optimizer.lr": 0.2})
    sweep = find([tmp_path])
    assert "optimizer.lr" in sweep.factors
    assert [(group.label, len(group.runs)) for group in sweep.groups] == [
        ("cnn · target 0.9", 2),
        ("cnn · lr 0.1", 1),
        ("cnn · lr 0.2", 1),
    ]


def test_repeated_runs_of_a_size_give_their_median(tmp_path):
    for n, ms in enumerate((10.0, 11.0, 50.0)):
        write_run(tmp_path / str(n), 100, ms, seed=n)
    (group,) = find([tmp_path]).groups
    assert group.rates.rate(100) == pytest.approx(1e5 / 11)


def test_different_data_under_one_name_is_said(tmp_path):
    write_sweep(tmp_path, [32, 64], T)
    record = json.loads((tmp_path / "1" / "run.json").read_text())
    record["dataset"]["name"] = "rendered-digits"
    (tmp_path / "1" / "run.json").write_text(json.dumps(record))
    assert find([tmp_path]).notes == ["data=mnist was not the same data in every run: mnist, rendered-digits"]
