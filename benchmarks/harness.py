"""Shared by the benchmarks: statistics, the description of the machine, and writing results."""

import json
import platform
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from batchscope.hardware.devices import cpu_name
from batchscope.records.run_record import versions

RESULTS = Path(__file__).parent / "results"


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float]) -> str:
    return f"{min(values):.3f}–{max(values):.3f}"


def middle_half(values: Sequence[float]) -> str:
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else 3 * list(values)
    return f"{low:.3f}–{high:.3f}"


def machine() -> str:
    """The machine, the versions and the date, for the line below each table."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    found = versions()
    return (
        f"{cpu_name()}, {torch.get_num_threads()} threads, {device}, Python {platform.python_version()}, "
        f"torch {found['torch']}, lightning {found['lightning']}, {datetime.now(UTC):%Y-%m-%d}"
    )


def sweep_line(place: Path, options: Sequence[str], program: Sequence[str] = (sys.executable, "train.py")) -> list[str]:
    """The command line of a sweep into a folder, to be run in the repository's root."""
    return [*program, "-m", *options, "callbacks.progress=null", f"hydra.sweep.dir={place}"]


def fill_in(page: Path, made: Mapping[str, str]) -> None:
    """Replace the blocks between their marks, `<!-- name -->` and `<!-- end -->`, in a page of the docs."""
    text = page.read_text(encoding="utf-8")
    for name, block in made.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        text = re.sub(pattern, lambda match, block=block: f"{match[1]}{block}\n{match[2]}", text, flags=re.DOTALL)
    page.write_text(text, encoding="utf-8")


def write_result(name: str, table: str, data: dict[str, Any]) -> None:
    """Print a table and write it to `results/<name>.md`, with the raw numbers as JSON beside it.

    `data["machine"]` says on which machine and when the numbers were measured. Without it they were measured just now.
    """
    RESULTS.mkdir(exist_ok=True)
    data = {**data, "machine": data.get("machine") or machine()}
    text = f"{table}\n\n{data['machine']}\n"
    print("\n" + text, flush=True)
    (RESULTS / f"{name}.md").write_text(text, encoding="utf-8")
    (RESULTS / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
