"""A project of one's own, as `batchscope new` writes it: trained, evaluated; and what is wrong with it.

docs/own-project.md is true: its commands do what they show, in a folder with the files that it has, with nothing but the wheel
installed. `WRITE_DOCS=1 pytest -m slow tests/test_own_project.py -k page` writes what the commands print into the page.
"""

import json
from pathlib import Path

import pytest

from batchscope.cli import new
from tests.support import wheel
from tests.support.runs import assert_alike, last, record, run
from tests.support.transcript import Shell, write_files

WORDS = ["--config-dir=conf", "experiment=mynet", "trainer.accelerator=cpu", "trainer.max_epochs=2"]
WORDS += ["callbacks.throughput.calibrate=false", "callbacks.progress=null", "callbacks.device=null"]
WORDS += ["data.batch_size=200"]
PAGE = wheel.ROOT / "docs" / "own-project.md"


@pytest.mark.slow  # fifteen processes that import torch
def test_the_commands_of_the_page_do_what_it_shows(tmp_path: Path, installed: wheel.Environment) -> None:
    shell = Shell(tmp_path, installed)
    shell.check(PAGE)
    runs = shell.folder / "outputs/runs"
    assert_alike(last(runs / "first")["state_dict"], last(runs / "killed")["state_dict"])
    sentences = record(runs / "encoder")["throughput"]
    assert sentences["timesteps_per_sec"] > 4 * sentences["samples_per_sec"]
    measured = shell.run("batchscope choose --config-dir=conf model=mynet data=waves data.batch_size=16,64")
    assert measured[0] == 0, measured
    rerun = "batchscope compare outputs/runs/first outputs/runs/killed --rerun --passes 5 --seconds 1 --config-dir=conf"
    assert shell.run(rerun)[0] in (0, 3)  # a slowdown on a busy machine


# --- in this environment ---------------------------------------------------------------------------------------------


def write_project(folder: Path, name: str) -> Path:
    for file, content in new.files_of(name).items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(content)
    return folder


def test_the_project_is_trained_with_its_callback_and_evaluated(tmp_path: Path) -> None:
    project = write_project(tmp_path, "mynet")
    trained = run(project, "-v", *WORDS, "hydra.run.dir=out")
    assert trained.end() == 0, trained.complained
    assert "train/weight_norm" in record(project / "out")["metrics"]
    again = next(line for line in trained.said.splitlines() if line.startswith("again"))
    assert again.endswith("ckpt=out/checkpoints/best.ckpt --config-dir=conf")
    tested = run(project, "--config-dir=conf", "ckpt=out/checkpoints/best.ckpt", module="batchscope.cli.evaluate")
    assert tested.end() == 0, tested.complained
    assert "tested on waves" in tested.said
    tests = run(project, "tests", "-p", "no:cacheprovider", module="pytest")
    tests.end()
    assert "1 passed" in tests.said, tests.said


def test_the_callbacks_and_the_logger_of_the_page_stand_beside_the_default_ones(tmp_path: Path) -> None:
    write_files(PAGE.read_text(encoding="utf-8"), write_project(tmp_path, "mynet"))
    words = [word for word in WORDS if word != "callbacks.device=null"]
    trained = run(tmp_path, *words, "callbacks=my_finetuning", "logger=my_lines", "hydra.run.dir=out")
    assert trained.end() == 0, trained.complained
    rows = [json.loads(line) for line in (tmp_path / "out/lines.jsonl").read_text().splitlines()]
    steps = [
        row["step"] for row in rows if "train/loss" in row
    ]  # each curve in order; several come one after the other
    assert steps == sorted(steps)
    assert {key for row in rows for key in row} >= {"train/loss", "time/step_ms", "val/acc", "test/acc"}
    assert record(tmp_path / "out")["config"]["callbacks"]["checkpoint"]["monitor"] == "val/acc"
    assert all((tmp_path / "out" / name).exists() for name in ("checkpoints/best.ckpt", "csv/metrics.csv"))


@pytest.mark.slow  # it starts two processes that import torch
def test_the_other_ranks_of_a_run_know_a_package_that_is_not_installed(tmp_path, installed) -> None:
    write_project(tmp_path, "wavelets")
    words = " ".join(WORDS).replace("mynet", "wavelets")
    code, lines = Shell(tmp_path, installed).run(f"batchscope train {words} trainer=ddp trainer.devices=2")
    assert code == 0, lines


IMPORTED = "model._target_: mynet.model.Net cannot be imported: ModuleNotFoundError: No module named 'nowhere'"
MISTAKES = {
    "data/waves/train.npy": (b"\x93NUMPY\x01\x00v\x00{'descr': ", "data: the train split of waves cannot be loaded: "),
    "mynet/model.py": (b"\nimport nowhere\n", f"{IMPORTED} (mynet/model.py, line 2)"),
}


@pytest.mark.parametrize("file", [pytest.param("data/waves/train.npy", marks=pytest.mark.slow), "mynet/model.py"])
def test_a_mistake_in_the_project_is_one_line(file: str, tmp_path: Path) -> None:
    content, message = MISTAKES[file]
    write_project(tmp_path, "mynet")
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_bytes(content)
    failed = run(tmp_path, *WORDS, "hydra.run.dir=out")
    assert failed.end() == 1
    (line,) = failed.complained.splitlines()
    assert line.startswith(f"error: {message}")
