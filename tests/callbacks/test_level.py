"""A run whose steps become slower says since when, and what changed with it: from the table of its fit to the words."""

import json
import time
from dataclasses import replace

import numpy
import pytest

from batchscope.callbacks._level import OTHERS, VALIDATION, Spans, find_spans, slower_facts
from batchscope.callbacks._measured import read_measured, write_measured
from batchscope.callbacks._report import report
from batchscope.callbacks._run_words import headline
from batchscope.callbacks._table import PARTIAL, RECORDED, ROW, WARMUP, UpdateTable
from batchscope.callbacks._windows import Window, Windows
from batchscope.callbacks.device import DeviceMonitor
from batchscope.hardware import level
from batchscope.hardware.nvml_readings import SM_CLOCK
from batchscope.hardware.telemetry import ALLOCATED, RSS
from batchscope.records.course import course_words, slower_words
from batchscope.records.step_parts import PARTS, StepPart
from tests.callbacks.support import monitoring, stranger
from tests.callbacks.test_report import WAITING
from tests.support.third_party_modules import loader, train

DAWN = 1.8e9  # seconds since 1970
NOTHING = numpy.empty(0), numpy.empty(0)


def table_of(step_s, samples=8.0, others=None, gap_s: float = 0.0) -> UpdateTable:
    """Steps of so many seconds, half of them waiting for data, in windows of ten; each window ends with a gap."""
    windows, step_s = Windows(0), numpy.asarray(step_s, float)
    table = UpdateTable(0, windows)
    rows = numpy.zeros(len(step_s), ROW)
    rows["step"] = numpy.arange(1, len(step_s) + 1)
    rows["parts_ms"][:, PARTS.index(StepPart.DATA_WAIT)] = rows["parts_ms"][:, PARTS.index(StepPart.FORWARD)] = (
        500 * step_s
    )
    rows["samples"], rows["batches"] = samples, 1
    table._rows, table._length = rows, len(rows)
    now = 50.0
    for first in range(0, len(step_s), 10):
        seconds = step_s[first : first + 10].sum() + gap_s
        end = min(first + 10, len(step_s))
        share = 0.0 if others is None else others[first]
        windows.all.append(Window(first, -1, DAWN + now, now, end, seconds, share))
        now += seconds
    return table


def silent(key: str):
    return NOTHING


def column(spans: Spans, key: str) -> numpy.ndarray:
    return numpy.array(spans.columns[key], float)


def test_a_fit_is_divided_into_equal_spans_with_the_time_of_their_steps() -> None:
    spans = find_spans(table_of(numpy.repeat([1.0, 2.0], [400, 400])), silent, [])
    assert spans.seconds == pytest.approx(1200 / 200)
    assert len(spans.columns["step_ms"]) == 200
    assert column(spans, "step_ms")[[0, 60, 80, 199]] == pytest.approx([1000, 1000, 2000, 2000])
    assert column(spans, "data_wait")[[0, 199]] == pytest.approx([500, 1000])
    assert column(spans, "start_unix")[0] == DAWN + 50
    assert numpy.diff(column(spans, "start_unix")) == pytest.approx(6.0, abs=2.01)
    assert column(spans, "step")[[0, 1]].tolist() == [1, 7]


def test_long_steps_are_a_span_each_and_a_short_fit_has_none() -> None:
    assert len(find_spans(table_of([10.0] * 40), silent, []).columns["step_ms"]) == 40
    assert find_spans(table_of([1.0] * 300), silent, []) is None
    assert find_spans(table_of([]), silent, []) is None


def test_only_counted_updates_in_windows_by_the_clock_are_in_spans() -> None:
    table = table_of([2.0] * 400)
    table._rows["flags"][:5], table._rows["flags"][7] = WARMUP, RECORDED
    table._rows["parts_ms"][7] = 1e6
    for window in table.windows.all[:4]:
        window.pass_ = 1
    spans = find_spans(table, silent, [])
    assert (spans.columns["step"][0], max(spans.columns["step_ms"])) == (41, 2000)


def test_samples_decide_where_batches_have_other_sizes_and_updates_where_nobody_counts_samples() -> None:
    larger = numpy.repeat([8.0, 16.0], [300, 150])
    table = table_of(larger / 8, samples=larger)
    assert table.flags().any() and (table.flags() & PARTIAL).any()
    assert column(find_spans(table, silent, []), "step_ms") == pytest.approx(1000)
    assert column(find_spans(table_of([1.0] * 400, samples=0.0), silent, []), "step_ms") == pytest.approx(1000)


def test_what_was_read_and_validated_meanwhile_is_in_the_span_of_its_time_and_a_gap_is_in_none() -> None:
    readings = {RSS: (numpy.array([0.0, 51.0, 52.0, 649.0, 900.0]), numpy.array([9.0, 1.0, 3.0, 4.0, 9.0]))}
    spans = find_spans(
        table_of([1.0] * 600), lambda key: readings.get(key, NOTHING), [(53.5, 4.0), (56.5, 6.0), (60.0, 7.0)]
    )
    rss, validations = spans.columns[RSS], spans.columns[VALIDATION]
    assert (rss[0], rss[1], rss[199]) == (2.0, None, 4.0)
    assert validations[:4] == [None, 4.0, 6.0, 7.0]
    assert SM_CLOCK not in spans.columns
    paused = find_spans(table_of([1.0] * 100, gap_s=90.0), silent, [])
    assert column(paused, "step_ms") == pytest.approx(1000)


def slow_run(**columns) -> Spans:
    """100 spans of six seconds at 14:20, each slower by 30 % from number 60 on, by its waits for data alone."""
    late = numpy.arange(100) >= 60
    parts = dict.fromkeys(PARTS, [2.0] * 100) | {"data_wait": (2.0 + 3.6 * late).tolist()}
    values = {"start_unix": (DAWN + 6.0 * numpy.arange(100)).tolist(), "step": list(range(1, 10_001, 100))}
    values |= {"step_ms": (12.0 + 3.6 * late).tolist(), **parts}
    return Spans(6.0, values | {key: numpy.where(late, *levels[::-1]).tolist() for key, levels in columns.items()})


def test_a_slower_level_is_said_with_the_clock_time_and_with_what_changed() -> None:
    slower = slower_facts(slow_run())
    assert (slower["since_unix"], slower["step"], slower["ratio"]) == (DAWN + 360, 6001, pytest.approx(1.3))
    assert slower["until_unix"] == DAWN + 600
    assert slower["beside"] == {"data_wait": [2.0, 5.6]}
    clock = time.strftime("%H:%M", time.localtime(DAWN + 360))
    words = f"since {clock} (step 6,001): a step 12.0 → 15.6 ms; with it waiting for data 2.00 → 5.60 ms"
    assert slower_words({"slower": slower}) == words
    assert course_words({"slower": slower}) == [f"steps are slower {words}"]
    assert slower_words({"slower": slower | {"beside": {}}}) == words.partition(";")[0]


@pytest.mark.parametrize(
    ("key", "changed", "alike", "words"),
    [
        (OTHERS, (0.02, 0.35), (0.02, 0.05), "other programs 2.00 → 35.0 % of the processor"),
        (SM_CLOCK, (1755.0, 1200.0), (1755.0, 1740.0), "clock 1,760 → 1,200 MHz"),
        (RSS, (1.0, 3.5), (1.0, 1.05), "memory of the process 1.00 → 3.50 GiB"),
        (VALIDATION, (4.0, 6.0), (4.0, 4.1), "a validation 4.00 → 6.00 s"),
    ],
)
def test_what_changed_with_it_is_named_and_what_did_not_is_not(key, changed, alike, words) -> None:
    assert slower_words({"slower": slower_facts(slow_run(**{key: changed}))}).endswith(words)
    assert key not in slower_facts(slow_run(**{key: alike}))["beside"]
    assert key not in slower_facts(slow_run(**{key: (None, changed[1])}))["beside"]


def test_on_a_cpu_its_memory_is_that_of_the_process_and_not_named_twice() -> None:
    spans = slow_run(**{RSS: (1.0, 3.5), ALLOCATED: (0.9, 3.4)})
    assert {RSS, ALLOCATED} <= slower_facts(spans, "cuda")["beside"].keys()
    assert ALLOCATED not in slower_facts(spans, "cpu")["beside"]


def test_a_run_that_ends_on_another_day_says_the_date() -> None:
    slower = slower_facts(slow_run()) | {"until_unix": DAWN + 200_000}
    assert time.strftime("since %d %b %H:%M (", time.localtime(DAWN + 360)) in slower_words({"slower": slower})


def test_a_file_replays_it(tmp_path) -> None:
    measured = replace(WAITING, spans=slow_run(**{RSS: (None, 1.0)}))
    write_measured(tmp_path, measured, None)
    replayed, machine = read_measured(tmp_path)
    assert replayed.spans == measured.spans
    assert report(replayed, machine)["slower"] == slower_facts(measured.spans)
    assert "slower" not in report(WAITING, None)
    still = dict.fromkeys((*PARTS, "step_ms"), [0.0] * 100)
    assert slower_facts(replace(measured.spans, columns={**measured.spans.columns, **still})) == {}
    json.loads(json.dumps(report(replayed, machine), allow_nan=False))


DAMAGED = [None, 3, [], {}, {"since_unix": 1e11, "until_unix": 1e11}, {"since_unix": "x"}, {"step_ms": [1]}]


@pytest.mark.parametrize("wrong", DAMAGED)
def test_a_damaged_record_has_no_words(wrong) -> None:
    assert slower_words({"slower": wrong}) == ""
    if isinstance(wrong, dict):
        assert isinstance(
            slower_words({"slower": slower_facts(slow_run()) | wrong | {"beside": {"data_wait": wrong}}}), str
        )


@pytest.mark.slow
def test_a_run_that_sleeps_from_its_middle_on_is_found(monkeypatch: pytest.MonkeyPatch, alone) -> None:
    monkeypatch.setattr(level, "LASTS_S", 2.0)
    began = []

    def step(module) -> None:
        began.append(time.time())
        time.sleep(0.01 if began[-1] - began[0] < 6 else 0.04)

    module, monitor = stranger(training_step=step), monitoring(warmup_steps=1)
    train(module, monitor, DeviceMonitor(), data=(loader(400), loader()), max_time={"seconds": 12}, max_epochs=1_000)
    slower = monitor.summary["slower"]
    assert abs(slower["since_unix"] - began[0] - 6) < 1
    assert slower["interval"][0] > 1.2
    assert "forward" in slower["beside"]
    assert any(line.startswith("slower  since ") for line in headline(monitor.summary))
