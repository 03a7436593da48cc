"""A short run on rendered digits, whose checkpoint the tests use."""

from pathlib import Path

import pytest
from lightning import seed_everything

from batchscope.inference.load import Trained, restore
from batchscope.options.compose import check_command_line
from batchscope.training.run import train


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inference")
    sizes = ["data.num_train=640", "data.num_val=32", "data.num_test=100", "data.batch_size=16"]
    line = ["data=digits", f"data.root={folder}", *sizes, "trainer.max_epochs=1", f"run_dir={folder / 'run'}"]
    line += ["trainer.accelerator=cpu", *(f"callbacks.{name}=null" for name in ("progress", "throughput", "memory"))]
    config = check_command_line(line, multirun=False)[0]
    train(config, folder / "run", {"model": "cnn", "data": "digits"}, line)
    return folder / "run"


@pytest.fixture
def checkpoint(run_dir: Path) -> Path:
    return run_dir / "checkpoints" / "best.ckpt"


@pytest.fixture
def root(run_dir: Path) -> str:
    """The run's own `data.root=…`, which a checkpoint alone does not decide."""
    return f"data.root={run_dir.parent}"


@pytest.fixture
def trained(checkpoint: Path, root: str) -> Trained:
    seed_everything(0, verbose=False)
    return restore(checkpoint, [root, "trainer.accelerator=cpu"], with_data=True)
