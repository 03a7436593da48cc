"""RunRecord: `run.json`, all that a run leaves for sweeps, reports and comparisons to read.

It is written when the run starts (`running`) and at every way in which it can end, always whole: to a file beside it,
then renamed. A sweep writes it first, as what the run shall do (`planned`).
"""

import importlib.metadata
import json
import math
import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from .errors import UserError
from .rates import upgraded

SCHEMA = 2
FILE = "run.json"
Status = Literal["planned", "running", "finished", "failed", "out_of_memory", "interrupted"]
_PACKAGES = ("batchscope", "torch", "torchvision", "lightning", "torchmetrics", "hydra-core")


class RunRecord:
    """The record of one run, as a context: leaving it says how the run ended.

    Args:
        run_dir: the run's own folder; made if it is missing.
        enabled: False in all but the first process of a distributed run.
        resumed: where the folder's run goes on (`step`, `checkpoint`, …); None for a new run.
        **facts: what is known at the start; plain containers.

    Raises:
        UserError: if the folder already holds a run.
    """

    def __init__(self, run_dir: Path, enabled: bool = True, resumed: dict[str, Any] | None = None, **facts: Any):
        self.path = run_dir / FILE
        self.enabled = enabled
        self.resumed = resumed
        self.facts: dict[str, Any] = {"schema": SCHEMA, "status": "running", **facts, "versions": versions()}

    def __enter__(self) -> Self:
        self._started = time.time()
        self.facts["started"] = _iso(self._started)
        if self.enabled:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.resumed is not None:
                self._go_on(read(self.path.parent))
            else:
                refuse_used(self.path.parent)
            if self.path.exists():  # planned by a sweep, whose command is the one to repeat
                self.facts["command"] = read(self.path.parent).get("command", self.facts.get("command"))
            self._write()
        return self

    def _go_on(self, before: dict[str, Any]) -> None:
        """Keep what a resumed run was before, and note when it was resumed and where."""
        entry = {"at": self.facts["started"], **(self.resumed or {})}
        self.facts["started"] = before.get("started", self.facts["started"])
        self.facts["resumed"] = [*before.get("resumed", []), entry]

    def add(self, **facts: Any) -> None:
        """Add what has become known, and write it."""
        self.facts.update(facts)
        self._write()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.facts["status"] = _status(error)
        if error is not None:
            self.facts["error"] = reason(error)
        self.facts["finished"] = _iso(time.time())
        self.facts["seconds"] = round(time.time() - self._started, 3)
        self._write()

    def _write(self) -> None:
        if self.enabled:
            _replace(self.path, self.facts)


def plan(run_dir: Path, **facts: Any) -> None:
    """Write down what a run shall do, for the process that will do it: `config`, `choices`, `overrides`, `command`."""
    run_dir.mkdir(parents=True, exist_ok=True)
    _replace(run_dir / FILE, {"schema": SCHEMA, "status": "planned", **facts})


def close(run_dir: Path, status: Status, reason: str) -> None:
    """Say of a run that cannot say it itself how it ended."""
    _replace(run_dir / FILE, {**read(run_dir), "status": status, "error": reason[:1000]})


def optimized(record: dict[str, Any]) -> float | None:
    """The number that `optimized_metric` names, a metric or one of the throughput's; None if the run has no such."""
    name = record["config"].get("optimized_metric")
    found = record.get("metrics", {}).get(name, record.get("throughput", {}).get(name))
    return found if isinstance(found, int | float) else None


def _replace(path: Path, facts: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(_finite(facts), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def refuse_used(run_dir: Path) -> None:
    """Raise UserError if the folder already holds a run, other than one that is only planned."""
    if (run_dir / FILE).exists() and read(run_dir).get("status") != "planned":
        raise UserError(f"hydra.run.dir: {os.path.relpath(run_dir)} already holds a run; choose another")


def read(run_dir: Path) -> dict[str, Any]:
    """The record of a run; an older one as this version would have written it.

    Raises:
        UserError: if there is none, or it cannot be read.
    """
    path = run_dir / FILE
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{run_dir}: no {FILE} in it") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    if not isinstance(record, dict):
        raise UserError(f"{path}: cannot be read: it is no record of a run")
    return upgraded(record)


def flatten(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """The options of a configuration with their dotted names: `data.batch_size`."""
    for key, value in node.items():
        name = f"{path}{key}"
        if isinstance(value, dict):
            yield from flatten(value, f"{name}.")
        else:
            yield name, value


def versions() -> dict[str, str]:
    """The versions of the packages that decide a run's numbers."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def reason(error: BaseException) -> str:
    """An exception in one line: a user's mistake in its own words, another with its kind."""
    text = " ".join(str(error).split())
    return (text if isinstance(error, UserError) else f"{type(error).__name__}: {text}")[:1000]


def _status(error: BaseException | None) -> Status:
    if error is None:
        return "finished"
    if isinstance(error, KeyboardInterrupt | SystemExit):  # Lightning turns Ctrl-C into SystemExit
        return "interrupted"
    if "OutOfMemoryError" in type(error).__name__ or isinstance(error, MemoryError):
        return "out_of_memory"
    return "failed"


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _finite(value: Any) -> Any:
    """Leave out what is not a number: JSON has no NaN, and a record holds what was measured."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items() if not (isinstance(v, float) and not math.isfinite(v))}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value
