"""The step times of a run: what was written is read, and a file from a stranger is answered in one line."""

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

from batchscope.errors import UserError
from batchscope.files import WriteError
from batchscope.records.step_parts import PARTS
from batchscope.records.step_times import FILE, StepTimes, read_step_times, thinned, write_step_times


def times(steps: int = 10, starts: tuple[int, ...] = (0, 4, 4), **columns: Any) -> StepTimes:
    """Steps of 1, 2, … ms in windows that begin at these steps."""
    step_s = numpy.arange(1, steps + 1, dtype=numpy.float32) / 1e3
    parts, every = thinned(numpy.outer(step_s, numpy.full(len(PARTS), 1 / len(PARTS))))
    unknown = numpy.full(len(starts), numpy.nan)
    names = ("start_unix", "others_share")
    facts: dict[str, Any] = dict.fromkeys(names, unknown) | {"disturbed": numpy.zeros(len(starts))}
    facts |= {"window": numpy.array(starts), "pass_": numpy.full(len(starts), -1)}
    return StepTimes(**{"step_s": step_s, "parts_s": parts, "parts_every": every, **facts, **columns})


def test_what_was_written_is_read(tmp_path: Path) -> None:
    written = times(others_share=numpy.array([0.25, numpy.nan, 0.5]), pass_=numpy.array([3, -1, 4]))
    write_step_times(tmp_path, written)
    found = read_step_times(tmp_path)
    assert found is not None
    for name in vars(written):
        numpy.testing.assert_array_equal(getattr(found, name), getattr(written, name))
    assert (found.step_s.dtype, found.parts_s.dtype, found.pass_.dtype) == ("float32", "float32", "int64")


def test_each_window_has_its_steps_and_its_median() -> None:
    found = times()
    assert [len(steps) for steps in found.of_windows()] == [4, 0, 6]
    assert found.medians() == pytest.approx([0.0025, numpy.nan, 0.0075], nan_ok=True)


def test_a_run_without_step_times_has_none(tmp_path: Path) -> None:
    assert read_step_times(tmp_path) is None
    assert read_step_times(tmp_path / "missing") is None


def test_a_hundred_thousand_steps_take_less_than_a_megabyte(tmp_path: Path) -> None:
    random = numpy.random.default_rng(0)
    parts, every = thinned(random.lognormal(-8, 1, (100_000, len(PARTS))))
    columns = {"step_s": random.lognormal(-6, 0.3, 100_000), "parts_s": parts, "parts_every": every}
    write_step_times(tmp_path, times(starts=tuple(range(0, 100_000, 250)), **columns))
    assert (len(parts), every) == (20_000, 5)
    assert (tmp_path / FILE).stat().st_size < 1e6


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_step_times(tmp_path, times())

    def refuse(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(WriteError, match=r"steps\.npz cannot be written: the disk is full"):
        write_step_times(tmp_path, times(20))
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def as_file(path: Path, **changed: Any) -> None:
    columns = {**vars(times()), **changed}
    numpy.savez_compressed(path, **{name: value for name, value in columns.items() if value is not None})


def huge(path: Path) -> None:
    """A file that promises 8 TB."""
    as_file(path, others_share=None)
    header = io.BytesIO()
    numpy.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (10**12,)})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("others_share.npy", header.getvalue())


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("evil",)


def pickled(path: Path) -> None:
    as_file(path, others_share=None)
    header = io.BytesIO()
    numpy.lib.format.write_array_header_1_0(header, {"descr": "|O", "fortran_order": False, "shape": (1,)})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("others_share.npy", header.getvalue() + pickle.dumps([Evil()]))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        pytest.param(lambda path: path.write_bytes(b"no archive"), "not a zip file", id="another file"),
        pytest.param(lambda path: path.write_bytes(b""), "not a zip file", id="empty"),
        pytest.param(lambda path: path.mkdir(), "it is not a file", id="a folder"),
        pytest.param(lambda path: os.mkfifo(path), "it is not a file", id="a pipe"),
        pytest.param(lambda path: path.symlink_to(path), "it is not a file", id="a link to itself"),
        pytest.param(
            lambda path: as_file(path, pass_=None), "pass_ is not a file in the archive", id="a column is missing"
        ),
        pytest.param(lambda path: as_file(path, step_s=numpy.ones(10)), "step_s has another type", id="another type"),
        pytest.param(lambda path: as_file(path, pass_=numpy.array(3)), "different lengths", id="a scalar"),
        pytest.param(lambda path: as_file(path, others_share=numpy.ones(2)), "different lengths", id="another length"),
        pytest.param(lambda path: as_file(path, window=numpy.array([0, 5, 4])), "not in order", id="order"),
        pytest.param(lambda path: as_file(path, window=numpy.array([0, 5, 40])), "not in order", id="beyond the steps"),
        pytest.param(lambda path: as_file(path, window=numpy.array([-9, 0, 0])), "not in order", id="negative"),
        pytest.param(lambda path: as_file(path, parts_every=0), "other shapes", id="every 0th step"),
        pytest.param(huge, "", id="8 TB"),
        pytest.param(pickled, "allow_pickle=False", id="a pickle"),
    ],
)
def test_a_file_that_is_none_is_answered_in_one_line(
    make: Callable[[Path], object], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path / FILE)
    with pytest.raises(UserError, match=rf"steps\.npz: cannot be read: .*{reason}") as raised:
        read_step_times(tmp_path)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "evil").exists()


def test_a_torn_file_is_answered_in_one_line_wherever_it_was_cut(tmp_path: Path) -> None:
    write_step_times(tmp_path, times())
    whole = (tmp_path / FILE).read_bytes()
    for length in range(0, len(whole), 97):
        (tmp_path / FILE).write_bytes(whole[:length])
        with pytest.raises(UserError, match="cannot be read"):
            read_step_times(tmp_path)
    for at in range(0, len(whole), 53):  # a changed byte is refused, or is in no column
        (tmp_path / FILE).write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        try:
            read_step_times(tmp_path)
        except UserError as error:
            assert "\n" not in str(error)
