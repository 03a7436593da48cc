"""The loggers of a run: named after it, opened before the run begins, and closed when it ends."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning.pytorch.loggers import Logger, MLFlowLogger, WandbLogger

from .._lightning import continue_mlflow_run, has_begun
from ..errors import UserError, in_one_line
from .build import build_all

_RUN = "batchscope.run"  # the tag by which a resumed run finds its run in MLflow, which gives its own numbers
_LIBRARIES = ("wandb", "mlflow", "sqlalchemy")
_INSTEAD = {  # of a logger that is refused
    "wandb": "logger.wandb.offline=true sends nothing",
    "mlflow": "logger.mlflow.tracking_uri=null writes to the run's folder",
}


def build_loggers(config: dict[str, Any], name: str, run_id: str) -> list[Logger]:
    """The loggers; TensorBoard's folder and the runs at W&B and in MLflow have the run's name or that of an option.

    A resumed run continues the run at W&B that has its id, and the one in MLflow that has its id as a tag. Raises
    UserError where MLflow cannot open its database.
    """
    nodes = {key: dict(node) for key, node in (config["logger"] or {}).items() if node}
    for node in nodes.values():
        if node["_target_"].endswith(".TensorBoardLogger"):
            node.setdefault("name", name)
        elif node["_target_"].endswith(".WandbLogger"):
            node.update({"name": node.get("name") or name, "id": node.get("id") or run_id})
            node.setdefault("tags", config["tags"])
        elif node["_target_"].endswith(".MLFlowLogger"):
            os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # it reports its use to its makers
            os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
            node["run_name"] = node.get("run_name") or name
            node["tags"] = {"tags": ", ".join(config["tags"]), **(node.get("tags") or {}), _RUN: run_id}
            if not node.get("tracking_uri"):  # Lightning's own default is a store that MLflow no longer opens
                folder = os.path.abspath(node.get("save_dir") or ".")
                node["tracking_uri"] = f"sqlite:///{folder}/mlflow.db"
                node.setdefault("artifact_location", f"{folder}/mlflow")
    with _refused("mlflow"):
        return build_all(nodes, "logger")


def open_loggers(loggers: Sequence[Logger]) -> None:
    """Begin the runs at W&B and in MLflow. Raises UserError where nobody is logged in, or nothing is reached."""
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            with _refused("wandb"):
                _ = logger.experiment
        elif isinstance(logger, MLFlowLogger):
            with _refused("mlflow"):
                continue_mlflow_run(logger, _RUN)


def close_loggers(loggers: Sequence[Logger], failed: bool) -> None:
    """End the runs. A forked process exits without W&B's exit handler, which would lose its last points."""
    for logger in loggers:
        if isinstance(logger, WandbLogger) and has_begun(logger):
            logger.experiment.finish(exit_code=int(failed))
        elif isinstance(logger, MLFlowLogger) and has_begun(logger):
            logger.finalize("failed" if failed else "success")


def log_parameters(logger: Logger, parameters: Mapping[str, Any]) -> None:
    """Log what a run was trained with; in MLflow, which refuses another value, a parameter keeps its first one."""
    if isinstance(logger, MLFlowLogger):
        known = logger.experiment.get_run(logger.run_id).data.params
        parameters = {key: value for key, value in parameters.items() if key not in known}
    logger.log_hyperparams(dict(parameters))


@contextlib.contextmanager
def _refused(logger: str) -> Iterator[None]:
    """Turn an error of a logger's library, or of a file or connection that it needs, into one line."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError) and not type(error).__module__.startswith(_LIBRARIES):
            raise
        raise UserError(f"logger.{logger}: {in_one_line(error)}; {_INSTEAD[logger]}") from error
