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


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "-m seed=1",
            "warning: -m: no option has several values, so this is a sweep of one run; write data.batch_size=",
        ),
        ("-m seed=1,2", ""),
        ("-m experiment=find_batch_size", ""),
    ],
)
def test_a_sweep_of_one_run_is_said(start: Start, line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    start(*line.split())
    complained = capsys.readouterr().err
    assert complained.startswith(said) and bool(complained) == bool(said)


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
def test_what_starts_no_run_is_shown(start: Start, line: str, tmp_path: Path, capsys) -> None:
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
    "word", ["seed=0", "hydra.run.dir=made/here", pytest.param("hydra.run.dir=empty/mine", marks=pytest.mark.slow)]
)
def test_a_late_mistake_leaves_the_folders_that_were_there_and_no_others(word: str, tmp_path: Path) -> None:
    (tmp_path / "empty" / "mine").mkdir(parents=True)
    done = forked(tmp_path, *SMALL, word, "+trainer.max_time=soon")
    assert done.end() == 1
    assert "not a valid duration" in done.complained
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")} == {"empty", "empty/mine", *SAID}


# --- printed commands ------------------------------------------------------------------------------------------------


def test_the_printed_resume_command_starts_the_same_sweep(start: Start, monkeypatch, capsys) -> None:
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

FLAGS = "-m --multirun --cfg -c job hydra all --resolve --help -h --version --config-dir . --config-path -x -- - -1"
FLAGS += " --nope --config-name=x --cfg=job --m -mv cnn = ~ ~=1 é=ü resume= hydra.job.num=7 model@x=cnn ~model ~logger"
FLAGS += (
    " hydra.mode=MULTIRUN hydra/launcher=joblib hydra/sweeper=optuna hydra.verbose=true hydra=null ~data.batch_size"
)
KEYS = "model data optimizer trainer callbacks logger experiment seed test resume search data.batch_size data.pipeline"
KEYS += " data.root model.hidden_size optimizer.lr trainer.max_epochs model._target_ callbacks.checkpoint hydra.run.dir"
KEYS += " callbacks.checkpoint.every_minutes run_dir . data..batch_size a.b.c data@x +data.batch_size ++seed hydra"
VALUES = (
    "null true -1 0 1 1,2 1, 1e999 nan inf 99999999999999999999 cnn [mnist,digits] quickstart ../../x /etc/passwd a,b"
)
VALUES += (
    " ${run_dir} ${nowhere} ${ ${oc.env:HOME} [1,2 {a:1} [] ' \" \\ é☃ b=c{ os.system torch.load glob(*) range(3) %s"
)
VALUES = (*VALUES.split(), "interval(1,2)", "", "x" * 5000, "\x00", "\n")


def test_random_command_lines_end_in_a_run_or_in_one_line(start: Start, tmp_path: Path) -> None:
    for dice in budget("flags and orders"):
        options = [f"{dice.choice([*KEYS.split(), ''])}={dice.choice(VALUES)}" for _ in range(6)]
        words = [dice.choice((*FLAGS.split(), *options, "")) for _ in range(dice.randint(1, 5))]
        if dice.random() < 0.1:
            words[0] = "".join(chr(dice.randrange(1, 0x250)) for _ in range(dice.randint(1, 30)))

        def attempt(words: list[str] = words) -> None:
            with contextlib.redirect_stdout(io.StringIO()):
                start(*words)

        refused_or_fine(attempt, words)
    assert list(tmp_path.iterdir()) == []
