"""Part 7: `batchscope hardware`: products of 7000×3000 and 70×30 on both devices, and the size where they cross."""

import json
import subprocess
import sys

from . import ROOT, Result, Setting


def hardware(setting: Setting) -> Result:
    """The command's own text; its comparison shows a GPU on the large matrix and not on the small one."""
    line = [sys.executable, "-m", "batchscope.hardware", *(["--quick"] if setting.small else [])]
    text = subprocess.run(line, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    if setting.small:
        return Result(f"```text\n{text}\n```")
    data = json.loads(subprocess.run([*line, "--json"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return Result(f"```text\n{text}\n```", data)
