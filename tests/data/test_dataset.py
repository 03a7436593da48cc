"""DataModule: a torch Dataset, dicts, and sequences of different lengths: trained, resumed, refused."""

import re
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy
import pytest
import torch
from torch import Tensor

from batchscope.data import base, order
from batchscope.data.base import DataModule
from batchscope.data.collate import collate
from batchscope.data.datamodule import TensorDataModule
from batchscope.data.spec import PADDING, DataSpec
from batchscope.errors import UserError
from batchscope.models.sequence import LSTMCellModel, RNNCellModel, StackedLSTMModel
from batchscope.training.optimizer import Optimizer
from batchscope.training.task import Task
from tests.checkpointing.support import OUT, STEP
from tests.support.own_data import Dicts, Lengths, MapStyle, MaskedMean, Tokens, write_config
from tests.support.runs import QUIET, assert_alike, kill_9, ranks, record, results, run

SHORT = ["trainer.accelerator=cpu", "trainer.max_epochs=2", "data.batch_size=8", OUT, *QUIET]
MLP = ["model=mlp", "model.hidden_sizes=[8]"]
AUGMENTED = [*MLP, "data.augment.shift=2", "data.augment.rotation=15", "data.augment.flip=true"]
MASKED_MEAN = "model=masked_mean"


def line(folder: Path, name: str, *options: str) -> list[str]:
    return [f"--config-dir={write_config(folder, name)}", "data=own", *SHORT, *options]


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
    done = run(whole, *words, "data.num_workers=0")
    assert done.end() == 0, done.complained
    kill = ["data.num_workers=2", "callbacks.checkpoint.every_n_steps=4"]
    assert run(killed, *words, *kill, faults=[(STEP, 15, kill_9)]).end() == -9
    again = [words[0], "resume=out", f"data._target_=tests.support.own_data.{name}", "data.num_workers=1"]
    done = run(killed, *again)
    assert done.end() == 0, done.complained
    assert record(killed / "out")["resumed"][0]["step"] == 12
    return whole / "out", killed / "out"


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("MapStyle", AUGMENTED),  # with random transforms, too
        pytest.param("Dicts", MLP, marks=pytest.mark.slow),
        pytest.param("Lengths", ["model=lstm_cell", "model.hidden_size=8"], marks=pytest.mark.slow),
        pytest.param("Tokens", [MASKED_MEAN], marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_that_is_resumed_ends_as_one_that_was_not(name: str, model: list[str], tmp_path: Path) -> None:
    whole, killed = resumed(tmp_path, name, *model)
    assert_alike(results(killed), results(whole))


@pytest.mark.slow
def test_a_dataset_of_two_ranks_ends_as_one_process_with_twice_the_batch(tmp_path: Path) -> None:
    words = [word for word in line(tmp_path, "MapStyle", *MLP, "optimizer=sgd", "data.num_workers=0") if word != OUT]
    done = run(tmp_path / "one", *words, OUT, "data.batch_size=10")
    assert done.end() == 0, done.complained
    both = ranks(tmp_path / "two", *words, "data.batch_size=5")
    assert [each.end() for each in both] == [0, 0], [each.complained for each in both]
    one, two = (results(folder / "out")["weights"] for folder in (tmp_path / "one", tmp_path / "two"))
    for name in one:
        torch.testing.assert_close(one[name], two[name])


# --- a torch Dataset -------------------------------------------------------------------------------------------------


def test_workers_and_resuming_change_no_random_transform() -> None:
    whole = inputs(loaded(MapStyle(batch_size=8, num_workers=0)), 1)
    data = loaded(MapStyle(batch_size=8, num_workers=2))
    data.resume_at(1, 3)
    assert same(inputs(data, 1), whole[3:])
    assert not same(inputs(loaded(MapStyle(batch_size=8, num_workers=0)), 0), whole)


def test_the_random_numbers_of_samples_leave_those_of_the_model() -> None:
    before = torch.get_rng_state()
    inputs(loaded(MapStyle(num_workers=0)))
    assert torch.equal(torch.get_rng_state(), before)


class Own(MapStyle):
    """A datamodule of any samples, by their numbers."""

    randomised = False

    def __init__(self, samples: Any, **kwargs: Any):
        super().__init__(**{"num_workers": 0, **kwargs})
        self.samples = samples

    def dataset(self, split: str) -> Any:
        return self.samples


IMAGE = numpy.zeros((1, 8, 8), "float32")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: IMAGE.shape[9], "cannot be loaded: IndexError: tuple index out of range (test_dataset.py:"),
        (lambda: (IMAGE[:, 1:], 0), "its inputs have the shape (1, 7, 8), and the spec says (1, 8, 8)"),
        (lambda: (IMAGE, 4), "it has the label 4, and the classes are 0 to 3"),
        (lambda: (IMAGE, 0.5), "TypeError: its target is of torch.float64, and the spec says that it is a class"),
        (lambda: (IMAGE,), "it has 1 part, and the spec names 'x' and 'y'"),
        (lambda: {"x": IMAGE, "z": 0}, "it has the fields 'x', 'z', and the spec names 'x' and 'y'"),
        (lambda: (IMAGE, "a"), "fits in no batch: TypeError: its target is a str, and has to be a number or a tensor"),
    ],
)
def test_a_wrong_sample_is_one_line_with_its_number(wrong: Callable[[], Any], said: str) -> None:
    class Samples:
        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> Any:
            return wrong() if index == 7 else (IMAGE, 0)

    try:  # pytest.raises would keep the loader, and its worker, until garbage is collected
        inputs(loaded(Own(Samples(), batch_size=20, num_workers=int(said.startswith("cannot")))))
    except UserError as error:
        line = str(error)
    assert "\n" not in line
    assert "number 7 of own-dataset's train split" in line
    assert said in line


class Loads(TensorDataModule):
    kind, name = "image", "loads"
    spec = DataSpec("image", (1, 8, 8), "input")

    def load(self, split: str) -> Any:
        return torch.zeros(16, 1, 8, 8)


def test_a_split_is_one_tensor_where_the_input_is_the_target() -> None:
    assert [x.shape for x in inputs(loaded(Loads(batch_size=8)))] == [(8, 1, 8, 8)] * 2


def test_a_split_without_its_target_is_one_line() -> None:
    class Lacks(Loads):
        spec = DataSpec("image", (1, 8, 8), "class", 4)

    said = "^data: loads's train split is not what the spec says: it has 1 part, and the spec names 'x' and 'y'$"
    with pytest.raises(UserError, match=said):
        loaded(Lacks(batch_size=8))


def test_a_split_that_cannot_be_read_is_one_line() -> None:
    class Missing(MapStyle):
        def dataset(self, split: str) -> Any:
            return numpy.load("nowhere.npy")

    with pytest.raises(UserError, match="^data: the train split of own-dataset cannot be loaded: FileNotFoundError: "):
        loaded(Missing())


class Together(list):
    """Samples that can be asked for at once."""

    asked: ClassVar[list[list[int]]] = []

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.asked.append(indices)
        return [self[index] for index in indices]


def test_samples_that_can_be_asked_for_at_once_are() -> None:
    samples = Together((IMAGE + i, i % 4) for i in range(20))
    data = loaded(Own(samples, batch_size=8))
    order = data.train_dataloader().batch_sampler
    found = inputs(data)
    assert samples.asked == [indices for _, indices in order]
    assert [x[:, 0, 0, 0].tolist() for x in found] == samples.asked


def test_of_samples_asked_for_at_once_the_wrong_one_is_named() -> None:
    with pytest.raises(UserError, match="sample number 2 of own-dataset's train split cannot be loaded: ZeroDivision"):
        samples = Together([(IMAGE, 0)] * 4)
        samples.__class__ = type("Wrong", (Together,), {"__getitem__": lambda self, i: 1 / (i - 2)})
        inputs(loaded(Own(samples)))


def test_a_rank_without_a_sample_evaluates_an_empty_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (base, order):
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
    assert batch["number"] == list(range(16))


def test_a_missing_field_is_one_line() -> None:
    class Wrong(Dicts):
        @property
        def spec(self) -> DataSpec:
            return DataSpec("image", (1, 8, 8), "class", 4, fields=("picture", "label"))

    said = "it has the fields 'number', 'picture', 'answer', and the spec names 'picture' and 'label'"
    with pytest.raises(UserError, match=said):
        inputs(loaded(Wrong(num_workers=0)))


@pytest.mark.parametrize("fields", [("x",), ("x", "x"), ("x", "lengths"), ("an input", "y")])
def test_fields_that_cannot_be_told_apart_are_one_line(fields: tuple[str, ...]) -> None:
    with pytest.raises(
        UserError, match="^data: DataSpec.fields: got .*, takes the names of the inputs and, at the end, of"
    ):
        DataSpec("image", (1, 8, 8), "class", 4, fields=fields)


# --- several inputs, and batches that a project makes itself -------------------------------------------------------------


def test_each_input_is_padded_and_other_fields_are_left_alone() -> None:
    data = loaded(Tokens(num_workers=0))
    (batch,) = data.val_dataloader()
    samples = data.dataset("val")
    assert batch["text"] == [sample["text"] for sample in samples]
    assert batch["lengths"].tolist() == [len(sample["input_ids"]) for sample in samples]
    assert (batch["input_ids"].dtype, batch["attention_mask"].dtype) == (torch.int64, torch.bool)
    assert torch.equal(batch["attention_mask"].sum(1), batch["lengths"])
    assert torch.equal(batch["attention_mask"], batch["input_ids"] != 0)


def test_tensors_in_memory_have_several_inputs_too() -> None:
    class InMemory(TensorDataModule):
        kind, name = "sequence", "in-memory"
        spec = DataSpec("sequence", (9,), "class", 2, fields=("input_ids", "attention_mask", "label"))

        def load(self, split: str) -> tuple[Tensor, ...]:
            return torch.arange(36).view(4, 9), torch.ones(4, 9), torch.tensor([0, 1, 0, 1])

    for pipeline in ("memory", "device", "workers"):
        (batch,) = loaded(InMemory(pipeline=pipeline, num_workers=0)).val_dataloader()
        named, y, _ = InMemory.spec.parts(batch)
        assert named["input_ids"].tolist() == torch.arange(36).view(4, 9).tolist()
        assert (named["attention_mask"].shape, y.tolist()) == ((4, 9), [0, 1, 0, 1])


@pytest.mark.parametrize("pipeline", ["memory", "device", "workers"])
@pytest.mark.parametrize(("target", "dtype"), [("class", torch.int64), ("value", torch.float32)])
def test_tensors_of_numpy_are_trained_on_in_the_types_of_samples(
    pipeline: Any, target: Any, dtype: torch.dtype
) -> None:
    class OfNumpy(Loads):
        spec = DataSpec("image", (1, 8, 8), target, 4 if target == "class" else 1)

        def load(self, split: str) -> Any:
            return torch.zeros(16, 1, 8, 8, dtype=torch.float64), torch.ones(16, dtype=torch.int32)

    x, y = next(iter(loaded(OfNumpy(pipeline=pipeline, num_workers=0)).train_dataloader()))
    assert (x.dtype, y.dtype) == (torch.float32, dtype)


def task_of(data: DataModule, model: torch.nn.Module) -> Task:
    task = Task(model, data.spec, Optimizer(lr=0.1))
    task.log = lambda *args, **kwargs: None
    return task


def test_a_model_gets_several_inputs_by_their_names() -> None:
    data = loaded(Tokens(num_workers=0))
    (batch,) = data.val_dataloader()
    model = MaskedMean(data.spec).eval()
    answers = [
        model(torch.ones(1, len(s["input_ids"])), torch.tensor(s["input_ids"])[None]) for s in data.dataset("val")
    ]
    found = task_of(data, model).validation_step(batch, 0)
    torch.testing.assert_close(found["output"], torch.cat(answers))


def test_a_model_of_several_inputs_gets_lengths_where_it_takes_them() -> None:
    class Last(torch.nn.Module):
        def forward(self, input_ids: Tensor, attention_mask: Tensor, lengths: Tensor) -> Tensor:
            return torch.nn.functional.one_hot(lengths % 2, 2).float()

    data = loaded(Tokens(num_workers=0))
    (batch,) = data.val_dataloader()
    output = task_of(data, Last()).validation_step(batch, 0)["output"]
    assert output.argmax(-1).tolist() == (batch["lengths"] % 2).tolist()


def test_a_rank_without_samples_evaluates_several_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (base, order):
        monkeypatch.setattr(module, "rank_and_world_size", lambda: (19, 20))
    data = loaded(Tokens(num_workers=0))
    (batch,) = data.val_dataloader()
    assert task_of(data, MaskedMean(data.spec)).validation_step(batch, 0)["output"].shape == (0, 2)


def own_collate(samples: list[Any]) -> Any:
    """A batch as transformers make it: a Mapping that is no dict, padded on the left."""
    ids = [torch.as_tensor(sample["input_ids"]).flip(0) for sample in samples]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).flip(1)
    labels = torch.tensor([sample["label"] for sample in samples])
    return UserDict(input_ids=padded, attention_mask=padded != 0, label=labels)


class Static(Tokens):
    collate_fn = staticmethod(own_collate)


class Method(Tokens):
    def collate_fn(self, samples: list[Any]) -> Any:
        return own_collate(samples)


@pytest.mark.parametrize(("kind", "workers"), [(Static, 1), (Method, 0)])
def test_an_own_collate_fn_makes_the_batches(kind: type[Tokens], workers: int) -> None:
    data = loaded(kind(batch_size=8, num_workers=workers))
    batches = list(data.train_dataloader())
    assert [len(batch["label"]) for batch in batches] == [8] * 9 + [4]
    assert all(type(batch) is dict and batch["input_ids"][:, -1].all() for batch in batches)
    assert data.fingerprint != loaded(Tokens()).fingerprint


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            lambda samples: samples[0]["nothing"],
            "collate_fn fails for number {}: KeyError: 'nothing' (test_dataset",
        ),
        (
            lambda samples: None,
            "is not what the spec says: it has the type NoneType, and the spec names 'input_ids', 'att",
        ),
        (lambda samples: {**own_collate(samples), "label": [0]}, "its 'label' is a list, and has to be a tensor"),
        (
            lambda samples: {**own_collate(samples), "attention_mask": torch.ones(99, 9)},
            "its 'attention_mask' has the shape (99, 9)",
        ),
        (
            lambda samples: {**own_collate(samples), "input_ids": torch.ones(len(samples), 0)},
            "a sequence of it has no steps",
        ),
        (lambda samples: {**own_collate(samples), "label": torch.full((len(samples),), 2)}, "it has the label 2"),
    ],
)
def test_a_wrong_batch_of_an_own_collate_fn_is_one_line(wrong: Callable[[Any], Any], said: str) -> None:
    class Wrong(Tokens):
        collate_fn = staticmethod(wrong)

    with pytest.raises(UserError) as caught:
        inputs(loaded(Wrong(num_workers=0)))
    assert "\n" not in str(caught.value)
    assert re.search(re.escape(said).replace(r"\{\}", r"\d+ of own-tokens's train split"), str(caught.value)), (
        caught.value
    )


class NoMask(Tokens):
    """A dataset without the field that its spec names."""

    def dataset(self, split: str) -> Any:
        return [{key: sample[key] for key in ("input_ids", "label")} for sample in super().dataset(split)]


def test_what_is_wrong_with_every_batch_is_said_before_anything_is_written(tmp_path: Path) -> None:
    words = line(tmp_path, "Tokens", MASKED_MEAN)
    done = run(tmp_path, *words, f"data._target_={__name__}.NoMask")
    assert done.end() == 1
    assert "it has the fields 'input_ids', 'label', and the spec names 'input_ids', 'attention_mask' and 'label'" in (
        done.complained
    )
    assert not (tmp_path / "out" / "run.json").exists()


# --- time steps ----------------------------------------------------------------------------------------------------------


def test_a_loader_counts_the_steps_of_a_batch_without_its_padding() -> None:
    train = loaded(Tokens(batch_size=8, num_workers=0)).train_dataloader()
    found = [(train.timesteps, int(batch["lengths"].sum())) for batch in train]
    assert len(found) == 10
    assert all(counted == real for counted, real in found)


def test_a_project_counts_the_steps_of_its_own_batches() -> None:
    class Counting(Static):
        def timesteps(self, batch: Any) -> int:
            return int(batch["attention_mask"].sum())

    train = loaded(Counting(batch_size=8, num_workers=0)).train_dataloader()
    assert all(train.timesteps == (batch["input_ids"] != 0).sum() for batch in train)


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
            task.validation_step(collate(samples[first : first + batch_size], data.spec), 0)
        losses.append([task.measured["val"][name].compute() for name in ("loss", "acc")])
    torch.testing.assert_close(losses[0], losses[1])


def test_a_sequence_without_a_step_is_one_line() -> None:
    class Empty(Lengths):
        def dataset(self, split: str) -> Any:
            return [(numpy.zeros((0 if i == 3 else 2, 2), "float32"), 0) for i in range(8)]

    with pytest.raises(
        UserError, match="number 3 of own-lengths's train split is not what the spec says: a sequence of "
    ):
        inputs(loaded(Empty(num_workers=0)))


def test_every_step_of_different_lengths_is_trained_and_tested(tmp_path: Path) -> None:
    words = [*line(tmp_path, "Lengths", "model=rnn_cell"), "+data.every_step=true", "+data.fields=true"]
    off = {"callbacks.memory=null", "callbacks.prediction_images=null", "+callbacks.throughput.flops_per_sample=1"}
    done = run(tmp_path, *(word for word in words if word not in off))
    assert done.end() == 0, done.complained
    found = record(tmp_path / "out")
    assert found["metrics"]["test/acc"] > 0.4
    assert not {"flops_per_sample", "mfu"} & found["throughput"].keys()
    steps = found["throughput"]["timesteps_per_sec"] / found["throughput"]["samples_per_sec"]
    assert 3 < steps < 9
    assert found["memory"]["uncounted"] == "the sequences have different lengths"
    assert "Warning" not in done.complained


@pytest.mark.parametrize(
    ("kind", "target", "said"),
    [
        ("images", "class", r"kind: got 'images', takes image, sequence or tensor\. Did you mean 'image'\?"),
        ("image", "label", r"target: got 'label', takes class, .*, vector or input\. Did you mean 'multilabel'\?"),
    ],
)
def test_an_unknown_word_in_a_spec_is_one_line(kind: Any, target: Any, said: str) -> None:
    with pytest.raises(UserError, match=rf"^data: DataSpec\.{said}$"):
        DataSpec(kind, (1, 8, 8), target, 4)
