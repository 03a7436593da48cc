"""The table of a diagnosis: each change against the baseline, and one first sentence that the numbers bear out."""

import json
import re
import zlib

import numpy as np
import pytest

from batchscope.analysis.diagnose import Findings
from batchscope.analysis.read import find
from tests.support.synthetic_runs import change_record, write_run, write_steps

BASELINE, CHANGE, AGAIN = "baseline", "change", "baseline_again"  # as names of folders
BATCH, LARGER = "data.batch_size=256", "data.batch_size=512"
PIPELINE, PRECISION = "data.pipeline=workers", "trainer.precision=bf16-mixed"
GPU, CPU = "trainer.accelerator=gpu", "trainer.accelerator=cpu"
BOTH = f"{BATCH} {PIPELINE}"


def findings(folder):
    """What the runs in and below a folder say."""
    return Findings(find([folder]).runs)


def leave(folder, role, rate, *options, first_pass=None, others=0, name=None, **facts):
    """A run of a diagnosis with little noise; without `rate` it was refused, without `others` it has no steps."""
    known = {"options": list(options)}
    place = folder / ("+".join(options) or name or role)
    if not rate:
        error = {"status": "failed", "error": "trainer.precision: no such hardware"}
        write_run(place, diagnosis=known, **error | facts)
        return
    size = max([64, *(int(word.partition("=")[2]) for word in options if "batch_size" in word)])
    throughput = {"memory_peak_gib": 0.5, "bottleneck": facts.pop("bottleneck", None)}
    write_run(place, size, 1e3 * size / rate, throughput=throughput, diagnosis=known, **facts)
    noise = np.exp(0.01 * np.random.default_rng(zlib.crc32(place.name.encode())).standard_normal((20, 10)))
    passes = None if first_pass is None else range(first_pass, first_pass + 20)
    if others is not None:
        write_steps(place, 1e3 * size / rate * noise, rounds=passes, others=others)


def diagnosed(folder, *changes, alone=1000.0, beside=1000.0, at_end=None, **facts):
    """The findings of a baseline alone, and of changes in passes with another one.

    Two options together have passes with a third one, at the rate `beside`. With `at_end`, nothing was visited in passes, and
    the baseline ran again after the changes; at a rate of 0 it was refused.
    """
    leave(folder, BASELINE, alone, **facts)
    visits = at_end is None
    leave(folder, AGAIN, beside if visits else at_end, first_pass=0 if visits else None, **facts)
    for rate, options in changes:
        first = 100 * (" " in options)
        if first:
            leave(folder, AGAIN, beside, name="third", first_pass=first, **facts)
        leave(folder, CHANGE, rate, *options.split(), first_pass=first if visits else None, **facts)
    return findings(folder)


RECOMMENDED = rf"Recommended: {BATCH}, 2\.[12]\d times the baseline's rate, at least \d\.\d\d in this diagnosis"
NOTHING = "The baseline was not measured, so there is nothing to compare."
NOT_COMPARED = "No change can be compared with the baseline: "
NO_HELP = "No change helps: of 2 changes compared, none is shown to be faster than the baseline; the best is "
# Changes, what else is known → the recommended change, the first sentence.
SAID = [
    ([(2200.0, BATCH), (1500.0, PIPELINE)], {}, BATCH, rf"{RECOMMENDED}\.$"),
    ([(1120.0, PIPELINE)], {}, PIPELINE, "Recommended: "),
    ([(1010.0, PIPELINE), (900.0, PRECISION)], {}, None, rf"{NO_HELP}{PIPELINE} with 1\.0\d \(0\.9\d to 1\.0\d\)\.$"),
    ([], {}, None, "No change has been tried."),
    # The baseline in the same passes counts, and not the one before them.
    ([(2200.0, BATCH)], {"alone": 500.0}, BATCH, RECOMMENDED),
    ([(1000.0, BATCH)], {"alone": 500.0}, None, "No change helps: "),
    ([(2200.0, BATCH), (4000.0, LARGER)], {}, LARGER, "Recommended: "),
    ([(2200.0, BATCH), (1500.0, PIPELINE), (3000.0, BOTH)], {}, BOTH, rf"Recommended: {BOTH}, (3\.0|2\.9)\d times "),
    # Beside other programs what shared passes is compared, and the load is said.
    ([(4000.0, BATCH)], {"others": 0.4}, BATCH, r"Recommended: .*, beside other programs that took 40 % of the processor\.$"),
    ([(1000.0, BATCH)], {"others": 0.4}, None, r"No change helps: .*, beside other programs that took 40 % of the processor\.$"),
    ([(1600.0, BATCH)], {"others": 0.4, "at_end": 1000.0}, None, r"No change helps: .*, beside other programs that took 40 % of the processor\.$"),
    ([(3000.0, BATCH)], {"others": 0.4, "at_end": 1000.0}, BATCH, "Recommended: "),
    # What ran one after the other is compared with the baseline before and after it.
    ([(2200.0, BATCH)], {"at_end": 1010.0}, BATCH, RECOMMENDED),
    ([(1300.0, BATCH)], {"at_end": 1200.0}, None, "No change helps: "),
    ([(2200.0, BATCH)], {"at_end": 1030.0, "device": "cuda"}, BATCH, "Recommended: "),
    ([(2200.0, BATCH)], {"at_end": 3000.0}, None, "No change helps: "),
    ([(2200.0, BATCH)], {"at_end": 0}, BATCH, RECOMMENDED),
    # What is not known is not recommended.
    ([(2200.0, BATCH)], {"others": None}, None, f"{NOT_COMPARED}too few steps were measured to know their noise."),
    ([(None, BATCH)], {}, None, f"{NOT_COMPARED}refused: trainer.precision: no such hardware."),
    ([(2200.0, BATCH)], {"alone": None, "beside": None}, None, NOTHING),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "facts", "best", "said"), SAID)
def test_the_first_sentence_names_the_change_to_make_or_why_there_is_none(tmp_path, changes, facts, best, said):
    found = diagnosed(tmp_path, *changes, **facts)
    assert (found.best and found.best.name) == best
    assert re.match(said, found.headline)
    assert ("a larger batch also changes how the model learns" in found.remarks) == ("batch_size" in (best or ""))
    text = found.text
    line = f"batchscope train … {best}"
    assert (line in text.splitlines()) if best else "batchscope train" not in text


def test_the_sentence_has_the_numbers_of_the_table(tmp_path):
    found = diagnosed(tmp_path, (1540.0, PRECISION), (1100.0, PIPELINE))
    times, least = re.findall(r"\d\.\d\d", found.headline)
    (row,) = [line for line in found.text.splitlines() if line.startswith("precision=bf16-mixed")]
    assert re.search(rf" {times} +{least} to \d\.\d\d", row)


def test_the_more_changes_are_compared_the_wider_each_interval_is(tmp_path):
    few = diagnosed(tmp_path / "few", (1200.0, BATCH))
    many = diagnosed(tmp_path / "many", (1200.0, BATCH), *((1000.0, f"seed={number}") for number in range(11)))
    narrow, wide = (next(trial.ratio for trial in found.changes if trial.name == BATCH) for found in (few, many))
    assert wide.low < narrow.low < 1.2 < narrow.high < wide.high
    note = "the lower ends of all intervals hold together with 95 % confidence"
    assert note in many.remarks and note not in few.remarks


@pytest.mark.parametrize("others", [0.0, 0.4])
def test_a_change_that_ran_at_another_time_has_the_interval_of_separate_runs(tmp_path, others):
    leave(tmp_path, CHANGE, 4000.0, GPU, others=others)
    found = diagnosed(tmp_path, (2200.0, BATCH), others=others)
    apart, beside = (next(trial for trial in found.changes if trial.name == name) for name in (GPU, BATCH))
    assert apart.ratio.reach > (0.9 if others else 0.2) > 0.1 > beside.ratio.reach
    row = next(line for line in found.text.splitlines() if line.startswith("accelerator=gpu"))
    assert re.fullmatch(r"accelerator=gpu +[34],\d+ +[34]\.\d\d +\d\.\d\d to \d+\.\d\d", row)


def test_the_table_has_the_rate_the_ratio_its_interval_and_the_bottleneck(tmp_path):
    evidence = {"kind": "host", "share": 0.5, "certainty": "probable", "evidence": "the host is slow " * 12}
    visited = {"first_pass": 0}
    leave(tmp_path, BASELINE, 1000.0, bottleneck=evidence)
    leave(tmp_path, AGAIN, 1100.0, bottleneck=evidence, **visited)
    leave(tmp_path, CHANGE, 2200.0, BATCH, bottleneck={"kind": "compute", "share": 0.7}, **visited)
    leave(tmp_path, CHANGE, 550.0, LARGER, "trainer.accumulate_grad_batches=1", bottleneck=evidence, **visited)
    leave(tmp_path, CHANGE, None, PRECISION)
    leave(tmp_path, CHANGE, None, PIPELINE, status="out_of_memory", error=None)
    text = findings(tmp_path).text
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    begin = next(number for number, line in enumerate(lines) if line.startswith("run  "))
    assert lines[begin - 2] == "batchscope train … data.batch_size=256"
    shown = [re.split(r" {2,}", line) for line in lines[begin : begin + 6]]
    assert shown[0] == ["run", "samples/s", "÷ baseline", "interval", "bottleneck"]
    assert shown[1][::2] == ["baseline", "probably host"]
    assert re.fullmatch(r"batch_size=256 +2,\d{3} +(2\.0|1\.9)\d +1\.\d\d to 2\.\d\d  compute", lines[begin + 2])
    assert [line[2:3] for line in shown[4:]] == [[], []]
    said = " ".join(text.split())
    for note in (
        f"{PRECISION}: refused: trainer.precision: no such hardware",
        f"{PIPELINE}: out of memory",
        "baseline: probably host: the host is slow",
    ):
        assert f"note: {note}" in said


@pytest.mark.parametrize(
    ("status", "said"),
    [("failed", "refused: E: why"), ("not_finite", "not finite: E: why"), ("out_of_memory", "out of memory")],
)
def test_a_change_that_did_not_finish_says_how_it_ended(tmp_path, status, said):
    diagnosed(tmp_path, (None, PRECISION))
    for file in tmp_path.rglob("run.json"):
        if json.loads(file.read_text())["status"] == "failed":
            change_record(file.parent, status=status, error="E: why")
    assert f"{PRECISION}: {said}" in " ".join(findings(tmp_path).text.split())


def test_a_run_of_no_diagnosis_is_left_out(tmp_path):
    write_run(tmp_path / "0", 64, 1.0)
    assert findings(tmp_path).headline == NOTHING


def test_a_damaged_record_is_left_out(tmp_path):
    diagnosed(tmp_path, (2200.0, BATCH))
    for damage in (5, "baseline", {"role": "magic"}, {}):
        change_record(tmp_path / BATCH, diagnosis=damage)
        assert findings(tmp_path).headline == "No change has been tried."
    (tmp_path / BATCH / "run.json").unlink()
    (tmp_path / BATCH / "run.json").symlink_to("run.json")
    assert findings(tmp_path).headline == "No change has been tried."
