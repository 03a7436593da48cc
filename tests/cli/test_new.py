"""`batchscope new` writes a project that trains as it stands, under a name that nothing else has."""

import re
import sys
from pathlib import Path

import pytest

from batchscope.options.groups import use_config_dir
from tests.support.command_lines import answer, composed

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own-project"


def test_every_file_of_the_example_is_written_with_the_name_of_the_project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = answer("new", "wavelets")
    assert "cd wavelets\n    batchscope train --config-dir=conf experiment=wavelets\n" in result.out
    written = {path: path.read_text() for path in Path("wavelets").rglob("*") if path.is_file()}
    assert written.keys() > {Path("wavelets/README.md"), Path("wavelets/wavelets/model.py")}
    for path, text in written.items():
        original = EXAMPLE / str(path.relative_to("wavelets")).replace("wavelets", "mynet")
        assert text == original.read_text().replace("mynet", "wavelets")
        assert text.lstrip().startswith(("#", '"""'))  # what it is for
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir("wavelets")
    use_config_dir("conf")
    assert composed("experiment=wavelets")["callbacks"]["weight_norm"]["_target_"] == "wavelets.callback.WeightNorm"
    _, _, example = Path("conf/callbacks/wavelets.yaml").read_text().partition("\n\n")
    assert composed("callbacks=wavelets") == composed()
    Path("conf/callbacks/tried.yaml").write_text(re.sub("^# ", "", example, flags=re.MULTILINE))
    callbacks = composed("callbacks=tried")["callbacks"]
    assert (callbacks["checkpoint"]["monitor"], callbacks["early_stopping"]["patience"]) == ("val/acc", 3)
    assert callbacks.keys() == {*composed()["callbacks"], "early_stopping"}


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder in which nobody can write")
def test_a_folder_that_cannot_be_written_is_one_line(monkeypatch):
    monkeypatch.chdir("/proc/self")
    assert answer("new", "mynet").err.startswith("error: new: 'mynet' cannot be written: ")
