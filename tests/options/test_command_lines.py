"""The program accepts every command line that it prints, and those of the SLURM script."""

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from batchscope.checkpointing import resume
from batchscope.options.check import check_config
from batchscope.options.command_lines import for_explanation, for_timing
from tests.checkpointing.support import STEP, interrupt
from tests.support.command_lines import answer, composed
from tests.support.runs import EVERY_4, QUIET, Run, kill_9, record, run

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "train.sbatch"
DIGITS = ["data=digits", "data.num_train=64", "data.num_val=16", "data.num_test=16", "data.batch_size=8", "model=mlp"]
DIGITS += ["trainer.max_epochs=1", "trainer.accelerator=cpu", *QUIET, EVERY_4]


def elsewhere(folder: Path) -> list[str]:
    """Options of a run that reads and writes outside its own folder, at paths with spaces."""
    return [f"data.root='{folder}/my data'", f"logger.csv.save_dir='{folder}/my curves'"]


def printed(text: str, label: str, begins: str) -> list[str]:
    """Return the words of the command that follows a label, split as by a shell."""
    (line,) = [line.partition(label)[2].strip() for line in text.splitlines() if line.strip().startswith(label)]
    assert line.startswith(f"batchscope {begins}"), line
    return shlex.split(line)


def started(folder: Path, words: list[str]) -> Run:
    """Run a command to its end."""
    return run(folder, *words[2:], module=f"batchscope.cli.{words[1]}", code=0)


def test_a_timed_run_has_no_validation_and_nothing_that_follows_one() -> None:
    stop = "{_target_:lightning.pytorch.callbacks.EarlyStopping,monitor:val/loss}"
    config = composed("callbacks=early_stopping", f"+callbacks.mine={stop}")
    assert (
        check_config(for_timing(config, 1.0))["callbacks"].keys().isdisjoint({"early_stopping", "mine", "checkpoint"})
    )


def test_a_record_keeps_a_callback_that_no_new_run_takes_and_no_timed_step_has_it() -> None:
    config = composed("model=mlp")
    averaging = {"_target_": "lightning.pytorch.callbacks.StochasticWeightAveraging", "swa_lrs": 0.01}
    config["callbacks"]["mine"] = averaging
    assert check_config(config)["callbacks"]["mine"] == averaging
    assert "mine" not in for_timing(config, 1.0)["callbacks"]


def test_an_explanation_keeps_the_callbacks_that_change_a_step() -> None:
    until = "+callbacks.until={_target_:batchscope.callbacks.until_known.StopWhenKnown}"
    config = composed("callbacks=[weight_averaging,early_stopping,wait_until_quiet]", until)
    assert check_config(for_explanation(config))["callbacks"].keys() == {"nonfinite", "weight_averaging"}


@pytest.mark.parametrize(("devices", "explained"), [([3], [3]), ([1, 3], 1), (2, 1), ("auto", 1)])
def test_a_run_is_explained_on_one_device_and_on_the_gpu_that_is_named(devices, explained) -> None:
    config = composed("trainer.devices=1")
    config["trainer"]["devices"] = devices
    assert for_explanation(config)["trainer"]["devices"] == explained


def test_an_interrupted_run_is_resumed_and_a_finished_one_evaluated_by_the_lines_that_they_print(tmp_path) -> None:
    by_the_clock = ["+trainer.val_check_interval='00:00:00:00'", "+trainer.check_val_every_n_epoch=null"]
    folders = [*elsewhere(tmp_path), "hydra.run.dir=a run"]
    stopped = run(tmp_path, *DIGITS, *by_the_clock, *folders, faults=[(STEP, 3, interrupt)])
    finished = started(tmp_path, [*printed(stopped.said, "resume ", "train 'resume=a run'"), "-v"])
    assert record(tmp_path / "a run")["status"] == "finished"
    words = printed(finished.said, "again ", "evaluate 'ckpt=a run/checkpoints/best.ckpt'")
    assert words[3:] == [f"data.root={tmp_path}/my data"]
    assert "test/acc" in started(tmp_path, words).said


@pytest.mark.slow
def test_a_requeued_job_goes_on_with_its_run_whatever_options_it_was_given(tmp_path: Path) -> None:
    (tmp_path / "srun").write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    root, curves = elsewhere(tmp_path)
    line = ["bash", SCRIPT, *DIGITS, f"++{root}", curves, "callbacks.curves=null", "+trainer.gradient_clip_val=1"]
    environ = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    for fault, code in (([(STEP, 6, kill_9)], -9), ([], 0)):
        arguments = subprocess.check_output(line, cwd=tmp_path, env=environ, text=True)
        *program, _ = arguments.split("\0")
        words = program[program.index("-m") :]
        assert words[:2] == ["-m", "batchscope.train"]
        run(tmp_path, *words[2:], faults=fault, code=code)
    run_record = record(tmp_path / "outputs/runs/7")
    assert (run_record["status"], run_record["resumed"][0]["step"], run_record["steps"]) == ("finished", 4, 8)


@pytest.mark.parametrize(
    ("array", "job"), [({}, "7"), ({"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}, "7_3")]
)
def test_of_an_array_of_jobs_the_one_that_usr1_has_ended_is_requeued_alone(array, job, tmp_path: Path) -> None:
    """Its ranks end one after another: srun is told to end none by SIGTERM when the first one does."""
    srun = '[ "$1" = --kill-on-bad-exit=0 ] && exit 138; exit 143'
    for name, commands in {"srun": srun, "scontrol": 'echo "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{commands}\n")
        (tmp_path / name).chmod(0o755)
    environ = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", **array}
    result = subprocess.run(["bash", SCRIPT], cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True, check=False)
    assert (result.returncode, result.stdout) == (138, f"requeue {job}\n")


# --- the options of a new run, beside resume= ------------------------------------------------------------------------


def resumed(run_dir: Path, started_with: list[str], *words: str) -> Any:
    """Return the configuration and options of a resumed run, or the refusal; `words` stand beside `resume=`."""
    config, trained = composed(*started_with), []
    run_record = {"schema": 3, "status": "interrupted", "config": config, "choices": {}, "overrides": ["as recorded"]}
    (run_dir / "run.json").write_text(json.dumps(run_record))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("batchscope.training.run.train", lambda *run: trained.append((run[0], run[3])))
        refused = answer("train", f"resume={run_dir}", *words).err.removeprefix("error: ")
    return refused or trained[0]


@pytest.mark.parametrize(
    "options",
    [
        ["experiment=mnist_rows", "model=rnn_cell", "data.root=/elsewhere"],
        ["++data.root=/elsewhere", "logger={csv: {save_dir: /elsewhere}}", "hydra.job.name=x"],
        ["logger=null", "~callbacks.progress", "model=torchvision", "model.weights=DEFAULT"],
        ["+callbacks.stop={_target_: lightning.pytorch.callbacks.EarlyStopping}", "+trainer.model_registry=a/b"],
    ],
    ids=" ".join,
)
def test_the_options_that_a_run_was_started_with_confirm_it_and_change_nothing(options, run_dir):
    config, overrides = resumed(run_dir, options, *options)
    assert resume.is_same_config(config, resume.recorded_config({"config": config}, run_dir))
    assert (config["resume"], overrides) == ("out", ["as recorded"])


def test_other_options_are_changes_to_the_run_and_confirm_nothing(run_dir: Path) -> None:
    options = ["optimizer.schedule=constant", "trainer.max_epochs=3", "data.root=/elsewhere"]
    config, overrides = resumed(run_dir, options, *options, "trainer.max_epochs=4")
    assert config["trainer"]["max_epochs"] == 4
    assert overrides == ["as recorded", *options, "trainer.max_epochs=4"]
    message = resumed(run_dir, options, *options, "optimizer.lr=7.0")
    assert message.startswith("resume: optimizer.lr is ") and "and 7.0 would change the result" in message
    message = resumed(run_dir, options, "seed=0")
    assert message.startswith("data.root: is '/elsewhere' in out/run.json, and a file alone does not decide that; ")
