"""Hooks on a trainer's profiler nest: each hears its own actions, and each can be removed in any order."""

from collections.abc import Callable

import lightning
import pytest
from lightning.pytorch.profilers import PassThroughProfiler, SimpleProfiler

from batchscope._lightning import profiler_of
from batchscope.callbacks._profiler_hook import ProfilerHook


class Hearing:
    """Attaches a hook to a trainer, and notes what it hears."""

    def __init__(self, trainer: lightning.Trainer, *actions: str):
        self.heard: list[str] = []
        self.hook = ProfilerHook.attach(trainer, frozenset(actions), self.note("+"), self.note("-"))

    def note(self, sign: str) -> Callable[[str], None]:
        return lambda action: self.heard.append(sign + action)


@pytest.mark.parametrize("kind", [PassThroughProfiler, SimpleProfiler])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_a_hook_hears_its_actions_until_it_is_removed_and_the_trainers_own_profiler_hears_all(
    kind: type[PassThroughProfiler], order: tuple[int, ...]
) -> None:
    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, profiler=kind())
    own = profiler_of(trainer)
    hearing = [Hearing(trainer, "training_step", f"else{number}") for number in range(3)]
    for removed in order:
        with profiler_of(trainer).profile("[Strategy]Any.training_step"):
            pass
        hearing[removed].hook.detach(trainer)
        hearing[removed].hook.detach(trainer)  # it is not attached
    heard = [len(each.heard) for each in hearing]
    assert [heard[number] for number in order] == [2, 4, 6]
    assert hearing[order[0]].heard == ["+training_step", "-training_step"]
    assert profiler_of(trainer) is own
    if isinstance(own, SimpleProfiler):
        assert len(own.recorded_durations["[Strategy]Any.training_step"]) == 3


def test_a_hook_that_is_removed_within_an_action_does_not_cut_it_off() -> None:
    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    inner, outer = Hearing(trainer, "training_step"), Hearing(trainer, "training_step")
    with profiler_of(trainer).profile("[Strategy]Any.training_step"):
        inner.hook.detach(trainer)
    assert outer.heard == ["+training_step", "-training_step"]
    assert inner.heard[0] == "+training_step"
