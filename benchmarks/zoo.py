"""Train every model on every dataset that makes sense for it, and write the table of docs/zoo.md from the run records.

    python benchmarks/zoo.py --root ../shared/data
    python benchmarks/zoo.py --only-report

Finished runs are kept; a second start trains only the missing ones. Every row is one command, and its numbers come from
that run's run.json.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness import fill_in

from batchscope.records.read import read

HERE = Path(__file__).resolve().parent
RUNS = HERE.parent / "outputs" / "zoo"
# Folder → options. Runs on MNIST get data.root as well.
COMMANDS = {
    "mnist-cnn": "model=cnn data=mnist",
    "mnist-cnn-99": "experiment=mnist_99",
    "mnist-mlp": "model=mlp data=mnist optimizer.lr=0.002 trainer.max_epochs=5",
    "mnist-resnet18": "model=torchvision model.name=resnet18 data=mnist optimizer.lr=0.002 trainer.max_epochs=1",
    "mnist-rnn": "model=rnn_cell data=mnist optimizer.lr=0.001 trainer.gradient_clip_val=1",
    "digits-cnn": "model=cnn data=digits",
    "digits-mlp": "model=mlp data=digits optimizer.lr=0.002 trainer.max_epochs=5",
    "rows-rnn": "experiment=mnist_rows model=rnn_cell",
    "rows-lstm": "experiment=mnist_rows model=lstm_cell",
    "rows-stacked": "experiment=mnist_rows model=stacked_lstm",
    "adding-rnn": "experiment=adding model=rnn_cell",
    "adding-lstm": "experiment=adding model=lstm_cell",
    "adding-stacked": "experiment=adding model=stacked_lstm model.dropout=0",
    "copy-rnn": "experiment=copy_memory model=rnn_cell optimizer.lr=0.001",
    "copy-lstm": "experiment=copy_memory model=lstm_cell model.memory_steps=30",
    "copy-stacked": "experiment=copy_memory model=stacked_lstm model.dropout=0 model.memory_steps=30 optimizer.lr=0.01",
}
HEADING = """| model | data | parameters | test | epochs | time an epoch | command |
| --- | --- | ---: | --- | ---: | ---: | --- |
"""


def options(name: str, root: str) -> list[str]:
    words = COMMANDS[name].split()
    reads_mnist = name.startswith(("mnist", "rows"))
    return [*words, *([f"data.root={root}"] if reads_mnist else [])]


def train_missing(root: str, only: list[str]) -> None:
    for number, name in enumerate(only, start=1):
        folder = RUNS / name
        if (folder / "run.json").exists() and read(folder)["status"] == "finished":
            continue
        print(f"{number} of {len(only)}: {COMMANDS[name]}", flush=True)
        subprocess.run(["rm", "-rf", str(folder)], check=True)
        line = [*options(name, root), f"hydra.run.dir={folder}", "callbacks.progress=null"]
        subprocess.run([sys.executable, str(HERE.parent / "train.py"), *line], check=True, cwd=HERE.parent)


def row(name: str, record: dict[str, Any]) -> str:
    metrics = record["metrics"]
    accuracy = metrics.get("test/acc")
    result = f"loss {metrics['test/loss']:.4f}" if accuracy is None else f"{accuracy:.2%}"
    model = record["config"]["model"].get("name", record["model"]["class"])
    words = [model, record["dataset"]["name"], f"{record['model']['parameters']:,}", result]
    seconds = record["fit_seconds"] / record["epochs"]
    return f"| {' | '.join(words)} | {record['epochs']} | {seconds:.0f} s | `python train.py {COMMANDS[name]}` |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="data", help="where MNIST/raw lies")
    parser.add_argument("--only-report", action="store_true", help="train nothing")
    parser.add_argument("names", nargs="*", help=f"some of {', '.join(COMMANDS)}")
    args = parser.parse_args()
    if not args.only_report:
        train_missing(args.root, args.names or list(COMMANDS))
    records = {name: read(RUNS / name) for name in COMMANDS if (RUNS / name / "run.json").exists()}
    finished = {name: record for name, record in records.items() if record["status"] == "finished"}
    if not finished:
        sys.exit(f"no finished runs in {RUNS}: start without --only-report")
    machines = {f"{r['hardware']['cpu']}, {r['hardware']['torch_threads']} threads" for r in finished.values()}
    days = sorted(r["started"][:10] for r in finished.values())
    torch = {r["versions"]["torch"] for r in finished.values()}
    where = f"Measured on {' and '.join(sorted(machines))}, {days[0]} to {days[-1]}, torch {', '.join(sorted(torch))}."
    text = HEADING + "\n".join(row(name, record) for name, record in finished.items()) + f"\n\n{where}"
    fill_in(HERE.parent / "docs" / "zoo.md", {"results": text})
    print(text)


if __name__ == "__main__":
    main()
