"""A short run on rendered digits, whose checkpoint the tests use; and a network of several inputs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from lightning import seed_everything

from batchscope.inference.load import Trained, restore, untrained
from batchscope.options.groups import use_config_dir
from batchscope.sweep import passes
from batchscope.sweep.passes import Limits
from batchscope.training.run import train
from tests.support.command_lines import composed
from tests.support.own_data import write_config


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inference")
    sizes = ["data.num_train=320", "data.num_val=32", "data.num_test=100", "data.batch_size=16"]
    line = ["data=digits", f"data.root={folder}", *sizes, "trainer.max_epochs=1"]
    line += ["trainer.accelerator=cpu", *(f"callbacks.{name}=null" for name in ("progress", "throughput", "memory"))]
    train(composed(*line), folder / "run", {"model": "cnn", "data": "digits"}, line)
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


@pytest.fixture
def configs() -> Iterator[None]:
    """Restore the folder of configs after a test that chooses one."""
    yield
    use_config_dir(None)


@pytest.fixture
def reader(tmp_path: Path, configs: None) -> Trained:
    """An untrained model that reads token numbers and a mask."""
    seed_everything(0, verbose=False)
    use_config_dir(str(write_config(tmp_path / "configs", "Tokens")))
    return untrained(composed("data=own", "model=masked_mean", "trainer.accelerator=cpu", "data.num_workers=0"))


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Limits:
    """Limits that make visits short."""
    monkeypatch.setattr(passes, "VISIT_S", 0.002)
    return Limits(seconds=0.05)
