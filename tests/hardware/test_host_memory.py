"""The host's memory: what a process has and may still take, by its control groups, and that it keeps what it frees."""

import mmap
import sys
from pathlib import Path

import psutil
import pytest

from batchscope.hardware import host_memory

MIB = 2**20
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
def test_the_least_limit_of_the_control_groups_counts(
    membership: str | None, groups_mib: dict, memory_mib: tuple[int, int] | None, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(host_memory, "GROUPS", tmp_path)
    monkeypatch.setattr(host_memory, "PROCESS_GROUPS", tmp_path / "of_process")
    if membership is not None:
        (tmp_path / "of_process").write_text(f"1:cpu:/other\n{membership}\n")
    for path, (limit, used, cache) in groups_mib.items():
        group = tmp_path / path
        group.mkdir(parents=True, exist_ok=True)
        (group / "memory.max").write_text(f"{limit if limit == 'max' else limit * MIB}\n")
        (group / "memory.current").write_text(f"{used * MIB}\n")
        (group / "memory.stat").write_text(f"anon 5\ninactive_anon 3\ninactive_file {cache * MIB}\n")
    found = host_memory.host_memory()
    assert (
        found == tuple(mib * MIB for mib in memory_mib) if memory_mib else found.total == psutil.virtual_memory().total
    )


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems do not tell files from the rest")
def test_private_memory_has_tensors_and_no_mapped_files(tmp_path: Path) -> None:
    file, process = tmp_path / "library", psutil.Process()
    file.write_bytes(bytes(64 * MIB))
    before = host_memory.private_rss(process)
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[::4096]) == 0
        assert host_memory.private_rss(process) - before < 32 * MIB
    with mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE) as held:
        held.write(bytes(64 * MIB))
        assert 32 * MIB < host_memory.private_rss(process) - before < 160 * MIB


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_freed_memory_is_kept_unless_the_user_has_set_malloc(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many page faults that saves: benchmarks/speed.py memory."""
    assert host_memory.keep_freed_memory()
    for name in ("MMAP_THRESHOLD", "TRIM_THRESHOLD", "MMAP_MAX"):
        with monkeypatch.context() as patch:
            patch.setenv(f"MALLOC_{name}_", "131072")
            assert not host_memory.keep_freed_memory()
