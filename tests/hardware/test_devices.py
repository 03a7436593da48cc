"""What is said of the devices of a machine: the sizes of their caches."""

import types
from pathlib import Path

import pytest
import torch

from batchscope.hardware.devices import cache_bytes

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
KIB, MIB = 2**10, 2**20
FIRST = [("1", "Data", "32K", "own"), ("1", "Instruction", "32K", "own")]


@pytest.fixture
def processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Linux's description of a processor: for each core the level, type, size and sharing cores of its caches."""

    def describe(
        cores: int, caches: list[tuple[str, str, str, str]], share: int = 1, threads: int | None = None
    ) -> Path:
        for core in range(cores):
            group = core // share * share
            names = {"own": f"{core}", "all": f"0-{cores - 1}", "group": f"{group}-{group + share - 1}"}
            for index, (level, kind, size, shared) in enumerate(caches):
                folder = tmp_path / f"cpu{core}" / "cache" / f"index{index}"
                folder.mkdir(parents=True)
                values = {"level": level, "type": kind, "size": size, "shared_cpu_list": names[shared]}
                for name, value in values.items():
                    (folder / name).write_text(f"{value}\n")
        monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)), raising=False)
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads or cores)
        return tmp_path

    return describe


def test_each_core_adds_its_l2_to_the_shared_l3(processor):
    cpus = processor(2, [*FIRST, ("2", "Unified", "512K", "own"), ("3", "Unified", "32768K", "all")])
    assert cache_bytes(CPU, cpus) == 2 * 512 * KIB + 32 * MIB


def test_a_thread_uses_one_cache_of_each_level(processor):
    caches = [*FIRST, ("2", "Unified", "1M", "own"), ("3", "Unified", "32M", "group")]
    cpus = processor(16, caches, share=8, threads=1)
    assert cache_bytes(CPU, cpus) == MIB + 32 * MIB


def test_threads_on_two_chiplets_use_the_l3_of_both(processor):
    caches = [*FIRST, ("2", "Unified", "1M", "own"), ("3", "Unified", "32M", "group")]
    cpus = processor(16, caches, share=8, threads=4)
    assert cache_bytes(CPU, cpus) == 4 * MIB + 2 * 32 * MIB


def test_hyperthreads_share_an_l2(processor):
    cpus = processor(2, [*FIRST, ("2", "Unified", "2048K", "group"), ("3", "Unified", "107520K", "all")], share=2)
    assert cache_bytes(CPU, cpus) == 2 * MIB + 105 * MIB


def test_only_cores_that_the_process_may_use_count(processor, monkeypatch):
    cpus = processor(8, [*FIRST, ("2", "Unified", "1M", "own")])
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {2, 3})
    assert cache_bytes(CPU, cpus) == 2 * MIB


@pytest.mark.parametrize("caches", [[], FIRST, [("2", "Unified", "", "own")], [("2", "Unified", "many", "own")]])
def test_a_processor_that_tells_nothing_has_no_known_cache(caches, processor):
    assert cache_bytes(CPU, processor(2, caches)) is None


def test_a_system_other_than_linux_has_no_known_cache(processor, monkeypatch):
    cpus = processor(2, [("2", "Unified", "1M", "own")])
    monkeypatch.delattr("os.sched_getaffinity")
    assert cache_bytes(CPU, cpus) is None


def test_a_gpu_has_its_l2(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(L2_cache_size=50 * MIB))
    assert cache_bytes(CUDA) == 50 * MIB


@pytest.mark.parametrize("properties", [types.SimpleNamespace(), types.SimpleNamespace(L2_cache_size=0)])
def test_a_gpu_that_tells_nothing_has_no_known_cache(properties, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    assert cache_bytes(CUDA) is None


@pytest.mark.parametrize("kind", ["mps", "meta"])
def test_other_devices_have_no_known_cache(kind):
    assert cache_bytes(torch.device(kind)) is None
