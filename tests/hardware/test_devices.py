"""What is said of the devices of a machine: the sizes of their caches."""

import types
from pathlib import Path

import pytest
import torch

from batchscope.hardware.devices import cache_bytes

CPU = torch.device("cpu")
MIB = 2**20


@pytest.fixture
def processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Linux's description of a processor: for each core the level, type, size and sharing cores of its caches."""

    def describe(cores: int, *caches: tuple[str, str, str, int], threads: int | None = None) -> Path:
        for core in range(cores):
            for index, (level, kind, size, share) in enumerate(caches):
                folder = tmp_path / f"cpu{core}" / "cache" / f"index{index}"
                folder.mkdir(parents=True)
                values = {"level": level, "type": kind, "size": size, "shared_cpu_list": f"{core // share}"}
                for name, value in values.items():
                    (folder / name).write_text(f"{value}\n")
        monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)), raising=False)
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads or cores)
        return tmp_path

    return describe


@pytest.mark.parametrize(
    ("cores", "threads", "caches", "size"),
    [
        pytest.param(2, 2, [("2", "512K", 1), ("3", "32768K", 2)], MIB + 32 * MIB, id="each core adds its L2"),
        pytest.param(16, 1, [("2", "1M", 1), ("3", "32M", 8)], MIB + 32 * MIB, id="one thread, one of each level"),
        pytest.param(16, 4, [("2", "1M", 1), ("3", "32M", 8)], 4 * MIB + 64 * MIB, id="threads on two chiplets"),
        pytest.param(2, 2, [("2", "2048K", 2), ("3", "107520K", 2)], 107 * MIB, id="hyperthreads share an L2"),
        pytest.param(2, 2, [], None, id="nothing is told"),
        pytest.param(2, 2, [("2", "many", 1)], None, id="no size"),
    ],
)
def test_a_processor_has_the_l2_and_l3_that_its_threads_can_reach(cores, threads, caches, size, processor):
    described = [("1", "Instruction", "32K", 1), *((level, "Unified", size, share) for level, size, share in caches)]
    assert cache_bytes(CPU, processor(cores, *described, threads=threads)) == size


def test_only_cores_that_the_process_may_use_count(processor, monkeypatch):
    cpus = processor(8, ("2", "Unified", "1M", 1))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {2, 3})
    assert cache_bytes(CPU, cpus) == 2 * MIB


def test_other_systems_and_devices_have_no_known_cache(processor, monkeypatch):
    cpus = processor(2, ("2", "Unified", "1M", 1))
    monkeypatch.delattr("os.sched_getaffinity")
    assert cache_bytes(CPU, cpus) is None
    assert cache_bytes(torch.device("mps")) is None


@pytest.mark.parametrize(("properties", "size"), [({"L2_cache_size": 50 * MIB}, 50 * MIB), ({}, None)])
def test_a_gpu_has_its_l2(properties, size, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(**properties))
    assert cache_bytes(torch.device("cuda")) == size
