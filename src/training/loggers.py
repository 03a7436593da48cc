"""The loggers of a run: named after it, opened before the run begins, and closed when it ends."""

from collections.abc import Sequence
from typing import Any

from lightning.pytorch.loggers import Logger, WandbLogger

from .._lightning import has_begun
from ..errors import UserError, in_one_line
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


def open_loggers(loggers: Sequence[Logger]) -> None:
    """Begin the runs at W&B. Raises UserError where nobody is logged in, or nothing is reached."""
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            try:
                _ = logger.experiment
            except Exception as error:
                if not isinstance(error, OSError) and not type(error).__module__.startswith("wandb"):
                    raise
                said = f"{in_one_line(error)}; logger.wandb.offline=true sends nothing"
                raise UserError(f"logger.wandb: {said}") from error


def close_loggers(loggers: Sequence[Logger], failed: bool) -> None:
    """End the runs. A forked process exits without W&B's exit handler, which would lose its last points."""
    for logger in loggers:
        if isinstance(logger, WandbLogger) and has_begun(logger):
            logger.experiment.finish(exit_code=int(failed))
