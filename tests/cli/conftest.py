"""A short finished run on rendered digits, for the commands that read runs and checkpoints."""

import pytest

from batchscope.training.run import train
from tests.support.command_lines import composed
from tests.support.runs import QUIET

SIZES = ["data.num_train=64", "data.num_val=32", "data.num_test=100", "data.batch_size=16"]


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """The run's folder."""
    folder = tmp_path_factory.mktemp("finished")
    words = ["data=digits", f"data.root={folder}", *SIZES, "trainer.max_epochs=1", "trainer.accelerator=cpu", *QUIET]
    config = composed(*words)
    train(config, folder / "run", {"model": "cnn", "data": "digits"}, words)
    return folder / "run"


@pytest.fixture
def root(finished):
    """The run's `data.root=…`, a folder that a record or a checkpoint alone may not decide."""
    return f"data.root={finished.parent}"


def contents(folder):
    """All folders and files below a folder, with the bytes of the files."""
    return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}
