"""`resume=`: which run is resumed, and which options may change."""

import json
from pathlib import Path

import pytest

from batchscope.checkpointing import resume
from batchscope.errors import UserError
from batchscope.options.compose import check_command_line
from batchscope.options.tree import flatten
from tests.checkpointing.support import OUT, TEST, terminate
from tests.support.runs import SMALL, Run, assert_alike, record, results, run


@pytest.mark.parametrize("name", ["cpu", "csv", "data", "min"])
def test_a_run_whose_folder_is_called_as_a_value_is_found_from_elsewhere(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (config,) = check_command_line([*SMALL, "trainer.accelerator=cpu"], multirun=False, run_dir=name)
    Path(name).mkdir()
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    found = resume.configuration({"config": config}, Path("..", name), [])
    changed = {key for key, value in flatten(found) if value != dict(flatten(config)).get(key)}
    assert changed == {"run_dir", "resume", "callbacks.checkpoint.dirpath", "logger.csv.save_dir"} | {
        "logger.tensorboard.save_dir"
    }


def test_a_run_whose_record_is_torn_is_resumed_as_its_checkpoint_says(killed: Path, unstopped: Path) -> None:
    content = '{"schema": 1, "sta'
    (killed / "out" / "run.json").write_text(content)
    done = run(killed, "resume=out")
    assert done.end() == 0, done.complained
    assert (killed / "out" / "run.json.aside").read_text() == content
    assert_alike(results(killed / "out"), results(unstopped))


def test_a_moved_run_is_resumed_where_it_is_now(killed: Path, unstopped: Path) -> None:
    (killed / "out").rename(killed / "elsewhere")
    done = run(killed, "resume=elsewhere")
    assert done.end() == 0, done.complained
    assert not (killed / "out").exists()
    assert_alike(results(killed / "elsewhere"), results(unstopped))


def test_a_run_that_was_stopped_in_its_test_keeps_what_its_training_has_measured(tmp_path: Path) -> None:
    timed = [option for option in SMALL if option != "callbacks.throughput=null"]
    assert run(tmp_path, *timed, OUT, faults=[(TEST, 1, terminate)]).end() == 143
    before = record(tmp_path / "out")
    assert before["throughput"]["step_ms_median"] > 0
    assert run(tmp_path, "resume=out").end() == 0
    after = record(tmp_path / "out")
    assert "test/loss" in after["metrics"]
    assert {key: after[key] for key in ("throughput", "fit_seconds")} == {
        key: before[key] for key in ("throughput", "fit_seconds")
    }


def test_a_run_in_training_is_not_resumed_by_another_process(killed: Path) -> None:
    with resume.lock_run_dir(killed / "out"):
        done = run(killed, "resume=out")
    assert done.end() == 1
    assert done.complained.splitlines() == ["error: resume: out is being trained right now"]


@pytest.mark.parametrize(
    ("max_time", "said"),
    [
        (None, "out has finished; there is nothing to resume"),
        (
            {"hours": 1},
            "out has finished: trainer.max_time is over; a longer one, or trainer.max_time=null, continues it",
        ),
    ],
)
def test_a_finished_run_says_so(max_time: object, said: str, unstopped: Path, tmp_path: Path) -> None:
    facts = record(unstopped)
    facts["config"]["trainer"]["max_time"] = max_time
    facts["epochs"] -= max_time is not None
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run.json").write_text(json.dumps(facts))
    done = run(tmp_path, "resume=out")
    assert (done.end(), done.said) == (0, f"{said}\n"), done.complained
    assert record(tmp_path / "out") == facts


def configuration(run_dir: Path, *overrides: str) -> dict:
    return resume.configuration(record(run_dir), run_dir, list(overrides))


def refusal(run_dir: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        configuration(run_dir, *overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("model=lstm_cell", "resume: model."),
        ("model.dropout=0.1", "resume: model.dropout is 0.5 in the run, and 0.1 would change the result"),
        ("data.num_train=80", "resume: data.num_train is 76 in the run, and 80 would change the result"),
        ("data.batch_size=16", "resume: data.batch_size is 8"),
        ("seed=1", "resume: seed is 0 in the run, and 1 would change the result"),
        ("optimizer.lr=1", "resume: optimizer.lr is 0.004"),
        ("trainer.precision=bf16-mixed", "resume: trainer.precision is 32-true"),
        ("trainer.devices=2", "resume: trainer.devices is 1"),
        ("callbacks.checkpoint.monitor=val/acc", "resume: callbacks.checkpoint.monitor is val/loss"),
        ("trainer.max_epochs=3", "optimizer.schedule=one_cycle ends with the run"),
        ("modle=cnn", "modle: no such option. Did you mean 'model'?"),
    ],
)
def test_a_changed_option_that_would_change_the_result_is_refused_by_name(
    option: str, said: str, interrupted: Path
) -> None:
    assert said in refusal(interrupted / "out", option)


@pytest.mark.parametrize(
    "option",
    ["trainer.accelerator=auto", "data.pipeline=device", "callbacks.curves.every_n_steps=2", "callbacks.device=null"]
    + ["logger.csv=null", "test=false", "callbacks.checkpoint.every_minutes=1", "callbacks.nonfinite.action=skip"]
    + ["+trainer.profiler=simple", "++trainer.max_time={hours:1}", "logger=null", "~callbacks.curves"],
)
def test_where_and_how_a_run_is_trained_and_watched_may_change(option: str, interrupted: Path) -> None:
    assert configuration(interrupted / "out", option)["resume"] == str(interrupted / "out")


@pytest.mark.slow
def test_a_run_at_a_constant_rate_can_be_made_longer(tmp_path: Path) -> None:
    constant = ["optimizer.schedule=constant", *SMALL, OUT]
    assert run(tmp_path / "long", *constant, "trainer.max_epochs=3").end() == 0
    assert run(tmp_path / "short", *constant).end() == 0
    done = run(tmp_path / "short", "resume=out", "trainer.max_epochs=3")
    assert done.end() == 0, done.complained
    assert_alike(results(tmp_path / "short" / "out"), results(tmp_path / "long" / "out"))
    assert ", the last 10 of 30 steps" in done.said


def test_last_is_the_run_that_was_started_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, started in (("b", "2026-01-02"), ("c", "2026-01-03"), ("a", "2026-01-01")):
        folder = tmp_path / "outputs" / "runs" / name
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps({"started": started}))
    assert resume.find(["resume=last", "test=false"]) == (Path("outputs/runs/c"), ["test=false"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["resume=nowhere"], "resume: got 'nowhere', which holds no run"),
        (["resume=last"], "resume: got 'last', and there is no run in outputs/runs"),
        (["resume="], "resume: takes the folder of one run, or 'last'"),
    ],
)
def test_a_run_that_is_not_there_is_refused(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=said.replace(".", r"\.")):
        resume.find(words)


def test_a_checkpoint_or_a_sweep_in_place_of_a_run_is_answered_with_what_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint = Path("sweep/0/checkpoints/last.ckpt")
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    Path("sweep/0/run.json").write_text("{}")
    with pytest.raises(UserError, match=r"takes the folder of a run, not a file in it; write resume=sweep/0$"):
        resume.find([f"resume={checkpoint}"])
    with pytest.raises(UserError, match=r"hydra\.sweep\.dir=sweep, and one run of it with resume=sweep/0$"):
        resume.find(["resume=sweep"])


def test_a_sweep_is_not_resumed_by_this(interrupted: Path) -> None:
    done = Run(interrupted, "-m", "resume=out")
    assert done.end() == 1
    assert done.complained.startswith("error: resume: takes a single run")
