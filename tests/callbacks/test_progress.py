"""ProgressBar redraws by the clock and shows the rate since the last redraw."""

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path

import lightning
import pytest

from batchscope.callbacks import progress
from batchscope.callbacks._timer import pause
from batchscope.callbacks.progress import ProgressBar
from batchscope.callbacks.throughput import ThroughputMonitor
from tests.support.third_party_modules import Stranger, loader


def fit(bar: ProgressBar, tmp_path: Path, epochs: int = 1, callbacks: Sequence[lightning.Callback] = ()) -> None:
    lightning.Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[bar, *callbacks],
    ).fit(Stranger(), loader(), loader())


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "can_redraw", lambda: True)


def test_it_shows_loss_and_samples_per_second(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(ProgressBar(), tmp_path)
    said = capsys.readouterr().out
    assert "loss=" in said
    assert "samples/s=" in said
    assert "v_num" not in said


def test_the_rate_is_samples_over_the_time_since_the_last_redraw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])

    class Ticking(ProgressBar):
        rates: list[float | None] = []

        def on_train_batch_end(self, *args: object) -> None:
            now[0] += 0.5
            super().on_train_batch_end(*args)
            self.rates.append(self._rate)

    bar = Ticking(interval_s=1.0)
    fit(bar, tmp_path)
    # 4 samples every half second; a redraw after every second batch, and at the last one.
    assert bar.rates == [None, 8.0, 8.0, 8.0, 8.0]


class Ticking(ProgressBar):
    """A bar whose clock goes on by some seconds a batch."""

    def __init__(self, seconds: float, monkeypatch: pytest.MonkeyPatch):
        super().__init__()
        self._now, self._seconds = 0.0, seconds
        monkeypatch.setattr(progress.time, "perf_counter", lambda: self._now)

    def on_train_batch_end(self, *args: object) -> None:
        self._now += self._seconds
        super().on_train_batch_end(*args)


@pytest.mark.parametrize(
    ("seconds", "batches"),
    [
        (4.0, [3]),  # 12 s
        (25.0, [1, 2, 3, 4, 5]),
        (0.1, []),
    ],
)
def test_without_a_terminal_there_is_a_plain_line_every_ten_seconds(
    seconds: float,
    batches: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(progress, "can_redraw", lambda: False)
    fit(Ticking(seconds, monkeypatch), tmp_path)
    said = capsys.readouterr()
    assert "\r" not in said.out + said.err
    lines = said.out.splitlines()
    assert [int(line.split("batch ")[1].split(" ")[0]) for line in lines] == batches
    for line in lines:
        assert line.startswith("epoch 1 of 1, batch ") and ": loss " in line and "samples/s " in line


def test_a_closed_pipe_under_standard_output_ends_no_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    class Closed(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError

    monkeypatch.setattr(progress, "can_redraw", lambda: False)
    monitor = ThroughputMonitor(calibrate=False)
    bar = Ticking(20.0, monkeypatch)
    with contextlib.redirect_stdout(Closed()) as closed:
        fit(bar, tmp_path, epochs=2, callbacks=[monitor])
    assert "epoch 2 of 2, batch 5" in closed.getvalue() and "\nlimit " in closed.getvalue()
    assert "updates" in monitor.summary and monitor.failure is None
    assert not [warning for warning in recwarn if "stopped measuring" in str(warning.message)]


@pytest.mark.slow
def test_plain_lines_become_rarer_as_the_fit_becomes_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "can_redraw", lambda: False)
    fit(Ticking(20.0, monkeypatch), tmp_path, epochs=200)  # 5 batches each, together 20,000 s
    assert 40 < len(capsys.readouterr().out.splitlines()) < 70


def test_an_interval_of_zero_is_refused_where_it_is_declared() -> None:
    from batchscope.errors import UserError
    from batchscope.options.nodes import check_node

    with pytest.raises(UserError, match="takes a number above 0"):
        check_node({"_target_": "batchscope.callbacks.progress.ProgressBar", "interval_s": 0}, "callbacks.progress")


def test_a_pause_is_not_in_the_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a run waits for its turn, or another callback measures."""

    class Pausing(Ticking):
        rates: list[float | None] = []

        def on_train_batch_end(self, trainer: lightning.Trainer, *args: object) -> None:
            with pause(trainer):
                self._now += 100.0
            super().on_train_batch_end(trainer, *args)
            self.rates.append(self._rate)

    bar = Pausing(0.5, monkeypatch)
    fit(bar, tmp_path)
    assert bar.rates == [8.0] * 5  # 4 samples every half second
