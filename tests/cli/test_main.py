"""The program `batchscope`: one word chooses the command, however the program is started."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from batchscope import __main__ as program
from batchscope import __version__
from tests.support.runs import SMALL, record
from tests.support.waiting import PATIENCE_S

CONSOLE_SCRIPT = "import sys\nfrom batchscope.__main__ import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
COMMANDS = ["train", "new", "evaluate", "run", "predict", "export", "latency", "report"]
COMMANDS += ["compare", "explain", "choose", "hardware"]


@pytest.fixture(params=["installed", "module"])
def batchscope(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """The words that start the program: the script that an installation writes, or `python -m batchscope`."""
    if request.param == "module":
        return [sys.executable, "-m", "batchscope"]
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "batchscope"
    script.write_text(f"#!{sys.executable}\n{CONSOLE_SCRIPT}")
    script.chmod(0o755)
    return [str(script)]


def start(words: list[str], cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    known = os.environ | {"OMP_NUM_THREADS": "1"} | environ
    return subprocess.run(words, cwd=cwd, env=known, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the program in this process."""
    monkeypatch.setattr(sys, "argv", ["batchscope", *words])
    main_module = sys.modules["__main__"]
    monkeypatch.setattr(main_module, "__spec__", main_module.__spec__)  # which the program changes
    try:
        program.main()
        code = 0
    except SystemExit as end:
        code = end.code
    return code, *capsys.readouterr()


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_help_lists_every_command(words: list[str], monkeypatch, capsys) -> None:
    code, out, err = answer(monkeypatch, capsys, *words)
    assert (code, err) == (0, "")
    assert all(f"\n  {command} " in out for command in COMMANDS)


def test_the_version_is_printed(monkeypatch, capsys) -> None:
    assert answer(monkeypatch, capsys, "--version") == (0, f"batchscope {__version__}\n", "")


TAKES = f"batchscope takes {', '.join(COMMANDS)}"
INSTALL = "takes install=bash, install=zsh, install=fish, or uninstall=…"
MISTAKES = {
    "trani": f"trani: no such command. Did you mean 'train'? {TAKES}",
    "--model cnn": f"--model: no such command. {TAKES}",
    "model=cnn": "model=cnn: an option comes after a command; write batchscope train model=cnn",
    "evaluate --nope": "unrecognized arguments: --nope",
    "report x --ou=y": "unrecognized arguments: --ou=y. Did you mean '--out'?",
    "compare x": "the following arguments are required: B; batchscope compare --help says what it takes",
    "--shell-completion": f"--shell-completion: {INSTALL}",
    "--shell-completion install=cmd": f"--shell-completion: {INSTALL}",
    "--shell-completion query=bash": f"--shell-completion: {INSTALL}",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_what_cannot_be_parsed_is_one_line_and_exit_code_2(line: str, monkeypatch, capsys) -> None:
    monkeypatch.delenv("COMP_LINE", raising=False)
    assert answer(monkeypatch, capsys, *line.split()) == (2, "", f"error: {MISTAKES[line]}\n")


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("train modle=cnn", "modle: no such option."),
        ("evaluate ckpt=nope.ckpt", "ckpt: got 'nope.ckpt', which is not a file"),
    ],
)
def test_a_mistake_is_answered_before_anything_slow_is_imported(mistake: str, said: str, tmp_path: Path) -> None:
    done = start([sys.executable, "-X", "importtime", "-m", "batchscope", *mistake.split()], tmp_path)
    lines = done.stderr.splitlines()
    assert done.returncode == 1
    assert any(line.startswith(f"error: {said}") for line in lines)
    assert not {line.rpartition(" ")[2] for line in lines} & {"torch", "lightning", "pandas", "scipy", "matplotlib"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [one for one in COMMANDS if one != "new"])
def test_help_names_the_command_as_the_program_does(command: str, monkeypatch, capsys) -> None:
    code, out, err = answer(monkeypatch, capsys, command, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"usage: batchscope {command} ")
    assert f"\n    batchscope {command}" in out  # an example


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("batchscope ev", {"evaluate"}),
        ("batchscope train mod", {"model=", "model."}),
        ("batchscope train model=ml", {"model=mlp"}),
        ("batchscope train optimizer=sgd optimizer.mom", {"optimizer.momentum="}),
        ("batchscope report x", set()),
    ],
)
def test_bash_completes_a_word(typed: str, completed: set[str], batchscope: list[str], tmp_path: Path) -> None:
    if len(batchscope) > 1:
        pytest.skip("bash completes the installed program")
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    asked = 'eval "$(batchscope --shell-completion install=bash)"; hydra_bash_completion; echo ${COMPREPLY[@]}'
    known = {"PATH": path, "COMP_LINE": typed, "COMP_POINT": str(len(typed)), "COMP_CWORD": str(len(typed.split()) - 1)}
    done = start(["bash", "-c", asked], tmp_path, **known)
    assert set(done.stdout.split()) == completed, done.stderr


@pytest.mark.slow
def test_a_run_on_two_devices_is_trained_evaluated_and_resumed(batchscope: list[str], tmp_path: Path) -> None:
    devices = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]
    done = start([*batchscope, "train", "-v", *SMALL, *devices, "optimizer.schedule=constant"], tmp_path)
    assert done.returncode == 0, done.stderr
    (out,) = (tmp_path / "outputs" / "runs").iterdir()  # the ranks agree on a folder that is named by the time
    assert record(out)["throughput"]["processes"] == 2
    assert f"again   batchscope evaluate ckpt={out.relative_to(tmp_path)}/checkpoints/best.ckpt" in done.stdout
    resumed = start([*batchscope, "train", "resume=last", "trainer.max_epochs=3"], tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert record(out)["epochs"] == 3


@pytest.mark.slow
def test_a_sweep_is_reported_and_resumed(batchscope: list[str], tmp_path: Path) -> None:
    words = [*batchscope, "train", "-m", *SMALL, "seed=1,2", "hydra.sweep.dir=s"]
    assert start(words, tmp_path).returncode == 0
    again = start(words, tmp_path)
    assert again.returncode == 0
    assert again.stdout.count(" — kept") == 2
    assert start([*batchscope, "report", "s"], tmp_path).returncode == 0
