"""A run that is stopped in any way, at any moment, and resumed ends bit-identical to one that was never stopped."""

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from lightning import LightningModule
from lightning.pytorch.callbacks import Callback, EarlyStopping, Timer
from torch import nn

from batchscope.checkpointing.callback import Checkpoints
from batchscope.options.groups import choices_of
from tests.checkpointing import support
from tests.checkpointing.support import LOAD, OUT, SAVE, STEP, TEST, VALIDATION, hang_up, interrupt, terminate
from tests.support.own_data import write_config
from tests.support.runs import EVERY_4, QUIET, SMALL, Fault, Run, assert_alike, kill_9, ranks, record, results, run
from tests.support.third_party_modules import Stranger, loader, train

# Steps 1 to 10 are the first epoch, 11 to 20 the second; every epoch has one validation of one batch. The record is
# written twice before the first step, and once after the first checkpoint. Every atomic write flushes a file and its folder.
FSYNC, REPLACE = "batchscope.files.os.fsync", "batchscope.files.os.replace"
LINK = "batchscope.checkpointing.callback.copy_checkpoint"
EACH = "callbacks.checkpoint.every_n_steps=1"
CONSTANT = "optimizer.schedule=constant"
AVERAGES = ["callbacks=weight_averaging", "callbacks.weight_averaging.decay=0.5"]
STOPS = ["callbacks=early_stopping", "callbacks.early_stopping.patience=2", "optimizer.lr=0.3", "trainer.max_epochs=20"]
OVERFITS = ["trainer.max_epochs=4", "optimizer.lr=0.3"]
IMAGES = ["data=digits", "data.num_train=76", "data.num_val=16", "data.num_test=16", "data.batch_size=8", EVERY_4]


class Case(NamedTuple):
    """A training, the fault that stops each of its processes but the last, and the options of the resumed run.

    What befalls the folder `out` before it is resumed is `meanwhile`; it is then resumed `at` its place. The resume
    `warns` in a line that begins so.
    """

    stops: list[Fault | None]
    options: list[str] = [EVERY_4]
    resumed_with: list[str] = []
    slow: bool = True
    meanwhile: Callable[[Path], object] | None = None
    at: str = "out"
    warns: str = ""
    rank: int | None = None  # the rank that is stopped, of two


def of_last(change: Callable[[Path], object]) -> Callable[[Path], object]:
    """Make a function that changes the last checkpoint of a run."""
    return lambda out: change(out / "checkpoints" / "last.ckpt")


def damaged_and_moved(out: Path) -> None:
    support.flip_a_bit(out / "checkpoints" / "last.ckpt")
    out.rename(out.with_name("there"))


LAST = "warning: out/checkpoints/last.ckpt"
IN_EPOCH_2: list[Fault | None] = [(STEP, 18, kill_9)]
RESTORE = "lightning.pytorch.trainer.connectors.checkpoint_connector._CheckpointConnector.restore_training_state"


def run_out_of_time() -> None:
    """`trainer.max_time` is over after the present step."""
    Timer.time_elapsed = lambda self, stage=None: 1e9


# Two ranks of four batches an epoch: 64 samples, 8 in each process.
SHORT = [word.replace("data.num_train=76", "data.num_train=64") for word in SMALL]
LOST = "the connection to another process of the run is lost, and the run ends"
CALLBACK = "batchscope.checkpointing.callback.Checkpoints.save"
OF_TWO_RANKS: dict[str, tuple[Fault, list[str]]] = {
    "killed in mid-epoch": ((STEP, 7, kill_9), [EVERY_4]),
    "stopped in the first step": ((STEP, 1, terminate), []),
    "stopped in an epoch's last step": ((STEP, 4, terminate), []),
    "stopped in the last step": ((STEP, 8, terminate), []),
    "stopped in a validation": ((VALIDATION, 2, terminate), []),
    "stopped at the first checkpoint": ((CALLBACK, 1, terminate), []),
    "stopped at the last checkpoint": ((CALLBACK, 3, terminate), []),  # a validation saves a checkpoint, too
    "stopped while each accumulates its own gradients": ((STEP, 2, terminate), ["trainer.accumulate_grad_batches=4"]),
}

CASES = {
    # the call at which the process is killed
    "killed before the first checkpoint": Case(
        [(STEP, 3, kill_9)], slow=False,
        warns="warning: resume: the run had ended before it wrote a checkpoint; it starts again from its first step",
    ),
    "killed in mid-epoch": Case([(STEP, 7, kill_9)]),
    "killed on an epoch's last batch": Case([(STEP, 10, kill_9)]),
    "killed between an epoch's end and its validation": Case([(VALIDATION, 1, kill_9)]),
    "killed between a validation and the best checkpoint": Case([(LINK, 1, kill_9)]),
    "killed between two epochs": Case([(STEP, 11, kill_9)]),
    "killed while the first checkpoint is written": Case([(FSYNC, 5, kill_9)]),
    "killed between the first checkpoint and its record": Case([(FSYNC, 7, kill_9)]),
    "killed while a checkpoint is written": Case([(FSYNC, 9, kill_9)], slow=False),
    "killed between a checkpoint and its name": Case([(REPLACE, 5, kill_9)]),
    "killed in the last validation": Case([(VALIDATION, 2, kill_9)]),
    "killed in the test": Case([(TEST, 1, kill_9)]),
    "killed twice in one epoch": Case([(STEP, 6, kill_9), (STEP, 6, kill_9)]),
    # what stops it
    "SIGTERM while the data load": Case([(LOAD, 1, terminate)]),
    "SIGTERM in the first step": Case([(STEP, 1, terminate)]),
    "SIGINT in an epoch's last step": Case([(STEP, 10, interrupt)]),
    "SIGINT in the last step": Case([(STEP, 20, interrupt)]),
    "SIGINT in a validation": Case([(VALIDATION, 1, interrupt)]),
    "SIGTERM while the first checkpoint is saved": Case([(SAVE, 1, terminate)]),
    "SIGHUP while a checkpoint is saved": Case([(SAVE, 2, hang_up)]),
    "SIGUSR1 in the test": Case([(TEST, 1, support.send(10))]),
    "out of time": Case(
        [(STEP, 7, run_out_of_time)], [EVERY_4, "+trainer.max_time={hours:1}"], ["trainer.max_time=null"]
    ),
    # what befalls it before it is resumed
    "its folder is moved, and its last checkpoint has a flipped bit": Case(
        IN_EPOCH_2, slow=False, meanwhile=damaged_and_moved, at="there",
        warns="warning: there/checkpoints/last.ckpt is damaged",
    ),
    "its last checkpoint is empty": Case(
        IN_EPOCH_2, meanwhile=of_last(lambda path: path.write_bytes(b"")), warns=f"{LAST} is not a whole checkpoint (0 bytes)"
    ),
    "its last checkpoint is of another model": Case(
        IN_EPOCH_2, meanwhile=of_last(partial(support.change, edit=support.of_another_model)),
        warns=f"{LAST} cannot be resumed from: its weights are of another model: model.head.bias is (7,) there and (9,) here",
    ),
    "a resume fails while it restores": Case([*IN_EPOCH_2, (RESTORE, 1, support.break_down)], slow=False),
    "it is made longer": Case([None], [CONSTANT], ["trainer.max_epochs=3"]),
    # how it trains
    "loaded to the device": Case([(STEP, 7, kill_9)], [EVERY_4, "data.pipeline=device"]),
    "loaded by workers": Case([(STEP, 11, kill_9)], [EVERY_4, "data.pipeline=workers"]),
    "validation within an epoch": Case([(STEP, 6, kill_9)], [EACH, "trainer.val_check_interval=5"]),
    "validation every second epoch": Case([(STEP, 6, kill_9)], [EACH, "+trainer.check_val_every_n_epoch=2"]),
    "no validation": Case([(STEP, 6, kill_9)], [EACH, CONSTANT, "trainer.limit_val_batches=0"]),
    "stopped while gradients accumulate for averaged weights": Case(
        [(STEP, 15, terminate)], ["trainer.accumulate_grad_batches=3", *AVERAGES], slow=False
    ),
    "killed while gradients accumulate": Case([(STEP, 6, kill_9)], [EACH, "trainer.accumulate_grad_batches=3"]),
    "short epochs": Case([(STEP, 6, kill_9)], [EACH, "trainer.limit_train_batches=7"]),
    "a number of steps": Case([(STEP, 6, kill_9)], [EACH, "trainer.max_steps=7"]),
    "clipped gradients": Case([(STEP, 6, kill_9)], [EACH, "trainer.gradient_clip_val=0.1", "optimizer=sgd"]),
    "bf16": Case([(STEP, 6, kill_9)], [EACH, "trainer.precision=bf16-mixed"]),
    "weight averaging, killed in the first epoch": Case([(STEP, 8, kill_9)], [EVERY_4, *AVERAGES]),
    "early stopping": Case([(STEP, 25, kill_9)], [EVERY_4, *STOPS, CONSTANT]),
    "compiled": Case([(STEP, 15, kill_9)], [EVERY_4, "compile=true"]),
    **{
        f"schedule {name}": Case([(STEP, 15, kill_9), (STEP, 10, kill_9)], [EVERY_4, *OVERFITS, f"optimizer.schedule={name}"])
        for name in ("constant", "cosine", "step")
    },
    **{
        f"optimizer {name}": Case([(STEP, 15, kill_9)], [EVERY_4, f"optimizer={name}"])
        for name in choices_of("optimizer")
        if name not in ("adamw", "sgd")  # of the cases above
    },
    # one of two ranks; the other one ends as well
    **{
        f"rank {rank} {when}": Case([fault], options, rank=rank)
        for when, (fault, options) in OF_TWO_RANKS.items()
        for rank in (0, 1)
    },
    # with the counting of FLOPs, which must not draw a number
    **{f"model {name}": Case([(STEP, 16, kill_9)], [*IMAGES, f"model={name}"]) for name in choices_of("model")},
}  # fmt: skip


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory, unstopped: Path) -> Callable[..., dict[str, Any]]:
    """A function that returns the results of a run that was never stopped, cached by its options."""
    results_by_options = {(1,): results(unstopped)}

    def results_of(options: list[str], count: int) -> dict[str, Any]:
        key = (count, *(word for word in options if "every_n_steps" not in word and "max_time" not in word))
        if key not in results_by_options:
            folder = tmp_path_factory.mktemp("whole")
            started = ranks(folder, *SHORT, *key[1:]) if count > 1 else [run(folder, *small(key[1:]), *key[1:], OUT)]
            assert not any(process.end() for process in started), [process.complained for process in started]
            results_by_options[key] = results(folder / "out")
        return results_by_options[key]

    return results_of


def small(options: Sequence[str]) -> list[str]:
    """The options of a small run. If a case chooses its data, drop the default data, model and throughput options."""
    replaced = ("data", "model", "+callbacks.throughput") if options[:1] == ("data=digits",) else ()
    return [word for word in SMALL if not word.startswith(replaced)]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * case.slow) for name, case in CASES.items()]
)
def test_a_stopped_run_ends_as_one_that_never_stopped(name, whole, interrupted, tmp_path):
    case, stops = CASES[name], CASES[name].stops
    if name == "compiled" and not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("torch.compile needs a C++ compiler")

    def start(*words: str, fault: Fault | None = None) -> list[Run]:
        faults = [fault] if fault else []
        if case.rank is None:
            return [run(tmp_path, *words, faults=faults)]
        return ranks(tmp_path, *words, faults={case.rank: faults})

    parent = Path() if case.rank is None else tmp_path
    line = [*small(tuple(case.options)), *case.options, OUT] if case.rank is None else [*SHORT, *case.options]
    if stops[:1] == IN_EPOCH_2:
        shutil.copytree(interrupted, tmp_path, dirs_exist_ok=True)
        line, stops = ["resume=out"], stops[1:]
    for fault in stops:
        stopped = start(*line, fault=fault)
        codes = [process.end() for process in stopped]
        status = {-9: "running", 1: "killed" if -9 in codes else "failed"}.get(
            codes[0], "finished" if case.resumed_with else "interrupted"
        )
        assert record(tmp_path / "out")["status"] == status, [process.complained for process in stopped]
        assert all(codes) or case.resumed_with
        if case.rank is not None and -9 in codes:
            assert LOST in stopped[1 - case.rank].complained
            assert case.rank == 0 or "\nresume   batchscope train resume=" in stopped[0].said
        line = [f"resume={parent / 'out'}", *case.resumed_with]
    if case.meanwhile:
        case.meanwhile(tmp_path / "out")
    resumed = start(f"resume={parent / case.at}", *case.resumed_with)
    assert not any(process.end() for process in resumed), [process.complained for process in resumed]
    assert resumed[0].complained.startswith(case.warns), resumed[0].complained
    actual, expected = results(tmp_path / case.at), whole([*case.options, *case.resumed_with], len(resumed))
    if case.resumed_with:  # it was over before, and what was logged then at its last step is there as well
        common = {
            key: [point for point in actual["curves"][key] if point in expected["curves"][key]]
            for key in actual["curves"]
        }
        actual |= {"curves": common, "table": [row for row in actual["table"] if row in expected["table"]]}
    assert_alike(actual, expected)


class Follows(LightningModule):
    """Its learning rate and its end follow the training loss; it has no validation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = nn.functional.cross_entropy(self.layer(x.flatten(1)), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.7)
        return {"optimizer": optimizer, "lr_scheduler": schedule, "monitor": "train_loss"}

    def configure_callbacks(self) -> list[Any]:
        return [EarlyStopping("train_loss", min_delta=0.05, patience=2)]


class Collects(Follows):
    """Needs at the end of an epoch the losses that it has collected in the epoch."""

    def on_train_epoch_start(self) -> None:
        self.losses: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.losses.append(super().training_step(batch, batch_idx))
        return self.losses[-1]

    def on_train_epoch_end(self) -> None:
        self.log("mean", torch.stack(self.losses).mean())


def test_a_finished_run_whose_module_collects_an_epoch_is_made_longer(tmp_path: Path) -> None:
    line = [f"model._target_={__name__}.Collects", "data._target_=tests.support.own_data.Plain"]
    run(tmp_path, *line, "trainer.accelerator=cpu", "trainer.max_epochs=1", *QUIET, "test=false", OUT, code=0)
    errors = run(tmp_path, "resume=out", *line, "trainer.max_epochs=2", code=0).complained
    warning = "Collects.on_train_epoch_end is skipped in the resumed epoch, of which no batch ran in this process: RuntimeError"
    assert errors.count(warning) == 1
    assert record(tmp_path / "out")["epochs"] == 2 and record(tmp_path / "out")["metrics"]["mean"] > 0


@pytest.mark.parametrize(
    ("words", "faults", "resumed_with"),
    [
        ([], [(f"{__name__}.Follows.training_step", 35, kill_9)], []),
        pytest.param(["trainer.max_epochs=3"], [], ["trainer.max_epochs=20"], marks=pytest.mark.slow),
    ],
    ids=["killed", "made longer"],
)
def test_a_training_that_follows_its_own_loss_is_resumed_from_the_end_of_an_epoch(
    words: list[str], faults: list[Fault], resumed_with: list[str], tmp_path: Path
) -> None:
    conf = write_config(tmp_path, "Plain")
    (conf / "model/follows.yaml").write_text(f"_target_: {__name__}.Follows\n")
    line = [f"--config-dir={conf}", "data=own", "model=follows", "trainer.accelerator=cpu", "trainer.max_epochs=20"]
    line += [*QUIET, "test=false", OUT]
    assert run(tmp_path / "stopped", *line, *words, faults=faults).end() == (-9 if faults else 0)
    targets = [f"model._target_={__name__}.Follows", "data._target_=tests.support.own_data.Plain"]
    run(tmp_path / "stopped", line[0], "resume=out", *targets, *resumed_with, code=0)
    run(tmp_path / "whole", *line, code=0)
    actual, expected = (results(tmp_path / folder / "out") for folder in ("stopped", "whole"))
    assert 3 < expected["epochs"] < 20
    assert_alike(actual, expected)


class ByHand(Stranger):
    """Updates its weights after every second of its five batches."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()


def test_a_checkpoint_is_due_after_a_step_and_after_no_batch_that_waits_for_it(tmp_path: Path, monkeypatch) -> None:
    saved: list[int] = []
    monkeypatch.setattr(Checkpoints, "save", lambda self, trainer: saved.append(trainer.fit_loop.total_batch_idx + 1))
    train(ByHand(), Checkpoints(every_n_steps=1), default_root_dir=tmp_path, max_epochs=1, enable_checkpointing=True)
    assert saved == [2, 4, 5]  # the last one at the end of the epoch


def test_a_checkpoint_is_due_once_the_minutes_are_over_since_the_last_one(tmp_path: Path, monkeypatch) -> None:
    saved: list[int] = []
    clock, save = SimpleNamespace(now=0.0), Checkpoints.save
    monkeypatch.setattr("batchscope.checkpointing.callback.time", SimpleNamespace(monotonic=lambda: clock.now))

    def save_and_tell(self: Checkpoints, trainer: Any) -> None:
        save(self, trainer)
        saved.append(trainer.global_step)

    class Minutes(Stranger):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            clock.now += 60
            return super().training_step(batch, batch_idx)

    monkeypatch.setattr(Checkpoints, "save", save_and_tell)
    options = {"default_root_dir": tmp_path, "max_epochs": 1, "enable_checkpointing": True}
    train(Minutes(), Checkpoints(every_minutes=3), data=loader(40), **options)
    assert list(dict.fromkeys(saved)) == [3, 6, 9, 10]  # the last one at the end of the epoch


class Stops(Callback):
    """Asks for the end of the training from the first batch on."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        trainer.should_stop = True


@pytest.mark.parametrize(("least", "kept"), [({}, [1]), ({"min_epochs": 2}, [5, 10]), ({"min_steps": 7}, [5, 7])])
def test_a_stop_is_kept_where_the_training_may_stop(least: Any, kept: list[int], tmp_path: Path, monkeypatch) -> None:
    saved: list[int] = []
    monkeypatch.setattr(Checkpoints, "save", lambda self, trainer: saved.append(trainer.fit_loop.total_batch_idx + 1))
    train(Stranger(), Stops(), Checkpoints(), default_root_dir=tmp_path, enable_checkpointing=True, **least)
    assert saved == kept


ASKS = "callbacks.asks._target_=tests.checkpointing.support.AsksOnce"
NO_TIME = ["trainer.max_time=null"]


@pytest.mark.parametrize(
    ("words", "faults", "resumed_with", "epochs"),
    [
        pytest.param([f"+{ASKS}"], [], [ASKS], 3, id="asked for once"),
        pytest.param(
            ["+trainer.max_time={hours:1}"],
            [(STEP, 7, run_out_of_time)],
            NO_TIME,
            4,
            id="out of time",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_stop_that_waits_for_the_least_length_still_waits_in_a_resumed_run_unless_it_has_more_time(
    words: list[str], faults: list[Fault], resumed_with: list[str], epochs: int, tmp_path: Path
) -> None:
    lengths = ["trainer.min_epochs=3", "trainer.max_epochs=4", CONSTANT, EVERY_4]
    run(tmp_path, *SMALL, OUT, *lengths, *words, faults=[*faults, (STEP, 25, kill_9)], code=-9)
    run(tmp_path, "resume=out", *resumed_with, code=0)
    assert record(tmp_path / "out")["epochs"] == epochs


def test_a_run_that_something_has_ended_is_over_where_it_is_resumed_in_its_last_validation(tmp_path: Path) -> None:
    run(tmp_path, *SMALL, OUT, f"+{ASKS}", faults=[(VALIDATION, 1, kill_9)], code=-9)
    run(tmp_path, "resume=out", ASKS, code=0)
    assert record(tmp_path / "out")["steps"] == 1


def test_a_longer_training_that_ends_at_once_by_what_had_ended_it_is_a_warning(tmp_path: Path) -> None:
    words = [CONSTANT, "+trainer.max_time={hours:1}"]
    run(tmp_path, *SMALL, OUT, *words, faults=[(STEP, 7, run_out_of_time)], code=0)
    resumed = run(tmp_path, "resume=out", "trainer.max_epochs=3", code=0)
    assert "warning: resume: nothing was trained: what had ended the run ends it still: " in resumed.complained
    assert record(tmp_path / "out")["steps"] == 7


class TwoByHand(Stranger):
    """One of its optimizers steps in every batch, and the other in none."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.manual_backward(nn.functional.mse_loss(self.layer(x) + self.slow(x), y))
        self.optimizers()[0].step()
        self.optimizers()[0].zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(layer.parameters(), lr=0.01) for layer in (self.layer, self.slow)]


class SavesFirst(Callback):
    """Saves as on a signal, before the Checkpoints callback has counted the batch."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            trainer.checkpoint_callbacks[0].save(trainer)
            support.break_down()


@pytest.mark.parametrize("module", [ByHand(), TwoByHand()])
def test_gradients_that_a_module_accumulates_by_hand_are_kept(module: Stranger, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the training broke"):
        train(module, SavesFirst(), Checkpoints(), default_root_dir=tmp_path, enable_checkpointing=True)
    (gradients,) = torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)["loop_state"]["gradients"]
    assert_alike(gradients, {name: p.grad for name, p in module.named_parameters() if p.grad is not None})
    assert gradients
