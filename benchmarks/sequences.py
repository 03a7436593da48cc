"""What recurrent models learn: train a grid of tasks, lengths and models, and write results/sequences.md.

    python benchmarks/sequences.py --root ../shared/data             # all runs; --list names them
    python benchmarks/sequences.py adding copy rows                  # only these tasks
    python benchmarks/sequences.py --only-report

Finished runs are kept; a second start trains only the missing ones. Numbers come from a run's run.json and from its curve,
csv/metrics.csv. A run of adding or copy memory ends when the validation set, every 250 steps, shows that it has solved its
task.
"""

import argparse
import csv
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from harness import fill_in

from batchscope.records.read import read

HERE = Path(__file__).resolve().parent
RUNS = HERE.parent / "outputs" / "sequences"
PAGE = HERE / "results" / "sequences.md"

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
# The rates of an LSTMCell come from short trials; the others are guesses from them. No dropout where every value has to
# be remembered.
RATES = {
    "adding": {"rnn_cell": 0.0003, "lstm_cell": 0.002, "stacked_lstm": 0.002},
    "copy": {"rnn_cell": 0.0003, "lstm_cell": 0.02, "stacked_lstm": 0.02},
    "rows": {"rnn_cell": 0.001, "lstm_cell": 0.003, "stacked_lstm": 0.003},
    "pixels": {"rnn_cell": 0.0003, "lstm_cell": 0.01, "stacked_lstm": 0.01},
    "permuted": {"rnn_cell": 0.0003, "lstm_cell": 0.01, "stacked_lstm": 0.01},
}
RATES["copy_cycle"] = RATES["copy"]
# How many steps back an LSTM has to remember, for model.memory_steps.
SPANS = {"adding": lambda length: length, "copy": lambda delay: delay + 20}
SPANS["copy_cycle"] = SPANS["copy"]
SPANS |= dict.fromkeys(("pixels", "permuted"), lambda _: 784)
MNIST_TASKS = {"rows": "by rows, T=28", "pixels": "by pixels, T=784", "permuted": "pixels permuted, T=784"}
SOLVED = {"adding": ("val/loss", lambda loss: loss < 0.01), "copy": ("val/acc", lambda acc: acc > 0.99)}
SOLVED["copy_cycle"] = SOLVED["copy"]
QUIET = (
    "callbacks.progress=null",
    "callbacks.prediction_images=null",
    "callbacks.device=null",
    "logger.tensorboard=null",
)


def models_of(task: str) -> list[str]:
    return [model for model in MODELS if (task, model) not in LEFT_OUT]


def grid() -> dict[str, tuple[str, ...]]:
    """Every run: its folder → its options."""
    runs = {}
    for task, words in TASKS.items():
        for length in LENGTHS.get(task, (None,)):
            for model in models_of(task):
                options = [f"model={model}", f"optimizer.lr={RATES[task][model]}"]
                if model == "stacked_lstm" and task in LENGTHS:
                    options.append("model.dropout=0")
                if model != "rnn_cell" and task != "rows":
                    options.append(f"model.memory_steps={SPANS[task](length)}")
                name = "-".join([task, *([str(length)] if length else []), model])
                runs[name] = (*(words % length if length else words).split(), *options)
    return runs


def finished(name: str) -> dict[str, Any] | None:
    record = read(RUNS / name) if (RUNS / name / "run.json").exists() else None
    return record if record and record["status"] == "finished" else None


def train_missing(names: list[str], root: str) -> None:
    runs = grid()
    for number, name in enumerate(names, start=1):
        if finished(name):
            continue
        folder = RUNS / name
        shutil.rmtree(folder, ignore_errors=True)
        where = () if name.startswith(tuple(LENGTHS)) else (f"data.root={Path(root).resolve()}",)
        line = ["train.py", *runs[name], *where, *QUIET, f"hydra.run.dir={folder}"]
        print(f"{number} of {len(names)}: python {' '.join(line)}", flush=True)
        if subprocess.run([sys.executable, *line], cwd=HERE.parent, check=False).returncode:
            print(f"{name} failed; the next start tries it again", flush=True)


# --- the page --------------------------------------------------------------------------------------------------------


def curve(name: str, metric: str) -> list[tuple[int, float]]:
    """`(steps, value)` at every validation."""
    with (RUNS / name / "csv" / "metrics.csv").open(encoding="utf-8") as file:
        return [(int(row["step"]) + 1, float(row[metric])) for row in csv.DictReader(file) if row.get(metric)]


def steps_to_solve(task: str, name: str) -> int | None:
    metric, solves = SOLVED[task]
    return next((step for step, value in curve(name, metric) if solves(value)), None)


def memory_cell(task: str, name: str) -> str:
    record = finished(name)
    if record is None:
        return "not run"
    steps, metrics = steps_to_solve(task, name), record["metrics"]
    found = f"MSE {metrics['test/loss']:.4f}" if task == "adding" else f"{metrics['test/acc']:.1%}"
    return f"{steps:,} ({found})" if steps else f"not in {record['steps']:,} ({found})"


def memory_table(task: str, heading: str) -> str:
    models = models_of(task)
    rows = [f"| {heading} | {' | '.join(MODELS[model] for model in models)} |", f"| ---: {'| --- ' * len(models)}|"]
    for length in LENGTHS[task]:
        cells = [memory_cell(task, f"{task}-{length}-{model}") for model in models]
        rows.append(f"| {length} | {' | '.join(cells)} |")
    return "\n".join(rows)


def mnist_table() -> str:
    rows = [
        "| MNIST | model | test accuracy | epochs | minutes | command |",
        "| --- | --- | ---: | ---: | ---: | --- |",
    ]
    for task, title in MNIST_TASKS.items():
        for model in models_of(task):
            record = finished(f"{task}-{model}")
            if record is None:
                continue
            words = [title, MODELS[model], f"{record['metrics']['test/acc']:.2%}", str(record["epochs"])]
            words += [f"{record['fit_seconds'] / 60:.0f}", f"`python train.py {' '.join(grid()[f'{task}-{model}'])}`"]
            rows.append(f"| {' | '.join(words)} |")
    return "\n".join(rows)


def plot(task: str, label: str, baseline: Any) -> None:
    """The validation loss of every length, one panel a model, each length in one colour."""
    models = models_of(task)
    figure, panels = plt.subplots(1, len(models), figsize=(4 * len(models), 3.4), sharey=True)
    for panel, model in zip(panels, models, strict=True):
        for index, length in enumerate(LENGTHS[task]):
            if finished(name := f"{task}-{length}-{model}"):
                steps, losses = zip(*curve(name, "val/loss"), strict=True)
                panel.semilogy(steps, losses, color=f"C{index}")
                panel.axhline(baseline(length), color=f"C{index}", linewidth=0.6, linestyle=":")
        panel.set(title=MODELS[model], xlabel="steps")
    panels[0].set_ylabel("validation loss (dotted: no memory)")
    for index, length in enumerate(LENGTHS[task]):
        panels[-1].plot([], [], color=f"C{index}", label=f"{label}={length}")
    panels[-1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(PAGE.parent / f"sequences-{task}.png", dpi=110)
    plt.close(figure)


def results() -> dict[str, str]:
    """The tables of the page, by their marks."""
    records = [record for name in grid() if (record := finished(name))]
    machines = sorted({f"{r['hardware']['cpu']}, {r['hardware']['torch_threads']} threads" for r in records})
    days, torch = sorted({r["started"][:10] for r in records}), sorted({r["versions"]["torch"] for r in records})
    where = f"{' and '.join(machines)}, {days[0]} to {days[-1]}, torch {', '.join(torch)}"
    return {
        "adding": memory_table("adding", "T"),
        "copy": memory_table("copy", "delay D"),
        "copy_cycle": memory_table("copy_cycle", "delay D"),
        "mnist": mnist_table(),
        "runs": f"{len(records)} of {len(grid())} runs. Measured on {where}.",
    }


def write_page() -> None:
    plot("adding", "T", lambda _: 1 / 6)
    for task in ("copy", "copy_cycle"):
        plot(task, "D", lambda delay: 10 * 2.0794 / (delay + 20))  # 10·ln 8 over all steps
    fill_in(PAGE, results())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="data", help="where MNIST/raw lies")
    parser.add_argument("--only-report", action="store_true", help="train nothing")
    parser.add_argument("--list", action="store_true", help="list the runs and whether they have finished")
    parser.add_argument("parts", nargs="*", help=f"{', '.join(TASKS)}, or names of --list; all when left out")
    args = parser.parse_args()
    chosen = [n for n in grid() if not args.parts or n in args.parts or n.partition("-")[0] in args.parts]
    if args.list:
        for name in chosen:
            print("finished" if finished(name) else "missing ", name, "python train.py", *grid()[name])
        return
    if not args.only_report:
        train_missing(chosen, args.root)
    if any(finished(name) for name in grid()):
        write_page()


if __name__ == "__main__":
    main()
