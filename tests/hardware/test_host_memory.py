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


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of control groups; the process is in the groups that the file `of_process` names."""
    monkeypatch.setattr(host_memory, "GROUPS", tmp_path)
    monkeypatch.setattr(host_memory, "PROCESS_GROUPS", tmp_path / "of_process")
    return tmp_path


JOB, SLICE = "user.slice/job", "user.slice"


@pytest.mark.parametrize(
    ("membership", "groups_mib", "total_mib", "free_mib"),
    [
        pytest.param("0::/", {"": (100, 95, 60)}, 100, 65, id="the kernel can take back the page cache"),
        pytest.param(f"0::/{JOB}", {JOB: (100, 40, 0), SLICE: ("max", 90, 0)}, 100, 60, id="its own group"),
        pytest.param(f"0::/{JOB}", {JOB: (100, 40, 0), SLICE: (80, 70, 1)}, 80, 11, id="a group above"),
        pytest.param(
            "0::/../docker/abc", {"": (100, 40, 0)}, 100, 60, id="a container that shows its group as the root"
        ),
    ],
)
def test_the_least_limit_of_the_control_groups_counts(
    groups: Path, membership: str, groups_mib: dict, total_mib: int, free_mib: int
) -> None:
    (groups / "of_process").write_text(f"{membership}\n")
    for path, (limit, used, cache) in groups_mib.items():
        group = groups / path
        group.mkdir(parents=True, exist_ok=True)
        (group / "memory.max").write_text(f"{limit if limit == 'max' else limit * MIB}\n")
        (group / "memory.current").write_text(f"{used * MIB}\n")
        (group / "memory.stat").write_text(f"anon 5\ninactive_anon 3\ninactive_file {cache * MIB}\n")
    assert host_memory.host_memory() == (total_mib * MIB, free_mib * MIB)


@pytest.mark.parametrize("memberships", [None, "0::/\n"])
def test_without_a_limit_the_machines_memory_is_free(groups: Path, memberships: str | None) -> None:
    if memberships is not None:
        (groups / "of_process").write_text(memberships)
    assert host_memory.host_memory().total == psutil.virtual_memory().total


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
import resource
from batchscope.hardware.host_memory import keep_freed_memory
changed = {call}
def step():
    for _ in range(4):
        b"x" * (48 * 2**20)
for _ in range(5):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(changed, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(call: str, **environment: str) -> tuple[str, int]:
    """What `call` said, and the page faults of five steps after it, in a process of its own."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    line = [sys.executable, "-c", STEPS.format(call=call)]
    done = subprocess.run(line, capture_output=True, text=True, check=True, env=clean | environment)
    changed, faults = done.stdout.split()
    return changed, int(faults)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_a_step_does_not_fault_in_again_what_the_last_one_freed_unless_the_user_has_set_malloc() -> None:
    changed, kept = page_faults("keep_freed_memory()")
    _, returned = page_faults("None")
    assert changed == "True"
    assert kept < 100
    assert returned > 10 * max(kept, 1)
    assert page_faults("keep_freed_memory()", MALLOC_TRIM_THRESHOLD_="131072")[0] == "False"
