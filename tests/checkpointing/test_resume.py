"""`resume=`: which run is resumed, and which options may change."""

import json
from pathlib import Path

import pytest

from batchscope.checkpointing import resume
from batchscope.options.tree import flatten
from tests.checkpointing.support import OUT, TEST, terminate
from tests.support.command_lines import composed, refusal
from tests.support.runs import SMALL, record, run


@pytest.mark.parametrize("name", ["cpu", "csv", "data", "min"])
def test_a_run_whose_folder_is_called_as_a_value_is_found_from_elsewhere(name: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = composed(*SMALL, run_dir=name)
    Path(name).mkdir()
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    found = resume.configuration({"config": config}, Path("..", name), [])
    changed = {key for key, value in flatten(found) if value != dict(flatten(config)).get(key)}
    assert changed == {"run_dir", "resume", "callbacks.checkpoint.dirpath", "logger.csv.save_dir"} | {
        "logger.tensorboard.save_dir"
    }


def test_a_run_that_was_stopped_in_its_test_keeps_what_its_training_has_measured(tmp_path: Path) -> None:
    assert run(tmp_path, *SMALL, OUT, faults=[(TEST, 1, terminate)]).end() == 143
    before = record(tmp_path / "out")
    assert before["throughput"]["step_ms_median"] > 0
    assert run(tmp_path, "resume=out").end() == 0
    after = record(tmp_path / "out")
    assert "test/loss" in after["metrics"]
    assert all(after[key] == before[key] for key in ("throughput", "fit_seconds"))


def test_a_run_in_training_is_not_resumed_by_another_process(killed: Path) -> None:
    with resume.lock_run_dir(killed / "out"):
        done = run(killed, "resume=out")
    assert done.end() == 1
    assert done.complained.splitlines() == ["error: resume: out is being trained right now"]


OVER = (
    "out has finished; there is nothing to resume; a longer trainer.max_time, or trainer.max_time=null, may continue it"
)


@pytest.mark.parametrize(
    ("max_time", "said"), [(None, "out has finished; there is nothing to resume"), ({"hours": 1}, OVER)]
)
def test_a_finished_run_says_so(max_time: object, said: str, unstopped: Path, tmp_path: Path) -> None:
    facts = record(unstopped)
    facts["config"]["trainer"]["max_time"] = max_time
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run.json").write_text(json.dumps(facts))
    done = run(tmp_path, "resume=out")
    assert (done.end(), done.said) == (0, f"{said}\n"), done.complained
    assert record(tmp_path / "out") == facts


def test_a_rank_that_is_started_later_resumes_the_run_of_the_first(unstopped: Path, tmp_path: Path) -> None:
    for name, started in (("mine", "2026-01-01"), ("newer", "2026-01-02")):
        folder = tmp_path / "outputs" / "runs" / name
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps({**record(unstopped), "started": started}))
    later = {"LOCAL_RANK": "1", "BATCHSCOPE_RUN_DIR": "outputs/runs/mine"}
    for environ, name in (({}, "newer"), (later, "mine")):
        done = run(tmp_path, "resume=last", environ=environ)
        assert (done.end(), done.said) == (0, f"outputs/runs/{name} has finished; there is nothing to resume\n")


def configuration(run_dir: Path, *overrides: str) -> dict:
    return resume.configuration(record(run_dir), run_dir, list(overrides))


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
def test_a_changed_option_that_would_change_the_result_is_refused_by_name(option, said, interrupted):
    assert said in refusal(configuration, interrupted / "out", option)


@pytest.mark.parametrize(
    "option",
    ["trainer.accelerator=auto", "data.pipeline=device", "callbacks.curves.every_n_steps=2", "callbacks.device=null"]
    + ["logger.csv=null", "test=false", "callbacks.checkpoint.every_minutes=1", "callbacks.nonfinite.action=skip"]
    + ["+trainer.profiler=simple", "++trainer.max_time={hours:1}", "logger=null", "~callbacks.curves"],
)
def test_where_and_how_a_run_is_trained_and_watched_may_change(option: str, interrupted: Path) -> None:
    assert configuration(interrupted / "out", option)["resume"] == str(interrupted / "out")


def test_a_lightning_module_whose_schedule_is_its_own_may_train_longer(interrupted: Path) -> None:
    facts = record(interrupted / "out")
    facts["model"]["lightning_module"] = True
    longer = resume.configuration(facts, interrupted / "out", ["trainer.max_epochs=3"])
    assert longer["trainer"]["max_epochs"] == 3


def test_last_is_the_run_that_was_started_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, started in (("b", "2026-01-02"), ("c", "2026-01-03"), ("a", "2026-01-01")):
        folder = tmp_path / "outputs" / "runs" / name
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps({"started": started}))
    assert resume.find(["resume=last", "test=false"]) == (Path("outputs/runs/c"), ["test=false"])
