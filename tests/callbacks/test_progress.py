"""ProgressBar redraws by the clock and shows the rate since the last redraw."""

import pytest

from batchscope.callbacks import progress
from batchscope.callbacks.progress import ProgressBar
from tests.support.third_party_modules import Stranger, loader, train


class Ticking(Stranger):
    """Batches of 4 samples, each of which takes some seconds of the bar's clock."""

    def __init__(self, seconds: float, is_terminal: bool, monkeypatch: pytest.MonkeyPatch):
        super().__init__()
        self.now, self.seconds = 0.0, seconds
        monkeypatch.setattr(progress.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(progress, "can_redraw", lambda: is_terminal)

    def on_train_batch_start(self, *args: object) -> None:
        self.now += self.seconds

    def fit(self, *callbacks: object) -> None:
        """An epoch of five batches."""
        options = {"data": (loader(), loader()), "max_epochs": 1, "enable_progress_bar": True}
        train(self, ProgressBar(interval_s=1.0), *callbacks, **options)


def test_a_terminal_shows_the_loss_and_the_rate_since_the_last_redraw(monkeypatch, capsys) -> None:
    Ticking(0.5, True, monkeypatch).fit()
    said = capsys.readouterr().out
    shown = [line for line in said.replace("\r", "\n").splitlines() if "loss=" in line]
    assert shown and all("samples/s=8.0" in line.replace("8.00", "8.0") for line in shown)
    assert "v_num" not in said


@pytest.mark.parametrize(("seconds", "batches"), [(12.0, [3]), (40.0, [1, 2, 3, 4, 5]), (0.1, [])])
def test_without_a_terminal_there_is_a_plain_line_every_thirty_seconds(seconds, batches, monkeypatch, capsys) -> None:
    Ticking(seconds, False, monkeypatch).fit()
    said = capsys.readouterr()
    assert "\r" not in said.out + said.err
    lines = said.out.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"epoch 1, batch {n} of 5" for n in batches]
    assert all("loss " in line and "samples/s " in line for line in lines)
