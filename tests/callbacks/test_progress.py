"""ProgressBar redraws by the clock and shows the rate since the last redraw."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.callbacks import LambdaCallback
from torch.utils.data import DataLoader

from batchscope.callbacks import _visits, progress
from batchscope.callbacks._visits import Visits
from batchscope.callbacks.progress import ProgressBar
from tests.callbacks.support import monitoring, stranger
from tests.support.devices import Clock
from tests.support.third_party_modules import Stranger, loader, train


def fit(seconds: float, is_terminal: bool, monkeypatch: pytest.MonkeyPatch, *callbacks: Any, **options: Any) -> None:
    """Train five batches of 4 samples; a batch takes `seconds` of the bar's clock, and the first begins after 5 s."""
    clock = Clock()
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=clock))
    monkeypatch.setattr(progress, "can_redraw", lambda: is_terminal)

    def passes(seconds: float) -> Any:
        return lambda _: setattr(clock, "now", clock.now + seconds)

    bar = ProgressBar(interval_s=1.0)
    module = stranger(
        on_fit_start=lambda _: bar.enable(), on_train_start=passes(5.0), on_train_batch_start=passes(seconds)
    )
    options = {"data": (loader(), loader()), "max_epochs": 1, "enable_progress_bar": True, **options}
    train(module, *callbacks, bar, **options)


@pytest.mark.filterwarnings("ignore:ThroughputMonitor stopped measuring")
@pytest.mark.parametrize(("callbacks", "rate"), [
    ([], "8.00"), ([monitoring(batch_size_fn=lambda batch: 8)], "16.0"),
    ([monitoring(batch_size_fn=lambda batch: 1 / 0)], "8.00"),
], ids=["no monitor", "a monitor that counts samples in its own way", "one that fails"])  # fmt: skip
def test_a_terminal_shows_the_loss_and_the_rate_since_the_last_redraw(callbacks, rate, monkeypatch, capsys) -> None:
    fit(0.5, True, monkeypatch, *callbacks)
    output = capsys.readouterr().out
    shown = [line for line in output.replace("\r", "\n").splitlines() if "loss=" in line]
    assert shown and all(f"samples/s={rate}" in line for line in shown)
    assert "v_num" not in output


def test_the_rate_is_without_the_waits_of_a_sweep(monkeypatch, capsys) -> None:
    clock = Clock()
    monkeypatch.setattr(_visits, "time", SimpleNamespace(perf_counter=clock))
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=clock))
    monkeypatch.setattr(progress, "can_redraw", lambda: True)

    def passes(seconds: float) -> None:
        clock.now += seconds

    orders = iter(["warm up", "go 0 0.1", "train"])
    visitor = SimpleNamespace(hear=lambda: passes(60.0) or next(orders), tell=lambda message: None)
    bar, monitor = ProgressBar(interval_s=1.0), monitoring(warmup_steps=1)
    module = stranger(on_fit_start=lambda _: bar.enable(), on_train_batch_start=lambda _: passes(0.5))
    train(module, bar, monitor, Visits(monitor, visitor), max_epochs=3, enable_progress_bar=True)
    shown = re.findall(r"samples/s=(\S+?)[,\]]", capsys.readouterr().out)
    assert next(orders, None) is None and {*shown} == {"8.00"}


@pytest.mark.parametrize(("seconds", "batches", "length"), [
    (12.0, [3], {}), (40.0, [1, 2, 3, 4, 5], {}), (0.1, [], {}),
    (40.0, [1, 2, 3, 4, 5], {"max_epochs": -1, "max_steps": 5}),
])  # fmt: skip
def test_without_a_terminal_there_is_a_plain_line_every_thirty_seconds(
    seconds, batches, length, monkeypatch, capsys
) -> None:
    fit(seconds, False, monkeypatch, **length)
    output = capsys.readouterr()
    assert "\r" not in output.out + output.err
    lines = output.out.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"epoch 1, batch {n} of 5" for n in batches]
    assert all("loss " in line and "samples/s " in line for line in lines)


def test_a_batch_that_is_none_has_no_samples(monkeypatch, capsys) -> None:
    batches = DataLoader([next(iter(loader())), None], batch_size=None, collate_fn=lambda batch: batch)
    fit(0.5, True, monkeypatch, monitoring(batch_size_fn=lambda batch: len(batch[0])), data=batches)
    assert "samples/s=8.00" in capsys.readouterr().out


class Popping(Stranger):
    """Takes what it needs out of the batch."""

    def training_step(self, batch, batch_idx: int):
        return super().training_step((batch.pop("x"), batch.pop("y")), batch_idx)


def test_a_batch_that_the_step_has_changed_has_the_samples_that_the_monitor_has_counted(monkeypatch, capsys) -> None:
    clock = Clock()
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(progress, "can_redraw", lambda: False)
    batches = DataLoader([{"x": x, "y": y} for x, y in loader()], batch_size=None)
    waits = LambdaCallback(on_train_batch_start=lambda *_: setattr(clock, "now", clock.now + 40.0))
    monitor = monitoring(batch_size_fn=lambda batch: len(batch["y"]))
    train(Popping(), ProgressBar(), monitor, waits, data=batches, max_epochs=1, enable_progress_bar=True)
    assert capsys.readouterr().out.count("samples/s 0.100") == 5
