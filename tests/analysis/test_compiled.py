"""What a sweep over `compile` says."""

from pathlib import Path
from typing import Any

from batchscope.analysis.compiled import gains
from batchscope.analysis.read import find
from tests.support.synthetic_runs import write_run


def lines(folder: Path) -> list[str]:
    found = find([folder])
    return gains(found.runs, found.varied)


def write(folder: Path, size: int, ms: float, mode: Any, seconds: float | None = None) -> None:
    import json

    write_run(folder, size, ms)
    record = json.loads((folder / "run.json").read_text())
    record["config"]["compile"] = mode
    record |= {"compilation": {"seconds": seconds}} if seconds else {}
    (folder / "run.json").write_text(json.dumps(record))


def test_a_gain_says_after_how_many_steps_it_pays_off(tmp_path: Path) -> None:
    write(tmp_path / "0", 64, 10.0, False)
    write(tmp_path / "1", 64, 8.0, True, seconds=20)
    write(tmp_path / "2", 64, 10.1, "max-autotune", seconds=60)
    assert lines(tmp_path) == [
        "cnn at batch size 64: compile=true is 1.25× faster; compiling took 20 s, as long as 10,000 shorter steps save.",
        "cnn at batch size 64: compile=max-autotune changes the rate by less than 2 %; compiling took 60 s.",
    ]


def test_a_loss_is_said_for_each_batch_size(tmp_path: Path) -> None:
    for number, size in enumerate((64, 128)):
        write(tmp_path / f"{2 * number}", size, 10.0, False)
        write(tmp_path / f"{2 * number + 1}", size, 20.0, True, seconds=20)
    assert lines(tmp_path) == [
        f"cnn at batch size {size}: compile=true is 2.00× slower; compiling took 20 s." for size in (64, 128)
    ]


def test_without_an_uncompiled_run_nothing_is_compared(tmp_path: Path) -> None:
    write(tmp_path / "0", 64, 10.0, "default", seconds=20)
    write(tmp_path / "1", 64, 8.0, "max-autotune", seconds=20)
    assert lines(tmp_path) == []
