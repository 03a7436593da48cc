"""`batchscope new` writes a project that trains as it stands, under a name that nothing else has."""

import sys
from pathlib import Path

import pytest

from batchscope.cli import new
from batchscope.options.compose import check_command_line
from batchscope.options.groups import use_config_dir

ROOT = Path(__file__).resolve().parents[2]


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["batchscope", *words])
    new.main()


def files_in(folder: Path) -> dict[str, str]:
    """The texts below a folder, without what a run or a test leaves there."""
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    kept = [file for file in files if not {"__pycache__", "data", "outputs", "mynet.egg-info"} & {*file.parts}]
    return {str(file): (folder / file).read_text() for file in kept}


def test_the_example_in_the_repository_is_what_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    call(monkeypatch, "mynet")
    example = ROOT / "examples" / "own-project"
    assert files_in(Path("mynet")) == files_in(example)
    assert "cd mynet\n    batchscope train --config-dir=conf experiment=mynet\n" in capsys.readouterr().out


def test_every_file_has_the_name_of_the_project_and_says_what_it_is_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    call(monkeypatch, "wavelets")
    files = [path for path in Path("wavelets").rglob("*") if path.is_file()]
    assert not [path for path in files if "mynet" in str(path) or "mynet" in path.read_text()]
    assert all(path.read_text().lstrip().startswith(("#", '"""')) for path in files)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir("wavelets")
    use_config_dir("conf")
    (config,) = check_command_line(["experiment=wavelets", "run_dir=out"], multirun=False)
    assert config["callbacks"]["weight_norm"]["_target_"] == "wavelets.callback.WeightNorm"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("my-net", "new: got 'my-net', takes a name for a Python package: small letters"),
        ("Mynet", "new: got 'Mynet', takes a name for a Python package"),
        ("../net", "new: got '../net', takes a name for a Python package"),
        ("", "new: got '', takes a name for a Python package"),
        ("class", "new: got 'class', takes a name for a Python package"),
        ("torch", "new: got 'torch', which is the name of another module"),
        ("json", "new: got 'json', which is the name of another module"),
        ("conf", "new: got 'conf', which is the name of another module"),
        ("cnn", "new: got 'cnn', which is the name of a choice of batchscope"),
        ("taken", "new: taken is there already; choose another name, or another folder to work in"),
    ],
)
def test_a_name_that_cannot_be_taken_is_one_line(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").symlink_to("nowhere")
    with pytest.raises(SystemExit):
        call(monkeypatch, name)
    assert capsys.readouterr().err.startswith(f"error: {said}")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder in which nobody can write")
def test_a_folder_that_cannot_be_written_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir("/proc/self")
    with pytest.raises(SystemExit):
        call(monkeypatch, "mynet")
    assert capsys.readouterr().err.startswith("error: new: mynet cannot be written: ")
