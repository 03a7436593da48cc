"""A LightningModule of the user's own is trained, recorded, resumed and evaluated as it is."""

import json
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from batchscope.cli.evaluate import evaluate
from batchscope.errors import UserError
from batchscope.options.compose import check_command_line
from batchscope.options.groups import use_config_dir
from batchscope.training.run import train


class Regression(lightning.LightningModule):
    """As in a tutorial: its own loss, metric names, optimizer and schedule."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 1))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.huber_loss(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class WithTest(Regression):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))


class Points(lightning.LightningDataModule):
    """Without a spec."""

    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()

    def loader(self, size: int, shuffle: bool = False) -> DataLoader:
        x = torch.randn(size, 2, generator=torch.Generator().manual_seed(size))
        return DataLoader(
            TensorDataset(x, x.sum(1, keepdim=True)), batch_size=self.hparams["batch_size"], shuffle=shuffle
        )

    def train_dataloader(self) -> DataLoader:
        return self.loader(80, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return self.loader(16)

    def test_dataloader(self) -> DataLoader:
        return self.loader(24)


class FixedBatches(lightning.LightningDataModule):
    """Without an option for the batch size."""

    def train_dataloader(self) -> DataLoader:
        return Points().loader(40)


@pytest.fixture
def configs(tmp_path: Path) -> Path:
    for section, name in (("model", "Regression"), ("model", "WithTest"), ("data", "Points")):
        place = tmp_path / "conf" / section / f"{name.lower()}.yaml"
        place.parent.mkdir(parents=True, exist_ok=True)
        more = "batch_size: 8\n" if section == "data" else "width: 4\n"
        place.write_text(f"_target_: {__name__}.{name}\n{more}")
    (tmp_path / "conf/data/fixedbatches.yaml").write_text(f"_target_: {__name__}.FixedBatches\n")
    use_config_dir(str(tmp_path / "conf"))
    return tmp_path


def trained(folder: Path, *words: str, epochs: int = 2, model: str = "withtest") -> dict[str, Any]:
    """The record of a run in `folder`."""
    quiet = [f"callbacks.{name}=null" for name in ("progress", "throughput", "memory", "device")]
    line = [f"model={model}", "data=points", f"trainer.max_epochs={epochs}", "trainer.accelerator=cpu"]
    line += [*quiet, f"run_dir={folder}", *words]
    (config,) = check_command_line(line, multirun=False)
    train(config, folder, {"model": model, "data": "points"}, line)
    return json.loads((folder / "run.json").read_text())


def test_it_is_trained_tested_and_recorded(configs: Path) -> None:
    record = trained(configs / "run")
    assert record["status"] == "finished"
    assert record["steps"] == 20
    assert record["model"] == {"class": "WithTest", "parameters": 17, "lightning_module": True}
    assert record["metrics"].keys() >= {"val_loss", "test_loss"}
    assert record["learning_rate"] == 0.1
    assert record["dataset"]["train_samples"] == 80  # as its loader says


def test_data_may_have_no_batch_size_to_set(configs: Path) -> None:
    record = trained(configs / "run", "data=fixedbatches", "test=false")
    assert record["steps"] == 10
    assert record["name"] == "withtest-FixedBatches"


def test_its_best_checkpoint_is_that_of_val_loss(configs: Path) -> None:
    record = trained(configs / "run")
    assert record["checkpoints"].keys() == {"best", "last"}


def test_a_checkpoint_is_evaluated_by_its_path(configs: Path) -> None:
    record = trained(configs / "run")
    name, metrics = evaluate(configs / "run/checkpoints/best.ckpt", ["trainer.accelerator=cpu"])
    assert name == "withtest-Points-bs8, tested on Points (24 samples)"
    assert metrics["test_loss"] == pytest.approx(record["metrics"]["test_loss"])


def test_one_without_a_test_step_is_trained_and_not_evaluated(configs: Path) -> None:
    trained(configs / "run", model="regression")
    with pytest.raises(UserError, match="model: Regression has no test_step"):
        evaluate(configs / "run/checkpoints/best.ckpt", [])


def test_the_metric_that_decides_may_be_another(configs: Path) -> None:
    with pytest.raises(UserError, match="got 'loss', and the validation measures val_loss. Did you mean 'val_loss'"):
        trained(configs / "run", "callbacks.checkpoint.monitor=loss")


def test_compiling_is_its_own(configs: Path) -> None:
    with pytest.raises(UserError, match="compile: WithTest is a LightningModule, which compiles itself"):
        trained(configs / "run", "compile=true")


@pytest.mark.parametrize("option", ["model.BoringModel", "data.BoringDataModule"])
def test_one_of_the_older_package_is_one_line(configs: Path, option: str) -> None:
    section, _, name = option.partition(".")
    words = [f"{section}._target_=pytorch_lightning.demos.boring_classes.{name}", f"~{section}.width"]
    words = words if section == "model" else [words[0], "data=fixedbatches"]
    with pytest.raises(
        UserError, match=f"{section}: {name} is of the package pytorch_lightning; import lightning.pyto"
    ):
        trained(configs / "run", *words)


class ByHand(Regression):
    def __init__(self, width: int = 4) -> None:
        super().__init__(width)
        self.automatic_optimization = False


def test_it_accumulates_a_constant_update_unless_it_optimises_by_hand(configs: Path) -> None:
    assert trained(configs / "run", "global_batch_size=40")["steps"] == 4
    words = [f"model._target_={__name__}.ByHand", "global_batch_size=40"]
    with pytest.raises(UserError, match="global_batch_size: takes 5 batches an update, and ByHand optimises by hand"):
        trained(configs / "by_hand", *words)
    assert not (configs / "by_hand").exists()


def test_any_other_model_needs_data_with_a_spec(configs: Path) -> None:
    with pytest.raises(UserError, match="data: Points has no spec"):
        trained(configs / "run", model="mlp")
