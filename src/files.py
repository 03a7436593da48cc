"""Files that are written atomically, and folders that one process at a time works in."""

import contextlib
import errno
import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from .errors import UserError

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

LOCK = ".lock"
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What a file system answers that cannot do what is asked, as opposed to one that failed at it.
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
_NO_LOCKS = (*_UNSUPPORTED, errno.ENOLCK)
_HELD = (errno.EACCES, errno.EAGAIN)
_held: set[str] = set()  # the lock files that this process holds: POSIX would let it take them twice


class WriteError(UserError):
    """The system refuses to write a file. The run that wanted to write it can go on once the cause is gone."""


class Locked(Exception):
    """Another process, or another part of this one, holds the lock."""


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which becomes `path` when the block ends; at every moment the old or the new one is there, whole.

    The bytes go to a temporary file beside `path`, are flushed to the disk, and are then renamed. When the block or the
    system fails, the temporary file is removed and `path` is as it was.

    Raises:
        OSError: as the system has it.
    """
    temporary = temporary_name(path)
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            _sync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def temporary_name(path: Path) -> Path:
    """A name beside `path` that no other process takes, on this machine or on another one that shares the folder."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def remove_leftovers(folder: Path, name: str) -> None:
    """Remove the temporary files that killed processes have left of the files called `name` (a glob pattern)."""
    for path in folder.glob(f".{name}.*.tmp"):
        with contextlib.suppress(OSError):  # they do no harm
            path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk, where its file system does so; a folder can be opened on POSIX only."""
    if os.name != "posix":
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # no permission to read it: writing into it takes none
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
def lock(path: Path) -> Iterator[None]:
    """Hold a lock file, which is made if it is missing, and stays.

    The system releases the lock however the process ends, and does not pass it on to worker processes. On a file system
    without locks a warning is printed, and nothing is held.

    Raises:
        Locked: if it is held already.
        OSError: if the file cannot be opened.
    """
    name = str(path.resolve())
    if name in _held:
        raise Locked(name)
    if path.is_symlink():  # whoever made the folder may have it make a file elsewhere
        raise OSError(errno.ELOOP, "it is a link", str(path))
    with path.open("a") as file:
        if fcntl is not None:
            _lock_file(file.fileno(), path)
        _held.add(name)
        try:
            yield
        finally:
            _held.discard(name)


def _lock_file(descriptor: int, path: Path) -> None:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            raise Locked(str(path)) from None
        if error.errno not in _NO_LOCKS:
            raise
        print(
            f"warning: {path.parent} is on a file system without locks ({error.strerror}): see to it that no second "
            "process works in that folder",
            file=sys.stderr,
            flush=True,
        )


@contextlib.contextmanager
def lock_folder(folder: Path, option: str, busy: str) -> Iterator[None]:
    """Hold the folder's lock file, `.lock`.

    Args:
        folder: made if it is missing.
        option: the one that a user has named the folder by.
        busy: what is said if another process holds it.

    Raises:
        UserError: if another process holds it, or the folder or its lock file cannot be written.
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


def why(error: OSError) -> str:
    """The system's reason, in words."""
    if error.errno in NO_SPACE:
        return f"the disk takes no more ({error.strerror})"
    return error.strerror or str(error)


def new_folder(folder: Path) -> Path:
    """A folder that no other process has taken: the one that is asked for, or that with `-2`, `-3`, … at its end.

    It is made if it is missing, and belongs to whoever makes its lock file.

    Raises:
        OSError: if the folder or the file cannot be made.
    """
    number = 1
    while True:
        place = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        place.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            (place / LOCK).open("x").close()
            return place
        number += 1


def set_aside(path: Path, name: str | None = None) -> Path:
    """Rename a file or folder to `….aside`, or the next free `….aside-2`, so that its name is free; the new name.

    Args:
        path: what is renamed.
        name: what comes before `.aside`; the present name by default.
    """
    number = 1
    while True:
        place = path.with_name(f"{name or path.name}.aside" + (f"-{number}" if number > 1 else ""))
        if not os.path.lexists(place):
            path.rename(place)
            return place
        number += 1


def is_set_aside(name: str) -> bool:
    """Whether `set_aside` has given a file or folder this name."""
    return Path(name).suffix.partition("-")[0] == ".aside"


def refuse_links(folder: Path, name: str = "the run's folder", root: Path | None = None) -> None:
    """Refuse a folder in which a write could land elsewhere, or wait for somebody.

    Args:
        folder: to be written to; may be missing.
        name: what it is, for the error.
        root: what the folder itself has to lie in; anything by default.

    Raises:
        UserError: for a link in the folder that leads out of it, for what is no file, folder or link, and for a folder
            that cannot be listed: links in it work all the same.
    """
    if root is not None and not is_inside(folder, root):
        raise UserError(f"{folder}: is behind a link that leads out of {root}; replace it by what it leads to")

    def refuse(error: OSError) -> None:
        if os.path.lexists(folder):
            raise UserError(f"{error.filename}: cannot be listed, so that links in it cannot be seen: {why(error)}")

    for above, folders, files in os.walk(folder, onerror=refuse):
        for path in (Path(above, child) for child in (*folders, *files)):
            if path.is_symlink() and not is_inside(path, folder):
                raise UserError(f"{path}: is a link that leads out of {name}; replace it by what it leads to")
            if path.is_fifo() or path.is_socket() or path.is_char_device() or path.is_block_device():
                raise UserError(f"{path}: is neither a file nor a folder; remove it")


def is_inside(path: Path, run_dir: Path) -> bool:
    """Whether a path is a folder or lies in it, links followed."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(run_dir))
