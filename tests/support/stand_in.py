"""A program like a sweep's run, which imports little: it does what `tags` in its configuration say in Python, or a file
`<run>.does` in the working directory.

That line may use `hang()`, `record`, which is written at the end, `visits`, the numbers of the passes in which it was visited,
and `stand_in`, this module.
By default it waits for visits where it is visited, with a steady step of 10 ms, and finishes.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.pop("BATCHSCOPE_FORK_SERVER", None)  # its server imports no torch (src/sweep/fork_server.py)
from batchscope.checkpointing.signals import exit_on_signals
from batchscope.sweep import job

STEP_MS = 10.0
FIT_S = 60.0  # that a training says it takes
DEVICE: dict[str, int] = {}  # the memory of its device that a run sees


def visited(sweep: job.SweepConnection, size: int, record: dict[str, Any]) -> Iterator[int]:
    """Answer each visit after it was dealt with."""
    sweep.tell({"ready": True, "device": DEVICE})
    while (order := sweep.hear().split(" ", 2))[0] not in ("stop", "train", "end", "null"):
        if order[0] == "go":
            yield int(order[1])
            record["taken"].append(int(order[1]))
        sweep.tell({"mean_s": STEP_MS / 1e3, "samples": size, "fit_s": FIT_S, "device": DEVICE})
    record["told"] = " ".join(order)


def hang() -> None:
    """Wait for ever, in Python: on Windows a signal's handler does not interrupt a sleep."""
    while True:
        time.sleep(0.05)


def main() -> None:
    """Do as told, and write the record and the steps."""
    exit_on_signals()
    folder, sweep = Path(sys.argv[1]), job.SweepConnection()
    asked = json.loads(sweep.hear())
    file = folder / "run.json"
    record = json.loads(file.read_text()) | {"status": "running", "taken": [], "pid": os.getpid()}
    file.write_text(json.dumps(record))
    with (folder.parent / "pids").open("a") as pids:
        print(os.getpid(), file=pids)
    size = asked["config"]["data"]["batch_size"]
    visits = visited(sweep, size, record) if asked["visited"] else ()
    cost = {"batch_size": size, "step_ms_median": STEP_MS, "samples_per_sec": 1e3 * size / STEP_MS}
    record |= {"throughput": cost, "dataset": {"train_samples": 4000}}
    told = Path(f"{folder.name}.does")
    does = asked["config"].get("tags") or (told.read_text() if told.exists() else "list(visits)")
    exec(f"import json, os, signal, sys, time\n{does}", {**locals(), "hang": hang, "stand_in": sys.modules[__name__]})  # noqa: S102 - a line of a test
    if record["status"] == "running":
        record["status"] = "finished"
    file.write_text(json.dumps(record))
    if "rerun" in record:
        from tests.support.synthetic_runs import write_steps

        write_steps(folder, [[STEP_MS] * 50] * max(len(record["taken"]), 2), rounds=record["taken"] or None)


if __name__ == "__main__":
    main()
