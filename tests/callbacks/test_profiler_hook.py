"""Hooks on a trainer's profiler nest: each hears its own actions, and each can be removed in any order."""

import itertools
from collections.abc import Callable

import lightning
import pytest
from lightning.pytorch.profilers import PassThroughProfiler, SimpleProfiler

from batchscope._lightning import profiler_of
from batchscope.callbacks._profiler_hook import ProfilerHook

ACTION = "[Strategy]Any.training_step"


class Hearing:
    """Attaches a hook to a trainer, and notes what it hears."""

    def __init__(self, trainer: lightning.Trainer, *actions: str):
        self.heard: list[str] = []
        self.hook = ProfilerHook.attach(trainer, frozenset(actions), self.note("+"), self.note("-"))

    def note(self, sign: str) -> Callable[[str], None]:
        return lambda action: self.heard.append(sign + action)


@pytest.mark.parametrize("kind", [PassThroughProfiler, SimpleProfiler])
def test_a_hook_hears_its_actions_until_it_is_removed_and_the_trainers_own_profiler_hears_all(
    kind: type[PassThroughProfiler],
) -> None:
    for order in itertools.permutations(range(3)):
        trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, profiler=kind())
        own = profiler_of(trainer)
        hearing = [Hearing(trainer, "training_step", f"else{number}") for number in range(3)]
        for removed in order:
            with profiler_of(trainer).profile(ACTION):
                pass
            hearing[removed].hook.detach(trainer)
            hearing[removed].hook.detach(trainer)  # it is not attached
        heard = [hearing[number].heard for number in order]
        assert heard == [["+training_step", "-training_step"] * times for times in (1, 2, 3)]
        assert profiler_of(trainer) is own
        if isinstance(own, SimpleProfiler):
            assert len(own.recorded_durations[ACTION]) == 3


def test_a_hook_that_is_removed_within_an_action_does_not_cut_it_off() -> None:
    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    inner, outer = Hearing(trainer, "training_step"), Hearing(trainer, "training_step")
    with profiler_of(trainer).profile(ACTION):
        inner.hook.detach(trainer)
    assert outer.heard == ["+training_step", "-training_step"]
    assert inner.heard[0] == "+training_step"
