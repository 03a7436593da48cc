"""Any LightningDataModule with a `spec` and a `batch_size`: trained, recorded, resumed where its loader was, refused."""

from pathlib import Path
from typing import ClassVar

import pytest

from batchscope.data.base import DataModule
from batchscope.data.plain import described
from batchscope.errors import UserError
from tests.checkpointing.support import OUT, STEP
from tests.support.own_data import Plain, write_config
from tests.support.runs import QUIET, assert_alike, kill_9, ranks, record, results, run

SHORT = ["trainer.accelerator=cpu", "trainer.max_epochs=3", "data.batch_size=8", OUT, *QUIET]
SHORT += ["model=mlp", "model.hidden_sizes=[8]"]


def line(folder: Path, name: str, *options: str) -> list[str]:
    return [f"--config-dir={write_config(folder, name, None)}", "data=own", *SHORT, *options]


def test_it_is_trained_tested_and_recorded(tmp_path: Path) -> None:
    done = run(tmp_path, *line(tmp_path, "Plain"))
    assert done.end() == 0, done.complained
    found = record(tmp_path / "out")
    assert found["dataset"] == {"name": "Plain", "fingerprint": "unknown", "train_samples": 76}  # its loader says them
    assert (found["steps"], found["name"]) == (30, "mlp-Plain-bs8")
    assert found["metrics"].keys() >= {"test/acc", "val/loss"}


def test_what_it_says_of_itself_is_used() -> None:
    class Says(Plain):
        name = "mine"
        fingerprint = "abc"

        def num_samples(self, split: str) -> int:
            return 76

        def resume_at(self, epoch: int, batches: int) -> None:
            self.resumed = (epoch, batches)

    plain = Says()
    known = described(plain)
    known.resume_at(1, 5)
    known.batch_size = 2
    assert (known.num_samples("train"), known.fingerprint, known.name, plain.batch_size) == (76, "abc", "mine", 2)
    assert plain.resumed == (1, 5)


@pytest.mark.slow
def test_two_ranks_divide_its_samples(tmp_path: Path) -> None:
    words = [word for word in line(tmp_path, "Plain", "data.batch_size=4") if word != OUT]
    both = ranks(tmp_path, *words)
    assert [each.end() for each in both] == [0, 0], [each.complained for each in both]
    assert record(tmp_path / "out")["steps"] == 30


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_one_process_prepares_before_another_one_loads(fails: bool, tmp_path: Path) -> None:
    words = [word for word in line(tmp_path, "Prepared", f"+data.fails={fails}") if word != OUT]
    both = ranks(tmp_path, *words, f"+data.file={tmp_path / 'file'}")
    assert [each.end() for each in both] == [fails, fails], [each.complained for each in both]
    assert fails or {*(tmp_path / "file").read_text()} == {"0"}
    said = [text for each in both for text in each.complained.splitlines() if text.startswith("error: ")]
    assert said == ["error: data: nothing to download"] * fails


def test_what_is_counted_is_what_is_trained_on() -> None:
    class Splits(Plain):
        loaded: ClassVar[list[str]] = []

        def setup(self, stage: str) -> None:
            self.loaded.append(stage)

    module = Splits()
    described(module).setup("fit")
    for stage in ("fit", "test"):
        module.setup(stage=stage)  # as a Trainer calls it
    assert Splits.loaded == ["fit", "test"]


# --- resumed ---------------------------------------------------------------------------------------------------------


def resumed(folder: Path, name: str, step: int, *options: str) -> str:
    """Stop a run after a step and resume it; returns its warnings. It ends as one that was never stopped."""
    words = line(folder, name, *options)
    assert run(folder / "whole", *words).end() == 0
    every = "callbacks.checkpoint.every_n_steps=1"
    assert run(folder / "killed", *words, every, faults=[(STEP, step + 1, kill_9)]).end() == -9
    again = [words[0], "resume=out", f"data._target_=tests.support.own_data.{name}"]
    done = run(folder / "killed", *again)
    assert done.end() == 0, done.complained
    assert record(folder / "killed" / "out")["resumed"][0]["step"] == step
    assert_alike(results(folder / "killed" / "out"), results(folder / "whole" / "out"))
    return "\n".join(text for text in done.complained.splitlines() if text.startswith("warning: "))


def test_a_shuffled_loader_resumes_exactly_from_the_end_of_an_epoch(tmp_path: Path) -> None:
    assert resumed(tmp_path, "Plain", 10) == ""


@pytest.mark.parametrize(
    ("step", "options"),
    [
        (5, ["+data.num_workers=2"]),
        pytest.param(
            10, [], marks=pytest.mark.slow
        ),  # the last batch of an epoch, which is resumed before its validation
        pytest.param(20, ["+data.num_workers=2"], marks=pytest.mark.slow),
        (19, ["+data.stream=true"]),
        pytest.param(5, ["+data.stream=true", "+data.num_workers=1"], marks=pytest.mark.slow),
        pytest.param(20, ["+data.stream=true"], marks=pytest.mark.slow),
    ],
)
def test_a_loader_with_a_state_resumes_exactly_from_any_step(step: int, options: list[str], tmp_path: Path) -> None:
    pytest.importorskip("torchdata", reason="torchdata is not installed")
    assert resumed(tmp_path, "Stateful", step, *options) == ""


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        (
            "Plain",
            [],
            "it has no resume_at, and its training loader no state_dict: the rest of the epoch is trained on ",
        ),
        ("Stateful", ["+data.stream=true", "+data.sized=false"], "its training loader has no length: Lightning had "),
    ],
)
def test_what_cannot_be_resumed_within_an_epoch_is_said(
    name: str, options: list[str], said: str, tmp_path: Path
) -> None:
    pytest.importorskip("torchdata", reason="torchdata is not installed")
    words = line(tmp_path, name, *options, "callbacks.checkpoint.every_n_steps=1", "optimizer.schedule=constant")
    assert run(tmp_path, *words, faults=[(STEP, 6, kill_9)]).end() == -9
    again = [words[0], "resume=out", f"data._target_=tests.support.own_data.{name}"]
    done = run(tmp_path, *again)
    assert done.end() == 0, done.complained
    assert f"warning: resume: {name}: {said}" in done.complained


# --- refused ---------------------------------------------------------------------------------------------------------


def test_one_without_a_spec_is_one_line(tmp_path: Path) -> None:
    done = run(tmp_path, *line(tmp_path, "NoSpec"))
    assert done.end() == 1
    assert done.complained.startswith(
        "error: data: NoSpec has no spec: a property that returns a batchscope.data.DataSpec"
    )


def test_a_datamodule_whose_spec_was_forgotten_is_one_line() -> None:
    class Forgotten(DataModule):
        name = "forgotten"

    with pytest.raises(UserError, match="^data: Forgotten has no spec: a property that returns a batchscope.data.Data"):
        described(Forgotten())


def test_one_without_a_batch_size_says_none() -> None:
    class NoBatchSize(Plain):
        def __init__(self) -> None:
            super().__init__()
            del self.batch_size

    assert described(NoBatchSize()).batch_size is None


def test_a_loader_without_a_length_takes_no_schedule_that_ends_with_the_run(tmp_path: Path) -> None:
    pytest.importorskip("torchdata", reason="torchdata is not installed")
    words = line(tmp_path, "Stateful", "+data.stream=true", "+data.sized=false")
    done = run(tmp_path, *words)
    assert done.end() == 1
    (said,) = (text for text in done.complained.splitlines() if text.startswith("error: "))
    assert said.startswith("error: optimizer.schedule: one_cycle needs an end: set trainer.max_steps, or ")
    done = run(tmp_path / "limited", *words, "trainer.max_steps=12")
    assert done.end() == 0, done.complained
