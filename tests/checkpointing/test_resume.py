"""`resume=`: which run is resumed, which options may change, from which checkpoint; a refused resume changes nothing."""

import json
import subprocess
from collections.abc import Callable, Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning import LightningModule

from batchscope.checkpointing import resume
from batchscope.checkpointing.checkpoint_file import load_checkpoint
from batchscope.checkpointing.resume_point import check_resumable, find_resume_point
from batchscope.training.build import build, build_optimizer
from batchscope.training.task import Task
from tests.checkpointing.support import OUT, STEP, TEST, change, of_another_model, other_data, refused, terminate
from tests.support.command_lines import refusal
from tests.support.runs import EVERY_4, SMALL, Fault, kill_9, record, run
from tests.support.synthetic_runs import change_record, write_run


def test_a_run_that_was_stopped_in_its_test_keeps_what_its_training_has_measured(tmp_path: Path) -> None:
    run(tmp_path, *SMALL, OUT, faults=[(TEST, 1, terminate)], code=143)
    stopped = record(tmp_path / "out")
    change_record(tmp_path / "out", hardware=stopped["hardware"] | {"device_name": "A GPU"}, versions={"torch": "0"})
    before = record(tmp_path / "out")
    assert before["throughput"]["step_ms_median"] > 0
    with resume.lock_run_dir(tmp_path / "out"):
        assert refused(run(tmp_path, "resume=out")) == "error: resume: out is being trained right now"
    resumed = run(tmp_path, "resume=out", code=0)
    after = record(tmp_path / "out")
    assert "test/loss" in after["metrics"] and "unknown" not in resumed.said
    assert all(after[key] == before[key] for key in ("throughput", "fit_seconds", "hardware", "versions"))


@pytest.mark.slow
def test_a_wait_is_recorded_also_where_nothing_is_left_to_train(tmp_path: Path) -> None:
    waits = ["callbacks=wait_until_quiet", "callbacks.wait_until_quiet.minutes=0.01"]
    run(tmp_path, *SMALL, OUT, *waits, faults=[(TEST, 1, terminate)], code=143)
    run(tmp_path, "resume=out", code=0)
    assert record(tmp_path / "out")["waiting_seconds"] >= 0.6


OVER = "there is nothing to resume"
RANK_1 = {"LOCAL_RANK": "1", "BATCHSCOPE_FIRST_last": "outputs/runs/mine"}


def test_a_finished_run_says_so_and_last_is_the_newest_or_that_of_the_first_rank(unstopped, tmp_path) -> None:
    run_record = record(unstopped)
    for name, day in (("outputs/runs/latest", 2), ("outputs/runs/mine", 1), ("timed", 3)):
        run_record["started"] = f"2026-01-0{day}"
        run_record["config"]["trainer"]["max_time"] = {"hours": 1} if name == "timed" else None
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "run.json").write_text(json.dumps(run_record))
    answers = {
        "timed": f"timed has finished; {OVER}; a longer trainer.max_time, or trainer.max_time=null, may continue it\n",
        "last": f"outputs/runs/latest has finished; {OVER}\n",
    }
    for name, line in answers.items():
        process = run(tmp_path, f"resume={name}")
        assert (process.end(), process.said) == (0, line), process.complained
    assert record(tmp_path / "timed") == run_record
    assert run(tmp_path, "resume=last", environ=RANK_1).said == f"outputs/runs/mine has finished; {OVER}\n"


def test_every_launched_rank_resumes_what_is_the_newest_run_to_the_first(tmp_path, monkeypatch) -> None:
    """Another run may begin before a rank looks for the newest."""
    monkeypatch.chdir(tmp_path)
    store_values: dict[str, bytes] = {}
    store = SimpleNamespace(set=lambda key, text: store_values.update({key: text.encode()}), get=store_values.get)
    monkeypatch.setattr("batchscope.distributed.rendezvous._rendezvous_store", lambda rank: store)
    for name, rank in (("mine", "0"), ("newer", "1")):
        write_run(tmp_path / "outputs" / "runs" / name, started=f"2026-01-0{rank}")
        for key, value in {"TORCHELASTIC_RUN_ID": "test", "WORLD_SIZE": "2", "RANK": rank}.items():
            monkeypatch.setenv(key, value)
        assert resume.split_resume_override(["resume=last"])[0] == Path("outputs/runs/mine")


def test_last_is_the_newest_run_whose_record_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "outputs" / "runs" / "older", started="2026-01-02T00:00:00+00:00")
    torn = tmp_path / "outputs" / "runs" / "newer" / "run.json"
    torn.parent.mkdir()
    torn.write_text('{"schema"')
    assert resume.newest_run_folder("resume") == Path("outputs/runs/older")


def test_last_is_the_newest_run_however_deep_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, day in (("older", 1), ("day/newest", 3), ("day/other", 2)):
        write_run(Path("outputs/runs", name), started=f"2026-01-0{day}T00:00:00+00:00")
    assert resume.newest_run_folder("resume") == Path("outputs/runs/day/newest")


def test_last_is_no_run_that_is_hidden_or_was_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for day, name in enumerate(("kept", "repeated.aside", "repeated.aside-2", ".submitit"), 1):
        write_run(Path("outputs/runs", name), started=f"2026-01-0{day}T00:00:00+00:00")
    assert resume.newest_run_folder("resume") == Path("outputs/runs/kept")


def test_a_checkpoint_in_the_place_of_a_run_is_answered_with_its_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "mine")
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "last.ckpt").touch()
    for name in ("checkpoints", "checkpoints/last.ckpt"):
        message = refusal(resume.run_folder, str(folder / name), "resume")
        assert message.endswith(f"(no run.json in it); the run is {folder}")


def test_a_finished_run_goes_on_to_a_longer_least_and_its_test_has_a_command_of_its_own(unstopped: Path) -> None:
    run_record = record(unstopped)
    for key, trains in {"min_epochs": True, "min_steps": True, "limit_test_batches": False}.items():
        config = {**run_record["config"], "trainer": {**run_record["config"]["trainer"], key: 30}}
        assert resume.continues_training(config, run_record) is trains
    message = resume.nothing_to_resume(Path("out"), run_record, config)
    line = "batchscope evaluate ckpt=out/checkpoints/best.ckpt trainer.limit_test_batches=30"
    assert message == f"out has finished; {OVER}; to test it, write {line}"
    assert resume.nothing_to_resume(Path("out"), run_record, {**config, "test": False}) == f"out has finished; {OVER}"


def test_a_rate_stays_where_the_few_steps_that_follow_tell_none(finished: Path) -> None:
    before = record(finished / "out")
    run(finished, "resume=out", "trainer.max_epochs=3", "trainer.max_steps=22", code=0)
    after = record(finished / "out")
    assert (before["steps"], after["steps"]) == (20, 22)
    assert after["throughput"] == before["throughput"] and "step_ms_median" in before["throughput"]
    assert after["fit_seconds"] > before["fit_seconds"]


def test_a_run_that_is_made_longer_has_no_metric_of_its_shorter_self(tmp_path: Path) -> None:
    run(tmp_path, *SMALL, OUT, "optimizer.schedule=constant", "trainer.limit_val_batches=0", code=0)
    assert "test/loss" in record(tmp_path / "out")["metrics"]
    run(tmp_path, "resume=out", "trainer.max_epochs=3", "test=false", code=0)
    after = record(tmp_path / "out")
    assert after["steps"] == 30
    assert "test/loss" not in after["metrics"] and "test" not in after["evaluated"]


def test_a_run_that_is_made_longer_by_epochs_without_a_validation_says_what_its_last_one_was_of(tmp_path: Path) -> None:
    every_2 = "+trainer.check_val_every_n_epoch=2"
    run(tmp_path, *SMALL, OUT, "optimizer.schedule=constant", every_2, "test=false", code=0)
    run(tmp_path, "resume=out", "trainer.max_epochs=3", code=0)
    after = record(tmp_path / "out")
    assert "val/loss" in after["metrics"] and after["evaluated"]["val"] == 16


MAY_CHANGE = [
    *("trainer.accelerator=auto", "data.pipeline=device", "callbacks.curves.every_n_steps=2", "callbacks.device=null"),
    *("test=false", "callbacks.checkpoint.every_minutes=1", "callbacks.nonfinite=null", "compile=true"),
    *("+trainer.profiler=simple", "++trainer.max_time={hours:1}", "logger=null", "~callbacks.curves"),
    "+trainer.check_val_every_n_epoch=1",  # as without it
]
MAY_NOT = {
    "model=lstm_cell": "resume: model.",
    "data.batch_size=16": "resume: data.batch_size is 8 in the run, and 16 would change the result",
    "seed=1": "resume: seed is 0 in the run, and 1 would change the result",
    "optimizer.lr_scaling=linear": "resume: optimizer.lr_scaling is none in the run, and linear would change the result",
    "+trainer.check_val_every_n_epoch=null": "resume: trainer.check_val_every_n_epoch is 1 in the run, and None would change the result",
    "trainer.precision=bf16-mixed": "resume: trainer.precision is 32-true",
    "trainer.max_epochs=3": "resume: trainer.max_epochs is 2 in the run, and 3 would change the learning rate: optimizer.schedule=one_cycle ends",
    "modle=cnn": "modle: no such option. Did you mean 'model'?",
}


@pytest.mark.parametrize("option", [*MAY_CHANGE, *MAY_NOT])
def test_where_and_how_a_run_is_trained_and_watched_may_change_and_what_changes_the_result_may_not(option, interrupted):
    resumed = (record(interrupted / "out"), interrupted / "out", [option])
    if option in MAY_CHANGE:
        assert resume.config_to_resume(*resumed)["resume"] == str(interrupted / "out")
    else:
        assert MAY_NOT[option] in refusal(resume.config_to_resume, *resumed)


def test_a_metric_that_no_validation_has_measured_is_corrected_and_the_run_goes_on(tmp_path: Path) -> None:
    stop = ["callbacks=early_stopping", "callbacks.early_stopping.monitor=val/los"]
    overrides = ["callbacks.checkpoint.monitor=val/accc", "callbacks.checkpoint.mode=max"]
    first = run(tmp_path, *SMALL, OUT, *stop, *overrides)
    assert "Did you mean 'val/acc'?" in refused(first)
    assert first.said.endswith("kept     out/checkpoints/last.ckpt\nresume   batchscope train resume=out\n")
    second = run(tmp_path, "resume=out", "callbacks.checkpoint.monitor=val/acc")
    assert "Early stopping conditioned on metric `val/los`" in refused(second)
    assert "\nkept     out/checkpoints/last.ckpt\n" in second.said
    options = [EVERY_4, "callbacks.checkpoint.monitor=val/acc", "callbacks.early_stopping.monitor=val/loss"]
    run(tmp_path, "resume=out", *options, faults=[(STEP, 8, kill_9)], code=-9)
    refuses(tmp_path, "resume: callbacks.early_stopping.mode is min", "callbacks.early_stopping.mode=max")
    run(tmp_path, "resume=out", code=0)
    after = record(tmp_path / "out")
    assert {*after["checkpoints"]} == {"last", "best"} and after["steps"] == 20


def test_a_lightning_module_whose_schedule_is_its_own_may_train_longer(interrupted: Path) -> None:
    run_record = record(interrupted / "out")
    run_record["model"]["lightning_module"] = True
    assert resume.config_to_resume(run_record, Path("out"), ["trainer.max_epochs=3"])["trainer"]["max_epochs"] == 3


def test_a_target_that_callbacks_have_taken_over_may_not_change(interrupted: Path) -> None:
    run_record = record(interrupted / "out")
    run_record["config"]["target"] = 0.9
    message = refusal(resume.config_to_resume, run_record, interrupted / "out", ["target=0.8"])
    assert message.startswith("resume: target is 0.9 in the run, and 0.8 would change the result")


# --- the last valid checkpoint ---------------------------------------------------------------------------------------

CHECKPOINTS = Path("out", "checkpoints")
LAST, BEST = CHECKPOINTS / "last.ckpt", CHECKPOINTS / "best.ckpt"
ANY = LightningModule()
ANY.strict_loading = False  # this module has no weights, and loads any


def test_a_checkpoint_says_whether_its_epoch_is_over(unstopped: Path, interrupted: Path) -> None:
    assert find_resume_point(ANY, interrupted / "out").is_within_epoch
    assert not find_resume_point(ANY, unstopped).is_within_epoch


def refuses(folder: Path, reason: str, *options: str, faults: Sequence[Fault] = ()) -> str:
    """Assert that a resume of `out` is refused in one line that begins with the reason, and changes no file."""
    before = {path: path.read_bytes() for path in (folder / "out").rglob("*") if path.is_file()}
    line = refused(run(folder, "resume=out", *options, faults=faults))
    assert line.startswith(f"error: {reason}"), line
    assert {path: path.read_bytes() for path in (folder / "out").rglob("*") if path.is_file()} == before
    return line


GONE = "resume: the run has written checkpoints/last.ckpt, and it is gone; put it back, or start another run"
INVALID = "resume: no checkpoint is valid, and nothing was changed: "
# A shell command that changes the checkpoints, and the message of the resume.
REFUSALS = {
    ": > last.ckpt; : > best.ckpt": f"{INVALID}{LAST} is not a whole checkpoint (0 bytes)",
    "rm *": GONE,
    "mv $PWD ../unmounted": GONE,
    "rm -r $PWD; touch $PWD": GONE,
}


@pytest.mark.parametrize("command", REFUSALS)
def test_without_a_checkpoint_that_is_valid_no_point_is_found(command: str, killed: Path, monkeypatch) -> None:
    subprocess.run(command, shell=True, cwd=killed / CHECKPOINTS, check=True)
    monkeypatch.chdir(killed)
    line = refusal(find_resume_point, ANY, Path("out"))
    assert line.startswith(REFUSALS[command])
    assert (str(BEST) in line) is (command.count(": >") == 2)


def test_a_run_that_cannot_continue_is_one_line_and_nothing_is_trained_or_changed(killed: Path) -> None:
    setup = ("batchscope.data.datamodule.TensorDataModule.setup", 1, other_data)
    changed = "resume: the data have changed: their fingerprint is 0123456789abcdef, and was "
    refuses(killed, changed, faults=[setup])
    monitor = "callbacks.checkpoint.monitor"
    refuses(killed, f"resume: {monitor} is val/loss in the run, and val/acc would change", f"{monitor}=val/acc")
    for path in (LAST, BEST):
        (killed / path).unlink()
    refuses(killed, GONE)


def test_where_the_last_checkpoint_is_missing_a_warning_names_the_one_in_its_place(killed: Path, capsys) -> None:
    (killed / LAST).unlink()
    assert find_resume_point(ANY, killed / "out").path == killed / BEST
    assert capsys.readouterr().err == f"warning: {killed / LAST} is missing; resuming from best.ckpt instead\n"


def test_a_checkpoint_of_lightning_that_lies_there_is_not_said_to_be_gone(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "out", checkpoints={"best": "checkpoints/epoch=0-step=4.ckpt"})
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "epoch=0-step=4.ckpt").touch()
    message = refusal(find_resume_point, ANY, folder)
    assert message.startswith(f"resume: {folder}/checkpoints/epoch=0-step=4.ckpt is ModelCheckpoint's, which lacks")


def test_a_finished_run_is_made_longer_not_shorter_and_its_best_checkpoint_stays_in_its_record(finished: Path) -> None:
    refuses(finished, "trainer.max_epochs: got 1", "trainer.max_epochs=1")
    run(finished, "resume=out", "trainer.max_epochs=3", faults=[(STEP, 6, kill_9)], code=-9)
    checkpoints = {kind: f"checkpoints/{kind}.ckpt" for kind in ("best", "last")}
    assert record(finished / "out")["checkpoints"] == checkpoints
    (finished / BEST).unlink()  # a later best checkpoint is kept
    run(finished, "resume=out", "trainer.max_epochs=3", code=0)
    assert record(finished / "out")["checkpoints"] == checkpoints


@pytest.mark.slow
def test_a_finished_run_is_not_made_shorter_by_a_number_of_steps(finished: Path) -> None:
    refuses(finished, "trainer.max_steps: got 15", "trainer.max_steps=15")


def test_the_time_of_a_process_that_was_killed_counts_up_to_the_checkpoint_that_is_resumed(killed: Path) -> None:
    assert load_checkpoint(killed / LAST)["batchscope"]["fit_seconds"] > 0
    change(killed / LAST, setting(1000.0, "batchscope", "fit_seconds"))
    run(killed, "resume=out", code=0)
    after = record(killed / "out")
    assert after["seconds"] > after["fit_seconds"] > 1000


# --- a checkpoint whose bytes are intact ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fresh(interrupted: Path) -> Task:
    """The task of the run, not yet used."""
    config = record(interrupted / "out")["config"]
    data = build(config["data"], "data")
    return Task(build(config["model"], "model", spec=data.spec), data.spec, build_optimizer(config["optimizer"]))


def setting(value: object, *path: str | int) -> Callable[[dict], None]:
    """Make a function that changes the value at a path."""
    return lambda checkpoint: reduce(getitem, path[:-1], checkpoint).__setitem__(path[-1], value)


BATCHES = ("loops", "fit_loop", "epoch_loop.batch_progress", "current", "ready")
MISFITS: list[tuple[Callable[[dict], object], str]] = [
    (of_another_model, "its weights are of another model: model.head.bias is (7,) there and (9,) here"),
    (lambda checkpoint: checkpoint.pop("loop_state"), "it is ModelCheckpoint's, which lacks the random states; init="),
    (setting([], "loop_state"), "TypeError: "),
    (setting([], "loop_state", "random"), "loop_state.random, gradients and metrics are not those of all"),
    (setting([{"loss": "low"}], "loop_state", "metrics"), "loop_state.metrics holds something else than tensors"),
    (lambda checkpoint: checkpoint["loop_state"].pop("frozen"), "KeyError: 'frozen'"),
    (setting([1], "loop_state", "frozen"), "loop_state.frozen holds something else than names"),
    (setting("7", "epoch"), "its counters hold 7, which is no count"),
    (setting(-5, *BATCHES), "its counters hold -5, which is no count"),
    (setting(True, "global_step"), "its counters hold True, which is no count"),
]


@pytest.mark.parametrize(("spoil", "reason"), MISFITS, ids=[reason[:60] for _, reason in MISFITS])
def test_what_does_not_fit_the_run_is_found_before_anything_is_restored(spoil, reason, interrupted, fresh):
    path = interrupted / LAST
    checkpoint = load_checkpoint(path)
    check_resumable(checkpoint, path, fresh)
    spoil(checkpoint)
    assert f"{path} cannot be resumed from: {reason}" in refusal(check_resumable, checkpoint, path, fresh)


@pytest.mark.parametrize(
    "spoil",
    [
        setting([], "callbacks", "Checkpoints", "best"),
        pytest.param(lambda checkpoint: checkpoint.pop("optimizer_states"), marks=pytest.mark.slow),
        pytest.param(setting([{"torch": torch.zeros(3)}], "loop_state", "random"), marks=pytest.mark.slow),
    ],
    ids=["a callback's state", "no state of the optimizer", "a random state"],
)
def test_what_cannot_be_restored_is_one_line(spoil: Callable[[dict], object], killed: Path) -> None:
    change(killed / LAST, spoil)
    assert refused(run(killed, "resume=out")).startswith(f"error: resume: {LAST} cannot be resumed from: ")
    assert record(killed / "out")["status"] == "failed"


def test_a_metric_that_would_command_the_terminal_is_not_restored(killed: Path) -> None:
    change(killed / LAST, setting(1.0, "callbacks", "Checkpoints", "metrics", "test/\x1b]0;x"))
    assert run(killed, "resume=out", "test=false", code=0).complained == ""
    assert not any("\x1b" in key for key in record(killed / "out")["metrics"])
