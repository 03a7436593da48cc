"""One file knows operating systems: no other file asks for the system, and it works within the limits of each."""

import ast
import contextlib
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from batchscope import _system
from tests.support import systems
from tests.support.systems import KERNEL, NOT_EVERYWHERE

ROOT = Path(__file__).resolve().parents[1]


def not_everywhere(path: Path) -> Iterator[str]:
    """Yield the names in a file that not every system has."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        used: list[tuple[str, str]] = []  # a module and a name of it
        if isinstance(node, ast.Import):
            used = [(alias.name, "*") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            used = [(node.module or "", alias.name) for alias in node.names]
            used += [(f"{node.module}.{alias.name}", "*") for alias in node.names] + [(node.module or "", "*")]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            used = [(node.value.id, node.attr)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(KERNEL):
            used = [("sys", "platform")]
        for module, name in used:
            if name in NOT_EVERYWHERE.get(module, ()):
                yield f"{path.relative_to(ROOT)}:{node.lineno}: {module}.{name}"


def test_no_other_file_asks_for_the_system_or_uses_what_not_every_one_has() -> None:
    assert [*not_everywhere(ROOT / "src/_system.py")]
    paths = [*(path for path in ROOT.joinpath("src").rglob("*.py") if path.name != "_system.py"), ROOT / "train.py"]
    assert [use for path in paths for use in not_everywhere(path)] == []


# A sweep of one run: the run repeats a command, starts a process, and is asked to end.
LIFE = """
import os, signal, subprocess, sys, time, psutil
from batchscope import _system
child = '''
import signal, subprocess, sys, time
from batchscope._system import connection_to_starter, signal_self
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
connection = connection_to_starter()
connection.sendall(connection.recv(9) + b" %d" % other.pid)
connection.recv(9)
signal_self(signal.SIGTERM)
for _ in range(100):
    time.sleep(0.01)
'''
program = _system.start_program([sys.executable, "-c", child], (1, 2))
program.connection.sendall(b"hello")
word, other = program.connection.recv(99).split()
program.connection.sendall(b"end")
code = program.wait()
program.end_group(5)
if not _system.RENAMES_OPEN:  # Windows keeps the number of a parent that has ended, and this system does not
    psutil.Process(int(other)).kill()
    time.sleep(0.2)
ended = not psutil.pid_exists(int(other)) or psutil.Process(int(other)).status() == psutil.STATUS_ZOMBIE
print(word.decode(), code, ended, _system.CAN_FORK, [one.name for one in _system.STOPPING][:2], _system.keep_freed_memory())
"""


@pytest.mark.parametrize("system", [pytest.param("macos", marks=pytest.mark.slow), "windows"])
def test_a_program_is_started_heard_and_ended_on_a_system_that_lacks_much(system: str) -> None:
    environ = {**os.environ, systems.PRETEND: system, "PYTHONPATH": str(ROOT / "tests/support/pretending")}
    result = subprocess.run([sys.executable, "-c", LIFE], env=environ, capture_output=True, text=True, check=False)
    assert (result.stdout, result.stderr) == ("hello 7 True False ['SIGINT', 'SIGTERM'] False\n", "")


@pytest.mark.slow
def test_on_windows_a_tree_of_processes_ends_with_what_its_program_has_started(monkeypatch) -> None:
    line = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    program = _system.start_program([sys.executable, "-c", f"{line}; print(1, flush=True); time.sleep(600)"], (2, 2))
    with contextlib.suppress(TimeoutError):
        program.connection.settimeout(1)
        program.connection.recv(1)
    started = _system.descendants(program.pid)
    monkeypatch.setattr(_system, "sys", SimpleNamespace(platform="win32"))
    program.end_group(5)
    assert len(started) == 1
    assert program.wait() < 0
    assert _system.descendants(program.pid) == []


@pytest.mark.parametrize(("platform", "tries"), [("win32", 3), ("linux", 1)])
def test_windows_is_asked_again_where_another_program_has_a_file_open(platform, tries, monkeypatch) -> None:
    tried = []

    def refuse(*_: object) -> None:
        tried.append(1)
        if len(tried) < 3:
            raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(_system, "sys", SimpleNamespace(platform=platform))
    with contextlib.nullcontext() if platform == "win32" else pytest.raises(PermissionError):
        _system.retry_while_open(refuse, "a", "b")
    assert len(tried) == tries


def test_a_sign_that_a_stream_lacks_is_printed_plainly() -> None:
    text = "→ 90 % … ± ≥ 3 · 日"
    assert text.encode("cp1252", _system.PLAIN).decode("cp1252") == "-> 90 % … ± >= 3 · ?"
    assert text.encode("ascii", _system.PLAIN).decode() == "-> 90 % ... +- >= 3 | ?"


def test_a_command_line_is_quoted_for_the_shell_of_the_system(monkeypatch) -> None:
    words = ["batchscope", "train", "a b", "data.batch_size=[1,2]"]
    for platform, line in (("win32", 'batchscope train "a b" data.batch_size=[1,2]'),
                           ("linux", "batchscope train 'a b' 'data.batch_size=[1,2]'")):  # fmt: skip
        monkeypatch.setattr(_system, "sys", SimpleNamespace(platform=platform))
        assert _system.command_line(words) == line


@pytest.mark.parametrize(
    ("word", "quoted"),
    [
        (r"C:\my runs\a", r'"C:\my runs\a"'),
        ("C:\\my runs\\", r'"C:\my runs\\"'),
        ('say "hi"', r'"say \"hi\""'),
        (r"a \"b", r'"a \\\"b"'),
    ],
)
def test_on_windows_a_word_is_quoted_as_programs_read_it(word: str, quoted: str, monkeypatch) -> None:
    monkeypatch.setattr(_system, "sys", SimpleNamespace(platform="win32"))
    assert _system.command_line([word]) == quoted == subprocess.list2cmdline([word])


def test_a_path_on_another_drive_of_windows_is_said_whole(monkeypatch) -> None:
    assert _system.relative(Path.cwd() / "a") == "a"
    monkeypatch.setattr(os.path, "relpath", Mock(side_effect=ValueError("path is on mount 'D:', start on mount 'C:'")))
    assert _system.relative(Path("/d/runs/a")) == os.path.abspath("/d/runs/a")


NO_FOLDERS = {
    "runs/a:b": "Windows takes no folder 'a:b'",
    "runs/what?": "Windows takes no folder 'what?'",
    "runs/nul": "Windows takes no folder 'nul'",
    "runs/COM1.txt": "Windows takes no folder 'COM1.txt'",
    "runs/dot.": "Windows takes no folder 'dot.'",
    f"/runs/{'a' * 200}": "its whole path has 206 characters, and Windows takes 149, unless LongPathsEnabled is set",
}


@pytest.mark.parametrize("folder", NO_FOLDERS)
def test_a_folder_that_windows_does_not_take_is_told_from_one_that_it_does(folder: str, monkeypatch) -> None:
    monkeypatch.setattr(_system, "sys", SimpleNamespace(platform="win32"))
    assert _system.folder_error(folder) == NO_FOLDERS[folder]
    assert _system.folder_error("/runs/2026-11-28_10-00-00/console") is None
    monkeypatch.setattr(_system, "sys", SimpleNamespace(platform="linux"))
    assert _system.folder_error(folder) is None


def test_a_wait_for_a_programs_word_lets_handlers_of_signals_run(monkeypatch) -> None:
    """On Windows a read of a socket goes on through Ctrl-C: a sweep would act on it after the visit."""
    program = _system.start_program([sys.executable, "-c", "import time; time.sleep(600)"], (2, 2))
    turns = []
    ready, wait = _system.select.select, iter([1, 2, 3])

    def select(*arguments: object) -> tuple[list, list, list]:
        turns.append(next(wait, None))
        if turns[-1] is None:
            program.end_group()
            program.wait()
        return ready(*arguments)

    monkeypatch.setattr(_system, "_POLL_S", 0.01)
    monkeypatch.setattr(_system, "select", SimpleNamespace(select=select))
    program.wait_for_output()  # which ends with the program
    assert turns[:4] == [1, 2, 3, None]


def test_signals_that_a_system_lacks_are_absent() -> None:
    assert _system.signals_named("SIGTERM", "SIGNONE") == (signal.SIGTERM,)


@pytest.mark.parametrize(
    ("platform", "cpuinfo", "name"),
    [
        ("linux", "model name\t: AMD EPYC\nmodel name\t: AMD EPYC\n", "AMD EPYC"),
        ("linux", "CPU implementer\t: 0x41\nCPU part\t: 0xd40\n\nCPU part\t: 0xd46\n", "aarch64 0x41 0xd40"),
        ("win32", "", "Intel(R) Core(TM) i9-13900K"),
    ],
)
def test_another_processor_has_another_name(platform, cpuinfo, name, tmp_path, monkeypatch) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    monkeypatch.setattr(_system, "PROC", tmp_path)
    monkeypatch.setattr(_system, "sys", SimpleNamespace(platform=platform))
    monkeypatch.setattr(_system, "platform", SimpleNamespace(machine=lambda: "aarch64"))
    monkeypatch.setattr(_system, "_registry_value", lambda *key: "Intel(R) Core(TM) i9-13900K ")
    assert _system.processor_name.__wrapped__() == name


def test_on_macos_too_it_is_known_that_nobody_reads_standard_output(monkeypatch) -> None:
    class Poll:
        """Poll as xnu does: a descriptor registered for no event gets none, and a pipe without a reader hangs up."""

        def register(self, descriptor: int, events: int) -> None:
            self.events = [(descriptor, kernel.POLLHUP)] if events else []

        def poll(self, timeout: float) -> list[tuple[int, int]]:
            return self.events

    kernel = SimpleNamespace(poll=Poll, POLLOUT=4, POLLERR=8, POLLHUP=16)
    monkeypatch.setattr(_system, "select", kernel)
    monkeypatch.setattr(_system, "sys", SimpleNamespace(platform="darwin"))
    assert _system.has_no_reader(BrokenPipeError())
