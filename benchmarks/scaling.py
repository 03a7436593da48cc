"""Multi-device scaling of every model of the zoo: measured with two processes, predicted for 64 devices.

    python benchmarks/scaling.py

Measured, with one thread for each process: the link between two processes (gloo's all-reduce of few and of many bytes), the
step of one process alone, the step of each of two processes that train at the same time without communication, and the step
of the two under DistributedDataParallel. A step is forward, backward and AdamW on random inputs in memory. The reported
number is the median; the last three measurements alternate.

Predicted is the step of one device, and an all-reduce of its gradients by a ring. Each of n devices sends and receives
2 (n − 1) pieces of an n-th of the gradients (P. Patarasuk, X. Yuan: Bandwidth optimal all-reduce algorithms for clusters of
workstations, JPDC 69, 2009, who also show that no algorithm sends less):

    exchange = 2 (n − 1) / n · bytes / bandwidth + 2 (n − 1) · latency

Nothing of the exchange is hidden behind the backward pass. A model whose gradients fit into one bucket of DDP (25 MB) has
nothing to hide it behind; for a larger model the prediction is the worst case.
"""

import json
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import arguments, median, middle_half, rows, write_result, zoo_batch, zoo_task
from torch import distributed, multiprocessing, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from batchscope.hardware.host_memory import keep_freed_memory

MODELS = ("cnn", "mlp", "rnn_cell", "lstm_cell", "stacked_lstm", "torchvision")
BATCH, ROUNDS = 64, 7
DEVICES = (64, 1024)  # of which a scaling efficiency is predicted
# Nominal bytes/s in one direction, and milliseconds of an empty message; a real link is slower.
LINKS = {
    "1 Gbit/s Ethernet": (0.125e9, 0.05),
    "25 Gbit/s Ethernet": (3.125e9, 0.02),
    "400 Gbit/s InfiniBand": (50e9, 0.005),
}


def ring_ms(gradient_bytes: float, devices: int, bytes_per_sec: float, latency_ms: float) -> float:
    """Time of an all-reduce by a ring; nothing for one device."""
    sent = 2 * (devices - 1) / devices * gradient_bytes
    return 1e3 * sent / bytes_per_sec + 2 * (devices - 1) * latency_ms


def step_of(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    return step


def median_ms(step: Callable[[], object], seconds: float, both: bool) -> float:
    """The median of single steps, for so many seconds and at least three steps.

    Args:
        step: what is timed.
        seconds: for how long.
        both: True where both processes take the same number of steps; False where the second one sleeps on its socket.
    """
    found: list[float] = []
    distributed.barrier()
    if both or distributed.get_rank() == 0:
        step()
        started = time.perf_counter()
        step()
        count = torch.tensor(max(3, int(seconds / (time.perf_counter() - started))))
        if both:
            distributed.broadcast(count, 0)
        for _ in range(int(count)):
            started = time.perf_counter()
            step()
            found.append(1e3 * (time.perf_counter() - started))
    distributed.barrier()
    return median(found) if found else 0.0


def process(rank: int, port: int, out: str, smallest: bool) -> None:
    """One of the two processes; rank 0 writes the results."""
    torch.set_num_threads(1)
    keep_freed_memory()
    distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    seconds, rounds, link = (0.02, 1, {}) if smallest else (1.0, ROUNDS, {})
    for count in (1, 2**24):  # float32
        tensor = torch.zeros(count)
        link[4 * count] = median_ms(lambda tensor=tensor: distributed.all_reduce(tensor), seconds, both=True)
    models = {name: measured(name, rounds, seconds) for name in MODELS[: 1 if smallest else None]}
    if rank == 0:
        Path(out).write_text(json.dumps({"link": link, "models": models}))
    distributed.destroy_process_group()


def measured(name: str, count: int, seconds: float) -> dict[str, Any]:
    """The bytes of a model's gradients, and its steps in each round, in ms."""
    torch.manual_seed(0)
    model, batch, rounds = zoo_task(name).model, zoo_batch(name, BATCH), []
    own, shared = step_of(model, *batch), step_of(DistributedDataParallel(model), *batch)
    for _ in range(count):
        alone, beside, together = (
            median_ms(*how) for how in ((own, seconds, False), (own, seconds, True), (shared, seconds, True))
        )
        rounds.append({"alone": alone, "beside": beside, "together": together})
    return {"bytes": sum(4 * parameter.numel() for parameter in model.parameters()), "rounds": rounds}


def page(found: dict[str, Any]) -> str:
    """Both tables, each below what it is of."""
    times = {int(size): ms for size, ms in found["link"].items()}
    least, most = min(times), max(times)
    # For two processes two messages, and all bytes sent once.
    here = 1e3 * most / (times[most] - times[least]), times[least] / 2
    measured_rows, predicted_rows = [], []
    for name, model in found["models"].items():
        rounds, ring = model["rounds"], ring_ms(model["bytes"], 2, *here)
        ratios = [(r["beside"] + ring) / r["together"] for r in rounds]
        alone, beside, together = (median([r[kind] for r in rounds]) for kind in ("alone", "beside", "together"))
        cells = [name, f"{model['bytes'] / 1e6:.2f} MB", *(f"{ms:.2f} ms" for ms in (alone, beside, ring, together))]
        cells += [f"{median(ratios):.2f} ({middle_half(ratios)})"]
        cells += [f"{median([r['alone'] / (r['beside'] + ring) for r in rounds]):.0%}"]
        measured_rows.append([*cells, f"{median([r['alone'] / r['together'] for r in rounds]):.0%}"])
        efficiencies = [
            f"{alone / (alone + ring_ms(model['bytes'], n, *link)):.0%}" for link in LINKS.values() for n in DEVICES
        ]
        predicted_rows.append([name, *efficiencies])
    head = ["model", "gradients", "alone", "beside another", "ring", "two under DDP"]
    head += ["predicted ÷ measured (middle half)", "efficiency predicted", "measured"]
    predicted_head = ["model", *(f"{name}: {n:,} devices" for name in LINKS for n in DEVICES)]
    return f"""Two processes on one machine, a batch of {BATCH} for each. The prediction is the step of each of two processes without
communication (*beside another*) plus the ring. The link: {here[0] / 1e9:.2f} GB/s, {1e3 * here[1]:.0f} µs a message.

{rows(head, measured_rows)}

DDP's own hooks and copies, the wait for the slower process at every step, and gloo's threads, which need one of the two busy
cores, are in the measured step alone: the efficiencies below are upper bounds.

Predicted, a batch of {BATCH} for each device (weak scaling): the efficiency. Each device is as fast as one core of this machine,
and has its own link.

{rows(predicted_head, predicted_rows)}"""


def main() -> None:
    args = arguments(__doc__).parse_args()
    torch.set_num_threads(1)
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port, out = free.getsockname()[1], Path(folder) / "found.json"
        free.close()
        multiprocessing.spawn(process, (port, str(out), args.smallest), nprocs=2)
        found = json.loads(out.read_text())
    write_result("scaling", page(found), found, args)


if __name__ == "__main__":
    main()
