"""A loss, metrics, frozen parameters, an optimizer and a Task of the user's own; and what does not fit the data."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn

from batchscope.checkpointing.resume import configuration
from batchscope.cli.evaluate import evaluate
from batchscope.data.datamodule import TensorDataModule
from batchscope.data.spec import PADDING, DataSpec
from batchscope.errors import UserError
from batchscope.options.compose import check_command_line
from batchscope.options.groups import use_config_dir
from batchscope.options.types import Choice
from batchscope.training.objective import loss_function
from batchscope.training.run import train
from batchscope.training.task import Task

OUTPUTS = 3


class Data(TensorDataModule):
    """Images with a target of any kind."""

    kind, name = "image", "own"

    def __init__(self, target: Choice = "class_per_pixel", shape: list | None = None, **kwargs: Any):
        super().__init__(**kwargs)
        self.target, self.shape = target, shape

    @property
    def spec(self) -> DataSpec:
        outputs = {"value": 1, "input": 0}.get(self.target, OUTPUTS)
        return DataSpec("image", (1, 6, 6), self.target, outputs)  # pyrefly: ignore[bad-argument-type]

    def load(self, split: str) -> tuple[Tensor, ...]:
        random, size = self.generator(split), {"train": 20, "val": 7, "test": 9}[split]
        x = torch.randn(size, 1, 6, 6, generator=random)
        if self.target == "input":
            return (x,)
        shape = (size, *(self.spec.target_shape if self.shape is None else self.shape))
        if self.target in ("value", "vector"):
            return x, torch.randn(shape, generator=random)
        return x, torch.randint(2, shape, generator=random)


class Net(nn.Module):
    """Answers in the shape that the target asks for, or in another one."""

    def __init__(self, spec: DataSpec, answers: list | None = None):
        super().__init__()
        self.shape = spec.output_shape if answers is None else answers
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.BatchNorm1d(8), nn.Dropout(0.1))
        self.head = nn.Linear(8, torch.Size(self.shape).numel())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x)).view(-1, *self.shape)


class OnlyWithNumbers(Net):
    """Cannot be tried by shapes alone, and takes no more than 2 samples."""

    def forward(self, x: Tensor) -> Tensor:
        assert float(x.sum()) != 0
        raise RuntimeError("x has too many samples")


def dice(output: Tensor, target: Tensor, smooth: float = 1.0) -> Tensor:
    found, asked = output.softmax(dim=1)[:, 1], (target == 1).float()
    return 1 - (2 * (found * asked).sum() + smooth) / (found.sum() + asked.sum() + smooth)


def each_sample(output: Tensor, target: Tensor) -> Tensor:
    return output.flatten(1).mean(dim=1)


def detached(output: Tensor, target: Tensor) -> Tensor:
    return dice(output.detach(), target)


def failing(output: Tensor, target: Tensor) -> Tensor:
    raise ValueError("no such target")


class Silent(Net):
    """Answers nothing."""

    def forward(self, x: Tensor) -> None:
        self.head(self.encoder(x))


class Weighted(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return self.weight.abs() * dice(output, target)


class Picky(torchmetrics.Metric):
    """Cannot be computed of the 4 samples of the last batch."""

    def update(self, output: Tensor, target: Tensor) -> None:
        self.samples = len(target)

    def compute(self) -> Tensor:
        if self.samples == 4:
            raise ValueError("got 4")
        return torch.ones(())


class Smoothed(Task):
    """A Task with an option of its own."""

    def __init__(self, share: float = 0.5, **kwargs: Any):
        super().__init__(**kwargs)
        self.share = share

    def loss(self, output: Any, y: Tensor) -> Tensor:
        return (1 - self.share) * super().loss(output, y) + self.share * output.square().mean()


HERE = __name__
IOU = f"{{iou: {{_target_: torchmetrics.classification.MulticlassJaccardIndex, num_classes: {OUTPUTS}}}}}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    yaml = {
        "data/own": f"defaults: [/_tensors@_here_, _self_]\n_target_: {HERE}.Data\ntarget: class_per_pixel\nshape: null\n"
        "batch_size: 8\n",
        "model/net": f"_target_: {HERE}.Net\nanswers: null\n",
        "model/boring": "_target_: lightning.pytorch.demos.boring_classes.BoringModel\n",
        "task/dice": f"defaults: [default, _self_]\n_target_: batchscope.training.task.Task\nloss: {{_target_: {HERE}.dice, smooth: 0.5}}\nmetrics: {IOU}\n",
        "task/smoothed": f"_target_: {HERE}.Smoothed\nshare: 0.25\n",
        "optimizer/torchs": "_target_: torch.optim.SGD\n_partial_: true\nlr: 0.1\nmomentum: 0.9\nschedule: cosine\n",
    }
    for name, text in yaml.items():
        file = tmp_path / "conf" / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    use_config_dir(str(tmp_path / "conf"))
    return tmp_path


QUIET = [f"callbacks.{name}=null" for name in ("progress", "throughput", "memory", "device")]


def trained(folder: Path, *words: str) -> dict[str, Any]:
    """The record of a run of two epochs, 6 steps, in `folder`."""
    line = ["model=net", "data=own", "trainer.max_epochs=2", "trainer.accelerator=cpu", *QUIET, *words]
    (config,) = check_command_line([*line, f"run_dir={folder}"], multirun=False)
    train(config, folder, {"model": "net", "data": "own"}, line)
    return json.loads((folder / "run.json").read_text())


def weights(folder: Path) -> dict[str, Tensor]:
    return torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


def rows(folder: Path, key: str) -> list[float]:
    lines = [line.split(",") for line in (folder / "csv" / "metrics.csv").read_text().splitlines()]
    return [float(line[lines[0].index(key)]) for line in lines[1:] if line[lines[0].index(key)]]


@pytest.mark.parametrize("target", ["class_per_pixel", "multilabel", "input"])
def test_every_kind_of_target_is_trained_and_evaluated(target: str, folder: Path) -> None:
    record = trained(folder / "run", f"data.target={target}")
    assert record["status"] == "finished"
    assert ("test/acc" in record["metrics"]) == target.startswith("class")
    _, metrics = evaluate(folder / "run/checkpoints/best.ckpt", ["trainer.accelerator=cpu"])
    assert metrics["test/loss"] == pytest.approx(record["metrics"]["test/loss"])


def test_an_own_loss_and_metric_are_logged_and_belong_to_the_checkpoint(folder: Path) -> None:
    record = trained(folder / "run", "task=dice", "optimizer.schedule=constant")
    assert record["metrics"].keys() >= {"val/iou", "test/iou", "test/acc"}
    assert len(rows(folder / "run", "train/iou")) == len(rows(folder / "run", "train/loss")) == record["steps"] == 6
    best = folder / "run/checkpoints/best.ckpt"
    _, metrics = evaluate(best, ["trainer.accelerator=cpu"])
    assert metrics == pytest.approx({key: record["metrics"][key] for key in ("test/loss", "test/iou", "test/acc")})
    data = Data()
    data.setup("test")
    x, y = data.tensors("test")
    network, metric = Net(data.spec), torchmetrics.JaccardIndex("multiclass", num_classes=OUTPUTS)
    state = torch.load(best, weights_only=True)["state_dict"]
    network.load_state_dict({name.removeprefix("model."): tensor for name, tensor in state.items()})
    assert metrics["test/iou"] == pytest.approx(float(metric(network.eval()(x), y)), rel=1e-5)  # the whole set once


def test_the_parameters_of_a_loss_are_trained(folder: Path) -> None:
    trained(folder / "run", f"task.loss={{_target_: {HERE}.Weighted}}", "test=false")
    assert weights(folder / "run")["loss_function.weight"] != 1


def test_a_task_of_ones_own_has_options_of_its_own(folder: Path) -> None:
    short = ("task=smoothed", "trainer.max_epochs=1", "test=false")
    first, other = (trained(folder / s, *short, f"task.share={s}")["metrics"] for s in ("0.25", "0.75"))
    assert first["val/loss"] != other["val/loss"]


def test_what_is_frozen_stays_as_it_is(folder: Path) -> None:
    trained(folder / "run", "task.freeze=['encoder.2.*']", "test=false")
    norm, after = nn.BatchNorm1d(8).state_dict(), weights(folder / "run")
    assert all(torch.equal(after[f"model.encoder.2.{name}"], tensor) for name, tensor in norm.items())


def test_torchs_optimizer_has_a_schedule_and_groups_by_the_names_of_parameters(folder: Path) -> None:
    groups = "+optimizer.groups=[{match: [encoder.*.bias, '*.2.*'], weight_decay: 0.5, lr: 0.02}, {match: head.*}]"
    record = trained(folder / "run", "optimizer=torchs", groups, "test=false", "+optimizer.min_lr=0.01")
    assert record["learning_rate"] == 0.1
    (state,) = torch.load(folder / "run/checkpoints/last.ckpt", weights_only=True)["optimizer_states"]
    found = [(len(g["params"]), g["initial_lr"], g["weight_decay"], g["momentum"]) for g in state["param_groups"]]
    assert found == [(1, 0.1, 0, 0.9), (3, 0.02, 0.5, 0.9), (2, 0.1, 0, 0.9)]
    assert [g["lr"] for g in state["param_groups"]] == pytest.approx([0.01] * 3)


@pytest.mark.parametrize("words", [["task=dice", "task.freeze=[encoder.1.*]"], ["optimizer=torchs"]], ids=str)
def test_a_stopped_run_ends_as_one_that_was_not(
    words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(folder / "whole", *words, "test=false")
    with monkeypatch.context() as patched:
        patched.setattr(Task, "on_validation_end", lambda self: 1 / 0, raising=False)
        with pytest.raises(ZeroDivisionError):
            trained(folder / "run", *words, "test=false", "callbacks.checkpoint.every_n_steps=2")
    record = json.loads((folder / "run/run.json").read_text())
    config = configuration(record, folder / "run", [])
    train(config, folder / "run", record["choices"], [])
    assert all(
        torch.equal(a, b)
        for a, b in zip(weights(folder / "whole").values(), weights(folder / "run").values(), strict=True)
    )


WANTS = "for a target class_per_pixel (2, 6, 6) takes (2, 3, 6, 6)"
MISTAKES = {
    "model.answers=[2]": f"model: Net answers (2, 2), and task.loss=cross_entropy and the accuracy {WANTS}",
    "data.shape=[1,6,6]": "data: a sample of number 0 of own's train split is not what the spec says: its targets have the "
    "shape (1, 6, 6), and a target that is class_per_pixel has (6, 6)",
    f"model._target_={HERE}.OnlyWithNumbers": "model: OnlyWithNumbers does not take a batch (2, 1, 6, 6): RuntimeError: x has "
    "too many samples (tests/training/test_own_task.py, line ",
    f"task.loss={{_target_:{HERE}.each_sample}}": "task.loss: each_sample returns a tensor (2,) of torch.float32 for an output "
    "(2, 3, 6, 6) and a target (2, 6, 6), takes a scalar: a mean over the batch",
    f"task.loss={{_target_:{HERE}.failing}}": "task.loss: failing fails with an output (2, 3, 6, 6) and a target (2, 6, 6): "
    "ValueError: no such target (tests/training/test_own_task.py, line ",
    f"task.loss={{_target_:{HERE}.detached}}": "task.loss: detached depends on no parameter that is trained",
    "task.loss=mse": "task.loss: got 'mse'; for the data's target, class_per_pixel, it takes auto, cross_entropy or a node with",
    "task.loss=crossentropy": "task.loss: got 'crossentropy', takes auto, cross_entropy, bce, mse, l1, smooth_l1 or a node with "
    "a _target_. Did you mean 'cross_entropy'?",
    "task.loss={smooth:1}": "task.loss: got {'smooth': 1}; for the data's target",
    "task.metrics={f1:{_target_:torchmetrics.classification.BinaryF1Score}}": "task.metrics.f1: BinaryF1Score fails with an "
    "output (2, 3, 6, 6) and a target (2, 6, 6): RuntimeError: Predictions and targets are expected to have the same shape",
    "task.metrics={f1:{_target_:torchmetrics.classification.MulticlassF1Score,num_classes:3,average:null}}": "task.metrics.f1: "
    "MulticlassF1Score returns (3,), takes one number",
    "task.metrics={f1:{_target_:torch.nn.Identity}}": "task.metrics.f1: got a Identity, takes a node whose _target_ is a",
    "task.metrics={loss:{_target_:torchmetrics.MeanMetric}}": "task.metrics.loss: is the name of the loss",
    "task.freeze=[encodr.*]": "task.freeze: 'encodr.*' matches no parameter of the model. Did you mean 'encoder.*'?",
    "task.freeze=['*']": "task.freeze: got ['*'], which leaves no parameter to train",
    "task.model=x": "task.model: no such option.",
    "task.los=mse": "task.los: no such option. Did you mean 'loss'?",
    "task._target_=torch.nn.Identity": "task: got an Identity, takes a batchscope.training.task.Task",
    "optimizer.groups=[{match:[encodr.*],lr:0.1}]": "optimizer.groups.0.match: 'encodr.*' matches no parameter of the model. Did",
    "optimizer.groups=[{match:['*']},{match:[head.*]}]": "optimizer.groups.1.match: an earlier group has every parameter",
    "optimizer.groups=[{lr:0.1}]": "optimizer.groups.0.match: got None, takes name patterns",
    "optimizer.groups=[{match:head.*,lr:-1}]": "optimizer.groups.0.lr: got -1, takes a number above 0",
    "optimizer.groups=[{match:head.*,weight_decy:0}]": "optimizer.groups.0.weight_decy: no such option. Did you mean 'weight_dec",
    "optimizer.groups=[{match:head.*,lr:1e-5}] optimizer.min_lr=1e-4": "optimizer.min_lr: got 0.0001, takes at most the lowest lr",
    "optimizer=torchs optimizer.lr=0": "optimizer.lr: got 0, takes a number above 0",
    "optimizer=torchs optimizer.momentun=0": "optimizer.momentun: no such option. Did you mean 'momentum'?",
    "optimizer=torchs optimizer.momentum=-1": "optimizer: ValueError: Invalid momentum value: -1",
    "optimizer=torchs +optimizer.groups=[{match:head.*,eps:1e-3}]": "optimizer.groups.0.eps: no such option",
    "optimizer=torchs optimizer._target_=torch.nn.Identity": "optimizer: Identity is no torch.optim.Optimizer",
}  # fmt: skip


@pytest.mark.parametrize("words", MISTAKES)
def test_what_does_not_fit_is_one_line_and_nothing_is_written(words: str, folder: Path) -> None:
    with pytest.raises(UserError) as caught:
        trained(folder / "run", *words.split())
    assert str(caught.value).startswith(MISTAKES[words])
    assert "\n" not in str(caught.value)
    assert not [path for path in (folder / "run").rglob("*") if path.name != ".lock"]


def test_pixels_without_any_class_have_the_loss_0() -> None:
    spec = DataSpec("image", (1, 6, 6), "class_per_pixel", OUTPUTS)
    _, loss = loss_function("auto", spec)
    output, y = torch.randn(2, OUTPUTS, 6, 6, requires_grad=True), torch.full((2, 6, 6), PADDING)
    nothing = loss(output, y)
    nothing.backward()
    assert nothing == 0
    assert output.grad is not None
    assert not output.grad.any()
    y[0, 0, 0] = 1
    assert torch.equal(loss(output, y), nn.functional.cross_entropy(output[:1, :, 0, 0], y[0, 0, :1]))


def test_a_metric_that_cannot_be_computed_of_a_batch_is_one_line(folder: Path) -> None:
    words = f"task.metrics={{picky:{{_target_:{HERE}.Picky}}}}"
    with pytest.raises(
        UserError, match="^task.metrics.picky: Picky fails with a batch of 4 samples: ValueError: got 4"
    ):
        trained(folder / "run", words)


def test_a_lightning_module_takes_no_options_of_a_task(folder: Path) -> None:
    with pytest.raises(
        UserError, match="^task.loss: BoringModel is a LightningModule, which has its own loss, metrics and"
    ):
        trained(folder / "run", "model=boring", "task.loss=mse")
