"""StopAtTarget: a run ends when its validation reaches the target, or when it has taken too long, and says which."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from batchscope.callbacks.target import FIRST, StopAtTarget
from batchscope.errors import UserError
from tests.callbacks.support import monitoring
from tests.support.third_party_modules import Stranger, loader, train


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock of the callback: an update takes a second, and a validation five."""
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr("batchscope.callbacks.target.time", clock)
    return clock


class Learner(Stranger):
    """Its metrics are those of the update before the validation."""

    def __init__(self, clock: SimpleNamespace, f1_before: float = 0.5) -> None:
        super().__init__()
        self.clock, self.validated, self.f1_before = clock, [], f1_before

    def on_train_batch_start(self, *args) -> None:
        self.clock.now += 1

    def on_validation_epoch_start(self) -> None:
        self.clock.now += 5

    def validation_step(self, batch, batch_idx: int) -> None:
        if batch_idx == 0:
            self.validated.append(self.global_step)
        f1 = 0.5 if self.global_step else self.f1_before
        self.log_dict({"val/acc": self.global_step / 100, "val/loss": 1 - self.global_step / 100, "val/f1": f1})


class Two(Learner):
    """Steps two optimizers in each update."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD([one], lr=0.01) for one in self.parameters()]


def fit(metric: str, value: float, module: Learner, limits=None, **options):
    """What the record gets, and the trainer."""
    stop, monitor = StopAtTarget(metric, value, **limits or {}), monitoring()
    known = {"max_steps": 400, "max_epochs": -1, "min_epochs": 0, "num_sanity_val_steps": -1, **options}
    trainer = train(module, monitor, stop, data=(loader(), loader()), **known)
    facts = stop.record_facts()
    assert stop.summary_lines()[0].endswith(f" {facts['target']['steps'] // len(trainer.optimizers)} updates")
    if facts["time_to_target_s"]:
        seconds = facts["target"]["steps"] / len(trainer.optimizers) * monitor.summary["step_ms"] / 1e3
        assert facts["time_to_target_s"] == facts["target"]["seconds"] == pytest.approx(seconds)
    return facts, trainer


@pytest.mark.parametrize(
    ("metric", "kind", "optimizers"), [("val/acc", Learner, 1), ("val/loss", Learner, 1), ("val/acc", Two, 2)]
)
def test_a_run_ends_at_the_first_validation_that_reaches_the_target(metric, kind, optimizers, clock) -> None:
    facts, trainer = fit(metric, 0.5, kind(clock))
    target = facts["target"]
    assert target["reached"] and target["steps"] == trainer.global_step
    assert target["after_seconds"] < target["seconds"] and 50 <= target["steps"] < 50 + optimizers * 8
    assert target["best"] == pytest.approx(target["steps"] / 100 if metric == "val/acc" else 1 - target["steps"] / 100)
    assert "ended" not in target


def test_validations_follow_a_tenth_of_the_training_and_take_at_most_as_long_as_it(clock, tmp_path) -> None:
    module = Learner(clock)
    _, trainer = fit("val/acc", 3.0, module, max_steps=200)
    assert module.validated[:5] == [0, *(FIRST + 5 * n for n in range(1, 5))]
    late = [b / a for a, b in itertools.pairwise(module.validated) if a > 100]
    assert late and all(1.09 < ratio < 1.13 for ratio in late)
    trainer.save_checkpoint(path := tmp_path / "200.ckpt")  # a fit that goes on is validated as soon as a new one
    fit("val/acc", 9.0, module, max_steps=250, ckpt_path=path)
    assert module.validated[-5:] == [200 + FIRST + 5 * n for n in range(5, 10)]


@pytest.mark.parametrize("planned", [{"check_val_every_n_epoch": 5}, {"val_check_interval": {"hours": 1}}])
def test_validations_take_the_place_of_those_that_the_trainer_plans(planned, clock) -> None:
    fit("val/acc", 3.0, module := Learner(clock), max_steps=30, **planned)
    assert module.validated[:5] == [0, *(FIRST + 5 * n for n in range(1, 5))]


@pytest.mark.parametrize(
    ("limit", "kind", "updates", "why"),
    [
        ({"seconds": 30.0}, Learner, FIRST + 30, "other runs were faster"),
        ({"seconds": 30.0}, Two, FIRST + 30, "other runs were faster"),
        ({"wall_seconds": 30.0}, Learner, 20, "the time limit"),
    ],
)
def test_a_run_ends_without_the_target_when_a_limit_is_over(limit, kind, updates, why, clock) -> None:
    facts, trainer = fit("val/acc", 9.0, kind(clock), limit)
    assert facts["time_to_target_s"] is None
    assert facts["target"]["ended"] == why and facts["target"]["steps"] == trainer.global_step
    assert trainer.global_step == updates * len(trainer.optimizers)


@pytest.mark.parametrize("before", [0.5, math.nan])
def test_a_metric_of_unknown_direction_moves_towards_its_target(before: float, clock: SimpleNamespace) -> None:
    facts, _ = fit("val/f1", 0.7, Learner(clock, before), max_steps=30)
    assert not facts["target"]["reached"] and facts["target"]["best"] == 0.5


def test_a_metric_of_torchmetrics_knows_its_direction(clock: SimpleNamespace) -> None:
    module = Learner(clock)
    module.measured = {"val": {"f1": SimpleNamespace(higher_is_better=False)}}
    with pytest.raises(UserError, match="^target: got 0.7, and val/f1 is 0.5 before training; take a harder one"):
        fit("val/f1", 0.7, module)


MEASURED = "val/acc, val/loss, val/f1"


@pytest.mark.parametrize(
    ("metric", "value", "options", "line"),
    [
        ("val/ac", 0.5, {}, f"target_metric: got 'val/ac', and the validation measures {MEASURED}. Did you mean"),
        ("val/acc", -1.0, {}, "target: got -1, and val/acc is 0 before training; take a harder one"),
        ("val/loss", 2.0, {}, "target: got 2, and val/loss is 1 before training; take a harder one"),
        ("val/acc", 0.5, {"limit_val_batches": 0}, "target: needs a validation, and this run has none"),
    ],
)
def test_a_target_that_cannot_be_is_told_before_training(metric, value, options, line, clock) -> None:
    with pytest.raises(UserError, match=f"^{line}"):
        fit(metric, value, Learner(clock), **options)
