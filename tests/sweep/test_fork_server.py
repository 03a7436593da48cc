"""A forked run is a process as any other, and the sweep's own child."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from batchscope.sweep import fork_server
from batchscope.sweep.fork_server import ForkServer, modules_of
from batchscope.sweep.process import end_group, wait_for_group

pytestmark = pytest.mark.skipif(not fork_server.is_supported(), reason="needs Linux")
ROOT = Path(__file__).resolve().parents[2]
WAIT_FOR_STDIN = "import os; os.read(0, 1)"


@pytest.fixture
def seen(server: ForkServer, tmp_path: Path) -> Callable[[str], object]:
    """The value of an expression in a forked run that ends well."""

    def value(expression: str) -> object:
        file = tmp_path / "seen"
        line = f"import json, os, sys, pathlib; pathlib.Path({str(file)!r}).write_text(json.dumps({expression}))"
        assert server.fork([line]).wait() == 0
        return json.loads(file.read_text())

    return value


def test_a_forked_run_is_a_child_of_this_process_in_a_session_of_its_own(seen) -> None:
    parent, session, pid, threads = seen(
        "[os.getppid(), os.getsid(0), os.getpid(), len(os.listdir('/proc/self/task'))]"
    )
    assert parent == os.getpid()
    assert session == pid
    assert threads == 1


def test_a_run_has_its_words_and_the_working_directory_of_this_process(seen, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert seen("[len(sys.argv), os.getcwd()]") == [2, str(tmp_path)]


def test_a_run_has_the_streams_of_this_process_and_no_others(server, seen, capfd) -> None:
    assert len(seen("os.listdir('/proc/self/fd')")) == 4  # the fourth reads the folder
    server.fork(["import sys; print('said'); sys.exit('complained')"]).wait()
    assert capfd.readouterr() == ("said\n", "complained\n")


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("pass", 0),
        ("raise SystemExit(7)", 7),
        ("raise SystemExit(143)", 143),
        ("1 / 0", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("import os; os.abort()", -signal.SIGABRT),
    ],
)
def test_the_end_of_a_run_is_as_that_of_a_new_python(server: ForkServer, line: str, code: int, capfd) -> None:
    assert server.fork([line]).wait() == code


def test_what_a_program_leaves_to_its_end_is_done(server: ForkServer, tmp_path: Path) -> None:
    line = f"import atexit, pathlib; atexit.register(pathlib.Path({str(tmp_path / 'end')!r}).touch)"
    server.fork([line]).wait()
    assert (tmp_path / "end").exists()


def test_random_numbers_differ_from_run_to_run_unless_they_are_seeded(seen) -> None:
    assert seen("__import__('random').random()") != seen("__import__('random').random()")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_a_signal_reaches_a_run(server: ForkServer, number: signal.Signals, capfd) -> None:
    run = server.fork([WAIT_FOR_STDIN])
    run.send_signal(number)
    assert run.wait() == -number


def test_a_signal_to_a_run_that_has_ended_does_nothing(server: ForkServer) -> None:
    run = server.fork(["pass"])
    run.wait()
    run.send_signal(signal.SIGTERM)


def test_a_killed_server_ends_no_run_and_is_replaced(server: ForkServer) -> None:
    run = server.fork(["import os; os.read(0, 1); raise SystemExit(5)"])
    os.kill(server._process.pid, signal.SIGKILL)
    server._process.wait()
    assert server.fork(["raise SystemExit(6)"]).wait() == 6
    os.close(run._stdin)
    run._stdin = os.open(os.devnull, os.O_RDONLY)
    assert run.wait() == 5


def test_a_server_that_cannot_import_is_done_without(server: ForkServer, capfd) -> None:
    server.close()
    broken = ForkServer(["no_such_module"])
    assert broken.fork(["pass"]) is None
    assert broken.fork(["pass"]) is None


def test_server_and_run_end_with_the_sweep(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    sweep = f"""
import os, signal
from batchscope.sweep import fork_server
fork_server.JOB = "tests.support.forked"
server = fork_server.ForkServer([])
run = server.fork(["import os; os.read(0, 1)"])
open({str(tmp_path / "pids")!r}, "w").write(f"{{run.pid}} {{server._process.pid}}")
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", sweep]) == -signal.SIGKILL
    left = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    while any(map(is_running, left)):
        time.sleep(0.05)


def test_a_sweep_that_is_killed_while_a_run_is_forked_leaves_no_traceback(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    sweep = f"""
import json, os, signal, socket
from batchscope.sweep import fork_server
fork_server.JOB = "tests.support.forked"
server = fork_server.ForkServer([])
open({str(tmp_path / "pid")!r}, "w").write(str(server._process.pid))
words = ["import os, time; time.sleep(0.1)"]
request = json.dumps({{"words": words, "folder": "."}}).encode()
socket.send_fds(server._socket, [request], [0, 1, 2])
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", sweep], capture_output=True, text=True, check=False)
    while is_running(int((tmp_path / "pid").read_text())):
        time.sleep(0.05)
    assert (done.returncode, done.stderr) == (-signal.SIGKILL, "")


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_nothing_of_a_run_is_left_when_its_group_is_ended(server: ForkServer) -> None:
    run = server.fork(["import os, time\nif os.fork() == 0: time.sleep(600)"])
    assert run.wait() == 0
    started = time.monotonic()
    end_group(run.pid)
    wait_for_group(run.pid)  # the worker's parent is this process by now, which has to wait for it
    with pytest.raises(ProcessLookupError):
        os.killpg(run.pid, 0)
    assert time.monotonic() - started < 300  # of the 600 s that the process sleeps


def test_another_environment_gets_another_server(server: ForkServer, seen, monkeypatch) -> None:
    first = server._process.pid
    assert seen("os.environ.get('OMP_NUM_THREADS')") == "1"
    assert server._process.pid == first
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert seen("os.environ.get('OMP_NUM_THREADS')") == "3"
    assert server._process.pid != first


def test_a_run_whose_server_has_used_cuda_becomes_a_new_python(server, seen, monkeypatch, tmp_path: Path) -> None:
    assert seen("fork_server.IMPORTED") == []
    monkeypatch.setenv("SPOILED", "1")
    monkeypatch.chdir(tmp_path)
    imported, *rest = seen("[fork_server.IMPORTED, os.getppid(), os.getsid(0) == os.getpid(), os.getcwd()]")
    assert imported == list(fork_server.IMPORTED)
    assert rest == [os.getpid(), True, str(tmp_path)]


def test_only_modules_that_are_known_to_compute_nothing_are_imported_beforehand() -> None:
    nodes = ["batchscope.models.cnn.SimpleCNN", "my_models.net.Net", "lightning.pytorch.loggers.CSVLogger"]
    configs = [{"model": {"_target_": name}} for name in nodes]
    assert modules_of(configs) == ["batchscope.models.cnn", "lightning.pytorch.loggers"]


@pytest.mark.slow  # imports everything once more; the default sweep trains in runs that are forked from such a server
def test_the_server_has_computed_nothing(server: ForkServer, tmp_path: Path) -> None:
    real, file = ForkServer([*fork_server.IMPORTED, "batchscope.models.cnn"]), tmp_path / "seen"
    lines = [
        "import json, os, torch",
        "seen = [len(os.listdir('/proc/self/task')), torch.cuda.is_initialized(), torch.get_num_threads()]",
        "torch.ones(10, requires_grad=True).sum().backward()",  # torch refuses it in the fork of a process that has done it
        f"open({str(file)!r}, 'w').write(json.dumps(seen))",
    ]
    assert real.fork(["\n".join(lines)]).wait() == 0
    real.close()
    assert json.loads(file.read_text()) == [1, False, 1]
