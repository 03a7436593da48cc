"""DataModule: from the samples of a torch Dataset, or from tensors in memory, to the batches that a network gets."""

import os
import random
from collections import UserDict
from functools import cached_property
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from lightning import LightningDataModule
from torch import Tensor, nn, tensor
from torch.utils._pytree import tree_leaves

from batchscope.data.base import DataModule
from batchscope.data.collate import collate
from batchscope.data.datamodule import TensorDataModule
from batchscope.data.loader import SampleBatches
from batchscope.data.plain import described
from batchscope.data.spec import PADDING, DataSpec
from batchscope.data.workers import seeded
from batchscope.errors import UserError
from batchscope.models.sequence import LSTMCellModel, RNNCellModel, StackedLSTMModel
from batchscope.training.optimizer import Optimizer
from batchscope.training.task import Task
from tests.data.support import InMemory, Own, inputs, loaded
from tests.support.command_lines import refusal
from tests.support.own_data import Images, Lengths, MapStyle, MaskedMean, Tokens
from tests.support.runs import assert_alike

X = [numpy.full((1, 2, 2), float(number)) for number in range(3)]  # float64
PIXELS, AS_PIXELS = (1, 2, 2), torch.arange(3.0)[:, None, None, None].expand(3, 1, 2, 2)
TEXT = [{"ids": [4], "text": "a", "mask": [True], "y": 1}, {"ids": [5, 6], "text": "b", "mask": [True, False], "y": 0}]
TEXTS = DataSpec("sequence", (9,), "class", 2, fields=("ids", "mask", "y"), variable_length=True)
STEPS = DataSpec("sequence", (9, 1), "class_per_step", 2, variable_length=True)
# samples, what their spec says, and the batch of them
SAMPLES: dict[str, tuple[Any, DataSpec, Any]] = {
    "classes": (
        [(x, numpy.int32(y)) for y, x in enumerate(X)],
        DataSpec("image", PIXELS, "class", 3),
        [AS_PIXELS, tensor([0, 1, 2])],
    ),
    "values": ([(x, 2) for x in X], DataSpec("image", PIXELS, "value", 1), [AS_PIXELS, tensor([2.0] * 3)]),
    "several targets": (
        [(x, {"shade": y, "size": y / 2}) for y, x in enumerate(X)],
        DataSpec("image", PIXELS, "any"),
        [AS_PIXELS, {"shade": tensor([0, 1, 2]), "size": tensor([0.0, 0.5, 1.0])}],
    ),
    "inputs alone": (X, DataSpec("image", PIXELS, "input"), [AS_PIXELS]),
    "inputs in tuples": ([(x,) for x in X], DataSpec("image", PIXELS, "input"), [AS_PIXELS]),
    "dicts": (
        [{"number": y, "picture": x, "answer": y} for y, x in enumerate(X)],
        DataSpec("image", PIXELS, "class", 3, fields=("picture", "answer")),
        {"picture": AS_PIXELS, "answer": tensor([0, 1, 2]), "number": [0, 1, 2]},
    ),
    "several inputs of different lengths": (
        TEXT,
        TEXTS,
        {
            "ids": tensor([[4, 0], [5, 6]]),
            "mask": tensor([[True, False], [True, False]]),
            "y": tensor([1, 0]),
            "lengths": tensor([1, 2]),
            "text": ["a", "b"],
        },
    ),
    "a class a step": (
        [([[1.0]], [1]), ([[2.0], [3.0]], [0, 1])],
        STEPS,
        [tensor([[[1.0], [0.0]], [[2.0], [3.0]]]), tensor([[1, PADDING], [0, 1]]), tensor([1, 2])],
    ),
    "a class a step in bytes": (
        [([[1.0]], numpy.uint8([1])), ([[2.0], [3.0]], numpy.uint8([0, 1]))],
        STEPS,
        [tensor([[[1.0], [0.0]], [[2.0], [3.0]]]), tensor([[1, PADDING], [0, 1]]), tensor([1, 2])],
    ),
    "padded samples with their lengths": (
        [([[1.0], [0.0]], [1, PADDING], numpy.int32(1)), ([[2.0], [3.0]], [0, PADDING], tensor(1))],
        STEPS,
        [tensor([[[1.0], [0.0]], [[2.0], [3.0]]]), tensor([[1, PADDING], [0, PADDING]]), tensor([1, 1])],
    ),
}  # fmt: skip


def test_a_spec_of_lists_as_a_yaml_file_has_them_is_one_of_tuples() -> None:
    fields_of_user = {"classes": ("a", "b"), "mean": (0.5,), "std": (0.1,), "fields": ("picture", "answer")}
    lists = {name: [*values] for name, values in fields_of_user.items()}
    assert DataSpec("image", [1, 2, 2], "class", 2, **lists) == DataSpec("image", PIXELS, "class", 2, **fields_of_user)


def assert_batch(batch: Any, expected: Any) -> None:
    """Assert that a batch equals the expected one in every bit and dtype."""
    assert_alike(batch, expected)
    assert_alike(
        *([leaf.dtype for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)] for tree in (batch, expected))
    )


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_become_a_batch(name: str) -> None:
    samples, spec, expected = SAMPLES[name]
    batches = loaded(Own(samples, spec)).val_dataloader()
    (batch,) = batches
    assert_batch(batch, expected)
    assert batches.timesteps == (sum(spec.parts(batch)[2]) if spec.variable_length else None)


@pytest.mark.parametrize("pipeline", ["memory", "device", "workers"])
@pytest.mark.parametrize(("target", "dtype"), [("class", torch.int64), ("value", torch.float32), ("input", None)])
def test_tensors_in_memory_become_a_batch(target: Any, dtype: Any, pipeline: Any) -> None:
    x, mask, y = torch.arange(36).view(4, 9), torch.ones(4, 9, dtype=torch.float64), torch.ones(4, dtype=torch.int32)
    names = ("ids",) if target == "input" else ("ids", "mask", "y")
    spec = DataSpec("sequence", (9,), target, {"class": 2, "value": 1}.get(target, 0), fields=names)
    data = InMemory(x if target == "input" else (x, mask, y), spec, pipeline=pipeline)
    (batch,) = loaded(data).val_dataloader()
    assert_batch(batch, [x] if target == "input" else [x, mask.float(), y.to(dtype)])


@pytest.mark.parametrize("pipeline", ["memory", "device", "workers"])
def test_sequences_in_memory_keep_their_lengths(pipeline: Any) -> None:
    split = [torch.ones(4, 9, 1), tensor([0, 1, 0, 1]), tensor([9, 3, 1, 5])]
    spec = DataSpec("sequence", (9, 1), "class", 2, variable_length=True)
    (batch,) = loaded(InMemory(tuple(split), spec, pipeline=pipeline)).val_dataloader()
    assert_batch(batch, split)


def test_targets_behind_the_end_of_a_sequence_count_nowhere_whatever_they_are() -> None:
    batch = [torch.ones(2, 3, 1), tensor([[1, 0, 0], [0, 1, 0]]), tensor([1, 2])]
    assert STEPS.parts(batch)[1].tolist() == [[1, PADDING, PADDING], [0, 1, PADDING]]
    assert batch[1].tolist() == [[1, 0, 0], [0, 1, 0]]


class Together(list):
    """Samples that are loaded together, by `__getitems__`."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(self[index][0] + 100, index % 4) for index in indices]


def test_samples_that_can_be_asked_for_at_once_are() -> None:
    data = Own(Together((numpy.full((1, 8, 8), i, "float32"), i % 4) for i in range(20)), batch_size=8)
    rows = [[int(x) - 100 for x in batch[:, 0, 0, 0]] for batch in inputs(data)]
    assert rows == [indices for _, indices in data.train_dataloader().batch_sampler]


SEEDS = [(0, 0), (0, 1), (1, 0), (1, 0)]  # and epochs


def test_random_transforms_depend_on_seed_epoch_and_sample_alone() -> None:
    before = torch.get_rng_state()
    all_batches = inputs(MapStyle(batch_size=8, num_workers=0), 1)
    assert torch.equal(torch.get_rng_state(), before)  # the random state of the model
    data = MapStyle(batch_size=8, num_workers=1)
    data.resume_at(1, 3)
    assert_alike(inputs(data, 1), all_batches[3:])
    samples = [SampleBatches(Images(9, 0, True), data.spec, "", seed).sample(epoch, 5)[0] for seed, epoch in SEEDS]
    assert len({x.tobytes() for x in samples}) == 3


class Drawn(Images):
    """Draws its samples from torch's generator."""

    def __getitem__(self, index: int) -> Any:
        return torch.rand(1, 8, 8), 0


@pytest.mark.parametrize("randomised", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_no_split_and_no_rank_repeats_the_random_numbers_of_another(randomised: bool, as_rank) -> None:
    data: Any = Own(Drawn(8, 0), num_workers=1)
    data.randomised = randomised
    loaded(data).setup("test")
    drawn = []
    for rank in (0, 1):
        as_rank(rank, 2)
        for served in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
            drawn += [x[0, 0, 0].item() for batch, _ in served for x in batch]
    assert len({*drawn}) == len(drawn) == 24


def test_a_sample_of_an_evaluation_has_the_same_random_numbers_in_every_epoch() -> None:
    batches = loaded(MapStyle(num_workers=0)).val_dataloader()
    first = [*batches]
    batches.batch_sampler.set_epoch(3)
    assert_alike([*batches], first)


def test_python_numpy_and_torch_repeat_the_random_numbers_of_a_seed() -> None:
    def drawn(seed: int) -> tuple[float, ...]:
        with seeded(seed):
            return random.random(), numpy.random.random(), torch.rand(()).item()

    assert drawn(3) == drawn(3)
    assert all(first != second for first, second in zip(drawn(3), drawn(4), strict=True))
    before = random.getstate()
    with pytest.raises(KeyError), seeded(3):
        raise KeyError
    assert random.getstate() == before  # after an error, too


def test_a_sample_may_be_one_number() -> None:
    assert DataSpec("tensor", (), "value", 1, fields=("user", "item", "rating")).input_shape == ()
    message = refusal(DataSpec, "image", (), "value", 1)
    assert message.startswith("data: DataSpec.input_shape: got ()")


def test_the_fingerprint_is_of_some_samples_and_the_number_of_all() -> None:
    samples = [(numpy.full((1, 8, 8), i, "float32"), i % 4) for i in range(31)]
    fingerprint = loaded(Own(samples)).fingerprint
    assert fingerprint == loaded(Own(samples, batch_size=3, seed=1)).fingerprint
    assert fingerprint == loaded(Own([*samples[:1], samples[0], *samples[2:]])).fingerprint  # every second of 31
    for changed in (samples[:-1], [*samples[:2], samples[3], *samples[3:]], [*samples[:-1], (samples[-1][0], 3)]):
        assert loaded(Own(changed)).fingerprint != fingerprint


class Noisy(Images):
    """Samples with noise from an unseeded generator."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + numpy.random.default_rng().normal(size=x.shape).astype("float32"), y


def test_random_noise_is_no_part_of_the_fingerprint() -> None:
    fingerprint = loaded(Own(Noisy(31, 0))).fingerprint
    assert loaded(Own(Noisy(31, 0))).fingerprint == fingerprint
    assert loaded(Own(Noisy(30, 0))).fingerprint != fingerprint


class Unnamed(DataModule):
    kind, spec = "image", DataSpec("image", (1, 8, 8), "class", 2)


def test_a_datamodule_without_a_name_is_called_as_its_class() -> None:
    assert described(Unnamed()).name == "Unnamed"


class Opened(Images):
    """Records the process that loads its samples, as the owner of an open file; with noise of numpy's own generator."""

    process = 0

    def __getitem__(self, index: int) -> Any:
        self.process = os.getpid()
        return super().__getitem__(index)


def test_what_workers_load_is_opened_nowhere_else_and_the_checks_find_the_same() -> None:
    alone, apart = (Opened(20, 0, noisy=True) for _ in range(2))
    datamodules = [loaded(Own(samples, num_workers=workers)) for workers, samples in enumerate((alone, apart))]
    assert len({data.fingerprint for data in datamodules}) == 1
    assert (alone.process, apart.process) == (os.getpid(), 0)


class Collated(Tokens):
    """Left-padded batches as transformers make them: a Mapping that is no dict, with the lengths of the sequences."""

    def collate_fn(self, samples: list[Any]) -> Any:
        ids = [torch.as_tensor(sample["input_ids"]).flip(0) for sample in samples]
        padded = nn.utils.rnn.pad_sequence(ids, batch_first=True).flip(1)
        labels = tensor([sample["label"] for sample in samples])
        return UserDict(input_ids=padded, attention_mask=padded != 0, label=labels)

    def timesteps(self, batch: Any) -> int:
        return int(batch["attention_mask"].sum())


@pytest.mark.parametrize("workers", [0, 1])
def test_an_own_collate_fn_makes_the_batches(workers: int) -> None:
    batches = loaded(Collated(batch_size=8, num_workers=workers)).train_dataloader()
    sizes = []
    for batch in batches:
        assert type(batch) is dict
        assert batch["input_ids"][:, -1].all()
        assert batches.timesteps == (batch["input_ids"] != 0).sum()
        sizes.append(len(batch["label"]))
    assert sizes == [8] * 9 + [4]
    assert loaded(Collated()).fingerprint != loaded(Tokens()).fingerprint


class InMemoryCollated(InMemory):
    def collate_fn(self, samples: list[Any]) -> Any:
        return [torch.stack(parts) for parts in zip(*samples, strict=True)]


def test_a_collate_fn_of_tensors_in_memory_runs_where_the_pipeline_says() -> None:
    split, spec = (torch.zeros(4, 1), torch.zeros(4)), DataSpec("tensor", (1,), "value", 1)
    for name, number in (("memory", 0), ("workers", 1)):
        data = loaded(InMemoryCollated(split, spec, pipeline=name, num_workers=1))
        assert (len(next(iter(data.train_dataloader()))[0]), data._num_processes) == (4, number)
    with pytest.raises(UserError, match="^data.pipeline: got device, and a collate_fn takes single samples"):
        loaded(InMemoryCollated(split, spec, pipeline="device")).train_dataloader()


@pytest.mark.parametrize(
    "wrong", [{"classes": (0, 1)}, {"classes": ("a\n", "b")}, {"mean": (0.5,)}, {"mean": (0, 0), "std": (1, 1)}]
)
def test_a_spec_that_no_checkpoint_could_hold_is_refused_before_a_training(wrong: dict) -> None:
    assert DataSpec("image", PIXELS, "class", 2, classes=("می\u200cرود", "b")).num_classes == 2
    with pytest.raises(UserError, match="^data: DataSpec.(classes|mean|std): got "):
        DataSpec("image", PIXELS, "class", 2, **wrong)


def task_of(data: Any, model: nn.Module) -> Task:
    task = Task(model, data.spec, Optimizer(lr=0.1))
    task.log = lambda *args, **kwargs: None
    return task


@pytest.mark.parametrize("is_of_zoo", [True, False])
def test_a_network_that_is_not_of_the_zoo_is_evaluated_in_batches_of_its_training(is_of_zoo: bool) -> None:
    data = Own([(numpy.zeros(4, "float32"), 0)] * 300, DataSpec("sequence", (4, 1), "class", 2), batch_size=4)
    model = RNNCellModel(data.spec) if is_of_zoo else nn.Flatten()
    task = task_of(loaded(data), model)
    data.trainer = SimpleNamespace(lightning_module=task, strategy=SimpleNamespace(root_device=torch.device("cpu")))
    assert data.val_dataloader().batch_sampler.batch_size == (256 if is_of_zoo else 4)


class Last(nn.Module):
    """Answers by the parity of the lengths, its third input."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, lengths: Tensor) -> Tensor:
        return nn.functional.one_hot(lengths % 2, 2).float()


def test_a_model_gets_several_inputs_by_their_names_and_lengths_where_it_takes_them() -> None:
    data = loaded(Tokens(num_workers=0))
    (batch,) = data.val_dataloader()
    model = MaskedMean(data.spec).eval()
    alone = [model(torch.ones(1, len(s["input_ids"])), tensor(s["input_ids"])[None]) for s in data.dataset("val")]
    torch.testing.assert_close(task_of(data, model).validation_step(batch, 0)["output"], torch.cat(alone))
    with torch.no_grad():
        output = task_of(data, Last()).validation_step(batch, 0)["output"]
    assert output.argmax(-1).tolist() == (batch["lengths"] % 2).tolist()


@pytest.mark.parametrize(
    ("kind", "backend"), [*product([RNNCellModel, LSTMCellModel, StackedLSTMModel], ["reference", "fused"])]
)
def test_a_recurrent_model_reads_the_last_real_step(kind: Any, backend: str) -> None:
    data = loaded(Lengths(num_workers=0))
    ((x, _, lengths),) = data.val_dataloader()
    model = kind(data.spec, hidden_size=8, backend=backend).eval()
    alone = [model(row[None, :length]) for row, length in zip(x, lengths, strict=True)]
    torch.testing.assert_close(model(x, lengths=lengths), torch.cat(alone))


def test_a_tuple_of_targets_is_a_tuple_where_lengths_vary_too() -> None:
    spec = DataSpec("sequence", (5, 2), "any", variable_length=True)
    x, y, lengths = collate([(torch.ones(n, 2), (3, 0.5)) for n in (2, 5, 4)], spec)
    assert (tuple(x.shape), lengths.tolist()) == ((3, 5, 2), [2, 5, 4])
    assert [part.tolist() for part in y] == [[3, 3, 3], [0.5, 0.5, 0.5]]
    _, y, _ = collate([(torch.ones(n, 2), torch.ones(n)) for n in (2, 4)], spec)
    assert y.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]  # a tensor is padded
    _, y, _ = collate([(torch.ones(n, 2), [tensor(3), tensor(0.5)]) for n in (2, 4)], spec)
    assert [part.tolist() for part in y] == [[3, 3], [0.5, 0.5]]  # a list of tensors, too


@pytest.mark.parametrize(
    ("target", "numbers", "expected"),
    [
        ("class_per_step", [(1,), (0, 2)], [[1, PADDING], [0, 2]]),
        ("vector", [(1.0, 2.0), (0.0, 0.5)], [[1, 2], [0, 0.5]]),
    ],
)
def test_a_tuple_of_numbers_is_one_target_where_lengths_vary(target: Any, numbers: Any, expected: Any) -> None:
    spec = DataSpec("sequence", (5, 2), target, 3 if target == "class_per_step" else 2, variable_length=True)
    _, y, _ = collate([(torch.ones(n, 2), label) for n, label in enumerate(numbers, 1)], spec)
    assert y.tolist() == expected


@pytest.mark.parametrize("base", [TensorDataModule, LightningDataModule])
@pytest.mark.parametrize("kind", [property, cached_property])
def test_a_mistake_in_a_spec_is_one_line_and_no_missing_spec(base: Any, kind: Any) -> None:
    class Broken(base):
        spec = kind(lambda self: DataSpec("image", self.shape, "class", 2))

    message = refusal(described, Broken()) if base is TensorDataModule else described(Broken()).why_no_spec
    assert message == "data: Broken.spec fails: AttributeError: 'Broken' object has no attribute 'shape'"
