"""Writing `run.json`, the record that a run leaves for sweeps, reports and comparisons.

A run writes its record atomically when it starts (`running`) and however it ends. A sweep writes the record before, with
the configuration of the run (`planned`). A resumed run adds to its record: a value that an earlier process wrote stays
until a newer value is known.
"""

import contextlib
import functools
import importlib.metadata
import json
import math
import platform
import secrets
import time
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from ..errors import NonFiniteError, PeerLostError, UserError, cut, warn
from ..files import WriteError, remove_leftovers
from .read import FILE, SCHEMA, read, read_or_empty, refuse_used, replacing
from .values import at, number

# `not_finite`: a loss or a gradient was not finite.
# `interrupted`: stopped by a signal, or the system refused to write a file.
# `killed`: one of the run's processes ended without a chance to report.
Status = Literal["planned", "running", "finished", "failed", "not_finite", "out_of_memory", "interrupted", "killed"]
_NOT_ENDED = ("planned", "running")  # the statuses of a run that has not ended, or has not reported its end
_END_KEYS = ("error", "finished", "seconds")  # a resumed run does not have these yet
_PACKAGES = ("batchscope", "torch", "torchvision", "lightning", "torchmetrics", "hydra-core")


class RunRecord:
    """The record of one run, as a context manager: on exit it records how a begun run ended.

    Args:
        run_dir: the folder of the run; created if missing.
        enabled: False on all ranks but the first.
        **facts: the values that are known at the start, in plain containers.
    """

    def __init__(self, run_dir: Path, enabled: bool = True, **facts: Any):
        self.path = run_dir / FILE
        self.enabled = enabled
        self.facts: dict[str, Any] = {"schema": SCHEMA, "status": "running", "id": secrets.token_hex(8), **facts}
        self.facts["versions"] = versions()
        self.before: dict[str, Any] = {}  # the record that a resumed run finds
        self._begun = False
        self._earlier_s = 0.0  # the duration of a resumed run's earlier processes

    def __enter__(self) -> Self:
        self._start_s = time.monotonic()  # monotonic: nobody sets this clock
        self.facts["started"] = _iso(time.time())
        if self.enabled:  # only the first rank: an NFS client caches for a while that a file is missing
            with contextlib.suppress(UserError):  # the id of a run that is resumed, or that a sweep has planned
                self.facts |= {key: value for key, value in read(self.path.parent).items() if key == "id"}
        return self

    def begin(self, resumed: dict[str, Any] | None = None) -> None:
        """Write the record with the status `running`. Before this call the file does not change.

        Args:
            resumed: where a resumed run continues (`step`, `checkpoint`, …); None for a new run.

        Raises:
            UserError: if this is a new run and the folder holds another run, or if the record cannot be written.
        """
        if not self.enabled:
            self._begun = True
            return
        run_dir = self.path.parent
        if resumed is None:
            refuse_used(run_dir)
        before = read_or_empty(run_dir)
        if resumed is not None:
            self.before = dict(before)
            ended = {key: before.pop(key) for key in _END_KEYS if key in before}
            entries = before.get("resumed") or []
            fit_s = max(number(at(entry, "fit_seconds")) or 0.0 for entry in (before, resumed))
            last_s, last_fit_s = (number(at([None, *entries][-1], key)) or 0.0 for key in ("seconds", "fit_seconds"))
            # The time of all earlier processes. Of a killed process only the fit until its checkpoint counts.
            self._earlier_s = number(ended.get("seconds")) or round(last_s + max(0.0, fit_s - last_fit_s), 3)
            resumed = {**resumed, "seconds": self._earlier_s, "fit_seconds": fit_s}
            entry = {"at": self.facts["started"], **resumed, "before": {"status": before.get("status"), **ended}}
            self.facts["resumed"] = [*entries, entry]
            before.pop("waiting_seconds", None)
        # `command` stays the one of the sweep that planned the run, or of the run's first start.
        kept = {key: before[key] for key in ("started", "command") if key in before}
        self.facts = {**before, **self.facts, **kept}
        remove_leftovers(run_dir, FILE)
        self._write()
        self._begun = True

    def begin_unless_begun(self) -> None:
        """Begin the record of a new run that ends early, to record how it ended; do nothing if the folder holds another run."""
        if self.enabled and not self._begun:
            with contextlib.suppress(UserError):
                self.begin()

    def add(self, **facts: Any) -> None:
        """Add or replace values, and write the record. Raises WriteError if it cannot be written.

        An empty container does not replace a known value: a run that is resumed after its last step measures nothing.
        None removes a known value.
        """
        for key, value in facts.items():
            if value is None:
                self.facts.pop(key, None)
            elif value not in ({}, []) or key not in self.facts:
                self.facts[key] = value
        self._write()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._begun:
            return
        if not self.enabled:
            # The first rank may only know that this rank is lost. Ranks that agree on their end leave the record to the first.
            agreed = getattr(error, "agreed", False)
            if error is not None and not agreed and not isinstance(error, PeerLostError):
                record_missing_end(self.path.parent, ended_as(error), error_text(error))
            return
        self.facts["finished"] = _iso(time.time())
        process_s = time.monotonic() - self._start_s - self.facts.get("waiting_seconds", 0.0)
        self.facts["seconds"] = round(self._earlier_s + process_s, 3)
        self.facts["status"] = ended_as(error)
        if error is not None:
            recorded = _end_recorded_by_another_rank(self.path.parent)
            self.facts |= {"error": error_text(error)} | recorded
        try:
            _write_record(self.path, self.facts)
        except WriteError as write_error:
            if error is None:
                raise
            warn(str(write_error))

    def _write(self) -> None:
        if self.enabled:
            _write_record(self.path, self.facts)


def write_planned(run_dir: Path, **facts: Any) -> None:
    """Write the record of a run that has not started: `config`, `choices`, `overrides`, `command`. Raises WriteError."""
    _write_record(run_dir / FILE, {"schema": SCHEMA, "status": "planned", **facts})


def update_record(run_dir: Path, **facts: Any) -> None:
    """Change values in the record of a run that is not running. UserError if the record cannot be read or written."""
    _write_record(run_dir / FILE, {"schema": SCHEMA, **read_or_empty(run_dir), **facts})


def record_end(run_dir: Path, status: Status, reason: str) -> None:
    """Record the end of a run whose process could not record it. UserError if the record cannot be read or written."""
    update_record(run_dir, status=status, error=cut(reason, 1000))


def record_missing_end(run_dir: Path, status: Status, reason: str) -> None:
    """Record the end of a run if its record has none; a record that cannot be read or written stays as it is."""
    with contextlib.suppress(UserError):
        if read(run_dir).get("status") in _NOT_ENDED:
            record_end(run_dir, status, reason)


def ended_as(error: BaseException | None) -> Status:
    """Return the status of a run that ended with this exception, or without one."""
    if error is None:
        return "finished"
    if "OutOfMemoryError" in type(error).__name__ or isinstance(error, MemoryError):
        return "out_of_memory"
    if isinstance(error, NonFiniteError):
        return "not_finite"
    if isinstance(error, PeerLostError):  # another rank was killed; a rank that fails by itself records why
        return "killed"
    # Lightning turns Ctrl-C into SystemExit. After a WriteError a run can be resumed once there is space or permission.
    return "interrupted" if isinstance(error, KeyboardInterrupt | SystemExit | WriteError) else "failed"


def error_text(error: BaseException) -> str:
    """Return the exception in one line; with its type, unless it is a UserError."""
    text = " ".join(str(error).split())
    return cut(text if isinstance(error, UserError) else f"{type(error).__name__}: {text}", 1000)


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that can change the numbers of a run."""
    installed = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[package] = importlib.metadata.version(package)
    return installed


def _write_record(path: Path, record: dict[str, Any]) -> None:
    text = json.dumps(_finite(record), indent=2, ensure_ascii=False) + "\n"
    with replacing(path) as file:
        file.write(text.encode("utf-8", "backslashreplace"))  # a path that is not text becomes a JSON escape


def _end_recorded_by_another_rank(run_dir: Path) -> dict[str, Any]:
    """Return status and error if another rank has recorded the end: this rank's error is then only a consequence."""
    with contextlib.suppress(UserError):
        record = read(run_dir)
        if record.get("status") not in _NOT_ENDED:
            return {key: record[key] for key in ("status", "error") if key in record}
    return {}


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _finite(value: Any) -> Any:
    """Return a value without NaN and infinities, which JSON does not have: dicts omit them, lists have null."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items() if not (isinstance(v, float) and not math.isfinite(v))}
    if isinstance(value, list | tuple):
        return [None if isinstance(v, float) and not math.isfinite(v) else _finite(v) for v in value]
    return value
