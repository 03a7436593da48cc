"""A checkpoint predicts a split of its data, a folder of images or arrays; unreadable input is one line."""

import math
import os
import pickle
import resource
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import batchscope
from batchscope.checkpointing.checkpoint_file import load_checkpoint, write_checkpoint
from batchscope.cli.evaluate import evaluate
from batchscope.data.spec import PADDING, DataSpec
from batchscope.errors import UserError
from batchscope.inference.inputs import read_inputs
from batchscope.inference.load import DataInfo, Trained, restore, trainer_for, untrained
from batchscope.inference.predict import Predictions, predict, prediction_arrays, refuse_output, write_predictions
from batchscope.inference.samples import samples_of
from batchscope.options import CONFIG_DIR
from batchscope.options.groups import config_dir, use_config_dir
from batchscope.training.task import Task
from tests.support.command_lines import composed, refusal
from tests.support.own_data import write_config


def test_predictions_of_a_split_are_those_that_evaluate_counts(trained: Trained, checkpoint: Path, root: str) -> None:
    predictions = predict(trained, "test")
    assert len(predictions.arrays["output"]) == 100
    assert predictions.accuracy == pytest.approx(evaluate(checkpoint, [root])[1]["test/acc"], abs=1e-6)
    val = predict(trained, "val")
    assert len(val.arrays["output"]) == len(val.arrays["target"]) == 32


def test_a_task_answers_by_a_predict_step_of_its_own_that_gets_the_inputs_alone(trained: Trained, monkeypatch) -> None:
    """A subclass of Task may define such a step."""
    expected = predict(trained, "test")

    def step(self: Task, batch: Any, batch_idx: int) -> Any:
        (x,) = batch
        return {"output": -self(x)}

    monkeypatch.setattr(Task, "predict_step", step)
    predictions = predict(trained, "test")
    torch.testing.assert_close(predictions.arrays["output"], -expected.arrays["output"])
    assert np.array_equal(predictions.arrays["target"], expected.arrays["target"])
    monkeypatch.setattr(Task, "predict_step", lambda *arguments: {"scores": 1})
    message = "predict: the network answers a NoneType, and a prediction is one tensor"
    assert refusal(predict, trained, "test") == message


def test_batches_of_workers_hold_no_file_open(trained: Trained) -> None:
    expected = predict(trained, "test").arrays["target"]
    trained.data.pipeline, trained.data.num_workers = "workers", 1
    trained.data.batch_size, trained.module.is_of_zoo = 1, False
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 60, most))  # there are 100 batches
    try:
        assert np.array_equal(predict(trained, "test").arrays["target"], expected)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))


def test_data_that_serve_a_split_can_be_sent_to_workers(trained: Trained) -> None:
    """The `collate_fn` is sent, too, if it is a bound method."""
    predict(trained, "test")
    assert len(pickle.loads(pickle.dumps(trained.data)).predict_dataloader()) > 0


def test_the_process_is_set_up_as_for_a_training(trained: Trained, monkeypatch) -> None:
    keep = Mock()
    monkeypatch.setattr("batchscope.training.run.keep_freed_memory", keep)
    trainer_for(trained)
    assert keep.called
    assert (torch.tensor(2.0**-148) * 0.5).double().item() == 0


def test_a_split_of_other_data_than_those_of_the_training_is_said(trained: Trained, capsys: Any) -> None:
    predict(replace(trained, trained_on="mnist"), "test")
    predict(trained, "val")
    warning = "warning: the network was trained on mnist, and answers samples of rendered-digits\n"
    assert capsys.readouterr().err == warning


def test_limits_of_batches_leave_fewer_samples_and_are_named(trained: Trained, tmp_path: Path) -> None:
    np.savez(tmp_path / "samples.npz", x=samples_of(trained, 100).inputs.numpy())
    trained.config["trainer"] |= {"limit_predict_batches": 1}
    predictions = predict(trained, str(tmp_path / "samples.npz"))
    assert predictions.table()["sample"].tolist() == [str(i) for i in range(16)]
    assert predictions.note == "16 of 100 samples, by trainer.limit_predict_batches=1"
    trained.config["trainer"]["limit_val_batches"] = 0.5
    trained.data.batch_size, trained.module.is_of_zoo = 16, False  # two batches of a validation
    assert predict(trained, "val").note == "16 of 32 samples, by trainer.limit_val_batches=0.5"
    trained.config["trainer"]["limit_val_batches"] = 0
    assert refusal(predict, trained, "val") == "trainer.limit_val_batches: got 0, which predicts no batch"


def test_an_option_sets_the_batch_size_without_the_data(
    trained: Trained, checkpoint: Path, root: str, tmp_path: Path
) -> None:
    np.savez(tmp_path / "samples.npz", x=samples_of(trained, 100).inputs.numpy())
    options = [root, "trainer.accelerator=cpu", "+trainer.limit_predict_batches=1", "data.batch_size=8"]
    assert len(predict(restore(checkpoint, options, with_data=False), str(tmp_path / "samples.npz")).names) == 8


def test_samples_are_also_of_data_whose_setup_asks_the_trainer(trained: Trained, monkeypatch) -> None:
    data, setup = trained.data, trained.data.setup
    monkeypatch.setattr(data, "setup", lambda stage: setup(stage) if data.trainer.world_size == 1 else None)
    assert len(samples_of(trained, 2)) == 2


def pixels_of(trained: Trained) -> np.ndarray:
    """The test images of the digits as bytes `(N, 28, 28)`."""
    x, mean, std = samples_of(trained, 100).inputs, trained.spec.mean[0], trained.spec.std[0]
    return ((x[:, 0] * std + mean) * 255).round().byte().numpy()


def test_a_folder_of_images_has_the_same_answers_as_the_split(trained: Trained, tmp_path: Path) -> None:
    pixels = pixels_of(trained)
    (tmp_path / "a").mkdir()
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / "a" / f"{number:03}.png")
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "a" / "._000.png").write_bytes(b"\0\5\26\7")  # which macOS writes beside a file
    answers = predict(trained, str(tmp_path))
    assert "target" not in answers.arrays
    assert list(answers.names) == [f"a/{number:03}.png" for number in range(100)]
    torch.testing.assert_close(answers.arrays["output"], predict(trained, "test").arrays["output"], atol=1e-3, rtol=0)
    Image.fromarray(pixels[0]).resize((56, 56)).convert("RGB").save(tmp_path / "large.png")
    assert len(predict(trained, str(tmp_path / "large.png")).names) == 1


@pytest.mark.parametrize("are_bytes", [False, True])
def test_arrays_have_the_same_answers_as_the_split(are_bytes: bool, trained: Trained, tmp_path: Path) -> None:
    x = pixels_of(trained)[:, None] if are_bytes else samples_of(trained, 100).inputs.numpy()
    np.savez(tmp_path / "samples.npz", x=x)
    predictions, expected = (predict(trained, source) for source in (str(tmp_path / "samples.npz"), "test"))
    tolerance = 1e-3 if are_bytes else 1e-5
    torch.testing.assert_close(predictions.arrays["output"], expected.arrays["output"], atol=tolerance, rtol=0)


def test_a_checkpoint_tells_of_which_type_the_inputs_of_its_training_were(trained: Trained) -> None:
    assert trained.dtype == torch.float32


@pytest.mark.parametrize("source", ["photos", "photos.npz"])
def test_a_network_that_was_trained_on_bytes_gets_them_as_they_are(
    source: str, trained: Trained, tmp_path: Path, monkeypatch
) -> None:
    pixels = np.arange(2 * 28 * 28).astype(np.uint8).reshape(2, 1, 28, 28)
    (tmp_path / "photos").mkdir()
    for number, image in enumerate(pixels):
        Image.fromarray(image[0]).save(tmp_path / "photos" / f"{number}.png")
    np.savez(tmp_path / "photos.npz", x=pixels)
    monkeypatch.setattr(Task, "predict_step", lambda self, batch, batch_idx: {"output": batch[0].flatten(1)})
    predictions = predict(replace(trained, dtype=torch.uint8), str(tmp_path / source))
    assert np.array_equal(predictions.arrays["output"], pixels.reshape(2, -1))


def test_sequences_have_another_length_in_every_batch(reader: Trained) -> None:
    together = predict(reader, "test").arrays["output"]
    reader.data.batch_size = 1
    torch.testing.assert_close(predict(reader, "test").arrays["output"], together)


IMAGES = DataSpec("image", (1, 28, 28), "class", 10)
TOKENS = DataSpec("sequence", (9,), "class", 2, variable_length=True)
IDS = {"x": np.ones((12, 9), int)}
WRONG, STEPS = "x in '{}' has values ", "lengths in '{}' takes 12 integers from 1 to 9"
# the spec that the network reads, the arrays of a file, and the beginning of the refusal
ARRAYS: dict[str, tuple[DataSpec, dict[str, Any], str]] = {
    "too narrow": (IMAGES, {"x": np.zeros((3, 1, 28, 27))}, WRONG + "float64 of shape (3, 1, 28, 27), takes numbers (N, 1"),
    "bytes": (IMAGES, {"x": np.zeros((3, 28, 28), "uint8")}, WRONG + "uint8 of shape (3, 28, 28), takes numbers (N, 1, "),
    "none": (IMAGES, {"x": np.zeros((0, 1, 28, 28))}, WRONG + "float64 of shape (0, 1, 28, 28), takes "),
    "texts": (IMAGES, {"x": np.array(["a"])}, WRONG + "<U1 of shape (1,), takes numbers"),
    "objects": (IMAGES, {"x": np.array([{}], object)}, "'{}' cannot be read: "),
    "other names": (IMAGES, {"a": np.zeros(1)}, "'{}' has no array x"),
    "too long": (TOKENS, {"x": np.ones((12, 10), int)}, WRONG + "int64 of shape (12, 10), takes numbers (N, 9)"),
    "lengths of 0": (TOKENS, IDS | {"lengths": np.zeros(12, int)}, STEPS),
    "lengths behind the end": (TOKENS, IDS | {"lengths": np.full(12, 10)}, STEPS),
}  # fmt: skip


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_that_the_network_does_not_read_are_refused(name: str, tmp_path: Path) -> None:
    (spec, arrays, reason), file = ARRAYS[name], tmp_path / "samples.npz"
    np.savez(file, **arrays)
    line = refusal(read_inputs, file, spec)
    assert line.startswith(f"input: {reason.format(file)}"), line


def test_inputs_that_are_no_samples_are_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.npz").write_bytes(b"PK no archive")
    (tmp_path / "empty").mkdir()
    np.save(tmp_path / "array", np.zeros((3, 1, 28, 28)))
    (tmp_path / "array.npy").rename(tmp_path / "array.npz")
    for name, spec, reason in [
        ("nothing", IMAGES, "takes test, val, predict, a folder of images"),
        ("empty", IMAGES, "no image below"),
        ("broken.npz", IMAGES, "cannot be read"),
        ("array.npz", IMAGES, "cannot be read"),
        ("", DataSpec("sequence", (5, 2), "class", 3), "takes an .npz file with an array x"),
        ("", DataSpec("tensor", (5,), "class", 3, fields=("ids", "mask", "y")), "reads ids, mask: takes test, val or"),
    ]:
        assert reason in refusal(read_inputs, tmp_path / name, spec)


def test_images_that_cannot_be_read_are_refused_when_they_are(trained: Trained, tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"\x89PNG no image")
    Image.fromarray(np.full((28, 28), 30_000, np.uint16)).save(tmp_path / "deep.png")
    # Pillow calls 16 bits `I;16`, and its older versions `I`.
    for name, reason in {"broken.png": "", "deep.png": "ValueError: its values are of mode I"}.items():
        line = refusal(predict, trained, str(tmp_path / name))
        assert line.startswith(f"input: '{tmp_path / name}' cannot be read as an image: {reason}")


def test_numbers_that_the_network_does_not_compute_with_are_refused(trained: Trained, tmp_path: Path) -> None:
    np.savez(tmp_path / "samples.npz", x=np.zeros((3, 1, 28, 28), np.int64))
    line = refusal(predict, trained, str(tmp_path / "samples.npz"))
    assert line.startswith("input: SimpleCNN does not take these samples: RuntimeError")


@pytest.mark.parametrize(
    ("target", "output", "truth", "columns"),
    [
        ("class", [[0.0, 5.0]], [0], {"prediction": "b", "target": "a"}),
        ("value", [[1.5]], [2.0], {"prediction": 1.5, "target": 2.0}),
        ("vector", [[1.5, 2.0]], [[2.0, 0.5]], {"prediction_a": 1.5, "target_b": 0.5}),
        ("multilabel", [[1.5, -2.0]], [[1.0, 1.0]], {"prediction_a": 1, "prediction_b": 0, "target_b": 1}),
        ("class_per_step", [[[0.0, 5.0], [5.0, 0.0]]], [[1, 1]], {"prediction": "b a", "target": "b b"}),
        ("class_per_step", [[[0.0, 5.0], [5.0, 0.0]]], [[PADDING, 1]], {"prediction": "b a", "target": "- b"}),
        ("class_per_step", [[[0.0, 5.0], [5.0, 0.0]]], [[1, PADDING]], {"prediction": "b a", "target": "b"}),
    ],
)
def test_the_table_has_the_names_of_the_classes(target: Any, output: list, truth: list, columns: dict) -> None:
    spec = DataSpec("sequence", (2, 1), target, 1 if target == "value" else 2, classes=("a", "b"))
    predictions = Predictions(["0"], prediction_arrays(spec, torch.tensor(output), torch.tensor(truth)), spec)
    row = predictions.table().iloc[0].to_dict()
    assert {key: row[key] for key in columns} == columns


def test_one_logit_is_a_class_with_its_probability() -> None:
    spec = DataSpec("sequence", (2, 1), "class", 1, classes=("a", "b"))
    result = Predictions(["0", "1"], prediction_arrays(spec, torch.tensor([[2.0], [-2.0]]), torch.tensor([1, 1])), spec)
    assert result.table()["prediction"].tolist() == ["b", "a"]
    assert result.table()["probability"].tolist() == pytest.approx([1 / (1 + math.exp(-2))] * 2)
    assert result.accuracy == 0.5
    truth = prediction_arrays(spec, torch.tensor([[2.0]]), torch.tensor([1.0]))  # a float, as its loss takes it
    assert Predictions(["0"], truth, spec).table()["target"].tolist() == ["b"]


def test_steps_behind_the_end_of_a_sequence_have_no_answer(tmp_path: Path, configs: None) -> None:
    use_config_dir(str(write_config(tmp_path / "configs", "Lengths", "every_step: true")))
    words = ["data=own", "model=stacked_lstm", "trainer.accelerator=cpu", "data.num_workers=0", "data.batch_size=5"]
    network = untrained(composed(*words))
    table, first = predict(network, "test").table(), samples_of(network, 5)
    steps = {name: table[name].str.split().str.len() for name in ("prediction", "target")}
    assert steps["prediction"].tolist() == steps["target"].tolist()
    assert steps["prediction"].tolist()[:5] == first.lengths.tolist()
    np.savez(tmp_path / "samples.npz", x=first.inputs.numpy(), lengths=first.lengths.numpy())
    answers = predict(network, str(tmp_path / "samples.npz")).table()
    assert answers["prediction"].tolist() == table["prediction"].tolist()[:5]


def test_without_lengths_a_sequence_ends_where_its_classes_do(tmp_path: Path, configs: None, monkeypatch) -> None:
    use_config_dir(str(write_config(tmp_path / "configs", "Lengths", "every_step: true")))
    network = untrained(composed("data=own", "model=stacked_lstm", "trainer.accelerator=cpu", "data.num_workers=0"))
    expected, samples = predict(network, "test").table(), network.data.dataset("test")

    def padded(samples: list) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = ([torch.from_numpy(part) for part in parts] for parts in zip(*samples, strict=True))
        return pad_sequence(x, True), pad_sequence(y, True, PADDING)

    def loader(collate_fn: Any) -> Any:
        return lambda: DataLoader(samples, batch_size=len(samples), collate_fn=collate_fn)

    monkeypatch.setattr(network.data, "test_dataloader", loader(padded))
    assert predict(network, "test").table().equals(expected)
    monkeypatch.setattr(network.data, "predict_dataloader", loader(lambda samples: padded(samples)[0]))
    message = "input: the sequences vary in length, and a batch has no lengths; takes (inputs, lengths)"
    assert refusal(predict, network, "predict") == message


def test_the_name_of_a_file_may_be_any_bytes(tmp_path: Path) -> None:
    name, spec = os.fsdecode(b"\xff.png"), DataSpec("sequence", (2, 1), "value", 1)
    path = tmp_path / "answers.csv"
    write_predictions(Predictions([name], prediction_arrays(spec, torch.ones(1, 1), None), spec), path)
    assert path.read_bytes() == b"sample,prediction\n\xff.png,1.0\n"


def test_predictions_are_written_and_never_replaced(trained: Trained, tmp_path: Path) -> None:
    preds, csv, npz = predict(trained, "test"), tmp_path / "out" / "answers.csv", tmp_path / "answers.npz"
    write_predictions(preds, csv)
    table = pd.read_csv(csv, dtype=str)
    assert [*table] == ["sample", "prediction", "probability", "target"]
    assert (table["prediction"] == table["target"]).mean() == pytest.approx(preds.accuracy)
    assert refusal(refuse_output, csv, trained) == f"output: '{csv}' exists; give another name"
    (tmp_path / "link.csv").symlink_to(tmp_path / "nowhere" / "a.csv")
    assert refusal(refuse_output, tmp_path / "link.csv", trained).endswith("link.csv' exists; give another name")
    assert refusal(write_predictions, preds, csv / "a.csv").startswith(f"output: '{csv / 'a.csv'}' cannot be written: ")
    write_predictions(preds, npz)
    with np.load(npz) as arrays:
        shapes = {name: arrays[name].shape for name in arrays.files}
    assert shapes == {"sample": (100,), "output": (100, 10)} | dict.fromkeys(
        ("prediction", "probability", "target"), (100,)
    )


@pytest.mark.parametrize(
    ("target", "name", "text"),
    [
        ("class_per_pixel", "a.csv", "takes a name that ends in .npz: the target is class_per_pixel"),
        ("class", "a.txt", "takes a name that ends in .csv or .npz"),
    ],
)
def test_a_name_that_does_not_hold_the_answers_is_refused(target: Any, name: str, text: str, trained: Trained) -> None:
    retargeted = replace(trained, data_info=DataInfo(DataSpec("image", (1, 4, 4), target, 2), "own"))
    assert refusal(refuse_output, Path(name), retargeted) == f"output: got '{name}', {text}"


def test_a_loaded_model_is_a_network_in_evaluation_mode_and_the_process_is_as_it_was(
    checkpoint: Path, trained: Trained, tmp_path: Path, configs: None
) -> None:
    """The data may be missing: the checkpoint has the spec that the network reads."""
    use_config_dir(str(write_config(tmp_path / "of_run", "Lengths")))
    configs_before, filters_before = config_dir(), list(warnings.filters)
    batchscope.load_model(checkpoint, write_config(tmp_path / "of_teacher", "Lengths"))
    network = batchscope.load_model(checkpoint)
    assert (config_dir(), warnings.filters) == (configs_before, filters_before)
    assert not network.training
    assert network.spec == trained.spec
    with torch.inference_mode():
        assert network(torch.zeros(3, *network.spec.input_shape)).shape == (3, 10)


def test_a_model_is_loaded_by_the_yaml_files_as_they_are_now(checkpoint: Path, tmp_path: Path, configs: None) -> None:
    conf, file = write_config(tmp_path, "Lengths"), load_checkpoint(checkpoint)
    file["batchscope"]["config"]["task"]["loss"] = {"_target_": "torch.nn.NLLLoss"}
    write_checkpoint(file, path := tmp_path / "a.ckpt")
    assert refusal(batchscope.load_model, path, conf).startswith("task.loss._target_: is 'torch.nn.NLLLoss'")
    (conf / "task").mkdir()
    (conf / "task" / "nll.yaml").write_text("loss:\n  _target_: torch.nn.NLLLoss\n")
    assert batchscope.load_model(path, conf)


def test_a_model_is_loaded_in_another_folder_than_that_of_a_relative_config_dir(checkpoint: Path, monkeypatch) -> None:
    monkeypatch.setenv(CONFIG_DIR, "nowhere")
    assert batchscope.load_model(checkpoint)
    assert os.environ[CONFIG_DIR] == "nowhere"


def test_a_loaded_model_may_have_a_property_called_spec(checkpoint: Path, trained: Trained, monkeypatch) -> None:
    monkeypatch.setattr(type(trained.network), "spec", property(lambda network: "its own"), raising=False)
    assert batchscope.load_model(checkpoint).spec == "its own"


def test_callbacks_and_loggers_of_the_run_are_not_looked_at(checkpoint: Path, tmp_path: Path) -> None:
    file = load_checkpoint(checkpoint)
    file["batchscope"]["config"]["logger"]["mine"] = {"_target_": "nowhere"}
    write_checkpoint(file, tmp_path / "a.ckpt")
    assert batchscope.load_model(tmp_path / "a.ckpt")


SPEC = {"kind": "image", "input_shape": (1, 2, 3), "target": "class", "num_outputs": 2}


@pytest.mark.parametrize(
    "spec",
    [
        5,
        {"kind": "image"},
        SPEC | {"input_shape": (1, 2, -3)},
        SPEC | {"num_outputs": True},
        SPEC | {"num_outputs": 10**25},
        SPEC | {"classes": ["\x1b"]},
        SPEC | {"classes": {"a": 1}},
        SPEC | {"mean": "abc", "std": "abc"},
        SPEC | {"mean": [0.5], "std": []},
        SPEC | {"mean": [0, 0], "std": [1, 1]},
        SPEC | {"more": 1},
    ],
)
def test_a_damaged_spec_in_a_file_is_refused(spec: Any) -> None:
    assert DataSpec(**SPEC).num_outputs == 2
    with pytest.raises((TypeError, ValueError, UserError)):
        DataSpec(**spec)
