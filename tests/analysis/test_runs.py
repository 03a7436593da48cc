"""What is found below some folders, what varied, and which runs belong together."""

import json

import pytest

from batchscope.analysis.runs import find
from batchscope.errors import UserError
from tests.support.synthetic_runs import serial, write_run, write_sweep

T = serial(4, 0.1)


def test_runs_come_in_the_order_of_their_numbers(tmp_path):
    write_sweep(tmp_path, list(range(1, 13)), T)
    assert [run.name for run in find([tmp_path]).runs] == [str(n) for n in range(12)]


def test_a_run_found_through_two_folders_counts_once(tmp_path):
    write_sweep(tmp_path, [32, 64], T)
    assert len(find([tmp_path, tmp_path / "1"]).runs) == 2


def test_runs_of_several_sweeps_are_told_apart_by_name(tmp_path):
    write_sweep(tmp_path / "a", [32], T)
    write_sweep(tmp_path / "b", [64], T)
    assert [run.name for run in find([tmp_path / "a", tmp_path / "b"]).runs] == ["a/0", "b/0"]


@pytest.mark.parametrize(
    ("content", "note"),
    [
        ('{"schema": 1, "status": "runn', "cannot be read"),
        ("[]", "it is not the record of a run"),
        ('{"schema": 99}', "schema 99"),
        ("{}", "schema None"),
        ('{"schema": 1}', "without a config"),
        (b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_a_broken_record_is_a_note_and_the_rest_is_read(tmp_path, content, note):
    write_sweep(tmp_path, [32, 64], T)
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "run.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    sweep = find([tmp_path])
    assert len(sweep.runs) == 2
    assert len(sweep.notes) == 1
    assert sweep.notes[0].startswith("2: ")
    assert note in sweep.notes[0]


def test_a_numbered_folder_without_a_record_is_a_note(tmp_path):
    write_sweep(tmp_path, [32], T)
    (tmp_path / "1").mkdir()
    assert find([tmp_path]).notes == ["1: no run.json in it, so it never began"]


def test_what_a_launcher_keeps_in_a_hidden_folder_is_no_run(tmp_path):
    write_run(tmp_path / "0")
    (tmp_path / ".submitit" / "1234").mkdir(parents=True)
    assert find([tmp_path]).notes == []


def test_nothing_at_all_is_the_users_mistake(tmp_path):
    with pytest.raises(UserError, match="no runs in"):
        find([tmp_path])
    with pytest.raises(UserError, match="no such folder"):
        find([tmp_path / "missing"])


def test_values_of_the_wrong_kind_are_unknown(tmp_path):
    facts = {"samples_per_sec": [1], "step_ms_median": "fast", "parts_ms": [1], "mfu": True}
    folder = write_run(tmp_path / "0", 64, 10.0, throughput=facts)
    record = json.loads((folder / "run.json").read_text())
    record |= {"hardware": None, "metrics": 3, "seconds": "long", "versions": [], "dataset": "mnist"}
    (folder / "run.json").write_text(json.dumps(record))
    (run,) = find([tmp_path]).runs
    assert (run.samples_per_sec, run.parts_ms, run.mfu, run.seconds, run.metrics, run.device) == (
        None, {}, None, None, {}, "",
    )  # fmt: skip


def test_the_rate_is_of_the_median_step_and_its_spread_of_the_steps(tmp_path):
    write_run(tmp_path / "0", 64, 10.0, throughput={"step_ms": 50.0, "samples_per_sec_mean": 1280.0})
    (run,) = find([tmp_path]).runs
    assert run.samples_per_sec_mean == 1280
    assert run.samples_per_sec == pytest.approx(6400)
    assert run.samples_per_sec_p10 == pytest.approx(6400 / 1.1)
    assert run.samples_per_sec_p90 == pytest.approx(6400 / 0.95)


def test_a_step_of_accumulated_batches_counts_all_their_samples(tmp_path):
    write_run(tmp_path / "0", 64, 40.0, options={"trainer.accumulate_grad_batches": 4})
    (run,) = find([tmp_path]).runs
    assert run.samples_per_sec == pytest.approx(6400)
    assert run.batch_ms == pytest.approx(10)


def test_a_batch_that_the_dataset_could_not_fill_counts_as_what_it_held(tmp_path):
    write_run(tmp_path / "0", 4096, 10.0, throughput={"batch_size": 1000})
    sweep = find([tmp_path])
    assert sweep.runs[0].batch_size == 1000
    assert sweep.notes == ["0: asked for batches of 4,096, and they held 1,000"]


def test_every_process_has_a_batch_of_its_own(tmp_path):
    write_run(tmp_path / "0", 64, 10.0, throughput={"batch_size": 64, "processes": 2})
    (run,) = find([tmp_path]).runs
    assert (run.batch_size, run.global_batch_size) == (64, 128)
    assert run.samples_per_sec == pytest.approx(12800)


def test_batch_size_seed_folders_and_callbacks_divide_no_group(tmp_path):
    write_sweep(tmp_path, [32, 64], T)
    write_sweep(tmp_path, [32, 64], T, first=2, seed=1, options={"data.root": "elsewhere", "callbacks.progress": None})
    sweep = find([tmp_path])
    assert sweep.varied == ["data.batch_size", "seed"]
    assert [group.label for group in sweep.groups] == ["cnn"]


def test_labels_name_what_sets_a_group_apart_and_no_more(tmp_path):
    write_sweep(tmp_path, [32], T)
    write_sweep(tmp_path, [32], T, first=1, device="cuda")
    write_sweep(tmp_path, [32], T, first=2, model="mlp", options={"model.hidden_size": 256})
    assert [group.label for group in find([tmp_path]).groups] == ["cnn · cpu", "cnn · gpu", "mlp · cpu"]
    write_sweep(tmp_path, [32], T, first=3, options={"trainer.precision": "bf16-mixed", "model.hidden_size": 64})
    sweep = find([tmp_path])
    assert sweep.varied == ["model", "device", "model.hidden_size", "trainer.precision"]
    assert sweep.groups[-1].label == "cnn · cpu · hidden_size 64 · bf16-mixed"


def test_a_learning_rate_that_grows_with_the_batch_divides_no_group(tmp_path):
    for n, size in enumerate((32, 64, 128)):
        write_run(tmp_path / str(n), size, T(size), options={"optimizer.lr": size / 1e4})
    sweep = find([tmp_path])
    assert "optimizer.lr" in sweep.varied
    assert len(sweep.groups) == 1


def test_a_learning_rate_of_its_own_divides(tmp_path):
    write_sweep(tmp_path, [32, 64], T, options={"optimizer.lr": 0.1})
    write_sweep(tmp_path, [32, 64], T, first=2, options={"optimizer.lr": 0.2})
    assert [group.label for group in find([tmp_path]).groups] == ["cnn · lr 0.1", "cnn · lr 0.2"]


def test_repeated_runs_of_a_size_give_their_median(tmp_path):
    for n, ms in enumerate((10.0, 11.0, 50.0)):
        write_run(tmp_path / str(n), 100, ms, seed=n)
    (group,) = find([tmp_path]).groups
    assert group.rates == {100: pytest.approx(1e5 / 11)}


def test_different_data_under_one_name_is_said(tmp_path):
    write_sweep(tmp_path, [32, 64], T)
    record = json.loads((tmp_path / "1" / "run.json").read_text())
    record["dataset"]["name"] = "rendered-digits"
    (tmp_path / "1" / "run.json").write_text(json.dumps(record))
    assert find([tmp_path]).notes == ["data=mnist was not the same data in every run: mnist, rendered-digits"]
