"""Which runs are found below some folders, and what is said of those that cannot be read."""

import pytest

from batchscope.analysis.read import find
from batchscope.errors import UserError
from tests.support.synthetic_runs import serial, write_run, write_sweep

T = serial(4, 0.1)


def test_runs_come_in_the_order_of_their_numbers(tmp_path):
    write_sweep(tmp_path, list(range(1, 13)), T)
    assert [run.name for run in find([tmp_path]).runs] == [str(n) for n in range(12)]


def test_a_run_found_through_two_folders_counts_once(tmp_path):
    write_sweep(tmp_path, [32, 64], T)
    assert len(find([tmp_path, tmp_path / "1"]).runs) == 2


def test_runs_of_several_sweeps_are_told_apart_by_name(tmp_path):
    write_sweep(tmp_path / "a", [32], T)
    write_sweep(tmp_path / "b", [64], T)
    assert [run.name for run in find([tmp_path / "a", tmp_path / "b"]).runs] == ["a/0", "b/0"]


@pytest.mark.parametrize(
    ("content", "note"),
    [
        ('{"schema": 1, "status": "runn', "cannot be read"),
        ("[]", "it is not the record of a run"),
        ('{"schema": 2}', "is of another version: its schema is 2, and this one reads 3"),
        ('{"schema": "3\\n3"}', r"is of another version: its schema is '3\n3', and this one reads 3"),
        ("{}", "left out: it has no config"),
        (b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_a_broken_record_is_a_note_and_the_rest_is_read(tmp_path, content, note):
    write_sweep(tmp_path, [32, 64], T)
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "run.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    sweep = find([tmp_path])
    assert len(sweep.runs) == 2
    assert len(sweep.notes) == 1
    assert sweep.notes[0].startswith("2: ")
    assert note in sweep.notes[0]


def test_what_a_launcher_keeps_in_a_hidden_folder_is_no_run(tmp_path):
    write_run(tmp_path / "0")
    (tmp_path / ".submitit" / "1234").mkdir(parents=True)
    assert find([tmp_path]).notes == []


def test_nothing_at_all_is_the_users_mistake(tmp_path):
    with pytest.raises(UserError, match="no runs in"):
        find([tmp_path])
    with pytest.raises(UserError, match="no such folder"):
        find([tmp_path / "missing"])
