"""The table of a diagnosis: each change against two baselines, and one closing sentence that the numbers bear out."""

import re

import numpy as np
import pytest

from batchscope.analysis import diagnose
from batchscope.analysis.diagnose import AGAIN, BASELINE, CHANGE, TOGETHER, find_findings, write_diagnosis
from batchscope.errors import UserError
from tests.support.synthetic_runs import change_record, write_run, write_steps

BATCH, LARGER = "data.batch_size=256", "data.batch_size=512"
PIPELINE, PRECISION = "data.pipeline=workers", "trainer.precision=bf16-mixed"


def leave(folder, role, rate, *options, others=0, **facts):
    """A run of a diagnosis with little noise; without `rate` it was refused, without `others` it has no steps."""
    known = {"role": role, "options": list(options), "not_tried": facts.pop("not_tried", [])}
    place = folder / ("+".join(options) or role)
    if not rate:
        error = {"status": "failed", "error": "trainer.precision: no such hardware"}
        write_run(place, diagnosis=known, **error | facts)
        return
    size = max([64, *(int(word.partition("=")[2]) for word in options if "batch_size" in word)])
    throughput = {"memory_peak_gib": 0.5, "bottleneck": facts.pop("bottleneck", None)}
    write_run(place, size, 1e3 * size / rate, throughput=throughput, diagnosis=known, **facts)
    noise = np.exp(0.01 * np.random.default_rng(0).standard_normal((8, 10)))
    if others is not None:
        write_steps(place, 1e3 * size / rate * noise, others=others)


def diagnosed(folder, *changes, at_begin=1000.0, at_end=1000.0, **facts):
    """The findings of a baseline, changes, two together where the options are two, and the baseline again.

    Without `at_end` it did not begin again, and at a rate of 0 it was refused.
    """
    leave(folder, BASELINE, at_begin, **facts)
    for rate, options in changes:
        leave(folder, TOGETHER if " " in options else CHANGE, rate, *options.split(), **facts)
    if at_end is not None:
        leave(folder, AGAIN, at_end, **facts)
    return find_findings(folder)


RECOMMENDED = rf"Recommended: {BATCH}, 2.20 times \(1.\d+ to 2.\d+\) the baseline's rate.$"
BOTH = f"{BATCH} {PIPELINE}"
NOTHING = "The baseline was not measured, so there is nothing to compare."
INCOMPLETE = "Incomplete: 2 changes tried, and the baseline was not measured again after that, so no change is rec"
CLOSE = {"at_end": 1003.0}
BUSY = "The machine was busy: other programs took 40 % of the processor. No change is recommended"


@pytest.mark.parametrize(
    ("changes", "facts", "best", "said"),
    [
        ([(2200.0, BATCH), (1500.0, PIPELINE)], {}, BATCH, RECOMMENDED),
        ([(1005.0, BATCH), (900.0, PIPELINE)], {}, None, "No change helps: of 2 changes tried, none is shown"),
        ([], {}, None, "No change has been tried."),
        # What the baselines differ by decides.
        ([(1300.0, BATCH)], {"at_end": 1010.0}, BATCH, "Recommended: "),
        ([(1300.0, BATCH)], {"at_end": 1200.0}, None, "No change helps: "),
        # Of equal ones the one that changes less: a smaller batch, then one option.
        ([(2200.0, BATCH), (2210.0, LARGER)], CLOSE, BATCH, "Recommended: "),
        ([(2200.0, BATCH), (4000.0, LARGER)], CLOSE, LARGER, "Recommended: "),
        ([(2200.0, LARGER), (2198.0, PRECISION), (2202.0, f"{LARGER} {PRECISION}")], CLOSE, PRECISION, "Recommended: "),
        ([(2200.0, BATCH), (1500.0, PIPELINE), (3000.0, BOTH)], {}, BOTH, rf"Recommended: {BOTH}, 3.00 times \("),
        ([(2200.0, BATCH), (3000.0, PIPELINE)], {"others": 0.4}, None, BUSY),
        # What is not known is not recommended.
        ([(2200.0, BATCH), (3000.0, PIPELINE)], {"others": None}, None, "No change helps"),
        ([(2200.0, BATCH), (3000.0, PIPELINE)], {"at_begin": None, "at_end": None}, None, NOTHING),
        ([(2000.0, BATCH), (3000.0, PIPELINE)], {"at_end": None}, None, INCOMPLETE),
        ([(2000.0, BATCH), (3000.0, PIPELINE)], {"at_end": 0}, None, INCOMPLETE),
    ],
)
def test_the_first_sentence_names_the_change_to_make_or_why_there_is_none(tmp_path, changes, facts, best, said):
    found = diagnosed(tmp_path, *changes, **facts)
    assert (found.best and found.best.name) == best
    assert re.match(said, found.headline)
    drifted = "at the end the baseline was 1.20 times as fast as at the beginning"
    assert any(remark.startswith(drifted) for remark in found.remarks) == (facts.get("at_end") == 1200)
    assert ("a larger batch also changes how the model learns" in found.remarks) == ("batch_size" in (best or ""))
    text = write_diagnosis(tmp_path)
    line = f"batchscope train … {best}"
    assert (line in text.splitlines()) if best else "batchscope train" not in text
    assert text in (tmp_path / "report/diagnosis.md").read_text()


def test_the_two_best_changes_help_and_set_different_options(tmp_path):
    found = diagnosed(tmp_path, (2200.0, BATCH), (3000.0, LARGER), (1500.0, PIPELINE), (900.0, PRECISION))
    assert [trial.options for trial in diagnose.best_pair(found)] == [(LARGER,), (PIPELINE,)]
    early = diagnosed(tmp_path / "early", (2000.0, BATCH), (3000.0, PIPELINE), (1900.0, PRECISION), at_end=None)
    assert [trial.options for trial in diagnose.best_pair(early)] == [(PIPELINE,), (BATCH,)]
    unknown = diagnosed(tmp_path / "unknown", (2000.0, BATCH), at_begin=None, at_end=None)
    assert diagnose.best_pair(unknown) == []
    assert len(diagnose.best_pair(diagnosed(tmp_path / "one", (2200.0, BATCH), (1010.0, PIPELINE)))) == 1


def test_the_table_has_the_rate_the_ratio_its_interval_and_the_bottleneck(tmp_path):
    evidence = {"kind": "host", "share": 0.5, "certainty": "probable", "evidence": "the host is slow " * 12}
    leave(tmp_path, BASELINE, 1000.0, bottleneck=evidence)
    leave(tmp_path, CHANGE, 2200.0, BATCH, bottleneck={"kind": "compute", "share": 0.7})
    leave(tmp_path, CHANGE, 550.0, LARGER, "trainer.accumulate_grad_batches=1", bottleneck=evidence)
    leave(tmp_path, CHANGE, None, PRECISION)
    leave(tmp_path, CHANGE, None, PIPELINE, status="out_of_memory", error=None)
    leave(tmp_path, AGAIN, 1210.0, not_tried=["not tried: model.compile=true: it is slower " + "than that " * 20])
    text = find_findings(tmp_path).text("python train.py data.batch_size=256")
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith(f"Recommended: {BATCH}, 2.00 times (")
    begin = next(number for number, line in enumerate(lines) if line.startswith("run  "))
    assert lines[begin - 2] == "python train.py data.batch_size=256"
    shown = [re.split(r" {2,}", line) for line in lines[begin : begin + 7]]
    assert shown[0] == ["run", "samples/s", "÷ baseline", "90 % interval", "bottleneck"]
    assert shown[1][::2] == ["baseline", "probably host"]
    assert re.fullmatch(r"batch_size=256 +2,200 +2.00 +\d.\d\d to \d.\d\d  compute", lines[begin + 3])
    assert [line[2:3] for line in shown[4:]] == [["0.50"], [], []]
    said = " ".join(text.split())
    for note in (
        "÷ baseline divides by the mean of both baselines",
        f"{PRECISION}: refused: trainer.precision: no such hardware",
        f"{PIPELINE}: out of memory",
        "not tried: model.compile=true: it is slower than that",
        "baseline: probably host: the host is slow",
    ):
        assert f"note: {note}" in said


def test_one_diagnosis_is_told_from_other_runs_and_from_several(tmp_path):
    diagnosed(tmp_path / "one", (2200.0, BATCH))
    assert diagnose.holds_one_diagnosis(tmp_path / "one")
    diagnosed(tmp_path / "two")
    assert not diagnose.holds_one_diagnosis(tmp_path)
    write_run(tmp_path / "other" / "0", 64, 1.0)
    assert not diagnose.holds_one_diagnosis(tmp_path / "other")
    with pytest.raises(UserError, match="holds no diagnosis"):
        find_findings(tmp_path / "other")


def test_a_damaged_record_is_left_out_and_files_that_cannot_be_written_are_a_note(tmp_path):
    diagnosed(tmp_path, (2200.0, BATCH))
    for damage in (5, "baseline", {"role": "magic"}, {}):
        change_record(tmp_path / BATCH, diagnosis=damage)
        assert find_findings(tmp_path).headline == "No change has been tried."
    (tmp_path / BATCH / "run.json").unlink()
    (tmp_path / BATCH / "run.json").symlink_to("run.json")
    assert find_findings(tmp_path).headline == "No change has been tried."
    (tmp_path / "report").write_text("a file")  # the diagnosis is printed where it cannot be written
    text = write_diagnosis(tmp_path)
    assert text.startswith(f"note: {tmp_path}/report: cannot be ") and "No change has been tried." in text
