"""The command line: flags and options in any order, every flag of Hydra's, and one line for whatever cannot be."""

import contextlib
import io
import logging
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra.core.hydra_config import HydraConfig

from batchscope.cli import train as command
from batchscope.errors import UserError
from batchscope.records.terminal import is_verbose
from batchscope.sweep.runner import SweepRunner
from tests.support.fuzzing import budget, refused_or_fine
from tests.support.runs import SMALL
from tests.support.runs import run as forked
from tests.support.waiting import PATIENCE_S

TRAIN_PY = Path(__file__).resolve().parents[2] / "train.py"

Started = list[tuple[str, int, list[str]]]  # what a command line starts: (kind, number of runs, the words in sys.argv)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Started]]:
    """Give the program a command line; every run and sweep that it would start is noted instead."""
    started: Started = []

    def note(kind: str, runs: int) -> None:
        started.append((kind, runs, sys.argv[1:]))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # which the program changes
    monkeypatch.setattr("hydra._internal.hydra.configure_log", lambda *_: None)
    monkeypatch.setattr(logging, "raiseExceptions", True)
    monkeypatch.setattr(command, "_run_one", lambda train, line: note("run", 1))
    monkeypatch.setattr(command, "_run_sweep", lambda line: note("sweep", len(line.configs)))
    monkeypatch.setattr(command, "_resume", lambda *_: note("resume", 1))

    def start(*words: str) -> Started:
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        started.clear()
        command.run_command(lambda *_: None)
        return list(started)

    yield start
    HydraConfig.instance().cfg = None


# --- order -----------------------------------------------------------------------------------------------------------

IN_ANY_ORDER = [
    "-m data.batch_size=8,16 seed=1",
    "data.batch_size=8,16 seed=1 -m",
    "data.batch_size=8,16 -m seed=1",
    "data.batch_size=8,16 --multirun seed=1",
    "data.batch_size=8,16 --multi seed=1",
]


@pytest.mark.parametrize("line", IN_ANY_ORDER)
def test_a_flag_may_stand_anywhere(start: Callable[..., Started], line: str) -> None:
    # Hydra and Lightning's processes read sys.argv again, where the flags are first.
    assert start(*line.split()) == [("sweep", 2, ["--multirun", "data.batch_size=8,16", "seed=1"])]


@pytest.mark.parametrize("line", ["-v -m seed=1,2", "seed=1,2 -m --verbose", "-mv seed=1,2"])
def test_details_are_asked_for_anywhere_and_every_process_of_a_sweep_knows_it(
    start: Callable[..., Started], line: str
) -> None:
    assert not is_verbose()
    assert start(*line.split()) == [("sweep", 2, ["--multirun", "seed=1,2"])]  # Hydra has no such flag
    assert os.environ["BATCHSCOPE_VERBOSE"] == "1"
    assert is_verbose()


def test_a_diagnosis_is_a_sweep_of_one_job(start: Callable[..., Started]) -> None:
    assert start("seed=1", "experiment=diagnose") == [("sweep", 1, ["--multirun", "seed=1", "experiment=diagnose"])]


@pytest.mark.parametrize("line", ["--config-dir {} model=mine -m seed=1,2", "model=mine -m --config-dir={} seed=1,2"])
def test_a_flag_with_a_value_may_stand_anywhere(start: Callable[..., Started], line: str, tmp_path: Path) -> None:
    folder = tmp_path / "my configs, and more" / "model"  # which Hydra's grammar would split
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("_target_: batchscope.models.mlp.MLP\nhidden_sizes: [8]\n")
    words = [word.format(folder.parent) for word in line.split()]
    assert start(*words) == [("sweep", 2, ["--multirun", f"--config-dir={folder.parent}", "model=mine", "seed=1,2"])]


@pytest.mark.parametrize("word", ["resume=last", "+resume=last", "++resume=last", "resume=a=b, {c}"])
def test_a_run_is_resumed_whatever_the_order(start: Callable[..., Started], word: str) -> None:
    assert start("trainer.accelerator=cpu", "--run", word)[0][0] == "resume"


def test_a_process_of_lightning_parses_what_lightning_appends(start: Callable[..., Started]) -> None:
    (_, _, words), *_ = start("seed=1", "--run")
    assert start(*words, 'hydra.run.dir="a b"', "hydra.job.name=x")[0][:2] == ("run", 1)


@pytest.mark.parametrize("group", ["logger", "callbacks", "experiment"])
def test_null_leaves_a_group_out(start: Callable[..., Started], group: str) -> None:
    assert start(f"{group}=null") == [("run", 1, [f"{group}=[]"])]


# --- flags -----------------------------------------------------------------------------------------------------------

# command line → exit code and what the one line must hold
MISTAKES: dict[str, tuple[int, str]] = {
    "--nope": (2, "--nope: no such flag."),
    "--multi-run seed=1,2": (2, "Did you mean '--multirun'?"),
    "--model cnn": (2, "--model: no such flag. Options are written without dashes: model=<value>"),
    "--data.batch_size=64": (2, "Options are written without dashes: data.batch_size=64"),
    "cnn": (2, "cnn: cannot be parsed: options are written as option=value; did you mean 'model=cnn'?"),
    "data.batch_size 64": (2, "data.batch_size: cannot be parsed: options are written as option=value"),
    "--cfg": (2, "expected one argument"),
    "--cfg foo": (2, "choose from 'job', 'hydra', 'all'"),
    "--cfg job --multirun": (2, "--multirun and --cfg: only one of them at a time"),
    "-r -m": (2, "--run and --multirun: only one of them at a time"),
    "--resolve": (2, "--resolve: belongs to --cfg or --help"),
    "--package data": (2, "--package: belongs to --cfg"),
    "--info foo": (2, "choose from"),
    "--shell-completion": (2, "--shell-completion: takes install=bash"),
    "--shell-completion install=cmd": (2, "--shell-completion: takes install=bash"),
    "--shell-completion query=bash": (2, "--shell-completion: takes install=bash"),
    "--config-path x": (1, "--config-path: the configuration is this program's own"),
    "--config-name other": (1, "--config-name: the configuration is always train.yaml"),
    "--config-dir nowhere": (1, "--config-dir: got 'nowhere', which is not a folder"),
    "--experimental-rerun config.pickle": (1, "--experimental-rerun: a pickle can run code"),
    "--cfg job data.batch_sise=3": (1, "data.batch_sise: no such option. Did you mean 'batch_size'?"),
    "--cfg hydra modle=cnn": (1, "modle: no such option. Did you mean 'model'?"),
    "--help modle=cnn": (1, "modle: no such option. Did you mean 'model'?"),
    "--info=config data.batch_size=[1": (2, "cannot be parsed"),
    "--cfg job seed=1,2": (1, "seed: got several values"),
    "hydra.mode=MULTIRUN seed=1": (1, "hydra.mode: got MULTIRUN; write python train.py -m"),
}


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("data.batch_size = 8", "write option=value without spaces around the ="),
        ('data.root="x', "a quote is not closed, or a character has to stand in quotes: option='value'"),
        ("data.batch_size=(8,16)", "extraneous input '('"),
    ],
)
def test_what_hydra_cannot_parse_is_told_without_the_names_of_its_tokens(
    start: Callable[..., Started], word: str, said: str
) -> None:
    with pytest.raises(UserError) as caught:
        start(word)
    assert str(caught.value) == f"{word}: cannot be parsed: {said}"


@pytest.mark.parametrize("line", MISTAKES)
def test_a_flag_that_cannot_be_is_one_line(start: Callable[..., Started], line: str, tmp_path: Path) -> None:
    code, said = MISTAKES[line]
    with pytest.raises(UserError) as caught:
        start(*line.split())
    assert said in str(caught.value), str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == code
    assert list(tmp_path.iterdir()) == []


SHOWN = {
    "--help": "batchscope train model=cnn data.batch_size=512",
    "model=mlp --help": "hidden_sizes:",
    "--hydra-help": "--hydra-help",
    "--hydra-help model=mlp": "--hydra-help",
    "data.batch_size=3 --cfg job seed=5": "batch_size: 3",
    "--cfg hydra": "hydra:",
    "--cfg all": "hydra:",
    "--cfg job --package data": "# @package data",
    "--cfg job --resolve seed=5": "seed: 5",
    "logger=null --cfg job": "seed: 0",
    "--shell-completion install=bash": "complete -o nospace",
}


@pytest.mark.parametrize("line", SHOWN)
def test_what_starts_no_run_is_shown(
    start: Callable[..., Started], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(SystemExit):
        assert start(*line.split()) == []
    shown = capsys.readouterr()
    assert SHOWN[line] in shown.out
    assert shown.err == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_word_is_completed(tmp_path: Path) -> None:
    environment = os.environ | {"COMP_LINE": "python train.py mod", "COMP_POINT": "19", "COMP_CWORD": "2"}
    done = program("--shell-completion", "query=bash", cwd=tmp_path, env=environment)
    assert "model=" in done.stdout.split()


# --- the program -----------------------------------------------------------------------------------------------------


def program(*words: str, **how: Any) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, str(TRAIN_PY), *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | how
    return subprocess.run(line, text=True, timeout=PATIENCE_S, check=False, **pipes)


SHOWING = ["--help", pytest.param("--cfg job", marks=pytest.mark.slow), pytest.param("--info", marks=pytest.mark.slow)]


@pytest.mark.slow
@pytest.mark.parametrize("line", SHOWING)
def test_a_reader_that_has_gone_is_no_error(line: str) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    done = program(*line.split(), stdout=writes)
    os.close(writes)
    assert done.stderr == ""
    assert done.returncode in (0, 141)


@pytest.mark.parametrize("line", ["--cfg job data.batch_sise=3", "--nope"])
def test_the_program_says_it_in_one_line(line: str, tmp_path: Path) -> None:
    done = forked(tmp_path, *line.split())
    assert done.end() in (1, 2)
    assert len(done.complained.splitlines()) == 1 and done.complained.startswith("error: ")
    assert done.said == ""
    assert {path.name for path in tmp_path.iterdir()} == {"stdout", "stderr"}


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


def test_a_run_without_loggers_and_callbacks_is_trained(tmp_path: Path) -> None:
    bare = [word for word in SMALL if not word.lstrip("+").startswith("callbacks.")]
    done = forked(tmp_path, *bare, "logger=null", "callbacks=null", "hydra.run.dir=out")
    assert done.end() == 0, done.complained
    assert {path.name for path in (tmp_path / "out").iterdir()} <= {"run.json", ".lock"}


# --- printed commands ------------------------------------------------------------------------------------------------


def test_the_printed_resume_command_starts_the_same_sweep(
    start: Callable[..., Started], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["data.root='my data, here'", "model=mlp", "model.hidden_sizes=[8,8],[4]", "++hydra.sweep.dir=before"]
    monkeypatch.setattr(sys, "argv", ["train.py", "--multirun", *options])
    SweepRunner(Path("it's {my} sweep, a=b"), ["a", "b"]).print_remaining()
    printed = shlex.split(capsys.readouterr().out.splitlines()[-1].removeprefix("resume"))
    lines = []
    monkeypatch.setattr(command, "_run_sweep", lines.append)
    assert printed[:2] == ["python", "train.py"]
    start(*printed[2:])
    (line,) = lines
    assert line.folder == Path("it's {my} sweep, a=b")
    assert [(c["data"]["root"], c["model"]["hidden_sizes"]) for c in line.configs] == [
        ("my data, here", [8, 8]),
        ("my data, here", [4]),
    ]


@pytest.mark.parametrize(
    ("module", "script", "begins"),
    [
        (None, "../train.py", "python ../train.py --multirun"),
        (SimpleNamespace(name="batchscope.train"), "/some/where/src/train.py", "python -m batchscope.train --multirun"),
        (None, "/usr/bin/batchscope-train", "/usr/bin/batchscope-train --multirun"),
    ],
)
def test_the_printed_resume_command_names_the_program_as_it_was_started(
    module: Any, script: str, begins: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", module)
    monkeypatch.setattr(sys, "argv", [script, "--multirun", "seed=1,2"])
    SweepRunner(Path("s"), ["a"]).print_remaining()
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"resume   {begins}")


# --- anything at all -------------------------------------------------------------------------------------------------

FLAGS = (
    *("-m", "--multirun", "-r", "--run", "--cfg", "-c", "job", "hydra", "all", "--resolve", "--package", "-p", "data"),
    *("--help", "-h", "--hydra-help", "--version", "--info", "-i", "defaults", "--shell-completion", "-sc"),
    *("install=bash", "query=zsh", "--config-dir", "-cd", ".", "--config-path", "--config-name=train", "-cn", "x"),
    *("--experimental-rerun", "--nope", "-x", "--", "-", "", "-1", "--cfg=job", "--info=config", "--m", "-mr"),
)
OPTIONS = (
    *("seed=1,2", "model=mlp", "logger=null", "~logger", "~data.batch_size", "trainer.fast_dev_run=true", "a=b=c{"),
    *("model=glob(*)", "~model", "++seed=3", "hydra.mode=MULTIRUN", "hydra/launcher=joblib", "hydra/sweeper=optuna"),
    *(
        "model@x=cnn",
        "data=[]",
        "data=[mnist,digits]",
        "hydra.verbose=true",
        "hydra=null",
        "experiment=null,quickstart",
    ),
    *(
        "hydra.sweep.dir='a b'",
        "optimizer.lr=interval(1,2)",
        "cnn",
        "=",
        "~",
        "~=1",
        "é=ü",
        "hydra.job.num=7",
        "resume=",
    ),
)


def test_random_command_lines_end_in_a_run_or_in_one_line(start: Callable[..., Started], tmp_path: Path) -> None:
    for dice in budget("flags and orders"):
        words = [dice.choice((*FLAGS, *OPTIONS)) for _ in range(dice.randint(1, 5))]

        def attempt(words: list[str] = words) -> None:
            with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
                start(*words)

        refused_or_fine(attempt, words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("pipeline", "warned"), [("memory", True), ("workers", False)])
def test_workers_that_no_run_would_start_are_a_warning(
    start: Callable[..., Started], capsys: pytest.CaptureFixture[str], pipeline: str, warned: bool
) -> None:
    start("data.num_workers=4", f"data.pipeline={pipeline}")
    said = "warning: data.num_workers: has no effect with data.pipeline=memory; write data.pipeline=workers with it\n"
    assert capsys.readouterr().err == (said if warned else "")
