"""What Linux, macOS and Windows do differently: the only file that asks which system this is.

What a system lacks is left out: a signal is in no list, the tree of processes replaces a process group, a limit is
missing, freed memory is not kept. This file imports neither another file of this package nor torch.
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

# The folders of Linux's kernel. On other systems nothing exists at these paths.
_KERNEL = Path("/" if sys.platform.startswith("linux") else os.devnull)
PROC, DEV, GROUPS, CPUS = (_KERNEL / name for name in ("proc", "dev", "sys/fs/cgroup", "sys/devices/system/cpu"))
_ACCELERATORS = ("nvidia[0-9]*", "kfd", "dxg", "davinci[0-9]*")  # in DEV

# --- files -----------------------------------------------------------------------------------------------------------

# Whether a folder can be renamed while a file in it is open.
RENAMES_OPEN = sys.platform != "win32"
# Whether a path may begin with `\\`, as the path of a network folder does.
NETWORK_PATHS = sys.platform == "win32"
_RETRY_S = 2.0  # virus scanners and file indexers keep a new file open for less


def try_lock(file: BinaryIO) -> bool:
    """Lock an open, empty file; return False if another process holds it. OSError if the file system has no locks.

    The system releases the lock when the process ends in any way, or closes the file. No child process inherits it.
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


def retry_while_open(call: Callable[..., _T], *arguments: Any) -> _T:
    """Call a function that renames or removes a file; on Windows retry for 2 s while another program has it open."""
    deadline = time.monotonic() + _RETRY_S
    while True:
        try:
            return call(*arguments)
        except PermissionError:
            if sys.platform != "win32" or time.monotonic() > deadline:
                raise
        time.sleep(0.02)


def relative(path: str | Path, start: str | Path = os.curdir) -> str:
    """Return the path relative to the folder `start`; on another drive of Windows the absolute path."""
    try:
        return os.path.relpath(path, start)
    except ValueError:
        return os.path.abspath(path)


# On Windows.
_INVALID_NAME = re.compile(r'.*[<>:"|?*\x00-\x1f].*|.*[. ]|(con|prn|aux|nul|com\d|lpt\d)(\..*)?', re.IGNORECASE)
_MAX_PATH, _MAX_SUBPATH = 259, 110  # characters: of a path on Windows, and of a run's paths below its folder
_FILE_SYSTEM_KEY = r"SYSTEM\CurrentControlSet\Control\FileSystem"  # in the registry
_FIRST_CORE_KEY = r"HARDWARE\DESCRIPTION\System\CentralProcessor\0"


def folder_error(folder: str | Path) -> str | None:
    """Return why the system cannot have this folder with a run in it, or None. Only Windows refuses names."""
    if sys.platform != "win32":
        return None
    path = Path(folder)
    if name := next((part for part in path.parts if part != path.anchor and _INVALID_NAME.fullmatch(part)), None):
        return f"Windows takes no folder '{name}'"
    length = len(os.path.abspath(path))
    if length + _MAX_SUBPATH > _MAX_PATH and not _registry_value(_FILE_SYSTEM_KEY, "LongPathsEnabled"):
        limit = _MAX_PATH - _MAX_SUBPATH
        return f"its whole path has {length} characters, and Windows takes {limit}, unless LongPathsEnabled is set"
    return None


def _registry_value(key_path: str, name: str) -> Any:
    """Return a value from the registry of Windows, or None."""
    try:
        import winreg

        registry: Any = winreg  # a type checker on another system does not know its names
        with registry.OpenKey(registry.HKEY_LOCAL_MACHINE, key_path) as key:
            return registry.QueryValueEx(key, name)[0]
    except (ImportError, OSError):
        return None


# --- signals ---------------------------------------------------------------------------------------------------------


def signals_named(*names: str) -> tuple[signal.Signals, ...]:
    """Return the signals with these names, without those that the system lacks."""
    return tuple(signal.Signals(getattr(signal, name)) for name in names if hasattr(signal, name))


# Signals that ask a program to end. SIGHUP: a closed terminal. SIGBREAK: Ctrl-Break or a closed console on Windows.
STOPPING = signals_named("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")


def signal_self(number: int) -> None:
    """Send this process a signal; the handler is called in the main thread."""
    if sys.platform == "win32":
        import _thread

        _thread.interrupt_main(number)
    else:
        os.kill(os.getpid(), number)


def end_at_sigterm_of(sender: int) -> None:
    """From now on let a SIGTERM from the process `sender` end this process with code 0. Call this before threads start.

    macOS does not tell who sent a signal, so that any SIGTERM ends the process. Windows has no SIGTERM.
    """
    if not hasattr(signal, "sigwaitinfo"):
        return

    def exit_on_sigterm() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != sender:
            pass
        os._exit(0)

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # threads that start later inherit the mask
    threading.Thread(target=exit_on_sigterm, daemon=True).start()


# --- processes -------------------------------------------------------------------------------------------------------

# macOS can fork, too, but its own libraries do not survive a fork.
CAN_FORK = sys.platform.startswith("linux")
# Whether the processor time of a parent includes the time of its children that have ended.
PARENTS_KEEP_TIMES = sys.platform != "win32"
_POLL_S = 0.1 if sys.platform == "win32" else None  # Windows calls no signal handler during a wait without a timeout
SERVER_LOST = 255  # the exit code of every program whose fork server was killed
_STARTER = "BATCHSCOPE_STARTER"  # the environment variable of a started program that cannot inherit a socket


class Program:
    """A program in a process of its own, which leads a process group, so that Ctrl-C in the terminal does not reach it.

    Attributes:
        pid: the number of the process.
        connection: this process's end of a socket; the program has the other end (`connection_to_starter`).
    """

    def __init__(self, process: subprocess.Popen[bytes] | Any, connection: socket.socket, started: float):
        self._process, self.connection, self._started = process, connection, started
        self.pid = int(process.pid or 0)

    def wait(self) -> int:
        """Wait for the end of the program; return its exit code, or minus the number of the signal that killed it."""
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

    def wait_for_output(self) -> None:
        """Wait until the connection has data, or the program has ended; signal handlers are called meanwhile."""
        while _POLL_S and not select.select([self.connection], [], [], _POLL_S)[0]:
            pass

    def wait_for_exit(self) -> None:
        """Wait for the end of the program, and leave the exit code to `wait`; works in a signal handler, too."""
        import psutil

        with contextlib.suppress(psutil.Error):
            while psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.02)

    def send_signal(self, number: int) -> bool:
        """Send the program a signal; return False on Windows, which has no signals between processes."""
        if sys.platform == "win32":
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)
        return True

    def end_group(self, timeout_s: float = 0.0) -> None:
        """Kill every process of the group, and wait for their ends, for `timeout_s` at most.

        Windows has no groups. There the tree of processes is killed, without processes whose parent has ended.
        """
        if sys.platform == "win32":
            self._end_tree(timeout_s)
            return
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(ProcessLookupError, PermissionError):  # none is left; macOS: only zombies are left
            os.killpg(self.pid, signal.SIGKILL)
            while time.monotonic() < deadline:
                time.sleep(0.02)
                os.killpg(self.pid, 0)

    def _end_tree(self, timeout_s: float) -> None:
        import psutil

        children = defaultdict[int, list[psutil.Process]](list)
        for process in psutil.process_iter(["ppid", "create_time"]):
            # The parent of an older process may have had the same number. The clock of processes may tick in seconds.
            if (process.info["create_time"] or 0.0) > self._started - 2:
                children[process.info["ppid"]].append(process)
        tree, parents = [], [self.pid]
        while parents:
            processes = children.pop(parents.pop(), [])
            tree += processes
            parents += (process.pid for process in processes)
        for process in tree:
            with contextlib.suppress(psutil.Error):
                process.kill()
        if isinstance(self._process, subprocess.Popen):  # not by its number, which another process may have by now
            self._process.kill()
        psutil.wait_procs(tree, timeout_s)


def start_program(command: Sequence[str], output: tuple[int, int]) -> Program:
    """Start a program; `output` has the descriptors of its standard output and standard error. OSErrors pass."""
    streams: dict[str, Any] = {"stdout": output[0], "stderr": output[1]}
    started = time.time()
    if sys.platform == "win32":
        return _start_and_accept(command, streams, started)
    own_end, program_end = socket.socketpair()
    with program_end:
        process = subprocess.Popen(command, stdin=program_end.fileno(), start_new_session=True, **streams)
    return Program(process, own_end, started)


def _start_and_accept(command: Sequence[str], streams: dict[str, Any], started: float) -> Program:
    """Start a program on Windows, where it cannot inherit a socket: it connects to a port, and sends a secret token."""
    import secrets

    token = secrets.token_hex()
    with socket.create_server(("127.0.0.1", 0)) as server:
        environ = {**os.environ, _STARTER: f"{server.getsockname()[1]} {token}"}
        flags = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)  # a type checker on another system does not know it
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, creationflags=flags, env=environ, **streams)
        server.settimeout(0.1)
        while process.poll() is None:
            with contextlib.suppress(OSError):  # no program has connected yet, or another one that sends nothing
                connection, _ = server.accept()
                connection.settimeout(1)
                if secrets.compare_digest(connection.recv(len(token)), token.encode()):
                    connection.settimeout(None)
                    return Program(process, connection, started)
                connection.close()
    own_end, program_end = socket.socketpair()  # the program has ended
    program_end.close()
    return Program(process, own_end, started)


def connection_to_starter() -> socket.socket:
    """Return a started program's end of the connection; no process that the program starts or forks inherits it."""
    if sys.platform != "win32":
        connection = socket.socket(fileno=os.dup(0))
        os.register_at_fork(after_in_child=lambda: os.close(connection.detach()) if connection.fileno() >= 0 else None)
        return connection
    port, token = os.environ.pop(_STARTER).split()
    connection = socket.create_connection(("127.0.0.1", int(port)))
    connection.sendall(token.encode())
    return connection


def start_fork_server(preloaded: list[str], variable: str) -> None:
    """Start the server for `fork`, if the system can fork. The server imports modules, and ends with this process.

    The environment variable is `1` in the server, and is not set elsewhere.
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
    """Call an importable function in a process that is forked from the server; otherwise as `start_program`.

    OSError or EOFError if the server has ended.
    """
    started, (own_end, program_end) = time.time(), socket.socketpair()
    with program_end:
        import multiprocessing

        context = multiprocessing.get_context("forkserver")
        process = context.Process(target=_run_forked, args=(program_end, run, arguments))
        process.start()
    with contextlib.suppress(OSError):  # the process has ended
        socket.send_fds(own_end, [b"\n"], output)
        own_end.recv(1)  # from now on the process leads a group
    return Program(process, own_end, started)


def _run_forked(connection: socket.socket, run: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Call a function in a forked process as in a new Python, with the socket as standard input."""
    import multiprocessing

    try:
        lead_session()
        # Processes of the function are started by the default method, as in any other program.
        multiprocessing.set_start_method(None, force=True)
        _, output, *_ = socket.recv_fds(connection, 1, 2)
        connection.sendall(b"\n")
    except (OSError, KeyboardInterrupt):  # the starter has ended, or its interruption has reached this process
        return
    for number, stream in enumerate((connection.detach(), *output)):
        os.dup2(stream, number)
        os.close(stream)
    try:
        run(*arguments)
    finally:
        atexit._run_exitfuncs()  # multiprocessing does not call the exit functions


def lead_session() -> None:
    """Leave the terminal and the process group, so that their signals do not reach this process any more."""
    if hasattr(os, "setsid"):
        os.setsid()


def user_and_group(process: Any) -> tuple[Any, int]:
    """Return the user of a psutil.Process, and its process group; the group is 0 on Windows, which has none."""
    if sys.platform == "win32":
        return process.username(), 0
    return process.uids().real, os.getpgid(process.pid)


# --- cores and memory ------------------------------------------------------------------------------------------------


def affinity() -> set[int]:
    """Return the cores on which any thread of this process may run; on macOS all cores.

    A single thread does not tell. Under OMP_PROC_BIND, OpenMP binds every thread of its team to a core of its own, and
    the thread that has loaded OpenMP, mostly the main thread, to the first core.
    """
    if sys.platform == "win32":
        import psutil

        return set(psutil.Process().cpu_affinity())
    if not hasattr(os, "sched_getaffinity"):
        return set(range(os.cpu_count() or 1))
    cores = set(os.sched_getaffinity(0))
    with contextlib.suppress(OSError):  # a sandbox without /proc
        for thread in os.listdir(PROC / "self" / "task"):
            with contextlib.suppress(OSError):  # the thread has just ended
                cores |= os.sched_getaffinity(int(thread))
    return cores


def online_cores() -> list[int]:
    """Return the numbers of the online cores in order, where the system tells them; else an empty list."""
    with contextlib.suppress(OSError, ValueError):
        ranges = [[*map(int, part.split("-"))] for part in (CPUS / "online").read_text().split(",")]
        return [core for bounds in ranges for core in range(bounds[0], bounds[-1] + 1)]
    return []


def control_groups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control group and its ancestors: of version 2, and of a version 1 controller.

    In a container the folders of the ancestors, and in version 1 the process's own folder, may not exist.
    """
    try:
        lines = (PROC / "self" / "cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            root = GROUPS / controller if controllers else GROUPS
            innermost = root / path.lstrip("/")
            yield from (group for group in (innermost, *innermost.parents) if group.is_relative_to(root))


def descendants(root: int) -> list[int]:
    """Return the processes below a process. Linux's lists of children take microseconds; psutil reads all processes."""
    pids, parents = [], [root]
    try:
        while parents:
            tasks = f"{PROC}/{parents.pop()}/task"
            for task in os.listdir(tasks):
                # Unbuffered, because a process may have hundreds of tasks.
                with open(f"{tasks}/{task}/children", "rb", buffering=0) as file:
                    children = [int(child) for child in file.read().split()]
                pids += children
                parents += children
    except (OSError, ValueError):  # a kernel without these lists, another system, or a child that has just ended
        import psutil

        with contextlib.suppress(psutil.Error):
            return [child.pid for child in psutil.Process(root).children(recursive=True)]
    return pids


# Parameters of mallopt(3), from glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_NEVER = -1  # glibc reads it as an unsigned number, which the free top of the heap never reaches
_MAX_HEAP_BLOCK = 2**30  # bytes; a larger tensor still has its own mapping, which is unmapped when it is freed


def keep_freed_memory() -> bool:
    """Have the C library keep the memory that this process frees.

    glibc unmaps a large allocation when it is freed, and returns the free top of its heap. Without this call the
    SimpleCNN spends a sixth to a quarter of a step on page faults at batch 128, and half of a step at batch 2,048
    (benchmarks/speed.py memory). The price: the process keeps its peak until it ends, and the peak can be a third higher.

    Returns:
        Whether a setting was changed: False without glibc, and if the user has set a `MALLOC_*_` variable.
    """
    is_set_by_user = any(f"MALLOC_{name}_" in os.environ for name in ("MMAP_THRESHOLD", "TRIM_THRESHOLD", "MMAP_MAX"))
    if is_set_by_user or not sys.platform.startswith("linux"):
        return False
    import ctypes

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _MAX_HEAP_BLOCK)) and bool(mallopt(_TRIM_THRESHOLD, _NEVER))


# --- devices ---------------------------------------------------------------------------------------------------------


@functools.cache
def processor_name() -> str:
    """Return the processor's name; on Linux, which names no ARM processor, an ARM's implementer and part number."""
    names: list[str] = []
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if sys.platform == "darwin":
            sysctl = subprocess.run(
                ["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=True
            )  # fmt: skip
            names = sysctl.stdout.split("\n")
        elif sys.platform == "win32":
            names = [str(_registry_value(_FIRST_CORE_KEY, "ProcessorNameString") or "").strip()]
        else:
            lines = [line.partition(":") for line in reversed((PROC / "cpuinfo").read_text().splitlines())]
            cpu_info = {key.strip(): value.strip() for key, _, value in lines}  # of the first core
            numbers = [cpu_info[key] for key in ("CPU implementer", "CPU part") if key in cpu_info]
            names = [cpu_info.get("model name", ""), " ".join([platform.machine(), *numbers]) if numbers else ""]
    return next(filter(None, names), None) or platform.processor() or platform.machine()


def may_have_accelerator() -> bool:
    """Whether the system may have an accelerator. Without torch, which takes seconds to import, only Linux can tell."""
    return not sys.platform.startswith("linux") or any(any(DEV.glob(name)) for name in _ACCELERATORS)


def may_have_mps() -> bool:
    """Whether torch may find an Apple GPU here; torch is not imported."""
    return sys.platform == "darwin" and platform.machine() == "arm64"


# --- terminals -------------------------------------------------------------------------------------------------------

PLAIN = "batchscope.plain"  # the error handler of a stream that selects `_replace_unencodable`
_ASCII = {"→": "->", "—": "-", "–": "-", "−": "-", "…": "...", "·": "|", "×": "x", "÷": "/", "±": "+-", "≤": "<="}
_ASCII |= {"≥": ">=", "≈": "~", "µ": "u", "²": "2", "█": "#", "░": "."}


def _replace_unencodable(error: UnicodeError) -> tuple[str, int]:
    """Replace characters that the encoding of a stream lacks by ASCII characters, or by `?`."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_ASCII.get(character, "?") for character in error.object[error.start : error.end]), error.end


codecs.register_error(PLAIN, _replace_unencodable)


def has_no_reader(error: OSError) -> bool:
    """Whether a write to standard output has failed with `error` because the reader of the pipe has ended."""
    if sys.platform == "win32":
        return error.errno in (errno.EPIPE, errno.EINVAL) and error.filename is None
    if not isinstance(error, BrokenPipeError):
        return False
    poll = select.poll()
    poll.register(1, select.POLLOUT)  # macOS ignores a descriptor without an event, and reports POLLHUP
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


_NEEDS_NO_QUOTES = re.compile(r"[\w@+=:,./\\~\[\]-]+")  # no character has a special meaning for cmd


def command_line(words: Iterable[str]) -> str:
    """Return the words as they are typed in the system's shell; on Windows cmd still expands `%NAME%`."""
    if sys.platform != "win32":
        return shlex.join(words)

    def quote(word: str) -> str:  # a backslash is an escape only before a quote
        return '"' + re.sub(r'(\\*)("|$)', lambda m: 2 * m[1] + ('\\"' if m[2] else ""), word) + '"'

    return " ".join(word if _NEEDS_NO_QUOTES.fullmatch(word) else quote(word) for word in words)
