"""A program like a sweep's run, which imports nothing: it takes turns without training, and then finishes.

Of a batch of 8 it kills itself in its second turn.
"""

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np

from batchscope.ranks import TURNS
from batchscope.sweep import fork_server
from tests.support.synthetic_runs import write_steps

STEP_MS = 10.0


def main() -> None:
    """Take turns, and write the record and the steps."""
    folder = Path(sys.argv[2])
    record = json.loads((folder / "run.json").read_text())
    size, taken = record["config"]["data"]["batch_size"], []
    with Path("pids").open("a") as pids:
        print(os.getpid(), file=pids)
    read, write = (os.fdopen(int(end), mode) for end, mode in zip(os.environ[TURNS].split(","), "rw", strict=True))
    print(json.dumps({"ready": True}), file=write, flush=True)
    for line in read:
        if line.startswith("stop"):
            break
        if line.startswith("warm"):
            print(json.dumps({"warm": True}), file=write, flush=True)
            continue
        if size == 8 and len(taken) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        taken.append(int(line.split()[1]))
        print(json.dumps({"median_s": STEP_MS / 1e3, "samples": size, "steps": 50}), file=write, flush=True)
    steps = STEP_MS * np.random.default_rng().uniform(0.99, 1.01, (len(taken), 50))
    write_steps(folder, steps.tolist(), rounds=taken)
    cost = {"batch_size": size, "step_ms_median": STEP_MS, "samples_per_sec": 1e3 * size / STEP_MS}
    record |= {"status": "finished", "throughput": cost, "taken": taken}
    (folder / "run.json").write_text(json.dumps(record))


if __name__ == "__main__":
    if sys.argv[1] == fork_server.SERVE:
        fork_server.IMPORTED = ()
        fork_server.serve()
    main()
