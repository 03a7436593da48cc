"""A sweep's folder: finished runs are kept, unfinished ones are done again, and nobody else's are touched."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from batchscope.errors import UserError
from batchscope.launch import folder
from batchscope.record import read

CONFIG = {"seed": 0, "data": {"batch_size": 4}, "run_dir": "s/0", "logger": {"save_dir": "s/0", "name": None}}


def leave(run_dir: Path, status: str, config: dict = CONFIG) -> None:
    run_dir.mkdir(parents=True)
    (run_dir / "run.json").write_text(json.dumps({"schema": 1, "status": status, "config": config}))
    (run_dir / "last.ckpt").write_text("weights")


@pytest.mark.parametrize("status", ["finished", "out_of_memory"])
def test_a_run_with_a_result_is_kept(tmp_path, status):
    leave(tmp_path / "0", status)
    assert folder.keep_or_plan(tmp_path / "0", CONFIG)["status"] == status
    assert (tmp_path / "0/last.ckpt").exists()


@pytest.mark.parametrize("status", ["planned", "running", "failed", "interrupted"])
def test_a_run_without_one_is_done_again_from_an_empty_folder(tmp_path, status):
    leave(tmp_path / "0", status)
    assert folder.keep_or_plan(tmp_path / "0", CONFIG, overrides=["data.batch_size=4"]) is None
    assert read(tmp_path / "0")["status"] == "planned"
    assert read(tmp_path / "0")["overrides"] == ["data.batch_size=4"]
    assert [file.name for file in (tmp_path / "0").iterdir()] == ["run.json"]


@pytest.mark.parametrize("status", ["running", "interrupted"])
def test_a_run_that_left_a_checkpoint_is_gone_on_with(tmp_path, status):
    leave(tmp_path / "0", status)
    (tmp_path / "0/checkpoints").mkdir()
    (tmp_path / "0/checkpoints/last.ckpt").write_text("weights")
    assert folder.keep_or_plan(tmp_path / "0", CONFIG) is None
    assert read(tmp_path / "0")["status"] == status
    assert (tmp_path / "0/checkpoints/last.ckpt").exists()


def test_a_run_that_is_going_on_in_another_process_is_not_removed(tmp_path):
    leave(tmp_path / "0", "running")
    code = "import pathlib, sys; from batchscope.recovery.resume import claim\nwith claim(pathlib.Path(sys.argv[1])): print(1, flush=True); input()"
    line = [sys.executable, "-c", code, str(tmp_path / "0")]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "1\n"
        with pytest.raises(UserError, match="is being trained right now"):
            folder.keep_or_plan(tmp_path / "0", CONFIG)
        other.communicate("done")
    assert (tmp_path / "0/last.ckpt").exists()


def test_a_run_of_another_sweep_is_refused_with_the_option_that_differs(tmp_path):
    leave(tmp_path / "0", "finished")
    other = {**CONFIG, "data": {"batch_size": 8}}
    for refuse in (
        lambda: folder.keep_or_plan(tmp_path / "0", other),
        lambda: folder.refuse_other(tmp_path, [other]),
    ):
        with pytest.raises(UserError, match=r"data\.batch_size is 4 there and 8 here"):
            refuse()
    assert read(tmp_path / "0")["status"] == "finished"


def test_where_a_run_lies_and_that_it_was_resumed_makes_it_no_other(tmp_path):
    leave(tmp_path / "0", "finished")
    record = read(tmp_path / "0")
    record["config"]["resume"] = str(tmp_path / "0")
    (tmp_path / "0/run.json").write_text(json.dumps(record))
    moved = {**CONFIG, "resume": None, "run_dir": "../s/0", "logger": {"save_dir": "../s/0", "name": None}}
    assert folder.keep_or_plan(tmp_path / "0", moved)
    folder.refuse_other(tmp_path, [moved])


def test_a_single_runs_folder_is_refused(tmp_path):
    leave(tmp_path / "run", "finished")
    with pytest.raises(UserError, match="holds a single run"):
        folder.refuse_other(tmp_path / "run", [CONFIG])


def test_a_folder_is_held_by_one_sweep_at_a_time(tmp_path):
    with (
        folder.claim(tmp_path / "s"),
        pytest.raises(UserError, match="is being run in"),
        folder.claim(tmp_path / "s"),
    ):
        pass
    with folder.claim(tmp_path / "s"):
        pass


def test_a_record_that_cannot_be_read_is_refused_and_left(tmp_path):
    (tmp_path / "0").mkdir()
    (tmp_path / "0/run.json").write_text('{"schema": 1, "sta')
    with pytest.raises(UserError, match="cannot be read"):
        folder.keep_or_plan(tmp_path / "0", CONFIG)
    assert (tmp_path / "0/run.json").exists()
