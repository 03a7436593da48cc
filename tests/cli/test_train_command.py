"""`batchscope train`: flags and options in any order, what is shown, and one line for whatever cannot be."""

import contextlib
import io
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from batchscope.cli import train as command
from batchscope.errors import UserError
from batchscope.records.terminal import is_verbose
from batchscope.sweep.runner import SweepRunner
from tests.support.fuzzing import budget, refused_or_fine
from tests.support.runs import SMALL
from tests.support.runs import run as forked
from tests.support.waiting import PATIENCE_S

TRAIN_PY = Path(__file__).resolve().parents[2] / "train.py"
SAID = {"stdout", "stderr"}

Started = list[tuple[str, int, list[str]]]  # what a command line starts: (kind, number of runs, its options)
Start = Callable[..., Started]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Start:
    """Give the program a command line; every run and sweep that it would start is noted instead."""
    started: Started = []

    def note(kind: str, runs: int, overrides: list[str]) -> None:
        started.append((kind, runs, overrides))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "_run_one", lambda line: note("run", 1, line.compositions[0].hydra.overrides.task))
    monkeypatch.setattr(command, "_run_sweep", lambda line, overrides: note("sweep", len(line.configs), overrides))
    monkeypatch.setattr(command, "_resume", lambda overrides: note("resume", 1, overrides))

    def start(*words: str) -> Started:
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        started.clear()
        command.run_command()
        return list(started)

    return start


# --- order -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "-m data.batch_size=8,16 seed=1",
        "data.batch_size=8,16 seed=1 -m",
        "data.batch_size=8,16 --multirun seed=1",
        "-v data.batch_size=8,16 -m seed=1",
        "data.batch_size=8,16 seed=1 -mv",
    ],
)
def test_a_flag_may_stand_anywhere(start: Start, line: str) -> None:
    assert start(*line.split()) == [("sweep", 2, ["data.batch_size=8,16", "seed=1"])]


def test_every_process_of_a_verbose_sweep_knows_it(start: Start) -> None:
    assert not is_verbose()
    start("seed=1,2", "-m", "--verbose")
    assert os.environ["BATCHSCOPE_VERBOSE"] == "1"
    assert is_verbose()


def test_a_diagnosis_is_a_sweep_of_one_job(start: Start) -> None:
    assert start("seed=1", "experiment=diagnose") == [("sweep", 1, ["seed=1", "experiment=diagnose"])]


@pytest.mark.parametrize("line", ["--config-dir {} model=mine -m seed=1,2", "model=mine -m --config-dir={} seed=1,2"])
def test_a_flag_with_a_value_may_stand_anywhere(start: Start, line: str, tmp_path: Path) -> None:
    folder = tmp_path / "my configs, and more" / "model"  # which Hydra's grammar would split
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("_target_: batchscope.models.mlp.MLP\nhidden_sizes: [8]\n")
    words = [word.format(folder.parent) for word in line.split()]
    assert start(*words) == [("sweep", 2, ["model=mine", "seed=1,2"])]


@pytest.mark.parametrize("word", ["resume=last", "+resume=last", "++resume=last", "resume=a=b, {c}"])
def test_a_run_is_resumed_whatever_the_order(start: Start, word: str) -> None:
    assert start("trainer.accelerator=cpu", "-v", word)[0][0] == "resume"


@pytest.mark.parametrize("group", ["logger", "callbacks", "experiment"])
def test_null_leaves_a_group_out(start: Start, group: str) -> None:
    assert start(f"{group}=null") == [("run", 1, [f"{group}=[]"])]


# --- mistakes --------------------------------------------------------------------------------------------------------

UNCLOSED = "cannot be parsed: a quote, a bracket or a brace is not closed, or a value has to stand in quotes"
# command line → exit code and what the one line must hold
MISTAKES: dict[str, tuple[int, str]] = {
    "--nope": (2, "--nope: no such flag."),
    "--verbos": (2, "--verbos: no such flag. Did you mean '--verbose'?"),
    "--multi seed=1,2": (2, "Did you mean '--multirun'?"),
    "--model cnn": (2, "--model: no such flag. Options are written without dashes: model=<value>"),
    "--data.batch_size=64": (2, "Options are written without dashes: data.batch_size=64"),
    "--config-path x": (2, "--config-path: no such flag; --config-dir=<folder> adds YAML files of your own"),
    "--config-name=other": (2, "--config-name=other: no such flag; the configuration is always train.yaml"),
    "--config-dir nowhere": (1, "--config-dir: got 'nowhere', which is not a folder"),
    "cnn": (2, "cnn: cannot be parsed: options are written as option=value; did you mean 'model=cnn'?"),
    "data.batch_size 64": (2, "data.batch_size: cannot be parsed: options are written as option=value"),
    "-m data.batch_size=16,": (2, "a value is missing beside a comma; write one value, or several: option=16,32"),
    "data.batch_size=,16": (2, "a value is missing beside a comma"),
    "data.batch_size=[1": (2, UNCLOSED),
    'data.root="x': (2, UNCLOSED),
    "data.batch_size=(8,16)": (2, UNCLOSED),
    "--cfg": (2, "expected one argument"),
    "--cfg foo": (2, "choose from 'job', 'hydra', 'all'"),
    "--cfg job --multirun": (2, "--multirun and --cfg: only one of them at a time"),
    "--resolve": (2, "--resolve: belongs to --cfg or --help"),
    "--cfg job data.batch_sise=3": (1, "data.batch_sise: no such option. Did you mean 'batch_size'?"),
    "--help modle=cnn": (1, "modle: no such option. Did you mean 'model'?"),
    "--cfg job seed=1,2": (1, "seed: got several values"),
    "--cfg job --resolve data.root=${nowhere}": (1, "nowhere"),
    "experiment=example": (1, "quickstart, throughput; write experiment=quickstart for a first run"),
    "hydra.mode=MULTIRUN seed=1": (1, "hydra.mode: got MULTIRUN; write batchscope train -m"),
    "hydra.job.chdir=true": (1, "hydra.job.chdir: is not taken: a run stays in the working directory"),
    "-m seed=1,2 hydra.output_subdir=x": (1, "hydra.output_subdir: is not taken: run.json holds the configuration"),
    "run_dir=mine": (1, "run_dir: is set by the run; write hydra.run.dir=mine to choose its folder"),
    "resume=x -m": (1, "resume: takes a single run; a sweep is resumed by its own command"),
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_line_and_nothing_is_written(start: Start, line: str, tmp_path: Path) -> None:
    code, said = MISTAKES[line]
    with pytest.raises(UserError) as caught:
        start(*line.split())
    assert said in str(caught.value), str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == code
    assert list(tmp_path.iterdir()) == []


def test_spaces_around_the_equals_sign_are_told(start: Start) -> None:
    with pytest.raises(UserError, match="cannot be parsed: write option=value without spaces around the ="):
        start("data.batch_size = 8")


@pytest.mark.parametrize(("pipeline", "warned"), [("memory", True), ("workers", False)])
def test_workers_that_no_run_would_start_are_a_warning(
    start: Start, capsys: pytest.CaptureFixture[str], pipeline: str, warned: bool
) -> None:
    start("data.num_workers=4", f"data.pipeline={pipeline}")
    said = "warning: data.num_workers: has no effect with data.pipeline=memory; write data.pipeline=workers with it\n"
    assert capsys.readouterr().err == (said if warned else "")


# --- what is shown ---------------------------------------------------------------------------------------------------

SHOWN = {
    "--help": ["batchscope train model=cnn data.batch_size=512", "--multirun", "model: cnn, lstm_cell, mlp"],
    "model=mlp --help": ["hidden_sizes:"],
    "data.batch_size=3 --cfg job seed=5": ["batch_size: 3", "seed: ${seed}"],
    "--cfg hydra": ["hydra:\n  run:"],
    "--cfg all": ["hydra:\n  run:", "seed: 0"],
    "--cfg job --resolve seed=5": ["  seed: 5"],
    "logger=null --cfg job": ["seed: 0"],
}


@pytest.mark.parametrize("line", SHOWN)
def test_what_starts_no_run_is_shown(
    start: Start, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(*line.split()) == []
    shown = capsys.readouterr()
    assert all(text in shown.out for text in SHOWN[line])
    assert shown.err == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("line", ["--help", "--cfg job"])
def test_a_reader_that_has_gone_is_no_error(line: str) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    words = [sys.executable, str(TRAIN_PY), *line.split()]
    done = subprocess.run(words, stdout=writes, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S, check=False)
    os.close(writes)
    assert done.stderr == ""
    assert done.returncode in (0, 141)


# --- the folder of a run ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("hydra.run.dir=file", "File exists"),
        ("hydra.run.dir=file/x", "Not a directory"),
        ("-m hydra.sweep.dir=file/x", "Not a directory"),
    ],
)
def test_a_folder_that_cannot_be_made_is_one_line(line: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = forked(tmp_path, *line.split(), *SMALL)
    assert done.end() == 1
    option, _, place = line.removeprefix("-m ").partition("=")
    assert done.complained == f"error: {option}: {place} cannot be written: {why}\n"


@pytest.mark.parametrize("words", [[], ["hydra.run.dir=made/here"], ["hydra.run.dir=empty/mine"]], ids=" ".join)
def test_a_late_mistake_leaves_the_folders_that_were_there_and_no_others(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "empty" / "mine").mkdir(parents=True)
    done = forked(tmp_path, *SMALL, *words, "+trainer.max_time=soon")
    assert done.end() == 1
    assert "not a valid duration" in done.complained
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")} == {"empty", "empty/mine", *SAID}


def test_a_run_without_loggers_and_callbacks_is_trained(tmp_path: Path) -> None:
    bare = [word for word in SMALL if not word.lstrip("+").startswith("callbacks.")]
    done = forked(tmp_path, *bare, "logger=null", "callbacks=null", "hydra.run.dir=out")
    assert done.end() == 0, done.complained
    assert {path.name for path in (tmp_path / "out").iterdir()} <= {"run.json", ".lock"}


def fail() -> None:
    raise ZeroDivisionError("mine")


def test_an_exception_in_a_step_is_the_users_own_traceback(tmp_path: Path) -> None:
    done = forked(tmp_path, *SMALL, faults=[("batchscope.training.task.Task.training_step", 2, fail)])
    assert done.end() == 1
    assert "ZeroDivisionError: mine" in done.complained
    assert "Error executing job" not in done.complained


# --- printed commands ------------------------------------------------------------------------------------------------


def test_the_printed_resume_command_starts_the_same_sweep(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["data.root='my data, here'", "model=mlp", "model.hidden_sizes=[8,8],[4]", "++hydra.sweep.dir=before"]
    monkeypatch.setattr(sys, "argv", ["train.py", "--multirun", *options])
    SweepRunner(Path("it's {my} sweep, a=b"), ["a", "b"]).print_remaining()
    printed = shlex.split(capsys.readouterr().out.splitlines()[-1].removeprefix("resume"))
    lines = []
    monkeypatch.setattr(command, "_run_sweep", lambda line, overrides: lines.append(line))
    assert printed[:2] == ["batchscope", "train"]
    start(*printed[2:])
    (line,) = lines
    assert line.folder == Path("it's {my} sweep, a=b")
    assert [(c["data"]["root"], c["model"]["hidden_sizes"]) for c in line.configs] == [
        ("my data, here", [8, 8]),
        ("my data, here", [4]),
    ]


# --- anything at all -------------------------------------------------------------------------------------------------

FLAGS = (
    "-m --multirun --cfg -c job hydra all --resolve --help -h --version --config-dir . --config-path --config-name=x"
)
FLAGS += " --nope -x -- - -1 --cfg=job --m -mv"
OPTIONS = (
    "seed=1,2 model=mlp logger=null ~logger ~data.batch_size trainer.fast_dev_run=true a=b=c{ model=glob(*) ~model"
)
OPTIONS += " ++seed=3 hydra.mode=MULTIRUN hydra/launcher=joblib hydra/sweeper=optuna model@x=cnn data=[] seed=1,"
OPTIONS += (
    " data=[mnist,digits] hydra.verbose=true hydra=null experiment=null,quickstart optimizer.lr=interval(1,2) cnn"
)
OPTIONS += " = ~ ~=1 é=ü hydra.job.num=7 resume="


def test_random_command_lines_end_in_a_run_or_in_one_line(start: Start, tmp_path: Path) -> None:
    for dice in budget("flags and orders"):
        words = [dice.choice((*FLAGS.split(), *OPTIONS.split(), "")) for _ in range(dice.randint(1, 5))]

        def attempt(words: list[str] = words) -> None:
            with contextlib.redirect_stdout(io.StringIO()):
                start(*words)

        refused_or_fine(attempt, words)
    assert list(tmp_path.iterdir()) == []
