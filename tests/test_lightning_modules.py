"""A LightningModule and its data as Lightning's documentation has them, unchanged: what each command does with them.

Then what others have: two optimizers, two validation sets, a class of their own as a batch, a pretrained backbone, a
U-Net on masks. Each works, or is one line. Every command is the program of the installed wheel, in one folder that has
these files and YAML files alone.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf
from PIL import Image
from torch import nn

from tests.support import fabricated_mnist, fork_server, wheel
from tests.support.runs import QUIET, Run, assert_alike, kill_9, last, record, run
from tests.support.spawned import end, spawn
from tests.support.transcript import write_files

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
TRANSFER = '''
import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import Accuracy
from torchvision.datasets import ImageFolder
from torchvision.transforms import ToTensor


class Photos(L.LightningDataModule):
    def __init__(self, data_dir: str = "photos", batch_size: int = 8):
        super().__init__()
        self.save_hyperparameters()

    def loader(self, split, shuffle=False):
        photos = ImageFolder(f"{self.hparams.data_dir}/{split}", ToTensor())
        return DataLoader(photos, self.hparams.batch_size, shuffle=shuffle)

    def train_dataloader(self):
        return self.loader("train", shuffle=True)

    def val_dataloader(self):
        return self.loader("val")

    def test_dataloader(self):
        return self.loader("test")


class Transfer(L.LightningModule):
    """A pretrained backbone, and a classifier of its features."""

    def __init__(self, backbone: str, lr: float = 0.01):
        super().__init__()
        self.lr = lr
        self.feature_extractor = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten())
        self.feature_extractor.load_state_dict(torch.load(backbone))
        self.classifier = nn.Linear(8 * 4 * 4, 2)
        self.accuracy = Accuracy(task="multiclass", num_classes=2)

    def forward(self, x):
        return self.classifier(self.feature_extractor(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x), y)

    def evaluate(self, batch, stage):
        x, y = batch
        logits = self(x)
        self.accuracy(logits, y)
        self.log(f"{stage}_loss", F.cross_entropy(logits, y))
        self.log(f"{stage}_acc", self.accuracy)

    def validation_step(self, batch, batch_idx):
        self.evaluate(batch, "val")

    def test_step(self, batch, batch_idx):
        self.evaluate(batch, "test")

    def configure_optimizers(self):
        return torch.optim.Adam(filter(lambda p: p.requires_grad, self.parameters()), lr=self.lr)


class FeatureExtractorFreezeUnfreeze(BaseFinetuning):
    def __init__(self, unfreeze_at_epoch=10):
        super().__init__()
        self._unfreeze_at_epoch = unfreeze_at_epoch

    def freeze_before_training(self, pl_module):
        # freeze any module you want
        # Here, we are freezing `feature_extractor`
        self.freeze(pl_module.feature_extractor)

    def finetune_function(self, pl_module, current_epoch, optimizer):
        # When `current_epoch` is 10, feature_extractor will start training.
        if current_epoch == self._unfreeze_at_epoch:
            self.unfreeze_and_add_param_group(
                modules=pl_module.feature_extractor,
                optimizer=optimizer,
                train_bn=True,
            )
'''
MASKS = '''
from pathlib import Path

from PIL import Image
from torchvision.transforms.functional import pil_to_tensor, to_tensor

from batchscope.data import DataModule, DataSpec


class Masks(DataModule):
    """Images of discs, each with a mask of its pixels."""

    kind, name = "image", "masks"
    spec = DataSpec("image", (1, 32, 32), "class_per_pixel", 1)  # one logit

    def __init__(self, root: str, **kwargs):
        super().__init__(**kwargs)
        self.root = Path(root)

    def dataset(self, split):
        images = sorted((self.root / split / "images").iterdir())
        masks = [pil_to_tensor(Image.open(self.root / split / "masks" / image.name))[0] for image in images]
        return [(to_tensor(Image.open(image)), (mask > 0).long()) for image, mask in zip(images, masks)]
'''
SCRIPT = """
import json

import batchscope
import torch
from batchscope import load_model, read_answer, read_runs

found = {"package": batchscope.__file__}
for sweep, option in {"sizes": "batch_size", "rates": "model.lr", "find_lr": "model.lr"}.items():
    runs = read_runs(sweep)[[option, "val/acc"]]
    found[sweep] = {"runs": runs.values.tolist(), "answer": read_answer(sweep)}
network = load_model("first/checkpoints/best.ckpt", config_dir="conf")
exported = torch.export.load("lit.pt2").module()
with torch.inference_mode():
    x = torch.rand(3, 1, 28, 28)
    found["difference"] = (exported(x) - network(x)).abs().max().item()
print(json.dumps(found))
"""
LINEAR = "{{_target_: torch.nn.Linear, in_features: {}, out_features: {}}}"
SEQUENTIAL = "{{_target_: torch.nn.Sequential, _args_: [{}, {{_target_: torch.nn.ReLU}}, {}]}}"
ENCODER = SEQUENTIAL.format(LINEAR.format(784, 64), LINEAR.format(64, 3))
DECODER = SEQUENTIAL.format(LINEAR.format(3, 64), LINEAR.format(64, 784))
DATA = "data_dir: data\nbatch_size: 32\n"
FILES = {
    "lit_mnist.py": TUTORIAL,
    "others.py": OTHERS,
    "transfer.py": TRANSFER,
    "masks.py": MASKS,
    "read_back.py": SCRIPT,
    "conf/model/lit.yaml": "_target_: lit_mnist.LitMNIST\nhidden_size: 64\nlr: 0.001\n",
    "conf/model/auto.yaml": f"_target_: lit_mnist.LitAutoEncoder\nencoder: {ENCODER}\ndecoder: {DECODER}\n",
    "conf/model/gan.yaml": "_target_: others.GAN\nlatent_dim: 16\nlr: 0.0002\n",
    "conf/model/on_two.yaml": "_target_: others.OnTwo\n",
    "conf/model/on_pairs.yaml": "_target_: others.OnPairs\n",
    "conf/model/transfer.yaml": "_target_: transfer.Transfer\nbackbone: backbone.pt\nlr: 0.01\n",
    "conf/data/theirs.yaml": f"_target_: lit_mnist.MNISTDataModule\n{DATA}",
    "conf/data/two_sets.yaml": f"_target_: others.TwoSets\n{DATA}",
    "conf/data/pairs.yaml": f"_target_: others.Pairs\n{DATA}",
    "conf/data/photos.yaml": "_target_: transfer.Photos\ndata_dir: photos\nbatch_size: 8\n",
    "conf/data/masks.yaml": "defaults: [/_data@_here_, _self_]\n_target_: masks.Masks\nroot: discs\nbatch_size: 8\n"
    "num_workers: 0\n",
    "conf/callbacks/mine.yaml": "finetuning:\n  _target_: transfer.FeatureExtractorFreezeUnfreeze\n"
    "  unfreeze_at_epoch: 1\n",
}
LIMITS = [f"trainer.limit_{stage}_batches={batches}" for stage, batches in (("train", 6), ("val", 2), ("test", 2))]
SHORT = ["trainer.accelerator=cpu", "trainer.max_epochs=2", *LIMITS, *QUIET]
LIT = ["model=lit", "data=theirs", *SHORT]
BEST = "ckpt=first/checkpoints/best.ckpt"
FEW = "+trainer.limit_predict_batches=2"
TYPED = {"BATCHSCOPE_CONFIG_DIR": "conf"}  # once, in place of --config-dir on every line
PAGE = wheel.ROOT / "docs" / "own-project.md"  # has the U-Net and its Dice score
STEP = "lightning.pytorch.core.optimizer.LightningOptimizer.step"
SWEEPS = {
    "sizes": ["data.batch_size=16,32", *SHORT],
    "rates": ["model.lr=0.001,0.1", *SHORT],
    "find_lr": ["experiment=find_lr", "trainer.accelerator=cpu", *LIMITS, *QUIET],
}
RATES = {"rates": [0.001, 0.1], "find_lr": [0.0003, 0.001, 0.003, 0.01, 0.03, 0.1]}  # of the module's own option


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files above, and files of MNIST's size and format, in whose place torchvision loads nothing."""
    folder = tmp_path_factory.mktemp("project")
    write_files(PAGE.read_text(encoding="utf-8"), folder)
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    raw = folder / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, content in fabricated_mnist.contents(60_000, 10_000, fabricated_mnist.random_pixels).items():
        (raw / name).write_bytes(content)
    write_images(folder)
    torch.save(nn.Sequential(nn.Conv2d(3, 8, 3)).state_dict(), folder / "backbone.pt")
    return folder


def write_images(folder: Path) -> None:
    """`photos`, a folder for each of two classes in each split; and `discs`, images of 32×32 pixels with their masks."""
    random, coordinate = numpy.random.default_rng(0), numpy.arange(32)
    for split, size in {"train": 48, "val": 16, "test": 16}.items():
        for number in range(size):
            row, column = random.integers(8, 24, 2)
            mask = ((coordinate[:, None] - row) ** 2 + (coordinate - column) ** 2 < 36).astype(numpy.uint8)
            images = {
                f"photos/{split}/{('cat', 'dog')[number % 2]}": random.integers(0, 256, (24, 24, 3), dtype=numpy.uint8),
                f"discs/{split}/images": random.integers(0, 100, (32, 32), dtype=numpy.uint8) + 100 * mask,
                f"discs/{split}/masks": 255 * mask,
            }
            for name, pixels in images.items():
                (folder / name).mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(folder / name / f"{number:02}.png")


def start_sweep(project: Path, installed: wheel.Environment, folder: str, *words: str) -> Any:
    """Start a sweep of the tutorial's module as a shell does."""
    program = [str(installed.programs / "batchscope"), "train", "-m", "model=lit", "data=theirs", "timing=false"]
    return spawn(project, *program, *words, f"hydra.sweep.dir={folder}", python="", **TYPED)


@pytest.fixture(scope="module", autouse=True)
def sweeps(project: Path, installed: wheel.Environment) -> Iterator[dict[str, Any]]:
    """The processes of the sweeps: started first, because they take long, and run beside the other commands."""
    started = {name: start_sweep(project, installed, name, *words) for name, words in SWEEPS.items()}
    yield started
    for process in started.values():
        with process:
            process.kill()  # unless it has ended


@pytest.fixture(scope="module")
def batchscope(project: Path, installed: wheel.Environment) -> Iterator[Callable[..., Run]]:
    """A function that runs a command in the project, and checks its exit code."""
    with fork_server.of_python(installed.programs / "python", installed.variables) as server:

        def command(*words: str, code: int = 0, faults: Any = ()) -> Run:
            options = {"module": "batchscope.__main__", "environ": TYPED, "server": server}
            return run(project, *words, code=code, faults=faults, **options)

        yield command


@pytest.fixture(scope="module")
def first(project: Path, batchscope) -> dict[str, Any]:
    """The record of a run of the tutorial's module."""
    batchscope("train", *LIT, "hydra.run.dir=first")
    return record(project / "first")


@pytest.fixture(scope="module")
def exported(first, batchscope) -> str:
    """The output of the command that exports the network of that run."""
    return batchscope("export", BEST, "output=lit.pt2").said


@pytest.fixture(scope="module")
def read_back(project: Path, installed: wheel.Environment, sweeps, exported) -> dict[str, Any]:
    """The results that a script reads from the sweeps and the exported network."""
    for process in sweeps.values():
        swept = end(process)
        assert swept.code == 0, swept.err
    script = end(spawn(project, "read_back.py", python=str(installed.programs / "python")))
    assert script.code == 0, script.err
    return json.loads(script.out)


def evaluated(output: str, metrics: int) -> tuple[str, dict[str, float]]:
    """Parse the title that `evaluate` prints, and this number of metrics below the title."""
    title, *lines = output.splitlines()[-1 - metrics :]
    return title, {name: float(value) for name, value in map(str.split, lines)}


def close_to(run_record: dict[str, Any], *names: str) -> Any:
    """Approximate the metrics of a record to the six digits that `evaluate` prints."""
    return pytest.approx({name: run_record["metrics"][name] for name in names}, rel=1e-5)


# --- the tutorial ----------------------------------------------------------------------------------------------------


def test_it_is_trained_tested_and_evaluated(first: dict[str, Any], batchscope) -> None:
    assert (first["status"], first["name"], first["steps"]) == ("finished", "lit-MNISTDataModule-bs32", 12)
    assert first["checkpoints"].keys() == {"best", "last"}
    assert first["metrics"].keys() >= {"train_loss", "val_loss", "val_acc", "test_loss", "test_acc"}
    title, metrics = evaluated(batchscope("evaluate", BEST).said, 2)
    assert title == "lit-MNISTDataModule-bs32, tested on MNISTDataModule"
    assert metrics == close_to(first, "test_acc", "test_loss")


def test_a_killed_run_is_resumed_to_the_same_end(first, batchscope, project: Path) -> None:
    batchscope("train", *LIT, "hydra.run.dir=killed", code=-9, faults=[(STEP, 7, kill_9)])
    batchscope("train", "resume=killed")
    assert_alike(last(project / "first")["state_dict"], last(project / "killed")["state_dict"])


def test_its_answers_are_those_of_its_predict_step(first, batchscope, project: Path) -> None:
    batchscope("predict", BEST, "input=predict", "output=answers.csv", FEW)
    table = pd.read_csv(project / "answers.csv")
    assert [*table] == ["sample", "output"] and len(table) == 64 and table["output"].between(0, 9).all()
    batchscope("predict", BEST, "input=test", "output=tested.csv", FEW)
    assert pd.read_csv(project / "tested.csv").equals(table)  # the same samples


def test_a_module_without_a_validation_and_a_forward_says_what_to_write(batchscope, project: Path) -> None:
    batchscope("train", "model=auto", "data=theirs", *SHORT, "hydra.run.dir=auto")
    assert record(project / "auto")["status"] == "finished"
    checkpoint = "ckpt=auto/checkpoints/last.ckpt"
    line = batchscope("predict", checkpoint, "input=test", code=1).complained.splitlines()[-1]
    assert line.startswith("error: input: LitAutoEncoder has no predict_step(batch, batch_idx), and its forward does")
    line = batchscope("latency", checkpoint, code=1).complained.splitlines()[-1]
    assert line.startswith("error: model: nobody knows which tensors forward of LitAutoEncoder takes of test samples; ")
    line = batchscope("evaluate", checkpoint, code=1).complained.splitlines()[-1]
    assert line == "error: model: LitAutoEncoder has no test_step, so there is nothing to evaluate"


# --- what others have ------------------------------------------------------------------------------------------------


def test_two_optimizers_are_trained_and_the_example_of_the_module_is_exported(batchscope, project: Path) -> None:
    batchscope("train", "model=gan", "data=theirs", *SHORT, "hydra.run.dir=gan")
    run_record = record(project / "gan")
    assert (run_record["status"], run_record["checkpoints"].keys()) == ("finished", {"last"})
    assert run_record["metrics"].keys() >= {"g_loss", "d_loss"}
    output = batchscope("export", "ckpt=gan/checkpoints/last.ckpt", "output=gan.pt2").said
    assert output.endswith(" on 2 rows of example_input_array\n")


def test_two_validations_have_a_best_checkpoint_by_the_one_that_is_named(batchscope, project: Path) -> None:
    words = ["train", "model=on_two", "data=two_sets", *SHORT]
    text = batchscope(*words, "hydra.run.dir=two").complained
    assert "warning: no best checkpoint is kept: the validation measures val" in text
    assert (
        "val_loss/dataloader_idx_0, val_loss/dataloader_idx_1; name a metric by callbacks.checkpoint.monitor\n" in text
    )
    assert record(project / "two")["checkpoints"].keys() == {"last"}
    batchscope(*words, "hydra.run.dir=named", "callbacks.checkpoint.monitor=val_loss/dataloader_idx_1")
    assert record(project / "named")["checkpoints"].keys() == {"best", "last"}


def test_a_batch_may_be_a_class_of_its_own(batchscope, project: Path) -> None:
    batchscope("train", "model=on_pairs", "data=pairs", *SHORT, "hydra.run.dir=pairs")
    run_record, checkpoint = record(project / "pairs"), "ckpt=pairs/checkpoints/best.ckpt"
    assert (run_record["status"], run_record["steps"]) == ("finished", 12)
    title, metrics = evaluated(batchscope("evaluate", checkpoint).said, 1)
    assert title == "on-pairs-Pairs-bs32, tested on Pairs"
    assert metrics == close_to(run_record, "test_loss")
    batchscope("predict", checkpoint, "input=test", "output=pairs.csv", FEW)
    assert [*pd.read_csv(project / "pairs.csv")] == ["sample", "label", "answer"]
    error = batchscope("latency", checkpoint, code=1).complained.splitlines()[-1]
    assert error.startswith("error: model: nobody knows which tensors forward of OnPairs takes of test samples; ")


def test_a_backbone_is_frozen_and_later_trained_by_a_callback_also_in_a_resumed_run(batchscope, project: Path) -> None:
    words = ["train", "model=transfer", "data=photos", "callbacks=mine", *SHORT]
    batchscope(*words, "hydra.run.dir=thawed")
    batchscope(*words, "hydra.run.dir=thawing", code=-9, faults=[(STEP, 7, kill_9)])
    frozen = last(project / "thawing")
    batchscope("train", "resume=thawing")
    whole, resumed = last(project / "thawed"), last(project / "thawing")
    assert_alike(whole["state_dict"], resumed["state_dict"])
    backbone = torch.load(project / "backbone.pt", weights_only=True)["0.weight"]
    alike = [torch.equal(ckpt["state_dict"]["feature_extractor.0.weight"], backbone) for ckpt in (frozen, whole)]
    groups = [len(ckpt["optimizer_states"][0]["param_groups"]) for ckpt in (frozen, resumed)]
    assert (alike, groups) == ([True, False], [1, 2])
    title, metrics = evaluated(batchscope("evaluate", "ckpt=thawing/checkpoints/best.ckpt").said, 2)
    assert title == "transfer-Photos-bs8, tested on Photos"
    assert metrics == close_to(record(project / "thawing"), "test_acc", "test_loss")


def test_a_unet_of_one_logit_is_chosen_by_its_dice_score_on_masks(batchscope, project: Path) -> None:
    words = ["model=my_unet", "data=masks", "task=my_dice", "callbacks.checkpoint.monitor=val/dice"]
    batchscope("train", *words, "optimizer.lr=0.02", *SHORT, "hydra.run.dir=unet")
    run_record, checkpoint = record(project / "unet"), "ckpt=unet/checkpoints/best.ckpt"
    assert run_record["metrics"].keys() >= {"val/dice", "test/dice"}
    title, metrics = evaluated(batchscope("evaluate", checkpoint).said, 3)
    assert title == "my-unet-masks-bs8, tested on masks"
    assert metrics == close_to(run_record, "test/acc", "test/dice", "test/loss")
    batchscope("predict", checkpoint, "input=discs/test/images", "output=masks.npz")
    with numpy.load(project / "masks.npz") as arrays:
        answers = arrays["prediction"] == 1
    masks = numpy.stack([Image.open(file) for file in sorted((project / "discs/test/masks").iterdir())]) > 0
    dice = 2 * (answers & masks).sum(axis=(1, 2)) / (answers.sum(axis=(1, 2)) + masks.sum(axis=(1, 2)))
    assert 0 < dice.mean() == pytest.approx(metrics["test/dice"], abs=1e-5)


# --- the sweeps of the tutorial's module, by a script ----------------------------------------------------------------


def test_the_script_reads_what_the_wheel_has_written(read_back, exported: str, installed: wheel.Environment) -> None:
    assert Path(read_back["package"]).is_relative_to(installed.programs.parent)
    assert "lit-MNISTDataModule-bs32 → lit.pt2: differs from the network by at most " in exported
    assert exported.endswith(" on 32 test samples\n")
    assert read_back["difference"] == pytest.approx(0, abs=1e-5)


def test_a_sweep_of_batch_sizes_has_a_row_for_each(read_back) -> None:
    runs, (group,) = read_back["sizes"]["runs"], read_back["sizes"]["answer"]["groups"]
    assert [size for size, accuracy in runs if 0 <= accuracy <= 1] == [16, 32]
    assert [row["batch_size"] for row in group["sizes"]] == [16, 32]


@pytest.mark.parametrize("sweep", RATES)
def test_a_sweep_of_the_rate_of_the_module_names_the_best(sweep: str, read_back) -> None:
    answer, runs = read_back[sweep]["answer"], dict(read_back[sweep]["runs"])
    assert [*runs] == RATES[sweep]
    best, rate = answer["best_setting"], answer["best_setting"]["settings"]["model.lr"]
    assert best == {"metric": "val/acc", "value": max(runs.values()), "settings": {"model.lr": rate}}
    assert runs[rate] == best["value"]
    assert answer["lines"][0].startswith("Best val/acc: ")


def test_a_search_goes_up_with_its_accuracy(project: Path, installed: wheel.Environment) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="needs pip install 'batchscope[optuna]'")
    search = [
        "hydra/sweeper=optuna",
        "hydra.sweeper.n_trials=3",
        "hydra.sweeper.n_jobs=1",
        "hydra.sweeper.direction=maximize",
    ]
    search.append("optimized_metric=val_acc")
    result = end(start_sweep(project, installed, "search", *search, "model.lr=interval(1e-4,1e-1)", *SHORT))
    assert result.code == 0, result.err
    trials = [record(project / "search" / str(number)) for number in range(3)]
    accuracies = {trial["config"]["model"]["lr"]: trial["metrics"]["val_acc"] for trial in trials}
    best = OmegaConf.load(project / "search" / "optimization_results.yaml")
    assert accuracies[best.best_params["model.lr"]] == best.best_value == max(accuracies.values())


def test_its_latency_is_measured(first, batchscope) -> None:  # the last test, for it needs the processor for itself
    output = batchscope("latency", BEST, "data.batch_size=1,8", "trainer.accelerator=cpu").said
    assert "lit-MNISTDataModule-bs32 on " in output
