"""The processes of runs that take turns: each is forked as any run, has two pipes for its turns, and prints into a file.

Runs are set up side by side, after the first one alone, which may have to calibrate the device. They warm up one after the
other. A run waits with its memory. The next one warms up only while there is enough for it; the others come after.
"""

import contextlib
import json
import os
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from ..checkpointing.signals import forces_exit, handled_signals
from ..errors import UserError
from ..hardware.host_memory import host_memory
from ..records.formatting import count
from .fork_server import ForkServer, is_supported
from .passes import USUAL, Limits, measure_in_passes
from .process import Ending, end_group, wait_for_group

MOST_AT_ONCE = 16  # runs in different groups of so many share no passes
_SET_UP_AT_ONCE = min(4, os.cpu_count() or 1)  # reading and checking is the work of one core
_SHARE_LEFT = 0.25  # of the memory
_ACCELERATORS = ("nvidia[0-9]*", "kfd", "dxg", "davinci[0-9]*")  # in /dev: Lightning's `auto` would take them
_PASSES_PER_S = 10  # more than there can be: passes of another time in the same folder have other numbers
_KEEPS_TIME = ("max_time",)  # options of the trainer by which waiting would end a run


def is_suited(config: Mapping[str, Any], devices: Path = Path("/dev")) -> bool:
    """Whether a run of one process can take turns: it is timed until its rate is known, and trains on a CPU."""
    callbacks, trainer = config["callbacks"] or {}, config["trainer"]
    accelerator = trainer.get("accelerator", "auto")
    on_cpu = accelerator == "cpu" or (
        accelerator == "auto" and not any(any(devices.glob(name)) for name in _ACCELERATORS)
    )
    timed = bool(callbacks.get("until_known")) and bool(callbacks.get("throughput"))
    return is_supported() and on_cpu and timed and not any(trainer.get(option) for option in _KEEPS_TIME)


def limits_of(config: Mapping[str, Any]) -> Limits:
    """When a suited run is done, by its configuration."""
    options = config["callbacks"]["until_known"]
    return Limits(**{key: options[key] for key in Limits._fields if key in options})


class CannotFork(Exception):
    """The server cannot start a run, now and later."""


class TurnRun:
    """One run. `on_end` is called with its record's folder, once the run has ended."""

    def __init__(self, folder: Path, words: list[str], server: ForkServer, on_end: "Callable[[TurnRun], None]"):
        self.folder = folder
        self._ending = Ending(folder)
        self._on_end = on_end
        self._rest = b""
        self._code: int | None = None
        self.output = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115 - `printed` closes them
        read, self._orders = os.pipe()
        self._answers, write = os.pipe()
        try:
            out, err = self.output
            process = server.fork(words, (out.fileno(), err.fileno()), (read, write))
        finally:
            os.close(read)
            os.close(write)
        if process is None:
            self.let_go()
            os.close(self._answers)
            raise CannotFork
        self.process, self.ended = process, False

    def turn(self, number: int, seconds: float) -> Mapping[str, Any] | None:
        """See Run."""
        return self.answer() if self._order(f"go {number} {seconds}") else None

    def answer(self) -> Mapping[str, Any] | None:
        """Wait for the run's next line; None if it ends instead."""
        while b"\n" not in self._rest:
            read = os.read(self._answers, 2**16)
            if not read:
                return None
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    def warm_up(self) -> None:
        """Train the updates that are not measured; the run may end of it."""
        if not self._order("warm up") or self.answer() is None:
            self.close()

    def stop(self, reason: str) -> None:
        """See Run."""
        if reason:
            self._order(f"stop {reason}")
        self.close()

    def close(self, stopped_by: int | None = None) -> None:
        """Wait for the run's end, and record it."""
        if self.ended:
            return
        self._ending.record(self._wait(), stopped_by)
        self.ended = True
        os.close(self._answers)
        self._on_end(self)

    def put_off(self) -> None:
        """End a run that has trained nothing yet; another one will take its place."""
        end_group(self.process.pid)
        self._wait()
        self.ended = True
        os.close(self._answers)
        for file in self.output:
            file.close()

    def _wait(self) -> int:
        """Wait until nothing of the run is left; its exit code. May be called again after an exception."""
        self.let_go()
        if self._code is None:
            self._code = self.process.wait()
        end_group(self.process.pid)
        wait_for_group(self.process.pid)
        return self._code

    def printed(self) -> tuple[str, str]:
        """What the run has printed; of a line that was drawn again and again, its last state."""
        texts = []
        for file in self.output:
            with file:
                file.seek(0)
                lines = file.read().decode(errors="replace").replace("\r\n", "\n").split("\n")
            texts.append("\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines))
        return texts[0], texts[1]

    def let_go(self) -> None:
        """The run waits for no more turns."""
        if self._orders >= 0:
            orders, self._orders = self._orders, -1
            os.close(orders)

    def _order(self, line: str) -> bool:
        try:
            os.write(self._orders, line.encode() + b"\n")
        except OSError:  # the run has ended
            return False
        return True


def run_in_turns(
    jobs: Sequence[tuple[Path, list[str]]],
    settings: Sequence[tuple[str, int]],
    server: ForkServer,
    on_end: Callable[[TurnRun], None],
    say: Callable[[str], None],
    limits: Limits = USUAL,
) -> set[Path]:
    """Start as many runs as there is memory for, and visit them in passes until they have ended.

    `settings` has what each job is compared with (see `measure_in_passes`), `say` is told what happens.

    Returns the folders of those that have ended. The others have trained nothing: there was no memory for them, or the
    server could not fork.

    Raises:
        SystemExit: by a signal to this process, once the runs have ended.
    """
    runs: list[TurnRun] = []
    with _one_exit(runs):
        try:
            say(f"preparing {count(len(jobs), 'setting')}")
            _set_up(runs, jobs[:MOST_AT_ONCE], server, on_end)
            put_off = _warm_up(runs)
            measure_in_passes(
                [run for run in runs if not run.ended],
                [setting for run, setting in zip(runs, settings, strict=False) if not run.ended],
                limits,
                say=say,
                first_pass=int(_PASSES_PER_S * time.time()),
            )
        except BaseException as error:  # a record that cannot be written, too
            number = int(str(error.code)) - 128 if isinstance(error, SystemExit) else signal.SIGTERM
            _end_all([run for run in runs if not run.ended], number)
            raise
    return {run.folder for run in runs} - put_off


def _set_up(
    runs: list[TurnRun], jobs: Sequence[tuple[Path, list[str]]], server: ForkServer, on_end: Callable[[TurnRun], None]
) -> None:
    """Start runs, and wait until each is ready to train, or has ended; they are added to `runs`."""
    starting: deque[TurnRun] = deque()

    def wait(left: int) -> None:
        while len(starting) > left:
            run = starting.popleft()
            if run.answer() is None:
                run.close()

    for folder, words in jobs:
        if runs and not _has_memory_for_another(runs):
            break
        wait(_SET_UP_AT_ONCE - 1 if len(runs) > 1 else 0)
        try:
            runs.append(TurnRun(folder, words, server, on_end))
        except CannotFork:
            break
        starting.append(runs[-1])
    wait(0)


def _warm_up(runs: list[TurnRun]) -> set[Path]:
    """Warm runs up one after the other; the folders of those that were put off, since there was no memory for them."""
    warm: list[TurnRun] = []
    put_off: set[Path] = set()
    for run in runs:
        if run.ended:
            continue
        if put_off or (warm and not _has_memory_for_another(warm)):
            run.put_off()
            put_off.add(run.folder)
        else:
            run.warm_up()
            warm.append(run)
    return put_off


@contextlib.contextmanager
def _one_exit(runs: list[TurnRun]) -> Iterator[None]:
    """The first signal raises SystemExit, by the handler that was there. Later ones do not: a second one kills the runs."""
    before: dict[int, Any] = {number: signal.getsignal(number) for number in handled_signals()}
    began: float | None = None

    def leave(number: int, frame: FrameType | None) -> None:
        nonlocal began
        first, began = began is None, time.monotonic() if began is None else began
        handler = before[number]
        if first and callable(handler):
            handler(number, frame)
        elif forces_exit(number, time.monotonic() - began):
            for run in runs:
                if not run.ended:
                    end_group(run.process.pid)

    try:
        for number in before:
            signal.signal(number, leave)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_all(runs: list[TurnRun], number: int) -> None:
    """Ask all runs to end as a single one is asked."""
    for run in runs:
        run.process.send_signal(number)
    for run in runs:
        run.let_go()
    for run in runs:
        with contextlib.suppress(UserError):  # one record that cannot be written leaves no other run behind
            run.close(number)


def _has_memory_for_another(runs: list[TurnRun]) -> bool:
    """Whether a quarter of the memory is available, and twice of what the largest run has taken."""
    memory = host_memory()
    largest = 0
    for run in runs:
        with contextlib.suppress(psutil.Error):  # it has ended
            largest = max(largest, psutil.Process(run.process.pid).memory_info().rss)
    return memory.available >= max(_SHARE_LEFT * memory.total, 2 * largest)
