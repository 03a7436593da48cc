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


def start(words: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(words, cwd=cwd, env=environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


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
    assert all(
        f"\n  {command} " in out for command in ("train", "evaluate", "report", "compare", "explain", "hardware")
    )


def test_the_version_is_printed(monkeypatch, capsys) -> None:
    assert answer(monkeypatch, capsys, "--version") == (0, f"batchscope {__version__}\n", "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["trani"],
            "trani: no such command. Did you mean 'train'? batchscope takes train, new, evaluate, report, compare, explain, choose, hardware",
        ),
        (
            ["--model", "cnn"],
            "--model: no such command. batchscope takes train, new, evaluate, report, compare, explain, choose, hardware",
        ),
        (["model=cnn"], "model=cnn: an option comes after a command; write batchscope train model=cnn"),
    ],
)
def test_an_unknown_command_is_one_line_and_exit_code_2(words: list[str], said: str, monkeypatch, capsys) -> None:
    assert answer(monkeypatch, capsys, *words) == (2, "", f"error: {said}\n")


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("train modle=cnn", "modle: no such option."),
        ("evaluate ckpt=nope.ckpt", "ckpt: got 'nope.ckpt', which is not a file"),
    ],
)
def test_a_mistake_is_answered_before_torch_is_imported(
    mistake: str, said: str, batchscope: list[str], tmp_path: Path
) -> None:
    words = [*batchscope, *mistake.split()]
    if len(batchscope) == 1:  # the script's first line names the interpreter
        words = [sys.executable, "-X", "importtime", *words]
    else:
        words[1:1] = ["-X", "importtime"]
    done = start(words, tmp_path)
    lines = done.stderr.splitlines()
    assert done.returncode == 1
    assert any(line.startswith(f"error: {said}") for line in lines)
    assert not any(line.endswith(" torch") for line in lines)
    assert {path.name for path in tmp_path.iterdir()} <= {"bin"}


@pytest.mark.parametrize("command", ["evaluate", "report"])
def test_a_command_gets_the_words_after_it(command: str, monkeypatch, capsys) -> None:
    code, _, err = answer(monkeypatch, capsys, command, "--nope")
    assert code == 2
    assert err.startswith("error: ") and command not in err


@pytest.mark.parametrize("command", ["evaluate", "report", "compare", "explain", "hardware"])
def test_help_names_the_command_as_the_program_does(command: str, monkeypatch, capsys) -> None:
    code, out, err = answer(monkeypatch, capsys, command, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"usage: batchscope {command} ")
    assert f"\n    batchscope {command}" in out  # an example


@pytest.mark.slow
def test_a_run_on_two_devices_is_trained_and_its_printed_commands_name_the_program(
    batchscope: list[str], tmp_path: Path
) -> None:
    devices = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]
    options = [*SMALL, *devices, "hydra.run.dir=out", "optimizer.schedule=constant"]
    done = start([*batchscope, "train", "-v", *options], tmp_path)
    assert done.returncode == 0, done.stderr
    assert record(tmp_path / "out")["throughput"]["processes"] == 2
    named = batchscope[0] if len(batchscope) == 1 else "python -m batchscope"
    assert f"again   {named} evaluate ckpt=out/checkpoints/best.ckpt" in done.stdout
    resumed = start([*batchscope, "train", "resume=out", "trainer.max_epochs=3"], tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert record(tmp_path / "out")["epochs"] == 3


@pytest.mark.slow
def test_a_sweep_is_reported_and_resumed_by_the_program_that_started_it(batchscope: list[str], tmp_path: Path) -> None:
    words = [*batchscope, "train", "-m", *SMALL, "seed=1,2", "hydra.sweep.dir=s"]
    assert start(words, tmp_path).returncode == 0
    again = start(words, tmp_path)
    assert again.returncode == 0
    assert again.stdout.count(" — kept") == 2
    assert start([*batchscope, "report", "s"], tmp_path).returncode == 0
