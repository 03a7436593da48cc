"""Atomic writes, locks, and folders: which process owns a folder, and which links in it are refused."""

import contextlib
import errno
import itertools
import os
import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import BinaryIO

from . import _system
from .errors import UserError

LOCK = ".lock"
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
# The answers of a file system that does not support an operation, as opposed to one that failed at it.
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
_NO_LOCKS = (*_UNSUPPORTED, errno.ENOLCK)
_WAIT_S = 0.1  # between two attempts at a lock
_held_locks: dict[str, BinaryIO] = {}  # path → open lock file of this process: POSIX lets a process lock a file twice


class WriteError(UserError):
    """The system refuses to write a file. The run can be resumed once the cause is gone."""


class Locked(Exception):
    """Another process, or another part of this one, holds the lock."""


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a file that becomes `path` when the block ends: at every moment `path` is the whole old or new file.

    The bytes go to a temporary file beside `path`, which is flushed to the disk and renamed. If the block or the system
    fails (OSError), the temporary file is removed, and `path` is unchanged.
    """
    # No other process uses this name, not even on another machine that shares the folder.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            _sync(file.fileno())
        _system.retry_while_open(os.replace, temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file atomically, as `atomic_write`."""
    with atomic_write(path) as file:
        file.write(data)


def write_text(path: Path, text: str) -> None:
    """Write a file atomically, in UTF-8; a character that UTF-8 lacks (a lone surrogate) becomes `?`."""
    write_bytes(path, text.encode("utf-8", "replace"))


def remove_leftovers(folder: Path, name: str) -> None:
    """Remove the temporary files of killed processes that have written files called `name` (a glob pattern)."""
    for path in folder.glob(f".{name}.*.tmp"):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk, if the file system supports it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:  # a writable folder may be unreadable, and Windows opens no folder
        return
    try:
        _sync(descriptor)
    finally:
        os.close(descriptor)


def _sync(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise


@contextlib.contextmanager
def lock(path: Path, waits: bool = False) -> Iterator[None]:
    """Hold the lock of a file during the block; the file is not removed. OSError if it cannot be opened.

    If another process, or another part of this one, holds the lock, wait for it with `waits`, else raise Locked. The
    system releases the lock when the process ends in any way, and worker processes do not inherit it. On a file system
    without locks print a warning, and hold no lock.
    """
    key = str(path.resolve())
    while (file := _open_locked(path, key)) is None:
        if not waits:
            raise Locked(key)
        time.sleep(_WAIT_S)
    with file:
        _held_locks[key] = file
        try:
            yield
        finally:
            _held_locks.pop(key, None)


def _open_locked(path: Path, key: str) -> BinaryIO | None:
    """Return the locked file; None if it is held. Opening and closing it again would release its POSIX lock."""
    if key in _held_locks:
        return None
    if path.is_symlink():  # the author of the folder may direct the new file elsewhere
        raise OSError(errno.ELOOP, "it is a link", str(path))
    with contextlib.ExitStack() as close_unless_locked:
        file = close_unless_locked.enter_context(path.open("ab"))
        try:
            if not _system.try_lock(file):
                return None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            reason = f"{path.parent} is on a file system without locks ({error.strerror})"
            print(f"warning: {reason}: do not start a second process there", file=sys.stderr, flush=True)
        close_unless_locked.pop_all()
        return file


@contextlib.contextmanager
def lock_folder(folder: Path, option: str, message: str) -> Iterator[None]:
    """Hold the lock file `.lock` of a folder during the block. A missing folder is created.

    UserError with `message` if another process holds it, or if it cannot be written; `option` names the folder.
    """
    with contextlib.ExitStack() as folder_lock:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            folder_lock.enter_context(lock(folder / LOCK))
        except Locked:
            raise UserError(f"{option}: {message}") from None
        except OSError as error:
            raise WriteError(f"{option}: {error.filename or folder} cannot be written: {why(error)}") from error
        yield


def refuse_existing(option: str, path: Path) -> None:
    """Raise UserError if the path that an option names exists: it is not replaced."""
    if os.path.lexists(path):  # never raises, not even for a name that no file can have
        raise UserError(f"{option}: '{path}' exists; give another name")


@contextlib.contextmanager
def as_write_error(option: str, path: Path) -> Iterator[None]:
    """Turn an OSError of the block, which writes to the path that an option names, into a WriteError of one line."""
    try:
        yield
    except OSError as error:
        raise WriteError(f"{option}: '{path}' cannot be written: {why(error)}") from error


def why(error: OSError) -> str:
    """Return the reason for an error in words, as the system gives it."""
    if error.errno in NO_SPACE:
        return f"the disk is full ({error.strerror})"
    return error.strerror or str(error)


def new_folder(folder: Path) -> Path:
    """Take a folder that no other process has taken, and return it: `folder`, or one with `-2`, `-3`, … at its end.

    A missing folder is created. A folder belongs to the process that creates its lock file. OSErrors pass.
    """
    paths = numbered(folder)
    while True:
        path = next(paths)
        path.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            (path / LOCK).open("x").close()
            return path


def write_folder(folder: Path, files: Mapping[str, bytes]) -> Path:
    """Write files into a new folder, and return it: `folder`, or one with `-2`, … at its end. OSErrors pass."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    paths = numbered(folder)
    while True:
        path = next(paths)
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            break
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path / name, data)
    return path


def numbered(path: Path) -> Iterator[Path]:
    """Yield the path, and then the path with `-2`, `-3`, … at its end."""
    yield path
    yield from (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))


def set_aside(path: Path) -> Path:
    """Rename a file or folder to `<name>.aside`, or the next free `<name>.aside-2`; return the new path.

    As `unlock_folder`, this may release the folder's lock.
    """
    paths = numbered(path.with_name(f"{path.name}.aside"))
    unlock_folder(path)
    return _system.retry_while_open(path.rename, next(free for free in paths if not os.path.lexists(free)))


def unlock_folder(folder: Path) -> None:
    """Release the lock of a folder on a system that neither renames nor removes a folder with open files.

    If another process takes the lock meanwhile, the rename or the removal fails.
    """
    if not _system.RENAMES_OPEN and (file := _held_locks.pop(str((folder / LOCK).resolve()), None)):
        file.close()


def is_set_aside(name: str) -> bool:
    """Whether a file or folder has a name that `set_aside` gives."""
    return Path(name).suffix.partition("-")[0] == ".aside"


def refuse_links(
    folder: Path, name: str = "the run's folder", root: Path | None = None, written: Sequence[str] = ("*",)
) -> None:
    """Raise UserError if a write in a folder could land outside of it, or block. The folder may be missing.

    `name` describes the folder, which has to lie in `root`. `written` are glob patterns of what will be written in the
    folder itself: other links do no harm. A folder that cannot be listed is refused: its links would still work.
    """
    if root is not None and not is_inside(folder, root):
        raise UserError(f"{folder}: is behind a link that leads out of {root}; replace it by what it leads to")

    def refuse(error: OSError) -> None:
        if os.path.lexists(folder):
            raise UserError(f"{error.filename}: cannot be listed, so that links in it cannot be seen: {why(error)}")

    for parent, folders, files in os.walk(folder, onerror=refuse):
        if Path(parent) == folder:
            folders[:], files[:] = (
                [entry for entry in entries if any(fnmatch(entry, pattern) for pattern in written)]
                for entries in (folders, files)
            )
        for path in (Path(parent, child) for child in (*folders, *files)):
            is_cached_log = fnmatch(str(path), "*/wandb/*run-*/logs/debug-core.log")  # a link of W&B; never written to
            if path.is_symlink() and not is_cached_log and not is_inside(path, folder):
                raise UserError(f"{path}: is a link that leads out of {name}; replace it by what it leads to")
            if path.is_fifo() or path.is_socket() or path.is_char_device() or path.is_block_device():
                raise UserError(f"{path}: is neither a file nor a folder; remove it")


def is_inside(path: Path, folder: Path) -> bool:
    """Whether a path is `folder` or lies in it, after following links."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))
