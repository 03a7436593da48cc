"""Where the wall time of a fit goes besides its steps, and which epochs begin with starting workers."""

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from batchscope.callbacks._fit_time import FitTimer, started_workers
from batchscope.callbacks._measured import read_measured, write_measured
from batchscope.callbacks._report import report
from batchscope.callbacks._run_words import headline
from batchscope.records.course import fit_words, workers_words
from tests.callbacks.support import monitoring, stranger
from tests.callbacks.test_report import WAITING
from tests.support.devices import Clock
from tests.support.third_party_modules import Stranger, loader, train

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
OPTION = "DataLoader(persistent_workers=True)"
STARTING = {"epoch": {"seconds": 8.0, "first_batch_s": 3.2, "starting_workers_s": 3.0, "advice": OPTION}}


def trainer_of(data, config=None, **options) -> SimpleNamespace:
    module = SimpleNamespace(batchscope_config=config)
    attributes = {"train_dataloader": data, "lightning_module": module, "reload_dataloaders_every_n_epochs": 0}
    return SimpleNamespace(**attributes | options)


def fresh(workers: int = 4, dataset=None, **options) -> DataLoader:
    """A loader that starts its workers in each epoch."""
    return DataLoader([0] if dataset is None else dataset, num_workers=workers, **options)


def timed(*epochs: tuple[float, int], computed_s: float = 0.0, first_s: float = 9.0, trainer=None) -> dict[str, Any]:
    """A fit of epochs (wait for the first batch, batches of 0.1 s), each with a validation of 1 s and a gap of 0.5 s."""
    clock, cpu = Clock(), Clock()
    timer = FitTimer(clock=clock, cpu=cpu)
    steps_s = 0.0
    for number, (wait_s, batches) in enumerate(epochs):
        timer.begin_epoch()
        assert timer.is_waiting
        cpu.now += computed_s
        clock.now += first_s if number == 0 else wait_s / 2
        timer.request_batch()
        clock.now += 0.0 if number == 0 else wait_s / 2
        timer.receive_first_batch()
        assert not timer.is_waiting
        steps_s += wait_s / 2 * (number > 0) + 0.1 * batches
        for _ in range(batches):
            clock.now += 0.1
            timer.end_batch()
        timer.begin_validation()
        clock.now += 1.0
        timer.end_validation()
        clock.now += 0.5
    return timer.result(trainer or trainer_of(fresh()), steps_s)


def test_the_wall_time_of_a_fit_is_divided_and_the_first_epoch_starts_up() -> None:
    result = timed((3.0, 40), (3.0, 40), (3.0, 40))
    parts = {"start_up": 9.0, "steps": 12.0, "validation": 3.0, "first_batch": 6.0, "other": 1.5}
    assert result["fit_parts_s"] == pytest.approx(parts)
    assert (result["epoch"]["seconds"], result["epoch"]["first_batch_s"]) == pytest.approx((8.5, 3.0))


def test_a_wait_for_the_first_batch_is_one_for_workers_beyond_what_its_loading_can_take() -> None:
    epoch = timed((3.0, 40), (3.0, 40))["epoch"]  # 4 s and 0.5 s for nine rounds of the workers
    assert epoch["starting_workers_s"] == pytest.approx(3.0 - 4.5 / 9)
    assert epoch["advice"] == OPTION
    single = timed((3.0, 4), (3.0, 4))  # each worker loads one batch, so that the time of a load is unknown
    ordered = timed((3.0, 40), (3.0, 40), computed_s=2.8)  # the main process shuffles the samples meanwhile
    for result in (timed((0.6, 40), (0.6, 40)), single, ordered):
        assert result["epoch"].keys() == {"seconds", "first_batch_s"}


def test_an_epoch_that_is_cut_and_one_that_never_began_tell_nothing() -> None:
    assert "epoch" not in timed((3.0, 40), (3.0, 11))
    assert "epoch" not in timed((3.0, 40))
    clock = Clock()
    timer = FitTimer(clock=clock, cpu=clock)
    timer.begin_epoch()
    clock.now += 2.0
    assert timer.result(trainer_of(None), 0.0)["fit_parts_s"]["start_up"] == 2.0


def test_a_first_batch_that_was_fetched_ahead_is_in_no_step() -> None:
    clock = Clock()
    timer = FitTimer(clock=clock, cpu=clock)
    for wait_s in (0.0, 3.0):
        timer.begin_epoch()
        timer.request_batch()
        clock.now += wait_s
        timer.receive_first_batch()
        timer.request_batch()  # for the second batch, with which the first step begins
        clock.now += 1.0
        timer.end_batch()
    parts = timer.result(trainer_of(None), 2.0)["fit_parts_s"]
    assert parts == pytest.approx({"start_up": 0.0, "steps": 2.0, "validation": 0.0, "first_batch": 3.0, "other": 0.0})


def test_a_fit_of_many_epochs_is_summed_up_at_once() -> None:
    began = time.perf_counter()
    assert timed(*[(3.0, 1)] * 20_000)["epoch"]["seconds"] == pytest.approx(4.6)
    assert time.perf_counter() - began < 10  # a search through all epochs for each epoch takes minutes


def test_a_resumed_fit_may_begin_with_a_validation() -> None:
    clock = Clock()
    timer = FitTimer(clock=clock, cpu=clock)
    timer.begin_epoch()
    timer.begin_validation()
    clock.now += 5.0
    timer.end_validation()
    clock.now += 1.0
    timer.request_batch()
    timer.receive_first_batch()
    assert timer.result(trainer_of(None), 0.0)["fit_parts_s"] == pytest.approx(
        {"start_up": 1.0, "steps": 0.0, "validation": 5.0, "first_batch": 0.0, "other": 0.0}
    )


class Stream(IterableDataset):
    def __iter__(self):
        yield from range(3)


@pytest.mark.parametrize(
    ("trainer", "found"),
    [
        (trainer_of(fresh(2)), (2, OPTION)),
        (trainer_of({"a": fresh(2), "b": [fresh(1), fresh(0)]}), (2, OPTION)),
        (trainer_of(fresh(2), {"data": {"persistent_workers": False}}), (2, "data.persistent_workers=true")),
        (trainer_of(fresh(2), {"data": {}}), (2, OPTION)),
        (trainer_of(fresh(0)), (0, "")),
        (trainer_of(fresh(2, persistent_workers=True)), (0, "")),
        (trainer_of(fresh(2, Stream())), (0, "")),
        (trainer_of(fresh(2), reload_dataloaders_every_n_epochs=1), (0, "")),
        (trainer_of([[1], [2]]), (0, "")),
        (trainer_of(None), (0, "")),
    ],
)
def test_workers_are_kept_by_an_option_where_there_is_one(trainer, found) -> None:
    assert started_workers(trainer) == found


def test_an_epoch_that_starts_workers_has_a_row() -> None:
    summary = report(replace(WAITING, fit_time=STARTING), None)
    assert workers_words(summary) == f"an epoch of 8 s begins with 3 s of starting workers: {OPTION}"
    assert "epoch" not in report(WAITING, None)


def test_a_file_keeps_the_time_of_a_fit(tmp_path) -> None:
    write_measured(tmp_path, replace(WAITING, fit_time=STARTING), None)
    assert read_measured(tmp_path)[0].fit_time == STARTING


def test_the_parts_of_a_fit_are_said_where_a_tenth_of_ten_seconds_or_more_is_neither_a_step_nor_start_up() -> None:
    parts = {"start_up": 1.0, "steps": 78.0, "validation": 12.0, "first_batch": 6.0, "other": 3.0}
    words = "1.7 min: steps 78, validation 12, first batches of epochs 6, start-up 1, other 3 %"
    assert fit_words({"fit_parts_s": parts}) == words
    rounded = {"steps": 61.6, "validation": 15.6, "first_batch": 15.6, "start_up": 4.6, "other": 2.6}  # to 102 %
    words = "1.7 min: steps 60, validation 16, first batches of epochs 16, start-up 5, other 3 %"
    assert fit_words({"fit_parts_s": rounded}) == words
    assert fit_words({"fit_parts_s": {**parts, "steps": 780.0}}) == ""
    assert fit_words({"fit_parts_s": {**parts, "start_up": 780.0}}) == ""
    assert fit_words({"fit_parts_s": {part: seconds / 12 for part, seconds in parts.items()}}) == ""


@pytest.mark.parametrize("wrong", [None, 3, [], {}, {"steps": "x"}, {"steps": -1.0, "validation": 2.0}, {"steps": {}}])
def test_a_damaged_summary_has_no_words(wrong) -> None:
    assert fit_words({"fit_parts_s": wrong}) == workers_words({"epoch": wrong}) == ""
    for advice in (["x"], "\x1b[2J"):
        assert workers_words({"epoch": {"seconds": 8.0, "starting_workers_s": 3.0, "advice": advice}}) == ""


def test_the_parts_add_up_to_a_fit() -> None:
    began = time.perf_counter()
    train(Stranger(), monitor := monitoring(warmup_steps=1), data=(loader(), loader()), max_epochs=3)
    passed = time.perf_counter() - began
    parts = monitor.summary["fit_parts_s"]
    assert min(parts.values()) > 0
    assert 0.3 * passed < sum(parts.values()) < passed
    assert monitor.summary["epoch"]["seconds"] < passed / 2
    assert "starting_workers_s" not in monitor.summary["epoch"]


def start(worker: int) -> None:
    torch.set_num_threads(1)
    time.sleep(0.5)


@pytest.mark.slow
@pytest.mark.parametrize("kept", [False, True])
def test_workers_that_take_half_a_second_to_start_are_found_and_kept_ones_are_not(kept: bool, alone) -> None:
    module = stranger(training_step=lambda module: time.sleep(0.02))
    data = DataLoader(loader(80).dataset, 4, num_workers=2, worker_init_fn=start, persistent_workers=kept)
    train(module, monitor := monitoring(warmup_steps=1), data=data, max_epochs=3)
    epoch = monitor.summary["epoch"]
    assert ("starting_workers_s" in epoch) is not kept
    assert kept or 0.3 < epoch["starting_workers_s"] <= epoch["first_batch_s"]
    assert any(line.startswith("epochs  an epoch of ") for line in headline(monitor.summary)) is not kept
