"""Shared by the benchmarks: variants that take turns, statistics, the zoo's steps, the command line, and the results.

A result is `results/<name>.md`, its table, and `results/<name>.json`, its numbers, both with the machine and the date.
`--smallest` runs the smallest case of a script, prints its table and writes nothing.
"""

import argparse
import atexit
import json
import os
import platform
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from batchscope._system import processor_name
from batchscope.data.spec import DataSpec
from batchscope.options.compose import check_command_line
from batchscope.records.run_record import versions
from batchscope.training.build import build, build_optimizer
from batchscope.training.task import Task

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MNIST, CIFAR = DataSpec("image", (1, 28, 28), "class", 10), DataSpec("image", (3, 32, 32), "class", 10)
median = statistics.median


class Compared:
    """Measurements of variants that took turns: `rounds[name]` has one measurement a round, a mapping from key to number."""

    def __init__(self, rounds: Mapping[str, Sequence[Mapping[str, float]]]):
        self.rounds = rounds

    def get(self, name: str, key: str = "seconds") -> list[float]:
        """A variant's numbers, one a round."""
        return [measurement[key] for measurement in self.rounds[name]]

    def median(self, name: str, key: str = "seconds") -> float:
        return median(self.get(name, key))

    def ratios(self, name: str, base: str, key: str = "seconds") -> list[float]:
        """The number of a variant ÷ that of the variant `base`, within each round."""
        return [value / basis for value, basis in zip(self.get(name, key), self.get(base, key), strict=True)]

    def ratio(self, name: str, base: str, key: str = "seconds") -> str:
        """The median of `ratios`, with their quartiles."""
        ratios = self.ratios(name, base, key)
        low, middle, high = statistics.quantiles(2 * ratios if len(ratios) == 1 else ratios, n=4, method="inclusive")
        return f"{middle:.3f} ({low:.3f}–{high:.3f})"

    def difference(self, name: str, base: str, key: str = "seconds") -> float:
        """The median over rounds of a variant − the variant `base`."""
        return median([value - basis for value, basis in zip(self.get(name, key), self.get(base, key), strict=True)])


def compare_variants(
    variants: Mapping[str, Callable[[], float | Mapping[str, float]]], rounds: int, warm_up: int = 0
) -> Compared:
    """Measure variants in turns, in a new order each round, so that a drift of the machine affects all variants alike.

    Args:
        variants: from a name to a function that measures once and returns seconds, or several numbers by key.
        rounds: the rounds that count.
        warm_up: rounds before the first one that counts.
    """
    measurements: dict[str, list[Mapping[str, float]]] = {name: [] for name in variants}
    for round_ in range(-warm_up, rounds):
        for name in sorted(variants, key=lambda name: random.Random(f"{name} {round_}").random()):
            measurement = variants[name]()
            if round_ >= 0:
                measurements[name].append(measurement if isinstance(measurement, Mapping) else {"seconds": measurement})
        print(f"round {round_ + 1} of {rounds}", end="\r", file=sys.stderr, flush=True)
    return Compared(measurements)


def rows(head: Sequence[str], lines: Sequence[Sequence[object]], words: int = 1) -> str:
    """A table in Markdown; the first `words` columns are text, the others numbers."""
    rule = ["---" if column < words else "---:" for column in range(len(head))]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in (head, rule, *lines))


def task_of(config: Mapping[str, Any], spec: DataSpec) -> Task:
    """The model and the optimizer of a configuration."""
    return Task(build(config["model"], "model", spec=spec), spec, build_optimizer(config["optimizer"]))


def zoo_task(model: str, *options: str) -> Task:
    """The task of `model=<model>`, with further options such as `model.backend=reference`."""
    spec = CIFAR if model == "torchvision" else MNIST
    data = "cifar10" if spec is CIFAR else "digits"
    line = [f"model={model}", f"data={data}", *options, "optimizer.schedule=constant"]
    return task_of(check_command_line(line, multirun=False)[0], spec)


def zoo_batch(model: str, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random images and classes that a model of the zoo takes."""
    spec = CIFAR if model == "torchvision" else MNIST
    return torch.randn(samples, *spec.input_shape), torch.randint(spec.num_outputs, (samples,))


def bare_trainer(device: str, callbacks: Sequence[Callback], **options: Any) -> Trainer:
    """A Trainer that shows and saves nothing."""
    silent = {f"enable_{name}": False for name in ("progress_bar", "model_summary", "checkpointing")}
    defaults = {"accelerator": device, "devices": 1, "use_distributed_sampler": False, "logger": False}
    return Trainer(callbacks=list(callbacks), **defaults | silent | options)


def in_a_process(function: Callable, *args: Any, seconds: float | None = None, **environment: str) -> Any:
    """Call a script's function in a new process, where, for example, the allocator is fresh; its result passes as JSON.

    Raises:
        subprocess.SubprocessError: if the process fails, or takes more than `seconds`.
    """
    module = Path(function.__code__.co_filename)
    code = f"import json, sys; sys.path.insert(0, {str(module.parent)!r}); import {module.stem} as script; "
    code += f"print(json.dumps(script.{function.__name__}(*json.loads(sys.argv[1]))))"
    process = subprocess.run(
        [sys.executable, "-c", code, json.dumps(args)], env=os.environ | environment, timeout=seconds,
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return json.loads(process.stdout.splitlines()[-1])


def in_two_ranks(function: Callable, *args: Any) -> Any:
    """Call a script's function in two processes with the variables of torch.distributed; the result of rank 0."""
    config = LaunchConfig(1, 1, 2, run_id="two", rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0)
    return elastic_launch(config, function)(*args)[0]


def train(folder: Path, options: Sequence[str], sweep: bool = False, search: bool = False) -> bool:
    """Run train.py into a folder, with its output on stderr; whether its exit code is 0. A search starts its own runs."""
    line = [sys.executable, "train.py", *(["-m"] if sweep else []), *options, "callbacks.progress=null"]
    line.append(f"hydra.{'sweep' if sweep or search else 'run'}.dir={folder}")
    return not subprocess.run(line, cwd=ROOT, check=False, stdout=sys.stderr).returncode


def folder_of(name: str, args: argparse.Namespace) -> Path:
    """The folder below outputs/ that keeps the measurements for a second start; a temporary one for the smallest case."""
    if args.smallest:
        folder = Path(tempfile.mkdtemp())
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return folder
    (ROOT / "outputs" / name).mkdir(parents=True, exist_ok=True)
    return ROOT / "outputs" / name


def arguments(doc: str | None, device: bool = False) -> argparse.ArgumentParser:
    """The parser of a script, with the options that scripts have in common."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smallest", action="store_true", help="the smallest case; writes no result")
    parser.add_argument("--root", type=os.path.abspath, default="data", help="the folder of the datasets")
    if device:
        parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    return parser


def machine() -> str:
    """The machine, the versions and the date, for the line below each table."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    installed = versions()
    return (
        f"{processor_name()}, {torch.get_num_threads()} threads, {device}, Python {platform.python_version()}, "
        f"torch {installed['torch']}, lightning {installed['lightning']}, {datetime.now(UTC):%Y-%m-%d}"
    )


def machine_of(name: str, args: argparse.Namespace) -> str:
    """`machine()`, or the line of the last result if its measurements are analysed again (`--kept`, `--measured`)."""
    if getattr(args, "kept", False) or getattr(args, "measured", None):
        return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["machine"]
    return machine()


def fill_in(page: Path, blocks: Mapping[str, str]) -> None:
    """Replace the blocks between their marks, `<!-- name -->` and `<!-- end -->`, in a page of the docs."""
    text = page.read_text(encoding="utf-8")
    for name, block in blocks.items():
        (old,) = re.findall(rf"<!-- {name} -->\n.*?<!-- end -->", text, re.DOTALL)
        text = text.replace(old, f"<!-- {name} -->\n{block}\n<!-- end -->")
    page.write_text(text, encoding="utf-8")


def write_result(name: str, table: str, data: Mapping[str, Any], args: argparse.Namespace) -> None:
    """Print a table and, except in the smallest case, write the table and its numbers to `results/`.

    The name of a GPU's result ends with `-cuda`. `data["machine"]` names the machine and the date of measurements that were
    not made just now.
    """
    data = {**data, "machine": data.get("machine") or machine_of(name, args)}
    text = f"{table}\n\n{data['machine']}\n"
    print("\n" + text, flush=True)
    if not args.smallest:
        name += "-cuda" if getattr(args, "device", "cpu") == "cuda" else ""
        (RESULTS / f"{name}.md").write_text(text, encoding="utf-8")
        (RESULTS / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
