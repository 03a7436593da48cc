"""StopAtTarget: a run ends when its validation reaches the target, or when it has taken too long, and says which."""

import itertools
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
import torch
from torch import Tensor

from batchscope.callbacks.target import FIRST, StopAtTarget
from batchscope.callbacks.throughput import ThroughputMonitor
from batchscope.distributed.rank_sync import RankSync
from batchscope.errors import UserError
from tests.support.runs import ranks, record
from tests.support.third_party_modules import Stranger, loader, train


class Learner(Stranger):
    """Its metrics are those of the update before the validation, and its updates take some milliseconds."""

    validated: list[int]

    def on_fit_start(self) -> None:
        self.validated = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(0.002)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.validated.append(self.global_step)
        self.log_dict({"val/acc": self.global_step / 100, "val/loss": 1 - self.global_step / 100, "val/f1": 0.5})


def fit(metric: str, value: float, module: Any = None, **options: Any) -> tuple[dict[str, Any], lightning.Trainer]:
    """What the record gets, and the trainer."""
    limits = {key: options.pop(key) for key in ("seconds", "wall_seconds") if key in options}
    stop = StopAtTarget(metric, value, **limits)
    monitor = ThroughputMonitor(calibrate=False, verbose=False, record_operations=False)
    samples, optimizers = options.pop("samples", 20), options.pop("optimizers", 1)
    known = {"max_steps": 400, "max_epochs": -1, "min_epochs": 0, "num_sanity_val_steps": -1, **options}
    trainer = train(module or Learner(), monitor, stop, data=(loader(samples), loader()), **known)
    facts = stop.record_facts()
    if facts["time_to_target_s"]:
        steps, step_ms = facts["target"]["steps"], monitor.summary["step_ms"]
        assert (
            facts["time_to_target_s"] == facts["target"]["seconds"] == pytest.approx(steps / optimizers * step_ms / 1e3)
        )
    return facts, trainer


@pytest.mark.parametrize(("metric", "value"), [("val/acc", 0.5), ("val/loss", 0.5)])
def test_a_run_ends_at_the_first_validation_that_reaches_the_target(metric: str, value: float) -> None:
    facts, trainer = fit(metric, value)
    target = facts["target"]
    assert target["reached"] and target["steps"] == trainer.global_step
    assert target["after_seconds"] < target["seconds"] and target["steps"] >= 50
    assert target["best"] == pytest.approx(target["steps"] / 100 if metric == "val/acc" else 1 - target["steps"] / 100)
    assert "ended" not in target


class Clocked(Learner):
    """An update takes a second, and a validation five."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        super().__init__()
        self.now = 0.0
        monkeypatch.setattr("batchscope.callbacks.target.time", SimpleNamespace(perf_counter=lambda: self.now))

    def on_train_batch_start(self, *args: Any) -> None:
        self.now += 1

    def on_validation_epoch_start(self) -> None:
        self.now += 5


def test_validations_follow_a_tenth_of_the_training_and_take_at_most_as_long_as_it(monkeypatch) -> None:
    module = Clocked(monkeypatch)
    fit("val/acc", 3.0, module, max_steps=200)
    assert module.validated[:5] == [0, *(FIRST + 5 * n for n in range(1, 5))]
    late = [b / a for a, b in itertools.pairwise(module.validated) if a > 100]
    assert late and all(1.09 < ratio < 1.13 for ratio in late)


def test_a_fit_that_goes_on_from_a_checkpoint_is_validated_as_soon_as_a_new_one(monkeypatch, tmp_path: Path) -> None:
    path = tmp_path / "100.ckpt"
    train(Learner(), max_steps=100, max_epochs=-1).save_checkpoint(path)
    module = Clocked(monkeypatch)
    fit("val/acc", 9.0, module, max_steps=150, ckpt_path=path)
    assert module.validated[-5:] == [100 + FIRST + 5 * n for n in range(5, 10)]


def test_a_wish_that_ranks_agree_on_within_an_update_is_kept_until_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two batches an update, ranks agree at the first batch of each alone."""
    agreed = RankSync.agreed
    monkeypatch.setattr(RankSync, "start", lambda sync, batch: setattr(sync, "number", batch))
    monkeypatch.setattr(RankSync, "agreed", lambda sync, topic: 0 if sync.number % 2 else agreed(sync, topic))
    facts, trainer = fit("val/acc", 0.2, samples=24, accumulate_grad_batches=2)
    assert facts["target"]["reached"] and trainer.global_step < 100


@pytest.mark.parametrize(
    ("limit", "why"), [({"seconds": 0.2}, "other runs were faster"), ({"wall_seconds": 0.2}, "the time limit")]
)
def test_a_run_ends_without_the_target_when_a_limit_is_over(limit: dict[str, float], why: str) -> None:
    facts, trainer = fit("val/acc", 4.0, **limit)
    assert trainer.global_step < 400
    assert facts["time_to_target_s"] is None
    assert facts["target"]["ended"] == why and facts["target"]["steps"] == trainer.global_step


class Two(Learner):
    """Steps two optimizers in each update."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD([one], lr=0.01) for one in self.parameters()]


def test_an_update_of_several_optimizers_is_one_update() -> None:
    assert fit("val/acc", 0.5, Two(), optimizers=2)[0]["target"]["reached"]
    assert fit("val/acc", 9.0, Two(), seconds=0.2)[0]["target"]["ended"] == "other runs were faster"


def test_a_metric_of_unknown_direction_moves_towards_its_target() -> None:
    facts, _ = fit("val/f1", 0.7, max_steps=30)
    assert not facts["target"]["reached"] and facts["target"]["best"] == 0.5


MISTAKES = {
    "target_metric: got 'val/ac', and the validation measures val/acc, val/loss, val/f1. Did you mean": ("val/ac", 0.5),
    "target: got -1, and val/acc is 0 before training; take a harder one": ("val/acc", -1.0),
    "target: got 2, and val/loss is 1 before training; take a harder one": ("val/loss", 2.0),
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_target_that_cannot_be_is_told_before_training(line: str) -> None:
    with pytest.raises(UserError) as error:
        fit(*MISTAKES[line])
    assert str(error.value).startswith(line)


def test_a_run_without_a_validation_has_no_target() -> None:
    with pytest.raises(UserError, match="target: needs a validation, and this run has none"):
        fit("val/acc", 0.5, limit_val_batches=0)


@pytest.mark.slow
def test_all_ranks_end_at_the_target_together(tmp_path: Path) -> None:
    small = ["data=copy_memory", "data.delay=2", "data.num_train=64", "data.num_val=16", "data.batch_size=8"]
    small += ["model=stacked_lstm", "model.hidden_size=8", "trainer.accelerator=cpu", "callbacks.progress=null"]
    small += ["+trainer.min_epochs=0", "trainer.max_epochs=-1", "optimizer.schedule=constant", "test=false"]
    small += ["+callbacks.stop._target_=batchscope.callbacks.target.StopAtTarget"]
    small += ["+callbacks.stop.metric=val/loss", "+callbacks.stop.value=2.2", "trainer.max_steps=2000"]
    small += ["trainer.accumulate_grad_batches=2"]  # ranks agree at every second batch
    for run in ranks(tmp_path, *small):
        assert run.end() == 0, run.complained
    found = record(tmp_path / "out")
    assert found["target"]["reached"] and found["target"]["steps"] == found["steps"] < 2000
