"""A mistake in data is one line that names the split, the sample and what is accepted; `…` stands for any text."""

import re
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import IterableDataset

from batchscope.data.augment import Augment
from batchscope.data.base import DataModule
from batchscope.data.plain import described
from batchscope.data.spec import PADDING, DataSpec
from tests.data.support import InMemory, Own, inputs, loaded
from tests.data.test_dataset import Collated
from tests.support.command_lines import composed, refusal

IMAGE = numpy.zeros((1, 8, 8), "float32")
RIGHT = [(IMAGE, 0)] * 20
LENGTHS = DataSpec("sequence", (9, 2), "class", 2, variable_length=True)
ANY = DataSpec("image", (1, 8, 8), "any")


class Failing(list):
    """Samples whose number 7 fails to load, singly or together."""

    def __getitem__(self, index: Any) -> Any:
        return IMAGE.shape[9] if index == 7 else super().__getitem__(index)


class Lacking(list):
    """Samples of which number 7 finds no memory."""

    def __getitem__(self, index: Any) -> Any:
        if index == 7:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory")
        return super().__getitem__(index)


class FailingTogether(Failing):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Streamed(IterableDataset):
    def __iter__(self) -> Any:
        yield RIGHT[0]


def samples(wrong: Any, spec: DataSpec = Own.spec, right: Any = (IMAGE, 0)) -> Callable[[], Any]:
    """A function that reads the batches of 20 samples whose number 7 is wrong."""
    return lambda: inputs(Own([right] * 7 + [wrong] + [right] * 12, spec, batch_size=20))


def collated(wrong: Callable[[list[Any], Any], Any]) -> Callable[[], Any]:
    """A function that reads the batches of a `collate_fn` that spoils a batch."""

    class Wrong(Collated):
        def collate_fn(self, samples: list[Any]) -> Any:
            return wrong(samples, super().collate_fn(samples))

    return lambda: inputs(Wrong(num_workers=0))


def augmented(spec: DataSpec, **options: Any) -> Callable[[], Any]:
    return lambda: described(Own([], spec, augment=Augment(**options)))


def fields(*names: str) -> Callable[[], Any]:
    return lambda: DataSpec("image", (1, 8, 8), "class", 4, fields=names)


SEVEN = "data: a sample of number 7 of own's train split"
WRONG, FITS_NOT = f"{SEVEN} is not what the spec says:", f"{SEVEN} fits in no batch:"
NOT_LOADED = "data: sample number 7 of own's train split cannot be loaded: IndexError: tuple index out of range (…)"
SPLIT = "data: own's train split is not what the spec says:"
COLLATED = "data: the batch that collate_fn makes of number … of own-tokens's train split is not what the spec says:"
FIELDS = "takes the names of the inputs and, at the end, of the target, each once; 'lengths' is taken"
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    # a sample
    "not loaded": (lambda: inputs(Own(Failing(RIGHT), batch_size=20)), NOT_LOADED),
    "not loaded, in a worker": (lambda: inputs(Own(Failing(RIGHT), batch_size=20, num_workers=1)), NOT_LOADED),
    "not loaded together": (lambda: inputs(Own(FailingTogether(RIGHT), batch_size=20)), NOT_LOADED),
    "a shape": (
        samples((IMAGE[:, 1:], 0)), f"{WRONG} its inputs have the shape (1, 7, 8), and the spec says (1, 8, 8)"
    ),
    "a label": (samples((IMAGE, 4)), f"{WRONG} it has the label 4, and the classes are 0 to 3"),
    "a label below 0": (samples((IMAGE, -1)), f"{WRONG} it has the label -1, and the classes are 0 to 3"),
    "a label of one logit": (
        samples((IMAGE, 2), DataSpec("image", (1, 8, 8), "class", 1)),
        f"{WRONG} it has the label 2, and the classes are 0 to 1",
    ),
    "a label that is no class": (
        samples((IMAGE, 0.5)),
        f"{FITS_NOT} TypeError: its target is of torch.float64, and the spec says that it is a class (…",
    ),
    "a text": (
        samples((IMAGE, "a")), f"{FITS_NOT} TypeError: its target is a str, and has to be a number or a tensor (…"
    ),
    "no target": (samples((IMAGE,)), f"{WRONG} it has 1 part, and the spec names 'x' and 'y'"),
    "nothing": (samples(None), f"{WRONG} it has the type NoneType, and the spec names 'x' and 'y'"),
    "other fields": (
        samples({"x": IMAGE, "z": 0}), f"{WRONG} it has the fields 'x', 'z', and the spec names 'x' and 'y'"
    ),
    "no steps": (
        samples((numpy.zeros((0, 2)), 0), LENGTHS, (numpy.zeros((3, 2)), 0)),
        f"{WRONG} a sequence of it has no steps, and a model reads the last one",
    ),
    "too many steps": (
        samples((numpy.zeros((10, 2)), 0), LENGTHS, (numpy.zeros((3, 2)), 0)),
        f"{WRONG} its sequences have the shape (10, 2), and the spec says at most 9 steps of (2,)",
    ),
    "a length beyond the steps": (
        samples((numpy.zeros((3, 2)), 0, 4), LENGTHS, (numpy.zeros((3, 2)), 0)),
        f"{FITS_NOT} ValueError: it has the length 4, and 3 steps (…",
    ),
    # a split
    "no target in memory": (
        lambda: inputs(InMemory((torch.zeros(4, 1, 8, 8),))),
        f"{SPLIT} it has 1 part, and the spec names 'x' and 'y'",
    ),
    "labels in memory": (
        lambda: inputs(InMemory((torch.zeros(1_003, 1, 8, 8), torch.arange(1_003)))),
        f"{SPLIT} it has the label 4, and the classes are 0 to 3",
    ),
    "a shape in memory": (
        lambda: inputs(InMemory((torch.zeros(4, 1, 7, 8), torch.zeros(4, dtype=torch.long)))),
        f"{SPLIT} its inputs have the shape (1, 7, 8), and the spec says (1, 8, 8)",
    ),
    "arrays in memory": (
        lambda: inputs(InMemory((numpy.zeros((4, 1, 8, 8)), numpy.zeros(4)))),
        f"{SPLIT} its 'x' is a ndarray, and has to be a tensor",
    ),
    "fewer labels in memory": (
        lambda: inputs(InMemory((torch.zeros(4, 1, 8, 8), torch.zeros(3)))),
        f"{SPLIT} its 'x' has the shape (4, 1, 8, 8), and its target is of 3 samples",
    ),
    "several targets in memory": (
        lambda: inputs(InMemory((torch.zeros(4, 1, 8, 8), {"a": torch.zeros(4)}), ANY)),
        "data: own has more than tensors, which a DataModule serves and it does not",
    ),
    **{
        f"{case} in memory": (
            lambda own=own: inputs(InMemory((torch.zeros(3, 9, 2), torch.zeros(3, dtype=torch.long), *own), LENGTHS)),
            f"{SPLIT} {reason}",
        )
        for case, own, reason in [
            ("no lengths", [], "it has no 'lengths', and the spec says that they vary"),
            ("a length of 0", [torch.tensor([9, 0, 3])], "a sequence of it has no steps, and a model reads the last…"),
            ("a length beyond", [torch.tensor([9, 1, 12])], "it has the length 12, and its sequences have 9 steps"),
            ("fewer lengths", [torch.tensor([9])], "its 'lengths' have to be whole numbers in a tensor of the sha…"),
        ]
    },
    "a dataset that fails": (
        lambda: inputs(Own(lambda: {}["x"])),
        "data: the train split of own cannot be loaded: KeyError: 'x' (test_refusals.py:…)",
    ),
    **{
        f"a dataset that is {type(wrong).__name__}": (
            lambda wrong=wrong: inputs(Own(lambda: wrong)),
            f"data: the train split of own cannot be loaded: TypeError: object of type '{type(wrong).__name__}' has no len() (…",
        )
        for wrong in (None, Streamed())
    },
    "a file that is not there": (
        lambda: inputs(Own(lambda: numpy.load("nowhere.npy"))),
        "data: the train split of own cannot be loaded: FileNotFoundError: … 'nowhere.npy' (test_refusals.py:…)",
    ),
    "no samples": (lambda: inputs(Own([])), "data: own has no samples in its train split"),
    # a batch of a collate_fn
    "a collate_fn that fails": (
        collated(lambda samples, batch: samples[0]["nothing"]),
        "data: collate_fn fails for number … of own-tokens's train split: KeyError: 'nothing' (test_refusals.py:…)",
    ),
    "no batch": (
        collated(lambda samples, batch: None),
        f"{COLLATED} it has the type NoneType, and the spec names 'input_ids', 'attention_mask' and 'label'",
    ),
    "a list": (
        collated(lambda samples, batch: batch | {"label": [0]}),
        f"{COLLATED} its 'label' is a list, and has to be a tensor",
    ),
    "another number of samples": (
        collated(lambda samples, batch: batch | {"attention_mask": torch.ones(99, 9)}),
        f"{COLLATED} its 'attention_mask' has the shape (99, 9), and its target is of 1 samples",
    ),
    "a batch of none": (
        collated(lambda samples, batch: {name: part[:0] for name, part in batch.items()}),
        f"{COLLATED.partition(' is not')[0]} has no samples",
    ),
    "a target of another shape": (
        collated(lambda samples, batch: batch | {"label": torch.zeros(len(samples), 3)}),
        f"{COLLATED} its targets have the shape (3,), and a target that is class has ()",
    ),
    "a length beyond a batch": (
        collated(lambda samples, batch: batch | {"lengths": torch.full((len(samples),), 10)}),
        f"{COLLATED} it has the length 10, and its sequences have … steps",
    ),
    "a length that is no whole number": (
        collated(lambda samples, batch: batch | {"lengths": torch.full((len(samples),), 2.5)}),
        f"{COLLATED} its 'lengths' have to be whole numbers in a tensor of the shape (1,)",
    ),
    # a spec
    "one field": (fields("x"), f"data: DataSpec.fields: got ('x',), {FIELDS}"),
    "a field twice": (fields("x", "x"), f"data: DataSpec.fields: got ('x', 'x'), {FIELDS}"),
    "a field of ours": (fields("x", "lengths"), f"data: DataSpec.fields: got ('x', 'lengths'), {FIELDS}"),
    "two words": (fields("an input", "y"), f"data: DataSpec.fields: got ('an input', 'y'), {FIELDS}"),
    "a number for a shape": (
        lambda: DataSpec("image", 5, "class", 4), "data: DataSpec.input_shape: got 5, takes a tuple",
    ),
    "nothing for fields": (
        lambda: DataSpec("image", (1, 8, 8), "class", 4, fields=None), "data: DataSpec.fields: got None, takes a tuple",
    ),
    "a target": (
        lambda: DataSpec("image", (1, 8, 8), "label", 4),
        "data: DataSpec.target: got 'label', takes class, … input or any. Did you mean 'multilabel'?",
    ),
    "an image without channels": (
        lambda: DataSpec("image", (28, 28), "class", 4),
        "data: DataSpec.input_shape: got (28, 28), takes (C, H, W) of an image",
    ),
    "no spec": (
        lambda: described(type("Forgotten", (DataModule,), {"name": "forgotten"})()),
        "data: Forgotten has no spec: a property that returns a batchscope.data.DataSpec",
    ),
    "a training loader of its own": (
        lambda: described(type("Weighted", (Own,), {"train_dataloader": lambda self: []})([])),
        "data: Weighted has a train_dataloader of its own: derive it from LightningDataModule",
    ),
    # augmentation
    **{
        f"a {option} beyond the image": (
            augmented(DataSpec("image", (1, 9, 6), "class", 2), **{option: 6}),
            f"data.augment.{option}: got 6, takes less than 6: the images of own have 9×6 pixels",
        )
        for option in ("shift", "crop")
    },
    "changes of rows that have a class": (
        augmented(DataSpec("image", (1, 9, 6), "class_per_step", 2), flip=True),
        "data.augment: moves pixels, and own has a class for each row of an image, which would stay",
    ),
    "changes of images whose target may hold places": (
        augmented(ANY, flip=True), "data.augment: moves pixels, and the target of own is any, which would stay",
    ),
    "changes of sequences": (augmented(LENGTHS, flip=True), "data.augment: takes images, and own has sequence data"),
    **{
        f"data.augment.{option}": (lambda option=option: composed(f"data.augment.{option}"), f"data.augment.{reason}")
        for option, reason in {
            "shift=-1": "shift: got -1, takes a whole number of at least 0.…",
            "rotation=200": "rotation: got 200, takes a number from 0 to 180.…",
            "rotate=5": "rotate: no such option. Did you mean 'rotation'?…",
        }.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("wrong", REFUSED)
def test_what_is_wrong_is_one_line(wrong: str) -> None:
    call, expected = REFUSED[wrong]
    assert re.fullmatch(".*".join(map(re.escape, expected.split("…"))), line := refusal(call)), line


def test_what_is_nearly_wrong_is_accepted() -> None:
    augmented(DataSpec("image", (1, 9, 6), "class", 2), shift=5, crop=5)()
    augmented(LENGTHS)()
    steps = DataSpec("sequence", (4, 2), "class_per_step", 2, variable_length=True)
    padded = torch.tensor([[0, 1, PADDING, PADDING]] * 3)
    loaded(InMemory((torch.zeros(3, 4, 2), padded, torch.tensor([2, 2, 2])), steps))
    DataSpec("image", (1, 8, 8), "input", fields=("x",))


def test_no_sample_is_at_fault_where_a_worker_gets_no_shared_memory() -> None:
    def refuse(samples: list[Any], batch: Any) -> Any:
        raise RuntimeError(
            "unable to allocate shared memory(shm) for file </torch_1_2_0>: No space left on device (28)"
        )

    with pytest.raises(RuntimeError, match="^unable to allocate shared memory"):
        collated(refuse)()


def test_a_lack_of_memory_is_no_mistake_in_the_data() -> None:
    def lack(*_: Any) -> Any:
        return Lacking(RIGHT)[7]

    is_lack = pytest.raises(RuntimeError, match="^.enforce fail")
    with is_lack:
        inputs(Own(Lacking(RIGHT), batch_size=20))
    with is_lack:
        collated(lack)()
    with is_lack:
        loaded(Own(lack))
