"""A LightningModule and its data as Lightning's documentation has them, unchanged: what each command does with them.

Then what others have: two optimizers, two validation sets, a class of their own as a batch. Each works, or is one line.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from batchscope import load_model, read_answer, read_runs
from tests.support import fabricated_mnist
from tests.support.runs import QUIET, Run, assert_alike, kill_9, last, record, run
from tests.support.spawned import end, spawn

pytestmark = pytest.mark.slow  # whole runs with a model and data that differ in no mechanism from those of other tests

TUTORIAL = """
import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, random_split
from torchmetrics import Accuracy
from torchvision import transforms
from torchvision.datasets import MNIST


class LitAutoEncoder(L.LightningModule):
    def __init__(self, encoder, decoder):
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder

    def training_step(self, batch, batch_idx):
        # training_step defines the train loop.
        x, _ = batch
        x = x.view(x.size(0), -1)
        z = self.encoder(x)
        x_hat = self.decoder(z)
        loss = F.mse_loss(x_hat, x)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        return optimizer


class LitMNIST(L.LightningModule):
    def __init__(self, hidden_size=64, lr=2e-4):
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.model = nn.Sequential(
            nn.Flatten(),
            nn.Linear(28 * 28, hidden_size),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(hidden_size, 10),
        )
        self.val_accuracy = Accuracy(task="multiclass", num_classes=10)
        self.test_accuracy = Accuracy(task="multiclass", num_classes=10)

    def forward(self, x):
        x = self.model(x)
        return F.log_softmax(x, dim=1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.nll_loss(logits, y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.nll_loss(logits, y)
        preds = torch.argmax(logits, dim=1)
        self.val_accuracy.update(preds, y)
        self.log("val_loss", loss, prog_bar=True)
        self.log("val_acc", self.val_accuracy, prog_bar=True)

    def test_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.nll_loss(logits, y)
        preds = torch.argmax(logits, dim=1)
        self.test_accuracy.update(preds, y)
        self.log("test_loss", loss, prog_bar=True)
        self.log("test_acc", self.test_accuracy, prog_bar=True)

    def predict_step(self, batch, batch_idx):
        x, y = batch
        return torch.argmax(self(x), dim=1)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        return optimizer


class MNISTDataModule(L.LightningDataModule):
    def __init__(self, data_dir: str = "./", batch_size: int = 32):
        super().__init__()
        self.data_dir = data_dir
        self.batch_size = batch_size
        self.transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])

    def prepare_data(self):
        # download
        MNIST(self.data_dir, train=True, download=True)
        MNIST(self.data_dir, train=False, download=True)

    def setup(self, stage: str):
        # Assign train/val datasets for use in dataloaders
        if stage == "fit":
            mnist_full = MNIST(self.data_dir, train=True, transform=self.transform)
            self.mnist_train, self.mnist_val = random_split(
                mnist_full, [55000, 5000], generator=torch.Generator().manual_seed(42)
            )

        # Assign test dataset for use in dataloader(s)
        if stage == "test":
            self.mnist_test = MNIST(self.data_dir, train=False, transform=self.transform)

        if stage == "predict":
            self.mnist_predict = MNIST(self.data_dir, train=False, transform=self.transform)

    def train_dataloader(self):
        return DataLoader(self.mnist_train, batch_size=self.batch_size)

    def val_dataloader(self):
        return DataLoader(self.mnist_val, batch_size=self.batch_size)

    def test_dataloader(self):
        return DataLoader(self.mnist_test, batch_size=self.batch_size)

    def predict_dataloader(self):
        return DataLoader(self.mnist_predict, batch_size=self.batch_size)
"""
OTHERS = '''
import lightning as L
import torch
import torch.nn.functional as F
from lit_mnist import LitMNIST, MNISTDataModule
from torch import nn
from torch.utils.data import DataLoader


class GAN(L.LightningModule):
    """Two optimizers, as in Lightning's example of a GAN."""

    def __init__(self, latent_dim: int = 16, lr: float = 0.0002):
        super().__init__()
        self.automatic_optimization = False
        self.latent_dim, self.lr = latent_dim, lr
        self.generator = nn.Sequential(nn.Linear(latent_dim, 64), nn.ReLU(), nn.Linear(64, 28 * 28), nn.Tanh())
        self.discriminator = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
        self.example_input_array = torch.zeros(2, latent_dim)

    def forward(self, z):
        return self.generator(z).view(-1, 1, 28, 28)

    def adversarial_loss(self, images, are_real):
        found = self.discriminator(images)
        return F.binary_cross_entropy_with_logits(found, torch.full_like(found, float(are_real)))

    def training_step(self, batch):
        images, _ = batch
        optimizer_g, optimizer_d = self.optimizers()
        z = torch.randn(images.shape[0], self.latent_dim).type_as(images)
        self.toggle_optimizer(optimizer_g)
        g_loss = self.adversarial_loss(self(z), True)
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)
        self.toggle_optimizer(optimizer_d)
        d_loss = (self.adversarial_loss(images, True) + self.adversarial_loss(self(z).detach(), False)) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

    def configure_optimizers(self):
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=self.lr, betas=(0.5, 0.999))
        opt_d = torch.optim.Adam(self.discriminator.parameters(), lr=self.lr, betas=(0.5, 0.999))
        return [opt_g, opt_d], []


class OnTwo(LitMNIST):
    """Is validated on two sets."""

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        self.log("val_loss", F.nll_loss(self(x), y))


class TwoSets(MNISTDataModule):
    def val_dataloader(self):
        return [super().val_dataloader(), super().val_dataloader()]


class Pair:
    """A batch as a class of one's own."""

    def __init__(self, samples):
        self.images = torch.stack([image for image, _ in samples])
        self.labels = torch.tensor([label for _, label in samples])

    def to(self, device, **how):
        self.images, self.labels = self.images.to(device, **how), self.labels.to(device, **how)
        return self


class OnPairs(LitMNIST):
    def loss(self, batch):
        return F.nll_loss(self(batch.images), batch.labels)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), batch_size=len(batch.labels))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch), batch_size=len(batch.labels))

    def predict_step(self, batch, batch_idx):
        return {"label": batch.labels, "answer": self(batch.images).argmax(1)}


class Pairs(MNISTDataModule):
    def train_dataloader(self):
        return DataLoader(self.mnist_train, batch_size=self.batch_size, collate_fn=Pair)

    def val_dataloader(self):
        return DataLoader(self.mnist_val, batch_size=self.batch_size, collate_fn=Pair)

    def test_dataloader(self):
        return DataLoader(self.mnist_test, batch_size=self.batch_size, collate_fn=Pair)
'''
LINEAR = "{{_target_: torch.nn.Linear, in_features: {}, out_features: {}}}"
SEQUENTIAL = "{{_target_: torch.nn.Sequential, _args_: [{}, {{_target_: torch.nn.ReLU}}, {}]}}"
ENCODER = SEQUENTIAL.format(LINEAR.format(784, 64), LINEAR.format(64, 3))
DECODER = SEQUENTIAL.format(LINEAR.format(3, 64), LINEAR.format(64, 784))
DATA = "data_dir: data\nbatch_size: 32\n"
FILES = {
    "lit_mnist.py": TUTORIAL,
    "others.py": OTHERS,
    "conf/model/lit.yaml": "_target_: lit_mnist.LitMNIST\nhidden_size: 64\nlr: 0.001\n",
    "conf/model/auto.yaml": f"_target_: lit_mnist.LitAutoEncoder\nencoder: {ENCODER}\ndecoder: {DECODER}\n",
    "conf/model/gan.yaml": "_target_: others.GAN\nlatent_dim: 16\nlr: 0.0002\n",
    "conf/model/on_two.yaml": "_target_: others.OnTwo\n",
    "conf/model/on_pairs.yaml": "_target_: others.OnPairs\n",
    "conf/data/theirs.yaml": f"_target_: lit_mnist.MNISTDataModule\n{DATA}",
    "conf/data/two_sets.yaml": f"_target_: others.TwoSets\n{DATA}",
    "conf/data/pairs.yaml": f"_target_: others.Pairs\n{DATA}",
}
LIMITS = [f"trainer.limit_{stage}_batches={batches}" for stage, batches in (("train", 6), ("val", 2), ("test", 2))]
SHORT = ["trainer.accelerator=cpu", "trainer.max_epochs=2", *LIMITS, *QUIET]
LIT = ["model=lit", "data=theirs", *SHORT]
BEST = "ckpt=first/checkpoints/best.ckpt"
FEW = "+trainer.limit_predict_batches=2"
TYPED = {"BATCHSCOPE_CONFIG_DIR": "conf"}  # once, in place of --config-dir on every line


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files above, and files of MNIST's size and format, in whose place torchvision loads nothing."""
    folder = tmp_path_factory.mktemp("project")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    raw = folder / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, content in fabricated_mnist.contents(60_000, 10_000, fabricated_mnist.random_pixels).items():
        (raw / name).write_bytes(content)
    return folder


@pytest.fixture
def batchscope(project: Path) -> Callable[..., Run]:
    """Runs a command in the project; it ends with this exit code."""

    def command(*words: str, code: int = 0, faults: Any = ()) -> Run:
        return run(project, *words, code=code, faults=faults, module="batchscope.__main__", environ=TYPED)

    return command


@pytest.fixture(scope="module")
def first(project: Path) -> dict[str, Any]:
    """The record of a run of the tutorial's module."""
    words = ["train", *LIT, "hydra.run.dir=first"]
    run(project, *words, code=0, module="batchscope.__main__", environ=TYPED)
    return record(project / "first")


# --- the tutorial ----------------------------------------------------------------------------------------------------


def test_it_is_trained_tested_and_evaluated(first: dict[str, Any], batchscope) -> None:
    assert (first["status"], first["name"], first["steps"]) == ("finished", "lit-MNISTDataModule-bs32", 12)
    assert first["checkpoints"].keys() == {"best", "last"}
    assert first["metrics"].keys() >= {"train_loss", "val_loss", "val_acc", "test_loss", "test_acc"}
    title, *lines = batchscope("evaluate", BEST).said.splitlines()[-3:]
    assert title == "lit-MNISTDataModule-bs32, tested on MNISTDataModule (64 samples)"
    found = {name: float(value) for name, value in map(str.split, lines)}
    assert found == pytest.approx({key: first["metrics"][key] for key in ("test_acc", "test_loss")}, abs=1e-6)


def test_a_killed_run_is_resumed_to_the_same_end(first, batchscope, project: Path) -> None:
    step = "lightning.pytorch.core.optimizer.LightningOptimizer.step"
    batchscope("train", *LIT, "hydra.run.dir=killed", code=-9, faults=[(step, 7, kill_9)])
    batchscope("train", "resume=killed")
    assert_alike(last(project / "first")["state_dict"], last(project / "killed")["state_dict"])


@pytest.mark.parametrize("option", ["data.batch_size=16,32", "model.lr=0.001,0.1"])
def test_a_sweep_is_answered_also_for_a_script(option: str, project: Path) -> None:
    name, _, values = option.partition("=")
    words = ["-m", "batchscope", "train", "-m", *LIT, option, "timing=false", f"hydra.sweep.dir={name}"]
    done = end(spawn(project, *words, **TYPED))
    assert done.code == 0, done.err
    frame, answer = read_runs(project / name), read_answer(project / name)
    accuracy = frame["val/acc"].astype(float)
    if name == "model.lr":
        assert [str(value) for value in frame[name]] == values.split(",")
        best = {"metric": "val/acc", "value": accuracy.max(), "settings": {name: frame[name][accuracy.idxmax()]}}
        assert answer["best_setting"] == best
        assert answer["lines"][0].startswith("Best val/acc: ")
    else:
        (group,) = answer["groups"]
        assert len(accuracy.dropna()) == 2
        assert [row["batch_size"] for row in group["sizes"]] == [16, 32]


def test_its_answers_are_those_of_its_predict_step(first, batchscope, project: Path) -> None:
    batchscope("predict", BEST, "input=predict", "output=answers.csv", FEW)
    table = pd.read_csv(project / "answers.csv")
    assert [*table] == ["sample", "output"] and len(table) == 64 and table["output"].between(0, 9).all()
    batchscope("predict", BEST, "input=test", "output=tested.csv", FEW)
    assert pd.read_csv(project / "tested.csv").equals(table)  # the same samples


def test_it_is_exported_timed_and_loaded(first, batchscope, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = batchscope("export", BEST, "output=lit.pt2").said
    assert "lit-MNISTDataModule-bs32 → lit.pt2: differs from the network by at most " in said
    assert said.endswith(" on 32 test samples\n")
    said = batchscope("latency", BEST, "data.batch_size=1,8", "trainer.accelerator=cpu").said
    assert "lit-MNISTDataModule-bs32 on " in said
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "path", [*sys.path])
    network = load_model("first/checkpoints/best.ckpt", config_dir="conf")
    with torch.inference_mode():
        x = torch.zeros(2, 1, 28, 28)
        torch.testing.assert_close(torch.export.load("lit.pt2").module()(x), network(x))


def test_a_module_without_a_validation_and_a_forward_says_what_to_write(batchscope, project: Path) -> None:
    batchscope("train", "model=auto", "data=theirs", *SHORT, "hydra.run.dir=auto")
    assert record(project / "auto")["status"] == "finished"
    checkpoint = "ckpt=auto/checkpoints/last.ckpt"
    said = batchscope("predict", checkpoint, "input=test", code=1).complained.splitlines()[-1]
    assert said.startswith("error: input: LitAutoEncoder has no predict_step(batch, batch_idx), and its forward does")
    said = batchscope("latency", checkpoint, code=1).complained.splitlines()[-1]
    assert said.startswith("error: model: nobody knows which tensors forward of LitAutoEncoder takes of test samples; ")
    said = batchscope("evaluate", checkpoint, code=1).complained.splitlines()[-1]
    assert said == "error: model: LitAutoEncoder has no test_step, so there is nothing to evaluate"


# --- what others have ------------------------------------------------------------------------------------------------


def test_two_optimizers_are_trained_and_the_example_of_the_module_is_exported(batchscope, project: Path) -> None:
    batchscope("train", "model=gan", "data=theirs", *SHORT, "hydra.run.dir=gan")
    found = record(project / "gan")
    assert (found["status"], found["checkpoints"].keys()) == ("finished", {"last"})
    assert found["metrics"].keys() >= {"g_loss", "d_loss"}
    said = batchscope("export", "ckpt=gan/checkpoints/last.ckpt", "output=gan.pt2").said
    assert said.endswith(" on 2 rows of example_input_array\n")


def test_two_validations_have_a_best_checkpoint_by_the_one_that_is_named(batchscope, project: Path) -> None:
    words = ["train", "model=on_two", "data=two_sets", *SHORT]
    said = batchscope(*words, "hydra.run.dir=two").complained
    assert "warning: no best checkpoint is kept: the validation measures val" in said
    assert "val_loss/dataloader_idx_0, val_loss/dataloader_idx_1; name one by callbacks.checkpoint.monitor\n" in said
    assert record(project / "two")["checkpoints"].keys() == {"last"}
    batchscope(*words, "hydra.run.dir=named", "callbacks.checkpoint.monitor=val_loss/dataloader_idx_1")
    assert record(project / "named")["checkpoints"].keys() == {"best", "last"}


def test_a_batch_may_be_a_class_of_its_own(batchscope, project: Path) -> None:
    batchscope("train", "model=on_pairs", "data=pairs", *SHORT, "hydra.run.dir=pairs")
    found, checkpoint = record(project / "pairs"), "ckpt=pairs/checkpoints/best.ckpt"
    assert (found["status"], found["steps"]) == ("finished", 12)
    title, line = batchscope("evaluate", checkpoint).said.splitlines()[-2:]
    assert title == "on-pairs-Pairs-bs32, tested on Pairs"
    assert float(line.split()[1]) == pytest.approx(found["metrics"]["test_loss"], abs=1e-6)
    batchscope("predict", checkpoint, "input=test", "output=pairs.csv", FEW)
    assert [*pd.read_csv(project / "pairs.csv")] == ["sample", "label", "answer"]
    said = batchscope("latency", checkpoint, code=1).complained.splitlines()[-1]
    assert said.startswith("error: model: nobody knows which tensors forward of OnPairs takes of test samples; ")
