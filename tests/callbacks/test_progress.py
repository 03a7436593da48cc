"""ProgressBar redraws by the clock and shows the rate since the last redraw."""

import contextlib
import io

import lightning
import pytest

from batchscope.callbacks import progress
from batchscope.callbacks.progress import ProgressBar
from batchscope.callbacks.throughput import ThroughputMonitor
from tests.support.third_party_modules import Stranger, loader, train


class Ticking(ProgressBar):
    """A bar whose clock goes on by some seconds a batch of 4 samples."""

    def __init__(self, seconds: float, monkeypatch: pytest.MonkeyPatch):
        super().__init__(interval_s=1.0)
        self._now, self._seconds = 0.0, seconds
        self.rates: list[float | None] = []
        monkeypatch.setattr(progress.time, "perf_counter", lambda: self._now)

    def on_train_batch_end(self, trainer: lightning.Trainer, *args: object) -> None:
        self._now += self._seconds
        super().on_train_batch_end(trainer, *args)
        self.rates.append(self._rate)


def fit(bar: ProgressBar, *callbacks: lightning.Callback) -> None:
    """Train an epoch of five batches."""
    train(Stranger(), bar, *callbacks, data=(loader(), loader()), max_epochs=1, enable_progress_bar=True)


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "can_redraw", lambda: True)


def test_it_shows_loss_and_samples_per_second(capsys: pytest.CaptureFixture[str]) -> None:
    fit(ProgressBar())
    said = capsys.readouterr().out
    assert "loss=" in said and "samples/s=" in said and "v_num" not in said


def test_the_rate_is_samples_over_the_time_since_the_last_redraw(monkeypatch: pytest.MonkeyPatch) -> None:
    bar = Ticking(0.5, monkeypatch)
    fit(bar)
    assert bar.rates == [None, 8.0, 8.0, 8.0, 8.0]  # a redraw after every second batch, and at the last one


@pytest.mark.parametrize(("seconds", "batches"), [(12.0, [3]), (40.0, [1, 2, 3, 4, 5]), (0.1, [])])
def test_without_a_terminal_there_is_a_plain_line_every_thirty_seconds(
    seconds: float,
    batches: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(progress, "can_redraw", lambda: False)
    fit(Ticking(seconds, monkeypatch))
    said = capsys.readouterr()
    assert "\r" not in said.out + said.err
    lines = said.out.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"epoch 1, batch {n} of 5" for n in batches]
    assert all("loss " in line and "samples/s " in line for line in lines)


def test_a_closed_pipe_under_standard_output_ends_no_measurement(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    class Closed(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError

    monkeypatch.setattr(progress, "can_redraw", lambda: False)
    monitor = ThroughputMonitor(calibrate=False, warmup_steps=2, record_operations=False)
    with contextlib.redirect_stdout(Closed()) as closed:
        fit(Ticking(40.0, monkeypatch), monitor)
    assert "epoch 1, batch 5" in closed.getvalue() and "\nlimit " in closed.getvalue()
    assert "updates" in monitor.summary and monitor.failure is None
    assert not [warning for warning in recwarn if "stopped measuring" in str(warning.message)]


def test_an_interval_of_zero_is_refused_where_it_is_declared() -> None:
    from batchscope.errors import UserError
    from batchscope.options.nodes import check_node

    with pytest.raises(UserError, match="takes a number above 0"):
        check_node({"_target_": "batchscope.callbacks.progress.ProgressBar", "interval_s": 0}, "callbacks.progress")
