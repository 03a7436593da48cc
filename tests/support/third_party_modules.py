"""A Lightning module and data that do not come from this project, for callbacks that have to work with any."""

from typing import Any

import lightning
import torch
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Stranger(lightning.LightningModule):
    """One linear layer; returns its loss as a plain tensor, as most tutorials do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | dict[str, Tensor]:
        x, y = batch
        return nn.functional.mse_loss(self.layer(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val/loss", nn.functional.mse_loss(self.layer(x), y))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Asking(Stranger):
    """Its step asks for its batch."""

    def training_step(self, dataloader_iter: Any) -> Tensor | dict[str, Tensor]:
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


def loader(samples: int = 20, batch_size: int = 4) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 4, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=batch_size)


def train(module: Any, *callbacks: Any, data: Any = None, ckpt_path: Any = None, **options: Any) -> lightning.Trainer:
    """Fit a module for two epochs of five steps of four samples, by default, on a CPU; nothing is logged, kept or shown.

    `data` is a loader, or one for training and one for validation; the other options are the Trainer's.
    """
    known: dict[str, Any] = {} if options.keys() & {"max_epochs", "max_steps", "fast_dev_run"} else {"max_epochs": 2}
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    known |= {"accelerator": "cpu", **dict.fromkeys(off, False)}
    trainer = lightning.Trainer(callbacks=list(callbacks), **known | options)
    loaders = data if isinstance(data, tuple) else (loader() if data is None else data,)
    trainer.fit(module, *loaders, ckpt_path=ckpt_path)
    return trainer


class Memory(Logger):
    """Keeps what is logged."""

    name, version = "memory", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, metrics))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    @property
    def curve(self) -> list[tuple[int, dict[str, float]]]:
        """The points of training curves, one a row."""
        return [(step, {k: v}) for step, row in self.rows for k, v in row.items() if k.startswith("train/")]

    def steps(self, key: str) -> list[int]:
        return [step for step, row in self.rows if key in row]

    def values(self, key: str) -> list[float]:
        return [row[key] for _, row in self.rows if key in row]

    def at(self, step: int) -> dict[str, float]:
        return {key: value for s, row in self.rows if s == step for key, value in row.items()}
