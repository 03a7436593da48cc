"""The loggers of a run: named after it, and closed when it ends."""

from collections.abc import Sequence
from typing import Any

from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.loggers.logger import DummyLogger
from typing_extensions import override

from .._lightning import has_begun
from .build import build_all


def build_loggers(config: dict[str, Any], name: str, run_id: str) -> list[Logger]:
    """The loggers; TensorBoard's folder and the run at W&B have the run's name or that of an option.

    A resumed run continues the run at W&B that has its id.
    """
    nodes = {key: dict(node) for key, node in (config["logger"] or {}).items() if node}
    for node in nodes.values():
        if node["_target_"].endswith((".TensorBoard", ".TensorBoardLogger")):
            node.setdefault("name", name)
        elif node["_target_"].endswith(".WandbLogger"):
            node.update({"name": node.get("name") or name, "id": node.get("id") or run_id})
            node.setdefault("tags", config["tags"])
    return build_all(nodes, "logger")


class NoLogger(DummyLogger):
    """Takes what a module gives its logger, and keeps nothing. Its folders are where a module may write by itself."""

    def __init__(self, save_dir: str) -> None:
        super().__init__()
        self._save_dir = save_dir

    @property
    @override
    def save_dir(self) -> str:
        return self._save_dir

    @property
    @override
    def root_dir(self) -> str:
        return self._save_dir

    @property
    @override
    def log_dir(self) -> str:
        return self._save_dir


def close_loggers(loggers: Sequence[Logger], failed: bool) -> None:
    """End the runs. A forked process exits without W&B's exit handler, which would lose its last points."""
    for logger in loggers:
        if isinstance(logger, WandbLogger) and has_begun(logger):
            logger.experiment.finish(exit_code=int(failed))
