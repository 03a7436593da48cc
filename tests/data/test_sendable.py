"""Spawned workers receive a pickled dataset: one that cannot be pickled is refused before they start."""

import multiprocessing
import threading
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from lightning import LightningDataModule, Trainer
from torch.utils.data import DataLoader, Dataset

from batchscope.data.workers import check_sendable
from batchscope.errors import UserError
from batchscope.training.failures import explain_failures
from tests.data.support import loaded
from tests.support.command_lines import refusal
from tests.support.own_data import MapStyle
from tests.support.third_party_modules import Stranger


class Holding(Dataset):
    """A dataset that holds an object in a nested attribute."""

    def __init__(self, value: Any = None):
        self.held = {"transforms": [1, value]}

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(4), 0


def local_class() -> type:
    class Local:
        pass

    return Local


def loader(dataset: Dataset, **options: Any) -> DataLoader:
    return DataLoader(dataset, **{"num_workers": 1, "multiprocessing_context": "spawn", **options})


UNSENDABLE = {
    "<lambda>": lambda x: x,
    "local_class.<locals>.Local": local_class(),
    "Local": local_class()(),
    "_thread.lock": threading.Lock(),
    "generator": (n for n in range(3)),
}


@pytest.mark.parametrize("culprit", UNSENDABLE)
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_what_cannot_be_sent_is_named_with_what_to_do(culprit: str, method: str) -> None:
    message = refusal(check_sendable, loader(Holding(UNSENDABLE[culprit]), multiprocessing_context=method))
    assert message.startswith("data: worker processes cannot be sent the data: ")
    assert culprit in message
    assert message.endswith(", or write data.num_workers=0")


def test_a_collate_function_is_sent_too() -> None:
    assert "<lambda>" in refusal(check_sendable, loader(Holding(), collate_fn=lambda batch: batch))


@pytest.mark.parametrize("held", [None, numpy.zeros(3), torch.zeros(3), torch.nn.Linear(2, 2), multiprocessing.Queue()])
def test_what_can_be_sent_is_not_refused(held: Any) -> None:
    check_sendable(loader(Holding(held)))


@pytest.mark.parametrize(
    "how", [{"multiprocessing_context": "fork"}, {"num_workers": 0, "multiprocessing_context": None}]
)
def test_workers_that_inherit_the_dataset_or_are_not_there_may_hold_anything(how: dict[str, Any]) -> None:
    check_sendable(loader(Holding(lambda x: x), **how))


class Own(MapStyle):
    """A DataModule whose samples cannot be pickled."""

    def dataset(self, split: str) -> Dataset:
        return Holding(lambda x: x)


def test_data_are_refused_before_a_run_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    data = loaded(Own(num_workers=1, batch_size=4))
    monkeypatch.setattr(torch.multiprocessing, "get_start_method", lambda: "spawn")
    with pytest.raises(UserError, match="worker processes cannot be sent"):
        assert data.fingerprint  # which is asked before the first file of a run is written


class Joined(MapStyle):
    """Collates by a bound method, which refers to the data and their trainer."""

    def collate_fn(self, samples: list[Any]) -> Any:
        return torch.utils.data.default_collate(samples)


def test_a_method_that_makes_batches_is_sent_without_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    data = loaded(Joined(num_workers=1, batch_size=4))
    data.trainer = SimpleNamespace(
        lightning_module=None, strategy=SimpleNamespace(root_device=torch.device("cpu")), hook=lambda: None
    )
    monkeypatch.setattr(torch.multiprocessing, "get_start_method", lambda: "spawn")
    data.train_dataloader()


class Theirs(LightningDataModule):
    """Makes its own DataLoader."""

    def train_dataloader(self) -> DataLoader:
        return loader(Holding(), collate_fn=lambda batch: torch.utils.data.default_collate(batch))


def test_a_dataloader_of_ones_own_ends_in_the_same_line(tmp_path) -> None:
    config = {"trainer": {}, "callbacks": None, "data": {}}
    trainer = Trainer(max_steps=1, logger=False, enable_checkpointing=False, default_root_dir=tmp_path, accelerator="cpu",
                      enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    message = r"cannot be sent the data: .*<lambda>.*or write num_workers=0 for its DataLoader"
    with pytest.raises(UserError, match=message), explain_failures(config, tmp_path, trainer):
        trainer.fit(Stranger(), datamodule=Theirs())
