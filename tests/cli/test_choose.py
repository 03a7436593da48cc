"""`batchscope choose`: the words of its command line, its output, and what it refuses in one line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from batchscope.cli import choose
from tests.choice.paper import L4, Training
from tests.choice.trainings import write_training
from tests.support.synthetic_runs import write_run


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def measured(monkeypatch):
    """A sweep on a CPU whose runs were to train 3 epochs."""
    monkeypatch.setattr(choose, "_workloads", lambda folders: ([Training(flops=1e9)], 3))
    Path("sweep").mkdir()
    return "sweep"


def call(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["batchscope choose", *map(str, words)])
    choose.main()


def refused(monkeypatch, capsys, *words):
    with pytest.raises(SystemExit) as end:
        call(monkeypatch, *words)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    return end.value.code, said.err.removeprefix("error: ").strip()


def test_a_table_and_a_recommendation(monkeypatch, capsys, measured):
    call(monkeypatch, measured, "--devices", "t4,h100")
    lines = capsys.readouterr().out.splitlines()
    assert "assumed: 3 epochs of 55,000 samples (trainer.max_epochs)" in " ".join(lines)
    at = next(number for number, line in enumerate(lines) if line.startswith("device"))
    assert [line.split()[0] for line in lines[at + 1 : at + 4]] == ["h100", "t4", "cpu"]
    assert any(line.startswith("H100: 3 epochs take") for line in lines)


def test_a_priced_device_is_in_the_table(monkeypatch, capsys, measured):
    call(monkeypatch, measured, "--price", "H200=$5/h", "--deadline", "1h", "--json")
    answer = json.loads(capsys.readouterr().out)
    labels = [one["label"] for one in answer["devices"]]
    assert {"cpu", "t4", "h100", "h200"} <= set(labels)
    assert answer["prices_per_hour"] == {"H200": 5.0}
    assert answer["deadline_s"] == 3600


def test_options_are_asked_for_and_kept(monkeypatch, capsys, measured):
    words = ["--epochs", "7", "--budget", "$5", "--start-up", "0", "--batch-size", "64", "--precision", "16-mixed"]
    call(monkeypatch, measured, *words, "--price", "cpu=0.02/h", "--json")
    answer = json.loads(capsys.readouterr().out)
    assert (answer["epochs"], answer["budget"], answer["start_up_s"]) == (7, 5.0, 0.0)
    assert {one["batch_size"] for one in answer["devices"]} == {64}
    assert next(one for one in answer["devices"] if one["label"] == "cpu")["cost"][1] > 0
    assert answer["currency"] == "$"


def test_the_table_the_plot_and_the_numbers_are_written(monkeypatch, capsys, measured, tmp_path):
    call(monkeypatch, measured, "--out", "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["choice.json", "choice.md", "choice.png"]
    assert "plot     out/choice.png" in capsys.readouterr().out
    call(monkeypatch, measured, "--out", "out")
    assert (tmp_path / "out-2" / "choice.md").exists()  # nothing is replaced


def test_nothing_is_written_unless_asked(monkeypatch, capsys, measured, tmp_path):
    call(monkeypatch, measured)
    assert [path.name for path in tmp_path.iterdir()] == ["sweep"]


def test_a_device_that_is_here_is_not_predicted(monkeypatch, capsys, measured):
    both = [Training(), Training(device=L4)]
    monkeypatch.setattr(choose, "_workloads", lambda folders: (both, None))
    call(monkeypatch, measured, "--devices", "l4,t4", "--json")
    answer = json.loads(capsys.readouterr().out)
    assert answer["epochs"] == 1
    assert sorted(one["label"] for one in answer["devices"]) == ["cpu", "cuda", "t4"]
    assert len(answer["checks"]) == 8


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "choose: takes the folder of a sweep, or options such as model=cnn data=mnist"),
        (["sweep", "--devices", "h10"], 1, "--devices: 'h10' is no known device. Did you mean 'h100'?"),
        (["sweep", "--devices", "8xh100"], 1, "--devices: got '8xh100', takes single devices"),
        (
            ["sweep", "--devices", "cpu,t4"],
            1,
            "--devices: cpu is a device of this machine, which is in the table if it",
        ),
        (["sweep", "--batch-size", "55001"], 1, "--batch-size: got 55,001, and an epoch has 55,000 samples"),
        (["sweep", "--price", "t4=1/h", "--price", "T4=2/h"], 1, "--price: t4 has two prices"),
        (["sweep", "--devices", ","], 2, "argument --devices: takes names of devices, such as t4,l4"),
        (["sweep", "--price", "h10=2/h"], 1, "--price: 'h10' is no known device. Did you mean 'h100'?"),
        (["sweep", "--price", "h100=2.5"], 2, "argument --price: takes a price for a time, such as h100=2.5/h, and"),
        (["sweep", "--budget", "0"], 2, "argument --budget: takes an amount of money above 0"),
        (["sweep", "--budget", "-5"], 2, "argument --budget: takes an amount of money above 0"),
        (["sweep", "--deadline", "2"], 2, "argument --deadline: takes a time above 0 with its unit"),
        (["sweep", "--deadline", "-2h"], 2, "argument --deadline: "),
        (["sweep", "--epochs", "0"], 2, "argument --epochs: takes a whole number from 1 to 1,000,000, got '0'"),
        (["sweep", "--epochs", "-1"], 2, "argument --epochs: "),
        (["sweep", "--epochs", "1.5"], 2, "argument --epochs: "),
        (["sweep", "--batch-size", "0"], 2, "argument --batch-size: takes a whole number from 1"),
        (["sweep", "--prices", "none.yaml"], 1, "--prices: none.yaml cannot be read: No such file or directory"),
        (["sweep", "model=cnn"], 2, "choose: takes folders or options; got sweep and model=cnn"),
        (["sweep", "--config-dir", "x"], 2, "--config-dir: is for a measurement, without a folder"),
        (["--deadlin", "2h", "--nope"], 2, "unrecognized arguments"),
        (["modle=cnn"], 1, "modle: no such option. Did you mean 'model'?"),
        (["model=cnn", "data.batch_size=64"], 1, "data.batch_size: choose needs several sizes"),
        (["model=cnn,mlp"], 1, "model: got several values, takes one"),
        (["model=cnn", "trainer.devices=2"], 1, "trainer.devices: choose compares single devices"),
    ],
)
def test_what_is_wrong_is_one_line(monkeypatch, capsys, measured, tmp_path, words, code, said):
    found = refused(monkeypatch, capsys, *words)
    assert found[0] == code
    assert found[1].startswith(said)
    assert [path.name for path in tmp_path.iterdir()] == ["sweep"]


def test_amounts_in_two_currencies_are_refused(monkeypatch, capsys, measured):
    code, said = refused(monkeypatch, capsys, measured, "--budget", "5 EUR", "--price", "t4=$1/h")
    assert (code, said) == (1, "--price, --budget: amounts in $ and in EUR cannot be compared")


def test_a_folder_that_cannot_be_written_is_one_line_after_the_answer(monkeypatch, capsys, measured, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as end:
        call(monkeypatch, measured, "--out", "file/out")
    said = capsys.readouterr()
    assert end.value.code == 1
    assert said.out.startswith("cnn · mnist")
    assert said.err.startswith("error: --out: file/out cannot be written: ") and said.err.count("\n") == 1


def test_options_are_measured_and_the_answer_says_where(monkeypatch, capsys, measured):
    from batchscope.sweep import sizes

    asked = {}

    def measure(overrides, wanted, kinds, folder, say):
        asked.update(overrides=overrides, sizes=wanted, kinds=list(kinds))
        say("cpu: measuring batch size 8")
        return [folder / kind for kind in kinds]

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


class TestFolders:
    """Records as runs leave them."""

    def test_a_sweep_is_read_without_torch_or_the_device(self, monkeypatch, capsys, tmp_path):
        call(monkeypatch, write_training(tmp_path / "sweep"), "--devices", "t4,tpu-v5e", "--json")
        answer = json.loads(capsys.readouterr().out)
        assert (answer["title"], answer["epochs"], answer["train_samples"]) == ("cnn · mnist", 2, 55_000)
        assert {one["label"]: one["known"] for one in answer["devices"]} == {
            "cpu": "measured",
            "t4": "predicted from cpu",
            "tpu-v5e": "bound: at best",
        }

    def test_two_devices_are_checked_against_each_other(self, monkeypatch, capsys, tmp_path):
        write_training(tmp_path / "both" / "cpu")
        write_training(tmp_path / "both" / "gpu", device="cuda", name="Tesla T4")
        call(monkeypatch, tmp_path / "both", "--devices", "t4,l4")
        text = capsys.readouterr().out
        assert "t4 (here)" in text
        assert text.count("check: a step on ") == 2

    @pytest.mark.parametrize(
        ("case", "said"),
        [
            ("none", "no runs in x (x: no such folder)"),
            ("empty", "no runs in x"),
            ("torn record", "no runs in x (x: cannot be read: "),
            ("no operations", "x: has no operations.json: it was measured before runs left one"),
            ("torn operations", "x/0/operations.json: cannot be read: "),
            ("one size", "x: has one batch size, 8; choose needs two at least"),
        ],
    )
    def test_a_folder_that_does_not_suffice_is_one_line(self, monkeypatch, capsys, case, said):
        folder = Path("x")
        if case in ("no operations", "torn operations", "one size"):
            write_training(folder, sizes=(8,) if case == "one size" else (8, 64))
        elif case != "none":
            folder.mkdir()
        for path in folder.rglob("operations.json"):
            if case == "no operations":
                path.unlink()
            elif case == "torn operations":
                path.write_text("{")
        if case == "torn record":
            (folder / "run.json").write_text("{")
        code, message = refused(monkeypatch, capsys, folder)
        assert code == 1
        assert message.startswith(said)

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (["--host", "nope"], "--host: got 'nope', takes fast, typical, slow"),
            (["--precision", "8-bit"], "--precision: got '8-bit', takes 32-true"),
        ],
    )
    def test_what_no_device_understands_is_one_line(self, monkeypatch, capsys, words, said):
        code, message = refused(monkeypatch, capsys, write_training(Path("x")), *words)
        assert (code, message[: len(said)]) == (1, said)

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
    def test_a_full_disk_under_standard_output_is_one_line(self):
        command = [sys.executable, "-m", "batchscope", "choose", str(write_training(Path("x"))), "--devices", "t4"]
        with open("/dev/full", "w") as full:
            done = subprocess.run(command, check=False, stdout=full, stderr=subprocess.PIPE, text=True)
        assert done.returncode == 1
        assert done.stderr.splitlines() == [
            "error: standard output cannot be written: the disk is full (No space left on device)"
        ]

    def test_folders_of_another_width_are_another_training(self, monkeypatch, capsys):
        gpu = {"device": "cuda", "name": "Tesla T4", "options": {"model.hidden_size": 512}}
        folders = [write_training(Path("x")), write_training(Path("y"), **gpu)]
        code, message = refused(monkeypatch, capsys, *folders)
        assert (code, message) == (1, "choose: takes one training; the folders have model.hidden_size=128 and 512")

    def test_runs_that_measured_nothing_are_named(self, monkeypatch, capsys):
        folder = write_training(Path("x"))
        write_run(folder / "3", 4096, status="out_of_memory")
        (folder / "4").mkdir()
        (folder / "4" / "run.json").write_text("{")
        call(monkeypatch, folder, "--devices", "t4")
        text = " ".join(capsys.readouterr().out.split())
        assert "left out: 3 (batch size 4,096): out of memory" in text
        assert "4: cannot be read: " in text

    def test_what_files_say_of_themselves_is_printed_without_control_characters(self, monkeypatch, capsys):
        folder = write_training(Path("x"), model="\x1b[31mred\ud800", name="a\x07b")
        call(monkeypatch, folder, "--devices", "t4", "--out", "out")
        call(monkeypatch, folder, "--devices", "t4", "--json")
        said = capsys.readouterr().out
        assert said.isprintable() or not {"\x1b", "\x07", "\ud800"} & set(said)
        assert "\x1b" not in Path("out/choice.md").read_text()

    def test_folders_are_of_one_training_and_of_different_devices(self, monkeypatch, capsys):
        folders = [write_training(Path(name)) for name in ("x", "y")]
        code, message = refused(monkeypatch, capsys, *folders)
        assert code == 1
        assert message == "choose: several folders were measured on the same device; give one for each device"
