"""A LightningModule on data without a spec predicts, is exported and timed; what it lacks is named in one line."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pandas as pd
import pytest
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader

from batchscope.data.augment import Augment
from batchscope.data.datamodule import TensorDataModule
from batchscope.data.spec import DataSpec
from batchscope.inference.export import export
from batchscope.inference.latency import measure_latency
from batchscope.inference.load import Trained, untrained
from batchscope.inference.predict import predict, write_predictions
from batchscope.inference.samples import samples_of, split_batch
from batchscope.options.groups import use_config_dir
from batchscope.sweep.passes import Limits
from tests.support.command_lines import composed, refusal
from tests.support.third_party_modules import Stranger, loader

X, VALIDATED = (torch.cat([x for x, _ in loader(samples)]) for samples in (24, 16))  # (24, 4) and (16, 4)


class Points(lightning.LightningDataModule):
    """Points with their sums; the predict loader serves points alone."""

    def train_dataloader(self) -> DataLoader:
        return loader(80, 8)

    def val_dataloader(self) -> DataLoader:
        return loader(16, 8)

    def test_dataloader(self) -> DataLoader:
        return loader(24, 8)

    def predict_dataloader(self) -> DataLoader:
        return DataLoader(X[:10], batch_size=4)


class Named(Points):
    """Has no test set, and batches that are dicts."""

    test_dataloader = lightning.LightningDataModule.test_dataloader
    predict_dataloader = lightning.LightningDataModule.predict_dataloader

    def val_dataloader(self) -> list[DataLoader]:
        return [DataLoader([{"y": x.sum(), "point": x} for x in X[:16]], batch_size=8)] * 2


class Batch:
    """A batch of a class of the user's own."""

    def __init__(self, samples: list[Tensor]) -> None:
        self.points = torch.stack(samples)


class Wrapped(Points):
    def test_dataloader(self) -> DataLoader:
        return DataLoader(X, batch_size=8, collate_fn=Batch)


class Pairs(torch.utils.data.BatchSampler):
    """A DataLoader without the argument `sampler`, by which Lightning rebuilds it."""

    def __init__(self, samples: int) -> None:
        super().__init__(range(samples), 2, False)


class Paired(Points):
    def test_dataloader(self) -> DataLoader:
        return DataLoader(X, batch_sampler=Pairs(len(X)))


class Tutorial(Named):
    """Makes its validation set in `setup("fit")`, and has no test set."""

    def setup(self, stage: str) -> None:
        if stage == "fit":
            self.validation = DataLoader([{"y": x.sum(), "point": x} for x in X[:16]], batch_size=8)

    def val_dataloader(self) -> DataLoader:
        return self.validation


class Specified(Points):
    """Has a spec."""

    spec = DataSpec("tensor", (4,), "vector", 1)


class Plain(Stranger):
    """Answers points, and has no `predict_step`."""

    def forward(self, point: Tensor) -> Tensor:
        return self.layer(point)


class Theirs(Plain):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        points = batch[0] if isinstance(batch, list) else batch
        sums = self(points)[:, 0]
        return {"sum": sums, "both": torch.stack([sums, -sums], dim=1)}


class Generator(Stranger):
    """Its forward takes something else than a batch."""

    def forward(self, noise: Tensor) -> Tensor:
        return self.layer(torch.cat([noise, noise], dim=1))


class Late(Plain):
    """Makes its layer in `configure_model`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = None

    def configure_model(self) -> None:
        if self.layer is None:
            self.layer = torch.nn.Linear(4, 1)


CLASSES = (Points, Named, Tutorial, Wrapped, Paired, Specified, Plain, Theirs, Generator, Late)


@pytest.fixture(scope="module")
def conf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configs of the classes above, in one folder for all tests, so that each is composed once."""
    folder = tmp_path_factory.mktemp("conf")
    for cls in CLASSES:
        file = folder / ("data" if issubclass(cls, Points) else "model") / f"{cls.__name__.lower()}.yaml"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"_target_: {__name__}.{cls.__name__}\n")
    return folder


@pytest.fixture
def make(conf: Path, configs: None) -> Callable[..., Trained]:
    """A function that builds a module with its initial weights, on data."""
    use_config_dir(str(conf))

    def make(model: str = "theirs", data: str = "points") -> Trained:
        lightning.seed_everything(0, verbose=False)
        return untrained(composed(f"model={model}", f"data={data}", "trainer.accelerator=cpu"))

    return make


def sums(trained: Trained, points: Tensor) -> np.ndarray:
    with torch.no_grad():
        return trained.network(points)[:, 0].numpy()


# --- predict ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "points"), [("predict", X[:10]), ("test", X), ("val", VALIDATED)])
def test_it_answers_by_its_own_step_to_the_loader_of_a_split(source: str, points: Tensor, make, tmp_path: Path) -> None:
    module = make()
    predictions = predict(module, source)
    write_predictions(predictions, tmp_path / "answers.csv")
    table = pd.read_csv(tmp_path / "answers.csv")
    assert [*table] == ["sample", "sum", "both_0", "both_1"]
    np.testing.assert_allclose(table["sum"], sums(module, points), rtol=1e-5)
    samples = len(points)
    write_predictions(predictions, tmp_path / "answers.npz")
    with np.load(tmp_path / "answers.npz") as arrays:
        assert {name: arrays[name].shape for name in arrays} == {
            "sample": (samples,), "sum": (samples,), "both": (samples, 2),
        }  # fmt: skip


@pytest.mark.parametrize("how", [{"batch_size": 7, "drop_last": True}, {"batch_size": None}])
def test_each_sample_of_a_test_has_an_answer(how: dict, make, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [(X[:5],), (X[5:],)] if how == {"batch_size": None} else [(x,) for x in X]
    monkeypatch.setattr(Points, "test_dataloader", lambda self: DataLoader(samples, **how))
    module = make("plain")
    np.testing.assert_allclose(predict(module, "test").arrays["output"][:, 0], sums(module, X), rtol=1e-5)


@pytest.mark.parametrize("source", ["test", "predict"])
def test_a_loader_may_get_its_arguments_by_position(source: str, make, monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(self) -> list[DataLoader]:
        return [DataLoader(X, 7, False), DataLoader(X[:3], batch_size=2)]

    monkeypatch.setattr(Points, f"{source}_dataloader", serve)
    module = make("plain")
    points = torch.cat([X, X[:3]])
    np.testing.assert_allclose(predict(module, source).arrays["output"][:, 0], sums(module, points), rtol=1e-5)


def test_the_limit_of_a_split_leaves_fewer_samples(make) -> None:
    module = make()
    module.config["trainer"]["limit_test_batches"] = 1
    assert len(predict(module, "test").names) == 8


# Data and a split, and the points that a bare `forward` gets from the batches.
INPUTS = {
    "points predict": X[:10],  # points alone
    "points test": X,  # with their sums
    "named val": torch.cat([X[:16]] * 2),  # by name, of two loaders
    "specified test": X,
    "specified predict": X[:10],
}


@pytest.mark.parametrize("words", INPUTS)
def test_without_a_step_of_its_own_its_forward_gets_what_it_takes_of_a_batch(words: str, make) -> None:
    data, source = words.split()
    module = make("plain", data)
    for _ in range(2):
        answers = predict(module, source).arrays["output"][:, 0]
        np.testing.assert_allclose(answers, sums(module, INPUTS[words]), rtol=1e-5)


def test_a_validation_that_is_made_for_the_fit_is_there_to_predict_and_to_export(make) -> None:
    assert len(predict(make("plain", "tutorial"), "val").names) == 16
    assert samples_of(make("plain", "tutorial"), 5).of == "val samples"


def test_a_forward_that_names_no_field_of_a_batch_gets_it_whole(make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plain, "forward", lambda self, batch: self.layer(batch["point"]))
    assert len(predict(make("plain", "named"), "val").arrays["output"]) == 32


def test_without_a_step_of_its_own_it_answers_a_users_own_file(make, tmp_path: Path) -> None:
    module = make("plain", "specified")
    np.savez(tmp_path / "own.npz", x=X.numpy())
    answers = predict(module, str(tmp_path / "own.npz")).arrays["output"][:, 0]
    np.testing.assert_allclose(answers, sums(module, X), rtol=1e-5)


def test_a_forward_that_does_not_take_the_inputs_of_a_batch_is_one_line(make) -> None:
    line = "input: Generator has no predict_step(batch, batch_idx), and its forward does not take the inputs of a batch"
    assert refusal(predict, make("generator"), "test").startswith(f"{line}: RuntimeError")


TAKES = "and predict takes a tensor with a row for each sample, or a dict or a tuple of them"
# What a step returns for points, and the columns of the table, or the beginning of the refusal.
ANSWERS: dict[str, tuple[Callable[[Tensor], Any], Any]] = {
    "one number": (lambda x: x[:, 0], ["output"]),
    "half precision": (lambda x: x[:, 0].bfloat16(), ["output"]),
    "several": (lambda x: (x[:, 0], x[:, :2]), ["output_0", "output_1_0", "output_1_1"]),
    "texts": (lambda x: {"file": ["a"] * len(x)}, ["file"]),
    "a mean": (lambda x: x.mean(), f"model: Theirs answers {{'output': ()}}, {TAKES}"),
    "nothing": (lambda x: None, f"model: Theirs answers {{'output': 'an object'}}, {TAKES}"),
    "ragged lists": (lambda x: [x[:2, 0], x[:3, 0]], f"model: Theirs answers {{'output': 'an object'}}, {TAKES}"),
    "parts of different lengths": (lambda x: (x[:, 0], x[:3, 0]), "model: Theirs answers {'output_0': (8,), "),
    "images for a table": (lambda x: x.view(-1, 2, 2), "output: takes an .npz file: 'output' has the shape (24, 2, 2)"),
    "the names": (lambda x: {"sample": x[:, 0]}, "model: it answers an array called 'sample', which is what the names "),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_what_a_step_may_return(name: str, make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer, expected = ANSWERS[name]
    monkeypatch.setattr(Theirs, "predict_step", lambda self, batch, batch_idx: answer(batch[0]))

    def written() -> pd.DataFrame:
        write_predictions(predict(make(), "test"), tmp_path / "answers.csv")
        return pd.read_csv(tmp_path / "answers.csv")

    if isinstance(expected, str):
        assert refusal(written).startswith(expected)
    else:
        assert [*written()] == ["sample", *expected]


def test_a_loader_that_lightning_cannot_build_anew_is_named_in_one_line(make) -> None:
    message = refusal(predict, make(data="paired"), "test")
    assert message.startswith(
        "input: Lightning cannot build the DataLoader of 'test' anew, as it does for a prediction: TypeError"
    )


def test_what_its_data_do_not_serve_is_one_line(make, tmp_path: Path) -> None:
    for source, missing in {"predict": "predict_dataloader", "test": "test set"}.items():
        message = f"input: got '{source}', and Named has no {missing}"
        assert refusal(predict, make(data="named"), source) == message
    message = "data: Points has no spec, a property that returns a batchscope.data.DataSpec, so nobody knows what "
    assert refusal(predict, make(), str(tmp_path)).startswith(message)


# --- inputs for an export, and for latencies -------------------------------------------------------------------------


@pytest.mark.parametrize(("data", "origin"), [("points", "test samples"), ("named", "val samples")])
def test_inputs_are_what_forward_takes_of_a_batch(data: str, origin: str, make) -> None:
    samples = samples_of(make(data=data), 5)
    assert torch.equal(samples.inputs, X[:5])
    assert (len(samples), samples.of) == (5, origin)


@pytest.mark.parametrize(
    "forward",
    [lambda self, scale=None, point=None: self.layer(point), lambda self, *, point: self.layer(point)],
)
def test_an_argument_that_is_not_the_first_is_given_by_its_name(forward, make, monkeypatch) -> None:
    monkeypatch.setattr(Plain, "forward", forward)
    assert torch.equal(samples_of(make("plain", "named"), 5).named["point"], X[:5])
    assert len(predict(make("plain", "named"), "val").arrays["output"]) == 32


SERVED = {
    "several": (CombinedLoader([loader(24, 8), loader(16, 8)], "sequential"), X, "test samples"),
    "an empty list": ([], VALIDATED, "val samples"),
    "nothing": (None, VALIDATED, "val samples"),
    "no batch": (DataLoader([], 8), VALIDATED, "val samples"),
}


@pytest.mark.parametrize(("served", "points", "origin"), SERVED.values(), ids=SERVED)
def test_inputs_are_those_of_the_first_loader_that_there_is(
    served: Any, points: Tensor, origin: str, make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Points, "test_dataloader", lambda self: served)
    samples = samples_of(make("plain"), 5)
    assert torch.equal(samples.inputs, points[:5])
    assert samples.of == origin


def test_inputs_are_what_the_hooks_of_a_transfer_make_of_a_batch(make, monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(hooked: Any, batch: Any, dataloader_idx: int) -> Any:
        assert trained.module.trainer.testing is False
        return [2 * part for part in batch]

    trained = make("plain")

    monkeypatch.setattr(Plain, "on_after_batch_transfer", doubled, raising=False)
    assert torch.equal(samples_of(trained, 5).inputs, 2 * X[:5])
    monkeypatch.setattr(Points, "on_before_batch_transfer", doubled, raising=False)
    assert torch.equal(samples_of(trained, 5).inputs, 4 * X[:5])


class Rows(TensorDataModule):
    """Image data with augmentation in training."""

    kind, name, spec = "image", "rows", DataSpec("image", (1, 1, 4), "class", 2)

    def load(self, split: str) -> tuple[Tensor, Tensor]:
        return X[:, None, None], torch.zeros(len(X)).long()


def test_the_hook_of_a_module_makes_the_inputs_of_data_that_augment_their_training(make, monkeypatch) -> None:
    def doubled(module: Any, batch: Any, dataloader_idx: int) -> Any:
        return [2 * batch[0], batch[1]]

    monkeypatch.setattr(Plain, "on_after_batch_transfer", doubled, raising=False)
    module = replace(make("plain"), data_info=Rows(augment=Augment(flip=True)))
    assert torch.equal(samples_of(module, 5).inputs[:, 0, 0], 2 * X[:5])


def test_a_hook_of_a_transfer_that_fails_is_one_line(make, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(hooked: Any, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        raise ValueError(f"no {device}")

    monkeypatch.setattr(Points, "transfer_batch_to_device", fails)
    module = make("plain")
    assert refusal(samples_of, module, 5).startswith(
        "data: transfer_batch_to_device of Points fails: ValueError: no cpu"
    )
    assert module.module._trainer is None


@pytest.mark.parametrize("example", [torch.ones(1, 2), (torch.ones(1, 2),), {"noise": torch.ones(1, 2)}])
def test_inputs_are_copies_of_the_example_of_a_module(example: Any, make) -> None:
    module = make("generator", "wrapped")
    module.network.example_input_array = example
    samples = samples_of(module, 64)
    assert torch.equal(samples.inputs, torch.ones(8, 2))
    assert samples.of == "rows of example_input_array"


HOW = "set self.example_input_array to what it takes, or give the data a spec"


def test_what_nobody_knows_of_its_inputs_is_one_line(make) -> None:
    message = f"model: nobody knows which tensors forward of Plain takes of test samples; {HOW}"
    assert refusal(samples_of, make("plain", "wrapped"), 4) == message
    message = f"model: forward of Generator does not take (8, 4) of test samples; {HOW}: RuntimeError"
    assert refusal(samples_of, make("generator"), 4).startswith(message)


def test_layers_that_a_hook_makes_are_there_without_a_checkpoint_too(make, limits: Limits) -> None:
    assert (measure_latency(make("late"), [1], limits).table["p50 ms"] > 0).all()


def test_it_is_exported_and_timed(make, tmp_path: Path, limits: Limits) -> None:
    module = make()
    samples = samples_of(module, 12).named
    assert len(samples["x"]) == 8  # the samples of the first batch
    assert export(module, "torch_export", tmp_path / "a.pt2", samples) < 1e-5
    torch.testing.assert_close(torch.export.load(tmp_path / "a.pt2").module()(X), module.network(X))
    assert export(module, "torch_export", tmp_path / "b.pt2", {"x": samples["x"][:1]}) < 1e-5
    torch.testing.assert_close(torch.export.load(tmp_path / "b.pt2").module()(X), module.network(X))
    assert (measure_latency(module, [1, 40], limits).table["p50 ms"] > 0).all()


def test_batches_without_a_target_are_inputs_by_the_names_of_the_spec() -> None:
    spec = DataSpec("tensor", (4,), "class", 2, fields=("pixels", "label"))
    batch = {"id": [1, 2], "pixels": X[:2]}
    assert split_batch(spec, batch, has_target=False)[0] is batch["pixels"]
    both = DataSpec("tensor", (4,), "class", 2, fields=("id", "pixels", "label"))
    assert split_batch(both, batch | {"more": 1}, has_target=False)[0] == {"id": [1, 2], "pixels": batch["pixels"]}
