"""What the models of the zoo learn: trains lists of commands, and makes a table of their run records.

    python benchmarks/zoo.py zoo --root ../shared/data          # docs/zoo.md: every model on every dataset, an hour
    python benchmarks/zoo.py sequences --root ../shared/data    # what recurrent models learn, 5 hours
    python benchmarks/zoo.py accuracy --root ../shared/data     # what each option of mnist_99 brings, three seeds, 40 minutes
    python benchmarks/zoo.py best --root ../shared/data         # what mnist_best and rows of MNIST reach, five seeds, three hours
    python benchmarks/zoo.py sequences --list

Finished runs are kept below outputs/; a second start trains only the missing ones. A run of adding or copy memory ends when
a validation, every 250 steps, shows that the task is solved: its number of steps says when.
"""

import argparse
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from harness import ROOT, arguments, fill_in, folder_of, rows, train, write_result

from batchscope.records.formatting import count
from batchscope.records.rates import REPORTED_LOAD
from batchscope.records.read import read

Commands = dict[str, str]  # the name of a run → its options

ZOO: Commands = {
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
# The effect of each option of experiment=mnist_99, and of alternatives.
RECIPES: Commands = {
    "defaults": "model=cnn data=mnist",
    "99": "experiment=mnist_99",
    "99-norm": "experiment=mnist_99 model.norm=batch",
    "99-plain-loss": "experiment=mnist_99 task.loss=cross_entropy",
    "99-3x3": "experiment=mnist_99 model.kernel_size=3",
    "99-wide": "experiment=mnist_99 model.kernel_size=3 model.channels=[32,64]",
    "99-narrow": "experiment=mnist_99 model.channels=[8,16]",
    "99-sgd": "experiment=mnist_99 optimizer=sgd optimizer.lr=0.1",
    "99-shift": "experiment=mnist_99 data.augment.shift=1",
    "99-dropout": "experiment=mnist_99 model.dropout=0.2",
    "99-averaged": "experiment=mnist_99 callbacks=weight_averaging callbacks.weight_averaging.decay=0.98",
    "99-256": "experiment=mnist_99 data.batch_size=256",
    "99-two": "experiment=mnist_99 trainer.max_epochs=2",
}
BEST: Commands = {"best": "experiment=mnist_best", "rows": "experiment=mnist_rows model=stacked_lstm"}


def seeded(commands: Commands, seeds: int) -> Commands:
    return {f"{name}-{seed}": f"{options} seed={seed}" for seed in range(seeds) for name, options in commands.items()}


STOP = "+callbacks.solved={_target_:lightning.pytorch.callbacks.EarlyStopping,patience:1000000,check_finite:false,%s}"
CONSTANT, EVERY_250 = "optimizer.schedule=constant", "trainer.val_check_interval=250"
COPY = f"experiment=copy_memory data.delay=%s model.hidden_size=64 trainer.max_epochs=30 {EVERY_250} "
COPY += STOP % "monitor:val/acc,mode:max,stopping_threshold:0.995"
PIXELS = "experiment=mnist_rows data.steps=pixels model.hidden_size=64 trainer.max_epochs=10"
TASKS = {
    "adding": f"experiment=adding data.sequence_length=%s trainer.max_epochs=8 {CONSTANT} {EVERY_250} "
    + STOP % "monitor:val/loss,stopping_threshold:0.005",
    "copy": f"{COPY} {CONSTANT}",
    "copy_cycle": f"{COPY} optimizer.warmup=0.05",
    "rows": "experiment=mnist_rows",
    "pixels": PIXELS,
    "permuted": f"{PIXELS} data.permute=true",
}
LENGTHS = {"adding": (50, 100, 200, 400), "copy": (10, 20, 50, 100), "copy_cycle": (10, 20, 50, 100)}
# Learning rates of an RNN, and of LSTMs. Those of an LSTMCell come from short trials; the others are guesses from them.
RATES = {"adding": (0.0003, 0.002), "copy": (0.0003, 0.02), "rows": (0.001, 0.003), "pixels": (0.0003, 0.01)}
RATES |= {"copy_cycle": RATES["copy"], "permuted": RATES["pixels"]}
# Two layers on pixels take longer than an hour here. An RNN copies hardly better than chance, so it is shown once.
LEFT_OUT = {("pixels", "stacked_lstm"), ("permuted", "stacked_lstm"), ("copy_cycle", "rnn_cell")}


def sequences() -> Commands:
    commands = {}
    for task, words in TASKS.items():
        for length in LENGTHS.get(task, (0,)):
            for model in ("rnn_cell", "lstm_cell", "stacked_lstm"):
                if (task, model) in LEFT_OUT:
                    continue
                options = [words.replace("%s", str(length)), f"model={model}"]
                options.append(f"optimizer.lr={RATES[task][model != 'rnn_cell']}")
                if model == "stacked_lstm" and length:  # no dropout where every value has to be remembered
                    options.append("model.dropout=0")
                if model != "rnn_cell" and task != "rows":  # how many steps back an LSTM has to remember
                    span = length or 784
                    options.append(f"model.memory_steps={span + 20 if task.startswith('copy') else span}")
                commands["-".join([task, *([str(length)] if length else []), model])] = " ".join(options)
    return commands


PAGES = {"zoo": ZOO, "sequences": sequences(), "accuracy": seeded(RECIPES, 3), "best": seeded(BEST, 5)}
SMALLEST: Commands = {"smallest": "model=mlp data=digits data.num_train=256 data.num_val=64 data.num_test=64"}


def finished(folder: Path, options: str) -> dict[str, Any] | None:
    """The record of a run with these options, if it has finished."""
    record = read(folder) if (folder / "run.json").exists() else None
    has_options = record and set(options.split()) <= set(record["overrides"])
    return record if has_options and record["status"] == "finished" else None


def train_missing(folder: Path, commands: Commands, root: str) -> None:
    for number, (name, options) in enumerate(commands.items(), start=1):
        if finished(folder / name, options):
            continue
        shutil.rmtree(folder / name, ignore_errors=True)
        print(f"{number} of {len(commands)}: python train.py {options}", flush=True)
        where = [] if name.startswith(("adding", "copy")) else [f"data.root={root}"]
        if not train(folder / name, [*options.split(), *where]):
            print(f"{name} failed; the next start tries it again", flush=True)


def is_quiet(record: Mapping[str, Any]) -> bool:
    """Whether other programs took too little of the processor to change the times of a run."""
    return record["throughput"].get("others_share", 0.0) < REPORTED_LOAD


def row(options: str, record: Mapping[str, Any]) -> list[object]:
    metrics, epochs, parameters = record["metrics"], record["epochs"], record["model"]["parameters"]
    test = f"{metrics['test/acc']:.2%}" if "test/acc" in metrics else f"loss {metrics['test/loss']:.4f}"
    model = record["config"]["model"].get("name", record["model"]["class"])
    cells = [f"`python train.py {options}`", model, record["dataset"]["name"], test, epochs, f"{record['steps']:,}"]
    return [*cells, f"{parameters:,}"]


def of_recipes(records: Mapping[str, Mapping[str, Any]]) -> str:
    """A table with a row for each recipe: the test accuracy of each seed, and the minutes of the shortest training."""
    lines = []
    for name, options in (RECIPES | BEST).items():
        runs = [record for run, record in records.items() if run.rpartition("-")[0] == name]
        if runs:
            accuracies = [record["metrics"]["test/acc"] for record in runs]
            seeds = ", ".join(f"{accuracy:.2%}" for accuracy in accuracies)
            parameters = f"{runs[0]['model']['parameters']:,}"
            seconds = min((record["fit_seconds"] for record in runs if is_quiet(record)), default=None)
            minutes = "" if seconds is None else f"{seconds / 60:.1f}"
            means = [f"{fmean(accuracies):.3%}", seeds, minutes, runs[0]["epochs"], parameters]
            lines.append([f"`python train.py {options}`", *means])
    return rows(["command", "test accuracy", "of each seed", "minutes", "epochs", "parameters"], lines)


def page(name: str, folder: Path, commands: Commands, args: argparse.Namespace) -> None:
    """Write the table of all runs that have finished."""
    records = {run: record for run, options in commands.items() if (record := finished(folder / run, options))}
    if not records:
        sys.exit(f"no finished runs in {folder}")
    head = ["command", "model", "data", "test", "epochs", "steps", "parameters"]
    lines = [row(commands[run], record) for run, record in records.items()]
    table = of_recipes(records) if name in ("accuracy", "best") and not args.smallest else rows(head, lines, words=3)
    machines = {f"{r['hardware']['cpu']}, {count(r['hardware']['torch_threads'], 'thread')}" for r in records.values()}
    days = sorted(r["started"][:10] for r in records.values())
    torch = ", ".join(sorted({r["versions"]["torch"] for r in records.values()}))
    origin = f"Measured on {' and '.join(sorted(machines))}, {' to '.join(dict.fromkeys((days[0], days[-1])))}, torch {torch}."
    if name == "zoo" and not args.smallest:
        fill_in(ROOT / "docs" / "zoo.md", {"results": f"{table}\n\n{origin}"})
    else:
        runs = {run: {key: r[key] for key in ("metrics", "epochs", "steps")} for run, r in records.items()}
        write_result(name, table, {"runs": runs, "machine": origin}, args)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("page", choices=PAGES)
    parser.add_argument("--list", action="store_true", help="list the runs and whether they have finished")
    args = parser.parse_args()
    commands, folder = SMALLEST if args.smallest else PAGES[args.page], folder_of(args.page, args)
    if args.list:
        for name, options in PAGES[args.page].items():
            print("finished" if finished(folder / name, options) else "missing ", name, "python train.py", options)
        return
    train_missing(folder, commands, args.root)
    page(args.page, folder, commands, args)


if __name__ == "__main__":
    main()
