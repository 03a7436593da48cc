"""Hooks on a trainer's profiler nest: each hears its own actions, and each can be removed in any order."""

from collections.abc import Callable

import lightning
import pytest
from lightning.pytorch.profilers import PassThroughProfiler, Profiler, SimpleProfiler

from batchscope._lightning import profiler_of
from batchscope.callbacks._profiler_hook import ProfilerHook, attach_profiler_hook, detach_profiler_hook


class Hearing:
    """Attaches a hook to a trainer, and notes what it hears."""

    def __init__(self, trainer: lightning.Trainer, *endings: str):
        self.heard: list[str] = []
        self.hook: ProfilerHook = attach_profiler_hook(trainer, frozenset(endings), self.note("+"), self.note("-"))

    def note(self, sign: str) -> Callable[[str], None]:
        return lambda ending: self.heard.append(sign + ending)


@pytest.fixture(params=[PassThroughProfiler, SimpleProfiler])
def trainer(request: pytest.FixtureRequest) -> lightning.Trainer:
    return lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, profiler=request.param())


def act(trainer: lightning.Trainer) -> None:
    with profiler_of(trainer).profile("[Strategy]Any.training_step"):
        pass


def test_two_hooks_both_hear_an_action(trainer: lightning.Trainer) -> None:
    first, second = Hearing(trainer, "training_step"), Hearing(trainer, "training_step", "else")
    act(trainer)
    assert first.heard == second.heard == ["+training_step", "-training_step"]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_a_hook_that_is_removed_leaves_the_others_and_the_trainers_own(
    trainer: lightning.Trainer, order: tuple[int, ...]
) -> None:
    own: Profiler = profiler_of(trainer)
    hearing = [Hearing(trainer, "training_step") for _ in range(3)]
    for removed in range(1, 4):
        detach_profiler_hook(trainer, hearing[order[removed - 1]].hook)
        act(trainer)
        assert [len(hearing[number].heard) for number in order[:removed]] == [2 * before for before in range(removed)]
        assert all(len(hearing[number].heard) == 2 * removed for number in order[removed:])
    assert profiler_of(trainer) is own
    if isinstance(own, SimpleProfiler):
        assert len(own.recorded_durations["[Strategy]Any.training_step"]) == 3


def test_a_hook_that_is_not_attached_is_not_removed(trainer: lightning.Trainer) -> None:
    gone, here = Hearing(trainer, "training_step"), Hearing(trainer, "training_step")
    for hook in (gone.hook, gone.hook, None):
        detach_profiler_hook(trainer, hook)
    act(trainer)
    assert (gone.heard, len(here.heard)) == ([], 2)


def test_a_hook_that_is_removed_within_an_action_does_not_cut_it_off(trainer: lightning.Trainer) -> None:
    inner, outer = Hearing(trainer, "training_step"), Hearing(trainer, "training_step")
    with profiler_of(trainer).profile("[Strategy]Any.training_step"):
        detach_profiler_hook(trainer, inner.hook)
    act(trainer)
    assert len(outer.heard) == 4
    assert inner.heard[0] == "+training_step"
