"""RunRecord: `run.json`, all that a run leaves for sweeps, reports and comparisons to read.

It is written when the run starts (`running`) and at every way in which it can end, always atomically. A sweep writes it
first, as what the run shall do (`planned`). A resumed run adds to its record: what an earlier process wrote stays, unless
the same is known anew.
"""

import contextlib
import importlib.metadata
import json
import math
import os
import secrets
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from ..errors import PeerLostError, UserError
from ..files import WriteError, atomic_write, remove_leftovers, set_aside, why
from .rates import upgraded

SCHEMA = 2
FILE = "run.json"
# `interrupted`: told to stop, or the system refused to write a file; `killed`: ended from outside without a word.
Status = Literal["planned", "running", "finished", "failed", "out_of_memory", "interrupted", "killed"]
OPEN = ("planned", "running")  # of a run that has not said how it ended
_DEEPEST = 64  # levels of a record; ours have 10
_RESERVE = 64 * 2**10  # bytes kept free for the record's last word
_PACKAGES = ("batchscope", "torch", "torchvision", "lightning", "torchmetrics", "hydra-core")


class DamagedRecordError(UserError):
    """A run.json that is empty, torn, or no record."""


class RunRecord:
    """The record of one run, as a context: leaving it says how the run ended, if it had begun.

    Args:
        run_dir: the run's own folder; made if it is missing.
        enabled: False in all but the first process of a distributed run.
        **facts: what is known at the start; plain containers.
    """

    def __init__(self, run_dir: Path, enabled: bool = True, **facts: Any):
        self.path = run_dir / FILE
        self.enabled = enabled
        self.facts: dict[str, Any] = {"schema": SCHEMA, "status": "running", "id": secrets.token_hex(8), **facts}
        self.facts["versions"] = versions()
        self._begun = False

    def __enter__(self) -> Self:
        self._started = time.time()
        self.facts["started"] = _iso(self._started)
        return self

    def begin(self, resumed: dict[str, Any] | None = None) -> None:
        """Write the record, as `running`. Until then the file is as it was, whatever happens.

        Args:
            resumed: where the folder's run goes on (`step`, `checkpoint`, …); None for a new run.

        Raises:
            UserError: if the folder holds a run and this is a new one, or nothing can be written.
        """
        if not self.enabled:
            self._begun = True
            return
        run_dir = self.path.parent
        if resumed is None:
            refuse_used(run_dir)
        before = _read_or_set_aside(run_dir)
        if resumed is not None:
            ended = {key: before.pop(key) for key in ("error", "finished", "seconds") if key in before}
            entry = {"at": self.facts["started"], **resumed, "before": {"status": before.get("status"), **ended}}
            self.facts["resumed"] = [*before.get("resumed", []), entry]
        # The command to repeat is that of the sweep that planned the run, or of the first start.
        kept = {key: before[key] for key in ("id", "started", "command") if key in before}
        self.facts = {**before, **self.facts, **kept}
        remove_leftovers(run_dir, FILE)
        self._write()
        self._begun = True
        _reserve(self.path)

    def add(self, **facts: Any) -> None:
        """Add what has become known, and write it.

        An empty value replaces no known one: a run resumed after its last step measures nothing new. None takes a known
        value back.

        Raises:
            WriteError: if it cannot be written.
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
            # The first process may only see that this one is gone. Ranks that have agreed to end do not write at once.
            alone = isinstance(error, UserError) or not getattr(error, "agreed", True)
            if error is not None and alone and not isinstance(error, PeerLostError):
                close_open(self.path.parent, ended_as(error), reason(error))
            return
        self.facts["finished"] = _iso(time.time())
        self.facts["seconds"] = round(time.time() - self._started, 3)
        self.facts["status"] = ended_as(error)
        if error is not None:
            self.facts["error"] = reason(error)
            self.facts |= _word_of_another(self.path.parent)
        try:
            _write_last(self.path, self.facts)
        except WriteError as refused:
            if error is None:
                raise
            print(f"warning: {refused}", file=sys.stderr, flush=True)

    def _write(self) -> None:
        if self.enabled:
            _replace(self.path, self.facts)


def plan(run_dir: Path, **facts: Any) -> None:
    """Write down what a run shall do, for the process that will do it: `config`, `choices`, `overrides`, `command`.

    Raises:
        WriteError: if it cannot be written.
    """
    _replace(run_dir / FILE, {"schema": SCHEMA, "status": "planned", **facts})


def close(run_dir: Path, status: Status, reason: str) -> None:
    """Say of a run that cannot say it itself how it ended.

    Raises:
        WriteError: if it cannot be written.
    """
    known = {"schema": SCHEMA, **_read_or_set_aside(run_dir)}
    _write_last(run_dir / FILE, {**known, "status": status, "error": reason[:1000]})


def close_open(run_dir: Path, status: Status, reason: str) -> None:
    """`close` a run, unless its record says already how it ended; what cannot be read or written is left as it is."""
    with contextlib.suppress(UserError):
        if read(run_dir).get("status") in OPEN:
            close(run_dir, status, reason)


def optimized(record: dict[str, Any]) -> float | None:
    """The number that `optimized_metric` names, a metric or one of the throughput's; None if the run has no such."""
    name = record["config"].get("optimized_metric")
    found = record.get("metrics", {}).get(name, record.get("throughput", {}).get(name))
    return found if isinstance(found, int | float) else None


def _replace(path: Path, facts: dict[str, Any]) -> None:
    text = json.dumps(_finite(facts), indent=2, ensure_ascii=False) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            file.write(text.encode("utf-8", "backslashreplace"))  # a path that is no text becomes an escape of JSON's
    except OSError as error:
        raise WriteError(f"{path} cannot be written: {why(error)}") from error


def _write_last(path: Path, facts: dict[str, Any]) -> None:
    """The record's last word, for which there is room on a disk that is full meanwhile."""
    with contextlib.suppress(OSError):
        _reserve_of(path).unlink(missing_ok=True)
    _replace(path, facts)


def _reserve(path: Path) -> None:
    """Take some room on the disk; random bytes, which no file system stores in less."""
    try:
        _reserve_of(path).unlink(missing_ok=True)  # it may be anything, and is not written through
        with _reserve_of(path).open("xb") as file:
            file.write(os.urandom(_RESERVE))
    except OSError:  # then it is the disk's word that counts
        with contextlib.suppress(OSError):
            _reserve_of(path).unlink(missing_ok=True)


def _reserve_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.reserve.tmp")


def _read_or_set_aside(run_dir: Path) -> dict[str, Any]:
    """The record; empty if there is none, or if it was damaged and is now called otherwise."""
    if not (run_dir / FILE).exists():
        return {}
    try:
        return read(run_dir)
    except DamagedRecordError as error:
        try:
            place = set_aside(run_dir / FILE)
        except OSError as refused:
            raise WriteError(f"{run_dir / FILE} cannot be renamed: {why(refused)}") from refused
        print(f"warning: {error}; it is now {place}", file=sys.stderr, flush=True)
        return {}


def _word_of_another(run_dir: Path) -> dict[str, Any]:
    """Status and error, if another process of the run has ended first and said why; what followed is no news."""
    with contextlib.suppress(UserError):
        record = read(run_dir)
        if record.get("status") not in OPEN:
            return {key: record[key] for key in ("status", "error") if key in record}
    return {}


def refuse_used(run_dir: Path) -> None:
    """Raise UserError if the folder already holds a run, other than one that is only planned."""
    try:
        planned = (run_dir / FILE).exists() and read(run_dir).get("status") == "planned"
    except DamagedRecordError:
        planned = False
    if not planned and ((run_dir / FILE).exists() or any(run_dir.glob("checkpoints/*.ckpt"))):
        raise UserError(f"hydra.run.dir: {os.path.relpath(run_dir)} already holds a run; choose another")


def read(run_dir: Path) -> dict[str, Any]:
    """The record of a run; an older one as this version would have written it.

    Raises:
        UserError: if there is none, or it cannot be read.
        DamagedRecordError: if what it holds is no record.
    """
    path = run_dir / FILE
    if path.exists() and not path.is_file():  # reading a pipe or a device may never end
        raise UserError(f"{path}: cannot be read: it is no file")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{run_dir}: no {FILE} in it") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {why(error)}") from error
    except (ValueError, RecursionError) as error:
        raise DamagedRecordError(f"{path}: cannot be read: {error}") from error
    if not isinstance(record, dict):
        raise DamagedRecordError(f"{path}: cannot be read: it is no record of a run")
    if _is_deeper(record, _DEEPEST):
        raise DamagedRecordError(f"{path}: cannot be read: it has more than {_DEEPEST} levels")
    return upgraded(record)


def _is_deeper(node: Any, levels: int) -> bool:
    """Whether a value from JSON has more levels: whoever walks through it calls itself at each."""
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return levels < 0 or any(_is_deeper(child, levels - 1) for child in children)


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


def ended_as(error: BaseException | None) -> Status:
    """How a run ended: by an exception, or by none."""
    if error is None:
        return "finished"
    if isinstance(error, KeyboardInterrupt | SystemExit):  # Lightning turns Ctrl-C into SystemExit
        return "interrupted"
    if "OutOfMemoryError" in type(error).__name__ or isinstance(error, MemoryError):
        return "out_of_memory"
    if isinstance(error, WriteError):  # by itself the run would have gone on
        return "interrupted"
    return "failed"


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _finite(value: Any) -> Any:
    """Leave out what is not a number: JSON has no NaN, and a record holds what was measured."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items() if not (isinstance(v, float) and not math.isfinite(v))}
    if isinstance(value, list | tuple):
        return [None if isinstance(v, float) and not math.isfinite(v) else _finite(v) for v in value]
    return value
