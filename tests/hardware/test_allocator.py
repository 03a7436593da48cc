"""Keeping freed memory: a step finds again what the last one freed, unless the user's environment says otherwise."""

import os
import subprocess
import sys

import pytest

# Blocks of 48 MiB, more than glibc ever keeps by itself.
STEPS = """
import resource
from batchscope.hardware.allocator import keep_freed_memory
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
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")


def page_faults(call: str, **environment: str) -> tuple[str, int]:
    """What `call` said, and the page faults of five steps after it, in a process of its own."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    line = [sys.executable, "-c", STEPS.format(call=call)]
    done = subprocess.run(line, capture_output=True, text=True, check=True, env=clean | environment)
    changed, faults = done.stdout.split()
    return changed, int(faults)


@pytest.mark.slow
@linux
def test_a_step_does_not_fault_in_again_what_the_last_one_freed():
    changed, kept = page_faults("keep_freed_memory()")
    _, returned = page_faults("None")
    assert changed == "True"
    assert kept < 100
    assert returned > 10 * max(kept, 1)


@pytest.mark.slow
@linux
def test_what_the_environment_says_of_malloc_is_left_alone():
    changed, _ = page_faults("keep_freed_memory()", MALLOC_TRIM_THRESHOLD_="131072")
    assert changed == "False"
