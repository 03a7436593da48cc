"""A torch Dataset, dicts, sequences of different lengths, and any LightningDataModule: trained, resumed, refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from batchscope.data import dataset, loader
from batchscope.data.base import DataModule
from batchscope.data.dataset import DatasetModule
from batchscope.data.plain import described
from batchscope.data.spec import PADDING, DataSpec
from batchscope.errors import UserError
from batchscope.models.sequence import LSTMCellModel, RNNCellModel, StackedLSTMModel
from batchscope.training import build
from batchscope.training.optimizer import Optimizer
from batchscope.training.task import Task
from tests.checkpointing.support import OUT, STEP
from tests.support.own_data import TRUST, Dicts, Lengths, MapStyle, Plain, write_config
from tests.support.runs import QUIET, assert_alike, kill_9, ranks, record, results, run

SHORT = ["trainer.accelerator=cpu", "trainer.max_epochs=2", "data.batch_size=8", OUT, *QUIET]
MLP = ["model=mlp", "model.hidden_sizes=[8]"]


def line(folder: Path, name: str, *options: str) -> list[str]:
    conf = write_config(folder, name, None if name in ("Plain", "NoSpec") else "_data")
    return [f"--config-dir={conf}", "data=own", *SHORT, *options]


def loaded(data: Any) -> Any:
    data.setup("fit")
    return data


def inputs(data: DataModule, epoch: int = 0) -> list[Tensor]:
    train = data.train_dataloader()
    train.batch_sampler.set_epoch(epoch)
    return [data.spec.parts(batch)[0] for batch in train]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


# --- resumed runs ----------------------------------------------------------------------------------------------------


def resumed(folder: Path, name: str, *options: str) -> tuple[Path, Path]:
    """The folders of a run that was never stopped, and of one that was killed and resumed with other workers."""
    whole, killed = folder / "whole", folder / "killed"
    words = line(folder, name, *options)
    done = run(whole, *words, "data.num_workers=0", faults=[TRUST])
    assert done.end() == 0, done.complained
    kill = ["data.num_workers=2", "callbacks.checkpoint.every_n_steps=4"]
    assert run(killed, *words, *kill, faults=[TRUST, (STEP, 15, kill_9)]).end() == -9
    again = [words[0], "resume=out", f"data._target_=tests.support.own_data.{name}", "data.num_workers=1"]
    done = run(killed, *again, faults=[TRUST])
    assert done.end() == 0, done.complained
    assert record(killed / "out")["resumed"][0]["step"] == 12
    return whole / "out", killed / "out"


def test_a_dataset_with_random_transforms_that_is_resumed_ends_as_one_that_was_not(tmp_path: Path) -> None:
    whole, killed = resumed(tmp_path, "MapStyle", *MLP)
    assert_alike(results(killed), results(whole))


@pytest.mark.slow
def test_dicts_that_are_resumed_end_as_if_they_were_not(tmp_path: Path) -> None:
    whole, killed = resumed(tmp_path, "Dicts", *MLP)
    assert_alike(results(killed), results(whole))


@pytest.mark.slow
def test_different_lengths_that_are_resumed_end_as_if_they_were_not(tmp_path: Path) -> None:
    whole, killed = resumed(tmp_path, "Lengths", "model=lstm_cell", "model.hidden_size=8")
    assert_alike(results(killed), results(whole))


# --- a torch Dataset -------------------------------------------------------------------------------------------------


def test_workers_and_resuming_change_no_random_transform() -> None:
    whole = inputs(loaded(MapStyle(batch_size=8, num_workers=0)), 1)
    data = loaded(MapStyle(batch_size=8, num_workers=2))
    data.resume_at(1, 3)
    assert same(inputs(data, 1), whole[3:])
    assert not same(inputs(loaded(MapStyle(batch_size=8, num_workers=0)), 0), whole)


def test_a_sample_that_cannot_be_loaded_is_one_line_with_its_number_and_place() -> None:
    class Wrong(MapStyle):
        def dataset(self, split: str) -> Any:
            return {i: (numpy.zeros((1, 8, 8), "float32"), 0) for i in range(7)} | {7: 1 / 3, 9: 1}

    with pytest.raises(UserError) as caught:
        inputs(loaded(Wrong(batch_size=9, num_workers=1)))
    assert "\n" not in str(caught.value)
    assert "of own-dataset's train split" in str(caught.value)


def test_a_rank_without_a_sample_evaluates_an_empty_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (dataset, loader):
        monkeypatch.setattr(module, "rank_and_world_size", lambda: (19, 20))
    ((x, y),) = loaded(MapStyle(num_workers=0)).val_dataloader()
    assert (tuple(x.shape), tuple(y.shape)) == ((0, 1, 8, 8), (0,))


def test_the_fingerprint_is_of_some_samples_and_the_number_of_all() -> None:
    prints = {loaded(MapStyle(seed=seed, noisy=noisy)).fingerprint for seed in (0, 1) for noisy in (True, False)}
    assert len(prints) == 4
    assert loaded(MapStyle()).fingerprint == loaded(MapStyle(num_workers=0, batch_size=3)).fingerprint


def test_an_empty_split_is_one_line() -> None:
    class Empty(MapStyle):
        def dataset(self, split: str) -> Any:
            return []

    with pytest.raises(UserError, match="^data: own-dataset has no samples in its train split$"):
        loaded(Empty())


# --- dicts -----------------------------------------------------------------------------------------------------------


def test_a_batch_of_dicts_has_their_other_fields_too() -> None:
    batch = next(iter(loaded(Dicts(batch_size=8, num_workers=0)).val_dataloader()))
    assert batch.keys() == {"picture", "answer", "number"}
    assert batch["number"].tolist() == list(range(16))


def test_a_missing_field_is_one_line() -> None:
    class Wrong(Dicts):
        @property
        def spec(self) -> DataSpec:
            return DataSpec("image", (1, 8, 8), "class", 4, fields=("picture", "label"))

    with pytest.raises(UserError, match="fits in no batch: KeyError: 'label'"):
        inputs(loaded(Wrong(num_workers=0)))


# --- sequences of different lengths ----------------------------------------------------------------------------------


def test_sequences_are_padded_behind_their_ends_to_the_longest_of_the_batch() -> None:
    data = loaded(Lengths(every_step=True, num_workers=0))
    samples = data.dataset("val")
    (batch,) = data.val_dataloader()
    x, y, lengths = batch
    assert lengths.tolist() == [len(sample[0]) for sample in samples]
    assert x.shape[1] == max(lengths)
    for row, target, (sample, answers) in zip(x, y, samples, strict=True):
        assert torch.equal(row[: len(sample)], torch.tensor(sample))
        assert not row[len(sample) :].any()
        assert target.tolist() == [*answers, *[PADDING] * (len(row) - len(sample))]


@pytest.mark.parametrize("kind", [RNNCellModel, LSTMCellModel, StackedLSTMModel])
@pytest.mark.parametrize("backend", ["reference", "fused"])
def test_a_recurrent_model_reads_the_last_real_step(kind: Callable[..., Any], backend: str) -> None:
    data = loaded(Lengths(num_workers=0))
    (batch,) = data.val_dataloader()
    x, _, lengths = batch
    model = kind(data.spec, hidden_size=8, backend=backend).eval()
    alone = [model(row[None, :length]) for row, length in zip(x, lengths, strict=True)]
    torch.testing.assert_close(model(x, lengths=lengths), torch.cat(alone))


class _Constant(torch.nn.Module):
    """An answer for every step that depends on the step's input alone."""

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        return torch.stack([x[..., 0], -x[..., 0]], -1)


def test_padding_counts_in_no_loss_and_no_accuracy() -> None:
    data = loaded(Lengths(every_step=True, num_workers=0))
    (batch,) = data.val_dataloader()
    task = Task(_Constant(), data.spec, Optimizer(lr=0.1))
    step = task.training_step(batch, 0)
    steps = [(torch.tensor(x), torch.tensor(y)) for x, y in data.dataset("val")]
    x, y = (torch.cat(parts) for parts in zip(*steps, strict=True))
    expected = torch.nn.functional.cross_entropy(_Constant()(x), y)
    torch.testing.assert_close(step["loss"], expected)
    torch.testing.assert_close(step["acc"], (_Constant()(x).argmax(-1) == y).float().mean())


def test_a_validation_of_different_lengths_does_not_depend_on_its_batches() -> None:
    losses = []
    for batch_size in (3, 16):
        data = loaded(Lengths(every_step=True, num_workers=0))
        task = Task(_Constant(), data.spec, Optimizer(lr=0.1))
        task.log = lambda *args, **kwargs: None
        samples = data.dataset("val")
        for first in range(0, len(samples), batch_size):
            from batchscope.data.collate import collate

            task.validation_step(collate(samples[first : first + batch_size], data.spec), 0)
        losses.append((task.val_loss.compute(), task.val_acc.compute()))
    torch.testing.assert_close(losses[0], losses[1])


@pytest.mark.parametrize("fields", ["true", "false"])
def test_every_step_of_different_lengths_is_trained_and_tested(fields: str, tmp_path: Path) -> None:
    words = [*line(tmp_path, "Lengths", "model=rnn_cell"), "+data.every_step=true", f"+data.fields={fields}"]
    off = {"callbacks.memory=null", "callbacks.prediction_images=null", "+callbacks.throughput.flops_per_sample=1"}
    done = run(tmp_path, *(word for word in words if word not in off), faults=[TRUST])
    assert done.end() == 0, done.complained
    found = record(tmp_path / "out")
    assert found["metrics"]["test/acc"] > 0.4
    assert not {"flops_per_sample", "mfu", "timesteps_per_sec"} & found["throughput"].keys()
    assert found["memory"]["uncounted"] == "the sequences have different lengths"
    assert "Warning" not in done.complained


def test_a_model_that_knows_no_lengths_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoLengths(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    monkeypatch.setattr(build, "_class_of", lambda target, path: NoLengths)
    with pytest.raises(UserError) as caught:
        build.build_model({"model": {"_target_": "own.NoLengths"}}, described(Lengths()))
    assert str(caught.value) == (
        "model: NoLengths reads sequences of one length: its forward takes no `lengths`, and those of own-lengths vary"
    )


# --- any LightningDataModule -----------------------------------------------------------------------------------------


def test_any_lightning_datamodule_with_a_spec_is_trained_tested_and_recorded(tmp_path: Path) -> None:
    done = run(tmp_path, *line(tmp_path, "Plain", *MLP), faults=[TRUST])
    assert done.end() == 0, done.complained
    found = record(tmp_path / "out")
    assert found["dataset"] == {"name": "Plain", "fingerprint": "unknown", "train_samples": None}
    assert (found["steps"], found["name"]) == (20, "mlp-Plain-bs8")
    assert found["metrics"].keys() >= {"test/acc", "val/loss"}


@pytest.mark.slow
def test_one_that_is_resumed_at_the_end_of_an_epoch_ends_as_one_that_was_not(tmp_path: Path) -> None:
    words = line(tmp_path, "Plain", *MLP)
    assert run(tmp_path / "whole", *words, faults=[TRUST]).end() == 0
    assert run(tmp_path / "killed", *words, faults=[TRUST, (STEP, 15, kill_9)]).end() == -9
    again = [words[0], "resume=out", "data._target_=tests.support.own_data.Plain"]
    done = run(tmp_path / "killed", *again, faults=[TRUST])
    assert done.end() == 0, done.complained
    assert record(tmp_path / "killed" / "out")["resumed"][0]["step"] == 10
    assert "warning: resume: Plain has no resume_at" in done.complained
    assert_alike(results(tmp_path / "killed" / "out"), results(tmp_path / "whole" / "out"))


def test_one_without_a_spec_is_one_line(tmp_path: Path) -> None:
    done = run(tmp_path, *line(tmp_path, "NoSpec", *MLP), faults=[TRUST])
    assert done.end() == 1
    assert done.complained == ("error: data: NoSpec has no spec: a property that returns a batchscope.data.DataSpec\n")


def test_a_datamodule_whose_spec_was_forgotten_is_one_line() -> None:
    class Forgotten(DatasetModule):
        name = "forgotten"

    with pytest.raises(
        UserError, match="^data: Forgotten has no spec: a property that returns a batchscope.data.DataSpec$"
    ):
        described(Forgotten())


def test_what_a_plain_datamodule_says_is_used() -> None:
    plain = Plain(4)
    plain.num_samples, plain.fingerprint, plain.name = {"train": 76}.get, "abc", "mine"
    known = described(plain)
    known.batch_size = 2
    assert (known.num_samples("train"), known.fingerprint, known.name, plain.batch_size) == (76, "abc", "mine", 2)


@pytest.mark.slow
def test_two_ranks_divide_the_samples_of_a_plain_datamodule(tmp_path: Path) -> None:
    words = [word for word in line(tmp_path, "Plain", *MLP, "data.batch_size=4") if word != OUT]
    both = ranks(tmp_path, *words, faults={0: [TRUST], 1: [TRUST]})
    assert [each.end() for each in both] == [0, 0], [each.complained for each in both]
    assert record(tmp_path / "out")["steps"] == 20


@pytest.mark.slow
def test_a_dataset_of_two_ranks_ends_as_one_process_with_twice_the_batch(tmp_path: Path) -> None:
    words = [word for word in line(tmp_path, "MapStyle", *MLP, "optimizer=sgd", "data.num_workers=0") if word != OUT]
    done = run(tmp_path / "one", *words, OUT, "data.batch_size=10", faults=[TRUST])
    assert done.end() == 0, done.complained
    both = ranks(tmp_path / "two", *words, "data.batch_size=5", faults={0: [TRUST], 1: [TRUST]})
    assert [each.end() for each in both] == [0, 0], [each.complained for each in both]
    one, two = (results(folder / "out")["weights"] for folder in (tmp_path / "one", tmp_path / "two"))
    for name in one:
        torch.testing.assert_close(one[name], two[name])
