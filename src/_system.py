"""What Linux, macOS and Windows do differently: the only file that asks which system this is.

What a system lacks is absent here: a signal is in no list, a process group is the tree of processes, a limit is not there,
freed memory is not kept. Nothing here imports another file of this package, or torch.
"""

import atexit
import codecs
import contextlib
import errno
import functools
import os
import platform
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

_T = TypeVar("_T")

# Of Linux, by the kernel. Elsewhere there is nothing at these paths.
_KERNEL = Path("/" if sys.platform.startswith("linux") else os.devnull)
PROC, DEV, GROUPS, CPUS = (_KERNEL / name for name in ("proc", "dev", "sys/fs/cgroup", "sys/devices/system/cpu"))
_ACCELERATORS = ("nvidia[0-9]*", "kfd", "dxg", "davinci[0-9]*")  # in DEV

# --- files -----------------------------------------------------------------------------------------------------------

# Whether a folder can be renamed while a file in it is open.
RENAMES_OPEN = sys.platform != "win32"
# Whether a path may begin with `\\`, as that of a folder in the network does.
NETWORK_PATHS = sys.platform == "win32"
_PATIENCE_S = 2.0  # a virus scanner and an index of the files hold a new file for less


def try_lock(file: BinaryIO) -> bool:
    """Lock an open, empty file; False if another process holds it, OSError where the file system has no locks.

    The system releases the lock however the process ends, and when it closes the file. Processes that are forked or
    started do not inherit it.
    """
    try:
        if sys.platform == "win32":
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            fcntl.lockf(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise
    return True


def patiently(call: Callable[..., _T], *arguments: Any) -> _T:
    """Rename or remove a file. Windows refuses that while another program has it open: there it is tried for 2 s."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return call(*arguments)
        except PermissionError:
            if sys.platform != "win32" or time.monotonic() > deadline:
                raise
        time.sleep(0.02)


def relative(path: str | Path, start: str | Path = os.curdir) -> str:
    """The path as seen from a folder; the whole path where it is on another drive of Windows."""
    try:
        return os.path.relpath(path, start)
    except ValueError:
        return os.path.abspath(path)


_NO_NAME = re.compile(
    r'.*[<>:"|?*\x00-\x1f].*|.*[. ]|(con|prn|aux|nul|com\d|lpt\d)(\..*)?', re.IGNORECASE
)  # of Windows
_LONGEST, _LONGEST_BELOW = 259, 110  # characters of a path of Windows, and of those that a run writes below its folder
_FILE_SYSTEM = r"SYSTEM\CurrentControlSet\Control\FileSystem"  # in the registry
_FIRST_CORE = r"HARDWARE\DESCRIPTION\System\CentralProcessor\0"


def why_no_folder(folder: str | Path) -> str | None:
    """Why the system could not have this folder with a run in it; None where it could. Only Windows refuses names."""
    if sys.platform != "win32":
        return None
    path = Path(folder)
    if wrong := next((part for part in path.parts if part != path.anchor and _NO_NAME.fullmatch(part)), None):
        return f"Windows takes no folder '{wrong}'"
    length = len(os.path.abspath(path))
    if length + _LONGEST_BELOW > _LONGEST and not _registered(_FILE_SYSTEM, "LongPathsEnabled"):
        most = _LONGEST - _LONGEST_BELOW
        return f"its whole path has {length} characters, and Windows takes {most}, unless LongPathsEnabled is set"
    return None


def _registered(place: str, name: str) -> Any:
    """A value in the registry of this Windows; None where there is none."""
    try:
        import winreg

        registry: Any = winreg  # which a type checker on another system does not know
        with registry.OpenKey(registry.HKEY_LOCAL_MACHINE, place) as key:
            return registry.QueryValueEx(key, name)[0]
    except (ImportError, OSError):
        return None


# --- signals ---------------------------------------------------------------------------------------------------------


def signals_named(*names: str) -> tuple[signal.Signals, ...]:
    """The signals of these names, as far as the system has them."""
    return tuple(signal.Signals(getattr(signal, name)) for name in names if hasattr(signal, name))


# What asks a program to end. SIGHUP: its terminal was closed. SIGBREAK: Ctrl-Break on Windows, or its console was closed.
STOPPING = signals_named("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")


def signal_self(number: int) -> None:
    """Have this process's handler of a signal called in its main thread."""
    if sys.platform == "win32":
        import _thread

        _thread.interrupt_main(number)
    else:
        os.kill(os.getpid(), number)


def end_at_sigterm_of(sender: int) -> None:
    """From now on SIGTERM ends this process, with code 0, where this process sent it; called before any other thread.

    Where the system does not say who sent a signal (macOS), any SIGTERM ends it, and on Windows there is none.
    """
    if not hasattr(signal, "sigwaitinfo"):
        return

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != sender:
            pass
        os._exit(0)

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # which threads inherit
    threading.Thread(target=wait, daemon=True).start()


# --- processes -------------------------------------------------------------------------------------------------------

# macOS can fork, too, and its own libraries do not survive it.
CAN_FORK = sys.platform.startswith("linux")
# Whether a parent has the processor time of its children that have ended.
PARENTS_KEEP_TIMES = sys.platform != "win32"
_POLL_S = 0.1 if sys.platform == "win32" else None  # there no handler of a signal is called in a wait without an end
SERVER_LOST = 255  # the exit code of all programs of a fork server that was killed
_STARTER = "BATCHSCOPE_STARTER"  # in the environment of a started program, where it cannot inherit a socket


class Program:
    """A program in a process of its own, which leads a group: a terminal's Ctrl-C does not reach it.

    Attributes:
        pid: of the process.
        connection: this end of a socket to it; it has the other one (`connection_to_starter`).
    """

    def __init__(self, process: subprocess.Popen[bytes] | Any, connection: socket.socket, started: float):
        self._process, self.connection, self._started = process, connection, started
        self.pid = int(process.pid or 0)

    def wait(self) -> int:
        """Wait for its end: its exit code, or minus the number of the signal that killed it."""
        while isinstance(self._process, subprocess.Popen):
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._process.wait(_POLL_S)
        self._process.join()
        code = self._process.exitcode or 0
        if code == SERVER_LOST:  # the program goes on, and closes its socket at its end
            with contextlib.suppress(OSError):
                while self.connection.recv(4096):
                    pass
        return code

    def await_word(self) -> None:
        """Wait until it has written something, or has ended; handlers of signals are called meanwhile."""
        while _POLL_S and not select.select([self.connection], [], [], _POLL_S)[0]:
            pass

    def await_end(self) -> None:
        """Wait for its end, in a signal's handler, too, and leave its exit code to `wait`."""
        import psutil

        with contextlib.suppress(psutil.Error):
            while psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.02)

    def send_signal(self, number: int) -> bool:
        """Send it a signal; whether the system can: Windows has no signals between processes."""
        if sys.platform == "win32":
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)
        return True

    def end_group(self, timeout_s: float = 0.0) -> None:
        """End all that is left of it and of what it has started. Wait so long at most until nothing is left.

        Windows has no groups. There it is the tree of processes, without those whose parent has ended.
        """
        if sys.platform == "win32":
            self._end_tree(timeout_s)
            return
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(ProcessLookupError, PermissionError):  # all gone; macOS says the latter of zombies
            os.killpg(self.pid, signal.SIGKILL)
            while time.monotonic() < deadline:
                time.sleep(0.02)
                os.killpg(self.pid, 0)

    def _end_tree(self, timeout_s: float) -> None:
        import psutil

        children = defaultdict[int, list[psutil.Process]](list)
        for process in psutil.process_iter(["ppid", "create_time"]):
            # An older process may have had a parent of the same number. The clock of processes may tick in seconds.
            if (process.info["create_time"] or 0.0) > self._started - 2:
                children[process.info["ppid"]].append(process)
        tree, left = [], [self.pid]
        while left:
            tree += (found := children.pop(left.pop(), []))
            left += (process.pid for process in found)
        for process in tree:
            with contextlib.suppress(psutil.Error):
                process.kill()
        if isinstance(self._process, subprocess.Popen):  # it is not found by its number, which may be another's by now
            self._process.kill()
        psutil.wait_procs(tree, timeout_s)


def start_program(command: Sequence[str], output: tuple[int, int]) -> Program:
    """Start a program with these descriptors as standard output and standard error. OSErrors pass."""
    streams: dict[str, Any] = {"stdout": output[0], "stderr": output[1]}
    started = time.time()
    if sys.platform == "win32":
        return _start_and_accept(command, streams, started)
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(command, stdin=theirs.fileno(), start_new_session=True, **streams)
    return Program(process, ours, started)


def _start_and_accept(command: Sequence[str], streams: dict[str, Any], started: float) -> Program:
    """Windows passes no socket to a program: the program connects to this machine, and says a word that it was told."""
    import secrets

    word = secrets.token_hex()
    with socket.create_server(("127.0.0.1", 0)) as server:
        environ = {**os.environ, _STARTER: f"{server.getsockname()[1]} {word}"}
        flags = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)  # which a type checker on another system lacks
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, creationflags=flags, env=environ, **streams)
        server.settimeout(0.1)
        while process.poll() is None:
            with contextlib.suppress(OSError):  # nobody has connected yet, or somebody else who says nothing
                connection, _ = server.accept()
                connection.settimeout(1)
                if secrets.compare_digest(connection.recv(len(word)), word.encode()):
                    connection.settimeout(None)
                    return Program(process, connection, started)
                connection.close()
    ours, theirs = socket.socketpair()  # it has ended
    theirs.close()
    return Program(process, ours, started)


def connection_to_starter() -> socket.socket:
    """In a program that was started: its end of the connection, which no process that it starts or forks inherits."""
    if sys.platform != "win32":
        end = socket.socket(fileno=os.dup(0))
        os.register_at_fork(after_in_child=lambda: os.close(end.detach()) if end.fileno() >= 0 else None)
        return end
    port, word = os.environ.pop(_STARTER).split()
    connection = socket.create_connection(("127.0.0.1", int(port)))
    connection.sendall(word.encode())
    return connection


def start_fork_server(preloaded: list[str], variable: str) -> None:
    """Have the server that `fork` forks from import modules, where there can be one. It ends with this process.

    The environment variable is set in the server alone, and to `1`.
    """
    if CAN_FORK:
        from multiprocessing import forkserver

        forkserver.set_forkserver_preload(preloaded)
        os.environ[variable] = "1"
        try:
            forkserver.ensure_running()
        finally:
            del os.environ[variable]


def fork(run: Callable[..., None], arguments: tuple[Any, ...], output: tuple[int, int]) -> Program:
    """As `start_program`, call a function that can be imported, in a process that is forked from the server.

    OSError or EOFError if the server has ended.
    """
    started, (ours, theirs) = time.time(), socket.socketpair()
    with theirs:
        import multiprocessing

        context = multiprocessing.get_context("forkserver")
        process = context.Process(target=_be_forked, args=(theirs, run, arguments))
        process.start()
    with contextlib.suppress(OSError):  # it has ended
        socket.send_fds(ours, [b"\n"], output)
        ours.recv(1)  # it leads a group now
    return Program(process, ours, started)


def _be_forked(connection: socket.socket, run: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Be as a new Python, with the socket as standard input."""
    import multiprocessing

    try:
        lead_session()
        # Its own processes are started as those of any other program.
        multiprocessing.set_start_method(None, force=True)
        _, output, *_ = socket.recv_fds(connection, 1, 2)
        connection.sendall(b"\n")
    except (OSError, KeyboardInterrupt):  # the starter has ended, or passes its interruption on
        return
    for number, stream in enumerate((connection.detach(), *output)):
        os.dup2(stream, number)
        os.close(stream)
    try:
        run(*arguments)
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out


def lead_session() -> None:
    """Leave the terminal and the process group: their signals do not reach this process any more."""
    if hasattr(os, "setsid"):
        os.setsid()


def user_and_group(process: Any) -> tuple[Any, int]:
    """The user of a psutil.Process, and the number of the process that leads its group: 0 on Windows, without groups."""
    if sys.platform == "win32":
        return process.username(), 0
    return process.uids().real, os.getpgid(process.pid)


# --- cores and memory ------------------------------------------------------------------------------------------------


def affinity() -> set[int]:
    """The cores on which any thread of this process may run; all of them on macOS.

    A single thread does not tell. Under OMP_PROC_BIND, OpenMP binds every thread of its team to a core of its own, and
    the thread that has loaded it, which is mostly the main one, to the first core.
    """
    if sys.platform == "win32":
        import psutil

        return set(psutil.Process().cpu_affinity())
    if not hasattr(os, "sched_getaffinity"):
        return set(range(os.cpu_count() or 1))
    cores = set(os.sched_getaffinity(0))
    with contextlib.suppress(OSError):  # a sandbox without /proc
        for thread in os.listdir(PROC / "self" / "task"):
            with contextlib.suppress(OSError):  # it has just ended
                cores |= os.sched_getaffinity(int(thread))
    return cores


def control_groups(controller: str) -> Iterator[Path]:
    """The folders of this process's control group and of all that contain it: of version 2, and of a controller of 1.

    In a container the outer ones, and in version 1 its own by its full name, do not exist.
    """
    try:
        lines = (PROC / "self" / "cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            root = GROUPS / controller if controllers else GROUPS
            own = root / path.lstrip("/")
            yield from (group for group in (own, *own.parents) if group.is_relative_to(root))


def descendants(root: int) -> list[int]:
    """By Linux's lists of children, which are read in microseconds; psutil reads the table of all processes."""
    found, left = [], [root]
    try:
        while left:
            tasks = f"{PROC}/{left.pop()}/task"
            for task in os.listdir(tasks):
                # A process may have hundreds of tasks.
                with open(f"{tasks}/{task}/children", "rb", buffering=0) as file:
                    children = [int(child) for child in file.read().split()]
                found += children
                left += children
    except (OSError, ValueError):  # a kernel without these lists, another system, or a child that has just ended
        import psutil

        with contextlib.suppress(psutil.Error):
            return [child.pid for child in psutil.Process(root).children(recursive=True)]
    return found


# Parameters of mallopt(3), from glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_NEVER = -1  # read as an unsigned number: no top of the heap is ever that large
_LARGEST = 2**30  # bytes; a single tensor above it is still mapped by itself, and unmapped when it is freed


def keep_freed_memory() -> bool:
    """Have the C library keep what this process frees.

    glibc unmaps a large allocation when it is freed, and returns the free top of its heap. Without this call the
    SimpleCNN spends a sixth to a quarter of a step on page faults at batch 128, and half of a step at batch 2,048
    (benchmarks/speed.py memory). The price: the process keeps its peak until it ends, and the peak can be a third higher.

    Returns:
        Whether anything was changed: False without glibc, and where the user has set a `MALLOC_*_` variable.
    """
    chosen = any(f"MALLOC_{name}_" in os.environ for name in ("MMAP_THRESHOLD", "TRIM_THRESHOLD", "MMAP_MAX"))
    if chosen or not sys.platform.startswith("linux"):
        return False
    import ctypes

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST)) and bool(mallopt(_TRIM_THRESHOLD, _NEVER))


# --- devices ---------------------------------------------------------------------------------------------------------


@functools.cache
def processor_name() -> str:
    """The processor's name as the system gives it; of an ARM one under Linux, which gives none, the numbers of its kind."""
    names: list[str] = []
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if sys.platform == "darwin":
            asked = subprocess.run(
                ["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=True
            )  # fmt: skip
            names = asked.stdout.split("\n")
        elif sys.platform == "win32":
            names = [str(_registered(_FIRST_CORE, "ProcessorNameString") or "").strip()]
        else:
            lines = [line.partition(":") for line in reversed((PROC / "cpuinfo").read_text().splitlines())]
            facts = {key.strip(): value.strip() for key, _, value in lines}  # of the first core
            kind = [facts[key] for key in ("CPU implementer", "CPU part") if key in facts]
            names = [facts.get("model name", ""), " ".join([platform.machine(), *kind]) if kind else ""]
    return next(filter(None, names), None) or platform.processor() or platform.machine()


def may_have_accelerator() -> bool:
    """False where the system has no accelerator; only Linux tells that without torch, which takes seconds to import."""
    return not sys.platform.startswith("linux") or any(any(DEV.glob(name)) for name in _ACCELERATORS)


def may_have_mps() -> bool:
    """Whether torch may find an Apple GPU here; torch is not imported."""
    return sys.platform == "darwin" and platform.machine() == "arm64"


# --- terminals -------------------------------------------------------------------------------------------------------

PLAIN = "batchscope.plain"  # the name by which a stream gets `_plain`
_SIGNS = {"→": "->", "—": "-", "–": "-", "−": "-", "…": "...", "·": "|", "×": "x", "÷": "/", "±": "+-", "≤": "<="}
_SIGNS |= {"≥": ">=", "≈": "~", "µ": "u", "²": "2", "█": "#", "░": "."}


def _plain(error: UnicodeError) -> tuple[str, int]:
    """A sign that a stream has no code for, in those that every stream has; `?` for any other."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_SIGNS.get(sign, "?") for sign in error.object[error.start : error.end]), error.end


codecs.register_error(PLAIN, _plain)


def has_no_reader(error: OSError) -> bool:
    """Whether an error of a write to standard output says that it is a pipe which nobody reads."""
    if sys.platform == "win32":
        return error.errno in (errno.EPIPE, errno.EINVAL) and error.filename is None
    if not isinstance(error, BrokenPipeError):
        return False
    poll = select.poll()
    poll.register(1, select.POLLOUT)  # macOS looks at nothing that is registered for nothing, and says POLLHUP
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


_BARE = re.compile(r"[\w@+=:,./\\~\[\]-]+")  # of cmd: nothing in it has a meaning there


def command_line(words: Iterable[str]) -> str:
    """The words as they are typed in the system's shell; on Windows cmd still reads `%NAME%` in them."""
    if sys.platform != "win32":
        return shlex.join(words)

    def quoted(word: str) -> str:  # programs read backslashes as such unless a quote follows
        return '"' + re.sub(r'(\\*)("|$)', lambda m: 2 * m[1] + ('\\"' if m[2] else ""), word) + '"'

    return " ".join(word if _BARE.fullmatch(word) else quoted(word) for word in words)
