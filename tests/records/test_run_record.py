"""A run's record is whole, merged and never replaced: no later failure takes away what an earlier success wrote."""

import errno
import json
import os
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from batchscope.errors import Interrupted, NonFiniteError, PeerLostError, UserError
from batchscope.files import WriteError
from batchscope.records import run_record
from batchscope.records.read import optimized_value, read, refuse_used, sweep_folder
from batchscope.records.run_record import RunRecord, record_end, record_missing_end, write_planned
from batchscope.training.failures import RunOutOfMemoryError
from tests.support.command_lines import refusal
from tests.support.runs import SMALL, run
from tests.support.synthetic_runs import change_record

RESUMED = {"step": 8, "checkpoint": "checkpoints/last.ckpt"}
MEASURED = {"metrics": {"val/loss": 0.5}, "throughput": {"step_ms": 3.0}, "checkpoints": {"best": "b"}}
full_disk = Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))


def lived(run_dir, error=None, *, resumed=None, **fields):
    """Record a run that begins, adds fields, and finishes or raises an error; return its record."""
    with RunRecord(run_dir, config={"epochs": 2}) as record:
        record.begin(resumed)
        record.add(**fields)
        if error:
            raise error
    return read(run_dir)


def test_a_run_that_is_refused_before_it_begins_changes_nothing(tmp_path):
    lived(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(UserError), RunRecord(tmp_path, config={"epochs": 1}):
        raise UserError("resume: the data are not the run's")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_resumed_run_keeps_what_it_was_before_and_says_how_it_ended_itself(tmp_path):
    before = lived(tmp_path, **MEASURED)
    with pytest.raises(ValueError, match="broken"):
        lived(tmp_path, ValueError("broken"), resumed=RESUMED)
    failed = read(tmp_path)
    assert (failed["status"], failed["error"]) == ("failed", "ValueError: broken")
    assert {key: failed[key] for key in (*MEASURED, "started")} == {**MEASURED, "started": before["started"]}
    assert failed["resumed"][0].items() >= RESUMED.items()
    assert failed["resumed"][0]["before"] == {key: before[key] for key in ("status", "finished", "seconds")}
    with RunRecord(tmp_path) as record:
        record.begin(RESUMED)
        assert read(tmp_path)["status"] == "running"
    record_missing_end(tmp_path, "killed", "killed by SIGKILL")  # the end is recorded once
    ended = read(tmp_path)
    assert (ended["status"], ended.get("error")) == ("finished", None)
    assert ended["resumed"][1]["before"]["error"] == "ValueError: broken"


def test_a_record_whose_list_of_resumed_processes_is_null_is_resumed(tmp_path):
    lived(tmp_path)
    change_record(tmp_path, resumed=None)
    assert [entry["step"] for entry in lived(tmp_path, resumed=RESUMED)["resumed"]] == [8]


def test_where_there_is_no_last_sweep_every_place_that_was_searched_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = "choose: got 'last', and there is no sweep in outputs/sweeps or outputs/choose"
    assert refusal(sweep_folder, "last", "choose", Path("outputs", "choose")) == message


def test_what_is_optimized_is_a_metric_also_by_the_name_of_a_lightning_module_or_a_number_of_the_speed():
    record = {"metrics": {"val_loss": 0.5, "test/acc": 0.9}, "throughput": {"samples_per_sec": 7.0}}
    for name, value in {"val/loss": 0.5, "test/acc": 0.9, "samples_per_sec": 7.0, "val/acc": None, None: None}.items():
        assert optimized_value({**record, "config": {"optimized_metric": name}}) == value


def test_a_loss_that_is_not_finite_is_a_status_of_its_own_also_of_another_rank(tmp_path):
    with pytest.raises(NonFiniteError):
        lived(tmp_path, NonFiniteError("step 3: the loss is nan"))
    assert (read(tmp_path)["status"], read(tmp_path)["error"]) == ("not_finite", "step 3: the loss is nan")
    with pytest.raises(RuntimeError), RunRecord(tmp_path / "ranks") as first:
        first.begin()
        with pytest.raises(NonFiniteError), RunRecord(tmp_path / "ranks", enabled=False) as second:
            second.begin()
            raise NonFiniteError("step 3: the loss is nan")
        raise RuntimeError("closed by peer")
    assert read(tmp_path / "ranks")["status"] == "not_finite"


def test_the_time_of_a_resumed_run_is_that_of_all_its_processes_whatever_the_clock_is_set_to(tmp_path, monkeypatch):
    for waited, seconds in ((5.0, 10.0), (None, 30.0), (None, 50.0)):
        monotonic = iter([100.0, 115.0 if waited else 120.0]).__next__
        set_back = iter([7200.0, 0.0]).__next__
        monkeypatch.setattr(run_record, "time", SimpleNamespace(monotonic=monotonic, time=set_back))
        after = lived(tmp_path, resumed=None if waited else RESUMED, waiting_seconds=waited)
        assert after["seconds"] == seconds


def test_of_a_process_that_was_killed_the_fit_counts_beside_all_of_those_before_it(tmp_path, monkeypatch):
    monotonic = iter([0.0, 130.0, 0.0, 0.0, 20.0]).__next__  # the second process has no end
    monkeypatch.setattr(run_record, "time", SimpleNamespace(monotonic=monotonic, time=lambda: 0.0))
    lived(tmp_path, fit_seconds=100.0)
    RunRecord(tmp_path).__enter__().begin(RESUMED | {"fit_seconds": 100.0})
    after = lived(tmp_path, resumed=RESUMED | {"fit_seconds": 125.0})
    assert after["seconds"] == 130 + 25 + 20


def test_a_run_resumed_after_its_last_step_keeps_what_was_measured_and_drops_what_is_none(tmp_path):
    lived(tmp_path, note=1, **MEASURED)
    after = lived(tmp_path, resumed=RESUMED, throughput={}, metrics={"val/loss": 0.4}, note=None)
    assert (after["throughput"], after["metrics"]) == ({"step_ms": 3.0}, {"val/loss": 0.4})
    assert "note" not in after


LOST = "RuntimeError: closed by peer"  # what the first rank knows


@pytest.mark.parametrize(
    ("error", "meanwhile", "status", "message"),
    [
        (Interrupted(15, agreed=False), "interrupted", "interrupted", str(Interrupted(15))),
        (Interrupted(15), "running", "failed", LOST),
        (UserError("bad"), "failed", "failed", "bad"),
        (PeerLostError("gone"), "running", "failed", LOST),
        (RunOutOfMemoryError("out of memory"), "out_of_memory", "out_of_memory", "out of memory"),
        (ZeroDivisionError("a bug"), "failed", "failed", "ZeroDivisionError: a bug"),
    ],
)
def test_what_ends_another_rank_is_how_the_run_ended_unless_it_only_lost_a_peer(
    error, meanwhile, status, message, tmp_path
):
    with pytest.raises(RuntimeError, match="closed by peer"), RunRecord(tmp_path) as first:
        first.begin()
        with pytest.raises(type(error)), RunRecord(tmp_path, enabled=False) as second:
            second.begin()
            raise error
        assert read(tmp_path)["status"] == meanwhile
        raise RuntimeError("closed by peer")
    assert (read(tmp_path)["status"], read(tmp_path)["error"].endswith(message)) == (status, True)


def test_a_run_that_has_lost_a_rank_without_a_word_was_killed(tmp_path):
    with pytest.raises(PeerLostError), RunRecord(tmp_path) as first:
        first.begin()
        raise PeerLostError("the connection is lost")
    assert read(tmp_path)["status"] == "killed"


def test_a_full_disk_at_the_end_hides_no_error_and_at_the_start_it_is_one(tmp_path, monkeypatch, capsys):
    with pytest.raises(ValueError, match="broken"), RunRecord(tmp_path / "end") as record:
        record.begin()
        monkeypatch.setattr("os.fsync", full_disk)
        raise ValueError("broken")
    warning = f"warning: {tmp_path}/end/run.json cannot be written: the disk is full"
    assert capsys.readouterr().err.startswith(warning)
    with pytest.raises(WriteError, match="the disk is full"):
        lived(tmp_path / "start")
    assert list((tmp_path / "start").iterdir()) == []
    assert capsys.readouterr().err == ""


def test_a_planned_run_keeps_the_command_to_repeat_and_no_number_that_is_none(tmp_path):
    config = {"lr": float("nan"), "betas": [0.9, float("inf")], "path": "\udcff"}
    write_planned(tmp_path, config=config, command="python train.py -m seed=1,2")
    planned = json.loads((tmp_path / "run.json").read_text(), parse_constant=pytest.fail)
    assert planned["config"] == {"betas": [0.9, None], "path": "\udcff"}
    with RunRecord(tmp_path, command="python job.py") as record:
        record.begin()
    assert read(tmp_path)["command"] == "python train.py -m seed=1,2"


@pytest.mark.parametrize("content", ["", '{"schema": 1, "sta', "[]"])
def test_a_torn_record_is_left_as_it_is(content, tmp_path):
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(UserError, match="already holds a run"):
        refuse_used(tmp_path)
    with pytest.raises(UserError, match="cannot be read"):
        record_end(tmp_path, "killed", "killed by SIGKILL")
    assert (tmp_path / "run.json").read_text() == content


def test_a_new_run_takes_no_folder_that_holds_one_or_a_checkpoint_alone(tmp_path):
    lived(tmp_path / "ended")
    (tmp_path / "lost" / "checkpoints").mkdir(parents=True)
    (tmp_path / "lost" / "checkpoints" / "last.ckpt").touch()
    for name in ("ended", "lost"):
        with pytest.raises(UserError, match="already holds a run"):
            refuse_used(tmp_path / name)


def test_a_run_whose_folder_another_one_has_taken_in_the_same_second_has_one_of_its_own(tmp_path):
    names = {f"{datetime.now() + timedelta(seconds=second):%Y-%m-%d_%H-%M-%S}" for second in range(120)}
    for name in names:
        (tmp_path / "outputs" / "runs" / name).mkdir(parents=True)
        (tmp_path / "outputs" / "runs" / name / ".lock").touch()
    process = run(tmp_path, *SMALL, "trainer.max_epochs=1", "test=false")
    assert process.end() == 0, process.complained
    (path,) = (tmp_path / "outputs" / "runs").glob("*/run.json")
    assert path.parent.name.removesuffix("-2") in names - {path.parent.name}
