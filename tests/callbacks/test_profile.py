"""OperationProfiler in other projects: its explanation of a step; and hooks on a trainer's own profiler."""

import json
import time
from contextlib import contextmanager
from functools import partial

import lightning
import pytest
from lightning.pytorch.callbacks import Callback, Timer
from lightning.pytorch.profilers import PassThroughProfiler, SimpleProfiler
from torch import nn

from batchscope._lightning import profiler_of
from batchscope.callbacks._profiler_hook import ProfilerHook
from batchscope.callbacks.profile import OperationProfiler
from batchscope.errors import UserError
from batchscope.records.explanation import FILE, TRACE
from tests.callbacks.support import monitoring, slow, stranger
from tests.support.devices import CPU
from tests.support.third_party_modules import Stranger, train


def monitor(**options):
    return monitoring(**{"warmup_steps": 1, "record_operations": True, **options})


def profiler(**options) -> OperationProfiler:
    return OperationProfiler(**{"steps": 2, "stop": True, "verbose": False, **options})


def test_every_operation_has_its_part_module_work_time_and_lower_bound(calibrated) -> None:
    calibrated[0] = CPU
    train(slow(), monitor(), callback := profiler(), max_epochs=10)
    step = callback.explanation
    (forward,) = [cost for cost in step.operations if cost.name == "aten.addmm"]
    assert (forward.part, forward.module, forward.dtype, forward.calls) == ("forward", "layer", "fp32", 1)
    assert (forward.flops, forward.bytes) == (2 * 4 * 4 * 1, 4 * (4 * 4 + 4 + 1 + 4))
    assert forward.seconds > 0
    assert forward.floor_seconds == pytest.approx(1e-6)  # a launch takes longer than its work
    assert {cost.part for cost in step.operations if cost.name == "aten.mm"} == {"backward"}
    assert "optimizer" in {cost.part for cost in step.operations}
    assert (step.device, step.batch_size, step.steps, step.is_timed, step.trace_steps) == ("cpu", 4, 2, True, 3)
    assert step.step_seconds >= 0.005
    assert step.outside_seconds >= 0.004


def test_the_training_ends_after_the_trace_and_the_tables_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    # Large layers: rows of less than 0.5 % are left out, and a busy machine waits for data.
    host = {"training_step": lambda module: time.sleep(0.005)}  # more than the operations of a busy moment
    module = stranger(nn.Linear(4, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 1), **host)
    trainer = train(module, timed := monitor(), callback := profiler(verbose=True), max_epochs=10)
    # The warm-up, in which operations are recorded; timed updates; a trace, of which the first update is not kept.
    assert trainer.global_step == callback.updates(timed) == 4 + 2 + 4
    assert callback.explanation.bottleneck == timed.summary["bottleneck"]  # one verdict for one run
    content = json.loads(json.dumps(callback.explanation.to_dict()))
    assert json.loads(callback.files[FILE]) == content and set(callback.files) == {FILE, TRACE}
    text = capsys.readouterr().out
    assert text.startswith("\nSpending, batches of 4, 32-true, on cpu (")
    names = ("layer", "optimizer", "waiting for data", "between batches", "host: Python, autograd", "the step")
    assert [name for name in ("a step takes ", *names) if f"\n{name}" not in text] == []


def test_a_training_that_ends_early_is_explained_as_far_as_it_went_and_what_is_missing_is_a_note() -> None:
    train(Stranger(), monitor(), callback := profiler(), max_steps=6)
    step = callback.explanation
    assert step.operations and step.total.floor_seconds == 0
    assert (step.trace_steps, set(callback.files)) == (0, {FILE})
    assert "there is no trace: the training ended before it" in step.notes
    assert any("no lower bounds" in note for note in step.notes)
    with pytest.warns(UserWarning, match="explains no step: of 5 updates none came after the warm-up of 10"):
        train(Stranger(), monitor(warmup_steps=10), profiler(), max_epochs=1)


def test_without_a_monitor_before_it_it_is_refused() -> None:
    with pytest.raises(UserError, match="OperationProfiler: needs a ThroughputMonitor before it"):
        train(Stranger(), profiler(), monitor())


# --- hooks on the profiler --------------------------------------------------------------------------------------------

ACTION = "[Strategy]Any.training_step"


def hearing(trainer: lightning.Trainer, *actions: str):
    """A hook on a trainer, and the list of the calls that it gets."""
    calls = []
    listeners = {name: (partial(calls.append, f"+{name}"), partial(calls.append, f"-{name}")) for name in actions}
    return ProfilerHook(trainer, listeners), calls


@pytest.mark.parametrize("kind", [PassThroughProfiler, SimpleProfiler])
def test_a_hook_hears_its_actions_until_it_is_removed_and_the_trainers_own_profiler_hears_all(kind) -> None:
    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, profiler=kind())
    original = profiler_of(trainer)
    hook, calls = hearing(trainer, "training_step", "else")
    for _ in range(2):
        with profiler_of(trainer).profile(ACTION), profiler_of(trainer).profile("[Strategy]Any.backward"):
            pass
        hook.detach()  # the second call finds no attached hook
        assert profiler_of(trainer) is original
    assert calls == ["+training_step", "-training_step"]
    if isinstance(original, SimpleProfiler):
        assert len(original.recorded_durations[ACTION]) == 2


class Users(Callback):
    """A user's own, which defines no hook."""


@pytest.mark.parametrize(("profiler", "skipped"), [(None, 5), ("simple", 0)])
def test_empty_hooks_of_lightnings_own_callbacks_are_skipped_while_no_other_profiler_listens(profiler, skipped) -> None:
    timer, user_callback = Timer(), Users()  # of the six hooks of a batch, a Timer defines the last one
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, profiler=profiler, callbacks=[timer, user_callback]
    )
    hook, _ = hearing(trainer)
    assert [name for name in vars(timer) if name.startswith("on_") and not callable(getattr(timer, name))] == [
        "on_train_batch_start", "on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad"
    ][:skipped]  # fmt: skip
    assert not any(name.startswith("on_") for name in vars(user_callback))
    timer.on_before_backward = print  # a hook that is set meanwhile stays
    hook.detach()
    assert [name for name in vars(timer) if name.startswith("on_")] == ["on_before_backward"]


class Ranges(SimpleProfiler):
    """Has a `profile` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.actions: list[str] = []

    @contextmanager
    def profile(self, action_name: str):
        self.actions.append(action_name)
        with super().profile(action_name):
            yield action_name


class Alone(Ranges):
    """Its `profile` calls neither `start` nor `stop`."""

    @contextmanager
    def profile(self, action_name: str):
        self.actions.append(action_name)
        yield action_name


@pytest.mark.parametrize(("kind", "durations"), [(Ranges, 1), (Alone, 0)])
def test_a_profilers_own_profile_is_called_and_heard_once(kind: type[Ranges], durations: int) -> None:
    original = kind()
    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, profiler=original)
    hooks = [hearing(trainer, "training_step") for _ in range(2)]
    with profiler_of(trainer).profile(ACTION):
        pass
    assert original.actions == [ACTION] and len(original.recorded_durations[ACTION]) == durations
    assert [calls for _, calls in hooks] == [["+training_step", "-training_step"]] * 2
    for hook, _ in hooks:
        hook.detach()
    assert profiler_of(trainer) is original


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_hooks_end_in_any_order_and_leave_the_trainers_own_profiler(order: tuple[int, int]) -> None:
    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    original, hooks = profiler_of(trainer), [hearing(trainer, "training_step") for _ in range(2)]
    hooks[order[0]][0].detach()
    with profiler_of(trainer).profile(ACTION):
        pass
    profiler_of(trainer).start(ACTION)  # as Lightning announces that a batch is asked for
    profiler_of(trainer).stop(ACTION)
    assert [len(calls) for _, calls in hooks] == [0 if index == order[0] else 4 for index in range(2)]
    hooks[order[1]][0].detach()
    assert profiler_of(trainer) is original


def test_a_second_hook_leaves_the_first_one_its_actions() -> None:
    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    actions = ("training_step", "backward")
    hooks = [hearing(trainer, action) for action in actions]
    for action in actions:
        with profiler_of(trainer).profile(f"[Strategy]Any.{action}"):
            pass
    assert [calls for _, calls in hooks] == [[f"+{action}", f"-{action}"] for action in actions]
