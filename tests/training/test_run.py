"""train.py as its users run it: real processes, real configs shrunk, the real MNIST."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from batchscope.errors import UserError
from batchscope.options.groups import CONFIGS, choices_of
from batchscope.options.signatures import class_attribute
from batchscope.training.run import train
from tests.checkpointing.support import LOAD, interrupt
from tests.support.command_lines import composed
from tests.support.runs import SMALL
from tests.support.runs import run as forked

ROOT = Path(__file__).resolve().parents[2]
# Enough to see every part of a run once.
SHORT = ["trainer.max_epochs=1", "trainer.limit_train_batches=4", "trainer.limit_val_batches=1", "data.batch_size=8"]
SHORT += ["trainer.limit_test_batches=1", "trainer.accelerator=cpu", "callbacks.progress=null"]
SHORT += ["callbacks.throughput.calibrate=false", "callbacks.throughput.warmup_steps=1"]

# To count a step takes longer than to train it.
UNCOUNTED = ["+callbacks.throughput.flops_per_sample=1", "callbacks.memory=null"]
UNCOUNTED += ["callbacks.throughput.record_operations=false"]

SAID = {"stdout", "stderr"}  # what a forked run leaves of itself


def in_process(tmp_path: Path, *overrides: str, choices: dict[str, str] | None = None) -> tuple[float | None, dict]:
    """A run without the start of a new process, and without counting FLOPs and memory: its metric and its record."""
    run_dir = tmp_path / "run"
    lines = [*SHORT, *UNCOUNTED, *overrides, f"run_dir={run_dir}"]
    metric = train(composed(*lines), run_dir, choices or {"model": "cnn", "data": "mnist"}, lines)
    return metric, json.loads((run_dir / "run.json").read_text())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, shared_data: Path) -> Path:
    """The folder of one run of the program on the real MNIST."""
    folder = tmp_path_factory.mktemp("finished")
    overrides = [o for o in SHORT if o != "callbacks.progress=null"]
    overrides.append("callbacks.throughput.record_operations=false")  # of 4 steps three would have no rate
    done = forked(folder, *overrides, "seed=0", f"data.root={shared_data}", "hydra.run.dir=out")
    assert done.end() == 0, done.complained
    return folder


def test_a_run_ends_with_a_few_rows_of_at_most_80_columns(finished: Path) -> None:
    said = (finished / "stdout").read_text()
    assert "SimpleCNN (421,642 parameters) on mnist, cpu" in said
    last = said[said.index("\ncnn · mnist · batch 8 · cpu\n") :].splitlines()[1:]
    assert [line.split()[0] for line in last[1:] if line[0] != " "] in (
        ["speed", "step", "limit", "try", "result", "files"],
        ["speed", "step", "busy", "result", "files"],
    )
    assert max(map(len, last)) <= 80
    assert re.search(r"\nresult  test acc [\d.]+ % in [\d.]+ m?s\nfiles   out\n$", said)
    assert "p99" not in said  # a detail


def test_the_record_says_everything_about_the_run(finished: Path) -> None:
    record = json.loads((finished / "out" / "run.json").read_text())
    assert record["status"] == "finished"
    assert record["name"] == "cnn-mnist-bs8"
    assert record["choices"] == {
        "model": "cnn",
        "data": "mnist",
        "task": "default",
        "optimizer": "adamw",
        "trainer": "default",
    }
    assert record["config"]["data"]["batch_size"] == 8
    assert "data.batch_size=8" in record["overrides"]
    assert record["versions"]["torch"] == torch.__version__.split("+")[0]
    assert record["hardware"]["device"] == "cpu"
    assert record["dataset"]["name"] == "mnist"
    assert len(record["dataset"]["fingerprint"]) == 16
    assert set(record["metrics"]) == {"val/loss", "val/acc", "test/loss", "test/acc"}
    assert record["steps"] == 4
    for kept in record["checkpoints"].values():
        checkpoint = torch.load(finished / "out" / kept, weights_only=True)["batchscope"]  # runs no code
        assert (checkpoint["dataset"], checkpoint["config"]["model"]["hidden_size"]) == ("mnist", 128)


def test_tensorboard_shows_every_step_under_a_name_that_a_person_can_read(finished: Path) -> None:
    (folder,) = [p for p in (finished / "out").iterdir() if any(p.glob("events.*"))]
    assert folder.name == "cnn-mnist-bs8"
    events = EventAccumulator(str(folder)).Reload()
    assert [e.step for e in events.Scalars("train/loss")] == [1, 2, 3, 4]
    assert [e.step for e in events.Scalars("train/acc")] == [1, 2, 3, 4]
    assert [e.step for e in events.Scalars("throughput/samples_per_sec")] == [2, 3, 4]
    assert [e.step for e in events.Scalars("time/step_ms")] == [2, 3, 4]
    assert {e.step for e in events.Scalars("val/loss")} <= {3, 4}
    assert {"val/loss", "val/acc", "test/loss", "test/acc"} <= set(events.Tags()["scalars"])
    assert {"test/samples", "test/confusion"} <= set(events.Tags()["images"])


def test_hyperparameters_and_final_metrics_reach_the_hparams_tab(finished: Path) -> None:
    from tensorboard.plugins.hparams import plugin_data_pb2

    (folder,) = [p for p in (finished / "out").iterdir() if any(p.glob("events.*"))]
    events = EventAccumulator(str(folder)).Reload()
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    hparams = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
    assert hparams["data.batch_size"].number_value == 8
    assert hparams["dataset"].string_value == "mnist"
    assert hparams["optimizer.lr"].number_value == 0.004
    assert "trainer.limit_val_batches" in hparams and "optimizer.weight_decay" not in hparams  # of what was set
    content = events.SummaryMetadata("_hparams_/experiment").plugin_data.content
    shown = plugin_data_pb2.HParamsPluginData.FromString(content).experiment.metric_infos
    assert shown[0].name.tag == "test/acc"  # the one that the table begins with


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(ROOT / "src" / "train.py", marks=pytest.mark.slow, id="file"),
        pytest.param(Path(sys.executable).with_name("batchscope"), id="installed"),
    ],
)
def test_the_program_starts_from_anywhere(script: Path, tmp_path: Path) -> None:
    command = [str(script), "train"] if script.suffix != ".py" else [sys.executable, str(script)]
    done = subprocess.run([*command, "modle=cnn"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: modle: no such option.")
    assert list(tmp_path.iterdir()) == []


def fail() -> None:
    raise UserError("data: odd")


def exhaust_memory() -> None:
    raise MemoryError


HAS_GPU = torch.cuda.is_available()
# What only a run can find: words, faults, and how the one line begins.
MISTAKES = [
    (["data.root=file/below"], [], "data.root: file/below cannot be created: Not a directory"),
    (["data=digits", "data.root=data", "trainer.max_time=soon"], [], "trainer: "),  # only Lightning knows
    ([*SMALL, "hydra.run.dir=out"], [(LOAD, 1, fail)], "data: odd"),
    pytest.param(
        *(["trainer.accelerator=gpu"], [], "trainer.accelerator: got 'gpu', and this machine has "),
        marks=pytest.mark.skipif(HAS_GPU, reason="this machine has the GPU that the test wants to be missing"),
    ),
]


@pytest.mark.parametrize(("words", "faults", "line"), MISTAKES)
def test_a_mistake_is_one_line_and_nothing_is_written(words: list[str], faults: list, line: str, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    done = forked(tmp_path, *words, faults=faults)
    assert done.end() == 1
    (said,) = done.complained.splitlines()
    assert said.startswith(f"error: {line}")
    assert len(done.said.splitlines()) <= 1  # what is trained on what
    assert {p.name for p in tmp_path.iterdir()} == {"file", *SAID}


def test_the_traceback_is_shown_on_request(tmp_path: Path) -> None:
    done = forked(tmp_path, "modle=cnn", environ={"HYDRA_FULL_ERROR": "1"})
    assert "Traceback" in done.complained
    assert done.complained.splitlines()[-1].startswith("error: modle")


@pytest.mark.parametrize(
    ("fault", "code", "status", "said"),
    [(interrupt, 130, "interrupted", "resume   batchscope train resume=out"), (exhaust_memory, 1, "out_of_memory", "")],
)
def test_a_run_that_ends_while_data_are_loaded_is_recorded(fault, code, status, said, tmp_path):
    done = forked(tmp_path, *SMALL, "hydra.run.dir=out", faults=[(LOAD, 1, fault)])
    assert done.end() == code
    assert said in done.said
    assert json.loads((tmp_path / "out" / "run.json").read_text())["status"] == status


SIZES = ["data.num_train=16", "data.num_val=8", "data.num_test=8"]
TINY_DATA = {
    "digits": [*SIZES, "data.root=."],
    "adding": [*SIZES, "data.sequence_length=5"],
    "copy_memory": [*SIZES, "data.delay=2"],
}


def accepted_by(option: str) -> list[str]:
    """The data that a model accepts, of each kind of target one."""
    accepts = class_attribute(OmegaConf.load(CONFIGS / "model" / f"{option}.yaml")._target_, "accepts")
    kinds = {"digits": "image", "adding": "sequence", "copy_memory": "sequence"}
    return [data for data, kind in kinds.items() if kind in accepts]


# Each model is trained on one kind of data by default, and on every other one by the slow tests.
TRAINED = [
    pytest.param(option, data, marks=[pytest.mark.slow] * (option == "torchvision" or data != accepted_by(option)[-1]))
    for option in choices_of("model")
    for data in accepted_by(option)
]


@pytest.mark.parametrize(("option", "data"), TRAINED)
def test_every_model_trains_on_every_kind_of_data_that_it_accepts(option, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = [f"model={option}", f"data={data}", *TINY_DATA[data], "trainer.limit_train_batches=2"]
    metric, record = in_process(tmp_path, *line, choices={"model": option, "data": data})
    assert record["status"] == "finished"
    assert metric == record["metrics"]["val/loss"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("option", "half"), [("true", 0.0), ("false", 2.0**-149)])
def test_numbers_too_small_for_a_full_mantissa_are_zero_unless_asked_for(tmp_path, option: str, half: float) -> None:
    small = ["data=adding", "model=rnn_cell", "data.num_train=16"]
    in_process(tmp_path, *small, "test=false", f"flush_denormals={option}")
    assert (torch.tensor(2.0**-148) * 0.5).double().item() == half


def test_a_seed_gives_the_same_run_and_the_metric_that_a_sweeper_asks_for(tmp_path: Path) -> None:
    small = ["data=copy_memory", "model=stacked_lstm", "data.num_train=64", "data.num_val=8", "data.num_test=8"]
    losses = [in_process(tmp_path / str(i), *small, f"seed={seed}")[0] for i, seed in enumerate((0, 0, 1))]
    assert losses[0] == losses[1] != losses[2]
    metric, record = in_process(tmp_path, *small, "optimized_metric=test/loss")
    assert metric == record["metrics"]["test/loss"] != losses[0]


@pytest.mark.slow
def test_the_dataset_on_record_is_the_one_trained_on(tmp_path: Path, monkeypatch, capsys) -> None:
    from torchvision.datasets import MNIST

    def no_network(self: MNIST) -> None:
        raise RuntimeError("no network")

    monkeypatch.setattr(MNIST, "download", no_network)
    monkeypatch.setattr("batchscope.data.torchvision_images.STAND_IN_SIZES", {"train": 6000, "test": 100})
    _, record = in_process(tmp_path, f"data.root={tmp_path / 'empty'}")
    assert "warning: NOT MNIST" in capsys.readouterr().err
    assert record["dataset"]["name"] == "rendered-digits"
    assert record["name"] == "cnn-rendered-digits-bs8"
    assert (tmp_path / "run" / "cnn-rendered-digits-bs8").is_dir()
    checkpoint = torch.load(tmp_path / "run" / "checkpoints" / "best.ckpt", weights_only=True)
    assert checkpoint["batchscope"]["dataset"] == "rendered-digits"
