"""A record is read whatever is in its file, and a folder that holds a run is not used for another."""

import json
import os
from pathlib import Path

import pytest

from batchscope.errors import UserError
from batchscope.records.read import SCHEMA, read, refuse_used
from batchscope.records.run_record import RunRecord


@pytest.mark.parametrize("left", ["finished", "torn", "a checkpoint alone"])
def test_a_new_run_takes_no_folder_that_holds_one(left: str, tmp_path: Path) -> None:
    if left == "finished":
        with RunRecord(tmp_path) as record:
            record.begin()
    elif left == "torn":
        (tmp_path / "run.json").write_text("")
    else:
        (tmp_path / "checkpoints").mkdir()
        (tmp_path / "checkpoints" / "last.ckpt").write_text("weights")
    with pytest.raises(UserError, match="already holds a run"):
        refuse_used(tmp_path)


def test_a_pipe_in_place_of_the_record_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.json")
    with pytest.raises(UserError, match="cannot be read: it is not a file"):
        read(tmp_path)


@pytest.mark.parametrize("schema", [SCHEMA - 1, SCHEMA + 1, None, [1], "3\n"])
def test_a_record_of_another_schema_is_refused_in_one_line(schema: object, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"schema": schema, "status": "planned"}))
    with pytest.raises(UserError, match=f"is of another version: its schema is .*, and this one reads {SCHEMA}$"):
        read(tmp_path)
    with pytest.raises(UserError, match="already holds a run"):
        refuse_used(tmp_path)
