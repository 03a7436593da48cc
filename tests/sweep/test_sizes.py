"""A short measurement at a few batch sizes: which sizes, what is run, and when it stops."""

import json

import pytest

from batchscope.errors import UserError
from batchscope.sweep import fork_server, sizes


@pytest.mark.parametrize(
    ("words", "rest", "found"),
    [
        (["model=cnn", "data.batch_size=64,16"], ["model=cnn"], [16, 64]),
        (["model=cnn"], ["model=cnn"], []),
        (["data.batch_size=choice(8,16,32)"], [], [8, 16, 32]),
    ],
)
def test_sizes_are_listed_or_left_out(words, rest, found):
    assert sizes.own_sizes(words) == (rest, found)


@pytest.mark.parametrize("value", ["64", "64,64", "64,0", "64,x", "null"])
def test_one_size_is_not_enough(value):
    with pytest.raises(UserError, match="^data.batch_size: choose needs several sizes"):
        sizes.own_sizes([f"data.batch_size={value}"])


def test_the_timed_run_keeps_the_users_experiment():
    assert sizes.timed(["model=cnn"])[0] == "experiment=throughput"
    words = sizes.timed(["experiment=mnist_rows", "model=lstm_cell"])
    assert words[0] == "experiment=[mnist_rows,throughput]"
    assert words[-1] == "model=lstm_cell"


class Runs:
    """Runs that end at once, with a step of so many ms."""

    def __init__(self, step_ms=lambda size: 1.0, status=lambda size: "finished"):
        self.step_ms, self.status, self.sizes, self.clock = step_ms, status, [], 0.0

    def run(self, run_dir, digest, server, output):
        record = json.loads((run_dir / "run.json").read_text())
        size = record["config"]["data"]["batch_size"]
        self.sizes.append(size)
        self.clock += sizes._START_S + 15e-3 * self.step_ms(size)
        return {"status": self.status(size), "throughput": {"step_ms_median": self.step_ms(size)}, "error": "it broke"}


@pytest.fixture
def measure(monkeypatch, tmp_path):
    monkeypatch.setattr(fork_server, "is_supported", lambda: False)

    def call(runs, wanted=(), kinds=("cpu",)):
        monkeypatch.setattr(sizes, "run_in_subprocess", runs.run)
        monkeypatch.setattr(sizes.time, "monotonic", lambda: runs.clock)
        said = []
        return sizes.measure(["model=cnn", "data=digits"], wanted, kinds, tmp_path / "new", said.append), said

    return call


def test_each_size_is_a_run_with_its_own_record(measure, tmp_path):
    runs = Runs()
    places, said = measure(runs)
    assert places == [tmp_path / "new" / "cpu"]
    assert runs.sizes == [8, 32, 128, 512]
    record = json.loads((places[0] / "1" / "run.json").read_text())
    assert record["choices"]["model"] == "cnn"
    assert record["overrides"] == ["model=cnn", "data=digits", "data.batch_size=32"]
    assert (record["config"]["trainer"]["accelerator"], record["config"]["data"]["batch_size"]) == ("cpu", 32)
    assert said[0].startswith("the runs are kept in ") and "/new; " in said[0]
    assert said[1:3] == ["cpu: measuring batch size 8", "cpu: 1 ms a step of 8"]


def test_two_measurements_at_once_have_a_folder_each(measure, tmp_path):
    assert measure(Runs())[0] == [tmp_path / "new" / "cpu"]
    assert measure(Runs())[0] == [tmp_path / "new-2" / "cpu"]


def test_sizes_that_take_too_long_are_left_out(measure):
    runs = Runs(step_ms=lambda size: 12.0 * size)
    _, said = measure(runs)
    assert runs.sizes == [8, 32, 128]
    assert said[-1] == "cpu: batch size 512 would take too long"


def test_two_sizes_are_measured_however_long_they_take(measure):
    runs = Runs(step_ms=lambda size: 9000.0)
    measure(runs)
    assert runs.sizes == [8, 32]


def test_sizes_that_were_asked_for_are_all_measured(measure):
    runs = Runs(step_ms=lambda size: 9000.0)
    measure(runs, wanted=[1, 2, 3])
    assert runs.sizes == [1, 2, 3]


def test_what_does_not_fit_ends_the_list(measure):
    runs = Runs(status=lambda size: "finished" if size < 128 else "out_of_memory")
    measure(runs)
    assert runs.sizes == [8, 32, 128]
    with pytest.raises(UserError, match="fewer than two batch sizes fit on cpu"):
        measure(Runs(status=lambda size: "finished" if size < 32 else "out_of_memory"))


def test_a_run_that_fails_is_one_line(measure):
    with pytest.raises(UserError, match="^choose: the run with data.batch_size=8 did not finish: it broke$"):
        measure(Runs(status=lambda size: "failed"))
