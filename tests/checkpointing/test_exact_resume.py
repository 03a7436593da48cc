"""A run that is stopped in any way, at any moment, and resumed ends bit-identical to one that was never stopped."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from lightning.pytorch.callbacks import Timer

from batchscope.options.groups import choices_of
from tests.checkpointing.support import LOAD, OUT, SAVE, STEP, TEST, VALIDATION, hang_up, interrupt, send, terminate
from tests.support.runs import EVERY_4, SMALL, Fault, assert_alike, kill_9, last, ranks, record, results, run

# Steps 1 to 10 are the first epoch, 11 to 20 the second; every epoch has one validation of one batch. The record is
# written twice before the first step, and once after the first checkpoint. Every atomic write flushes a file and its folder.
FSYNC, REPLACE = "batchscope.files.os.fsync", "batchscope.files.os.replace"
LINK = "batchscope.checkpointing.callback.link_checkpoint"
USR1 = send(10)
EACH = "callbacks.checkpoint.every_n_steps=1"
CONSTANT = "optimizer.schedule=constant"
AVERAGES = ["callbacks=weight_averaging", "callbacks.weight_averaging.decay=0.5"]
STOPS = ["callbacks=early_stopping", "callbacks.early_stopping.patience=2", "optimizer.lr=0.3", "trainer.max_epochs=20"]
OVERFITS = ["trainer.max_epochs=4", "optimizer.lr=0.3", "optimizer.patience=0"]  # so that plateau lowers the rate


class Case(NamedTuple):
    """A training, how each of its processes but the last is stopped, and with what options it is then resumed."""

    stops: list[Fault]
    options: list[str] = [EVERY_4]
    resumed_with: list[str] = []
    slow: bool = True


def run_out_of_time() -> None:
    """`trainer.max_time` is over after the present step."""
    Timer.time_elapsed = lambda self, stage=None: 1e9


CASES = {
    # when it is killed
    "killed before the first checkpoint": Case([(STEP, 3, kill_9)]),
    "killed in mid-epoch": Case([(STEP, 7, kill_9)], slow=False),
    "killed on an epoch's last batch": Case([(STEP, 10, kill_9)]),
    "killed between an epoch's end and its validation": Case([(VALIDATION, 1, kill_9)], slow=False),
    "killed between a validation and the best checkpoint": Case([(LINK, 1, kill_9)]),
    "killed between two epochs": Case([(STEP, 11, kill_9)]),
    "killed while the first checkpoint is written": Case([(FSYNC, 5, kill_9)]),
    "killed between the first checkpoint and its record": Case([(FSYNC, 7, kill_9)]),
    "killed while a checkpoint is written": Case([(FSYNC, 9, kill_9)], slow=False),
    "killed between a checkpoint and its name": Case([(REPLACE, 5, kill_9)]),
    "killed in the last validation": Case([(VALIDATION, 2, kill_9)]),
    "killed in the test": Case([(TEST, 1, kill_9)]),
    "killed twice in one epoch": Case([(STEP, 6, kill_9), (STEP, 6, kill_9)], slow=False),
    # what stops it
    "SIGTERM while the data load": Case([(LOAD, 1, terminate)]),
    "SIGTERM in the first step": Case([(STEP, 1, terminate)]),
    "SIGINT in an epoch's last step": Case([(STEP, 10, interrupt)]),
    "SIGINT in the last step": Case([(STEP, 20, interrupt)]),
    "SIGINT in a validation": Case([(VALIDATION, 1, interrupt)], slow=False),
    "SIGTERM while the first checkpoint is saved": Case([(SAVE, 1, terminate)]),
    "SIGHUP while a checkpoint is saved": Case([(SAVE, 2, hang_up)]),
    "SIGUSR1 in the test": Case([(TEST, 1, USR1)]),
    "out of time": Case(
        [(STEP, 7, run_out_of_time)], [EVERY_4, "+trainer.max_time={hours:1}"], ["trainer.max_time=null"], slow=False
    ),
    # how it trains
    "loaded to the device": Case([(STEP, 7, kill_9)], [EVERY_4, "data.pipeline=device"]),
    "loaded by workers": Case([(STEP, 11, kill_9)], [EVERY_4, "data.pipeline=workers"]),
    "validation within an epoch": Case([(STEP, 6, kill_9)], [EACH, "trainer.val_check_interval=5"]),
    "validation every second epoch": Case([(STEP, 6, kill_9)], [EACH, "+trainer.check_val_every_n_epoch=2"]),
    "no validation": Case([(STEP, 6, kill_9)], [EACH, CONSTANT, "trainer.limit_val_batches=0"]),
    "stopped while gradients accumulate": Case([(STEP, 5, terminate)], ["trainer.accumulate_grad_batches=3"], slow=False),
    "killed while gradients accumulate": Case([(STEP, 6, kill_9)], [EACH, "trainer.accumulate_grad_batches=3"]),
    "short epochs": Case([(STEP, 6, kill_9)], [EACH, "trainer.limit_train_batches=7"]),
    "a number of steps": Case([(STEP, 6, kill_9)], [EACH, "trainer.max_steps=7"]),
    "clipped gradients": Case([(STEP, 6, kill_9)], [EACH, "trainer.gradient_clip_val=0.1", "optimizer=sgd"]),
    "bf16": Case([(STEP, 6, kill_9)], [EACH, "trainer.precision=bf16-mixed"]),
    "weight averaging": Case([(STEP, 15, kill_9)], [EVERY_4, *AVERAGES], slow=False),
    "weight averaging, killed in the first epoch": Case([(STEP, 8, kill_9)], [EVERY_4, *AVERAGES]),
    "early stopping": Case([(STEP, 25, kill_9)], [EVERY_4, *STOPS, CONSTANT]),
    "compiled": Case([(STEP, 15, kill_9)], [EVERY_4, "compile=true"]),
    **{
        f"schedule {name}": Case([(STEP, 15, kill_9), (STEP, 10, kill_9)], [EVERY_4, *OVERFITS, f"optimizer.schedule={name}"])
        for name in ("constant", "cosine", "step", "plateau")
    },
    **{
        f"optimizer {name}": Case([(STEP, 15, kill_9)], [EVERY_4, f"optimizer={name}"])
        for name in choices_of("optimizer")
        if name not in ("adamw", "sgd")  # of the cases above
    },
}  # fmt: skip


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """The results of a run with some options that was never stopped; runs with the same options are one."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}

    def results_of(options: list[str]) -> dict[str, Any]:
        kept = [option for option in options if "every_n_steps" not in option and "max_time" not in option]
        if (key := tuple(kept)) not in found:
            folder = tmp_path_factory.mktemp("whole")
            done = run(folder, *SMALL, *kept, OUT)
            assert done.end() == 0, done.complained
            found[key] = results(folder / "out")
        return found[key]

    return results_of


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * case.slow) for name, case in CASES.items()]
)
def test_a_stopped_run_ends_as_one_that_never_stopped(
    name: str, whole: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    case = CASES[name]
    if name == "compiled" and not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("torch.compile needs a C++ compiler")
    line = [*SMALL, *case.options, OUT]
    for fault in case.stops:
        stopped = run(tmp_path, *line, faults=[fault])
        killed = stopped.end() == -9
        assert record(tmp_path / "out")["status"] == (
            "running" if killed else "finished" if case.resumed_with else "interrupted"
        ), stopped.complained
        line = ["resume=out", *case.resumed_with]
    done = run(tmp_path, *line)
    assert done.end() == 0, done.complained
    assert_alike(results(tmp_path / "out"), whole(case.options))


@pytest.mark.slow
@pytest.mark.parametrize("model", choices_of("model"))
def test_every_model_is_resumed_exactly(model: str, tmp_path: Path) -> None:
    images = ["data=digits", f"data.root={tmp_path}", "data.num_train=76", "data.num_val=16", "data.num_test=16"]
    line = [word for word in SMALL if not word.startswith(("model", "data")) and "flops_per_sample" not in word]
    line += [*images, "data.batch_size=8", f"model={model}", EVERY_4, OUT]  # counting FLOPs must not draw a number
    assert run(tmp_path / "whole", *line).end() == 0
    assert run(tmp_path / "killed", *line, faults=[(STEP, 16, kill_9)]).end() == -9
    assert run(tmp_path / "killed", "resume=out", f"data.root={tmp_path}").end() == 0
    assert_alike(results(tmp_path / "killed" / "out"), results(tmp_path / "whole" / "out"))


# Two ranks of four batches an epoch: 64 samples, 8 in each process.
SHORT = [word.replace("data.num_train=76", "data.num_train=64") for word in SMALL]
ACCUMULATE = "trainer.accumulate_grad_batches=4"
CALLBACK = "batchscope.checkpointing.callback.Checkpoints.save"
OF_TWO_RANKS = {
    "in the first step": ((STEP, 1), []),
    "in an epoch's last step": ((STEP, 4), []),
    "in the last step": ((STEP, 8), []),
    "in a validation": ((VALIDATION, 2), []),
    "at the first checkpoint": ((CALLBACK, 1), []),
    "at the last checkpoint": ((CALLBACK, 2), []),
    "while each rank accumulates its own gradients": ((STEP, 2), [ACCUMULATE]),
}


@pytest.fixture(scope="session")
def whole_of_two(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[str]], dict[str, Any]]:
    found: dict[tuple[str, ...], dict[str, Any]] = {}

    def results_of(options: list[str]) -> dict[str, Any]:
        if (key := tuple(options)) not in found:
            folder = tmp_path_factory.mktemp("whole")
            assert [one.end() for one in ranks(folder, *SHORT, *options)] == [0, 0]
            found[key] = results(folder / "out")
        return found[key]

    return results_of


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (not options)) for n, (_, options) in OF_TWO_RANKS.items()]
)
def test_two_ranks_of_which_one_gets_a_signal_are_resumed_to_the_same_end(
    name: str, rank: int, tmp_path: Path, whole_of_two: Callable[[list[str]], dict[str, Any]]
) -> None:
    (what, count), options = OF_TWO_RANKS[name]
    both = ranks(tmp_path, *SHORT, *options, faults={rank: [(what, count, terminate)]})
    assert [one.end() for one in both] == [143, 143], [one.complained for one in both]
    assert record(tmp_path / "out")["status"] == "interrupted"
    if options:
        own = last(tmp_path / "out")["loop_state"]["gradients"]
        assert not all(own[0][name].equal(own[1][name]) for name in own[0]), "no gradients were accumulated"
    assert [one.end() for one in ranks(tmp_path, f"resume={tmp_path / 'out'}")] == [0, 0]
    assert_alike(results(tmp_path / "out"), whole_of_two(options))
