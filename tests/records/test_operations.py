"""The operations of a step: what was written is read, and a file from a stranger is answered in one line."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from batchscope.errors import UserError
from batchscope.files import WriteError
from batchscope.records.operations import FILE, OperationRow, StepOperations, read_operations, to_json, write_operations

ROWS = [
    OperationRow("aten.addmm", "model.head", "forward", "fp32", (64, 10, 128), 1, 163840, 40_000, 512, seconds=1.25e-5),
    OperationRow("aten.relu", "", "forward", "fp32", (64, 128), 2, 0, 131_072, seconds=3e-6),
    OperationRow("aten._fused_adamw_", "", "optimizer", "fp32", (4, 1_290), calls=1, bytes=36_120),
]


def step(**values: Any) -> StepOperations:
    known = {"batch_size": 64, "batches": 1.0, "device": "cpu", "device_name": "AMD EPYC", "precision": "32-true"}
    return StepOperations(**{**known, "rows": ROWS, "threads": 2, "calibration": {"launch_us": 1.2}, **values})


def test_what_was_written_is_read(tmp_path: Path) -> None:
    write_operations(tmp_path, step())
    assert read_operations(tmp_path) == step()


def test_numbers_keep_five_digits(tmp_path: Path) -> None:
    write_operations(tmp_path, step(rows=[OperationRow("a", "", "forward", "fp32", (), seconds=1.23456789e-4)]))
    assert read_operations(tmp_path).rows[0].seconds == 1.2346e-4


def test_a_run_without_operations_has_none(tmp_path: Path) -> None:
    assert read_operations(tmp_path) is None
    assert read_operations(tmp_path / "missing") is None


def test_five_hundred_rows_take_less_than_a_hundred_kilobytes() -> None:
    """As many as a ResNet-50 has, with its paths."""
    rows = [
        OperationRow(
            "aten.convolution_backward",
            f"model.network.layer{at // 100}.{at}.downsample.{at % 7}",
            "backward",
            "fp32",
            (512, 2048, 112, 112, 1024, 3, 3),
            *(1, 123_456_789_012 + at, 1_234_567_890 + at, 1_234_567_890 + at, 1.2345e-3),
        )
        for at in range(500)
    ]
    assert len(to_json(step(rows=rows))) < 100_000


def test_a_file_that_cannot_be_written_is_an_error_of_the_file(tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir()
    with pytest.raises(WriteError, match=f"{FILE} cannot be written"):
        write_operations(tmp_path, step())


def damaged(change: Any) -> str:
    found = json.loads(to_json(step()))
    change(found)
    return json.dumps(found)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        ("[1, 2]", "must be integers"),
        ("null", "not subscriptable"),
        ("{}", "has no schema"),
        (to_json(step())[:300], "delimiter|Unterminated|Expecting"),
        ("[" * 100_000, "recursion"),
        (damaged(lambda found: found.update(schema=1)), "its schema is '1', and this version reads 2"),
        (damaged(lambda found: found.pop("rows")), "it has no rows"),
        (damaged(lambda found: found.pop("batch_size")), "it has no batch_size"),
        (damaged(lambda found: found.update(batch_size=0)), "batch_size cannot be '0'"),
        (damaged(lambda found: found.update(batch_size=True)), "batch_size cannot be 'True'"),
        (damaged(lambda found: found.update(batches=float("nan"))), "batches cannot be 'nan'"),
        (damaged(lambda found: found.update(batches=0)), "it has no batches"),
        (damaged(lambda found: found.update(device=None)), "device cannot be 'None'"),
        (damaged(lambda found: found.update(columns=["name"])), "its columns are others"),
        (damaged(lambda found: found.update(calibration=[])), r"calibration cannot be '\[\]'"),
        (damaged(lambda found: found["rows"][0].pop()), "shorter"),
        (damaged(lambda found: found["rows"].append("row")), "shorter"),
        (damaged(lambda found: found["rows"][0].__setitem__(0, 99)), "name cannot be '99'"),
        (damaged(lambda found: found["rows"][0].__setitem__(4, [-1])), r"dims cannot be '\[-1\]'"),
        (damaged(lambda found: found["rows"][0].__setitem__(6, -5)), "flops cannot be '-5'"),
        (damaged(lambda found: found["rows"][0].__setitem__(6, "5")), "flops cannot be '5'"),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(UserError, match=f"{FILE}: cannot be read: .*({reason})") as caught:
        read_operations(tmp_path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FILE)
    with pytest.raises(UserError, match="it is not a file"):
        read_operations(tmp_path)
