"""A sweep's folder: a run that ended is kept, a run that was stopped is resumed or started again, and nothing is removed."""

import json

import pytest

from batchscope.analysis.read import read_sweep
from batchscope.errors import UserError
from batchscope.records.read import read
from batchscope.sweep import folder
from tests.support.command_lines import refusal
from tests.support.locks import RUN_DIR, held

CONFIG = {"seed": 0, "data": {"batch_size": 4}, "logger": {"name": None}}
KEPT, RESUMED, PLANNED, ASIDE = "kept", "resumed", "planned again", "set aside"


def leave(run_dir, status, config=CONFIG, checkpoint=False):
    """What a run may have left."""
    (run_dir / "checkpoints").mkdir(parents=True)
    (run_dir / "run.json").write_text(json.dumps({"schema": 3, "status": status, "config": config}))
    (run_dir / "checkpoints" / ("last.ckpt" if checkpoint else "notes")).write_text("weights")


def contents(folder):
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("status", "checkpoint", "outcome"),
    [
        *((status, checkpoint, KEPT) for status in ("finished", "out_of_memory", "failed", "not_finite") for checkpoint in (True, False)),
        *((status, True, RESUMED) for status in ("running", "interrupted", "killed")),
        *((status, False, ASIDE) for status in ("running", "interrupted", "killed")),
        ("planned", False, PLANNED),
    ],
)  # fmt: skip
def test_how_a_run_ended_decides_what_becomes_of_it(tmp_path, status, checkpoint, outcome):
    leave(tmp_path / "0", status, checkpoint=checkpoint)
    before = contents(tmp_path / "0")
    folder.refuse_other_sweep(tmp_path, [CONFIG])
    kept_record = folder.keep_or_plan(tmp_path / "0", CONFIG, overrides=["seed=0"])
    assert (kept_record is not None) is (outcome == KEPT)
    record = read(tmp_path / "0")
    if outcome in (KEPT, RESUMED):
        assert contents(tmp_path / "0").keys() - {".lock"} == before.keys()
        assert record["status"] == ("killed" if status == "running" else status)
    else:
        assert (record["status"], record["overrides"]) == ("planned", ["seed=0"])
    if outcome == ASIDE:
        assert before.items() <= contents(tmp_path / "0.aside").items()
        assert folder.statuses(tmp_path) == ["planned"]
        assert [run.name for run in read_sweep([tmp_path]).runs] == ["0"]
    else:
        assert [path.name for path in tmp_path.iterdir()] == ["0"]


def test_a_run_that_is_going_on_in_another_process_is_left_as_it_is(tmp_path):
    leave(tmp_path / "0", "running")
    before = contents(tmp_path)
    with held(tmp_path / "0", RUN_DIR):
        assert "is being trained right now" in refusal(folder.keep_or_plan, tmp_path / "0", CONFIG)
    assert contents(tmp_path) == before | {"0/.lock": ""}


STOP = "callbacks.stop_at_target"


def limited(**options):
    """A configuration with a target."""
    stop = {"_target_": "batchscope.callbacks.target.StopAtTarget", "metric": "val/acc", "value": 0.9}
    return {**CONFIG, "callbacks": {"stop_at_target": {**stop, "seconds": None, "wall_seconds": None, **options}}}


BATCH_SIZE = "data.batch_size is 4 there and 8 here"
ROOT = "data.root is '/theirs' there and 'mine' here"
# The recorded configuration, the requested configuration → the difference.
CONFIGS = {
    "an option": (CONFIG, {**CONFIG, "data": {"batch_size": 8}}, BATCH_SIZE),
    "that it was resumed": (
        {**CONFIG, "resume": "s/0"},
        {**CONFIG, "resume": None},
        "",
    ),
    "which runs a search does": (
        {**CONFIG, "search": {"_target_": "x", "minutes": 1, "sizes": [4, 8]}},
        {**CONFIG, "search": {"_target_": "x", "minutes": 5, "sizes": [4, 8, 16]}},
        "",
    ),
    "how long a search lets a run go on": (
        limited(seconds=2.0, wall_seconds=9.0),
        limited(seconds=1.0, wall_seconds=90.0),
        "",
    ),
    "the target": (limited(value=0.9), limited(value=0.8), f"{STOP}.value is 0.9 there and 0.8 here"),
    "no configuration": (7, CONFIG, "cannot be compared"),
    "a path": ({"data": {"root": "/theirs"}}, {"data": {"root": "mine"}}, ROOT),
}


def test_a_run_whose_record_is_damaged_is_refused(tmp_path):
    (tmp_path / "0").mkdir()
    (tmp_path / "0/run.json").write_text('{"schema"')
    assert "run.json: cannot be read" in refusal(folder.keep_or_plan, tmp_path / "0", CONFIG)


def test_a_kept_run_is_reported_with_the_options_of_the_new_command(tmp_path):
    leave(tmp_path / "0", "finished", {**CONFIG, "timing": "auto", "enough": 0.9})
    config = {**CONFIG, "timing": True, "enough": 0.5}
    assert folder.keep_or_plan(tmp_path / "0", config) == read(tmp_path / "0")
    assert read(tmp_path / "0")["config"] == config


@pytest.mark.parametrize("name", CONFIGS)
def test_a_run_of_another_sweep_is_refused_with_the_option_that_differs(name, tmp_path):
    recorded, requested, difference = CONFIGS[name]
    leave(tmp_path / "0", "finished", recorded)
    before = contents(tmp_path)
    for look in (
        lambda: folder.keep_or_plan(tmp_path / "0", requested),
        lambda: folder.refuse_other_sweep(tmp_path, [requested]),
    ):
        if difference:
            assert f"holds a run of another sweep ({difference})" in refusal(look)
        else:
            look()
    assert {name: text for name, text in contents(tmp_path).items() if name != "0/.lock"} == before


def test_the_folder_of_a_search_is_no_other_sweeps(tmp_path):
    search = {**CONFIG, "search": {"_target_": "x"}}
    leave(tmp_path / "0/32", "finished", search)
    for look in (
        lambda: folder.keep_or_plan(tmp_path / "0", CONFIG),
        lambda: folder.refuse_other_sweep(tmp_path, [CONFIG]),
    ):
        assert refusal(look).endswith("0 holds the runs of a search; choose another folder")
    folder.refuse_other_sweep(tmp_path, [search])


def test_a_folder_is_held_by_one_sweep_at_a_time(tmp_path):
    with folder.lock_sweep_dir(tmp_path / "s"):
        assert "is being run in" in refusal(folder.lock_sweep_dir(tmp_path / "s").__enter__)
    with folder.lock_sweep_dir(tmp_path / "s"):
        pass


@pytest.mark.parametrize("name", [".lock", "0", "0/run.json", "0/checkpoints"])
def test_a_sweeps_folder_with_a_link_out_of_it_is_refused(name, tmp_path):
    link = tmp_path / "sweep" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=f"{name}: is a link that leads out of the sweep's folder"):
        folder.lock_sweep_dir(tmp_path / "sweep")
    assert not (tmp_path / "elsewhere").exists()
