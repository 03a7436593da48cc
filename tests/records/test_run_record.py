"""A run's record is whole, merged and never replaced: no later failure takes away what an earlier success wrote."""

import errno
import json
import os
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from batchscope.errors import Interrupted, PeerLostError, UserError
from batchscope.files import WriteError
from batchscope.records.read import read
from batchscope.records.run_record import RunRecord, close, close_open, plan
from batchscope.training.failures import RunOutOfMemoryError
from tests.support.runs import SMALL, run

RESUMED = {"step": 8, "checkpoint": "checkpoints/last.ckpt"}


def finished(run_dir: Path) -> None:
    """What a run leaves that was trained to its end."""
    with RunRecord(run_dir, config={"epochs": 2}) as record:
        record.begin()
        record.add(metrics={"val/loss": 0.5}, throughput={"step_ms": 3.0}, checkpoints={"best": "b"})


def full_disk(monkeypatch: pytest.MonkeyPatch, room: int = 0) -> None:
    """From now on the disk takes `room` bytes more, and what is freed by removing a file."""
    free, inner, unlink = [room], os.fsync, Path.unlink

    def fsync(descriptor: int) -> None:
        free[0] -= os.fstat(descriptor).st_size
        if free[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        inner(descriptor)

    def freed(path: Path, missing_ok: bool = False) -> None:
        free[0] += path.stat().st_size if path.exists() else 0
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr("os.fsync", fsync)
    monkeypatch.setattr(Path, "unlink", freed)


def test_a_run_that_is_refused_before_it_begins_changes_nothing(tmp_path: Path) -> None:
    finished(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(UserError), RunRecord(tmp_path, config={"epochs": 1}):
        raise UserError("resume: the data are not the run's")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_resumed_run_that_fails_keeps_what_it_was_before(tmp_path: Path) -> None:
    finished(tmp_path)
    before = read(tmp_path)
    with pytest.raises(ValueError, match="broken"), RunRecord(tmp_path, config={"epochs": 3}) as record:
        record.begin(RESUMED)
        raise ValueError("broken")
    after = read(tmp_path)
    assert (after["status"], after["error"]) == ("failed", "ValueError: broken")
    assert {key: after[key] for key in ("metrics", "throughput", "checkpoints", "started")} == {
        key: before[key] for key in ("metrics", "throughput", "checkpoints", "started")
    }
    (entry,) = after["resumed"]
    assert entry["step"] == 8
    assert entry["before"] == {key: before[key] for key in ("status", "finished", "seconds")}


def test_a_resumed_run_that_ends_well_has_no_error_left(tmp_path: Path) -> None:
    finished(tmp_path)
    close(tmp_path, "killed", "killed by SIGKILL")
    with RunRecord(tmp_path) as record:
        record.begin(RESUMED)
        assert read(tmp_path)["status"] == "running"
    after = read(tmp_path)
    assert after["status"] == "finished"
    assert "error" not in after
    assert after["resumed"][0]["before"]["error"] == "killed by SIGKILL"


def test_the_time_of_a_resumed_run_is_that_of_all_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for waited, seconds in ((5.0, 10.0), (None, 30.0), (None, 50.0)):
        times = iter([100.0, 100.0, 100.0 + (15.0 if waited else 20.0)])
        monkeypatch.setattr("batchscope.records.run_record.time.time", lambda times=times: next(times, 120.0))
        with RunRecord(tmp_path) as record:
            record.begin(None if waited else RESUMED)
            record.add(waiting_seconds=waited)
        assert read(tmp_path)["seconds"] == seconds


def test_a_run_resumed_after_its_last_step_keeps_what_was_measured_of_them(tmp_path: Path) -> None:
    finished(tmp_path)
    with RunRecord(tmp_path) as record:
        record.begin(RESUMED)
        record.add(throughput={}, metrics={"val/loss": 0.4})
    assert read(tmp_path)["throughput"] == {"step_ms": 3.0}
    assert read(tmp_path)["metrics"] == {"val/loss": 0.4}


def test_a_count_of_the_whole_run_that_is_none_any_more_leaves_the_record(tmp_path: Path) -> None:
    with RunRecord(tmp_path) as record:
        record.begin()
        record.add(skipped_steps=1)
    with RunRecord(tmp_path) as record:
        record.begin(RESUMED)
        record.add(skipped_steps=None)
    assert "skipped_steps" not in read(tmp_path)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Interrupted(15, agreed=False), "interrupted"),
        (Interrupted(15), "running"),
        (UserError("bad"), "failed"),
        (PeerLostError("gone"), "running"),
    ],
)
def test_what_ends_another_rank_first_is_how_the_run_ended_unless_it_only_lost_a_peer(
    error: BaseException, status: str, tmp_path: Path
) -> None:
    with RunRecord(tmp_path) as first:
        first.begin()
        with pytest.raises(type(error)), RunRecord(tmp_path, enabled=False) as other:
            other.begin()
            raise error
        assert read(tmp_path)["status"] == status


def test_a_full_disk_leaves_room_for_the_records_last_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WriteError, match="the disk is full"), RunRecord(tmp_path) as record:
        record.begin()
        full_disk(monkeypatch)
        record.add(metrics={"val/loss": 0.5})
    after = read(tmp_path)
    assert after["status"] == "interrupted"
    assert after["error"].startswith(f"{tmp_path}/run.json cannot be written: the disk is full")
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_a_disk_that_is_full_at_the_start_is_one_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full_disk(monkeypatch)
    with pytest.raises(WriteError, match="the disk is full"), RunRecord(tmp_path) as record:
        record.begin()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err == ""


def test_a_last_word_that_cannot_be_written_hides_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="broken"), RunRecord(tmp_path) as record:
        record.begin()
        full_disk(monkeypatch, room=-(2**20))
        raise ValueError("broken")
    assert capsys.readouterr().err.startswith(f"warning: {tmp_path}/run.json cannot be written: the disk is full")


def test_a_record_is_flushed_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed = []
    monkeypatch.setattr("os.fsync", lambda descriptor: flushed.append(os.fstat(descriptor).st_ino))
    plan(tmp_path, config={})
    assert flushed == [(tmp_path / "run.json").stat().st_ino, tmp_path.stat().st_ino]


@pytest.mark.parametrize("content", ["", '{"schema": 1, "sta', "[]"])
def test_a_torn_record_is_set_aside_by_who_has_to_write_one(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.json").write_text(content)
    close(tmp_path, "killed", "killed by SIGKILL")
    assert read(tmp_path)["status"] == "killed"
    assert (tmp_path / "run.json.aside").read_text() == content
    assert f"it is now {tmp_path}/run.json.aside" in capsys.readouterr().err


def test_a_planned_run_keeps_the_command_to_repeat(tmp_path: Path) -> None:
    plan(tmp_path, config={}, command="python train.py -m seed=1,2")
    with RunRecord(tmp_path, command="python job.py") as record:
        record.begin()
    assert read(tmp_path)["command"] == "python train.py -m seed=1,2"


def test_out_of_memory_in_another_process_of_the_run_is_how_it_ended(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="closed by peer"), RunRecord(tmp_path) as first:
        first.begin()
        with pytest.raises(UserError), RunRecord(tmp_path, enabled=False) as other:
            other.begin()
            raise RunOutOfMemoryError("out of memory with data.batch_size=8")
        raise RuntimeError("Connection closed by peer")
    after = read(tmp_path)
    assert (after["status"], after["error"]) == ("out_of_memory", "out of memory with data.batch_size=8")


def test_how_a_run_ended_is_said_once(tmp_path: Path) -> None:
    finished(tmp_path)
    close_open(tmp_path, "killed", "killed by SIGKILL")
    assert read(tmp_path)["status"] == "finished"


def test_what_is_no_number_is_no_part_of_a_record(tmp_path: Path) -> None:
    plan(tmp_path, config={"lr": float("nan"), "betas": [0.9, float("inf")], "path": "\udcff"})
    assert json.loads((tmp_path / "run.json").read_text(), parse_constant=pytest.fail)["config"] == {
        "betas": [0.9, None],
        "path": "\udcff",
    }


def test_a_run_whose_folder_another_one_has_taken_in_the_same_second_has_one_of_its_own(tmp_path: Path) -> None:
    taken = [datetime.now() + timedelta(seconds=second) for second in range(120)]
    names = {f"{moment:%Y-%m-%d_%H-%M-%S}" for moment in taken}
    for name in names:
        (tmp_path / "outputs" / "runs" / name).mkdir(parents=True)
        (tmp_path / "outputs" / "runs" / name / ".lock").touch()
    done = run(tmp_path, *SMALL, "trainer.max_epochs=1", "test=false")
    assert done.end() == 0, done.complained
    (path,) = (tmp_path / "outputs" / "runs").glob("*/run.json")
    assert path.parent.name.removesuffix("-2") in names - {path.parent.name}
    assert (
        read(path.parent)["config"]["callbacks"]["checkpoint"]["dirpath"]
        == f"{path.parent.relative_to(tmp_path)}/checkpoints"
    )


def test_room_is_taken_in_no_file_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".run.json.reserve.tmp").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_text("mine")
    finished(tmp_path / "run")
    assert (tmp_path / "elsewhere").read_text() == "mine"
