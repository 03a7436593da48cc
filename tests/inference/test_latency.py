"""Latency by batch size: a row a size, an answer that follows the rules of sweeps, and a picture."""

from pathlib import Path

import pytest
import torch

from batchscope.errors import UserError
from batchscope.inference.latency import Latencies, measure_latency, write
from batchscope.inference.load import Trained
from batchscope.sweep import passes
from batchscope.sweep.passes import Limits


@pytest.fixture
def found(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> Latencies:
    monkeypatch.setattr(passes, "VISIT_S", 0.002)
    return measure_latency(trained, [8, 1], Limits(seconds=0.05, decide_s=0.1))


def test_each_size_has_its_median_and_its_rate(found: Latencies) -> None:
    table = found.table.set_index("batch_size")
    assert list(table.index) == [1, 8]
    assert (table["p50_ms"] > 0).all()
    assert (table["p50_ms"] * table["samples_per_sec"] / table.index).between(100, 10_000).all()  # about 1,000 ms/s
    assert table["of_best"].max() == 1
    assert found.precision == "32-true"


def test_the_answer_is_one_sentence(found: Latencies) -> None:
    assert len(found.sentences()) == 1


def test_the_table_and_the_picture_are_written(found: Latencies, tmp_path: Path) -> None:
    files = write(found, "cnn", tmp_path / "latency")
    assert [file.name for file in files] == ["latency.csv", "latency.png"]
    assert files[0].read_text().startswith("batch_size,p50_ms,p99_ms,samples_per_sec,of_best,memory_gib")


def test_a_folder_that_cannot_be_written_is_one_line(found: Latencies, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"output: '.*latency' cannot be written: "):
        write(found, "cnn", tmp_path / "file" / "latency")


class _OutOfMemory(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return x


def test_a_size_that_does_not_fit_is_named(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "VISIT_S", 0.002)
    small = Trained(trained.module, _OutOfMemory(), trained.data, "small", trained.config)
    found = measure_latency(small, [1, 8], Limits(seconds=0.05, decide_s=0.1))
    assert found.table["p50_ms"].isna().tolist() == [False, True]
    assert found.sentences()[-1] == "Out of memory: 8."
    with pytest.raises(UserError, match="no batch of 8, 16 fits into memory"):
        measure_latency(small, [8, 16], Limits(seconds=0.05, decide_s=0.1))


def test_a_network_of_other_inputs_is_refused(trained: Trained) -> None:
    other = Trained(trained.module, torch.nn.Linear(3, 3), trained.data, "other", trained.config)
    with pytest.raises(UserError, match=r"model: Linear does not take \(2, 1, 28, 28\)"):
        measure_latency(other, [2])
