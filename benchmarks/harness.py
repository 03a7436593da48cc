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
    """What variants took that were measured in turns: `rounds[name]` has one measurement a round, numbers by their key."""

    def __init__(self, rounds: Mapping[str, Sequence[Mapping[str, float]]]):
        self.rounds = rounds

    def of(self, name: str, key: str = "seconds") -> list[float]:
        """A variant's numbers, one a round."""
        return [each[key] for each in self.rounds[name]]

    def median(self, name: str, key: str = "seconds") -> float:
        return median(self.of(name, key))

    def ratios(self, name: str, base: str, key: str = "seconds") -> list[float]:
        """A variant ÷ another one, within each round."""
        return [one / other for one, other in zip(self.of(name, key), self.of(base, key), strict=True)]

    def ratio(self, name: str, base: str, key: str = "seconds") -> str:
        """The median of these ratios, with their middle half."""
        found = self.ratios(name, base, key)
        low, middle, high = statistics.quantiles(2 * found if len(found) == 1 else found, n=4, method="inclusive")
        return f"{middle:.3f} ({low:.3f}–{high:.3f})"

    def difference(self, name: str, base: str, key: str = "seconds") -> float:
        """The median over rounds of a variant − another one."""
        return median([one - other for one, other in zip(self.of(name, key), self.of(base, key), strict=True)])


def compare_variants(
    variants: Mapping[str, Callable[[], float | Mapping[str, float]]], rounds: int, warm_up: int = 0
) -> Compared:
    """Measure variants in turns, in another order in each round: what changes in the machine changes for all of them.

    Args:
        variants: by name what measures once; it returns seconds, or several numbers by their keys.
        rounds: that count.
        warm_up: rounds before them.
    """
    found: dict[str, list[Mapping[str, float]]] = {name: [] for name in variants}
    for round_ in range(-warm_up, rounds):
        for name in sorted(variants, key=lambda name: random.Random(f"{name} {round_}").random()):
            one = variants[name]()
            if round_ >= 0:
                found[name].append(one if isinstance(one, Mapping) else {"seconds": one})
        print(f"round {round_ + 1} of {rounds}", end="\r", file=sys.stderr, flush=True)
    return Compared(found)


def rows(head: Sequence[str], lines: Sequence[Sequence[object]], words: int = 1) -> str:
    """A table in Markdown; the first `words` columns are text, the others numbers."""
    rule = ["---" if place < words else "---:" for place in range(len(head))]
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
    shown = {f"enable_{name}": False for name in ("progress_bar", "model_summary", "checkpointing")}
    usual = {"accelerator": device, "devices": 1, "use_distributed_sampler": False, "logger": False}
    return Trainer(callbacks=list(callbacks), **usual | shown | options)


def in_a_process(function: Callable, *given: Any, seconds: float | None = None, **environment: str) -> Any:
    """What a script's function returns, as JSON, from a process of its own: an allocator, for example, cannot be reset.

    Raises:
        subprocess.SubprocessError: if it fails, or takes more than so many seconds.
    """
    module = Path(function.__code__.co_filename)
    code = f"import json, sys; sys.path.insert(0, {str(module.parent)!r}); import {module.stem} as script; "
    code += f"print(json.dumps(script.{function.__name__}(*json.loads(sys.argv[1]))))"
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(given)], env=os.environ | environment, timeout=seconds,
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def in_two_ranks(function: Callable, *given: Any) -> Any:
    """What a script's function returns in the first of two processes, for which torch.distributed's variables are set."""
    how = LaunchConfig(1, 1, 2, run_id="two", rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0)
    return elastic_launch(how, function)(*given)[0]


def train(place: Path, options: Sequence[str], sweep: bool = False, search: bool = False) -> bool:
    """Run train.py into a folder, with its output on stderr; whether it ended well. A search does runs of its own."""
    line = [sys.executable, "train.py", *(["-m"] if sweep else []), *options, "callbacks.progress=null"]
    line.append(f"hydra.{'sweep' if sweep or search else 'run'}.dir={place}")
    return not subprocess.run(line, cwd=ROOT, check=False, stdout=sys.stderr).returncode


def folder_of(name: str, args: argparse.Namespace) -> Path:
    """The folder below outputs/ that keeps what was measured, for a second start; a temporary one for the smallest case."""
    if args.smallest:
        place = Path(tempfile.mkdtemp())
        atexit.register(shutil.rmtree, place, ignore_errors=True)
        return place
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
    found = versions()
    return (
        f"{processor_name()}, {torch.get_num_threads()} threads, {device}, Python {platform.python_version()}, "
        f"torch {found['torch']}, lightning {found['lightning']}, {datetime.now(UTC):%Y-%m-%d}"
    )


def machine_of(name: str, args: argparse.Namespace) -> str:
    """`machine()`, or the line of the last result where what it measured is analysed again (`--kept`, `--measured`)."""
    if getattr(args, "kept", False) or getattr(args, "measured", None):
        return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["machine"]
    return machine()


def fill_in(page: Path, made: Mapping[str, str]) -> None:
    """Replace the blocks between their marks, `<!-- name -->` and `<!-- end -->`, in a page of the docs."""
    text = page.read_text(encoding="utf-8")
    for name, block in made.items():
        (old,) = re.findall(rf"<!-- {name} -->\n.*?<!-- end -->", text, re.DOTALL)
        text = text.replace(old, f"<!-- {name} -->\n{block}\n<!-- end -->")
    page.write_text(text, encoding="utf-8")


def write_result(name: str, table: str, data: Mapping[str, Any], args: argparse.Namespace) -> None:
    """Print a table and, but for the smallest case, write it and its numbers to `results/`.

    A result of a GPU has `-cuda` in its name. `data["machine"]` says on which machine and when the numbers were measured,
    if it was not just now.
    """
    data = {**data, "machine": data.get("machine") or machine_of(name, args)}
    text = f"{table}\n\n{data['machine']}\n"
    print("\n" + text, flush=True)
    if not args.smallest:
        name += "-cuda" if getattr(args, "device", "cpu") == "cuda" else ""
        (RESULTS / f"{name}.md").write_text(text, encoding="utf-8")
        (RESULTS / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
