"""Files are written atomically, locks exclude other processes, and links out are refused."""

import contextlib
import errno
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from batchscope import files
from batchscope.errors import UserError
from tests.support.locks import HOLD, held
from tests.support.marks import POSIX
from tests.support.systems import SYSTEM


def refusing(number: int) -> Callable[..., None]:
    """Make a system call that fails with an error number."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return refuse


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_file_is_replaced_when_its_bytes_are_on_the_disk_and_nothing_else_is_left(tmp_path, monkeypatch) -> None:
    calls = []
    for name in ("fsync", "replace"):
        call = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, name=name, call=call: calls.append(name) or call(*args))
    for data in (b"old", b"new"):
        files.write_bytes(tmp_path / "a", data)
        assert contents(tmp_path) == {"a": data}
    assert calls == 2 * ["fsync", "replace", *(["fsync"] if SYSTEM != "windows" else [])]  # the last one of the folder


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EACCES])
@pytest.mark.parametrize("step", ["os.fsync", "os.replace"])
def test_when_it_cannot_be_written_the_old_file_is_there_and_no_other(step, number, tmp_path, monkeypatch):
    files.write_bytes(tmp_path / "a", b"old")
    monkeypatch.setattr(step, refusing(number))
    with pytest.raises(OSError, match=os.strerror(number)):
        files.write_bytes(tmp_path / "a", b"new")
    assert contents(tmp_path) == {"a": b"old"}


def test_a_file_system_that_flushes_nothing_is_written_without(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("os.fsync", refusing(errno.EINVAL))
    files.write_bytes(tmp_path / "a", b"new")
    assert contents(tmp_path) == {"a": b"new"}


def test_no_two_writers_share_a_temporary_name(tmp_path: Path) -> None:
    with files.atomic_write(tmp_path / "a") as first, files.atomic_write(tmp_path / "a") as second:
        assert first.name != second.name
        first.write(b"one")
        second.write(b"other")
    assert contents(tmp_path) == {"a": b"one"}


# --- locks -----------------------------------------------------------------------------------------------------------

FORKING = HOLD.replace("print(1", "__import__('os').fork() or __import__('time').sleep(60)\n    print(1")


@pytest.mark.parametrize("program", [HOLD, FORKING], ids=["a process", "one whose forked worker outlives it"])
def test_a_lock_is_held_by_one_process_and_let_go_of_when_it_is_killed(program: str, tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with held(path, program=program, start_new_session=True) as process:
        with pytest.raises(files.Locked), files.lock(path):
            pass
        process.kill()
        process.wait()
        with files.lock(path), pytest.raises(files.Locked), files.lock(path):
            pass
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    with files.lock(path):
        pass


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL])
def test_a_file_system_without_locks_is_a_warning(number: int, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("fcntl.lockf", refusing(number))
    with files.lock_folder(tmp_path, "resume", "it is being trained right now"):
        pass
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {tmp_path} is on a file system without locks ({os.strerror(number)})")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.ELOOP])
def test_a_lock_file_that_cannot_be_opened_is_not_one_that_is_held(number: int, tmp_path: Path, monkeypatch) -> None:
    if number == errno.ELOOP:  # a lock makes no file behind a link
        (tmp_path / ".lock").symlink_to(tmp_path / "elsewhere")
    else:
        monkeypatch.setattr(Path, "open", refusing(number))
    reason = "it is a link" if number == errno.ELOOP else os.strerror(number)
    with pytest.raises(UserError, match=f"resume: {tmp_path}.* cannot be written: .*{reason}"):  # noqa: SIM117
        with files.lock_folder(tmp_path, "resume", "it is being trained right now"):
            pass
    assert not (tmp_path / "elsewhere").exists()


# --- folders ---------------------------------------------------------------------------------------------------------


def test_a_new_folder_and_what_is_set_aside_take_the_next_free_name(tmp_path: Path) -> None:
    assert [files.new_folder(tmp_path / "new" / "a").name for _ in range(3)] == ["a", "a-2", "a-3"]
    for content in ("one", "two"):
        (tmp_path / "1").write_text(content)
        assert files.is_set_aside(files.set_aside(tmp_path / "1").name)
    assert (tmp_path / "1.aside").read_text() + (tmp_path / "1.aside-2").read_text() == "onetwo"
    assert not any(map(files.is_set_aside, ("1", "aside", "1-aside", "1.asides", ".aside")))


WANDB = "mkdir -p wandb/offline-run-1-a/logs; ln -s /cache wandb/offline-run-1-a/logs"
# A shell command in a folder, the file that will be written, and the refusal, if any.
LINKS = [
    (f"{WANDB}/debug-core.log", "*", ""),  # that wandb itself makes
    (f"{WANDB}/debug.log", "*", "debug.log: is a link that leads out of the run's folder"),
    ("ln -s /elsewhere data", "report.md", ""),  # beside what will be written
    ("ln -s /elsewhere report.md", "report.md", "report.md: is a link that leads out of"),
    ("mkfifo metrics.csv", "*", "metrics.csv: is neither a file nor a folder"),  # a pipe would block a reader
    ("rmdir $PWD", "*", ""),
]


@pytest.mark.parametrize(("command", "written", "error"), LINKS)
def test_a_link_out_of_a_folder_is_refused_where_it_would_be_written(command, written, error, tmp_path) -> None:
    (tmp_path / "run").mkdir()
    subprocess.run(command, shell=True, cwd=tmp_path / "run", check=True)
    with pytest.raises(UserError, match=error) if error else contextlib.nullcontext():
        files.refuse_links(tmp_path / "run", written=(written,))


def test_a_folder_that_cannot_be_listed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files can still be opened. Root may list every folder, so the system's answer is simulated."""
    monkeypatch.setattr(os, "scandir", refusing(errno.EACCES))
    with pytest.raises(UserError, match="cannot be listed, so that links in it cannot be seen: Permission denied"):
        files.refuse_links(tmp_path)


def test_a_folder_of_files_takes_the_next_free_name(tmp_path: Path) -> None:
    for name in ("made", "made-2", "made-3"):
        files_by_name = {"a.json": name.encode(), "b.gz": b"2"}
        assert files.write_folder(tmp_path / "new" / "made", files_by_name) == tmp_path / "new" / name
        assert contents(tmp_path / "new" / name) == files_by_name


@POSIX
def test_a_file_is_written_into_a_folder_that_cannot_be_listed(tmp_path, monkeypatch) -> None:
    opened, call = [], os.open

    def refuse(path: object, *args: int, **options: object) -> int:
        if path != tmp_path:
            return call(path, *args, **options)
        opened.append(path)
        raise PermissionError

    monkeypatch.setattr(os, "open", refuse)
    files.write_bytes(tmp_path / "a", b"new")
    assert (opened, (tmp_path / "a").read_bytes()) == ([tmp_path], b"new")
