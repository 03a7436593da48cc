"""StopAtTarget: a run ends when its validation reaches the target, or when it has taken too long, and says which."""

import itertools
from types import SimpleNamespace

import pytest
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryF1Score

from batchscope.callbacks.target import StopAtTarget
from batchscope.errors import UserError
from tests.callbacks.support import monitoring
from tests.support.third_party_modules import Stranger, loader, train

FALLS = SimpleNamespace(higher_is_better=False)  # the attribute of a torchmetrics metric
FIRST = 11  # updates before the first validation: a warm-up of five, and six timed updates


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock of the callback: an update takes a second, and a validation five."""
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr("batchscope.callbacks.target.time", clock)
    return clock


class Learner(Stranger):
    """Its validation metrics depend on the number of updates alone."""

    def __init__(self, clock: SimpleNamespace) -> None:
        super().__init__()
        self.clock, self.validated = clock, []

    def on_train_batch_start(self, *args) -> None:
        self.clock.now += 1

    def on_validation_epoch_start(self) -> None:
        self.clock.now += 5

    def validation_step(self, batch, batch_idx: int) -> None:
        if batch_idx == 0:
            self.validated.append(self.global_step)
        self.log_dict({"val/acc": self.global_step / 100, "val/loss": 1 - self.global_step / 100, "val/f1": 0.5})


class ByHand(Learner):
    automatic_optimization = False


def fit(metric: str, value: float, module: Learner, limits=None, **options):
    """Train with StopAtTarget; returns what the callback adds to the record, and the trainer."""
    stop, monitor = StopAtTarget(metric, value, **limits or {}), monitoring()
    trainer_options = {"max_steps": 400, "max_epochs": -1, "min_epochs": 0, "num_sanity_val_steps": 0, **options}
    trainer = train(module, monitor, stop, data=(loader(), loader()), **trainer_options)
    record = stop.record_facts()
    assert stop.summary_lines()[0].endswith(f" {record['target']['steps']} updates")
    if record["time_to_target_s"]:
        seconds = record["target"]["steps"] * monitor.summary["step_ms"] / 1e3
        assert record["time_to_target_s"] == record["target"]["seconds"] == pytest.approx(seconds)
    return record, trainer


@pytest.mark.parametrize("metric", ["val/acc", "val/loss"])
def test_a_run_ends_at_the_first_validation_that_reaches_the_target(metric, clock) -> None:
    record, trainer = fit(metric, 0.5, Learner(clock))
    target = record["target"]
    assert target["reached"] and target["steps"] == trainer.global_step
    assert target["after_seconds"] < target["seconds"] and 50 <= target["steps"] < 58
    assert target["best"] == pytest.approx(target["steps"] / 100 if metric == "val/acc" else 1 - target["steps"] / 100)
    assert "ended" not in target


def test_a_run_that_is_at_the_target_at_once_goes_on_until_its_time_is_known(clock) -> None:
    record, trainer = fit("val/acc", 0.01, Learner(clock))
    assert trainer.global_step == FIRST and record["time_to_target_s"] > 0


@pytest.mark.parametrize(("length", "updates"), [({"max_steps": 8}, 8), ({"max_steps": -1, "max_epochs": 2}, 10)])
def test_a_training_that_ends_before_the_first_validation_is_validated_at_its_end(length, updates, clock) -> None:
    record, _ = fit("val/acc", 9.0, module := Learner(clock), **length)
    assert module.validated == [updates] and record["target"]["best"] == pytest.approx(updates / 100)


def test_validations_follow_a_tenth_of_the_training_and_take_at_most_as_long_as_it(clock, tmp_path) -> None:
    module = Learner(clock)
    _, trainer = fit("val/acc", 3.0, module, max_steps=200)
    assert module.validated[:5] == [FIRST + 5 * n for n in range(5)]
    ratios = [b / a for a, b in itertools.pairwise(module.validated) if a > 100]
    assert ratios and all(1.09 < ratio < 1.13 for ratio in ratios)
    trainer.save_checkpoint(path := tmp_path / "200.ckpt")  # a fit that goes on is validated as soon as a new one
    fit("val/acc", 9.0, module, max_steps=250, ckpt_path=path)
    assert module.validated[-5:] == [200 + FIRST + 5 * n for n in range(3, 8)]


def test_a_resumed_fit_knows_its_last_validation_and_what_of_its_time_is_spent(clock, tmp_path) -> None:
    module, path = Learner(clock), tmp_path / "20.ckpt"
    _, trainer = fit("val/acc", 0.25, module, {"wall_seconds": 60.0}, max_steps=20)
    assert (module.validated, clock.now) == ([11, 16], 30)
    trainer.save_checkpoint(path)
    clock.now += 1000  # the time until the run is resumed
    record, _ = fit("val/acc", 0.25, module, ckpt_path=path)
    assert record["target"]["steps"] == 20 + FIRST
    assert record["target"]["after_seconds"] / record["target"]["seconds"] == pytest.approx(16 / 31)
    record, _ = fit("val/acc", 0.01, module, ckpt_path=path)  # a target that was reached long before
    assert record["target"]["after_seconds"] / record["target"]["seconds"] == pytest.approx(20 / 31)
    record, trainer = fit("val/acc", 9.0, module, {"wall_seconds": 60.0}, ckpt_path=path)
    assert (record["target"]["ended"], trainer.global_step) == ("the time limit", 20 + 30 - 2 * 5)
    fit("val/acc", 9.0, module, max_steps=23, ckpt_path=path)
    assert module.validated[-1] == 23  # a fit that is too short for a planned validation is validated at its end


@pytest.mark.parametrize("planned", [{"check_val_every_n_epoch": 5}, {"val_check_interval": {"hours": 1}}])
def test_validations_take_the_place_of_those_that_the_trainer_plans(planned, clock) -> None:
    fit("val/acc", 3.0, module := Learner(clock), max_steps=40, **planned)
    assert module.validated[:5] == [FIRST + 5 * n for n in range(5)]


@pytest.mark.parametrize(
    ("limit", "updates", "reason"),
    [
        ({"seconds": 30.0}, 5 + 30, "other runs were faster"),
        ({"wall_seconds": 30.0}, 20, "the time limit"),
    ],
)
def test_a_run_ends_without_the_target_when_a_limit_is_over(limit, updates, reason, clock) -> None:
    record, trainer = fit("val/acc", 9.0, Learner(clock), limit)
    assert record["time_to_target_s"] is None
    assert record["target"]["ended"] == reason and record["target"]["steps"] == trainer.global_step
    assert trainer.global_step == updates


def test_a_fit_that_has_to_go_on_keeps_its_first_success_and_plans_no_validation_after_it_or_a_limit(clock) -> None:
    record, trainer = fit("val/acc", 0.2, module := Learner(clock), {"wall_seconds": 60.0}, min_steps=80)
    assert (module.validated, trainer.global_step) == ([11, 16, 21, 80], 80)  # the last one is Lightning's own
    target = record["target"]
    assert (target["reached"], target["steps"], target["best"], "ended" in target) == (
        True,
        21,
        pytest.approx(0.21),
        False,
    )
    record, trainer = fit("val/acc", 9.0, module := Learner(clock), {"wall_seconds": 30.0}, min_steps=80)
    assert (module.validated, record["target"]["ended"]) == ([11, 16, 20, 80], "the time limit")


@pytest.mark.parametrize("own", [{"measured": {"val": {"f1": FALLS}}}, {"val_f1": FALLS}], ids=["a task", "a module"])
def test_a_metric_of_torchmetrics_knows_its_direction(own, clock: SimpleNamespace) -> None:
    module = Learner(clock)
    vars(module).update(own)
    assert fit("val/f1", 0.7, module)[0]["target"]["reached"]


def test_a_metric_of_a_collection_has_its_direction_by_the_name_that_it_is_logged_as(clock: SimpleNamespace) -> None:
    module = Learner(clock)
    module.of_validation = MetricCollection({"f1": BinaryF1Score()}, prefix="val/")
    assert fit("val/f1", 0.5, module)[0]["target"]["reached"]


MEASURED = "val/acc, val/loss, val/f1"


@pytest.mark.parametrize(
    ("metric", "kind", "options", "line"),
    [
        (
            "val/losses",
            Learner,
            {},
            f"target_metric: got 'val/losses', and the validation measures {MEASURED}. Did you mean",
        ),
        ("val/f1", Learner, {}, "target_metric: got 'val/f1', of which neither batchscope nor a torchmetrics metric"),
        ("val/acc", ByHand, {}, "target: needs automatic optimisation, and this module optimises by hand"),
        ("val/acc", Learner, {"limit_val_batches": 0}, "target: needs a validation, and this run has none"),
    ],
)
def test_a_target_that_cannot_be_is_told(metric, kind, options, line, clock) -> None:
    with pytest.raises(UserError, match=f"^{line}"):
        fit(metric, 0.5, kind(clock), **options)
