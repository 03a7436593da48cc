"""Code of the user is trained: losses, metrics, optimizers, Tasks, LightningModules; what does not fit is one line."""

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import numpy
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import BaseFinetuning, LambdaCallback, StochasticWeightAveraging
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchvision import datasets, transforms, tv_tensors

from batchscope.checkpointing.callback import Checkpoints
from batchscope.checkpointing.resume import config_to_resume
from batchscope.cli.evaluate import evaluate
from batchscope.data.base import DataModule
from batchscope.data.datamodule import TensorDataModule
from batchscope.data.spec import DataSpec
from batchscope.errors import UnfitError, UserError
from batchscope.inference.load import load_model, restore
from batchscope.inference.predict import predict
from batchscope.options.command_lines import for_explanation
from batchscope.options.groups import use_config_dir
from batchscope.options.types import Choice
from batchscope.training.explain import explain
from batchscope.training.optimizer import Optimizer
from batchscope.training.run import _refuse_unread, train
from batchscope.training.task import Task
from tests.support.command_lines import composed, refusal
from tests.support.own_data import Images, Plain
from tests.support.runs import assert_alike, last, record
from tests.support.third_party_modules import Stranger, loader

OUTPUTS = 3
slow = partial(pytest.param, marks=pytest.mark.slow)  # another case of the test covers the same mechanism


class Data(TensorDataModule):
    """Random images with a target of any kind."""

    kind, name = "image", "own"

    def __init__(
        self, target: Choice = "class_per_pixel", shape: list | None = None, outputs: int = OUTPUTS, **kwargs: Any
    ):
        super().__init__(**kwargs)
        self.target, self.shape, self.outputs = target, shape, outputs

    @property
    def spec(self) -> DataSpec:
        outputs = 0 if self.target == "input" else self.outputs
        return DataSpec("image", (1, 6, 6), self.target, outputs)  # pyrefly: ignore

    def load(self, split: str) -> tuple[Tensor, ...]:
        random, size = self.generator(split), {"train": 20, "val": 7, "test": 9}[split]
        x = torch.randn(size, 1, 6, 6, generator=random)
        shape = (size, *(self.spec.target_shape if self.shape is None else self.shape))
        return (x,) if self.target == "input" else (x, torch.randint(2, shape, generator=random))


class WithoutTest(Data):
    def load(self, split: str) -> tuple[Tensor, ...]:
        if split == "test":
            raise NotImplementedError
        return super().load(split)


class AsksTrainer(Data):
    def load(self, split: str) -> tuple[Tensor, ...]:
        assert self.trainer.world_size == 1
        return super().load(split)


class Both(DataModule):
    """Images with two targets per sample."""

    kind, name, spec = "image", "both", DataSpec("image", (1, 6, 6), "any")

    def dataset(self, split: str) -> Any:
        random, size = self.generator(split), {"train": 20, "val": 7, "test": 9}[split]
        return [(torch.randn(1, 6, 6, generator=random), {"shade": n % OUTPUTS, "size": n / 2}) for n in range(size)]


class Heads(nn.Module):
    """Returns two outputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.shade, self.size = nn.Linear(36, OUTPUTS), nn.Linear(36, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = x.flatten(1)
        return {"shade": self.shade(x), "size": self.size(x).squeeze(1)}


def of_both(output: dict[str, Tensor], target: dict[str, Tensor]) -> Tensor:
    shade = nn.functional.cross_entropy(output["shade"], target["shade"])
    return shade + nn.functional.mse_loss(output["size"], target["size"])


class Net(nn.Module):
    """Returns outputs of the shape that the target needs, or of the shape `answers`."""

    def __init__(self, spec: DataSpec, answers: list | None = None):
        super().__init__()
        self.shape = spec.output_shape if answers is None else answers
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.BatchNorm1d(8), nn.Dropout(0.1))
        self.head = nn.Linear(8, torch.Size(self.shape).numel())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x)).view(-1, *self.shape)


def dice(output: Tensor, target: Tensor, smooth: Any = 1.0) -> Tensor:
    predicted, labelled = output.softmax(dim=1)[:, 1], (target == 1).float()
    return 1 - (2 * (predicted * labelled).sum() + smooth) / (predicted.sum() + labelled.sum() + smooth)


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(dim=1) == target).float().mean()


class Weighted(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return self.weight.abs() * dice(output, target)


class Shifted(Task):
    """A Task with an option and a loss of its own."""

    def __init__(self, shift: float = 0.5, **kwargs: Any):
        super().__init__(**kwargs)
        self.shift = shift

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return super().loss(output, y) + self.shift


class Sized(Task):
    """Computes its loss from one of two targets."""

    def loss(self, output: Any, y: Any) -> Tensor:
        return nn.functional.mse_loss(output["size"], y["size"])


class OwnHooks(Task):
    """Overrides hooks of Lightning and never calls `super()`."""

    def setup(self, stage: str) -> None: ...

    def on_train_start(self) -> None: ...

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None: ...


class Tutorial(Stranger):
    """A LightningModule with its own metric names and a test step."""

    def __init__(self, by_hand: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not by_hand

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.training_step(batch, batch_idx))


class Rated(Tutorial):
    """Has an option for its learning rate."""

    def __init__(self, lr: float = 0.01) -> None:
        super().__init__()
        self.lr = lr

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def made(lr: float = 0.01) -> Rated:
    return Rated(lr)


class Nowhere(Tutorial):
    """The validation loss is NaN before the epoch `since`."""

    def __init__(self, since: int = 100) -> None:
        super().__init__()
        self.since = since

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.training_step(batch, batch_idx)
        self.log("val_loss", loss if self.current_epoch >= self.since else loss * float("nan"))


class Keeps(Tutorial):
    """Saves hyperparameters, an extra state and an entry of its own; its schedule computes with numpy."""

    def __init__(
        self, sparse: bool = False, image: bool = False, strange: bool = False, saves_path: bool = False
    ) -> None:
        super().__init__()
        names = {"net": nn.Linear(2, 2), "path": Path("here"), "scale": numpy.float32(0.5), "by": partial(max), "n": 3}
        self.save_hyperparameters(names)
        self.seen, self.ended, self.strange, self.saves_path = 0, 0, strange, saves_path
        if sparse:
            self.register_buffer("graph", torch.eye(4).to_sparse())
        if image:
            self.register_buffer("mean", tv_tensors.Image(torch.zeros(1, 2, 2)))

    def get_extra_state(self) -> Any:
        return object if self.strange else {"seen": self.seen, "ended": self.ended, "names": ["a"]}

    def set_extra_state(self, state: Any) -> None:
        self.seen, self.ended = state["seen"], state["ended"]

    def on_train_batch_start(self, *args: Any) -> None:
        self.seen += 1

    def on_train_batch_end(self, *args: Any) -> None:
        self.ended += 1

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["vocabulary"] = Path("words") if self.saves_path else ["words"]

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: numpy.exp(-epoch))]


class Scored(Tutorial):
    """The validation accuracy is best in the second epoch."""

    def on_validation_epoch_end(self) -> None:
        self.log("val_acc", [0.25, 0.75, 0.5][self.current_epoch])


class Epochs(Tutorial):
    """Logs the epoch number as a mean over the epoch, and the validation loss as `valid/loss`."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.training:
            self.log("train_epoch", float(self.current_epoch), on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("valid/loss", super().training_step(batch, batch_idx))


class Unfit(Tutorial):
    """Does not accept its batch, or logs a value that cannot be logged."""

    def __init__(self, how: Choice = "narrow") -> None:
        super().__init__()
        self.how = how
        if how == "narrow":
            self.layer = nn.Linear(3, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.how == "logs" or (self.how == "logs_later" and self.global_step == 1):
            self.log("two", torch.ones(2))
        return super().training_step(batch, batch_idx)


class Breaks(lightning.Callback):
    """A callback of the user with a bug."""

    def on_train_batch_start(self, *args: Any) -> None:
        raise KeyError("of a callback")


class Measures(lightning.Callback):
    """Logs a metric that is no attribute of the module."""

    log: Any  # Lightning sets it

    def __init__(self) -> None:
        self.mean = torchmetrics.MeanMetric()

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.mean.update(batch_idx)

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        self.log("val/mean", self.mean.compute())
        self.mean.reset()


class Late(Tutorial):
    """Makes its layer after the constructor, or saves a part of its weights."""

    def __init__(self, how: Choice = "configure_model") -> None:
        super().__init__()
        self.how = how
        if how == "strict_loading":
            self.strict_loading = False
            self.frozen = nn.Linear(4, 4).requires_grad_(False)
        else:
            self.layer = nn.LazyLinear(1) if how == "lazy" else None

    def configure_model(self) -> None:
        if self.how == "configure_model" and self.layer is None:
            self.layer = nn.Linear(4, 1)

    def setup(self, stage: str) -> None:
        if self.how == "setup":
            self.layer = nn.Linear(4, 1)

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        return {name: value for name, value in super().state_dict(*args, **options).items() if "frozen" not in name}


class Anew(Tutorial):
    """Makes its layer in the constructor; a hook makes the layer again or resets it."""

    def __init__(self, how: Choice = "configure_model") -> None:
        super().__init__()
        self.how = how

    def configure_model(self) -> None:
        if self.how == "configure_model":
            self.layer = nn.Linear(4, 1)

    def setup(self, stage: str) -> None:
        if self.how == "setup":
            self.layer = nn.Linear(4, 1)
        elif self.how == "in_place":
            self.layer.reset_parameters()


class Beside(Tutorial):
    """Saves a weight beside its `state_dict`; a hook puts it back."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["beside"] = checkpoint["state_dict"].pop("layer.weight")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {**checkpoint["state_dict"], "layer.weight": checkpoint["beside"]}


class Distilled(Tutorial):
    """Learns from a teacher that the constructor makes and no checkpoint holds."""

    def __init__(self, by_hand: bool = False) -> None:
        super().__init__(by_hand)
        self.teacher = nn.Linear(4, 1).requires_grad_(False)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        weights = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: weights[name] for name in weights if "teacher" not in name}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state_dict, strict=False, assign=assign)


class WarmsUp(torch.optim.lr_scheduler.LRScheduler):
    """Keeps the schedule that follows it as an attribute, as the package warmup_scheduler does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.after_scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
        super().__init__(optimizer)

    def get_lr(self) -> Any:
        return self.base_lrs


class Warmed(Tutorial):
    """Has a schedule whose state no checkpoint can hold."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [WarmsUp(optimizer)]


class Skips(Tutorial):
    """Skips the rest of an epoch after three batches."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 3 else None


class Twice(Tutorial):
    """Steps two optimizers in each batch, or steps that Lightning does not count."""

    def __init__(self, is_counted: bool = True) -> None:
        super().__init__(by_hand=True)
        self.is_counted = is_counted

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        for optimizer in self.optimizers(use_pl_optimizer=self.is_counted):
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [super().configure_optimizers(), super().configure_optimizers()]


class Planned(Tutorial):
    """Schedules by the length of the training or by the validation loss, and writes to the logger's own `experiment`."""

    def __init__(self, by: Choice = "steps") -> None:
        super().__init__()
        self.by = by

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        if self.by == "validation":
            schedule: Any = {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), "monitor": "val_loss"}
        elif self.by == "steps":
            steps = self.trainer.estimated_stepping_batches
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=int(steps))
        else:
            length: Any = {"epochs": self.trainer.max_epochs, "steps_per_epoch": 10}
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, **length)
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def configure_callbacks(self) -> list[Any]:
        return [lightning.pytorch.callbacks.EarlyStopping("val_loss")] if self.by == "validation" else []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.logger.experiment.add_scalar("own", batch_idx, batch_idx)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        assert self.by != "validation" or self.trainer.callback_metrics["val_loss"] is not None

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.logger.experiment.add_scalar("own", batch_idx, batch_idx)
        super().test_step(batch, batch_idx)


class Stacked(Tutorial):
    """Makes its layer in `configure_model`, with a size that `setup` sets for a fit alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = None

    def setup(self, stage: str) -> None:
        if stage == "fit":
            self.size = 4

    def configure_model(self) -> None:
        if self.layer is None:
            self.layer = nn.Linear(self.size, 1)


class LazyNet(nn.Module):
    def __init__(self, spec: DataSpec) -> None:
        super().__init__()
        self.shape = spec.output_shape
        self.layers = nn.Sequential(nn.Flatten(), nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.LazyLinear(108))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).view(-1, *self.shape)


class FixedBatches(lightning.LightningDataModule):
    """Has no spec and no option for the batch size."""

    size = 8

    def train_dataloader(self) -> DataLoader:
        return loader(80, self.size)

    def val_dataloader(self) -> DataLoader:
        return loader(16, self.size)

    def test_dataloader(self) -> DataLoader:
        return loader(24, self.size)


class Points(FixedBatches):
    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.batch_size = self.size = batch_size


class Counted(Tutorial):
    """Has a hyperparameter with the name of a hyperparameter of its data."""

    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()


class CountedPoints(Points):
    def __init__(self, batch_size: int = 8) -> None:
        super().__init__(batch_size)
        self.save_hyperparameters()


class Hyper(lightning.LightningDataModule):
    """Has its batch size in `hparams` alone."""

    spec = Plain.spec

    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Images(20, 0), self.hparams["batch_size"])


class Untested(lightning.LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        return loader(80, 8)

    def val_dataloader(self) -> DataLoader:
        return loader(16, 8)


class Unsplit(Untested):
    """Has a `test_dataloader` that returns None."""

    def setup(self, stage: str) -> None:
        if stage == "test":
            self.held_out = None

    def test_dataloader(self) -> Any:
        return self.held_out


class Photos(DataModule):
    """The images of a folder with one subfolder per class."""

    kind, name = "image", "photos"
    spec = DataSpec("image", (3, 6, 6), "class", OUTPUTS)

    def __init__(self, root: str, **kwargs: Any):
        super().__init__(**kwargs)
        self.root = Path(root)

    def dataset(self, split: str) -> Dataset:
        return datasets.ImageFolder(self.root / split, transforms.ToTensor())


class Backbone(nn.Module):
    def __init__(self, spec: DataSpec):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(4 * 4 * 4, spec.num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


class Unfreeze(BaseFinetuning):
    """Unfreezes the backbone in one epoch, as Lightning's BackboneFinetuning does; later epochs train it too."""

    def __init__(self, epoch: int = 1):
        super().__init__()
        self.epoch = epoch

    def freeze_before_training(self, pl_module: lightning.LightningModule) -> None:
        self.freeze(pl_module.model.backbone, train_bn=False)

    def finetune_function(self, pl_module: lightning.LightningModule, epoch: int, optimizer: Any) -> None:
        if epoch == self.epoch:
            self.make_trainable(pl_module.model.backbone)


HERE = __name__
YAML = {
    "data/own": f"defaults: [/_tensors@_here_, _self_]\n_target_: {HERE}.Data\ntarget: class_per_pixel\nshape: null\n"
    f"outputs: {OUTPUTS}\nbatch_size: 8\n",
    "data/both": f"defaults: [/_data@_here_, _self_]\n_target_: {HERE}.Both\nbatch_size: 8\nnum_workers: 0\n",
    "model/made": f"_target_: {HERE}.made\nlr: 0.01\n",
    "model/heads": f"_target_: {HERE}.Heads\n",
    "task/both": f"defaults: [default, _self_]\nloss: {{_target_: {HERE}.of_both, _partial_: true}}\n",
    "data/withouttest": f"defaults: [own, _self_]\n_target_: {HERE}.WithoutTest\n",
    "data/untested": f"_target_: {HERE}.Untested\n",
    "data/unsplit": f"_target_: {HERE}.Unsplit\n",
    "data/askstrainer": f"defaults: [own, _self_]\n_target_: {HERE}.AsksTrainer\n",
    "data/points": f"_target_: {HERE}.Points\nbatch_size: 8\n",
    "data/counted": f"_target_: {HERE}.CountedPoints\nbatch_size: 8\n",
    "data/hyper": f"_target_: {HERE}.Hyper\nbatch_size: 8\n",
    "data/fixedbatches": f"_target_: {HERE}.FixedBatches\n",
    "data/photos": f"defaults: [/_data@_here_, _self_]\n_target_: {HERE}.Photos\nroot: ???\nbatch_size: 8\n"
    "num_workers: 0\n",
    "model/backbone": f"_target_: {HERE}.Backbone\n",
    "callbacks/finetuning": f"finetuning: {{_target_: {HERE}.Unfreeze, epoch: 1}}\ncheckpoint: {{every_n_steps: 1}}\n",
    "model/net": f"_target_: {HERE}.Net\nanswers: null\n",
    "model/stranger": "_target_: tests.support.third_party_modules.Stranger\n",
    "model/tutorial": f"_target_: {HERE}.Tutorial\nby_hand: false\n",
    "model/counted": f"_target_: {HERE}.Counted\nbatch_size: 8\n",
    "model/rated": f"_target_: {HERE}.Rated\nlr: 0.01\n",
    "model/nowhere": f"_target_: {HERE}.Nowhere\nsince: 100\n",
    "model/keeps": f"_target_: {HERE}.Keeps\nsparse: false\nimage: false\nstrange: false\nsaves_path: false\n",
    "model/unfit": f"_target_: {HERE}.Unfit\nhow: narrow\n",
    "callbacks/measures": f"measures: {{_target_: {HERE}.Measures}}\n",
    "callbacks/breaks": f"breaks: {{_target_: {HERE}.Breaks}}\n",
    "model/late": f"_target_: {HERE}.Late\nhow: configure_model\n",
    "model/anew": f"_target_: {HERE}.Anew\nhow: configure_model\n",
    "model/beside": f"_target_: {HERE}.Beside\nby_hand: false\n",
    "model/distilled": f"_target_: {HERE}.Distilled\nby_hand: false\n",
    "model/warmed": f"_target_: {HERE}.Warmed\nby_hand: false\n",
    "model/skips": f"_target_: {HERE}.Skips\n",
    "model/twice": f"_target_: {HERE}.Twice\nis_counted: true\n",
    "model/planned": f"_target_: {HERE}.Planned\nby: steps\n",
    "model/stacked": f"_target_: {HERE}.Stacked\n",
    "model/scored": f"_target_: {HERE}.Scored\nby_hand: false\n",
    "model/lazy": f"_target_: {HERE}.LazyNet\n",
    "task/dice": f"defaults: [default, _self_]\n_target_: {HERE}.Shifted\nshift: 0.25\n"
    f"loss: {{_target_: {HERE}.dice, _partial_: true, smooth: 0.5}}\n"
    f"metrics: {{iou: {{_target_: torchmetrics.classification.MulticlassJaccardIndex, num_classes: {OUTPUTS}}}}}\n",
    "optimizer/torchs": "_target_: torch.optim.SGD\n_partial_: true\nlr: 0.1\nmomentum: 0.9\nschedule: cosine\n",
}


@pytest.fixture(scope="module")
def conf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("conf")
    for name, text in YAML.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / f"{name}.yaml").write_text(text)
    return folder


@pytest.fixture
def folder(conf: Path, tmp_path: Path) -> Path:
    """The folder of a run that finds the configs above."""
    use_config_dir(str(conf))
    return tmp_path / "run"


def trained(folder: Path, *words: str) -> dict[str, Any]:
    """Train for two epochs, 6 steps of Net or 20 of a LightningModule, and return the run's record."""
    quiet = [f"callbacks.{name}=null" for name in ("progress", "throughput", "memory", "device")]
    lines = ["model=net", "data=own", "trainer.max_epochs=2", "trainer.accelerator=cpu", *quiet, *words]
    chosen = dict(word.split("=", 1) for word in lines)
    choices = {key: chosen[key] for key in ("model", "data")}
    train(composed(*lines), folder, choices, [*words])
    return record(folder)


def evaluated(folder: Path, *words: str) -> tuple[str, dict[str, float]]:
    return evaluate(folder / "checkpoints/best.ckpt", ["trainer.accelerator=cpu", *words])


# --- by a Task -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["input", slow("multilabel"), slow("multilabel_per_pixel")])
def test_every_kind_of_target_is_trained_and_evaluated(target: str, folder: Path) -> None:
    run_record = trained(folder, f"data.target={target}")
    assert (run_record["status"], run_record["sample_means"]) == ("finished", ["loss"])
    assert "test/acc" not in run_record["metrics"]
    assert evaluated(folder)[1]["test/loss"] == pytest.approx(run_record["metrics"]["test/loss"])


def test_several_targets_are_a_dict_for_a_loss_of_the_user(folder: Path) -> None:
    run_record = trained(folder, "model=heads", "data=both", "task=both")
    assert run_record["metrics"].keys() >= {"val/loss", "test/loss"}
    assert evaluated(folder)[1]["test/loss"] == pytest.approx(run_record["metrics"]["test/loss"])
    network = restore(folder / "checkpoints/best.ckpt", ["trainer.accelerator=cpu"], with_data=True)
    answers = predict(network, "test").arrays
    assert {name: array.shape for name, array in answers.items()} == {"shade": (9, 3), "size": (9,)}


F1 = "f1={_target_:torchmetrics.classification.BinaryF1Score}"
DICE = "dice={_target_:torchmetrics.segmentation.DiceScore,num_classes:2,include_background:false,input_format:index}"


@pytest.mark.parametrize(("target", "own"), [slow("class", [F1]), ("class_per_pixel", [F1, DICE])])
def test_one_logit_of_two_classes_has_its_loss_its_accuracy_and_metrics(
    target: Any, own: list[str], folder: Path
) -> None:
    words = [f"task.metrics.{metric}" for metric in own]
    metrics = trained(folder, f"data.target={target}", "data.outputs=1", *words)["metrics"]
    data = Data(target, outputs=1)
    data.setup("test")
    x, y = data.tensors("test")
    state = torch.load(folder / "checkpoints/best.ckpt", weights_only=True)["state_dict"]
    (network := Net(data.spec)).load_state_dict({name.removeprefix("model."): tensor for name, tensor in state.items()})
    logits = network.eval()(x).squeeze(1)
    expected = {
        "test/loss": nn.functional.binary_cross_entropy_with_logits(logits, y.float()),
        "test/acc": ((logits > 0) == y).float().mean(),
        "test/f1": torchmetrics.classification.BinaryF1Score()((logits > 0).long(), y),
    }
    if DICE in own:
        dice = torchmetrics.segmentation.DiceScore(2, include_background=False, input_format="index")
        expected["test/dice"] = dice((logits > 0).long(), y)
    numbers = {key: float(value) for key, value in expected.items()}
    assert {key: metrics[key] for key in expected} == pytest.approx(numbers, rel=1e-5)
    assert evaluated(folder, *words)[1] == pytest.approx({key: metrics[key] for key in expected})


def test_a_task_with_a_loss_of_its_own_needs_none_of_ours_for_several_targets(folder: Path) -> None:
    run_record = trained(folder, "model=heads", "data=both", f"task._target_={HERE}.Sized", "optimizer.lr=0.1")
    assert run_record["status"] == "finished" and run_record["metrics"]["test/loss"] > 0


def test_null_takes_a_metric_away(folder: Path) -> None:
    metrics = trained(folder, "task=dice", "task.metrics.acc=null", "task.metrics.iou=null")["metrics"]
    assert {key for key in metrics if key.startswith(("val/", "test/"))} == {"val/loss", "test/loss"}


def test_a_callback_logs_a_metric_of_its_own_as_the_page_says(folder: Path) -> None:
    page = Path(__file__).parents[2] / "CONTRIBUTING.md"
    assert '`self.log("val/f1", metric.compute())`' in page.read_text(encoding="utf-8")
    run_record = trained(folder, "model=tutorial", "data=points", "callbacks=measures")
    assert run_record["metrics"]["val/mean"] == 0.5  # of the numbers of two batches in each epoch


def test_an_own_task_loss_and_metric_are_logged_and_belong_to_the_checkpoint(folder: Path) -> None:
    metrics = trained(folder, "task=dice", "task.shift=100", "optimizer.schedule=constant")["metrics"]
    assert metrics.keys() >= {"val/iou", "test/iou", "test/acc"}
    evaluation = evaluated(folder)[1]
    assert evaluation == pytest.approx({key: metrics[key] for key in ("test/loss", "test/iou", "test/acc")})
    assert 100 < evaluation["test/loss"] < 101
    data = Data()
    data.setup("test")
    x, y = data.tensors("test")
    network, metric = Net(data.spec), torchmetrics.JaccardIndex("multiclass", num_classes=OUTPUTS)
    state = torch.load(folder / "checkpoints/best.ckpt", weights_only=True)["state_dict"]
    network.load_state_dict({name.removeprefix("model."): tensor for name, tensor in state.items()})
    assert evaluation["test/iou"] == pytest.approx(float(metric(network.eval()(x), y)), rel=1e-5)  # the whole set once


def test_the_parameters_of_a_loss_are_trained_and_what_is_frozen_stays_as_it_is(folder: Path) -> None:
    trained(folder, f"task.loss={{_target_: {HERE}.Weighted}}", "task.freeze=['encoder.2.*']", "test=false")
    after, norm = last(folder)["state_dict"], nn.BatchNorm1d(8).state_dict()
    assert after["loss_function.weight"] != 1
    assert all(torch.equal(after[f"model.encoder.2.{name}"], tensor) for name, tensor in norm.items())


def test_a_subclass_that_overrides_hooks_trains_as_any_task(folder: Path) -> None:
    words = ["task.freeze=['encoder.2.*']", "trainer.accumulate_grad_batches=2", "test=false"]
    trained(folder.with_name("plain"), *words)
    trained(folder, f"task._target_={HERE}.OwnHooks", *words)
    plain, own = (last(run_dir)["state_dict"] for run_dir in (folder.with_name("plain"), folder))
    assert all(torch.equal(own[name], weight) for name, weight in plain.items())


def test_a_task_is_prepared_for_the_batch_size_among_the_hyperparameters_of_its_data(folder: Path, monkeypatch) -> None:
    prepared_sizes: list[Any] = []
    monkeypatch.setattr(Task, "prepare", lambda self, trainer, *sizes: prepared_sizes.append(sizes))
    trained(folder, "data=hyper", "model=mlp", "model.hidden_sizes=[8]", "test=false")
    assert prepared_sizes == [(8, 8)]


def test_torchs_optimizer_has_a_schedule(folder: Path) -> None:
    assert trained(folder, "optimizer=torchs", "test=false", "+optimizer.min_lr=0.01")["learning_rate"] == 0.1
    (group,) = last(folder)["optimizer_states"][0]["param_groups"]
    assert (group["initial_lr"], group["momentum"], group["lr"]) == (0.1, 0.9, pytest.approx(0.01))


def test_a_stopped_run_ends_as_one_that_was_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["task=dice", "task.freeze=[encoder.1.*]", "optimizer=torchs", "test=false"]
    trained(folder.with_name("whole"), *words)
    with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
        patched.setattr(Task, "on_validation_end", lambda self: 1 / 0, raising=False)
        trained(folder, *words, "callbacks.checkpoint.every_n_steps=2")
    run_record = record(folder)
    train(config_to_resume(run_record, folder, []), folder, run_record["choices"], [])
    whole, resumed = (last(run_dir)["state_dict"] for run_dir in (folder.with_name("whole"), folder))
    assert all(torch.equal(resumed[name], weight) for name, weight in whole.items())


def write_photos(folder: Path) -> str:
    """An ImageFolder of 16 images in each split."""
    random = numpy.random.default_rng(0)
    for split in ("train", "val", "test"):
        for number in range(16):
            file = folder / split / f"class{number % OUTPUTS}" / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(random.integers(0, 256, (6, 6, 3), dtype=numpy.uint8)).save(file)
    return str(folder)


@pytest.mark.parametrize("optimizer", ["adamw", slow("sgd")])
def test_a_callback_of_ones_own_unfreezes_a_backbone_beside_the_default_ones(
    optimizer: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = f"data.root={write_photos(tmp_path / 'photos')}"
    words = ["model=backbone", "data=photos", root, "callbacks=finetuning", f"optimizer={optimizer}", "test=false"]
    words += ["trainer.max_epochs=3", "callbacks.checkpoint.every_n_steps=1"]

    def weights(run_dir: Path) -> dict[str, Tensor]:
        state = last(run_dir)["state_dict"]  # of the default callback for checkpoints
        return {name: state[f"model.{name}.weight"] for name in ("backbone.0", "head")}

    trained(tmp_path / "frozen", *words, "callbacks.finetuning.epoch=9")
    trained(tmp_path / "short", *words, "trainer.max_epochs=1")
    trained(tmp_path / "whole", *words)
    frozen, short, whole = (weights(tmp_path / name) for name in ("frozen", "short", "whole"))
    assert torch.equal(frozen["backbone.0"], short["backbone.0"]) and not torch.equal(frozen["head"], short["head"])
    assert not torch.equal(whole["backbone.0"], frozen["backbone.0"])
    with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):  # after a step of the third epoch
        patched.setattr(Task, "on_train_batch_end", lambda task, *_: 1 // (6 - task.global_step), raising=False)
        trained(folder, *words)
    run_record = record(folder)
    train(config_to_resume(run_record, folder, [root]), folder, run_record["choices"], [])
    assert_alike(*(last(run_dir)["state_dict"] for run_dir in (folder, tmp_path / "whole")))


# --- a LightningModule -----------------------------------------------------------------------------------------------


def test_a_lightning_module_is_trained_tested_recorded_and_evaluated_by_its_path(folder: Path) -> None:
    run_record = trained(folder, "model=tutorial", "data=points", "trainer.accumulate_grad_batches=2")
    assert (run_record["status"], run_record["steps"], run_record["learning_rate"]) == ("finished", 10, 0.01)
    assert run_record["model"] == {"class": "Tutorial", "parameters": 5, "lightning_module": True}
    assert run_record["metrics"].keys() >= {"val_loss", "test_loss"}
    assert run_record["dataset"]["train_samples"] == 80  # as its loader says
    assert run_record["checkpoints"].keys() == {"best", "last"}  # by val_loss
    name, metrics = evaluated(folder)
    assert name == "tutorial-Points-bs8, tested on Points"
    assert metrics["test_loss"] == pytest.approx(run_record["metrics"]["test_loss"])


@pytest.mark.parametrize("is_tested", ["true", "false"])
def test_its_metrics_are_those_of_the_last_epoch_and_its_best_loss_has_any_name_of_the_stage(is_tested, folder) -> None:
    run_record = trained(folder, "model=tutorial", f"model._target_={HERE}.Epochs", "data=points", f"test={is_tested}")
    assert (run_record["epochs"], run_record["metrics"]["train_epoch"]) == (2, 1.0)
    assert ("test_loss" in run_record["metrics"]) == (is_tested == "true")
    assert run_record["checkpoints"].keys() == {"best", "last"}


def test_its_record_has_nothing_that_it_does_not_read_also_once_it_is_resumed(folder: Path) -> None:
    words = ["experiment=quickstart", "data=points", "data.batch_size=8", "trainer.max_epochs=1"]
    run_record = trained(folder, "model=tutorial", *words)
    assert {"task", "optimizer", "channels_last"}.isdisjoint(run_record["config"])
    train(config_to_resume(run_record, folder, ["trainer.max_epochs=2"]), folder, run_record["choices"], [])
    assert record(folder)["steps"] == 20
    assert record(folder)["fit_seconds"] > run_record["fit_seconds"]
    assert {"task", "optimizer", "channels_last"}.isdisjoint(record(folder)["config"])


@pytest.mark.parametrize(("step", "is_warned"), [(3, True), slow(10, False)])
def test_its_data_are_said_to_lose_batches_where_it_is_resumed_within_an_epoch(
    step: int, is_warned: bool, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    def fails(module: Tutorial, *batch: Any) -> None:
        assert module.global_step < step

    with monkeypatch.context() as patched, pytest.raises(AssertionError):
        patched.setattr(Tutorial, "on_train_batch_start", fails, raising=False)
        trained(folder, "model=tutorial", "data=points", "callbacks.checkpoint.every_n_steps=1")
    run_record = record(folder)
    train(config_to_resume(run_record, folder, []), folder, run_record["choices"], [])
    assert record(folder)["resumed"][0]["step"] == step
    assert ("warning: resume: Points has no resume_at" in capsys.readouterr().err) == is_warned


def test_its_rate_is_an_option_of_its_own(folder: Path) -> None:
    run_record = trained(folder, "model=rated", "data=points", "model.lr=0.1", "test=false")
    assert run_record["learning_rate"] == 0.1
    assert last(folder)["optimizer_states"][0]["param_groups"][0]["lr"] == 0.1


@pytest.mark.parametrize(
    ("words", "name", "metric"),
    [
        ("model=tutorial data=untested", "Untested", "val_loss"),
        slow("model=tutorial data=unsplit", "Unsplit", "val_loss"),
        ("data=withouttest", "own", "val/loss"),
    ],
)
def test_its_data_may_have_no_test(words: str, name: str, metric: str, folder: Path, capsys) -> None:
    run_record = trained(folder, *words.split())
    assert run_record["status"] == "finished"
    assert metric in run_record["metrics"] and not any(key.startswith("test") for key in run_record["metrics"])
    assert f"warning: test: {name} has no test set, and nothing is tested\n" in capsys.readouterr().err
    assert refusal(evaluated, folder) == f"data: {name} has no test set, so there is nothing to evaluate"


def test_its_data_may_ask_the_trainer_when_a_checkpoint_is_evaluated_as_in_a_run(folder: Path) -> None:
    run_record = trained(folder, "data=askstrainer", "trainer.max_epochs=1")
    assert evaluated(folder)[1]["test/loss"] == pytest.approx(run_record["metrics"]["test/loss"])


def test_its_data_may_ask_the_trainer_for_the_module_as_in_lightning(folder: Path, monkeypatch) -> None:
    module_names: list[str] = []
    record_module = lambda data, stage: module_names.append(type(data.trainer.lightning_module).__name__)
    monkeypatch.setattr(FixedBatches, "setup", record_module)
    trained(folder, "model=tutorial", "data=fixedbatches", "trainer.max_epochs=1")
    evaluated(folder)
    explained("model=tutorial", "data=fixedbatches")
    assert {*module_names} == {"Tutorial"}


def test_its_data_are_set_up_once_for_a_fit_where_they_say_nothing_more_before_it(folder: Path, monkeypatch) -> None:
    stages: list[str] = []
    monkeypatch.setattr(Points, "setup", lambda data, stage: stages.append(stage))
    trained(folder, "model=tutorial", "data=points", "trainer.max_epochs=1", "test=false")
    assert stages == ["fit"]


def test_it_may_have_no_test_and_its_data_no_batch_size(folder: Path) -> None:
    run_record = trained(folder, "model=stranger", "data=fixedbatches")
    assert (run_record["steps"], run_record["name"]) == (20, "stranger-FixedBatches")
    assert refusal(evaluated, folder).startswith("model: Stranger has no test_step")


def test_what_a_module_saves_is_read_back_without_the_hyperparameters_that_cannot_be(folder: Path, capsys) -> None:
    run_record = trained(folder, "model=keeps", "data=points", "trainer.max_epochs=1")
    warning = "warning: checkpoints leave out the hyperparameters net, path, by: each holds more than tensors and plain values\n"
    assert capsys.readouterr().err.count(warning) == 1
    assert last(folder)["hyper_parameters"] == {"scale": 0.5, "n": 3}
    assert evaluated(folder)[1]["test_loss"] == pytest.approx(run_record["metrics"]["test_loss"])
    train(config_to_resume(run_record, folder, ["trainer.max_epochs=2"]), folder, run_record["choices"], [])
    assert last(folder)["state_dict"]["_extra_state"] == {"seen": 20, "ended": 20, "names": ["a"]}


def test_a_model_checkpoint_of_ones_own_that_keeps_weights_alone_is_tested_and_evaluated(folder: Path) -> None:
    node = "{_target_: lightning.pytorch.callbacks.ModelCheckpoint, monitor: val_loss, save_weights_only: true}"
    run_record = trained(folder, "model=tutorial", "data=points", "callbacks.checkpoint=null", f"+callbacks.own={node}")
    assert run_record["status"] == "finished"
    tested = evaluate(folder / run_record["checkpoints"]["best"], ["trainer.accelerator=cpu"])[1]
    assert tested["test_loss"] == pytest.approx(run_record["metrics"]["test_loss"])


def test_a_script_is_told_what_a_checkpoint_alone_cannot_decide(folder: Path) -> None:
    trained(folder, "model=tutorial", "data=points", "trainer.max_epochs=1")
    use_config_dir(None)
    path, option = folder / "checkpoints/best.ckpt", f"model._target_={HERE}.Tutorial"
    message = refusal(load_model, path)
    assert message.startswith(
        f"model._target_: is '{HERE}.Tutorial' in {path}, and a file alone does not decide that; "
    )
    assert message.endswith(f"that has its YAML, or add {option} model.by_hand=false (in Python to `overrides=[…]`)")
    assert refusal(load_model, path, "nowhere") == "config_dir: got 'nowhere', which is not a folder"


def test_what_only_a_save_can_tell_ends_the_run_at_its_first_checkpoint(folder: Path) -> None:
    message = refusal(trained, folder, "model=keeps", "data=points", "model.saves_path=true")
    assert message.startswith("checkpoint: its entry 'vocabulary' could not be read back: it holds more than tensors")


@pytest.mark.parametrize("how", ["configure_model", slow("setup"), "lazy", "strict_loading"])
def test_layers_that_are_made_late_and_weights_that_are_saved_in_part_are_resumed_and_loaded(
    how: str, folder: Path
) -> None:
    run_record = trained(folder, "model=late", f"model.how={how}", "data=points", "trainer.max_epochs=1")
    assert run_record["model"]["parameters"] == (25 if how == "strict_loading" else 5)
    assert evaluated(folder)[1]["test_loss"] == pytest.approx(run_record["metrics"]["test_loss"])
    network = load_model(folder / "checkpoints/best.ckpt")
    assert torch.equal(network.layer.weight, last(folder)["state_dict"]["layer.weight"])
    train(config_to_resume(run_record, folder, ["trainer.max_epochs=2"]), folder, run_record["choices"], [])
    assert record(folder)["steps"] == 20


def test_weights_that_a_module_keeps_beside_its_state_dict_are_resumed_and_loaded(folder: Path) -> None:
    run_record = trained(folder, "model=beside", "data=points", "trainer.max_epochs=1")
    assert evaluated(folder)[1]["test_loss"] == pytest.approx(run_record["metrics"]["test_loss"])
    assert torch.equal(load_model(folder / "checkpoints/best.ckpt").layer.weight, last(folder)["beside"])
    train(config_to_resume(run_record, folder, ["trainer.max_epochs=2"]), folder, run_record["choices"], [])
    assert record(folder)["steps"] == 20


def test_a_module_whose_own_load_state_dict_lacks_weights_is_resumed_and_loaded(folder: Path) -> None:
    run_record = trained(folder, "model=distilled", "data=points", "trainer.max_epochs=1")
    assert evaluated(folder)[1]["test_loss"] == pytest.approx(run_record["metrics"]["test_loss"])
    train(config_to_resume(run_record, folder, ["trainer.max_epochs=2"]), folder, run_record["choices"], [])
    assert record(folder)["steps"] == 20


@pytest.mark.parametrize(
    "words", ["anew model.how=configure_model", slow("anew model.how=setup"), "anew model.how=in_place", "stacked"]
)
def test_layers_that_a_hook_makes_anew_or_for_training_alone_have_the_weights_of_the_checkpoint(
    words: str, folder: Path
) -> None:
    run_record = trained(folder, *f"model={words}".split(), "data=points", "trainer.max_epochs=1")
    assert evaluated(folder)[1]["test_loss"] == pytest.approx(run_record["metrics"]["test_loss"])
    network = load_model(folder / "checkpoints/best.ckpt")
    assert torch.equal(network.layer.weight, last(folder)["state_dict"]["layer.weight"])
    assert not network.layer.training


@pytest.mark.parametrize(
    "words",
    [
        "late model.how=configure_model",
        slow("late model.how=setup"),
        slow("late model.how=strict_loading"),
        "anew model.how=setup",
        "beside",
    ],
)
def test_a_module_starts_from_a_checkpoint_of_its_own(words: str, folder: Path, monkeypatch) -> None:
    start_weights: list[Tensor] = []

    def copy_weights(self: Tutorial) -> None:
        start_weights.append(self.layer.weight.detach().clone())

    monkeypatch.setattr(Tutorial, "on_train_start", copy_weights, raising=False)
    line, first = [*f"model={words}".split(), "data=points", "trainer.max_epochs=1"], folder.with_name("first")
    trained(first, *line)
    trained(folder, *line, f"init={first}/checkpoints/last.ckpt")
    saved = last(first)
    assert torch.equal(start_weights[1], saved["beside"] if words == "beside" else saved["state_dict"]["layer.weight"])


def test_weights_that_a_module_does_not_have_leave_it_the_layers_that_its_optimizer_trains(
    folder: Path, monkeypatch
) -> None:
    monkeypatch.setattr(Late, "strict_loading", False)
    line = ["model=late", "model.how=setup", "data=points", "trainer.max_epochs=1"]
    weights = {"layer.weight": torch.ones(1, 4), "layer.bias": torch.ones(1), "teacher.weight": torch.ones(2)}
    torch.save(weights, folder.with_name("more.pt"))
    trained(folder, *line, f"init={folder.with_name('more.pt')}")
    change = last(folder)["state_dict"]["layer.weight"] - weights["layer.weight"]
    assert change.abs().max() > 1e-3


def test_an_epoch_whose_rest_a_module_leaves_out_ends_with_a_checkpoint_too(folder: Path) -> None:
    run_record = trained(folder, "model=skips", "data=points")
    assert (run_record["status"], run_record["steps"], last(folder)["global_step"]) == ("finished", 6, 6)
    resumed = folder.with_name("resumed")
    first_record = trained(resumed, "model=skips", "data=points", "trainer.max_epochs=1")
    train(config_to_resume(first_record, resumed, ["trainer.max_epochs=2"]), resumed, first_record["choices"], [])
    assert_alike(last(resumed)["state_dict"], last(folder)["state_dict"])
    assert last(resumed)["global_step"] == 6
    assert_alike(*(last(run_dir)["loops"]["fit_loop"]["epoch_loop.state_dict"] for run_dir in (resumed, folder)))


def test_a_failure_of_prepare_data_is_recorded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Points, "prepare_data", lambda data: {}["nowhere"])
    with pytest.raises(KeyError):
        trained(folder, "model=tutorial", "data=points")
    assert record(folder)["status"] == "failed"


def explained(*words: str) -> Any:
    config = for_explanation(composed("data=points", "trainer.accelerator=cpu", *words))
    return explain(config, {"model": "twice"}, Path("out"))[0]


def test_a_step_with_two_optimizers_is_explained_by_as_many_steps_as_any(folder: Path) -> None:
    explanation = explained("model=twice")
    assert (explanation.steps, explanation.trace_steps > 0, explanation.notes) == (10, True, [])


def test_a_run_of_a_gpu_that_is_not_here_is_explained_on_the_device_that_is(folder: Path) -> None:
    assert explained("model=tutorial", "trainer.devices=[3]").steps == 10


def test_a_run_of_a_gpu_that_is_not_here_is_explained_on_the_first_one(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    device_options: list[object] = []

    def set_up(config: dict) -> None:
        device_options.append(config["trainer"]["devices"])
        raise UserError("seen")

    monkeypatch.setattr("batchscope.training.explain.set_up_process", set_up)
    for devices, expected in (("[3]", 1), ("[0]", [0])):
        with pytest.raises(UserError, match="seen"):
            explained("model=tutorial", f"trainer.devices={devices}", "trainer.accelerator=gpu")
        assert device_options.pop() == expected


@pytest.mark.parametrize("by", ["steps", slow("epochs"), "validation"])
def test_a_schedule_for_the_whole_training_or_by_the_validation_is_one_of_timed_runs_too(by, folder: Path) -> None:
    words = ["model=planned", f"model.by={by}"]
    assert explained(*words).steps == 10
    timed = [*words, "data=points", "experiment=throughput", "trainer.accelerator=cpu", "logger=none"]
    timed += ["callbacks.progress=null", "callbacks.until_known.seconds=0.1"]
    train(composed(*timed), folder, {"model": "planned"}, timed)
    assert record(folder)["steps"] > 20


def test_a_module_may_use_its_logger_where_nothing_is_logged(folder: Path) -> None:
    run_record = trained(folder, "model=planned", "data=points")
    assert evaluated(folder)[1]["test_loss"] == pytest.approx(run_record["metrics"]["test_loss"])
    trained(folder.with_name("fast"), "model=planned", "data=points", "trainer.fast_dev_run=true")


def test_a_hyperparameter_that_module_and_data_share_may_differ_where_nothing_is_logged(folder: Path) -> None:
    words, timed = ["model=counted", "data=counted"], folder.with_name("timed")
    trained(folder, *words, "trainer.max_epochs=1")
    words.append("data.batch_size=4")
    assert "test_loss" in evaluated(folder, words[-1])[1]
    assert explained(*words).steps == 10
    words += ["experiment=throughput", "trainer.accelerator=cpu", "logger=none", "callbacks.progress=null"]
    words.append("callbacks.until_known.seconds=0.1")
    train(composed(*words), timed, {"model": "counted"}, words)
    assert record(timed)["status"] == "finished"


def test_callbacks_of_a_module_take_none_of_ours_away(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tutorial, "configure_callbacks", lambda module: [LambdaCallback()])
    run_record = trained(folder, "model=tutorial", "data=points", "trainer.max_epochs=1")
    assert evaluated(folder)[1]["test_loss"] == pytest.approx(run_record["metrics"]["test_loss"])


def test_a_callback_that_no_new_run_takes_is_refused_from_a_module_too(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(Tutorial, "configure_callbacks", lambda module: [StochasticWeightAveraging(0.1)])
    message = refusal(trained, folder, "model=tutorial", "data=points")
    assert message.startswith(
        "model: configure_callbacks: StochasticWeightAveraging hands its average over after the last ch"
    )


def test_a_batch_of_two_optimizers_is_one_step(folder: Path) -> None:
    assert trained(folder, "model=twice", "data=points", "trainer.limit_val_batches=0", "test=false")["steps"] == 20


def test_loaders_of_a_module_that_a_run_does_not_read_are_refused_where_nobody_names_the_data() -> None:
    class Loads(Tutorial):
        def train_dataloader(self) -> DataLoader:
            return loader(80, 8)

    ours = composed("data=digits")
    message = refusal(_refuse_unread, Loads(), ours, [], {"data": "mnist"})
    assert message.startswith(
        "data: Loads has a train_dataloader of its own, and a run trains on data=…; move its loaders"
    )
    assert message.endswith("or name the data to train on, such as data=mnist")
    _refuse_unread(Loads(), ours, ["data=mnist"], {"data": "mnist"})
    _refuse_unread(Loads(), ours, [], {"data": "theirs"})
    _refuse_unread(Tutorial(), ours, [], {"data": "mnist"})


def test_a_step_that_lightning_does_not_count_is_not_explained_for_ever(folder: Path) -> None:
    message = refusal(explained, "model=twice", "model.is_counted=false")
    assert message.startswith(
        "explain: no step of twice · Points could be measured: Lightning has counted no optimizer step"
    )


def test_a_network_with_lazy_layers_is_refused(folder: Path) -> None:
    message = "model: LazyNet has lazy layers; give them their sizes, by the data's spec"
    assert refusal(trained, folder, "model=lazy") == message


def test_the_best_checkpoint_is_the_best_in_the_direction_of_its_metric(folder: Path) -> None:
    trained(folder, "model=scored", "data=points", "callbacks.checkpoint.monitor=val_acc", "trainer.max_epochs=3")
    assert torch.load(folder / "checkpoints/best.ckpt", weights_only=True)["epoch"] == 1


NAN = "warning: callbacks.checkpoint.monitor: val/loss is nan in epoch 0, and no such checkpoint is the best\n"
OWN_STOP = "+callbacks.mine={{_target_:lightning.pytorch.callbacks.EarlyStopping,monitor:{}}}"  # of another name


def test_a_validation_without_a_number_is_one_warning_and_its_checkpoint_is_not_the_best(folder: Path, capsys) -> None:
    run_record, printed = trained(folder, "model=nowhere", "data=points"), capsys.readouterr()
    assert printed.err.count(NAN) == 1
    assert run_record["status"] == "finished"
    assert run_record["checkpoints"].keys() == {"last"} and "val_loss" not in run_record["metrics"]
    second_record = trained(folder.with_name("again"), "model=nowhere", "data=points", "model.since=1")
    assert second_record["checkpoints"].keys() == {"best", "last"}


def test_a_validation_without_the_metric_and_one_without_a_number_are_a_warning_each(capsys) -> None:
    best = Checkpoints()
    for metrics in ({}, {"val/loss": float("nan")}, {}, {"val/loss": float("nan")}):
        trainer = SimpleNamespace(sanity_checking=False, fast_dev_run=False, current_epoch=0, callback_metrics=metrics)
        best.on_validation_end(trainer, Tutorial())
    missing = "warning: no best checkpoint is kept: the validation measures nothing; name a metric by callbacks.checkpoint.monitor\n"
    assert capsys.readouterr().err == missing + NAN


@pytest.mark.parametrize("measured", [nn.ModuleDict(), [], {"val": 0.5}])
def test_a_module_may_have_an_attribute_of_the_name_that_a_task_keeps_its_metrics_under(measured: Any) -> None:
    module, best = Tutorial(), Checkpoints()
    module.measured = measured
    best.check(module)
    assert best.mode == "min"


DIRECTIONS = {"val/loss": "min", "val/acc": "max", "val_loss/dataloader_idx_1": "min"}
DIRECTIONS |= {"val/iou": "max", "val/error": "min"}  # by torchmetrics


@pytest.mark.parametrize("monitor", DIRECTIONS)
def test_a_metric_knows_its_direction(monitor: str) -> None:
    own = {
        "iou": torchmetrics.JaccardIndex("multiclass", num_classes=OUTPUTS),
        "error": torchmetrics.MeanSquaredError(),
    }
    best = Checkpoints(monitor=monitor)
    best.check(Task(Net(Data().spec), Data().spec, Optimizer(), metrics=own))
    assert best.mode == DIRECTIONS[monitor]


OWN = "model=tutorial data=points"

# --- what does not fit -----------------------------------------------------------------------------------------------

SHAPES = "an output (8, 3, 6, 6) and a target (8, 6, 6)"
OLD = "_target_=pytorch_lightning.demos.boring_classes."
HAS_OPTIMIZER = "Tutorial is a LightningModule, which has its own optimizer"
MISTAKES = {
    "data.shape=[1,6,6]": "data: own's train split is not what the spec says: its targets have the "
    "shape (1, 6, 6), and a target that is class_per_pixel has (6, 6)",
    "data.outputs=1 task.loss=cross_entropy": "task.loss: got 'cross_entropy'; for the data's target, class_per_pixel, it takes "
    "auto, bce or a node",
    "model=heads data=both": "task.loss: got 'auto'; for the data's target, any, it takes bce, mse, l1, smooth_l1 or a node with a",
    "task.loss=mse": "task.loss: got 'mse'; for the data's target, class_per_pixel, it takes auto, cross_entropy or a node with",
    "task.loss=crossentropy": "task.loss: got 'crossentropy', takes auto, cross_entropy, bce, mse, l1, smooth_l1 or a node with "
    "a _target_. Did you mean 'cross_entropy'?",
    "task.metrics={f1:{_target_:torch.nn.Identity}}": "task.metrics.f1: got Identity, takes a node whose _target_ is a",
    "task.metrics={loss:{_target_:torchmetrics.MeanMetric}}": "task.metrics.loss: is the name of the loss",
    "task.freeze=[encodr.*]": "task.freeze: 'encodr.*' matches no parameter of the model.",
    "task.freeze=['*']": "task.freeze: got ['*'], which leaves no parameter to train",
    "task._target_=torch.nn.Identity": "task: got Identity, takes a batchscope.training.task.Task",
    "optimizer=torchs optimizer.momentum=-1": "optimizer: ValueError: Invalid momentum value: -1",
    "optimizer=torchs optimizer._target_=torch.nn.Identity": "optimizer: Identity is no torch.optim.Optimizer",
    "data=points": "data: Points has no spec: a property that returns a batchscope.data.DataSpec",
    f"{OWN} task.loss=mse": "task.loss: Tutorial is a LightningModule, which has its own loss and metrics",
    f"{OWN} task.freeze=['*']": "task.freeze: Tutorial is a LightningModule, whose layers no Task freezes; write callbacks=my_finetuning, "
    "a BaseFinetuning as in docs/own-project.md",
    f"{OWN} channels_last=false": "channels_last: Tutorial is a LightningModule, which has its own layout",
    f"{OWN} optimizer=sgd": f"optimizer: {HAS_OPTIMIZER}",
    f"{OWN} optimizer.lr_scaling=auto": f"optimizer.lr_scaling: {HAS_OPTIMIZER}",
    f"{OWN} +optimizer.momentum=0.5": f"optimizer.momentum: {HAS_OPTIMIZER}",
    "model=rated data=points optimizer.lr=0.1": "optimizer.lr: Rated is a LightningModule, which has its own optimizer; its rate is "
    "model.lr",
    "model=made data=points optimizer.lr=0.1": "optimizer.lr: Rated is a LightningModule, which has its own optimizer; its rate is model.lr",
    "model=made data=points optimizer=sgd": "optimizer: Rated is a LightningModule, which has its own optimizer; its rate is model.lr",
    f"{OWN} model.lr=0.1": "model.lr: no such option. model takes by_hand.",
    f"{OWN} +model.optimizer.lr=0.1": "model.optimizer: no such option. model takes by_hand.",
    f"{OWN} model.scheduler.gamma=0.1": "model.scheduler.gamma: no such option. model.scheduler is no section.",
    f"{OWN} +model.scheduler.gamma=0.1": "model.scheduler: no such option. model takes by_hand.",
    f"{OWN} compile=true": "compile: Tutorial is a LightningModule, which compiles itself",
    "model=keeps data=points model.sparse=true": "model: 'graph' could not be read back from a checkpoint, ",
    "model=keeps data=points model.image=true": "model: 'mean' could not be read back from a checkpoint, ",
    "model=keeps data=points model.strange=true": "model: '_extra_state' could not be read back from a checkp",
    f"{OWN} callbacks.checkpoint.monitor=val_score": "callbacks.checkpoint.mode: nobody says which way val_score gets better",
    f"model=stranger data=points model.{OLD}BoringModel": "model: BoringModel is of the package pytorch_lightning; import "
    "lightning.pytorch",
    f"model=stranger data=fixedbatches data.{OLD}BoringDataModule": "data: BoringDataModule is of the package pytorch_lightning",
}  # fmt: skip


# Of each rule one case is tried by default, here or in options/test_compose.py.
REPEATED = {f"{OWN} {word}" for word in ("task.loss=mse", "channels_last=false", "optimizer=sgd", "model.lr=0.1")}
REPEATED.add(f"{OWN} +model.scheduler.gamma=0.1")
REPEATED |= {"model=made data=points optimizer.lr=0.1", "model=keeps data=points model.image=true"}


@pytest.mark.parametrize("words", [slow(words) if words in REPEATED else words for words in MISTAKES])
def test_what_does_not_fit_is_one_line_and_nothing_is_written(words: str, folder: Path) -> None:
    assert refusal(trained, folder, *words.split()).startswith(MISTAKES[words])
    assert not [path for path in folder.rglob("*") if path.name != ".lock"]


HEADS = "model: Heads answers {'shade': (8, 3), 'size': (8,)}, and"
UNFIT_TASKS = {
    "model.answers=[2]": "model: Net answers (8, 2), and task.loss=cross_entropy and the accuracy for a target "
    "class_per_pixel (8, 6, 6) takes (8, 3, 6, 6)",
    "model.answers=[-1,-1]": "model: Net does not take a batch (8, 1, 6, 6): RuntimeError: only one dimension can be inferred "
    "(tests/training/test_own.py, line ",
    "task.loss={_target_:torch.nn.CrossEntropyLoss,reduction:none}": "task.loss: CrossEntropyLoss returns a tensor (8, 6, 6) of "
    f"torch.float32 for {SHAPES}, takes a scalar: a mean over the batch",
    f"task.loss={{_target_:{HERE}.dice,_partial_:true,smooth:x}}": f"task.loss: dice fails with {SHAPES}: TypeError: unsupported operand type(s) "
    "for +: 'Tensor' and 'str' (tests/training/test_own.py, line ",
    f"task.loss={{_target_:{HERE}.accuracy,_partial_:true}}": "task.loss: accuracy depends on no parameter that is trained",
    "data.outputs=2 model.answers=[1,6,6]": "model: Net answers (8, 1, 6, 6), and task.loss=cross_entropy and the accuracy for a target "
    "class_per_pixel (8, 6, 6) takes (8, 2, 6, 6)",
    "model=heads data=both task.loss=mse": "model: Heads answers {'shade': (8, 3), 'size': (8,)}, and task.loss=mse for a target any "
    "{'shade': (8,), 'size': (8,)} takes {'shade': (8,), 'size': (8,)}; a loss of your own, 'task.loss={_target_: …}', takes",
    "model=heads data.target=class": f"{HEADS} task.loss=cross_entropy and the accuracy for a target class (8,) takes (8, 3); a loss of your "
    "own, 'task.loss={_target_: …}', takes several tensors; task.metrics.acc=null leaves the accuracy out",
    f"model=heads data.target=class task.loss={{_target_:{HERE}.of_both,_partial_:true}}": f"{HEADS} the accuracy for a target class (8,) "
    "takes (8, 3); task.metrics.acc=null leaves the accuracy out",
    "task.metrics={f1:{_target_:torchmetrics.classification.BinaryF1Score}}": f"task.metrics.f1: BinaryF1Score fails with {SHAPES}: "
    "RuntimeError: Predictions and targets are expected to have the same shape",
    "task.metrics={f1:{_target_:torchmetrics.classification.MulticlassF1Score,num_classes:3,average:null}}": "task.metrics.f1: "
    "MulticlassF1Score returns (3,), takes one number",
}  # fmt: skip


@pytest.mark.parametrize("words", UNFIT_TASKS)
def test_what_does_not_take_the_first_batch_is_one_line_of_a_run_that_is_not_kept(words: str, folder: Path) -> None:
    with pytest.raises(UnfitError) as caught:
        trained(folder, *words.split())
    assert str(caught.value).startswith(UNFIT_TASKS[words])


# What Lightning refuses when it trains, and what the first validation shows.
LATER = {
    "trainer.limit_val_batches=0.01": "trainer: You requested to check 0.01 of the `val_dataloader`",
    "trainer.val_check_interval=500": "trainer: `val_check_interval` (500) must be less than or equal to the number of the",
    f"{OWN} model.by_hand=true trainer.gradient_clip_val=1": "trainer: Automatic gradient clipping is not supported for manual",
    f"{OWN} model.by_hand=true trainer.accumulate_grad_batches=2": "trainer: Automatic gradient accumulation is not supported for",
    f"{OWN} callbacks=early_stopping": "trainer: Early stopping conditioned on metric `val/loss` which "
    "is not available. Pass in or modify your `EarlyStopping` callback to use any of the following: `val_loss`",
    f"{OWN} {OWN_STOP.format('val/loss')}": "trainer: Early stopping conditioned on metric `val/loss` ",
    "model=warmed data=points": "model: the state_dict of WarmsUp could not be read back from a checkpoint: it holds more than "
    "tensors and plain values; callbacks.checkpoint=null keeps no checkpoint",
    f"{OWN} callbacks.checkpoint.monitor=loss": "callbacks.checkpoint.monitor: got 'loss', and the validation measures val_loss. "
    "Did you mean 'val_loss'?",
}


OF_LIGHTNING_TOO = ("trainer.val_check_interval", f"{OWN} model.by_hand")  # as `limit_val_batches`


@pytest.mark.parametrize("words", [slow(words) if words.startswith(OF_LIGHTNING_TOO) else words for words in LATER])
def test_what_is_found_in_the_fit_is_one_line_of_a_failed_run(words: str, folder: Path) -> None:
    assert refusal(trained, folder, *words.split()).startswith(LATER[words])
    assert record(folder)["status"] == "failed"


class Four(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(4))


@pytest.mark.parametrize("samples", [range(4), Four()], ids=["sized", "a stream"])
def test_a_loader_without_a_batch_is_one_line(samples: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Points, "train_dataloader", lambda data: DataLoader(samples, 8, drop_last=True))
    with pytest.raises(UnfitError, match="^data: the training loader of Points has no batch to train on: it has no "):
        trained(folder, *OWN.split())
    assert record(folder)["status"] == "failed"


def test_what_a_module_logs_wrongly_is_one_line_with_the_place(folder: Path) -> None:
    message = refusal(trained, folder, "model=unfit", "data=points", "model.how=logs")
    assert re.fullmatch(r"trainer: `self.log\(two, .* \(tests/training/test_own.py, line \d+\)", message), message


@pytest.mark.parametrize(
    "words",
    ["model=unfit model.how=narrow", slow("model=unfit model.how=logs_later"), "model=tutorial callbacks=breaks"],
)
def test_what_a_module_or_a_callback_raises_is_passed_on(words: str, folder: Path) -> None:
    with pytest.raises((KeyError, ValueError, RuntimeError)):
        trained(folder, *words.split(), "data=points")
