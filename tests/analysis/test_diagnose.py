"""The table of a diagnosis: each change against two baselines, and one closing sentence that the numbers bear out."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
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
from batchscope.records.step_times import read_step_times, write_step_times
from tests.support.fuzzing import HOSTILE, budget, refused_or_fine
from tests.support.synthetic_runs import change_record, write_run, write_steps

BATCH, LARGER = "data.batch_size=256", "data.batch_size=512"
PIPELINE, PRECISION = "data.pipeline=workers", "trainer.precision=bf16-mixed"


def leave(
    folder: Path, role: str, rate: float | None, *options: str, not_tried: list[str] | None = None, **facts: Any
) -> None:
    """A run of a diagnosis with little noise; `rate` in samples/s, None if it was refused."""
    name = "+".join(options) or role
    if rate is None:
        write_run(folder / name, status="failed", error="trainer.precision: no such hardware", **facts)
    else:
        throughput = facts.pop("throughput", {}) | {"samples_per_sec": rate, "memory_peak_gib": 0.5}
        size = max([64, *(int(word.partition("=")[2]) for word in options if "batch_size" in word)])
        write_run(folder / name, size, 1e3 * size / rate, throughput=throughput, **facts)
        noise = np.exp(0.01 * np.random.default_rng(0).standard_normal((8, 10)))
        write_steps(folder / name, 1e3 * size / rate * noise)
    known = {"role": role, "options": list(options)} | ({"not_tried": not_tried} if not_tried else {})
    change_record(folder / name, diagnosis=known)


def diagnose(folder: Path, *changes: tuple[float | None, str], at_end: float | None = 1000.0) -> Any:
    leave(folder, BASELINE, 1000.0)
    for rate, option in changes:
        leave(folder, CHANGE, rate, option)
    if at_end is not None:
        leave(folder, AGAIN, at_end)
    return find_findings(folder)


def ratios(found: Any) -> dict[str, float]:
    return {trial.name: ratio.value for trial in found.trials if (ratio := found.ratio(trial))}


def test_each_change_is_compared_with_the_mean_of_both_baselines(tmp_path: Path) -> None:
    found = diagnose(tmp_path, (2200.0, BATCH), (550.0, PIPELINE), at_end=1210.0)
    assert ratios(found) == {BATCH: pytest.approx(2.0), PIPELINE: pytest.approx(0.5)}
    assert "note: ÷ baseline divides by the mean of both baselines" in found.text(None)


RECOMMENDED = rf"Recommended: {BATCH}, 2.20 times \(1.\d+ to 2.\d+\) the baseline's rate.$"


@pytest.mark.parametrize(
    ("changes", "at_end", "best", "said"),
    [
        ([(2200.0, BATCH), (1500.0, PIPELINE)], 1000.0, BATCH, RECOMMENDED),
        ([(1005.0, BATCH), (900.0, PIPELINE)], 1000.0, None, "No change helps: of 2 changes tried, none is shown"),
        ([], 1000.0, None, "No change has been tried."),
        ([(1300.0, BATCH)], 1010.0, BATCH, "Recommended: "),  # what the baselines differ by decides
        ([(1300.0, BATCH)], 1200.0, None, "No change helps: "),
        (
            [(2200.0, BATCH), (2210.0, LARGER)],
            1003.0,
            BATCH,
            "Recommended: ",
        ),  # of equal ones the one that changes less
        ([(2200.0, BATCH), (4000.0, LARGER)], 1003.0, LARGER, "Recommended: "),
    ],
)
def test_the_first_sentence_names_the_change_to_make_or_why_there_is_none(
    tmp_path: Path, changes: list[Any], at_end: float, best: str | None, said: str
) -> None:
    found = diagnose(tmp_path, *changes, at_end=at_end)
    assert (found.best and found.best.name) == best
    assert re.match(said, found.headline)
    assert any("1.20 times as fast as at the beginning" in remark for remark in found.remarks) == (at_end == 1200)
    text = write_diagnosis(tmp_path)
    line = f"batchscope train … {best}"
    assert (line in text.splitlines()) if best else "batchscope train" not in text
    assert text in (tmp_path / "report/diagnosis.md").read_text()


def test_one_option_is_less_than_a_larger_batch_and_than_both_together(tmp_path: Path) -> None:
    diagnose(tmp_path, (2200.0, LARGER), (2198.0, PRECISION), at_end=1003.0)
    leave(tmp_path, TOGETHER, 2202.0, LARGER, PRECISION)
    assert find_findings(tmp_path).best.options == (PRECISION,)


@pytest.mark.parametrize("how", ["busy", "no single steps", "no baseline"])
def test_what_is_not_known_is_not_recommended(tmp_path: Path, how: str) -> None:
    diagnose(tmp_path, (2200.0, BATCH), (3000.0, PIPELINE))
    for file in tmp_path.rglob("steps.npz"):
        if how == "busy":
            times, taken = read_step_times(file.parent), np.full(8, 0.4)
            write_step_times(file.parent, replace(times, others_share=taken, disturbed=taken > 0.1))
        elif how == "no single steps":
            file.unlink()
    if how == "no baseline":
        for role in (BASELINE, AGAIN):
            leave(tmp_path, role, None)
    found = find_findings(tmp_path)
    assert (found.best, best_pair(found)) == (None, [])
    said = {"busy": "The machine was busy: other programs took 40 % of the processor. No change is ", "no single steps":
            "No change helps", "no baseline": "The baseline was not measured, so there is nothing to compare."}  # fmt: skip
    assert found.headline.startswith(said[how])


@pytest.mark.parametrize("ended", ["not begun", "failed"])
def test_without_the_baseline_at_the_end_it_is_incomplete_and_recommends_nothing(tmp_path: Path, ended: str) -> None:
    diagnose(tmp_path, (2000.0, BATCH), (3000.0, PIPELINE), at_end=None)
    if ended == "failed":
        leave(tmp_path, AGAIN, None)
    found = find_findings(tmp_path)
    assert found.headline == (
        "Incomplete: 2 changes tried, and the baseline was not measured again after that, so no change is recommended."
    )
    assert found.best is None
    assert [trial.options for trial in best_pair(found)] == [(PIPELINE,), (BATCH,)]  # to be run before that baseline
    text = write_diagnosis(tmp_path)
    assert "2.00" in text and "3.00" in text and "batchscope train" not in text and "larger batch" not in text


def test_a_refused_change_is_a_row_with_its_reason(tmp_path: Path) -> None:
    diagnose(tmp_path, (None, PRECISION), (1500.0, BATCH))
    write_run(tmp_path / "big", status="out_of_memory")
    change_record(tmp_path / "big", diagnosis={"role": CHANGE, "options": [PIPELINE]})
    found = find_findings(tmp_path)
    refused = "refused: trainer.precision: no such hardware"
    assert {(trial.name, trial.rate, trial.why_not) for trial in found.trials[-2:]} == {
        (PRECISION, 0, refused), (PIPELINE, 0, "out of memory"),
    }  # fmt: skip
    assert f"note: {PRECISION}: {refused}" in " ".join(found.text(None).split())


def test_the_two_best_changes_help_and_set_different_options(tmp_path: Path) -> None:
    found = diagnose(tmp_path, (2200.0, BATCH), (3000.0, "data.batch_size=512"), (1500.0, PIPELINE), (900.0, PRECISION))
    assert [trial.options for trial in best_pair(found)] == [("data.batch_size=512",), (PIPELINE,)]
    assert len(best_pair(diagnose(tmp_path / "one", (2200.0, BATCH), (1010.0, PIPELINE)))) == 1


def test_both_together_are_recommended_where_they_are_faster_than_one_alone(tmp_path: Path) -> None:
    diagnose(tmp_path, (2200.0, BATCH), (1500.0, PIPELINE))
    leave(tmp_path, TOGETHER, 3000.0, BATCH, PIPELINE)
    assert find_findings(tmp_path).headline.startswith(f"Recommended: {BATCH} {PIPELINE}, 3.00 times (")


@pytest.mark.parametrize(
    ("recorded", "shown"),
    [
        ({"kind": "memory", "share": 0.61}, "memory"),
        ({"kind": "host", "share": 0.4, "certainty": "probable"}, "probably host"),
        ({"kind": "unclear", "share": 0.4, "certainty": "unclear"}, "unclear"),
        (None, ""),
    ],
)
def test_each_run_has_its_own_bottleneck(tmp_path: Path, recorded: dict[str, Any] | None, shown: str) -> None:
    leave(tmp_path, BASELINE, 1000.0, throughput={"bottleneck": recorded})
    assert find_findings(tmp_path).trials[0].kind == shown


def test_the_table_has_the_rate_the_ratio_its_interval_and_the_bottleneck(tmp_path: Path) -> None:
    evidence = {"kind": "host", "share": 0.5, "certainty": "probable", "evidence": "50 % of the step is the host"}
    leave(tmp_path, BASELINE, 1000.0, throughput={"bottleneck": evidence})
    leave(tmp_path, CHANGE, 2000.0, BATCH, throughput={"bottleneck": {"kind": "compute", "share": 0.7}})
    leave(tmp_path, AGAIN, 1000.0, not_tried=["not tried: trainer.precision=bf16-mixed: it is slower"])
    lines = find_findings(tmp_path).text("python train.py data.batch_size=256").splitlines()
    assert lines[0].startswith(f"Recommended: {BATCH}, 2.00 times (")
    assert lines[1] == "python train.py data.batch_size=256"
    assert lines[3].split("  ")[0] == "run"
    assert re.fullmatch(r"batch_size=256 +2,000 +2.00 +\d.\d\d to \d.\d\d  compute", lines[6])
    assert "note: ÷ baseline divides by the mean of both baselines" in lines
    assert "note: not tried: trainer.precision=bf16-mixed: it is slower" in lines
    assert "note: baseline: probably host: 50 % of the step is the host" in lines


def test_every_line_but_the_command_fits_80_columns(tmp_path: Path) -> None:
    verdict = {"bottleneck": {"kind": "communication", "certainty": "probable", "evidence": "word " * 40}}
    long = ("data.batch_size=512", "trainer.accumulate_grad_batches=1")
    leave(tmp_path, BASELINE, 1000.0, throughput=verdict, not_tried=["not tried: " + "word " * 40])
    leave(tmp_path, CHANGE, 12345678.0, *long, throughput=verdict)
    leave(tmp_path, CHANGE, None, PRECISION)
    leave(tmp_path, AGAIN, 1100.0, throughput=verdict)
    text = find_findings(tmp_path).text(None)
    assert max(map(len, text.splitlines())) <= 80
    assert not re.search(r"stretch|disturbed|\bturn|\bround|stall|floor", text)


def test_where_the_files_cannot_be_written_the_text_says_so(tmp_path: Path) -> None:
    diagnose(tmp_path, (900.0, BATCH))
    (tmp_path / "report").write_text("a file")
    text = write_diagnosis(tmp_path)
    assert text.startswith(f"note: {tmp_path}/report: cannot be ") and "No change helps" in text


def test_one_diagnosis_is_told_from_other_runs_and_from_several(tmp_path: Path) -> None:
    diagnose(tmp_path / "one", (2200.0, BATCH))
    assert holds_one_diagnosis(tmp_path / "one")
    diagnose(tmp_path / "two")
    assert not holds_one_diagnosis(tmp_path)
    write_run(tmp_path / "other" / "0", 64, 1.0)
    assert not holds_one_diagnosis(tmp_path / "other")
    with pytest.raises(UserError, match="holds no diagnosis"):
        find_findings(tmp_path / "other")


@pytest.mark.parametrize("damage", [5, "baseline", {"role": "magic"}, {"role": "change", "options": "x"}, {}])
def test_a_record_may_hold_anything(tmp_path: Path, damage: Any) -> None:
    diagnose(tmp_path, (2200.0, BATCH))
    change_record(tmp_path / BATCH, diagnosis=damage)
    assert "baseline" in find_findings(tmp_path).text(None)


def places(node: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Every value in a record, as a dict and a key of it."""
    for key, value in node.items() if isinstance(node, dict) else ():
        yield node, key
        yield from places(value)


def test_hostile_values_are_plain_text_or_one_line(tmp_path: Path) -> None:
    diagnose(tmp_path, (2200.0, BATCH), (550.0, PIPELINE))
    files = sorted(tmp_path.rglob("run.json"))

    def report() -> None:
        text = write_diagnosis(tmp_path)
        assert all(character.isprintable() or character == "\n" for character in text)

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
