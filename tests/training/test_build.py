"""A node becomes the object that it describes, and nothing else is called, resolved or built on the way."""

import pytest

from batchscope.data.spec import DataSpec
from batchscope.errors import UserError
from batchscope.models import mlp
from batchscope.training.build import build

SPEC = DataSpec(kind="image", input_shape=(1, 4, 4), target="class", num_outputs=2)
MLP = {"_target_": "batchscope.models.mlp.MLP", "hidden_sizes": [3]}
CHECKPOINTS = {"_target_": "batchscope.checkpointing.callback.Checkpoints"}
TRAINER = {"_target_": "lightning.Trainer", "logger": False, "enable_progress_bar": False, "accelerator": "cpu"}


def test_a_node_is_built_with_its_options_and_the_arguments() -> None:
    assert isinstance(build(MLP, "model", spec=SPEC), mlp.MLP)


def test_a_node_within_a_node_is_built() -> None:
    profiler = {"_target_": "lightning.pytorch.profilers.SimpleProfiler", "extended": False}
    assert build(TRAINER | {"profiler": profiler}, "trainer").profiler.extended is False


def test_an_interpolation_is_a_text() -> None:
    assert build(CHECKPOINTS | {"dirpath": "${oc.env:HOME}"}, "callbacks.checkpoint").dirpath == "${oc.env:HOME}"


def test_an_argument_takes_the_place_of_an_option() -> None:
    assert build(CHECKPOINTS | {"dirpath": "a"}, "callbacks.checkpoint", dirpath="b").dirpath == "b"


@pytest.mark.parametrize("other", [print, int, CHECKPOINTS, None])
def test_what_is_built_is_what_the_source_text_says(other: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlp, "MLP", other)
    with pytest.raises(UserError, match=r"model\._target_: got 'batchscope\.models\.mlp\.MLP', takes a torch\.nn\.Mod"):
        build(MLP, "model", spec=SPEC)


def test_a_node_is_checked_before_it_is_built() -> None:
    with pytest.raises(UserError, match=r"model\._args_: no such option"):
        build(MLP | {"_args_": []}, "model", spec=SPEC)


def test_what_a_nested_node_refuses_is_named_by_its_full_name() -> None:
    profiler = {"_target_": "lightning.pytorch.profilers.PyTorchProfiler", "sort_by_key": "name"}
    with pytest.raises(UserError, match=r"^trainer\.profiler: Found sort_by_key: name"):
        build(TRAINER | {"profiler": profiler}, "trainer")
