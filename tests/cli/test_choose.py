"""`batchscope choose`: the words of its command line, its output, and what it refuses in one line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from batchscope.cli import choose
from tests.choice.trainings import write_training


@pytest.fixture(autouse=True)
def sweep(monkeypatch, tmp_path):
    """A folder `sweep` in the working directory."""
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.chdir(tmp_path)
    return write_training(Path("sweep"))


def call(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["batchscope choose", *map(str, words)])
    choose.main()


def answered(monkeypatch, capsys, *words):
    call(monkeypatch, *words, "--json")
    return json.loads(capsys.readouterr().out)["trainings"]


def refused(monkeypatch, capsys, *words):
    with pytest.raises(SystemExit) as end:
        call(monkeypatch, *words)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    return end.value.code, said.err.removeprefix("error: ").strip()


def test_a_table_a_recommendation_and_nothing_written(monkeypatch, capsys, tmp_path):
    call(monkeypatch, "sweep", "--devices", "t4,h100", "--epochs", "3")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "cnn · mnist: 3 epochs of 55,000 samples, training steps alone"
    at = next(number for number, line in enumerate(lines) if line.endswith(" known"))
    assert sorted(line.split()[0] for line in lines[at + 1 : at + 4]) == ["cpu", "h100", "t4"]
    assert any(line.startswith("Take H100: 3 epochs take ") for line in lines)
    assert [path.name for path in tmp_path.iterdir()] == ["sweep"]


def test_the_length_is_that_of_the_runs_and_a_device_with_a_price_is_in_the_table(monkeypatch, capsys):
    (found,) = answered(monkeypatch, capsys, "sweep", "--price", "H200=5", "--price", "cpu=0.02")
    devices = {each["label"]: each for each in found["devices"]}
    assert {"cpu", "t4", "h100", "h200"} == {"cpu", "t4", "h100", "h200"} & set(devices)
    assert found["epochs"] == 2
    assert devices["cpu"]["cost"]["middle"] > 0 and devices["t4"]["cost"] is None


def test_what_is_assumed_is_an_option(monkeypatch, capsys):
    words = ["--start-up", "60", "--launch-us", "7", "--precision", "16-mixed", "--batch-size", "64"]
    (found,) = answered(monkeypatch, capsys, "sweep", *words)
    assert found["assumed"] == {"start_up_s": 60.0, "launch_us": 7.0, "precision": "16-mixed"}
    assert {each["batch_size"] for each in found["devices"]} == {64}


def test_a_folder_of_two_models_is_answered_for_each(monkeypatch, capsys):
    write_training(Path("sweep") / "lstm", model="lstm")
    write_training(Path("sweep") / "mlp", model="mlp", sizes=(8,))
    call(monkeypatch, "sweep", "--devices", "t4")
    text = capsys.readouterr().out
    assert [line.partition(":")[0] for line in text.splitlines() if "epochs of" in line] == [
        "cnn · mnist",
        "lstm · mnist",
    ]
    assert text.endswith("left out: sweep/mlp/0: one batch size, 8, and choose needs two at least\n")


def test_the_folders_of_a_sweeps_runs_are_one_training(monkeypatch, capsys):
    whole, single = (answered(monkeypatch, capsys, *words) for words in (["sweep"], ["sweep/0", "sweep/1", "sweep/2"]))
    assert whole == single


def test_every_known_card_can_be_asked_for(monkeypatch, capsys):
    (found,) = answered(monkeypatch, capsys, "sweep", "--devices", "all")
    assert len(found["devices"]) > 20


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "choose: takes the folder of a sweep, or options such as model=cnn data=mnist"),
        (["sweep", "model=cnn"], 2, "choose: takes folders or options; got sweep and model=cnn"),
        (["sweep", "--config-dir", "x"], 2, "choose: takes folders or options; got sweep and --config-dir"),
        (["sweep", "--deadlin", "2h"], 2, "unrecognized arguments"),
        (["none"], 1, "none: no such folder"),
        (["sweep/0"], 1, "choose: sweep/0: one batch size, 8, and choose needs two at least"),
        (["sweep", "--devices", "h10"], 1, "--devices: got 'h10', which is no known card. Did you mean 'h100'?"),
        (["sweep", "--devices", ","], 1, "--devices: got '', which is no known card."),
        (["sweep", "--price", "h10=2"], 1, "--price: got 'h10', which is no known card. Did you mean 'h100'?"),
        (["sweep", "--price", "h100=2/h"], 1, "--price: got 'h100=2/h', takes what an hour of a device costs"),
        (["sweep", "--price", "h100=nan"], 1, "--price: got 'h100=nan', takes what an hour of a device costs"),
        (["sweep", "--batch-size", "9"], 1, "--batch-size: got 9; cnn · mnist was measured at 8, 64, 512"),
        (["sweep", "--batch-size", "0"], 2, "argument --batch-size: takes a whole number from 1"),
        (["sweep", "--epochs", "1.5"], 2, "argument --epochs: takes a whole number from 1 to 100,000,000, got '1.5'"),
        (["sweep", "--start-up", "5min"], 2, "argument --start-up: takes a number from 0 to 1,000,000, got '5min'"),
        (["sweep", "--launch-us", "0"], 2, "argument --launch-us: takes a number from 0.5 to 1,000, got '0'"),
        (["sweep", "--precision", "8-bit"], 2, "argument --precision: invalid choice: '8-bit'"),
        (["modle=cnn"], 1, "modle: no such option. Did you mean 'model'?"),
        (["model=cnn", "data.batch_size=64"], 1, "data.batch_size: choose needs several sizes"),
        (["model=cnn,mlp"], 1, "model: got several values, takes one"),
        (["model=cnn", "trainer.devices=2"], 1, "trainer.devices: choose compares single devices"),
    ],
)
def test_what_is_wrong_is_one_line_and_nothing_is_written(monkeypatch, capsys, tmp_path, words, code, said):
    found = refused(monkeypatch, capsys, *words)
    assert found[0] == code
    assert found[1].startswith(said)
    assert [path.name for path in tmp_path.iterdir()] == ["sweep"]


def test_options_are_measured_and_the_answer_says_where(monkeypatch, capsys):
    from batchscope.sweep import sizes

    asked = {}

    def measure(overrides, wanted, kinds, folder, say):
        asked.update(overrides=overrides, sizes=wanted, kinds=list(kinds))
        say("cpu: measuring batch size 8")
        return [write_training(folder / kind) for kind in kinds]

    monkeypatch.setattr(sizes, "measure", measure)
    call(monkeypatch, "model=mlp", "data.batch_size=8,64", "trainer.accelerator=cpu", "trainer.max_epochs=9")
    said = capsys.readouterr()
    assert asked == {
        "overrides": ["model=mlp", "trainer.accelerator=cpu", "trainer.max_epochs=9"],
        "sizes": [8, 64],
        "kinds": ["cpu"],
    }
    assert "9 epochs of 55,000 samples" in said.out
    assert said.out.splitlines()[-1].startswith("measured outputs/choose/")
    assert said.err == "cpu: measuring batch size 8\n"


def test_what_files_say_of_themselves_is_printed_without_control_characters(monkeypatch, capsys):
    folder = write_training(Path("x"), model="\x1b[31mred\ud800", name="a\x07b")
    call(monkeypatch, folder, "--devices", "t4")
    call(monkeypatch, folder, "--devices", "t4", "--json")
    assert not {"\x1b", "\x07", "\ud800"} & set(capsys.readouterr().out)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_under_standard_output_is_one_line():
    command = [sys.executable, "-m", "batchscope", "choose", "sweep", "--devices", "t4"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, check=False, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "error: standard output cannot be written: the disk is full (No space left on device)"
    ]
