"""train.py as its users run it: real processes, real configs shrunk, the real MNIST."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning import Trainer
from omegaconf import OmegaConf

from batchscope.analysis.report import analyse
from batchscope.checkpointing.resume import config_to_resume
from batchscope.cli.evaluate import evaluate
from batchscope.data.order import DeterministicBatchSampler
from batchscope.options.groups import CONFIGS, choices_of
from batchscope.options.signatures import class_attribute
from batchscope.records.correct import read_correct
from batchscope.records.run_record import RunRecord
from batchscope.training import summary
from batchscope.training.run import _Run, train
from tests.checkpointing.support import LOAD, OUT, STEP, interrupt
from tests.checkpointing.test_exact_resume import AVERAGES, STOPS
from tests.support.command_lines import composed
from tests.support.runs import EVERY_4, SMALL, last, record, run
from tests.training.support import completed, hparams, tensorboard
from tests.training.test_failures import break_one_loss

# Enough to see every part of a run once.
SHORT = ["trainer.max_epochs=1", "trainer.limit_train_batches=4", "trainer.limit_val_batches=1", "data.batch_size=8"]
SHORT += ["trainer.limit_test_batches=1", "trainer.accelerator=cpu", "callbacks.throughput.calibrate=false"]
FEW = ["data.num_train=16", "data.num_val=8", "data.num_test=8"]
SHORT += ["callbacks.throughput.warmup_steps=1", "callbacks.throughput.record_operations=false"]  # 3 of 4 have a rate


def in_process(tmp_path: Path, *overrides: str) -> tuple[float | None, dict]:
    """A run without the start of a new process: its metric and its record."""
    run_dir = tmp_path / "run"
    # To count FLOPs and memory takes longer than to train.
    quick = ["callbacks.progress=null", "+callbacks.throughput.flops_per_sample=1"]
    lines = [*SHORT, *quick, *overrides]
    metric = train(composed(*lines), run_dir, {"model": "cnn", "data": "mnist"}, lines)
    return metric, record(run_dir)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, shared_data: Path) -> Path:
    """The folder of one run of the program on the real MNIST."""
    folder = tmp_path_factory.mktemp("finished")
    few = ["data.num_train=1000", "data.num_val=500", "data.num_test=1000"]
    completed(folder, *SHORT, *few, "seed=0", f"data.root={shared_data}", OUT)
    return folder


def test_a_run_ends_with_a_few_rows_of_at_most_80_columns(finished: Path) -> None:
    stdout = (finished / "stdout").read_text()
    assert "SimpleCNN (421,642 parameters) on mnist, cpu" in stdout
    rows = stdout[stdout.index("\ncnn · mnist · batch 8 · cpu\n") :].splitlines()[1:]
    shown = {line.split()[0] for line in rows[1:] if line[0] != " "}
    always, sometimes = {"speed", "step", "result", "files"}, {"fit", "limit", "try", "load"}
    assert always <= shown <= always | sometimes
    assert max(map(len, rows)) <= 80
    assert re.search(r"\nresult  test acc [\d.]+ % in [\d.]+ m?s\nfiles   out\n$", stdout)
    assert "p99" not in stdout  # a detail
    assert "\nwithout " not in stdout


def test_the_record_says_everything_about_the_run(finished: Path) -> None:
    run_record = record(finished / "out")
    choices = {"model": "cnn", "data": "mnist", "task": "default", "optimizer": "adamw", "trainer": "default"}
    assert (run_record["status"], run_record["name"], run_record["choices"]) == ("finished", "cnn-mnist-bs8", choices)
    assert run_record["config"]["data"]["batch_size"] == 8
    assert "data.batch_size=8" in run_record["overrides"]
    assert run_record["versions"]["torch"] == torch.__version__.split("+")[0]
    assert (run_record["hardware"]["device"], run_record["steps"]) == ("cpu", 4)
    assert (run_record["dataset"]["name"], len(run_record["dataset"]["fingerprint"])) == ("mnist", 16)
    assert set(run_record["metrics"]) == {"val/loss", "val/acc", "test/loss", "test/acc"}
    assert not (finished / "out" / "correct.npy").exists()  # of a part of the test set
    for checkpoint_path in run_record["checkpoints"].values():
        checkpoint = torch.load(finished / "out" / checkpoint_path, weights_only=True)["batchscope"]  # runs no code
        assert (checkpoint["dataset"], checkpoint["config"]["model"]["hidden_size"]) == ("mnist", 128)


def test_tensorboard_shows_every_step_the_options_that_were_set_and_what_came_of_them(finished: Path) -> None:
    events = tensorboard(finished / "out")
    assert Path(events.path).name == "cnn-mnist-bs8"
    for key, steps in {"train/loss": [1, 2, 3, 4], "train/acc": [1, 2, 3, 4], "· time/step_ms": [2, 3, 4]}.items():
        assert [event.step for event in events.Scalars(key)] == steps
    assert [event.step for event in events.Scalars("throughput/samples_per_sec")] == [2, 3, 4]
    assert {event.step for event in events.Scalars("val/loss")} <= {3, 4}
    assert {"val/loss", "val/acc", "test/loss", "test/acc"} <= set(events.Tags()["scalars"])
    options = hparams(events).hparams
    assert options["data.batch_size"].number_value == 8
    assert "dataset" not in options  # the one that is in the run's name; a stand-in for it would be a column
    assert "trainer.limit_val_batches" in options and "optimizer.lr" not in options  # of what was set
    first = [info.name.tag for info in hparams(events, "experiment").metric_infos][:3]
    assert first == ["test/acc", "val/acc", "· summary/samples_per_sec"]  # the table has five
    tags = sorted(tag for tag in events.Tags()["scalars"] if tag.partition("/")[0] != "hp_metric")
    assert tags[0].startswith("test/") and "· epoch" in tags and not [tag for tag in tags if tag.startswith("device/")]
    assert hparams(events, "experiment").metric_infos[0].name.tag == "test/acc"  # the one that the table begins with


def test_the_program_starts_from_anywhere(tmp_path: Path) -> None:
    command = [Path(sys.executable).with_name("batchscope"), "train", "modle=cnn"]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert process.returncode == 1
    assert process.stderr.startswith("error: modle: no such option.")
    assert list(tmp_path.iterdir()) == []


# What only a run can find: how the one line begins, and the words.
MISTAKES = {
    "trainer: ": ["data=digits", "data.root=data", "trainer.max_time=soon"],  # only Lightning knows
}
if not torch.cuda.is_available():
    MISTAKES["trainer.accelerator: got 'gpu', and this machine has "] = ["trainer.accelerator=gpu"]


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_line_and_nothing_is_written(line: str, tmp_path: Path) -> None:
    process = run(tmp_path, *MISTAKES[line])
    assert process.end() == 1
    (message,) = process.complained.splitlines()
    assert message.startswith(f"error: {line}")
    assert len(process.said.splitlines()) <= 1  # what is trained on what
    assert {path.name for path in tmp_path.iterdir()} == {"stdout", "stderr"}


@pytest.mark.parametrize(
    ("fault", "code", "status", "advice"),
    [
        (interrupt, 130, "interrupted", "restart  batchscope train resume=out"),
        (partial(bytearray, 10**18), 1, "out_of_memory", ""),
    ],
)
def test_a_run_that_ends_while_data_are_loaded_is_recorded(fault, code, status, advice, tmp_path):
    process = run(tmp_path, *SMALL, OUT, faults=[(LOAD, 1, fault)])
    assert process.end() == code
    assert advice in process.said
    assert record(tmp_path / "out")["status"] == status


TINY = {  # of each kind of target one
    "digits": ("image", "data.root=."),
    "adding": ("sequence", "data.sequence_length=5"),
    "copy_memory": ("sequence", "data.delay=2"),
}


def trainings() -> Iterator[Any]:
    """Each model on one kind of data by default, and on every other one that it accepts in the slow tests."""
    for option in choices_of("model"):
        accepts = class_attribute(OmegaConf.load(CONFIGS / "model" / f"{option}.yaml")._target_, "accepts")
        accepted = [data for data, (kind, _) in TINY.items() if kind in accepts]
        for data in accepted:
            is_slow = option == "torchvision" or data != accepted[-1]
            yield pytest.param(option, data, marks=[pytest.mark.slow] * is_slow)


@pytest.mark.parametrize(("option", "data"), [*trainings()])
def test_every_model_trains_on_every_kind_of_data_that_it_accepts(option, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [f"model={option}", f"data={data}", TINY[data][1], *FEW, "trainer.limit_train_batches=2"]
    metric, run_record = in_process(tmp_path, *words)
    assert run_record["status"] == "finished"
    assert metric == run_record["metrics"]["val/loss"] > 0


def test_a_seed_gives_the_same_run_and_the_metric_that_a_sweeper_asks_for(tmp_path: Path) -> None:
    small = [
        "data=copy_memory",
        "data.delay=2",
        "model=stacked_lstm",
        "data.num_train=64",
        "data.num_val=8",
        "data.num_test=8",
    ]
    metric_options = ("optimized_metric=val/loss", "optimized_metric=test/loss")
    runs = [in_process(tmp_path / str(i), *small, f"seed={i // 2}", metric_options[i % 2]) for i in range(3)]
    (first_metric, first), (second_metric, second), (_, third) = runs
    assert first["metrics"] == second["metrics"] != third["metrics"]
    assert (first_metric, second_metric) == (first["metrics"]["val/loss"], first["metrics"]["test/loss"])


def test_the_recorded_threads_and_cores_are_those_that_a_fit_has_had(tmp_path: Path, monkeypatch) -> None:
    def divided(*arguments: Any, **options: Any) -> None:  # the cores: among ranks, and among threads that are bound
        monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
        monkeypatch.setattr(usable, lambda: 8.0)
        fit(*arguments, **options)

    fit, usable = Trainer.fit, "batchscope.hardware.devices.usable_cores"
    monkeypatch.setattr(Trainer, "fit", divided)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)  # a module restores the 16
    monkeypatch.setattr(usable, lambda: 1.0)
    small = ["data=copy_memory", "data.delay=2", "model=lstm_cell", *FEW]
    hardware = in_process(tmp_path, *small)[1]["hardware"]
    assert (hardware["torch_threads"], hardware["cpu_cores"]) == (8, 8)


def test_what_measuring_the_device_takes_is_no_time_of_the_fit(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("batchscope.hardware.measure.find_calibration", lambda device, measure: time.sleep(0.2))
    small = ["data=copy_memory", "data.delay=2", "model=lstm_cell", *FEW]
    _, run_record = in_process(tmp_path, *small, "test=false")
    assert run_record["fit_seconds"] + 0.2 < run_record["seconds"]


def test_what_was_typed_and_has_changed_nothing_is_said_and_recorded(tmp_path: Path, capsys) -> None:
    words = ["channels_last=false", "callbacks.checkpoint.monitor=val/acc", "trainer.limit_val_batches=0"]
    model = ["model=stacked_lstm", "model.num_layers=1", "model.dropout=0.2"]
    _, run_record = in_process(tmp_path / "0", "data=copy_memory", "data.delay=2", *model, *FEW, *words)
    unread = {"channels_last", "callbacks.checkpoint.monitor", "model.dropout"}
    assert run_record["unread"].keys() == unread
    message = "channels_last had no effect: StackedLSTMModel has no 2-D convolution"
    assert f"warning: {message.replace(' ', ': ', 1)}\n" in capsys.readouterr().err
    assert f"run: {message}" in analyse([tmp_path / "0"]).notes
    _, run_record = in_process(tmp_path / "1", "data=digits", "model=cnn", f"data.root={tmp_path}", *FEW, words[0])
    assert "unread" not in run_record


def test_what_an_earlier_process_has_not_read_is_forgotten_once_all_is_read(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(summary, "unread_options", lambda *arguments: {})
    stand_in: Any = SimpleNamespace(trainer=None)
    with RunRecord(tmp_path, unread={"callbacks.checkpoint.monitor": "no validation was measured"}) as run_record:
        run_record.begin()
        _Run.warn_of_unread_options(stand_in, run_record)
    assert "unread" not in record(tmp_path)


def test_a_whole_test_leaves_which_samples_were_right_and_an_evaluation_leaves_them_alone(tmp_path: Path) -> None:
    small = ["data=digits", "model=mlp", "data.num_train=64", "data.num_val=8", "data.num_test=300"]  # two batches
    _, run_record = in_process(tmp_path / "whole", *small, "trainer.limit_test_batches=1.0")
    run_dir = tmp_path / "whole" / "run"
    right = read_correct(run_dir, 300, run_record["metrics"]["test/acc"])
    assert right is not None and right.shape == (300,)
    evaluate(run_dir / "checkpoints/best.ckpt", ["trainer.accelerator=cpu", "trainer.limit_test_batches=1"])
    assert (read_correct(run_dir, 300, run_record["metrics"]["test/acc"]) == right).all()


def test_a_test_of_fewer_samples_leaves_no_file_of_the_test_before(tmp_path: Path) -> None:
    small = ["data=digits", "model=mlp", "data.num_train=64", "data.num_val=8", "data.num_test=300"]
    _, run_record = in_process(tmp_path, *small, "trainer.limit_test_batches=1.0", "optimizer.schedule=constant")
    run_dir = tmp_path / "run"
    assert (run_dir / "correct.npy").exists()
    longer = config_to_resume(run_record, run_dir, ["trainer.max_epochs=2", "trainer.limit_test_batches=1"])
    train(longer, run_dir, run_record["choices"], [])
    assert not (run_dir / "correct.npy").exists()


def test_the_answers_of_two_ranks_come_in_the_order_of_the_test_set(tmp_path: Path, monkeypatch) -> None:
    order, right = DeterministicBatchSampler(19, 4, shuffle=False), torch.arange(19) % 3 == 0
    ranks = []
    for rank in (0, 1):
        monkeypatch.setattr("batchscope.data.order.rank_and_world_size", lambda rank=rank: (rank, 2))
        ranks.append([right[batch] for _, batch in order])
    assert [len(part) for part in ranks[1]] == [4, 4, 1]
    right_of_rank_1 = [part.numpy() for part in ranks[1]]
    monkeypatch.setattr(summary, "gather", lambda own, world_size: [own, right_of_rank_1])
    trainer = SimpleNamespace(world_size=2, is_global_zero=True, test_dataloaders=SimpleNamespace(batch_sampler=order))
    summary.write_test_correct(trainer, ranks[0], tmp_path)
    assert read_correct(tmp_path, 19, 7 / 19).tolist() == right.tolist()


# --- recipes ---------------------------------------------------------------------------------------------------------


def test_the_best_checkpoint_holds_the_averaged_weights_that_are_tested(tmp_path: Path) -> None:
    assert "warning" not in completed(tmp_path, *SMALL, *AVERAGES, EVERY_4, OUT).complained.lower()
    best = torch.load(tmp_path / "out/checkpoints/best.ckpt", weights_only=True)
    assert not all(torch.equal(best["state_dict"][key], value) for key, value in best["current_model_state"].items())
    _, tested = evaluate(tmp_path / "out/checkpoints/best.ckpt", ["trainer.accelerator=cpu"])
    metrics = record(tmp_path / "out")["metrics"]
    assert tested == {key: pytest.approx(metrics[key], abs=1e-6) for key in metrics if key.startswith("test/")}


def test_early_stopping_ends_a_run_whose_validation_gets_worse(tmp_path: Path) -> None:
    completed(tmp_path, *SMALL, *STOPS, OUT)
    assert 3 <= record(tmp_path / "out")["epochs"] < 20


def test_debug_is_short_and_shows_the_first_wrong_number_and_the_traceback(tmp_path: Path) -> None:
    trainer = composed("debug=default", "compile=true")["trainer"]
    assert (trainer["max_epochs"], trainer["limit_train_batches"], trainer["detect_anomaly"]) == (1, 5, True)
    process = run(tmp_path, *SMALL, OUT, "debug=default", faults=[(STEP, 3, break_one_loss)])
    assert process.end() == 1
    assert "Traceback" in process.complained  # of an error that is one line otherwise


def test_runs_of_one_update_and_any_batch_size_make_the_same_updates_and_say_so(tmp_path: Path) -> None:
    words = ["model.dropout=0", "optimizer=sgd", "optimizer.lr_scaling=linear", "optimizer.reference_batch_size=32"]
    words += ["callbacks.throughput.warmup_steps=1", "callbacks.throughput.record_operations=false"]  # few steps
    for size, batches, steps, held in ((4, 4, 10, 16), (16, 1, 10, 16), (8, 20, 2, 76)):  # of 76 samples
        folder = f"hydra.run.dir=out/{size}"
        sizes = [f"data.batch_size={size}", f"trainer.accumulate_grad_batches={batches}"]
        process = completed(tmp_path, *SMALL, *words, *sizes, folder)
        result = record(tmp_path / "out" / str(size))
        assert (result["throughput"]["batch_size"], result["steps"], result["global_batch_size"]) == (size, steps, held)
        assert result["learning_rate"] == pytest.approx(result["config"]["optimizer"]["lr"] * held / 32)
        assert f"\nrate    {0.1 * held / 32:.3g} ({held / 32:.3g} × optimizer.lr)\n" in process.said
        options = hparams(tensorboard(tmp_path / "out" / str(size))).hparams
        assert options["learning_rate"].number_value == pytest.approx(result["learning_rate"])
    whole, parts = (last(tmp_path / "out" / size)["state_dict"] for size in ("16", "4"))
    for name, weight in whole.items():  # the last update of each epoch has 12 samples: 3 batches of 4
        assert weight.sub(parts[name]).abs().max() < 0.05, name
    report = analyse([tmp_path / "out"])
    shown = dict(zip(report.frame["batch_size"], report.frame["global_batch_size"], strict=True))
    assert (shown[4], shown[8]) == (16, 76)
    assert [sweep_run.samples_after(sweep_run.record["steps"]) for sweep_run in report.sweep.runs] == [152] * 3
