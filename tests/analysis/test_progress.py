"""What the gradient noise scale of runs says of batch sizes."""

import math
from pathlib import Path
from typing import Any

import pytest

from batchscope.analysis.answer import Answer, answer
from batchscope.analysis.noise import Ratio
from batchscope.analysis.progress import pooled
from batchscope.analysis.read import find
from tests.support.synthetic_runs import change_record, write_measured

RATES = {16: 1000.0, 64: 3000.0, 256: 6000.0, 1024: 8000.0}
KNOWN = {"samples": 400.0, "low": 380.0, "high": 420.0}
VAGUE = {"samples": 400.0, "low": 20.0, "high": 8000.0}


def answered(folder: Path, noise_scale: dict[str, Any], **facts: Any) -> Answer:
    write_measured(folder, {size: 1e3 * size / rate for size, rate in RATES.items()}, drift=0, **facts)
    for number in range(len(RATES)):
        change_record(folder / str(number), noise_scale=noise_scale)
    (group,) = find([folder]).groups
    found = answer(group)
    assert found is not None
    return found


def test_goodput_is_the_rate_times_the_progress_of_a_sample(tmp_path: Path) -> None:
    progress = answered(tmp_path, KNOWN).progress
    assert progress is not None
    assert [progress.efficiency(size) for size in RATES] == pytest.approx([416 / (400 + size) for size in RATES])
    assert progress.goodput(256) == pytest.approx(6000 * 416 / 656, rel=0.03)
    ratio = progress.ratio(1024, 256)
    assert ratio.value == pytest.approx(8 / 6 * 656 / 1424, rel=0.03)
    assert ratio.low < ratio.value < ratio.high


@pytest.mark.parametrize(
    ("noise_scale", "facts", "lines"),
    [
        (
            KNOWN,
            {},
            [
                "Gradient noise scale: 400 samples (390 to 410) at the beginning of the training, and it grows. An update",
                "By it 256 reaches a given quality first.",
                "1,024 has the highest rate, of which 71 % is lost to noise, compared with 16.",
            ],
        ),
        # A wide interval names all sizes that it may be.
        (
            VAGUE,
            {},
            ["Gradient noise scale: 400 samples (89.4 to 1,790)", "By it 64, 256 or 1,024 reaches a given quality"],
        ),
        ({"samples": 400.0, "low": 60.0}, {}, ["Gradient noise scale: 400 samples (60.0 or more)"]),
        ({"missing": "too few"}, {}, []),
        (KNOWN, {"others": 0.45}, []),  # on a busy machine there is no answer
    ],
)
def test_a_sentence_is_as_strong_as_its_interval(noise_scale, facts, lines, tmp_path: Path) -> None:
    said = answered(tmp_path, noise_scale, **facts).lines
    found = [line for line in said if "noise" in line or line.startswith("By it")]
    assert [line[: len(expected)] for line, expected in zip(found, lines, strict=False)] == lines
    assert bool(found) == bool(lines)


def test_the_samples_of_an_update_count_with_accumulated_batches_and_ranks(tmp_path: Path) -> None:
    progress = answered(
        tmp_path, KNOWN, options={"trainer.accumulate_grad_batches": 4}, throughput={"processes": 2}
    ).progress
    assert progress is not None and progress.updates == {size: 8 * size for size in RATES}


def test_a_report_has_the_goodput_of_each_size(tmp_path: Path) -> None:
    from batchscope.analysis.report import analyse

    answered(tmp_path, KNOWN)
    rows = [line.split() for line in analyse([tmp_path]).text.splitlines()]
    assert ["efficiency", "100%", "90%", "63%", "29%"] in rows
    assert any(row[:1] == ["goodput"] and len(row) == 5 for row in rows)


def test_runs_that_differ_widen_the_interval_of_their_noise_scale() -> None:
    alike = pooled([Ratio(100, 90, 111)] * 4)
    apart = pooled([Ratio(value, 0.9 * value, 1.11 * value) for value in (50, 100, 100, 200)])
    assert alike is not None and apart is not None
    assert alike.value == pytest.approx(100) and apart.value == pytest.approx(100, rel=0.02)
    assert 1.05 < alike.high / alike.low < 1.25 and apart.high / apart.low > 2
    assert pooled([Ratio(5, 2, math.inf), Ratio(9, 4, math.inf)]) == Ratio(9, 4, math.inf)
    assert pooled([]) is None
