"""Runs the items of a part in a process of their own, and keeps what each found as soon as it is known."""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from batchscope.files import write_text

from . import ROOT, Part, Result, Setting

ITEM = {"card", "seconds", "machine", "table", "claims"}  # of an item that ended well
PATIENCE_S = 20  # for a process that was asked to end
_REHEARSAL = "**A rehearsal in small on a CPU: these numbers say nothing about a GPU.**"


def nvidia_card() -> str | None:
    """Name and driver of the first card, by NVML; None without one. Needs no torch."""
    try:
        import pynvml

        pynvml.nvmlInit()
        name, driver = (
            pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0)),
            pynvml.nvmlSystemGetDriverVersion(),
        )
        return f"{name}, driver {driver}"
    except Exception:  # noqa: BLE001 - NVML has an exception for each thing that can be missing
        return None


def run_part(part: Part, setting: Setting, again: bool) -> list[str]:
    """Run the items that are not done; returns a line for each item that failed and each claim that does not hold."""
    setting.out.mkdir(parents=True, exist_ok=True)
    _write(part, setting, {} if again else _done(part, setting))
    deadline = time.monotonic() + part.limit_s
    left = [name for name in part.items if name not in _done(part, setting)]
    while left:
        print(f"part {part.number} ({part.name}): {', '.join(left)}", flush=True)
        failure = _run_child(part, left, setting, deadline - time.monotonic())
        if failure is None:
            break
        found = _read(part, setting)
        failed, *left = [name for name in left if "error" in found.get(name, {"error": ""})]
        if failed not in found:  # a crash, or the time limit
            _keep(part, setting, failed, {"error": failure})
        if time.monotonic() > deadline:
            for name in left:
                _keep(part, setting, name, {"error": "not reached in the time of the part"})
            break
    return list(_problems(part, _read(part, setting), setting.small))


def _done(part: Part, setting: Setting) -> dict[str, Any]:
    """The items that ended well on this card."""
    card = _card(setting)
    return {name: item for name, item in _read(part, setting).items() if item.keys() >= ITEM and item["card"] == card}


def _card(setting: Setting) -> str | None:
    return "a rehearsal" if setting.small else nvidia_card()


def _problems(part: Part, kept: dict[str, Any], small: bool) -> Iterator[str]:
    for name, item in kept.items():
        if "error" in item:
            yield f"part {part.number}, {name}: failed: {item['error']}"
        elif not small:
            yield from (
                f"part {part.number}, {name}: does not hold: {claim}" for claim, ok in item["claims"].items() if not ok
            )


def _run_child(part: Part, items: Sequence[str], setting: Setting, seconds: float) -> str | None:
    """Run items in one process, which ends at its first failure. Returns how the process failed, or None."""
    line = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--part", str(part.number), "--items", *items]
    line += ["--root", setting.root, "--out", str(setting.out), "--work", str(setting.work)]
    environment = dict(os.environ)
    if setting.small:
        line.append("--rehearse")
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "REHEARSE": "1"}
        environment["XDG_CACHE_HOME"] = str(setting.work / "cache")  # a calibration of a rehearsal stays in it
    log = _file(part, setting).with_suffix(".log")
    with log.open("ab") as complaints:
        process = subprocess.Popen(line, cwd=ROOT, env=environment, start_new_session=True, stderr=complaints)
        try:
            code = process.wait(max(1.0, seconds))
        except subprocess.TimeoutExpired:
            _end(process)
            return f"the part takes more than {part.limit_s:.0f} s"
        except BaseException:
            _end(process)
            raise
    last = ["", *log.read_text("utf-8", "replace").strip().splitlines()][-1]
    return f"exit code {code}: {last[:300]}" if code else None


def _end(process: subprocess.Popen) -> None:
    """End a process and all that it has started in its session: first politely, so that sweeps end their runs."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE_S)
            return


def child(part: Part, items: Sequence[str], setting: Setting) -> None:
    """Run items in this process, one after the other; a failure ends it, because it may have broken the device's context."""
    module = importlib.import_module(f"gpu_parts.{part.name}")
    setting.work.mkdir(parents=True, exist_ok=True)
    for name in items:
        started = time.perf_counter()
        try:
            with contextlib.redirect_stdout(sys.stderr):  # the log
                found: Result = getattr(module, name)(setting)
        except Exception as error:  # noqa: BLE001 - one item's failure is a line of the result
            traceback.print_exc()
            _keep(part, setting, name, {"error": _reason(error)})
            sys.exit(3)
        seconds = round(time.perf_counter() - started, 1)
        item = {"card": _card(setting), "seconds": seconds, "machine": _machine(setting)}
        item |= {"table": found.table, "claims": dict(found.claims)}
        _keep(part, setting, name, {**item, "data": found.data})
        print(f"\n{_section(name, item, setting.small)}\n", flush=True)


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"[:300]


def _machine(setting: Setting) -> str:
    """Device, driver, versions and date."""
    import torch
    from harness import machine

    if setting.small:
        return machine()
    return f"{nvidia_card()}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}; {machine()}"


def _file(part: Part, setting: Setting) -> Path:
    return setting.out / f"{part.number}-{part.name}.json"


def _read(part: Part, setting: Setting) -> dict[str, Any]:
    """The items of a part that were kept; none from a file that is missing or damaged."""
    try:
        found = json.loads(_file(part, setting).read_text(encoding="utf-8"))["items"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: item for name, item in found.items() if name in part.items and isinstance(item, dict)}


def _keep(part: Part, setting: Setting, name: str, item: dict[str, Any]) -> None:
    _write(part, setting, {**_read(part, setting), name: item})


def _write(part: Part, setting: Setting, items: dict[str, Any]) -> None:
    """Both files of a part, each with an atomic write."""
    ordered = {name: items[name] for name in part.items if name in items}
    write_text(
        _file(part, setting), json.dumps({"rehearsal": setting.small, "items": ordered}, indent=1, default=str) + "\n"
    )
    sections = [_section(name, item, setting.small) for name, item in ordered.items()]
    title = f"# {part.number}. {part.name.replace('_', ' ')}"
    text = "\n\n".join([title, *([_REHEARSAL] if setting.small else []), *sections])
    write_text(_file(part, setting).with_suffix(".md"), text + "\n")


def _section(name: str, item: dict[str, Any], small: bool) -> str:
    head = f"## {name.replace('_', ' ')}"
    if "error" in item:
        return f"{head}\n\nfailed: {item['error']}"
    judged = {True: "holds", False: "**does not hold**"}
    claims = [
        f"- {claim}: {'not judged in a rehearsal' if small else judged[ok]}" for claim, ok in item["claims"].items()
    ]
    return "\n\n".join(
        [head, item["table"], *(["\n".join(claims)] if claims else []), f"{item['seconds']} s; {item['machine']}"]
    )
