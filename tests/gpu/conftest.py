"""The device that the tests of this folder run on: CUDA; under REHEARSE=1 the CPU, to see that they run at all."""

import os
import sys
from pathlib import Path

import lightning
import pytest
import torch

from batchscope.data.digits import Digits
from batchscope.models.cnn import SimpleCNN
from batchscope.training.task import Task
from tests.support.recipes import adamw

REHEARSAL = os.environ.get("REHEARSE") == "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
each_precision = pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"] + ["16-mixed"] * (not REHEARSAL))


@pytest.fixture
def device():
    if REHEARSAL:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; REHEARSE=1 runs it on the CPU")
    return torch.device("cuda", 0)


@pytest.fixture
def cuda(device):
    """Skip a test whose behaviour needs CUDA, if there is none."""
    if device.type != "cuda":
        pytest.skip("not on a CPU")
    return device


@pytest.fixture
def accelerator(device):
    return "gpu" if device.type == "cuda" else "cpu"


@pytest.fixture(autouse=True)
def float32_products():
    """Restore the switches for TF32 afterwards."""
    switches = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn)
    before = [switch.fp32_precision for switch in switches]
    yield
    for switch, value in zip(switches, before, strict=True):
        switch.fp32_precision = value


@pytest.fixture
def train(accelerator, tmp_path):
    """Train the SimpleCNN on rendered digits; keywords are the Trainer's, `data` those of the dataset, `mode` torch.compile's."""

    def fit(*callbacks, data=None, optimizer=None, mode=None, **options):
        lightning.seed_everything(0, verbose=False)
        sizes = {"num_train": 256, "num_val": 32, "num_test": 32, "batch_size": 32}
        source = Digits(root=str(tmp_path / "data"), **{**sizes, **(data or {})})
        network = SimpleCNN(source.spec, channels=[4, 8], hidden_size=16)
        task = Task(network, source.spec, optimizer or adamw(schedule="one_cycle"), compile_mode=mode)
        usual = {"max_epochs": 1, "limit_val_batches": 0, "logger": False}
        trainer = lightning.Trainer(
            accelerator=accelerator, devices=1, callbacks=list(callbacks), enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False, **usual | options,
        )  # fmt: skip
        task.prepare(trainer, source.batch_size, samples_per_update=None)
        trainer.fit(task, datamodule=source)
        return trainer, task

    return fit
