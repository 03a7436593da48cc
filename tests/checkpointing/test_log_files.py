"""A resumed run has every step in its logs once."""

from pathlib import Path

import pytest

from tests.checkpointing.support import OUT, STEP, refuses, terminate
from tests.support.runs import EVERY_4, SMALL, assert_alike, curves, kill_9, results, run, table


@pytest.mark.slow
def test_curves_are_kept_while_their_logger_is_off(unstopped: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(tmp_path, *SMALL, OUT, faults=[(STEP, 7, terminate)]).end() == 143
    assert run(tmp_path, "resume=out", "logger=null", faults=[(STEP, 6, terminate)]).end() == 143
    done = run(tmp_path, "resume=out", "logger=default")
    assert (done.end(), done.complained) == (0, "")
    logged = [*range(1, 8), *range(14, 21)]
    assert [step for step, _ in curves(out)["train/loss"]] == logged
    assert curves(out)["train/loss"] == [point for point in curves(unstopped)["train/loss"] if point[0] in logged]
    assert [int(row["step"]) for row in table(out) if row["train/loss"]] == logged
    assert not list(out.rglob("*.aside*"))


def test_curves_that_no_checkpoint_knows_are_set_aside(unstopped: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(tmp_path, *SMALL, EVERY_4, OUT, faults=[(STEP, 3, kill_9)]).end() == -9
    (before,) = out.glob("*/events.*")
    (out / "csv").mkdir(exist_ok=True)
    (out / "csv" / "metrics.csv").write_text("step,train/loss\n1,0.5\n")
    content = before.read_bytes()
    done = run(tmp_path, "resume=out")
    assert done.end() == 0
    (aside,) = out.glob("*/events.*.aside")
    assert aside.read_bytes() == content
    assert (out / "csv" / "metrics.csv.aside").read_text() == "step,train/loss\n1,0.5\n"
    assert sorted(line.partition("; it is now ")[2] for line in done.complained.splitlines()) == [
        "out/csv/metrics.csv.aside",
        str(aside.relative_to(tmp_path)),
    ]
    assert_alike(results(out), results(unstopped))


@pytest.mark.parametrize("damaged", ["csv", "csv/metrics.csv", "*", pytest.param("*/events.*", marks=pytest.mark.slow)])
def test_a_damaged_place_of_the_curves_is_refused_before_the_record_says_so(damaged: str, killed: Path) -> None:
    place = next(path for path in (killed / "out").glob(damaged) if damaged != "*" or list(path.glob("events.*")))
    was_folder = place.is_dir()
    place.rename(killed / "before")
    if was_folder:
        place.write_text("")
    else:
        place.mkdir()
    refuses(killed, f"{place.relative_to(killed)} is not a {'folder' if was_folder else 'file'}, and logs are written")
