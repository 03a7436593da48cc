"""A project of one's own, as `batchscope new` writes it: trained, stopped, resumed, evaluated; and what is wrong with it.

docs/own-project.md and docs/transformer.md are true: their commands do what they show, in a folder with the files that a page
has, with nothing but the wheel installed. `WRITE_DOCS=1 pytest -m slow tests/test_own_project.py` writes what the commands
print into the pages.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from batchscope.cli import new
from tests.support import wheel
from tests.support.runs import assert_alike, kill_9, last, record, run
from tests.support.transcript import Shell

WORDS = ["--config-dir=conf", "experiment=mynet", "trainer.accelerator=cpu", "trainer.max_epochs=2"]
WORDS += [
    "callbacks.throughput.calibrate=false",
    "callbacks.progress=null",
    "callbacks.device=null",
    "data.batch_size=200",
]
AGAIN = ["--config-dir=conf"]
PAGES = wheel.ROOT / "docs"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> wheel.Environment:
    folder = tmp_path_factory.mktemp("own")
    return wheel.Environment(folder / "venv", wheel.build(folder))


@pytest.mark.slow  # eight processes that import torch
def test_the_commands_of_the_transformer_do_what_they_show(tmp_path: Path, installed: wheel.Environment) -> None:
    Shell(tmp_path, installed).check(PAGES / "transformer.md")
    whole, killed = tmp_path / "outputs/runs/whole", tmp_path / "outputs/runs/killed"
    assert_alike(last(whole)["state_dict"], last(killed)["state_dict"])
    assert record(killed)["throughput"]["timesteps_per_sec"] > 4 * record(killed)["throughput"]["samples_per_sec"]


@pytest.mark.slow  # ten processes that import torch
def test_the_commands_of_the_page_do_what_it_shows(tmp_path: Path, installed: wheel.Environment) -> None:
    shell = Shell(tmp_path, installed)
    shell.check(PAGES / "own-project.md")
    measured = shell.run("batchscope choose --config-dir=conf model=mynet data=waves data.batch_size=16,64")
    assert measured[0] == 0, measured
    rerun = "batchscope compare outputs/runs/first outputs/runs/killed --rerun --passes 5 --seconds 1 --config-dir=conf"
    assert shell.run(rerun)[0] in (0, 3)  # a slowdown on a busy machine
    first, killed = shell.folder / "outputs/runs/first", shell.folder / "outputs/runs/killed"
    assert_alike(last(first)["state_dict"], last(killed)["state_dict"])


# --- in this environment ---------------------------------------------------------------------------------------------


def write_project(folder: Path, name: str) -> Path:
    for file, content in new.files_of(name).items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(content)
    return folder


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project, as it is written."""
    return write_project(tmp_path, "mynet")


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_a_killed_run_is_resumed_to_the_same_weights_and_evaluated(project: Path) -> None:
    whole = run(project, *WORDS, "hydra.run.dir=whole")
    assert whole.end() == 0, whole.complained
    assert "train/weight_norm" in record(project / "whole")["metrics"]
    step = ("batchscope.training.task.Task.training_step", 12, kill_9)
    options = ["hydra.run.dir=out", "callbacks.checkpoint.every_n_steps=5", "data.num_workers=2"]
    assert run(project, *WORDS, *options, faults=[step]).end() == -9
    resumed = run(project, "-v", "resume=out", *AGAIN)
    assert resumed.end() == 0, resumed.complained
    assert_alike(last(project / "whole")["state_dict"], last(project / "out")["state_dict"])
    again = next(line for line in resumed.said.splitlines() if line.startswith("again"))
    assert again.endswith("ckpt=out/checkpoints/best.ckpt --config-dir=conf")
    tested = run(project, "ckpt=out/checkpoints/best.ckpt", *AGAIN, module="batchscope.cli.evaluate")
    assert tested.end() == 0, tested.complained
    assert "tested on waves (400 samples)" in tested.said


@pytest.mark.slow  # two processes that import torch
def test_the_other_ranks_of_a_run_know_a_package_that_is_not_installed(
    tmp_path: Path, installed: wheel.Environment
) -> None:
    write_project(tmp_path, "wavelets")
    words = " ".join(WORDS).replace("mynet", "wavelets")
    code, lines = Shell(tmp_path, installed).run(f"batchscope train {words} trainer=ddp trainer.devices=2")
    assert code == 0, lines


def forget_spec(project: Path) -> None:
    edit(project / "mynet" / "data.py", "def spec(self)", "def specification(self)")


def damage_file(project: Path) -> None:
    (project / "data" / "waves").mkdir(parents=True)
    (project / "data" / "waves" / "train.npy").write_bytes(b"\x93NUMPY\x01\x00v\x00{'descr': ")


def make_no_file(project: Path) -> None:
    edit(project / "mynet" / "data.py", "if not path.exists()", "if number != 0")


def break_import(project: Path) -> None:
    edit(project / "mynet" / "model.py", "from torch import", "import nowhere_at_all\nfrom torch import")


MISTAKES = {
    forget_spec: "data: Waves",
    damage_file: "data: the train split of waves cannot be loaded: ValueError: ",
    make_no_file: "data: the train split of waves cannot be loaded: FileNotFoundError: [Errno 2] No such file",
    break_import: "model._target_: mynet.model.Net cannot be imported: ModuleNotFoundError: No module named "
    "'nowhere_at_all' (mynet/model.py, line 3)",
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda one: one.__name__)
def test_a_mistake_in_the_project_is_one_line(mistake: Callable[[Path], None], project: Path) -> None:
    mistake(project)
    done = run(project, *WORDS, "hydra.run.dir=out")
    assert done.end() == 1
    (line,) = done.complained.splitlines()
    assert line.startswith(f"error: {MISTAKES[mistake]}")
