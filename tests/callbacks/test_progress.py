"""ProgressBar redraws by the clock and shows the rate since the last redraw."""

from types import SimpleNamespace
from typing import Any

import pytest

from batchscope.callbacks import progress
from batchscope.callbacks.progress import ProgressBar
from tests.callbacks.support import stranger
from tests.support.devices import Clock
from tests.support.third_party_modules import loader, train


def fit(seconds: float, is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch of five batches of 4 samples, each of which takes some seconds of the bar's clock, 5 s after the start."""
    clock = Clock()
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=clock))
    monkeypatch.setattr(progress, "can_redraw", lambda: is_terminal)

    def passes(seconds: float) -> Any:
        return lambda _: setattr(clock, "now", clock.now + seconds)

    bar = ProgressBar(interval_s=1.0)
    module = stranger(
        on_fit_start=lambda _: bar.enable(), on_train_start=passes(5.0), on_train_batch_start=passes(seconds)
    )
    options = {"data": (loader(), loader()), "max_epochs": 1, "enable_progress_bar": True}
    train(module, bar, **options)


def test_a_terminal_shows_the_loss_and_the_rate_since_the_last_redraw(monkeypatch, capsys) -> None:
    fit(0.5, True, monkeypatch)
    said = capsys.readouterr().out
    shown = [line for line in said.replace("\r", "\n").splitlines() if "loss=" in line]
    assert shown and all("samples/s=8.0" in line.replace("8.00", "8.0") for line in shown)
    assert "v_num" not in said


@pytest.mark.parametrize(("seconds", "batches"), [(12.0, [3]), (40.0, [1, 2, 3, 4, 5]), (0.1, [])])
def test_without_a_terminal_there_is_a_plain_line_every_thirty_seconds(seconds, batches, monkeypatch, capsys) -> None:
    fit(seconds, False, monkeypatch)
    said = capsys.readouterr()
    assert "\r" not in said.out + said.err
    lines = said.out.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"epoch 1, batch {n} of 5" for n in batches]
    assert all("loss " in line and "samples/s " in line for line in lines)
