"""Tests pretend to run on macOS or Windows: this package sees that system, libraries and tests see the real one.

    PRETEND=windows python -m pytest tests/sweep

What a module of this package imports is a stand-in that lacks what the other system lacks: `import fcntl` fails, `os` has no
`fork`, `sys.platform` is `win32`. Paths of the kernel (/proc) cannot be opened by this package. Processes are started by
`spawn`, and streams that are no terminal have the code page 1252. Processes that tests start pretend, too. What is not
pretended: paths, and that an open file cannot be replaced.
"""

import builtins
import errno
import multiprocessing
import os
import signal
import sys
import types
from pathlib import Path
from typing import Any

PRETEND = "PRETEND"  # in the environment: macos or windows
SYSTEM = os.environ.get(PRETEND) or {"win32": "windows", "darwin": "macos"}.get(sys.platform, "linux")

# What a system lacks, by module; `*` is all of it. Windows lacks what macOS does.
_MACOS = {
    "os": "sched_getaffinity sched_setaffinity sched_yield waitid P_PID WEXITED WNOWAIT posix_fadvise memfd_create",
    "signal": "sigwaitinfo sigtimedwait SIGRTMIN SIGPWR SIGCLD SIGPOLL",
    "select": "epoll",
}
_WINDOWS = {
    "os": "fork forkpty kill killpg setsid getsid setpgid getpgid getpgrp getuid geteuid getgid getgroups waitpid wait"
    " WNOHANG WIFEXITED WEXITSTATUS WIFSIGNALED WTERMSIG uname getloadavg nice mkfifo mknod sysconf confstr O_DIRECTORY"
    " O_NOFOLLOW O_NONBLOCK O_CLOEXEC fchmod chown fchown sync statvfs pread pwrite sendfile openpty ctermid",
    "signal": "SIGHUP SIGKILL SIGUSR1 SIGUSR2 SIGCHLD SIGPIPE SIGALRM SIGQUIT SIGSTOP SIGCONT SIGTSTP SIGWINCH alarm"
    " pthread_sigmask pthread_kill sigwait siginterrupt setitimer getitimer pause SIG_BLOCK SIG_UNBLOCK",
    "socket": "AF_UNIX send_fds recv_fds SCM_RIGHTS CMSG_LEN",
    "select": "poll epoll kqueue",
    "multiprocessing.forkserver": "*",
    **dict.fromkeys(("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog", "posix", "crypt"), "*"),
}
# Module → the names that not every system has; `*` is all of it. What is here, `src/_system.py` alone may use.
NOT_EVERYWHERE: dict[str, set[str]] = {
    name: {*_MACOS.get(name, "").split(), *_WINDOWS.get(name, "").split()} for name in {*_MACOS, *_WINDOWS}
}
NOT_EVERYWHERE |= {"ctypes": {"*"}, "msvcrt": {"*"}, "winreg": {"*"}, "sys": {"platform", "getwindowsversion"}}
NOT_EVERYWHERE["os"] |= {"name", "startfile", "set_handle_inheritable"}
NOT_EVERYWHERE["platform"] = {"system", "uname"}
KERNEL = ("/proc", "/sys", "/dev/")  # paths


class _Lacking(types.ModuleType):
    """A module without some of its names, and with others instead."""

    def __init__(self, module: types.ModuleType, without: set[str], instead: dict[str, Any]):
        super().__init__(module.__name__)
        self.__dict__.update(_module=module, _without=without, _instead=instead)

    def __getattr__(self, name: str) -> Any:
        if name in self._instead:
            return self._instead[name]
        if name in self._without:
            raise AttributeError(f"{self.__name__}.{name} is not on {SYSTEM}")
        return getattr(self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._module, name)


def pretend(system: str) -> None:
    """From now on, before this package is imported: be on `macos` or `windows`. In started processes, too."""
    lacks = {name: set(names.split()) for name, names in (_MACOS | (_WINDOWS if system == "windows" else {})).items()}
    if system == "windows":
        lacks |= {name: NOT_EVERYWHERE[name] - {"name"} for name in ("os", "signal", "select")}
    instead: dict[str, dict[str, Any]] = {"sys": {"platform": {"windows": "win32", "macos": "darwin"}[system]}}
    if system == "windows":
        instead["os"] = {"open": _open, "name": "nt"}
        instead["signal"] = {"SIGBREAK": signal.Signals.SIGTTIN, "CTRL_BREAK_EVENT": 1}
    stand_ins = {name: _Lacking(_import(name), lacks.get(name, set()), instead.get(name, {}))
                 for name in {*lacks, *instead} if "*" not in lacks.get(name, ())}  # fmt: skip
    if system == "windows":
        stand_ins["msvcrt"] = _msvcrt()
    gone = {name for name, names in lacks.items() if "*" in names}
    original = builtins.__import__

    def imported(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if level == 0 and _is_ours(globals):
            whole = {name, *(f"{name}.{part}" for part in fromlist or ())}
            if lost := whole & gone:
                raise ModuleNotFoundError(f"No module named '{lost.pop()}' on {SYSTEM}")
            if name in stand_ins and (fromlist or "." not in name):
                return stand_ins[name]
        return original(name, globals, locals, fromlist, level)

    builtins.__import__ = imported
    sys.addaudithook(_refuse_kernel)
    multiprocessing.set_start_method("spawn", force=True)
    here = str(Path(__file__).parent / "pretending")
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", here)]
    os.environ |= {PRETEND: system, "PYTHONPATH": os.pathsep.join([here, *others]), "PYTHONIOENCODING": "cp1252"}


def _import(name: str) -> types.ModuleType:
    return __import__(name, fromlist=["_"])


def _is_ours(scope: Any) -> bool:
    return bool(scope) and str(scope.get("__name__", "")).partition(".")[0] == "batchscope"


def _open(path: Any, *arguments: Any, **how: Any) -> int:
    if os.path.isdir(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))
    return os.open(path, *arguments, **how)


def _msvcrt() -> types.ModuleType:
    import fcntl

    module = types.ModuleType("msvcrt")

    def locking(descriptor: int, mode: int, size: int) -> None:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, size)

    module.__dict__.update(locking=locking, LK_NBLCK=2)
    return module


def _refuse_kernel(event: str, arguments: tuple[Any, ...]) -> None:
    """Files of the kernel are not there for this package; its libraries read them."""
    if event not in ("open", "os.listdir", "os.scandir") or not str(arguments[0]).startswith(KERNEL[:2]):
        return
    frame = sys._getframe(1)
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] in ("pathlib", "os", "io", "glob", "_io"):
        frame = frame.f_back
    if frame and _is_ours(frame.f_globals):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(arguments[0]))
