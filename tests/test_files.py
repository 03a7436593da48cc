"""Files are written atomically on every file system, locks exclude other processes, and links out are refused."""

import errno
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from batchscope import files
from batchscope.errors import UserError
from tests.support.locks import HOLD, held


def refusing(number: int) -> Callable[..., None]:
    """A system call that fails with an error number."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return refuse


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    files.write_bytes(tmp_path / "a", b"old")
    files.write_bytes(tmp_path / "a", b"new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": b"new"}


def test_the_bytes_are_on_the_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = []
    monkeypatch.setattr("os.fsync", lambda _: done.append("fsync"))
    monkeypatch.setattr("os.replace", lambda *_: done.append("replace"))
    files.write_bytes(tmp_path / "a", b"new")
    assert done == ["fsync", "replace", "fsync"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EACCES])
@pytest.mark.parametrize("step", ["os.fsync", "os.replace"])
def test_when_it_cannot_be_written_the_old_file_is_there_and_no_other(step, number, tmp_path, monkeypatch):
    files.write_bytes(tmp_path / "a", b"old")
    monkeypatch.setattr(step, refusing(number))
    with pytest.raises(OSError, match=os.strerror(number)):
        files.write_bytes(tmp_path / "a", b"new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": b"old"}


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_that_flushes_nothing_is_written_to_as_well(number: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("os.fsync", refusing(number))
    files.write_bytes(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new"


def test_no_two_writers_share_a_temporary_name(tmp_path: Path) -> None:
    with files.atomic_write(tmp_path / "a") as one, files.atomic_write(tmp_path / "a") as other:
        assert one.name != other.name
        one.write(b"one")
        other.write(b"other")
    assert (tmp_path / "a").read_bytes() == b"one"


def test_a_lock_is_held_by_one_process_and_let_go_of_when_it_is_killed(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with held(path) as other:
        with pytest.raises(files.Locked), files.lock(path):
            pass
        other.kill()
    with files.lock(path), pytest.raises(files.Locked), files.lock(path):
        pass
    with files.lock(path):
        pass


def test_a_waiting_process_takes_the_lock_when_it_is_let_go_of(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with held(path) as other:
        threading.Timer(0.3, other.kill).start()
        with files.wait_for_lock(path), pytest.raises(files.Locked), files.lock(path):
            pass


def test_a_forked_worker_that_outlives_its_parent_does_not_hold_its_lock(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    forking = HOLD.replace("print(1", "__import__('os').fork() or __import__('time').sleep(60)\n    print(1")
    with held(path, program=forking, start_new_session=True) as parent:
        parent.kill()
        try:
            with files.wait_for_lock(path):
                pass
        finally:
            os.killpg(parent.pid, signal.SIGKILL)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL])
def test_a_file_system_without_locks_is_a_warning(number: int, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("fcntl.lockf", refusing(number))
    with files.lock_folder(tmp_path, "resume", "it is being trained right now"):
        pass
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {tmp_path} is on a file system without locks ({os.strerror(number)})")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_lock_file_that_cannot_be_opened_is_not_one_that_is_held(number: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(Path, "open", refusing(number))
    with (
        pytest.raises(UserError, match=f"resume: {tmp_path} cannot be written: .*{os.strerror(number)}"),
        files.lock_folder(tmp_path, "resume", "it is being trained right now"),
    ):
        pass


def test_of_several_that_ask_for_the_same_folder_each_has_its_own(tmp_path: Path) -> None:
    assert [files.new_folder(tmp_path / "a").name for _ in range(3)] == ["a", "a-2", "a-3"]


def test_what_is_set_aside_is_known_by_its_name_and_overwrites_nothing(tmp_path: Path) -> None:
    for content in ("one", "two"):
        (tmp_path / "1").write_text(content)
        files.set_aside(tmp_path / "1")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"1.aside": "one", "1.aside-2": "two"}
    assert all(files.is_set_aside(path.name) for path in tmp_path.iterdir())
    assert not any(map(files.is_set_aside, ("1", "aside", "1-aside", "1.asides", ".aside")))


def test_a_lock_makes_no_file_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="cannot be written"), files.lock_folder(tmp_path / "run", "resume", "held"):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_only_the_link_that_wandb_makes_may_lead_out_of_a_runs_folder(tmp_path: Path) -> None:
    logs = tmp_path / "run" / "wandb" / "offline-run-1-a" / "logs"
    logs.mkdir(parents=True)
    (logs / "debug-core.log").symlink_to(tmp_path / "cache.log")
    files.refuse_links(tmp_path / "run")
    (logs / "debug.log").symlink_to(tmp_path / "cache.log")
    with pytest.raises(UserError, match="debug.log: is a link that leads out of the run's folder"):
        files.refuse_links(tmp_path / "run")


def test_a_link_beside_what_will_be_written_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "data").symlink_to(tmp_path)
    files.refuse_links(tmp_path / "project", written=("report.md",))
    (tmp_path / "project" / "report.md").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="report.md: is a link that leads out of"):
        files.refuse_links(tmp_path / "project", written=("report.md",))


def test_a_pipe_in_a_folder_would_have_a_reader_wait_and_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.csv")
    with pytest.raises(UserError, match="metrics.csv: is neither a file nor a folder"):
        files.refuse_links(tmp_path)


def test_a_folder_that_cannot_be_listed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files can still be opened. Root may list every folder, so the system's answer is simulated."""

    def refuse(path: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    files.refuse_links(tmp_path / "missing")
    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UserError, match="cannot be listed, so that links in it cannot be seen: Permission denied"):
        files.refuse_links(tmp_path)


def test_a_folder_is_there_with_all_its_files_and_takes_the_next_free_name(tmp_path: Path) -> None:
    whole = {"a.json": b"1", "b.gz": b"2"}
    for name in ("made", "made-2", "made-3"):
        assert files.write_folder(tmp_path / "new" / "made", whole) == tmp_path / "new" / name
        assert {path.name: path.read_bytes() for path in (tmp_path / "new" / name).iterdir()} == whole
    assert len(list((tmp_path / "new").iterdir())) == 3


def test_a_name_that_is_taken_at_the_last_moment_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files.write_folder(tmp_path / "made", {"a.json": b"1"})
    looks, exists = iter([False]), os.path.lexists
    monkeypatch.setattr(os.path, "lexists", lambda path: next(looks, exists(path)))
    assert files.write_folder(tmp_path / "made", {"a.json": b"2"}) == tmp_path / "made-2"
    assert (tmp_path / "made/a.json").read_bytes() == b"1"


def test_a_folder_whose_files_cannot_all_be_written_is_not_there(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(os, "fsync", refusing(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"):
        files.write_folder(tmp_path / "made", {"a.json": b"1"})
    assert not list(tmp_path.iterdir())
