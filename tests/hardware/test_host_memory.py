"""The host's memory: what a process has and may still take, by its control groups, and that it keeps what it frees."""

import mmap
import os
import subprocess
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
    file = tmp_path / "library"
    file.write_bytes(bytes(64 * MIB))
    process = psutil.Process()
    before = host_memory.private_rss(process)
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[::4096]) == 0
        assert host_memory.private_rss(process) - before < 32 * MIB
    with mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE) as held:
        held.write(bytes(64 * MIB))
        assert 32 * MIB < host_memory.private_rss(process) - before < 160 * MIB


# Blocks of 48 MiB, more than glibc ever keeps by itself.
STEPS = """
import resource, sys
from batchscope.hardware.host_memory import keep_freed_memory
changed = keep_freed_memory()
for number in range(40):
    if number == 20:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    b"x" * (48 * 2**20)
print(changed, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 100)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
@pytest.mark.parametrize(("chosen", "kept"), [({}, True), ({"MALLOC_TRIM_THRESHOLD_": "131072"}, False)])
def test_a_step_does_not_fault_in_again_what_the_last_one_freed_unless_the_user_has_set_malloc(chosen, kept) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")} | chosen
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == [str(kept)] * 2
