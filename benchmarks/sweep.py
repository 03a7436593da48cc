"""Batch sweeps of two models: the recommendation, its repeatability, and the search that needs no list.

    python benchmarks/sweep.py --root ../shared/data

The same sweep runs twice, then `experiment=find_batch_size` for each model. The first sweep's report and plots are kept
in results/sweep/, the summary in results/sweep.md. Interrupted sweeps continue.
"""

import argparse
import shutil
import subprocess
from pathlib import Path

from harness import RESULTS, sweep_line, write_result

from batchscope.analysis import Report, analyse
from batchscope.records.read import FILE, read

ROOT = Path(__file__).resolve().parent.parent
MODELS = ("cnn", "stacked_lstm")
SIZES = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


def sweep(place: Path, *options: str) -> Report:
    """Run a sweep on the command line; returns what its runs show."""
    subprocess.run(sweep_line(place, options), cwd=ROOT, check=True)
    return analyse([place])


def recommended(report: Report) -> dict[str, int | str]:
    """The size of each model; `undecided` where there is none."""
    return {found.group.label: found.size or "undecided" for found in report.answers}


def runs_of(place: Path) -> int:
    return sum(1 for path in place.rglob(FILE) if read(path.parent)["status"] != "planned")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="data")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "bench-sweep")
    args = parser.parse_args()
    every = [f"model={','.join(MODELS)}", f"data.batch_size={','.join(map(str, SIZES))}"]
    common = [f"data.root={args.root}", "data=mnist"]
    reports = [sweep(args.out / name, "experiment=throughput", *common, *every) for name in ("first", "second")]
    rows, data = [], {}
    for model in MODELS:
        place = args.out / f"search-{model}"
        search = sweep(place, "experiment=find_batch_size", *common, f"model={model}")
        found = [recommended(report)[model] for report in (*reports, search)]
        data[model] = {"recommended": found, "search_runs": runs_of(place)}
        rows.append(f"| {model} | {found[0]} | {found[1]} | {found[2]} | {runs_of(place)} |")
    header = "| model | recommended: first sweep | second | found by the search | its runs |"
    kept = RESULTS / "sweep"
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(args.out / "first" / "report", kept, ignore=shutil.ignore_patterns("tensorboard", "*.html"))
    write_result(
        "sweep",
        "\n".join([header, "| --- | ---: | ---: | ---: | ---: |", *rows]),
        {"models": data, "sizes": SIZES},
    )


if __name__ == "__main__":
    main()
