"""A checkpoint answers a split of its data, a folder of images and arrays; what it cannot read is refused in one line."""

import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

import batchscope
from batchscope.cli.evaluate import evaluate
from batchscope.data.spec import DataSpec, spec_from
from batchscope.errors import UserError
from batchscope.inference.inputs import read_inputs
from batchscope.inference.load import Trained, untrained
from batchscope.inference.predict import Predictions, predict, samples_of, write_predictions
from batchscope.options.compose import check_command_line
from batchscope.options.groups import config_dir, use_config_dir
from tests.support.own_data import write_config


def pixels_of(trained: Trained) -> tuple[np.ndarray, np.ndarray]:
    """The test images of the digits as bytes `(N, 28, 28)`, and their labels."""
    data = trained.data
    data.setup("test")
    x, y = data.tensors("test")
    mean, std = trained.spec.mean[0], trained.spec.std[0]
    return ((x[:, 0] * std + mean) * 255).round().byte().numpy(), y.numpy()


def test_predictions_of_the_test_set_are_those_that_evaluate_counts(
    trained: Trained, checkpoint: Path, root: str
) -> None:
    found = predict(trained, "test")
    assert len(found.output) == 100
    assert found.accuracy == pytest.approx(evaluate(checkpoint, [root])[1]["test/acc"], abs=1e-6)


def test_the_validation_set_can_be_asked_for(trained: Trained) -> None:
    found = predict(trained, "val")
    assert len(found.output) == 32
    assert found.target is not None


def test_limits_of_batches_leave_fewer_samples_or_are_named(trained: Trained, tmp_path: Path) -> None:
    np.savez(tmp_path / "samples.npz", x=pixels_of(trained)[0])
    limits = trained.config["trainer"]
    limits |= {"limit_predict_batches": 1, "limit_val_batches": 0}
    assert predict(trained, str(tmp_path / "samples.npz")).table()["sample"].tolist() == [str(i) for i in range(16)]
    with pytest.raises(UserError, match="trainer.limit_val_batches: got 0, which predicts no batch"):
        predict(trained, "val")


def test_a_folder_of_images_has_the_same_answers_as_the_split(trained: Trained, tmp_path: Path) -> None:
    expected = predict(trained, "test")
    pixels, _ = pixels_of(trained)
    (tmp_path / "a").mkdir()
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / "a" / f"{number:03}.png")
    (tmp_path / "notes.txt").write_text("no image")
    found = predict(trained, str(tmp_path))
    assert found.target is None
    assert list(found.names[:2]) == ["a/000.png", "a/001.png"]
    assert torch.allclose(found.output, expected.output, atol=1e-3)


def test_images_of_another_size_are_resized_and_said_so(trained: Trained, tmp_path: Path) -> None:
    Image.fromarray(pixels_of(trained)[0][0]).resize((56, 56)).convert("RGB").save(tmp_path / "large.png")
    found = predict(trained, str(tmp_path / "large.png"))
    assert found.note == "1 of 1 images were resized to 28×28"


@pytest.mark.parametrize("shape", [(-1, 28, 28), (-1, 1, 28, 28), (-1, 28, 28, 1)])
def test_arrays_of_bytes_are_images(trained: Trained, tmp_path: Path, shape: tuple[int, ...]) -> None:
    np.savez(tmp_path / "samples.npz", x=pixels_of(trained)[0].reshape(shape))
    found = predict(trained, str(tmp_path / "samples.npz"))
    assert torch.allclose(found.output, predict(trained, "test").output, atol=1e-3)


def test_arrays_of_floats_are_taken_as_they_are(trained: Trained, tmp_path: Path) -> None:
    trained.data.setup("test")
    x, _ = trained.data.tensors("test")
    np.savez(tmp_path / "samples.npz", x=x.numpy())
    assert torch.allclose(
        predict(trained, str(tmp_path / "samples.npz")).output, predict(trained, "test").output, atol=1e-5
    )


@pytest.mark.parametrize(
    ("arrays", "why"),
    [
        ({"x": np.zeros((3, 1, 28, 27), np.float32)}, "has the shape (3, 1, 28, 27), takes (N, 1, 28, 28)"),
        ({"x": np.zeros((0, 1, 28, 28), np.float32)}, "has the shape (0, 1, 28, 28), takes (N, 1, 28, 28)"),
        ({"x": np.array(["a"])}, "has values of type <U1, takes numbers"),
        ({"x": np.array([{}], object)}, "cannot be read"),
        ({"a": np.zeros(1), "b": np.zeros(1)}, "has no array x, but 'a', 'b'"),
    ],
)
def test_arrays_that_the_network_does_not_read_are_refused(
    trained: Trained, tmp_path: Path, arrays: dict[str, np.ndarray], why: str
) -> None:
    np.savez(tmp_path / "samples.npz", **arrays)
    assert why in refusal(tmp_path / "samples.npz", trained.spec)


def test_inputs_that_are_no_samples_are_refused(trained: Trained, tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"\x89PNG no image")
    (tmp_path / "broken.npz").write_bytes(b"PK no archive")
    (tmp_path / "empty").mkdir()
    np.save(tmp_path / "array", np.zeros((3, 1, 28, 28)))
    (tmp_path / "array.npy").rename(tmp_path / "array.npz")
    Image.fromarray(np.full((28, 28), 30_000, np.uint16)).save(tmp_path / "deep.png")
    assert "takes test, val, a folder of images" in refusal(tmp_path / "nothing", trained.spec)
    assert "no image below" in refusal(tmp_path / "empty", trained.spec)
    assert "cannot be read as an image" in refusal(tmp_path, trained.spec)
    assert "cannot be read" in refusal(tmp_path / "broken.npz", trained.spec)
    assert "cannot be read" in refusal(tmp_path / "array.npz", trained.spec)
    assert "mode I;16, takes 8 bits a channel" in refusal(tmp_path / "deep.png", trained.spec)


def test_numbers_that_the_network_does_not_compute_with_are_refused(trained: Trained, tmp_path: Path) -> None:
    np.savez(tmp_path / "samples.npz", x=np.zeros((3, 1, 28, 28), np.int64))
    with pytest.raises(UserError, match=r"input: SimpleCNN does not take these samples: RuntimeError"):
        predict(trained, str(tmp_path / "samples.npz"))


def test_a_network_for_sequences_takes_no_images(tmp_path: Path) -> None:
    assert "takes an .npz file with an array x" in refusal(tmp_path, DataSpec("sequence", (5, 2), "class", 3))


def refusal(source: Path, spec: DataSpec) -> str:
    with pytest.raises(UserError) as caught:
        read_inputs(source, spec)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("target", "output", "truth", "columns"),
    [
        ("class", [[0.0, 5.0]], [0], {"prediction": "b", "target": "a"}),
        ("value", [[1.5]], [2.0], {"prediction": 1.5, "target": 2.0}),
        ("vector", [[1.5, 2.0]], [[2.0, 0.5]], {"prediction_a": 1.5, "target_b": 0.5}),
        ("multilabel", [[1.5, -2.0]], [[1.0, 1.0]], {"prediction_a": 1, "prediction_b": 0, "target_b": 1}),
        ("class_per_step", [[[0.0, 5.0], [5.0, 0.0]]], [[1, 1]], {"prediction": "b a", "target": "b b"}),
    ],
)
def test_the_table_has_the_names_of_the_classes(target: str, output: list, truth: list, columns: dict) -> None:
    outputs = 1 if target == "value" else 2
    spec = DataSpec("sequence", (2, 1), target, outputs, classes=("a", "b"))  # pyrefly: ignore[bad-argument-type]
    found = Predictions(["0"], torch.tensor(output), torch.tensor(truth), torch.empty(0), spec)
    row = found.table().iloc[0].to_dict()
    assert {key: row[key] for key in columns} == columns


def test_steps_behind_the_end_of_a_sequence_have_no_answer(tmp_path: Path) -> None:
    use_config_dir(str(write_config(tmp_path / "configs", "Lengths", every_step=True)))
    words = ["data=own", "model=stacked_lstm", "trainer.accelerator=cpu", "data.num_workers=0", "data.batch_size=5"]
    network = untrained(check_command_line(words, multirun=False)[0])
    table, first = predict(network, "test").table(), samples_of(network, 5)
    steps = {name: table[name].str.split().str.len() for name in ("prediction", "target")}
    assert (steps["prediction"] == steps["target"]).all()
    assert steps["prediction"].tolist()[:5] == first.lengths.tolist()
    np.savez(tmp_path / "samples.npz", x=first.inputs.numpy(), lengths=first.lengths.numpy())
    found = predict(network, str(tmp_path / "samples.npz")).table()
    assert found["prediction"].tolist() == table["prediction"].tolist()[:5]


def test_a_csv_file_and_a_picture_are_written_and_never_replaced(trained: Trained, tmp_path: Path) -> None:
    found = predict(trained, "test")
    files = write_predictions(found, tmp_path / "out" / "answers.csv")
    assert [file.name for file in files] == ["answers.csv", "answers.png"]
    table = pd.read_csv(files[0], dtype=str)
    assert (table["prediction"] == table["target"]).mean() == pytest.approx(found.accuracy)
    with pytest.raises(UserError, match="exists; give another name"):
        write_predictions(found, files[0])
    with pytest.raises(UserError, match=r"output: '.*a.csv' cannot be written: "):
        write_predictions(found, files[0] / "a.csv")


def test_an_npz_file_has_the_outputs(trained: Trained, tmp_path: Path) -> None:
    found = predict(trained, "test")
    path, *_ = write_predictions(found, tmp_path / "answers.npz")
    with np.load(path) as arrays:
        assert {name: arrays[name].shape for name in arrays.files} == {
            "sample": (100,),
            "output": (100, 10),
            "prediction": (100,),
            "target": (100,),
        }


def test_a_loaded_model_is_a_network_in_evaluation_mode(checkpoint: Path, trained: Trained) -> None:
    """Its data need not be there: the checkpoint says what the network reads."""
    network = batchscope.load_model(checkpoint)
    assert not network.training
    assert network.spec == trained.spec
    with torch.inference_mode():
        assert network(torch.zeros(3, *network.spec.input_shape)).shape == (3, 10)


def test_a_loaded_model_leaves_the_process_as_it_was(checkpoint: Path, tmp_path: Path) -> None:
    use_config_dir(str(write_config(tmp_path / "of_run", "Lengths")))
    own, shown = config_dir(), list(warnings.filters)
    batchscope.load_model(checkpoint, write_config(tmp_path / "of_teacher", "Lengths"))
    batchscope.load_model(checkpoint)
    assert (config_dir(), warnings.filters) == (own, shown)


@pytest.mark.parametrize(
    "spec",
    [
        5,
        {"kind": "image"},
        {"kind": "image", "input_shape": (1, 2, -3), "target": "class", "num_outputs": 2},
        {"kind": "image", "input_shape": (1, 2, 3), "target": "class", "num_outputs": True},
        {"kind": "image", "input_shape": (1, 2, 3), "target": "class", "num_outputs": 2, "classes": ["\x1b"]},
        {"kind": "image", "input_shape": (1, 2, 3), "target": "class", "num_outputs": 2, "more": 1},
        {"kind": "image", "input_shape": (1, 2, 3), "target": "class", "num_outputs": 2, "classes": {"a": 1}},
        {"kind": "image", "input_shape": (1, 2, 3), "target": "class", "num_outputs": 2, "mean": "abc", "std": "abc"},
        {"kind": "image", "input_shape": (1, 2, 3), "target": "class", "num_outputs": 2, "mean": [0.5], "std": []},
        {"kind": "image", "input_shape": (1, 2, 3), "target": "class", "num_outputs": 2, "mean": [0, 0], "std": [1, 1]},
        {"kind": "image", "input_shape": (1, 2, 3), "target": "class", "num_outputs": 10**25},
    ],
)
def test_a_damaged_spec_in_a_file_is_refused(spec: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        spec_from(spec)  # pyrefly: ignore[bad-argument-type]
