"""ProgressBar redraws by the clock and shows the rate since the last redraw."""

from pathlib import Path

import lightning
import pytest

from batchscope.callbacks import progress
from batchscope.callbacks.progress import ProgressBar
from tests.support.third_party_modules import Stranger, loader


def fit(bar: ProgressBar, tmp_path: Path) -> None:
    lightning.Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[bar],
    ).fit(Stranger(), loader(), loader())


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


def test_an_interval_of_zero_is_refused_where_it_is_declared() -> None:
    from batchscope.errors import UserError
    from batchscope.options.nodes import check_node

    with pytest.raises(UserError, match="takes a number above 0"):
        check_node({"_target_": "batchscope.callbacks.progress.ProgressBar", "interval_s": 0}, "callbacks.progress")
