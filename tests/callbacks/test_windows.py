"""Windows: where they begin and end, and what others took of the processor in them."""

import numpy
import pytest

from batchscope.callbacks import _windows
from batchscope.callbacks._windows import Windows
from batchscope.hardware import processor
from batchscope.hardware.processor import Noise
from tests.support.devices import Clock

pytestmark = pytest.mark.usefixtures("noises")


def trained(first: int, *seconds: float) -> tuple[Windows, list[int]]:
    """The windows of updates that take these seconds, and the updates before which a window began."""
    clock, began = Clock(), []
    windows = Windows(first, clock)
    for update, update_s in enumerate(seconds):
        if windows.is_due(update):
            windows.begin(update)
            began.append(update)
        clock.now += update_s
    return windows, began


def test_a_window_begins_after_the_warm_up_and_every_quarter_of_a_second() -> None:
    windows, began = trained(3, *[0.1] * 12)
    assert began == [3, 6, 9]
    assert windows.current is windows.all[-1]
    assert windows.end(12) is windows.all[-1]
    assert windows.window_indices(numpy.arange(14)).tolist() == [-1] * 3 + [0] * 3 + [1] * 3 + [2] * 3 + [-1] * 2


def test_each_long_step_is_a_window_and_a_long_run_has_longer_windows() -> None:
    assert trained(1, *[2.0] * 4)[1] == [1, 2, 3]
    windows, _ = trained(1, *[0.5] * 5_000)
    assert len(windows.all) < 400
    assert windows.all[-2].seconds == pytest.approx(0.02 * 2_500, rel=0.1)


def test_in_passes_each_visit_is_a_window_and_one_without_an_update_is_dropped() -> None:
    clock = Clock()
    windows = Windows(1, clock)
    windows.in_passes = True
    assert not any(map(windows.is_due, range(4)))
    windows.begin(3, pass_=6)
    assert (windows.end(3), windows.all, windows.summarize()) == (None, [], {})
    windows.begin(4, pass_=7)
    clock.now += 3.0
    ended = windows.end(6)
    assert windows.end(6) is None  # no window is open
    assert (ended.pass_, ended.first, ended.end, ended.seconds) == (7, 4, 6, 3.0)
    windows.begin(9, pass_=8)
    assert windows.window_indices(numpy.array([5, 6, 8, 9])).tolist() == [0, -1, -1, 1]


def test_what_others_take_between_two_windows_is_in_none(monkeypatch) -> None:
    spent = {"total": 0.0, "busy": 0.0}
    monkeypatch.setattr(processor, "cpu_seconds", lambda: (spent["total"], spent["busy"], 0.0))
    monkeypatch.setattr(_windows, "NoiseMeter", processor.NoiseMeter)  # which the fixture has replaced
    windows = Windows(0, Clock())
    windows.in_passes = True
    for update in (0, 1):
        windows.begin(update, pass_=update)
        spent["total"] += 1
        windows.end(update + 1)
        spent["total"], spent["busy"] = spent["total"] + 1, spent["busy"] + 1  # the run waits, and others run
    assert [window.others_share for window in windows.all] == [0.0, 0.0]


@pytest.mark.parametrize(("device", "share"), [("cpu", (0.8 + 2 * 0.04 + 0.4) / 4), ("cuda", 0.8 / 4)])
def test_the_share_of_others_is_over_the_time_of_all_windows_and_on_an_accelerator_of_slowed_ones(
    device, share, noises
) -> None:
    noises += [Noise(0.8, 0.0), Noise(), Noise(0.04, 0.9), Noise(0.4, idle_share=0.5)]
    clock = Clock()
    windows = Windows(0, clock, device)
    for update, seconds in enumerate((1.0, 5.0, 2.0, 1.0)):
        windows.begin(update)
        clock.now += seconds
    windows.end(4)
    assert windows.disturbed().tolist() == [True, False, False, False]
    assert windows.summarize() == {"windows": 4, "disturbed_windows": 1, "others_share": pytest.approx(share)}
    # A sweep counts the same share while it measures.
    assert windows.all[2].others_share == (0.04 if device == "cpu" else 0.0)
