"""Datasets of one's own in whole runs: trained, tested, stopped, resumed, shared by ranks, refused."""

import os
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from batchscope.checkpointing.resume import config_to_resume
from batchscope.data.plain import described
from batchscope.options.groups import use_config_dir
from batchscope.training.run import train
from batchscope.training.task import Task
from tests.checkpointing.support import OUT, STEP, VALIDATION
from tests.data.support import loaded
from tests.support.command_lines import composed, refusal
from tests.support.marks import LINUX, POSIX
from tests.support.own_data import MapStyle, Plain, write_config
from tests.support.runs import QUIET, assert_alike, kill_9, last, ranks, record, results, run


def line(folder: Path, name: str, *options: str) -> list[str]:
    """The command line of 20 steps in 2 epochs, or of what the options say."""
    if name == "Stateful":
        pytest.importorskip("torchdata", reason="torchdata is not installed")
    words = ["data=own", "trainer.accelerator=cpu", "trainer.max_epochs=2", "data.batch_size=8", *QUIET]
    if not any(option.startswith("model=") for option in options):
        words += ["model=mlp", "model.hidden_sizes=[8]"]
    return [f"--config-dir={write_config(folder, name)}", *words, *options]


def finished(folder: Path, *words: str) -> Any:
    """Run to a successful end, and return the text on standard error."""
    process = run(folder, *words)
    assert process.end() == 0, process.complained
    return process.complained


STREAM = "+data.stream=true"
AUGMENTED = ["data.augment.shift=2", "data.augment.rotation=15", "data.augment.flip=true"]
# a dataset, the step after which its run is killed, and the options of the run
RESUMES = {
    "random transforms": ("MapStyle", 14, AUGMENTED),
    "different lengths": ("Lengths", 14, ["model=lstm_cell", "model.hidden_size=8"]),
    "several inputs": ("Tokens", 14, ["model=masked_mean"]),
    "any loader, at the end of an epoch": ("Plain", 10, []),
    "a loader with a state": ("Stateful", 5, ["+data.num_workers=2"]),
    "a loader with a state, at the end of an epoch": ("Stateful", 10, []),
    "a stream": ("Stateful", 15, [STREAM]),
    "a stream, loaded by workers": ("Stateful", 5, [STREAM, "+data.num_workers=1"]),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "random transforms")) for name in RESUMES]
)
def test_a_killed_run_is_resumed_to_the_same_end(name: str, tmp_path: Path) -> None:
    data, step, options = RESUMES[name]
    words = [*line(tmp_path, data, *options), OUT]
    alone, apart = ([] if data in ("Plain", "Stateful") else [f"data.num_workers={workers}"] for workers in (0, 1))
    kill = [*apart, "callbacks.checkpoint.every_n_steps=1"]
    assert run(tmp_path / "killed", *words, *kill, faults=[(STEP, step + 1, kill_9)]).end() == -9
    typed = [option.lstrip("+") for option in options if option.startswith("+")]  # no config holds this class
    again = [words[0], "resume=out", f"data._target_=tests.support.own_data.{data}", *typed, *apart]
    assert ("warning: resume" in finished(tmp_path / "killed", *again)) == (data == "Stateful" and step % 10 > 0)
    assert record(tmp_path / "killed" / "out")["resumed"][0]["step"] == step
    finished(tmp_path / "whole", *words, *alone)
    assert_alike(results(tmp_path / "killed" / "out"), results(tmp_path / "whole" / "out"))


def test_a_stream_goes_on_where_it_was_by_the_state_of_its_loader(tmp_path: Path, monkeypatch) -> None:
    """A slow test kills a run of such a loader; this one stays in one process."""
    flag, *words = line(tmp_path, "Stateful", STREAM, "logger=none", "test=false")
    use_config_dir(flag.partition("=")[2])
    choices = {"model": "mlp", "data": "own"}
    train(composed(*words), tmp_path / "whole", choices, words)
    with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
        patched.setattr(Task, "on_train_batch_end", lambda task, *_: 1 // (16 - task.global_step), raising=False)
        train(composed(*words, "callbacks.checkpoint.every_n_steps=1"), tmp_path / "ended", choices, words)
    ended_record = record(tmp_path / "ended")
    train(config_to_resume(ended_record, tmp_path / "ended", [STREAM.lstrip("+")]), tmp_path / "ended", choices, [])
    assert 10 < record(tmp_path / "ended")["resumed"][0]["step"] < 20
    assert_alike(*(last(tmp_path / name)["state_dict"] for name in ("ended", "whole")))


@pytest.mark.slow
def test_a_run_that_is_killed_in_a_validation_within_an_epoch_draws_the_same_numbers(tmp_path: Path) -> None:
    """A torch DataLoader draws a random number as the validation begins."""
    words = [*line(tmp_path, "Stateful", "trainer.val_check_interval=0.5"), OUT]
    again = [words[0], "resume=out", "data._target_=tests.support.own_data.Stateful"]
    for command in (words, again):  # the resumed run repeats the validation
        assert run(tmp_path / "killed", *command, faults=[(VALIDATION, 1, kill_9)]).end() == -9
    finished(tmp_path / "killed", *again)
    assert [entry["step"] for entry in record(tmp_path / "killed" / "out")["resumed"]] == [5, 5]
    finished(tmp_path / "whole", *words)
    assert_alike(results(tmp_path / "killed" / "out"), results(tmp_path / "whole" / "out"))


class Says(Plain):
    """A datamodule with all the optional attributes and methods."""

    name, fingerprint = "mine", "abc"
    num_samples = staticmethod({"train": 76}.get)

    def resume_at(self, epoch: int, batches: int) -> None:
        self.resumed = (epoch, batches)


@pytest.mark.parametrize(("data", "is_said"), [(Plain, True), (Says, False)])
def test_what_may_be_lost_within_an_epoch_is_said(data: type[Plain], is_said: bool, capsys) -> None:
    described(data()).warn_of_lost_batches()
    text = "warning: resume: Plain has no resume_at; unless its training loader has a length and a state_dict, the rest"
    assert capsys.readouterr().err.startswith(text) == is_said


def test_a_number_of_samples_that_is_none_is_one_line() -> None:
    data = described(Says())
    data.module.num_samples = {"train": 3.5}.get
    message = "data: mine: num_samples: TypeError: 'float' object cannot be interpreted as an integer"
    assert refusal(data.num_samples, "train") == message


def signal_all(number: int) -> None:
    """Signal the whole process group, as Ctrl-C, a closed terminal or a job manager does: workers get it, too."""
    subprocess.run(["kill", f"-{number}", "--", f"-{os.getpgid(0)}"], start_new_session=True, check=True)
    time.sleep(0.3)  # the step goes on, and unprotected workers would end during it


# Only Linux says who has sent SIGTERM: elsewhere it ends the workers.
@pytest.mark.parametrize(
    ("data", "workers", "number"),
    [
        pytest.param("MapStyle", "data.num_workers=1", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("MapStyle", "data.num_workers=1", signal.SIGTERM, marks=[LINUX, pytest.mark.slow]),
        ("Apart", "+data.num_workers=2", signal.SIGINT),
        pytest.param("Apart", "+data.num_workers=2", signal.SIGTERM, marks=POSIX),  # it ends torch's own workers
    ],
)
def test_a_signal_to_all_processes_keeps_a_checkpoint(
    tmp_path: Path, data: str, workers: str, number: signal.Signals
) -> None:
    words = [*line(tmp_path, data, workers), OUT]
    faults = [("batchscope.training.run.train", 1, os.setsid), (STEP, 13, partial(signal_all, number))]
    stopped = run(tmp_path, *words, faults=faults)
    assert stopped.end() == 128 + number, stopped.complained
    assert record(tmp_path / "out")["status"] == "interrupted"
    assert last(tmp_path / "out")["global_step"] == 13


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_every_start_method_serves_the_same(method: str) -> None:
    alone, apart = (loaded(MapStyle(batch_size=8, num_workers=workers)).train_dataloader() for workers in (0, 1))
    apart._loader.multiprocessing_context = method  # an option of torch's loader that ours lacks
    assert_alike([*apart], [*alone])


# the worker that loads samples for the checks loads fewer
KILLED = [("tests.support.own_data.Images.__getitem__", 80, kill_9)]


@pytest.mark.parametrize(
    ("data", "options", "faults", "reason"),
    [
        ("Stateful", [STREAM, "+data.sized=false"], [], "optimizer.schedule: one_cycle needs an end: "),
        # training/test_failures.py kills a worker, too
        pytest.param(
            "MapStyle", ["data.num_workers=1"], KILLED, "data: DataLoader worker (pid", marks=pytest.mark.slow
        ),
    ],
)
def test_what_cannot_be_trained_ends_in_one_line(data, options, faults, reason, tmp_path: Path) -> None:
    process = run(tmp_path, *line(tmp_path, data, *options), OUT, faults=faults)
    assert process.end() == 1
    (message,) = (text for text in process.complained.splitlines() if text.startswith(("error: ", "Traceback")))
    assert message.startswith(f"error: {reason}"), message


def test_every_step_of_different_lengths_is_trained_and_measured(tmp_path: Path) -> None:
    words = line(tmp_path, "Lengths", "model=rnn_cell", "+data.every_step=true")
    off = {"+callbacks.throughput.flops_per_sample=1"}
    errors = finished(tmp_path, *(word for word in words if word not in off), OUT)
    assert "Warning" not in errors
    run_record = record(tmp_path / "out")
    assert run_record["metrics"]["test/acc"] > 0.4
    assert not {"flops_per_sample", "mfu"} & run_record["throughput"].keys()
    steps = run_record["throughput"]["timesteps_per_sec"] / run_record["throughput"]["samples_per_sec"]
    assert 3 < steps < 9
    assert run_record["memory"]["uncounted"] == "the sequences have different lengths"


@pytest.mark.slow
def test_two_ranks_weigh_the_steps_that_count_as_one_process_does(tmp_path: Path) -> None:
    own = ["model=rnn_cell", "model.hidden_size=8", "+data.every_step=true", "data.num_workers=0", "optimizer=sgd"]
    words = line(tmp_path, "Lengths", *own)
    finished(tmp_path / "alone", *words, OUT)
    halves = [word.replace("data.batch_size=8", "data.batch_size=4") for word in words]
    assert [process.end() for process in ranks(tmp_path, *halves)] == [0, 0]
    actual, expected = results(tmp_path / "out"), results(tmp_path / "alone" / "out")
    torch.testing.assert_close(actual["weights"], expected["weights"], rtol=1e-4, atol=1e-5)
    for key in ("train/loss", "train/acc", "val/acc"):
        assert actual["curves"][key] == [
            (step, pytest.approx(value, rel=1e-4)) for step, value in expected["curves"][key]
        ]


def test_what_a_datamodule_says_of_itself_is_used() -> None:
    unknown = described(Plain())
    assert (unknown.num_samples("train"), unknown.fingerprint, unknown.name) == (None, "unknown", "Plain")
    plain = Says()
    info = described(plain)
    info.resume_at(1, 5)
    info.batch_size = 2
    assert (info.num_samples("train"), info.fingerprint, info.name, info.batch_size) == (76, "abc", "mine", 2)
    assert plain.batch_size == 8
    assert plain.resumed == (1, 5)
    plain.batch_size = None
    assert described(plain).batch_size is None


def test_what_a_datamodule_says_in_other_types_is_understood_and_a_mere_attribute_means_nothing() -> None:
    plain = Plain(numpy.int64(4))
    plain.num_samples = lambda split: numpy.int64(76)
    info = described(plain)
    assert (info.num_samples("train"), info.batch_size) == (76, 4)
    plain.num_samples = 76  # no function of a split
    assert info.num_samples("val") is None


class Otherwise(Plain):
    """A datamodule whose methods have our names and other arguments."""

    def name(self, first: Any, second: Any, third: Any) -> None:
        raise AssertionError("nobody knows its arguments")

    check = num_samples = fingerprint = resume_at = name


def test_methods_of_a_datamodule_that_take_other_arguments_are_not_called() -> None:
    info = described(Otherwise())
    info.check()
    info.resume_at(0, 10)
    assert (info.num_samples("train"), info.fingerprint, info.name) == (None, "unknown", "Otherwise")


@pytest.mark.slow
def test_ranks_that_speak_of_their_own_part_of_the_data_train_together(tmp_path: Path) -> None:
    options = ["data.batch_size=40", "trainer.use_distributed_sampler=false"]
    options += ["optimizer.lr_scaling=linear", "optimizer.reference_batch_size=8"]
    both = ranks(tmp_path, *line(tmp_path, "Sharded", *options))
    assert [process.end() for process in both] == [0, 0], [process.complained for process in both]
    saved = record(tmp_path / "out")
    assert (saved["steps"], saved["global_batch_size"], saved["dataset"]["fingerprint"]) == (2, 80, "unknown")
    assert saved["learning_rate"] == pytest.approx(10 * saved["config"]["optimizer"]["lr"])


@pytest.mark.slow
def test_ranks_that_are_resumed_at_the_end_of_an_epoch_lose_nothing(tmp_path: Path) -> None:
    words = line(tmp_path, "Plain")  # five batches for each rank, of ten
    killed = ranks(tmp_path, *words, faults={rank: [(STEP, 6, kill_9)] for rank in (0, 1)})
    assert [process.end() for process in killed] == [-9, -9]
    again = ranks(tmp_path, f"resume={tmp_path / 'out'}", words[0], "data._target_=tests.support.own_data.Plain")
    assert [process.end() for process in again] == [0, 0], [process.complained for process in again]
    assert record(tmp_path / "out")["resumed"][0]["step"] == 5
    assert "warning: resume" not in again[0].complained


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_one_rank_prepares_before_another_one_loads_its_share(fails: bool, tmp_path: Path) -> None:
    words = line(tmp_path, "Prepared", f"+data.fails={fails}", "data.batch_size=4", f"+data.file={tmp_path / 'file'}")
    both = ranks(tmp_path, *words)
    assert [process.end() for process in both] == [fails, fails], [process.complained for process in both]
    assert fails or (record(tmp_path / "out")["steps"], {*(tmp_path / "file").read_text()}) == (20, {"0"})
    errors = [text for process in both for text in process.complained.splitlines() if text.startswith("error: ")]
    assert errors == ["error: data: nothing to download"] * fails
