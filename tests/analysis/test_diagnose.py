"""The table of a diagnosis: each change against two baselines, and one closing sentence that the numbers bear out."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchscope.analysis.diagnose import (
    AGAIN,
    BASELINE,
    CHANGE,
    TOGETHER,
    best_pair,
    find_findings,
    holds_one_diagnosis,
    write_diagnosis,
)
from batchscope.errors import UserError
from tests.support.fuzzing import budget, refused_or_fine
from tests.support.synthetic_runs import write_run

BATCH, PIPELINE, PRECISION = "data.batch_size=256", "data.pipeline=workers", "trainer.precision=bf16-mixed"


def leave(
    folder: Path, role: str, rate: float | None, *options: str, not_tried: list[str] | None = None, **facts: Any
) -> None:
    """A run of a diagnosis; `rate` in samples/s, None if it was refused."""
    name = "+".join(options) or role
    if rate is None:
        write_run(folder / name, status="failed", error="trainer.precision: no such hardware", **facts)
    else:
        throughput = facts.pop("throughput", {}) | {"samples_per_sec": rate, "memory_peak_gib": 0.5}
        write_run(folder / name, 64, 64e3 / rate, throughput=throughput, **facts)
    file = folder / name / "run.json"
    record = json.loads(file.read_text())
    record["diagnosis"] = {"role": role, "options": list(options)} | ({"not_tried": not_tried} if not_tried else {})
    file.write_text(json.dumps(record))


def diagnose(folder: Path, *changes: tuple[float | None, str], at_end: float | None = 1000.0) -> Any:
    leave(folder, BASELINE, 1000.0)
    for rate, option in changes:
        leave(folder, CHANGE, rate, option)
    if at_end is not None:
        leave(folder, AGAIN, at_end)
    return find_findings(folder)


def test_each_change_is_compared_with_the_mean_of_both_baselines(tmp_path: Path) -> None:
    found = diagnose(tmp_path, (2200.0, BATCH), (550.0, PIPELINE), at_end=1200.0)
    assert {trial.name: found.ratio(trial) for trial in found.trials} == {
        "baseline": pytest.approx(1000 / 1100),
        "baseline, at the end": pytest.approx(1200 / 1100),
        BATCH: pytest.approx(2.0),
        PIPELINE: pytest.approx(0.5),
    }


def test_the_closing_sentence_names_the_best_change(tmp_path: Path) -> None:
    found = diagnose(tmp_path, (2200.0, BATCH), (1500.0, PIPELINE))
    assert found.headline == f"Best: {BATCH}, 2.20 times the baseline."


def test_or_that_none_helps(tmp_path: Path) -> None:
    found = diagnose(tmp_path, (1040.0, BATCH), (900.0, PIPELINE))
    assert found.best is None
    assert found.headline == "No change helps: of 2 changes tried, none is clearly faster than the baseline."


def test_a_gain_that_a_drift_explains_is_none(tmp_path: Path) -> None:
    found = diagnose(tmp_path, (1300.0, BATCH), at_end=1200.0)
    assert found.best is None
    assert any("20 % faster at the end than at the beginning" in remark for remark in found.remarks)
    leave(tmp_path, CHANGE, 1450.0, PIPELINE)
    best = find_findings(tmp_path).best
    assert best is not None and best.options == (PIPELINE,)


@pytest.mark.parametrize("ended", ["not begun", "failed"])
def test_without_the_baseline_at_the_end_it_is_incomplete_and_recommends_nothing(tmp_path: Path, ended: str) -> None:
    diagnose(tmp_path, (2000.0, BATCH), (3000.0, PIPELINE), at_end=None)
    if ended == "failed":
        leave(tmp_path, AGAIN, None)
    found = find_findings(tmp_path)
    assert found.headline == (
        "Incomplete: 2 changes tried, and the baseline was not measured again after that, so no change is recommended."
    )
    assert found.best is None and not any(map(found.helps, found.trials))
    assert [trial.options for trial in best_pair(found)] == [(PIPELINE,), (BATCH,)]  # to be run before that baseline
    text = write_diagnosis(tmp_path, lambda trial: "python train.py")
    assert "2.00" in text and "train.py" not in text and "larger batch" not in text
    assert json.loads((tmp_path / "report/diagnosis.json").read_text())["complete"] is False


def test_a_refused_change_is_a_row_with_its_reason(tmp_path: Path) -> None:
    found = diagnose(tmp_path, (None, PRECISION), (1500.0, BATCH))
    refused = found.trials[-1]
    assert (refused.name, refused.rate) == (PRECISION, None)
    assert refused.why_not == "refused: trainer.precision: no such hardware"
    assert "refused: trainer.precision: no such hardware" in found.text(None)


def test_out_of_memory_is_no_refusal(tmp_path: Path) -> None:
    found = diagnose(tmp_path)
    write_run(tmp_path / "big", status="out_of_memory")
    record = json.loads((tmp_path / "big/run.json").read_text())
    (tmp_path / "big/run.json").write_text(json.dumps(record | {"diagnosis": {"role": CHANGE, "options": [BATCH]}}))
    found = find_findings(tmp_path)
    assert found.trials[-1].why_not == "out of memory"


def test_without_a_baseline_nothing_is_compared(tmp_path: Path) -> None:
    leave(tmp_path, BASELINE, None)
    found = find_findings(tmp_path)
    assert found.headline == "The baseline was not measured, so there is nothing to compare."


def test_of_a_baseline_alone_nothing_is_concluded(tmp_path: Path) -> None:
    assert diagnose(tmp_path).headline == "No change has been tried."


def test_the_two_best_changes_set_different_options(tmp_path: Path) -> None:
    found = diagnose(tmp_path, (2200.0, BATCH), (3000.0, "data.batch_size=512"), (1500.0, PIPELINE), (900.0, PRECISION))
    assert [trial.options for trial in best_pair(found)] == [("data.batch_size=512",), (PIPELINE,)]


def test_a_change_that_does_not_help_is_in_no_pair(tmp_path: Path) -> None:
    assert len(best_pair(diagnose(tmp_path, (2200.0, BATCH), (1010.0, PIPELINE)))) == 1


def test_both_together_are_named_where_they_are_less_than_one_alone(tmp_path: Path) -> None:
    diagnose(tmp_path, (2200.0, BATCH), (1500.0, PIPELINE))
    leave(tmp_path, TOGETHER, 2000.0, BATCH, PIPELINE)
    found = find_findings(tmp_path)
    assert found.headline == f"Best: {BATCH}, 2.20 times the baseline; {BATCH} {PIPELINE} together give 2.00 times."
    leave(tmp_path, TOGETHER, 3000.0, BATCH, PIPELINE)
    assert find_findings(tmp_path).headline == f"Best: {BATCH} {PIPELINE}, 3.00 times the baseline."


@pytest.mark.parametrize(
    ("recorded", "shown"),
    [
        ({"kind": "memory", "share": 0.61}, "memory 61 %"),
        ({"kind": "host", "share": 0.4, "certainty": "probable"}, "probably host 40 %"),
        ({"kind": "unclear", "share": 0.4, "certainty": "unclear"}, "unclear"),
        (None, ""),
    ],
)
def test_each_run_has_its_bottleneck(tmp_path: Path, recorded: dict[str, Any] | None, shown: str) -> None:
    leave(tmp_path, BASELINE, 1000.0, throughput={"bottleneck": recorded})
    assert find_findings(tmp_path).trials[0].bottleneck == shown


def test_the_table_has_the_rate_the_ratio_the_bottleneck_and_the_memory(tmp_path: Path) -> None:
    leave(tmp_path, BASELINE, 1000.0, throughput={"bottleneck": {"kind": "host", "share": 0.5}})
    leave(tmp_path, CHANGE, 2000.0, BATCH, throughput={"bottleneck": {"kind": "compute", "share": 0.7}})
    leave(tmp_path, AGAIN, 1000.0, not_tried=["not tried: trainer.precision=bf16-mixed: it is slower"])
    lines = find_findings(tmp_path).text("python train.py data.batch_size=256").splitlines()
    assert " ".join(lines[0].split()) == "run samples/s ÷ baseline median step ms bottleneck peak GiB"
    assert lines[3].split() == [BATCH, "2,000", "2.00", "32.0", "compute", "70", "%", "0.500"]
    assert lines[-2:] == [f"Best: {BATCH}, 2.00 times the baseline.", "python train.py data.batch_size=256"]
    assert "note: not tried: trainer.precision=bf16-mixed: it is slower" in lines


def test_the_files_hold_the_same(tmp_path: Path) -> None:
    diagnose(tmp_path, (2200.0, BATCH))
    text = write_diagnosis(tmp_path, lambda trial: f"python train.py {' '.join(trial.options)}")
    assert text.splitlines()[-1] == f"python train.py {BATCH}"
    written = json.loads((tmp_path / "report/diagnosis.json").read_text())
    assert written["command"] == f"python train.py {BATCH}"
    assert [row["role"] for row in written["rows"]] == [BASELINE, AGAIN, CHANGE]
    assert [row["helps"] for row in written["rows"]] == [False, False, True]
    assert f"    python train.py {BATCH}\n" in (tmp_path / "report/diagnosis.md").read_text()


def test_no_command_is_printed_where_nothing_helps(tmp_path: Path) -> None:
    diagnose(tmp_path, (900.0, BATCH))
    assert "train.py" not in write_diagnosis(tmp_path, lambda trial: "python train.py")
    assert "command" not in json.loads((tmp_path / "report/diagnosis.json").read_text())


def test_where_the_files_cannot_be_written_the_text_says_so(tmp_path: Path) -> None:
    diagnose(tmp_path, (900.0, BATCH))
    (tmp_path / "report").write_text("a file")
    text = write_diagnosis(tmp_path, lambda trial: "")
    assert text.startswith(f"note: {tmp_path}/report: cannot be ") and "No change helps" in text


def test_other_runs_are_no_diagnosis(tmp_path: Path) -> None:
    write_run(tmp_path / "0", 64, 1.0)
    with pytest.raises(UserError, match="holds no diagnosis"):
        find_findings(tmp_path)


def test_one_diagnosis_is_told_from_other_runs_and_from_several(tmp_path: Path) -> None:
    diagnose(tmp_path / "one", (2200.0, BATCH))
    assert holds_one_diagnosis(tmp_path / "one")
    diagnose(tmp_path / "two")
    assert not holds_one_diagnosis(tmp_path)
    write_run(tmp_path / "one" / "0", 64, 1.0)
    assert not holds_one_diagnosis(tmp_path / "one")


@pytest.mark.parametrize("damage", [5, "baseline", {"role": "magic"}, {"role": "change", "options": "x"}, {}])
def test_a_record_may_hold_anything(tmp_path: Path, damage: Any) -> None:
    diagnose(tmp_path, (2200.0, BATCH))
    record = json.loads((tmp_path / BATCH / "run.json").read_text())
    (tmp_path / BATCH / "run.json").write_text(json.dumps(record | {"diagnosis": damage}))
    assert "baseline" in find_findings(tmp_path).text(None)


HOSTILE = (
    math.nan,
    math.inf,
    -1,
    0,
    1e308,
    10**400,
    True,
    None,
    "",
    "x" * 5000,
    "\x1b]0;t\x07\n",
    "9" * 5000,
    [],
    {},
    [[]],
)


def places(node: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Every value in a record, as a dict and a key of it."""
    for key, value in node.items() if isinstance(node, dict) else ():
        yield node, key
        yield from places(value)


def test_hostile_values_are_plain_text_or_one_line(tmp_path: Path) -> None:
    diagnose(tmp_path, (2200.0, BATCH), (550.0, PIPELINE))
    files = sorted(tmp_path.rglob("run.json"))

    def report() -> None:
        text = write_diagnosis(tmp_path, lambda trial: "python train.py")
        assert all(character.isprintable() or character == "\n" for character in text)
        json.loads((tmp_path / "report/diagnosis.json").read_text())

    for dice in budget("diagnosis"):
        file = dice.choice(files)
        good = file.read_text()
        record = json.loads(good)
        node, key = dice.choice(list(places(record)))
        node[key] = dice.choice(HOSTILE)
        file.write_text(json.dumps(record))
        refused_or_fine(report, (file.parent.name, key, node[key]))
        file.write_text(good)


def test_a_record_that_is_a_link_to_itself_is_left_out(tmp_path: Path) -> None:
    diagnose(tmp_path, (2200.0, BATCH))
    (tmp_path / BATCH / "run.json").unlink()
    (tmp_path / BATCH / "run.json").symlink_to("run.json")
    assert find_findings(tmp_path).headline == "No change has been tried."
