"""What the models of the zoo learn: train lists of commands, and write pages of the docs from the run records.

    python benchmarks/zoo.py zoo --root ../shared/data          # docs/zoo.md: every model on every dataset, 20 minutes
    python benchmarks/zoo.py sequences --root ../shared/data    # results/sequences.md: what recurrent models learn, 5 hours
    python benchmarks/zoo.py accuracy --root ../shared/data     # three seeds of experiment=mnist_99 and of the defaults
    python benchmarks/zoo.py sequences --list
    python benchmarks/zoo.py zoo --only-report

Finished runs are kept below outputs/; a second start trains only the missing ones. Numbers come from a run's run.json and
from its curve, csv/metrics.csv. A run of adding or copy memory ends when the validation set, every 250 steps, shows that it
has solved its task.
"""

import argparse
import csv
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import RESULTS, ROOT, arguments, fill_in, rows, write_result

from batchscope.records.read import read

DOCS = ROOT / "docs"
Record = dict[str, Any]
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
SMALLEST: Commands = {"smallest": "model=mlp data=digits data.num_train=256 data.num_val=64 data.num_test=64"}

# --- runs


class Runs:
    """The runs of a list of commands, each in a folder of its own."""

    def __init__(self, folder: Path, commands: Commands):
        self.folder, self.commands = folder, commands

    def train_missing(self, root: str) -> None:
        for number, (name, options) in enumerate(self.commands.items(), start=1):
            if self.finished(name):
                continue
            place = self.folder / name
            shutil.rmtree(place, ignore_errors=True)
            line = ["train.py", *options.split(), "callbacks.progress=null", f"hydra.run.dir={place}"]
            line += [f"data.root={Path(root).resolve()}"] if name.startswith(("mnist", *MNIST_TASKS)) else []
            print(f"{number} of {len(self.commands)}: python {' '.join(line)}", flush=True)
            if subprocess.run([sys.executable, *line], cwd=ROOT, check=False, stdout=sys.stderr).returncode:
                print(f"{name} failed; the next start tries it again", flush=True)

    def finished(self, name: str) -> Record | None:
        record = read(self.folder / name) if (self.folder / name / "run.json").exists() else None
        return record if record and record["status"] == "finished" else None

    @property
    def records(self) -> dict[str, Record]:
        return {name: record for name in self.commands if (record := self.finished(name))}

    def curve(self, name: str, metric: str) -> list[tuple[int, float]]:
        """`(steps, value)` at every validation."""
        with (self.folder / name / "csv" / "metrics.csv").open(encoding="utf-8") as file:
            return [(int(row["step"]) + 1, float(row[metric])) for row in csv.DictReader(file) if row.get(metric)]

    @property
    def measured_on(self) -> str:
        records = list(self.records.values())
        machines = sorted({f"{r['hardware']['cpu']}, {r['hardware']['torch_threads']} threads" for r in records})
        days, torch = sorted(r["started"][:10] for r in records), sorted({r["versions"]["torch"] for r in records})
        return f"Measured on {' and '.join(machines)}, {days[0]} to {days[-1]}, torch {', '.join(torch)}."


# --- docs/zoo.md


def zoo_page(runs: Runs, args: argparse.Namespace) -> None:
    lines = []
    for name, record in runs.records.items():
        metrics = record["metrics"]
        test = f"{metrics['test/acc']:.2%}" if "test/acc" in metrics else f"loss {metrics['test/loss']:.4f}"
        model = record["config"]["model"].get("name", record["model"]["class"])
        cells = [model, record["dataset"]["name"], f"{record['model']['parameters']:,}", test, record["epochs"]]
        seconds = record["fit_seconds"] / record["epochs"]
        lines.append([*cells, f"{seconds:.0f} s", f"`python train.py {runs.commands[name]}`"])
    head = ["model", "data", "parameters", "test", "epochs", "time an epoch", "command"]
    table = f"{rows(head, lines, words=2)}\n\n{runs.measured_on}"
    print(table) if args.smallest else fill_in(DOCS / "zoo.md", {"results": table})


# --- accuracy over seeds

ACCURACY: Commands = {
    f"mnist-{name}-{seed}": f"{options}seed={seed}"
    for name, options in (("99", "experiment=mnist_99 "), ("defaults", ""))
    for seed in range(3)
}


def accuracy_page(runs: Runs, args: argparse.Namespace) -> None:
    lines, data = [], []
    for name, record in runs.records.items():
        facts = [record["dataset"]["name"], record["epochs"], f"{record['metrics']['test/acc']:.2%}"]
        lines.append([runs.commands[name], *facts, f"{record['fit_seconds']:.1f}"])
        data.append({"command": runs.commands[name], **{k: record[k] for k in ("metrics", "epochs", "dataset")}})
    head = ["python train.py …", "dataset", "epochs", "test accuracy", "seconds of fit"]
    write_result("accuracy", rows(head, lines, words=2), {"runs": data, "machine": runs.measured_on}, args)


# --- results/sequences.md

MODELS = {"rnn_cell": "RNNCell", "lstm_cell": "LSTMCell", "stacked_lstm": "StackedLSTM (2 layers)"}
LENGTHS = {"adding": (50, 100, 200, 400), "copy": (10, 20, 50, 100), "copy_cycle": (10, 20, 50, 100)}
STOP = "+callbacks.solved={_target_:lightning.pytorch.callbacks.EarlyStopping,patience:1000000,check_finite:false,%s}"
CONSTANT, EVERY_250 = "optimizer.schedule=constant", "trainer.val_check_interval=250"
COPY = "experiment=copy_memory data.delay=%s model.hidden_size=64 trainer.max_epochs=30"
RECALLED = STOP % "monitor:val/acc,mode:max,stopping_threshold:0.995"
TASKS = {
    "adding": f"experiment=adding data.sequence_length=%s trainer.max_epochs=8 {CONSTANT} {EVERY_250} "
    + STOP % "monitor:val/loss,stopping_threshold:0.005",
    "copy": f"{COPY} {CONSTANT} {EVERY_250} {RECALLED}",
    "copy_cycle": f"{COPY} optimizer.warmup=0.05 {EVERY_250} {RECALLED}",
    "rows": "experiment=mnist_rows",
    "pixels": "experiment=mnist_rows data.steps=pixels model.hidden_size=64 trainer.max_epochs=10",
    "permuted": "experiment=mnist_rows data.steps=pixels data.permute=true model.hidden_size=64 trainer.max_epochs=10",
}
# Two layers by pixels take longer than an hour here. An RNN copies hardly better than chance, so it is shown once.
LEFT_OUT = {("pixels", "stacked_lstm"), ("permuted", "stacked_lstm"), ("copy_cycle", "rnn_cell")}
# The rates of an LSTMCell come from short trials; the others are guesses from them.
RATES = {
    "adding": {"rnn_cell": 0.0003, "lstm_cell": 0.002, "stacked_lstm": 0.002},
    "copy": {"rnn_cell": 0.0003, "lstm_cell": 0.02, "stacked_lstm": 0.02},
    "rows": {"rnn_cell": 0.001, "lstm_cell": 0.003, "stacked_lstm": 0.003},
    "pixels": {"rnn_cell": 0.0003, "lstm_cell": 0.01, "stacked_lstm": 0.01},
}
RATES |= {"copy_cycle": RATES["copy"], "permuted": RATES["pixels"]}
# How many steps back an LSTM has to remember, for model.memory_steps.
SPANS: dict[str, Callable[[int], int]] = {"adding": lambda length: length, "copy": lambda delay: delay + 20}
SPANS |= {"copy_cycle": SPANS["copy"]} | dict.fromkeys(("pixels", "permuted"), lambda _: 784)
MNIST_TASKS = {"rows": "by rows, T=28", "pixels": "by pixels, T=784", "permuted": "pixels permuted, T=784"}
SOLVED = {"adding": ("val/loss", lambda loss: loss < 0.01), "copy": ("val/acc", lambda acc: acc > 0.99)}
SOLVED["copy_cycle"] = SOLVED["copy"]


def models_of(task: str) -> list[str]:
    return [model for model in MODELS if (task, model) not in LEFT_OUT]


def sequences() -> Commands:
    found = {}
    for task, words in TASKS.items():
        for length in LENGTHS.get(task, (0,)):
            for model in models_of(task):
                options = [words % length if length else words, f"model={model}", f"optimizer.lr={RATES[task][model]}"]
                if model == "stacked_lstm" and length:  # no dropout where every value has to be remembered
                    options.append("model.dropout=0")
                if model != "rnn_cell" and task != "rows":
                    options.append(f"model.memory_steps={SPANS[task](length)}")
                found["-".join([task, *([str(length)] if length else []), model])] = " ".join(options)
    return found


def memory_cell(runs: Runs, task: str, name: str) -> str:
    record = runs.finished(name)
    if record is None:
        return "not run"
    (metric, solves), metrics = SOLVED[task], record["metrics"]
    steps = next((step for step, value in runs.curve(name, metric) if solves(value)), None)
    found = f"MSE {metrics['test/loss']:.4f}" if task == "adding" else f"{metrics['test/acc']:.1%}"
    return f"{steps:,} ({found})" if steps else f"not in {record['steps']:,} ({found})"


def memory_table(runs: Runs, task: str) -> str:
    models = models_of(task)
    lines = [[n, *(memory_cell(runs, task, f"{task}-{n}-{model}") for model in models)] for n in LENGTHS[task]]
    return rows(["T" if task == "adding" else "delay D", *(MODELS[model] for model in models)], lines, words=9)


def mnist_table(runs: Runs) -> str:
    lines = []
    for task, title in MNIST_TASKS.items():
        for model in models_of(task):
            if record := runs.finished(f"{task}-{model}"):
                facts = [f"{record['metrics']['test/acc']:.2%}", record["epochs"], f"{record['fit_seconds'] / 60:.0f}"]
                command = f"`python train.py {runs.commands[f'{task}-{model}']}`"
                lines.append([title, MODELS[model], *facts, command])
    return rows(["MNIST", "model", "test accuracy", "epochs", "minutes", "command"], lines, words=2)


def plot(runs: Runs, task: str, label: str, baseline: Callable[[int], float]) -> None:
    """The validation loss of every length, one panel a model, each length in one colour."""
    import matplotlib.pyplot as plt

    models = models_of(task)
    figure, panels = plt.subplots(1, len(models), figsize=(4 * len(models), 3.4), sharey=True)
    for panel, model in zip(panels, models, strict=True):
        for index, length in enumerate(LENGTHS[task]):
            if runs.finished(name := f"{task}-{length}-{model}"):
                steps, losses = zip(*runs.curve(name, "val/loss"), strict=True)
                panel.semilogy(steps, losses, color=f"C{index}", label=f"{label}={length}")
                panel.axhline(baseline(length), color=f"C{index}", linewidth=0.6, linestyle=":")
        panel.set(title=MODELS[model], xlabel="steps")
    panels[0].set_ylabel("validation loss (dotted: no memory)")
    panels[-1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(RESULTS / f"sequences-{task}.png", dpi=110)
    plt.close(figure)


def sequences_page(runs: Runs, args: argparse.Namespace) -> None:
    made = {task: memory_table(runs, task) for task in LENGTHS} | {"mnist": mnist_table(runs)}
    count = f"{len(runs.records)} of {len(runs.commands)} runs. {runs.measured_on}"
    plot(runs, "adding", "T", lambda _: 1 / 6)
    for task in ("copy", "copy_cycle"):
        plot(runs, task, "D", lambda delay: 10 * 2.0794 / (delay + 20))  # 10·ln 8 over all steps
    fill_in(RESULTS / "sequences.md", made | {"runs": count})


PAGES: dict[str, tuple[Commands, Callable[[Runs, argparse.Namespace], None]]] = {
    "zoo": (ZOO, zoo_page),
    "sequences": (sequences(), sequences_page),
    "accuracy": (ACCURACY, accuracy_page),
}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("page", choices=PAGES)
    parser.add_argument("names", nargs="*", help="runs of --list, or how their names begin; all when left out")
    parser.add_argument("--only-report", action="store_true", help="train nothing")
    parser.add_argument("--list", action="store_true", help="list the runs and whether they have finished")
    args = parser.parse_args()
    commands, write = PAGES[args.page]
    runs = Runs(ROOT / "outputs" / args.page, commands)
    chosen = {name: words for name, words in commands.items() if not args.names or name.startswith(tuple(args.names))}
    if args.list:
        for name, words in chosen.items():
            print("finished" if runs.finished(name) else "missing ", name, "python train.py", words)
        return
    if args.smallest:
        with tempfile.TemporaryDirectory() as folder:
            runs = Runs(Path(folder), {name: f"{words} data.root={folder}" for name, words in SMALLEST.items()})
            runs.train_missing(args.root)
            write(runs, args)
        return
    if not args.only_report:
        Runs(runs.folder, chosen).train_missing(args.root)
    if not runs.records:
        sys.exit(f"no finished runs in {runs.folder}: start without --only-report")
    write(runs, args)


if __name__ == "__main__":
    main()
