"""A process that has imported torch, Lightning and this package, and has computed nothing: runs are forked from it.

A forked run starts without its imports, and is a process as any other: it computes with its own threads, random numbers
and CUDA context, which the server does not have. It is the sweep's own child: the server forks twice, and the kernel
makes the sweep the parent of what the first fork leaves behind. The server ends when the sweep does, in any way: its
socket is then closed.

The standard library's forkserver cannot take its place. Its runs are children of the server: where the server dies, the
exit status of every run is lost (255). Its environment is that of its first start, while the libraries of OpenMP, BLAS and
malloc read theirs when they are loaded. A preloaded module that cannot be imported is passed over in silence. And every
run imports the sweep's own main module.
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
from collections.abc import Iterator, Sequence

from ..options import groups

JOB = "batchscope.sweep.job"  # the program of a run, and of the server that runs are forked from
SERVE = "--serve"
# What every run imports: its program, and what libraries import when they are first used.
IMPORTED = ("batchscope.training.run", "torch._dynamo", "torch.utils.tensorboard", "tensorboard.plugins.hparams")
_PR_SET_CHILD_SUBREAPER = 36  # from linux/prctl.h
_LARGEST_REQUEST = 2**16


class ForkServer:
    """The sweep's side of a server. Where it cannot fork, its runs are new Pythons (process.py)."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        _become_parent_of_orphans(True)
        self._environment = environment()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:  # a session of its own keeps the terminal's Ctrl-C from the server
            command = [sys.executable, "-m", JOB, SERVE]
            started = subprocess.Popen(command, stdin=theirs.fileno(), start_new_session=True)
        self._process: subprocess.Popen[bytes] | None = started

    def fork(self, words: Sequence[str], streams: Sequence[int]) -> int | None:
        """Start JOB with these words; the number of its process, or None if the server cannot, now and later.

        The working directory and the environment are those of this process. `streams` become its standard input, output
        and error.
        """
        if self._process is not None and self._environment != environment():
            self.close()
            self._start()
        if self._process is None:
            return None
        with contextlib.suppress(OSError):  # the server has ended
            request = json.dumps({"words": list(words), "folder": os.getcwd()}).encode()
            socket.send_fds(self._socket, [request], list(streams))
            pid = self._socket.recv(32)
            if pid.isdigit():
                with contextlib.suppress(OSError):  # the server has ended meanwhile, and the run is there all the same
                    self._socket.recv(32)  # it is this process's child by now
                return int(pid)
        self.close()
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
def forking(wanted: bool = True) -> Iterator[ForkServer | None]:
    """A server; None where the system has none, or where none is wanted.

    From now on the system keeps the exit codes of this process's children, also where it was started with SIGCHLD ignored.
    """
    if hasattr(signal, "SIGCHLD") and signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    server = ForkServer() if wanted and is_supported() else None
    try:
        yield server
    finally:
        if server is not None:
            server.close()


def environment() -> dict[str, str]:
    """The variables that a server has to have been started with."""
    return dict(os.environ)


def serve() -> None:
    """Import, then fork a run for each request. Returns in each run, with its words in `sys.argv`; never in the server."""
    for name in IMPORTED:
        importlib.import_module(name)
    groups.known_nodes()  # kept once it is read
    if _cannot_fork():
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own handler raises an exception wherever a fork is
    gc.collect()  # the garbage of the imports is not copied into every run
    gc.freeze()  # nor is what is imported, by a collection that marks every object
    sys.stdout.flush()
    connection = socket.socket(fileno=0)
    while True:
        try:
            request, streams, *_ = socket.recv_fds(connection, _LARGEST_REQUEST, 3)
            if not request:
                os._exit(0)
            if _fork_twice(connection):
                break
        except OSError:  # the sweep was killed meanwhile
            os._exit(0)
        for stream in streams:
            os.close(stream)
    connection.detach()  # standard input takes its place
    os.setsid()  # as for a new process: it makes a group of the run and all that it starts
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    asked = json.loads(request)
    os.chdir(asked["folder"])
    sys.argv[1:] = asked["words"]


def _cannot_fork() -> bool:
    """Whether an import has looked for CUDA devices, which no fork could use then."""
    from .._torch import cannot_use_cuda_after_fork

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
