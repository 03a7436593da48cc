"""`batchscope train`: flags and options in any order, the runs and sweeps that they start, and what they only print."""

import importlib.util
import os
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from hydra.core.hydra_config import HydraConfig

from batchscope._hydra import multirun
from batchscope.cli import train
from batchscope.errors import UnfitError, UserError
from batchscope.files import LOCK, lock
from batchscope.options.compose import compose_command_line, words_for_hydra
from batchscope.options.groups import CONFIGS
from batchscope.records.run_record import write_planned
from batchscope.records.terminal import is_verbose
from batchscope.sweep.runner import Sweep
from tests.support.command_lines import answer, refusal


@pytest.fixture(autouse=True)
def started(monkeypatch, tmp_path):
    """The arguments of every run and sweep that would be started."""
    calls = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("batchscope.training.run.train", lambda *run: calls.append(run))
    monkeypatch.setattr("batchscope.sweep.runner.run_sweep", lambda *sweep: calls.append(sweep))
    yield calls
    HydraConfig.instance().cfg = None


SEVERAL, SEEDS = [(8, 1), (16, 1)], [(128, 1), (128, 2)]
SWEEPS = {  # batch size and seed of each run
    "-m data.batch_size=8,16 seed=1": SEVERAL,
    "data.batch_size=8,16 seed=1 --multirun": SEVERAL,
    "-v data.batch_size=8,16 -m seed=1": SEVERAL,
    "data.batch_size=8,16 seed=1 -mv": SEVERAL,
    "--config-dir {} model=mine -m seed=1,2": SEEDS,
    "model=mine -m --config-dir={} seed=1,2": SEEDS,
    "seed=1 experiment=diagnose": SEEDS[:1],
}


@pytest.mark.parametrize("line", SWEEPS)
def test_flags_may_stand_anywhere(line, started, tmp_path):
    folder = tmp_path / "my configs, and more" / "model"  # Hydra's grammar would split this path
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("_target_: batchscope.models.mlp.MLP\nhidden_sizes: [8]\n")
    assert not is_verbose()
    assert answer("train", *(word.format(folder.parent) for word in line.split())) == (0, "", "")
    ((sweep, _),) = started
    assert [(config["data"]["batch_size"], config["seed"]) for config in sweep.configs] == SWEEPS[line]
    assert is_verbose() is ("v " in f"{line} ")
    assert os.environ.get("BATCHSCOPE_VERBOSE") == ("1" if is_verbose() else None)  # for every process of a sweep


def test_a_variable_of_the_environment_stands_for_the_flag_which_goes_before_it(started, monkeypatch):
    for name, size in (("one", 8), ("two", 9)):
        Path(name, "model").mkdir(parents=True)
        Path(name, "model", "mine.yaml").write_text(f"_target_: batchscope.models.mlp.MLP\nhidden_sizes: [{size}]\n")
    for value, flags in (("one", []), ("two", []), ("one", ["--config-dir=two"])):
        monkeypatch.setenv("BATCHSCOPE_CONFIG_DIR", value)
        assert answer("train", "model=mine", *flags) == (0, "", "")
    assert [config["model"]["hidden_sizes"] for config, *_ in started] == [[8], [9], [9]]
    for words in (["train"], ["report", "x"]):
        monkeypatch.setenv("BATCHSCOPE_CONFIG_DIR", "nowhere")
        assert answer(*words).err == "error: BATCHSCOPE_CONFIG_DIR: got 'nowhere', which is not a folder\n"


def test_no_file_sets_the_variable(started, monkeypatch):
    Path("one/model").mkdir(parents=True)
    Path("one/model/mine.yaml").write_text("_target_: batchscope.models.mlp.MLP\n")
    Path(".env").write_text("BATCHSCOPE_CONFIG_DIR=one\n")
    monkeypatch.setenv("BATCHSCOPE_CONFIG_DIR", "")  # as if it were not set
    assert answer("train", "model=mine").err.startswith("error: model: got 'mine', takes cnn")
    assert answer("train")[0] == 0


@pytest.mark.parametrize("word", ["logger=none", "callbacks=none", "experiment=[]"])
def test_null_leaves_a_group_out(word, started):
    assert answer("train", f"{word.partition('=')[0]}=null") == (0, "", "")
    assert started[0][3] == [word]


def test_what_is_no_flag_and_no_option_is_not_said_to_be_one():
    assert answer("train", "--cfg", "job", "--resolve").err == "error: --resolve: no such flag.\n"


def test_a_run_that_resumes_nothing_is_a_new_one(started):
    assert answer("train", "resume=null") == (0, "", "")
    assert started[0][3] == []


@pytest.mark.parametrize("word", ["resume=x", "+resume=x", "++resume=x"])
def test_a_run_is_resumed_whatever_the_order(word):
    result = answer("train", "trainer.accelerator=cpu", "-v", word)
    assert result.err.startswith("error: resume: got 'x', which does not exist")


def test_a_resumed_run_logs_as_a_new_one_and_says_which_variables_it_does_not_set(started, monkeypatch):
    log_options = []
    monkeypatch.setattr(train, "configure_log", lambda *options: log_options.append(options))
    words = ["model=mlp", "+hydra.job.env_set.MARK=set", "hydra.run.dir=out"]
    assert answer("train", *words) == (0, "", "")
    ((config, run_dir, choices, overrides),) = started
    write_planned(
        run_dir, config=config, choices=choices, overrides=overrides, command=f"batchscope train {' '.join(words)}"
    )
    warning = "warning: resume: hydra.job.env_set is not set again; set its variables in the environment\n"
    assert answer("train", "resume=out") == (0, "", warning)
    assert len(started) == len(log_options) == 2 and log_options[0] == log_options[1]


@pytest.mark.parametrize("by_hydra", [False, True])
def test_a_run_is_the_same_whether_hydra_calls_for_it_or_not(by_hydra, started, tmp_path, monkeypatch):
    def do(jobs):
        for job in jobs:
            config, fields = job.config, job.record_fields
            identity = (str(job.run_dir), job.title, fields["choices"]["model"], fields["overrides"][:2])
            started_jobs.append((*identity, config["data"]["batch_size"], job.environ["MARK"], job.may_fork))
        return [{"status": "finished", "config": job.config} for job in jobs]

    words = ["model=mlp", "data.batch_size=4,8", "trainer.min_epochs=2"]  # which no YAML file lists
    words += ["+hydra.job.env_set.MARK=set", "hydra.sweep.dir=s"]
    answer("train", "-m", *words)
    line = started[0][0]
    started_jobs, sweep = [], Sweep(Path("s"), line)
    sweep.loop.do = do
    if by_hydra:
        multirun(CONFIGS, words_for_hydra(line.words), sweep.run_job)
    else:
        sweep.run_list(line.configs, line.compositions)
    assert started_jobs == [
        (str(tmp_path / folder), title, "mlp", ["model=mlp", f"data.batch_size={size}"], size, "set", False)
        for folder, title, size in (
            ("s/0", "run 1 of 2: data.batch_size=4", 4),
            ("s/1", "run 2 of 2: data.batch_size=8", 8),
        )
    ]
    assert "MARK" not in os.environ


def test_a_search_is_of_one_training_also_where_a_config_has_several(started):
    Path("conf/experiment").mkdir(parents=True)
    params = "# @package _global_\nhydra: {sweeper: {params: {model: 'cnn,mlp'}}}\n"
    Path("conf/experiment/mine.yaml").write_text(params)
    words = ["train", "--config-dir=conf", "experiment=[mine,diagnose]"]
    message = "error: model: has several values in a config; write hydra.sweeper.params=null\n"
    assert answer(*words) == (1, "", message)
    assert answer(*words, "hydra.sweeper.params=null") == (0, "", "")
    assert [len(line.configs) for line, _ in started] == [1]


SHOWN = {
    "--help": ["batchscope train model=cnn data.batch_size=512", "--multirun", "model: cnn, lstm_cell, mlp"],
    "model=mlp --help": ["hidden_sizes:"],
    "data.batch_size=3 --cfg job seed=5": ["batch_size: 3", "seed: ${seed}"],
    "logger=null --cfg job": ["seed: 0"],
}


@pytest.mark.parametrize("line", SHOWN)
def test_what_starts_no_run_is_shown(line, started, tmp_path):
    code, out, err = answer("train", *line.split())
    assert (code, err, started, [*tmp_path.iterdir()]) == (0, "", [], [])
    assert all(text in out for text in SHOWN[line])


@pytest.mark.parametrize("word", ["seed=0", "hydra.run.dir=made/here", "hydra.run.dir=empty/mine"])
def test_a_late_mistake_leaves_the_folders_that_were_there_and_no_others(word, tmp_path, monkeypatch):
    def train(*_):
        raise UserError("it is too late")

    monkeypatch.setattr("batchscope.training.run.train", train)
    (tmp_path / "empty" / "mine").mkdir(parents=True)
    assert answer("train", word) == (1, "", "error: it is too late\n")
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")} == {"empty", "empty/mine"}


@pytest.mark.parametrize("was_there", [False, True])
def test_a_run_that_is_refused_leaves_the_folder_to_the_process_that_trains_in_it(was_there, tmp_path, monkeypatch):
    with ExitStack() as other_process:

        def train(config, run_dir, *_):
            other_process.enter_context(lock(run_dir / LOCK))
            raise UserError("it is being trained right now")

        monkeypatch.setattr("batchscope.training.run.train", train)
        if was_there:
            (tmp_path / "mine").mkdir()
        assert answer("train", "hydra.run.dir=mine").code == 1
        assert [path.name for path in (tmp_path / "mine").iterdir()] == [".lock"]


@pytest.mark.parametrize(
    ("word", "kept", "left"),
    [("seed=0", "", set()), ("hydra.run.dir=mine", "", {"mine"}), ("seed=0", "last.ckpt", {"outputs"})],
    ids=["a new folder", "a folder that was there", "with a checkpoint"],
)
def test_a_run_that_has_trained_nothing_leaves_no_folder_of_its_own(word, kept, left, tmp_path, monkeypatch):
    def train(config, run_dir, *_):
        for name in filter(None, ("run.json", "csv/metrics.csv", kept)):
            (run_dir / name).parent.mkdir(exist_ok=True)
            (run_dir / name).touch()
        raise UnfitError("model: Net does not take a batch")

    monkeypatch.setattr("batchscope.training.run.train", train)
    if word != "seed=0":
        (tmp_path / "mine").mkdir()
    assert answer("train", word) == (1, "", "error: model: Net does not take a batch\n")
    assert {path.name for path in tmp_path.iterdir()} == left


def test_the_printed_resume_command_starts_the_same_sweep(started, monkeypatch, capsys):
    options = ["data.root='my data, here'", "model=mlp", "model.hidden_sizes=[8,8],[4]", "++hydra.sweep.dir=before"]
    monkeypatch.setattr(sys, "argv", ["train.py", "--multirun", *options])
    Sweep(Path("it's {my} sweep, a=b"), compose_command_line(options, multirun=True)).print_resume()
    printed = shlex.split(capsys.readouterr().out.splitlines()[-1].removeprefix("resume"))
    assert printed[:2] == ["batchscope", "train"]
    answer(*printed[1:])
    ((line, folder),) = started
    assert folder == Path("it's {my} sweep, a=b")
    composed_options = [(config["data"]["root"], config["model"]["hidden_sizes"]) for config in line.configs]
    assert composed_options == [("my data, here", [8, 8]), ("my data, here", [4])]


@pytest.mark.parametrize(
    ("has_signals", "srun", "message"),
    [
        (False, None, "hydra/launcher: submitit does not run on Windows; write hydra/launcher=basic"),
        (True, None, "hydra/launcher: no SLURM is here (no program srun); write hydra/launcher=basic"),
        (True, "/usr/bin/srun", None),
    ],
)
def test_a_launcher_that_cannot_start_a_run_here_is_refused(has_signals, srun, message, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(train, "signals_named", lambda *names: names if has_signals else ())
    monkeypatch.setattr("shutil.which", lambda name: srun)
    target = "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher"
    if message is None:
        train._check_launcher(target)
    else:
        assert refusal(train._check_launcher, target) == message
