"""The memory of the host and of the device: the limits of a process, saved tensors, and the errors of a full memory."""

import mmap
from contextlib import nullcontext
from unittest.mock import Mock

import psutil
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from batchscope import _system
from batchscope.hardware import device_memory, host_memory
from batchscope.hardware.device_memory import SavedTensors, training_memory
from tests.support.marks import LINUX
from tests.support.mps import Mps

MIB, GIB = 2**20, 2**30
JOB, SLICE = "user.slice/job", "user.slice"


@pytest.mark.parametrize(
    ("membership", "groups_mib", "memory_mib"),
    [
        pytest.param("0::/", {"": (100, 95, 60)}, (100, 65), id="the kernel can take back the page cache"),
        pytest.param(f"0::/{JOB}", {JOB: (100, 40, 0), SLICE: ("max", 90, 0)}, (100, 60), id="its own group"),
        pytest.param(f"0::/{JOB}", {JOB: (100, 40, 0), SLICE: (80, 70, 1)}, (80, 11), id="a group above"),
        pytest.param("0::/", {"": (100, 120, 5)}, (100, 0), id="more than it may"),
        pytest.param("0::/../docker/abc", {"": (100, 40, 0)}, (100, 60), id="a container's group as the root"),
        pytest.param("0::/", {}, None, id="no limit"),
        pytest.param(None, {"": (100, 40, 0)}, None, id="no groups"),
    ],
)
def test_the_least_limit_of_the_control_groups_counts(membership, groups_mib, memory_mib, tmp_path, monkeypatch):
    monkeypatch.setattr(_system, "GROUPS", tmp_path)
    monkeypatch.setattr(_system, "PROC", tmp_path / "proc")
    if membership is not None:
        (tmp_path / "proc" / "self").mkdir(parents=True)
        (tmp_path / "proc" / "self" / "cgroup").write_text(f"1:cpu:/other\n{membership}\n")
    for path, (limit, used, cache) in groups_mib.items():
        group = tmp_path / path
        group.mkdir(parents=True, exist_ok=True)
        (group / "memory.max").write_text(f"{limit if limit == 'max' else limit * MIB}\n")
        (group / "memory.current").write_text(f"{used * MIB}\n")
        (group / "memory.stat").write_text(f"anon 5\ninactive_anon 3\ninactive_file {cache * MIB}\n")
    memory = host_memory.host_memory()
    if memory_mib is None:
        assert memory.total == psutil.virtual_memory().total
    else:
        assert (memory.total, memory.available) == tuple(mib * MIB for mib in memory_mib)


def test_a_limit_of_version_1_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(_system, "GROUPS", tmp_path)
    monkeypatch.setattr(_system, "PROC", tmp_path / "proc")
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text("4:memory:/job\n0::/\n")
    (tmp_path / "memory" / "job").mkdir(parents=True)
    files = {"limit_in_bytes": 100 * MIB, "usage_in_bytes": 95 * MIB, "stat": f"total_inactive_file {60 * MIB}"}
    for name, content in files.items():
        (tmp_path / "memory" / "job" / f"memory.{name}").write_text(f"{content}\n")
    memory = host_memory.host_memory()
    assert (memory.total, memory.available) == (100 * MIB, 65 * MIB)


@LINUX
def test_private_memory_has_tensors_and_no_mapped_files(tmp_path):
    file, device = tmp_path / "library", torch.device("cpu")
    file.write_bytes(bytes(64 * MIB))
    before, _ = training_memory(device)
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[::4096]) == 0
        assert training_memory(device)[0] - before < 32 * MIB
    with mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE) as block:
        block.write(bytes(64 * MIB))
        assert 32 * MIB < training_memory(device)[0] - before < 160 * MIB


@LINUX
def test_freed_memory_is_kept_unless_the_user_has_set_malloc(monkeypatch):
    """How many page faults that saves: benchmarks/speed.py memory."""
    assert _system.keep_freed_memory()
    for name in ("MMAP_THRESHOLD", "TRIM_THRESHOLD", "MMAP_MAX"):
        with monkeypatch.context() as patch:
            patch.setenv(f"MALLOC_{name}_", "131072")
            assert not _system.keep_freed_memory()


def test_which_errors_say_that_memory_is_full():
    full = [MemoryError(), RuntimeError("CUDA error: out of memory"), RuntimeError("CUDNN_STATUS_ALLOC_FAILED in x")]
    assert all(map(device_memory.is_out_of_memory, full))
    assert not any(map(device_memory.is_out_of_memory, (ValueError("out of memory"), RuntimeError("shape mismatch"))))


def test_the_memory_of_each_kind_of_device(monkeypatch):
    devices = []
    stats = {"allocated_bytes": {"all": {"current": GIB, "peak": 3 * GIB}}}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: devices.append(device) or stats)
    mps = Mps()
    monkeypatch.setattr(torch, "mps", mps.module())
    mps.allocate(3 * MIB)
    mps.allocate(-2 * MIB)
    cuda = torch.device("cuda", 1)
    assert (training_memory(cuda), devices) == ((GIB, 3 * GIB), [cuda])  # the allocator is asked once
    assert training_memory(torch.device("mps")) == (MIB, 3 * MIB)  # Metal's driver keeps what was freed
    assert training_memory(torch.device("cpu"))[0] > 32 * MIB
    assert training_memory(torch.device("meta")) is None


def test_an_allocator_that_tells_nothing_is_no_error(monkeypatch):
    refuses = Mock(side_effect=RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats"))
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", refuses)
    assert training_memory(torch.device("cuda")) is None


FLOAT, BATCH, WIDE = 4, 8, 512


def mlp():
    return nn.Sequential(nn.Linear(16, WIDE), nn.ReLU(), nn.Linear(WIDE, 4))


def mean(network, x):
    return network(x).mean()


def odd(network, x):
    """Computes with sparse tensors, and with gradients of torch.func, which refuses hooks of saved tensors."""
    table, layer = network
    sparse = torch.sparse.mm(torch.eye(len(x)).to_sparse(), layer(x))
    inner = torch.func.grad(lambda x: torch.func.grad(lambda x: layer(x).square().sum())(x).square().sum())(x)
    return sparse.sum() + table(torch.tensor([[1, 2]])).sum() + inner.sum()


ODD = nn.ModuleList([nn.EmbeddingBag(5, 16, sparse=True), nn.Linear(16, 4)])
SIGMOIDS = nn.Sequential(nn.Linear(16, WIDE), nn.Sigmoid(), nn.Linear(WIDE, 4), nn.Sigmoid())
SAVED = {  # a network and its loss → the saved numbers; None: not checked
    "the result of a ReLU, no weight and no batch": (mlp(), mean, BATCH * WIDE),
    "a storage that two operations save, once": (SIGMOIDS, mean, BATCH * (WIDE + 4)),
    "nothing without gradients": (mlp().requires_grad_(False), lambda net, x: None, 0),
    "what is freed in between is not added up": (
        mlp(),
        lambda net, x: (mean(net, x).backward(), mean(net, x))[1],
        BATCH * WIDE,
    ),
    "sparse tensors and gradients of gradients": (ODD, odd, None),
}


@pytest.mark.parametrize("name", SAVED)
def test_each_saved_storage_counts_once_none_is_held_and_gradients_are_bit_for_bit_those_without(name):
    network, loss, expected = SAVED[name]
    saved, gradients, x = SavedTensors(torch.device("cpu")), [], torch.randn(BATCH, 16)
    for watching in (nullcontext(), saved.watch([*network.parameters(), x])):
        network.zero_grad()
        with watching:
            result = loss(network, x)
        if result is not None:
            result.backward()
        gradients.append([weight.grad.to_dense() for weight in network.parameters() if weight.grad is not None])
        del result
    # Nothing public says which bytes are still held.
    assert expected is None or (saved.most, saved._alive_bytes) == (expected * FLOAT, 0)
    assert all(map(torch.equal, *gradients))
    torch.func.grad(lambda x: x.square().sum())(torch.ones(3))  # raises an error where hooks are active


def test_of_a_region_that_is_computed_again_only_its_border_can_be_seen_and_an_error_is_the_steps_own():
    network, saved, x = mlp(), SavedTensors(torch.device("cpu")), torch.randn(BATCH, 16)
    with pytest.raises(ValueError, match="the user's own"), saved.watch(network.parameters()):
        checkpoint(network, x, use_reentrant=False).mean().backward()
        raise ValueError("the user's own")
    network(x).mean().backward()  # after the watch
    assert saved.most == BATCH * 16 * FLOAT
