"""Part 1: `pytest -m gpu`, and a trace of 200 steps that is searched for calls that wait for the device."""

import json
import os
import subprocess
import sys
from xml.etree import ElementTree

import cuda_trace

from . import ROOT, Result, Setting

TESTS = ("tests/gpu", "tests/data/test_loader.py")


def tests(setting: Setting) -> Result:
    """Every test with the marker `gpu`; in a rehearsal on the CPU as far as that makes sense."""
    file = setting.work / "tests.xml"
    line = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", *TESTS, f"--junitxml={file}"]
    environment = os.environ | ({"REHEARSE": "1"} if setting.small else {})
    with (setting.out / "1-pytest.log").open("w") as log:
        subprocess.run(line, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False)
    rows, failed = [], []
    for case in ElementTree.parse(file).iter("testcase"):
        outcome = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        said = "passed" if outcome is None else f"{outcome.tag}: {(outcome.get('message') or '').splitlines()[0][:200]}"
        name = f"{case.get('classname', '').rpartition('.')[2]}: {case.get('name', '')}".replace("_", " ")
        rows.append(f"| {name} | {said.replace('|', '/')} | {float(case.get('time', 0)):.1f} |")
        if outcome is not None and outcome.tag != "skipped":
            failed.append(name)
    if not rows:
        raise RuntimeError("pytest collected no test")
    if failed and setting.small:
        raise RuntimeError(f"{len(failed)} of {len(rows)} tests fail: {'; '.join(failed[:3])}")
    table = "\n".join(["| test | outcome | s |", "| --- | --- | ---: |", *rows])
    return Result(
        table, {"failed": failed, "tests": len(rows)}, {"every test passes or says why it cannot run": not failed}
    )


def waiting(setting: Setting) -> Result:
    """No call of 200 steady steps with the default callbacks and loggers waits for the device, or allocates."""
    steps = 3 if setting.small else cuda_trace.STEPS
    file = setting.work / "trace.json"
    small = {"warm_up": 8, "batch": 8} if setting.small else {}
    cuda_trace.trace(file, steps, setting.accelerator, **small)
    events = json.loads(file.read_text())["traceEvents"]
    file.unlink()
    try:
        found = cuda_trace.waits(events, steps)
    except cuda_trace.CannotTell as error:
        if not setting.small:
            raise
        found = [str(error)]
    lines = [f"- {call}" for call in found[:40]] or [f"No call in {steps} steps waits for the device."]
    return Result(
        "\n".join(lines), found, {f"no call in {steps} steps waits, allocates or copies pageable memory": not found}
    )
