"""Measure this machine again, and keep the report of `batchscope hardware` with the date.

python benchmarks/hardware.py
"""

import json
import subprocess
import sys

from harness import write_result

COMMAND = [sys.executable, "-m", "batchscope.hardware"]


def main() -> None:
    text = subprocess.run([*COMMAND, "--refresh"], check=True, capture_output=True, text=True).stdout
    data = json.loads(subprocess.run([*COMMAND, "--json"], check=True, capture_output=True, text=True).stdout)
    write_result("hardware", f"```\n{text.strip()}\n```", {"measured": data})


if __name__ == "__main__":
    main()
