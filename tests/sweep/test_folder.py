"""A sweep's folder: a run that ended is kept, a run that was stopped is resumed or started again, and nothing is removed."""

import json
from pathlib import Path

import pytest

from batchscope.analysis.read import find
from batchscope.errors import UserError
from batchscope.records.read import read
from batchscope.sweep import folder
from tests.support.locks import RUN_DIR, held

CONFIG = {"seed": 0, "data": {"batch_size": 4}, "run_dir": "s/0", "logger": {"save_dir": "s/0", "name": None}}


def leave(run_dir: Path, status: str, config: dict = CONFIG) -> None:
    run_dir.mkdir(parents=True)
    (run_dir / "run.json").write_text(json.dumps({"schema": 3, "status": status, "config": config}))
    (run_dir / "last.ckpt").write_text("weights")


def keep_a_checkpoint(run_dir: Path) -> None:
    (run_dir / "checkpoints").mkdir()
    (run_dir / "checkpoints/last.ckpt").write_text("weights")


def everything(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


KEPT, RESUMED, PLANNED, ASIDE = "kept", "resumed", "planned again", "set aside"


@pytest.mark.parametrize(
    ("status", "checkpoint", "then"),
    [
        *((status, checkpoint, KEPT) for status in ("finished", "out_of_memory", "failed") for checkpoint in (True, False)),
        *((status, True, RESUMED) for status in ("running", "interrupted", "killed")),
        *((status, False, ASIDE) for status in ("running", "interrupted", "killed")),
        ("planned", False, PLANNED),
    ],
)  # fmt: skip
def test_how_a_run_ended_decides_what_becomes_of_it(tmp_path, status, checkpoint, then):
    leave(tmp_path / "0", status)
    if checkpoint:
        keep_a_checkpoint(tmp_path / "0")
    before = everything(tmp_path / "0")
    found = folder.keep_or_plan(tmp_path / "0", CONFIG, overrides=["seed=0"])
    assert (found is not None) is (then == KEPT)
    if then in (KEPT, RESUMED):
        assert everything(tmp_path / "0").keys() - {".lock"} == before.keys()
        assert read(tmp_path / "0")["status"] == ("killed" if status == "running" else status)
    else:
        assert (read(tmp_path / "0")["status"], read(tmp_path / "0")["overrides"]) == ("planned", ["seed=0"])
    if then == ASIDE:
        assert before.items() <= everything(tmp_path / "0.aside").items()
    else:
        assert [path.name for path in tmp_path.iterdir()] == ["0"]


def test_what_was_set_aside_is_in_no_report_and_no_exit_code(tmp_path):
    leave(tmp_path / "0", "killed")
    folder.keep_or_plan(tmp_path / "0", CONFIG)
    assert folder.statuses(tmp_path) == ["planned"]
    assert [run.name for run in find([tmp_path]).runs] == ["0"]


HELD = ["running", *(pytest.param(status, marks=pytest.mark.slow) for status in ("planned", "interrupted", "failed"))]


@pytest.mark.parametrize("status", HELD)
def test_a_run_that_is_going_on_in_another_process_is_left_as_it_is(tmp_path, status):
    leave(tmp_path / "0", status)
    before = everything(tmp_path)
    with held(tmp_path / "0", RUN_DIR), pytest.raises(UserError, match="is being trained right now"):
        folder.keep_or_plan(tmp_path / "0", CONFIG)
    assert everything(tmp_path) == before | {"0/.lock": ""}


def test_a_run_of_another_sweep_is_refused_with_the_option_that_differs(tmp_path):
    leave(tmp_path / "0", "finished")
    other = {**CONFIG, "data": {"batch_size": 8}}
    for refuse in (lambda: folder.keep_or_plan(tmp_path / "0", other), lambda: folder.refuse_other(tmp_path, [other])):
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
        folder.lock_sweep_dir(tmp_path / "s"),
        pytest.raises(UserError, match="is being run in"),
        folder.lock_sweep_dir(tmp_path / "s"),
    ):
        pass
    with folder.lock_sweep_dir(tmp_path / "s"):
        pass


def test_a_torn_record_and_all_that_lies_beside_it_is_set_aside(tmp_path):
    (tmp_path / "0").mkdir()
    (tmp_path / "0/run.json").write_text('{"schema": 1, "sta')
    keep_a_checkpoint(tmp_path / "0")
    folder.refuse_other(tmp_path, [CONFIG])
    assert folder.keep_or_plan(tmp_path / "0", CONFIG) is None
    assert read(tmp_path / "0")["status"] == "planned"
    assert (tmp_path / "0.aside/run.json").read_text() == '{"schema": 1, "sta'
    assert (tmp_path / "0.aside/checkpoints/last.ckpt").exists()


@pytest.mark.parametrize("name", [".lock", "0", "0/run.json", "0/checkpoints"])
def test_a_sweeps_folder_with_a_link_out_of_it_is_refused(name: str, tmp_path: Path) -> None:
    link = tmp_path / "sweep" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / "elsewhere")
    error = pytest.raises(UserError, match=f"{name}: is a link that leads out of the sweep's folder")
    with error, folder.lock_sweep_dir(tmp_path / "sweep"):
        pass
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("run_dir", ["", "/"])
def test_a_record_that_calls_every_path_its_own_is_that_of_another_sweep(run_dir: str, tmp_path: Path) -> None:
    there = {"run_dir": run_dir, "data": {"root": "/theirs"}}
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "run.json").write_text(json.dumps({"schema": 3, "status": "finished", "config": there}))
    with pytest.raises(UserError, match="holds a run of another sweep"):
        folder.keep_or_plan(tmp_path / "0", {"run_dir": str(tmp_path / "0"), "data": {"root": "mine"}})
