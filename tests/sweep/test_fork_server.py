"""A forked run is a process as any other, and the sweep's own child."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from batchscope.sweep import fork_server
from batchscope.sweep.fork_server import ForkServer
from batchscope.sweep.process import end_group, wait_for_group
from tests.sweep.conftest import ROOT, is_running

pytestmark = pytest.mark.skipif(not fork_server.is_supported(), reason="needs Linux")
STREAMS = (0, 1, 2)


def end_of(pid: int | None) -> int:
    """The exit code of a run, or minus the number of a signal."""
    assert pid is not None
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture
def seen(server: ForkServer, tmp_path: Path) -> Callable[[str], object]:
    """The value of an expression in a forked run that ends well."""

    def value(expression: str) -> object:
        file = tmp_path / "seen"
        line = f"import json, os, sys, pathlib; pathlib.Path({str(file)!r}).write_text(json.dumps({expression}))"
        with open(os.devnull) as null:
            assert end_of(server.fork([line], (null.fileno(), 1, 2))) == 0
        return json.loads(file.read_text())

    return value


def test_a_forked_run_is_a_child_of_this_process_in_a_session_of_its_own(seen, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    facts = "os.getppid(), os.getsid(0) == os.getpid(), len(os.listdir('/proc/self/task')), len(sys.argv), os.getcwd()"
    assert seen(f"[{facts}]") == [os.getpid(), True, 1, 2, str(tmp_path)]


def test_a_run_has_the_streams_that_it_was_given_and_no_others(server, seen, capfd) -> None:
    assert len(seen("os.listdir('/proc/self/fd')")) == 4  # the fourth reads the folder
    end_of(server.fork(["import sys; print('said'); sys.exit('complained')"], STREAMS))
    assert capfd.readouterr() == ("said\n", "complained\n")


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("pass", 0),
        ("raise SystemExit(143)", 143),
        ("1 / 0", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
        ("import os; os.abort()", -signal.SIGABRT),
        ("import atexit, os; atexit.register(os._exit, 9)", 9),
    ],
)
def test_the_end_of_a_run_is_as_that_of_a_new_python(server: ForkServer, line: str, code: int, capfd) -> None:
    assert end_of(server.fork([line], STREAMS)) == code


def test_random_numbers_differ_from_run_to_run_unless_they_are_seeded(seen) -> None:
    assert seen("__import__('random').random()") != seen("__import__('random').random()")


def test_a_killed_server_ends_no_run_and_forks_no_other(server: ForkServer) -> None:
    theirs, ours = os.pipe()
    run = server.fork(["import os; os.read(0, 1); raise SystemExit(5)"], (theirs, 1, 2))
    os.kill(server._process.pid, signal.SIGKILL)
    assert [server.fork(["pass"], STREAMS), server.fork(["pass"], STREAMS)] == [None, None]
    os.write(ours, b"x")
    assert end_of(run) == 5
    os.close(ours)
    os.close(theirs)


def test_a_server_that_is_killed_once_it_has_forked_a_run_has_forked_it(server: ForkServer) -> None:
    """Otherwise a second process would do the same run."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server._socket.close()
    server._socket = ours
    with theirs:
        theirs.send(b"4711")
        theirs.shutdown(socket.SHUT_WR)
        assert server.fork(["pass"], STREAMS) == 4711


def test_runs_have_exit_codes_where_this_process_was_started_with_none(tmp_path: Path, monkeypatch) -> None:
    """`trap '' CHLD` in a shell, and some daemons: the system then keeps no exit code of a child."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    sweep = """
import os
from batchscope.sweep import fork_server
fork_server.JOB = "tests.support.forked"
with fork_server.forking() as server:
    print(os.waitpid(server.fork(["raise SystemExit(5)"], (0, 1, 2)), 0)[1] >> 8)
"""
    shell = ["bash", "-c", "trap '' CHLD; exec \"$@\"", "-", sys.executable, "-c", sweep]
    assert subprocess.run(shell, capture_output=True, text=True, check=True).stdout == "5\n"


def test_a_server_whose_imports_fail_says_so_and_forks_nothing(serve, monkeypatch, capfd) -> None:
    assert serve("no_such_module").fork(["pass"], STREAMS) is None
    assert "No module named" in capfd.readouterr().err


def test_another_environment_gets_another_server(server: ForkServer, seen, monkeypatch) -> None:
    first = server._process.pid
    assert seen("os.environ.get('OMP_NUM_THREADS')") == "1"
    assert server._process.pid == first
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert seen("os.environ.get('OMP_NUM_THREADS')") == "3"


@pytest.mark.parametrize("then", ["run = server.fork([line], (theirs, 1, 2))", "socket.send_fds(server._socket, [request], [theirs, 1, 2]); run = None"])  # fmt: skip
def test_server_and_run_end_with_the_sweep_without_a_traceback(then: str, tmp_path: Path, monkeypatch) -> None:
    """Also where the sweep is killed while a run is forked."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    sweep = f"""
import json, os, signal, socket
from batchscope.sweep import fork_server
fork_server.JOB = "tests.support.forked"
server = fork_server.ForkServer()
theirs, ours = os.pipe()
line = "import os; os.read(0, 1)"
request = json.dumps({{"words": [line], "folder": "."}}).encode()
{then}
print(server._process.pid, run or server._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", sweep], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGKILL, "")
    while any(is_running(int(pid)) for pid in done.stdout.split()):
        time.sleep(0.05)


def test_nothing_of_a_run_is_left_when_its_group_is_ended(server: ForkServer) -> None:
    run = server.fork(["import os, time\nif os.fork() == 0: time.sleep(600)"], STREAMS)
    assert end_of(run) == 0
    end_group(run)
    wait_for_group(run)  # the worker's parent is this process by now, which has to wait for it
    with pytest.raises(ProcessLookupError):
        os.killpg(run, 0)


@pytest.mark.slow  # imports everything once more; the default sweep trains in runs that are forked from such a server
def test_the_server_has_computed_nothing(serve, tmp_path: Path) -> None:
    real, file = serve("tests.support.forked_after_imports"), tmp_path / "seen"
    lines = [
        "import json, os, torch",
        "seen = [len(os.listdir('/proc/self/task')), torch.cuda.is_initialized(), torch.get_num_threads()]",
        "torch.ones(10, requires_grad=True).sum().backward()",  # torch refuses it in the fork of a process that has done it
        f"open({str(file)!r}, 'w').write(json.dumps(seen))",
    ]
    assert end_of(real.fork(["\n".join(lines)], STREAMS)) == 0
    assert json.loads(file.read_text()) == [1, False, 1]
