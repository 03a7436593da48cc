"""Everything that needs a real GPU, in one command: tests, calibration, sweeps, overhead, causes, predictions.

    python benchmarks/gpu.py --root ../shared/data              # about 15 minutes on one H100
    python benchmarks/gpu.py --part 1 2                         # some parts; each takes 8 minutes at most
    python benchmarks/gpu.py --list
    python benchmarks/gpu.py --rehearse                         # everything in small on a CPU: does it run at all?

A part consists of items. Each item's table goes to `results/gpu/<part>.md`, and its numbers to the JSON file beside it, as
soon as the item is done. The same command goes on where it was stopped: an item that is done on this card is not run again,
unless with `--again`. An item that fails is one line with its reason, and the others go on. The exit code is 1 if an item
failed or a claim does not hold. A rehearsal writes to a temporary folder, says so in every table, and judges no claim.

No network is needed. Where the machine has torch and Lightning and cannot install anything, carry what it lacks. Here, in
the repository's root, for Python 3.12 on Linux there:

    pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --platform manylinux2014_x86_64
      --platform manylinux_2_17_x86_64 --platform any -d wheels
      hydra-core==1.3.8 omegaconf==2.3.1
    pip wheel --no-deps -w wheels antlr4-python3-runtime==4.9.3 .

The last line builds antlr4, of which there is no wheel, and batchscope itself. Carry the repository with `wheels` and MNIST
(the files of `data/MNIST/raw`; without them digits are rendered). There, in the repository's root:

    python3 -m pip install --no-index --no-deps --target site wheels/*.whl
    PYTHONPATH=site python3 benchmarks/gpu.py --root data
"""

import argparse
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from gpu_parts import PARTS, Part, Setting
from gpu_parts.runner import child, nvidia_card, run_part

from batchscope.files import why

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "gpu"
WORK = HERE.parent / "outputs" / "bench-gpu"  # runs and sweeps


def main() -> None:
    args = _parser().parse_args()
    if args.list:
        print("\n".join(f"{part.number}  {part.name:<15}{', '.join(part.items)}" for part in PARTS))
    elif args.items:
        child(_part(args.part[0]), args.items, _setting(args, args.out, args.work))
    elif args.rehearse:
        with tempfile.TemporaryDirectory(prefix="batchscope-rehearsal-") as folder:
            sys.exit(run(args, _setting(args, args.out or Path(folder) / "results", Path(folder) / "work")))
    else:
        sys.exit(run(args, _setting(args, args.out or RESULTS, args.work or WORK)))


def run(args: argparse.Namespace, setting: Setting) -> int:
    """Run the parts, print what came of each item; the exit code."""
    if setting.small:
        print("a rehearsal on the CPU: the numbers say nothing about a GPU")
        if setting.out.is_relative_to(RESULTS.parent):
            print(f"error: --out: a rehearsal writes nothing to {RESULTS.parent}", file=sys.stderr)
            return 1
    elif nvidia_card() is None:
        print("error: no NVIDIA GPU here (NVML finds none); --rehearse tries everything on the CPU", file=sys.stderr)
        return 1
    for option, folder in (("--out", setting.out), ("--work", setting.work)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            print(f"error: {option}: {folder} cannot be written: {why(error)}", file=sys.stderr)
            return 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that what it has started ends with it
    wanted = [_part(number) for number in args.part] if args.part else PARTS
    try:
        problems = [problem for part in wanted for problem in run_part(part, setting, args.again)]
    except KeyboardInterrupt:
        print(f"\ninterrupted: what is done is in {setting.out}; the same command goes on", file=sys.stderr)
        return 130
    if setting.work.is_relative_to(tempfile.gettempdir()):
        shutil.rmtree(setting.work, ignore_errors=True)
    print("\n" + ("\n".join(problems) or "every item ran" + ("" if setting.small else ", and every claim holds")))
    return 1 if problems else 0


def _setting(args: argparse.Namespace, out: Path, work: Path) -> Setting:
    small = args.rehearse
    return Setting("cpu" if small else "cuda", str(Path(args.root).resolve()), out.resolve(), work.resolve(), small)


def _part(number: int) -> Part:
    return PARTS[number - 1]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = range(1, len(PARTS) + 1)
    parser.add_argument("--part", type=int, nargs="+", choices=numbers, metavar="N", help="only these parts")
    parser.add_argument("--root", default="data", help="where MNIST lies")
    parser.add_argument("--again", action="store_true", help="run items that are done, too")
    parser.add_argument("--rehearse", action="store_true", help="everything in small on the CPU")
    parser.add_argument("--out", type=Path, help="folder of the results, instead of results/gpu")
    parser.add_argument("--list", action="store_true", help="list the parts and their items")
    parser.add_argument("--work", type=Path, help="folder of runs and sweeps, instead of outputs/bench-gpu")
    parser.add_argument("--items", nargs="+", help=argparse.SUPPRESS)  # of one part, in this process
    return parser


if __name__ == "__main__":
    main()
