"""The files beside a record are read back as written; an invalid or hostile file is one line."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import Mock

import numpy
import pytest

from batchscope.callbacks.step_file import read_rows, write_rows
from batchscope.errors import UserError
from batchscope.files import WriteError
from batchscope.records.correct import read_correct, write_correct
from batchscope.records.operations import SCHEMA, OperationRow, StepOperations, read_operations, write_operations
from batchscope.records.step_times import read_step_times
from tests.support.synthetic_runs import write_steps

ROWS = [
    OperationRow("aten.addmm", "model.head", "forward", "fp32", (64, 10, 128), 1, 163840, 40_000, 512, seconds=1.25e-5),
    OperationRow("aten._fused_adamw_", "", "optimizer", "fp32", (4, 1_290), calls=2, bytes=36_120),
]


def step(rows=ROWS):
    return StepOperations(64, 1.0, "cpu", "AMD EPYC", "32-true", rows, threads=2, calibration={"launch_us": 1.2})


def test_step_times_are_read_and_further_columns_of_an_older_file_are_not(tmp_path):
    write_steps(tmp_path, [[1, 2, 3, 4], [], [5, 6, 7, 8, 9, 10]], rounds=(3, -1, 4), others=0.25)
    older = {**numpy.load(tmp_path / "steps.npz"), "parts_s": numpy.ones((10, 6), "f4"), "parts_every": 1}
    numpy.savez_compressed(tmp_path / "steps.npz", **older)
    step_times = read_step_times(tmp_path)
    assert step_times.step_s == pytest.approx(numpy.arange(1, 11) / 1e3)
    assert (list(step_times.pass_), list(step_times.others_share)) == ([3, -1, 4], [0.25] * 3)
    assert (step_times.step_s.dtype, step_times.pass_.dtype) == ("float32", "int64")
    assert list(step_times.window) == [0, 4, 4]
    assert step_times.means() == pytest.approx([0.0025, numpy.nan, 0.0075], nan_ok=True)


def test_operations_are_read(tmp_path):
    write_operations(tmp_path, step())
    assert read_operations(tmp_path) == step()


def test_a_number_of_an_operation_that_is_not_finite_is_zero(tmp_path):
    write_operations(tmp_path, step([replace(ROWS[0], flops=float("inf"), seconds=float("nan"))]))
    assert read_operations(tmp_path) == step([replace(ROWS[0], flops=0.0, seconds=0.0)])


def test_of_each_test_sample_a_bit_is_read_that_says_whether_it_was_right(tmp_path):
    right = numpy.arange(13) % 3 == 0
    write_correct(tmp_path, right)
    assert read_correct(tmp_path, 13, 5 / 13).tolist() == right.tolist()
    assert (tmp_path / "correct.npy").stat().st_size < 200


def test_the_rows_of_the_step_file_are_read_without_a_torn_one(tmp_path):
    names, rows = ["step", "train/loss"], [{"step": "1", "train/loss": "0.5"}, {"step": "2", "train/loss": ""}]
    write_rows(tmp_path / "metrics.csv", names, rows)
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("3")
    assert read_rows(tmp_path / "metrics.csv") == (names, rows)


def test_what_a_run_did_not_leave_is_none(tmp_path):
    assert read_step_times(tmp_path) is read_operations(tmp_path / "missing") is read_correct(tmp_path, 9, 0.5) is None
    os.mkfifo(tmp_path / "pipe")
    assert read_rows(tmp_path / "metrics.csv") == read_rows(tmp_path / "pipe") == ([], [])


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    write_steps(tmp_path, [[1.0]])
    write_operations(tmp_path, step())
    write_correct(tmp_path, numpy.ones(9, bool))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr("os.replace", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(WriteError, match=r"steps\.npz cannot be written: the disk is full"):
        write_steps(tmp_path, [[2.0]])
    with pytest.raises(WriteError, match=r"operations\.json cannot be written: the disk is full"):
        write_operations(tmp_path, step([]))
    with pytest.raises(WriteError, match=r"correct\.npy cannot be written: the disk is full"):
        write_correct(tmp_path, numpy.zeros(9, bool))
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def columns(**changed):
    """Make a function that writes step times with some columns changed, or left out (None)."""

    def make(path):
        write_steps(path.parent, [[1.0] * 4, [], [2.0] * 6])
        arrays = {**numpy.load(path), **changed}
        numpy.savez_compressed(path, **{name: value for name, value in arrays.items() if value is not None})

    return make


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


def text(content):
    return lambda path: path.write_text(content)


def operations(**changed):
    """Make a function that writes operations with some fields changed, or left out (`...`)."""
    fields = {"schema": SCHEMA, **asdict(step()), **changed}
    return text(json.dumps({name: value for name, value in fields.items() if value is not ...}))


TIMES = {
    "not a zip file": [text("no archive"), text("")],
    "it is not a file": [Path.mkdir, os.mkfifo, lambda path: path.symlink_to(path)],
    "it is too large": [lambda path: (path.touch(), os.truncate(path, 2**28 + 1))],
    "pass_ is not a file in the archive": [columns(pass_=None)],
    "step_s has another type": [columns(step_s=numpy.ones(10))],
    "different lengths": [columns(pass_=numpy.array(3)), columns(others_share=numpy.ones(2))],
    "not in order": [columns(window=numpy.array(at)) for at in ([0, 5, 4], [0, 5, 40], [-9, 0, 0])],
    "other shapes": [columns(step_s=numpy.ones((10, 1), "f4"))],
    "allow_pickle=False": [columns(others_share=numpy.array([Evil()] * 3))],
}
OPERATIONS = {
    "Expecting value": [text("")],
    "must be integers": [text("[1, 2]")],
    "not subscriptable": [text("null")],
    "it is not a file": [os.mkfifo],
    "its schema is '1', and this version reads 3": [operations(schema=1)],
    "rows: got null": [operations(rows=...)],
    "batch_size: got 0, takes a whole number of at least 1": [operations(batch_size=0)],
    "batch_size: got True": [operations(batch_size=True)],
    "batches: got nan": [operations(batches=float("nan"))],
    "batches: got (0|1e-300), takes a number from 0.001": [operations(batches=0), operations(batches=1e-300)],
    "device: got null, takes a text": [operations(device=None)],
    r"calibration: got \[\]": [operations(calibration=[])],
    "module: got null": [operations(rows=[{"name": "aten.mm"}])],
    "no attribute 'get'": [operations(rows=[["aten.mm"]])],
    r"dims: got \[-1\], takes a list": [operations(rows=[asdict(ROWS[0]) | {"dims": [-1]}])],
    "flops: got -5": [operations(rows=[asdict(ROWS[0]) | {"flops": -5}])],
}


def saved(array):
    return lambda path: numpy.save(path, array, allow_pickle=True)


def longer(path):
    """Write an array whose header states more elements than the file has."""
    numpy.save(path, numpy.zeros(2, numpy.uint8))
    path.write_bytes(path.read_bytes().replace(b"(2,), }", b"(9000,), }").replace(b"   \n", b"\n", 1))


CORRECT = {
    "magic string": [text("no array"), text("")],
    "it is not a file": [os.mkfifo],
    "mmap length is greater than file size": [longer],
    "can't be memory-mapped": [saved(numpy.array([Evil()]))],
    "it is not of the test": [saved(numpy.zeros(2)), saved(numpy.zeros(3, numpy.uint8)), saved(numpy.uint8(3))],
    "it has another accuracy": [saved(numpy.array([255, 0], numpy.uint8))],
}
KINDS = [(lambda folder: read_correct(folder, 13, 5 / 13), "correct.npy", CORRECT)]
KINDS += [(read_step_times, "steps.npz", TIMES), (read_operations, "operations.json", OPERATIONS)]


@pytest.mark.parametrize(
    ("read", "name", "reason", "make"),
    [(read, name, reason, make) for read, name, cases in KINDS for reason, makes in cases.items() for make in makes],
)
def test_a_file_that_is_none_is_one_line(read, name, reason, make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / name)
    with pytest.raises(UserError, match=f"{name}: cannot be read: .*({reason})") as caught:
        read(tmp_path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert not (tmp_path / "evil").exists()
