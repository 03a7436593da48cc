"""The commands that a page of the docs shows, with what they print: run as a user runs them, and compared with the page.

The page's own files, examples that begin with a path, are written before the command that follows them.
`WRITE_DOCS=1 pytest -m slow <the page's test>` writes what the commands print into the page.
"""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

from tests.support import wheel
from tests.support.waiting import PATIENCE_S

# What is shown of the output: how a command ends. The rest depends on the machine and its load, or is long.
SHOWN = re.compile(r"error: |\w+ is ready|result |report |— run|test[/_]\w+ +[\d.]+$|[\w-]+-bs\d")
TIMED = re.compile(r"\d[\d,.]*(e[+-]\d+)?( ?(ms|s|min|h)\b)?")  # what differs from run to run, in a line that is shown

COMMAND = re.compile(r"^    \$ (.*)\n((?:    (?!\$ ).*\n)*)", re.MULTILINE)  # and the lines that are shown below it
_PLACE = re.compile(r"hydra.(?:run|sweep).dir=(\S+)")


class Shell:
    """Runs a page's commands one after the other, in a folder that `cd` changes."""

    def __init__(self, folder: Path, installed: wheel.Environment):
        self.folder, self.installed = folder, installed

    def run(self, line: str) -> tuple[int, list[str]]:
        """The exit code, and the lines that are shown."""
        command, _, note = line.partition("  # ")
        if command.startswith("cd "):
            self.folder /= command.removeprefix("cd ")
            return 0, []
        how = {"cwd": self.folder, "env": {**self.installed.variables, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}}
        with subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, **how,
        ) as process:  # fmt: skip
            if note == "kill -9":
                self._kill(process, next(self.folder / place for place in _PLACE.findall(command)))
                process.communicate(timeout=PATIENCE_S)
                return process.returncode, ["Killed"]
            said, _ = process.communicate(timeout=10 * PATIENCE_S)
        lines = [line.rpartition("\r")[2].rstrip() for line in said.splitlines()]
        return process.returncode, [line for line in lines if SHOWN.match(line)]

    def check(self, page: Path) -> None:
        """See that the commands of a page end as they should, and print what it shows."""
        text, found, done = page.read_text(encoding="utf-8"), {}, 0
        for shown in COMMAND.finditer(text):
            write_files(text[done : shown.start()], self.folder)
            command, done = shown[1], shown.end()
            code, lines = self.run(command)
            refused = [line for line in lines if line.startswith("error: ")]
            expected = -9 if command.endswith("# kill -9") else 1 if refused else 0
            assert code == expected, (command, code, lines)
            assert len(refused) <= 1 and (not refused or lines == refused), lines
            found[command] = lines
        if os.environ.get("WRITE_DOCS") == "1":
            text = COMMAND.sub(lambda shown: "\n    ".join([f"    $ {shown[1]}", *found[shown[1]]]) + "\n", text)
            page.write_text(text, encoding="utf-8")
        for command, below in COMMAND.findall(text):
            said, promised = (
                [TIMED.sub("#", line.strip()) for line in of] for of in (found[command], below.splitlines())
            )
            assert said == promised, f"{command}\n  prints {said}\n  and the page shows {promised}"

    def _kill(self, process: subprocess.Popen[str], folder: Path) -> None:
        """Kill a run once it has a checkpoint, or a sweep in its second run."""
        deadline = time.monotonic() + PATIENCE_S
        while not any((folder / place / "checkpoints" / "last.ckpt").exists() for place in (".", "1")):
            if process.poll() is not None:
                raise AssertionError(f"the run has ended before it was killed: {process.communicate()[0][-2000:]}")
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)


def write_files(text: str, folder: Path) -> None:
    """Write the examples of a page that begin with the path of a file."""
    for content in re.findall(r"^```\w+\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if path := re.match(r'(?:# @package _global_\n)?(?:"""|# )([\w/]+\.(?:py|yaml))\b', content):
            (folder / path[1]).parent.mkdir(parents=True, exist_ok=True)
            (folder / path[1]).write_text(content)
