"""A process that has imported torch, Lightning and this package, and has computed nothing: runs are forked from it.

A forked run starts without its imports. It is a process as any other: it computes with its own threads, random numbers
and CUDA context, which the server does not have. It is the sweep's own child: the server forks twice, and the kernel
makes the sweep the parent of what the first fork leaves behind. So the run outlives a server that is killed, and its
exit status is the sweep's to read. The server ends when the sweep does, in any way: its socket is then closed.

The libraries of OpenMP, BLAS and malloc read the environment when they are loaded. A run that asks for another
environment than the server's gets a new server.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..options import groups
from ..options.tree import flatten
from ..ranks import TURNS

JOB = "batchscope.sweep.job"  # the program of a run, and of the server that runs are forked from
SERVE = "--serve"
# What every run imports: its program, and what libraries import when they are first used.
IMPORTED = ("batchscope.training.run", "torch._dynamo", "torch.utils.tensorboard", "tensorboard.plugins.hparams")
_OWN = ("batchscope", "lightning", "torch")  # the server imports no other package's models: they may compute on import
_PR_SET_CHILD_SUBREAPER = 36  # from linux/prctl.h
_LARGEST_REQUEST = 2**16


class ForkedRun:
    """A run that the server has forked, with what the sweep needs of `subprocess.Popen`."""

    def __init__(self, pid: int, stdin: int):
        self.pid = pid
        self._stdin = stdin  # the end of a pipe: the run stops when it is closed

    def wait(self) -> int:
        """Wait for the end; the exit code, or minus the number of a signal."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self._stdin)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, without effect on a run that has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


class ForkServer:
    """The sweep's side of a server.

    Args:
        modules: that the runs need beside those which every run needs.
    """

    def __init__(self, modules: Iterable[str]):
        self._modules = list(modules)
        self._has_forked = False  # so that another one like it can fork, too
        self._start()

    def _start(self) -> None:
        _become_parent_of_orphans(True)
        self._environment = environment()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:  # a session of its own keeps the terminal's Ctrl-C from the server
            command = [sys.executable, "-m", JOB, SERVE, *self._modules]
            started = subprocess.Popen(command, stdin=theirs.fileno(), start_new_session=True)
        self._process: subprocess.Popen[bytes] | None = started

    def fork(self, words: list[str], output: tuple[int, int] = (1, 2), turns: tuple[int, ...] = ()) -> ForkedRun | None:
        """Start `python -m batchscope.sweep.job` with these words; None if no server can, now and later.

        The working directory is that of this process. `output` becomes its standard output and standard error, and
        `turns` are the ends of two pipes by which it is given its turns (callbacks/_turns.py).
        """
        if self._process is not None and self._environment != environment():
            self.close()
            self._start()
        run = self._fork(words, output, turns)
        if run is None and self._has_forked:  # the server was killed
            self._has_forked = False
            self._start()
            run = self._fork(words, output, turns)
        self._has_forked |= run is not None
        return run

    def _fork(self, words: list[str], output: tuple[int, int], turns: tuple[int, ...]) -> ForkedRun | None:
        if self._process is None:
            return None
        theirs, ours = os.pipe()
        try:
            pid = self._request(words, [theirs, *output, *turns])
        except BaseException:  # a signal's SystemExit, too: a run that has just been forked stops
            os.close(ours)
            self.close()
            raise
        finally:
            os.close(theirs)
        if pid is None:
            os.close(ours)
            self.close()
            return None
        return ForkedRun(pid, ours)

    def _request(self, words: list[str], streams: list[int]) -> int | None:
        with contextlib.suppress(OSError):  # the server has ended
            request = json.dumps({"words": words, "folder": os.getcwd()}).encode()
            socket.send_fds(self._socket, [request], streams)
            pid = self._socket.recv(32)
            if pid.isdigit() and self._socket.recv(32):  # it is this process's child by now
                return int(pid)
        return None

    def close(self) -> None:
        """End the server. Its runs continue."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._socket.close()
            self._process = None
            _become_parent_of_orphans(False)


def _become_parent_of_orphans(wanted: bool) -> None:
    """Whether this process becomes the parent of its descendants whose parents have ended, as it is for forked runs."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0)


def is_supported() -> bool:
    """Whether this system has what the server needs."""
    return sys.platform.startswith("linux")


@contextlib.contextmanager
def forking(configs: Iterable[Mapping[str, Any]], wanted: bool = True) -> Iterator[ForkServer | None]:
    """A server for the runs of these configurations; None where the system has none, or where none is wanted."""
    server = ForkServer(modules_of(configs)) if wanted and is_supported() else None
    try:
        yield server
    finally:
        if server is not None:
            server.close()


def modules_of(configs: Iterable[Mapping[str, Any]]) -> list[str]:
    """The modules of the classes that configurations name, as far as importing them is known to compute nothing."""
    names = {str(value) for config in configs for key, value in flatten(dict(config)) if key.endswith("_target_")}
    return sorted({name.rpartition(".")[0] for name in names if name.partition(".")[0] in _OWN})


def environment() -> dict[str, str]:
    """The variables that a server has to have been started with."""
    return dict(os.environ)


def serve() -> None:
    """Import, then fork a run for each request. Returns in each run, with its words in `sys.argv`; never in the server."""
    for name in (*IMPORTED, *sys.argv[2:]):
        importlib.import_module(name)
    groups.known_nodes()  # kept once it is read
    # A shell's job in the background ignores SIGINT, and Python's own handler raises an exception wherever a fork is. The
    # run installs its handlers at once.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.collect()  # the garbage of the imports is not copied into every run
    gc.freeze()  # nor is what is imported, by a collection that marks every object
    sys.stdout.flush()
    connection = socket.socket(fileno=0)
    request, streams = b"", list[int]()
    is_run = False
    while not is_run:
        for stream in streams:
            os.close(stream)
        try:
            request, streams, *_ = socket.recv_fds(connection, _LARGEST_REQUEST, 5)
            is_run = bool(request) and _fork_twice(connection)
        except OSError:  # the sweep was killed meanwhile
            request = b""
        if not request:
            os._exit(0)
    connection.detach()  # standard input takes its place
    os.setsid()  # as for a new process: it makes a group of the run and all that it starts
    if turns := streams[3:]:
        os.environ[TURNS] = ",".join(map(str, turns))
        for end in turns:
            os.set_inheritable(end, True)
    for number, stream in enumerate(streams[:3]):
        os.dup2(stream, number)
        os.close(stream)
    asked = json.loads(request)
    os.chdir(asked["folder"])
    if _has_spoiled_cuda():  # an import that has looked for devices: the run becomes a new Python
        os.execv(sys.executable, [*sys.orig_argv[:3], *asked["words"]])  # without what follows -m <program>
    sys.argv[1:] = asked["words"]


def _has_spoiled_cuda() -> bool:
    from .._torch import cannot_use_cuda_after_fork  # imported by now

    return cannot_use_cuda_after_fork()


def _fork_twice(connection: socket.socket) -> bool:
    """Fork a process whose parent will be the sweep, and tell the sweep its number; True in that process."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        connection.send(b"forked")
        return False
    first = os.getpid()
    try:
        run = os.fork()
    except OSError:
        os._exit(1)
    if run:
        connection.send(str(run).encode())
        os._exit(0)
    while os.getppid() == first:
        time.sleep(0.001)
    return True
