"""`batchscope new` writes a project that trains as it stands, under a name that nothing else has."""

import sys
from pathlib import Path

import pytest

from batchscope.options.groups import use_config_dir
from tests.support.command_lines import answer, composed

ROOT = Path(__file__).resolve().parents[2]


def files_in(folder: Path) -> dict[str, str]:
    """The texts below a folder, without what a run or a test leaves there."""
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    kept = [file for file in files if not {"__pycache__", "data", "outputs", "mynet.egg-info"} & {*file.parts}]
    return {str(file): (folder / file).read_text() for file in kept}


def test_the_example_in_the_repository_is_what_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = answer("new", "mynet")
    example = ROOT / "examples" / "own-project"
    assert files_in(Path("mynet")) == files_in(example)
    assert "cd mynet\n    batchscope train --config-dir=conf experiment=mynet\n" in found.out


def test_every_file_has_the_name_of_the_project_and_says_what_it_is_for(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    answer("new", "wavelets")
    files = [path for path in Path("wavelets").rglob("*") if path.is_file()]
    assert not [path for path in files if "mynet" in str(path) or "mynet" in path.read_text()]
    assert all(path.read_text().lstrip().startswith(("#", '"""')) for path in files)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir("wavelets")
    use_config_dir("conf")
    assert composed("experiment=wavelets")["callbacks"]["weight_norm"]["_target_"] == "wavelets.callback.WeightNorm"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder in which nobody can write")
def test_a_folder_that_cannot_be_written_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/proc/self")
    assert answer("new", "mynet").err.startswith("error: new: mynet cannot be written: ")
