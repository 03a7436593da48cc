"""`batchscope choose`: the words of its command line, and its output."""

import json
from pathlib import Path

import pytest

from batchscope.sweep import sizes
from tests.choice.trainings import write_training
from tests.support.command_lines import answer


@pytest.fixture(autouse=True)
def sweep(monkeypatch, tmp_path):
    """A folder `sweep` in the working directory."""
    monkeypatch.chdir(tmp_path)
    return write_training(Path("sweep"))


def answered(*words):
    """The answer for the one training."""
    (found,) = json.loads(answer("choose", *words, "--json").out)["trainings"]
    return found


def test_a_table_a_recommendation_and_nothing_written(tmp_path):
    lines = answer("choose", "sweep", "--devices", "t4,h100", "--epochs", 3).out.splitlines()
    assert lines[0] == "cnn · mnist: 3 epochs of 55,000 samples, training steps alone"
    at = next(number for number, line in enumerate(lines) if line.endswith(" known"))
    assert sorted(line.split()[0] for line in lines[at + 1 : at + 4]) == ["cpu", "h100", "t4"]
    assert any(line.startswith("Take H100: 3 epochs take ") for line in lines)
    assert [path.name for path in tmp_path.iterdir()] == ["sweep"]


def test_options_change_the_answer():
    words = [
        "--price",
        "H200=5",
        "--price",
        "cpu=0.02",
        "--start-up",
        60,
        "--precision",
        "16-mixed",
        "--batch-size",
        64,
    ]
    found = answered("sweep/0", "sweep/1", "sweep/2", *words)  # the folders of a sweep's runs are one training
    devices = {each["label"]: each for each in found["devices"]}
    assert {"cpu", "t4", "h100", "h200"} <= {*devices}
    assert devices["cpu"]["cost"]["middle"] > 0 and devices["t4"]["cost"] is None
    assert (found["epochs"], found["assumed"]) == (2, {"start_up_s": 60.0, "precision": "16-mixed"})
    assert {each["batch_size"] for each in found["devices"]} == {64}
    assert len(answered("sweep", "--devices", "all")["devices"]) > 20


def test_a_folder_of_two_models_is_answered_for_each():
    write_training(Path("sweep") / "lstm", model="lstm")
    write_training(Path("sweep") / "mlp", model="mlp", sizes=(8,))
    text = answer("choose", "sweep", "--devices", "t4").out
    titles = [line.partition(":")[0] for line in text.splitlines() if "epochs of" in line]
    assert titles == ["lstm · mnist", "cnn · mnist"]
    assert text.endswith("left out: sweep/mlp/0: one batch size, 8, and choose needs two at least\n")


def test_options_are_measured_and_the_answer_says_where(monkeypatch):
    asked = []

    def measure(overrides, wanted, kinds, folder, say):
        asked.extend([overrides, wanted, list(kinds)])
        say("cpu: measuring batch size 8")
        return [write_training(folder / kind) for kind in kinds]

    monkeypatch.setattr(sizes, "measure", measure)
    rest = ["model=mlp", "trainer.accelerator=cpu", "trainer.max_epochs=9"]
    said = answer("choose", "data.batch_size=8,64", *rest)
    assert asked == [rest, [8, 64], ["cpu"]]
    assert "9 epochs of 55,000 samples" in said.out
    assert said.out.splitlines()[-1].startswith("measured outputs/choose/")
    assert said.err == "cpu: measuring batch size 8\n"


def test_what_files_say_of_themselves_is_printed_without_control_characters():
    folder = write_training(Path("x"), model="\x1b[31mred\ud800", name="a\x07b")
    for words in ([], ["--json"]):
        assert not {"\x1b", "\x07", "\ud800"} & set(answer("choose", folder, "--devices", "t4", *words).out)
