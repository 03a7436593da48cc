"""Atomic writes, locks, and folders: which process owns one, and which links in it are refused."""

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
_WAIT_S = 0.1  # between two tries at a lock
_held: dict[str, BinaryIO] = {}  # the lock files that this process holds: POSIX would let it take them twice


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
    # A name that no other process uses, on this machine or another one that shares the folder.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            _sync(file.fileno())
        _system.patiently(os.replace, temporary, path)
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
    """Remove the temporary files of killed processes that wrote files called `name` (a glob pattern)."""
    for path in folder.glob(f".{name}.*.tmp"):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk, where the file system supports it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:  # a folder that can be written may be unreadable, and Windows opens none
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
    """Hold a lock file, which stays; OSError if it cannot be opened.

    If another process holds it, or another part of this one, `waits` until it does not, or raises Locked. The system
    releases the lock however the process ends, and worker processes do not inherit it. On a file system without locks a
    warning is printed, and nothing is held.
    """
    name = str(path.resolve())
    while (file := _locked(path, name)) is None:
        if not waits:
            raise Locked(name)
        time.sleep(_WAIT_S)
    with file:
        _held[name] = file
        try:
            yield
        finally:
            _held.pop(name, None)


def _locked(path: Path, name: str) -> BinaryIO | None:
    """The open lock file; None if it is held. To open it again, and close it, would release a POSIX lock."""
    if name in _held:
        return None
    if path.is_symlink():  # the author of the folder may direct the new file elsewhere
        raise OSError(errno.ELOOP, "it is a link", str(path))
    with contextlib.ExitStack() as unless_locked:
        file = unless_locked.enter_context(path.open("ab"))
        try:
            if not _system.try_lock(file):
                return None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            where = f"{path.parent} is on a file system without locks ({error.strerror})"
            print(f"warning: {where}: do not start a second process there", file=sys.stderr, flush=True)
        unless_locked.pop_all()
        return file


@contextlib.contextmanager
def lock_folder(folder: Path, option: str, busy: str) -> Iterator[None]:
    """Hold the lock file `.lock` of a folder, which is created if it is missing.

    UserError if another process holds it (`busy` says so), or if it cannot be written; `option` names the folder.
    """
    with contextlib.ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(lock(folder / LOCK))
        except Locked:
            raise UserError(f"{option}: {busy}") from None
        except OSError as error:
            raise WriteError(f"{option}: {error.filename or folder} cannot be written: {why(error)}") from error
        yield


def refuse_existing(option: str, path: Path) -> None:
    """Raise UserError if there is anything at a path that an option names: it is not replaced."""
    if os.path.lexists(path):  # which raises nothing, also for a name that no file can have
        raise UserError(f"{option}: '{path}' exists; give another name")


@contextlib.contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Within, what an option names is written: an OSError is a WriteError of one line."""
    try:
        yield
    except OSError as error:
        raise WriteError(f"{option}: '{path}' cannot be written: {why(error)}") from error


def why(error: OSError) -> str:
    """The system's reason, in words."""
    if error.errno in NO_SPACE:
        return f"the disk is full ({error.strerror})"
    return error.strerror or str(error)


def new_folder(folder: Path) -> Path:
    """Take a folder that no other process has taken: the given one, or one with `-2`, `-3`, … at its end.

    The folder is created if it is missing. It belongs to the process that creates its lock file. OSErrors pass.
    """
    places = numbered(folder)
    while True:
        place = next(places)
        place.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            (place / LOCK).open("x").close()
            return place


def write_folder(folder: Path, files: Mapping[str, bytes]) -> Path:
    """Write files into a new folder: the given one, or one with `-2`, … at its end; returns it. OSErrors pass."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    places = numbered(folder)
    while True:
        place = next(places)
        with contextlib.suppress(FileExistsError):
            place.mkdir()
            break
    for name, data in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        write_bytes(place / name, data)
    return place


def numbered(path: Path) -> Iterator[Path]:
    """The path, and then the path with `-2`, `-3`, … at its end."""
    yield path
    yield from (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))


def set_aside(path: Path) -> Path:
    """Rename a file or folder to `<name>.aside`, or the next free `<name>.aside-2`; returns the new path.

    This may let go of the folder's lock, as `let_go`.
    """
    places = numbered(path.with_name(f"{path.name}.aside"))
    let_go(path)
    return _system.patiently(path.rename, next(place for place in places if not os.path.lexists(place)))


def let_go(folder: Path) -> None:
    """Release the lock of a folder where the system neither renames nor removes what is open.

    A process that takes the lock meanwhile has that refused.
    """
    if not _system.RENAMES_OPEN and (file := _held.pop(str((folder / LOCK).resolve()), None)):
        file.close()


def is_set_aside(name: str) -> bool:
    """Whether `set_aside` has given a file or folder this name."""
    return Path(name).suffix.partition("-")[0] == ".aside"


def refuse_links(
    folder: Path, name: str = "the run's folder", root: Path | None = None, written: Sequence[str] = ("*",)
) -> None:
    """Raise UserError for a folder in which a write could land elsewhere, or block; it may be missing.

    `name` is what it is, `root` what it has to lie in itself, and `written` are glob patterns of what will be written
    directly in it: links beside that do no harm. A folder that cannot be listed is refused: its links would still work.
    """
    if root is not None and not is_inside(folder, root):
        raise UserError(f"{folder}: is behind a link that leads out of {root}; replace it by what it leads to")

    def refuse(error: OSError) -> None:
        if os.path.lexists(folder):
            raise UserError(f"{error.filename}: cannot be listed, so that links in it cannot be seen: {why(error)}")

    for above, folders, files in os.walk(folder, onerror=refuse):
        if Path(above) == folder:
            folders[:], files[:] = (
                [one for one in names if any(fnmatch(one, pattern) for pattern in written)]
                for names in (folders, files)
            )
        for path in (Path(above, child) for child in (*folders, *files)):
            is_cached_log = fnmatch(str(path), "*/wandb/*run-*/logs/debug-core.log")  # W&B's own; never written to
            if path.is_symlink() and not is_cached_log and not is_inside(path, folder):
                raise UserError(f"{path}: is a link that leads out of {name}; replace it by what it leads to")
            if path.is_fifo() or path.is_socket() or path.is_char_device() or path.is_block_device():
                raise UserError(f"{path}: is neither a file nor a folder; remove it")


def is_inside(path: Path, folder: Path) -> bool:
    """Whether a path is a folder or lies in it, after following links."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))
