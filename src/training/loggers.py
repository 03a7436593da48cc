"""The loggers of a run: named after it, opened before the run begins, and closed when it ends."""

from collections.abc import Sequence
from typing import Any

from lightning.pytorch.loggers import Logger, WandbLogger

from .._lightning import has_wandb_run
from ..errors import UserError
from .build import build_all


def build_loggers(config: dict[str, Any], name: str, run_id: str) -> list[Logger]:
    """The loggers; TensorBoard's folder and the run at W&B are called what the run is, unless an option names them.

    A resumed run continues the run at W&B that has its id.
    """
    nodes = {key: dict(node) for key, node in (config["logger"] or {}).items() if node}
    for node in nodes.values():
        if node["_target_"].endswith(".TensorBoardLogger"):
            node.setdefault("name", name)
        elif node["_target_"].endswith(".WandbLogger"):
            node.update({"name": node.get("name") or name, "id": node.get("id") or run_id})
            node.setdefault("tags", config["tags"])
    return build_all(nodes, "logger")


def open_loggers(loggers: Sequence[Logger]) -> None:
    """Begin the runs at W&B. Raises UserError where that is impossible: nobody is logged in, or nothing is reached."""
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            try:
                _ = logger.experiment
            except Exception as error:
                if not type(error).__module__.startswith("wandb"):
                    raise
                first = next(iter(str(error).splitlines()), "")
                raise UserError(f"logger.wandb: {first}; logger.wandb.offline=true sends nothing") from error


def close_loggers(loggers: Sequence[Logger], failed: bool) -> None:
    """End the runs at W&B; a process that another one has forked would end before the last points are written."""
    for logger in loggers:
        if isinstance(logger, WandbLogger) and has_wandb_run(logger):
            logger.experiment.finish(exit_code=int(failed))
