"""Multi-device scaling of every model of the zoo: measured with two processes, predicted for 64 devices.

    python benchmarks/scaling.py

Measured, with one thread for each process: the link between two processes (gloo's all-reduce of few and of many bytes), the
step of one process alone, the step of each of two processes that train at the same time without communication, and the step
of the two under DistributedDataParallel. A step is forward, backward and AdamW on random inputs in memory. The reported
number is the median; the last three measurements alternate.

The prediction is the step of one device plus an all-reduce of its gradients by a ring. Each of n devices sends and receives
2 (n − 1) pieces of an n-th of the gradients (P. Patarasuk, X. Yuan: Bandwidth optimal all-reduce algorithms for clusters of
workstations, JPDC 69, 2009, who also show that no algorithm sends less):

    exchange = 2 (n − 1) / n · bytes / bandwidth + 2 (n − 1) · latency

The prediction overlaps no part of the exchange with the backward pass. A model whose gradients fit into one bucket of DDP
(25 MB) cannot overlap the two; for a larger model the prediction is the worst case.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from harness import Compared, arguments, compare_variants, in_two_ranks, median, rows, write_result, zoo_batch, zoo_task
from torch import distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from batchscope._system import keep_freed_memory

MODELS = ("cnn", "mlp", "rnn_cell", "lstm_cell", "stacked_lstm", "torchvision")
BATCH, ROUNDS = 64, 7
DEVICES = 64  # of which a scaling efficiency is predicted
# Nominal bytes/s in one direction, and seconds of an empty message; real links are slower.
LINKS = {
    "1 Gbit/s Ethernet": (0.125e9, 50e-6),
    "25 Gbit/s Ethernet": (3.125e9, 20e-6),
    "400 Gbit/s InfiniBand": (50e9, 5e-6),
}


def ring_s(gradient_bytes: float, devices: int, bytes_per_sec: float, latency_s: float) -> float:
    """Seconds of an all-reduce by a ring; 0 for one device."""
    return 2 * (devices - 1) / devices * gradient_bytes / bytes_per_sec + 2 * (devices - 1) * latency_s


def step_of(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    return step


def median_s(step: Callable[[], object], seconds: float, both: bool = True) -> float:
    """The median of single steps, over about `seconds` and at least three steps.

    With `both`, both processes take the same number of steps; otherwise only rank 0 does, while rank 1 waits on its socket.
    """
    durations = [0.0]
    distributed.barrier()
    if both or distributed.get_rank() == 0:
        step()
        started = time.perf_counter()
        step()
        count = torch.tensor(max(3, int(seconds / (time.perf_counter() - started))))
        if both:
            distributed.broadcast(count, 0)
        durations = [seconds_of(step) for _ in range(int(count))]
    distributed.barrier()
    return median(durations)


def seconds_of(step: Callable[[], object]) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def measure(smallest: bool) -> dict[str, Any]:
    """Measure the link and the models; both processes call this."""
    torch.set_num_threads(1)
    keep_freed_memory()
    distributed.init_process_group("gloo")
    seconds, rounds, link = (0.02, 1, {}) if smallest else (1.0, ROUNDS, {})
    for count in (1, 2**24):  # float32
        link[4 * count] = median_s(partial(distributed.all_reduce, torch.zeros(count)), seconds)
    models = {name: measure_model(name, rounds, seconds) for name in MODELS[: 1 if smallest else None]}
    distributed.destroy_process_group()
    return {"link": link, "models": models}


def measure_model(name: str, rounds: int, seconds: float) -> dict[str, Any]:
    """The bytes of a model's gradients, and the seconds of its steps in each round."""
    torch.manual_seed(0)
    model, batch = zoo_task(name).model, zoo_batch(name, BATCH)
    step, ddp_step = step_of(model, *batch), step_of(DistributedDataParallel(model), *batch)
    turns = {
        "alone": partial(median_s, step, seconds, both=False),
        "beside": partial(median_s, step, seconds),
        "together": partial(median_s, ddp_step, seconds),
    }
    compared = compare_variants(turns, rounds)
    return {"bytes": sum(4 * parameter.numel() for parameter in model.parameters()), "rounds": compared.rounds}


def page(measurements: dict[str, Any]) -> str:
    """Both tables, each below its explanation."""
    (few_bytes, few_s), (many_bytes, many_s) = measurements["link"].items()
    # With two processes a ring takes two messages, and sends all bytes once.
    local_link = (many_bytes - few_bytes) / (many_s - few_s), few_s / 2
    measured, predicted = [], []
    for name, model in measurements["models"].items():
        rounds, size, ring = model["rounds"], model["bytes"], ring_s(model["bytes"], 2, *local_link)
        expected = [{"seconds": step["seconds"] + ring} for step in rounds["beside"]]
        steps = Compared(rounds | {"expected": expected})
        alone, beside, together = (steps.median(variant) for variant in ("alone", "beside", "together"))
        cells = [name, f"{size / 1e6:.2f} MB", *(f"{1e3 * took:.2f} ms" for took in (alone, beside, ring, together))]
        cells.append(steps.ratio("expected", "together"))
        measured.append([*cells, *(f"{median(steps.ratios('alone', by)):.0%}" for by in ("expected", "together"))])
        efficiencies = (alone / (alone + ring_s(size, DEVICES, *link)) for link in LINKS.values())
        predicted.append([name, *(f"{efficiency:.0%}" for efficiency in efficiencies)])
    head = ["model", "gradients", "alone", "beside another", "ring", "two under DDP"]
    head += ["predicted ÷ measured (middle half)", "efficiency predicted", "measured"]
    return f"""Two processes on one machine, a batch of {BATCH} for each. The prediction is the step of each of two processes without
communication (*beside another*) plus the ring. The link: {local_link[0] / 1e9:.2f} GB/s, {1e6 * local_link[1]:.0f} µs a message.

{rows(head, measured)}

DDP's own hooks and copies, the wait for the slower process at every step, and gloo's threads, which need one of the two busy
cores, are in the measured step alone: the efficiencies below are upper bounds.

Predicted, a batch of {BATCH} for each of {DEVICES} devices (weak scaling): the efficiency. Each device is as fast as one core of
this machine, and has its own link.

{rows(["model", *LINKS], predicted)}"""


def main() -> None:
    args = arguments(__doc__).parse_args()
    torch.set_num_threads(1)  # for the line below the tables
    measurements = in_two_ranks(measure, args.smallest)
    write_result("scaling", page(measurements), measurements, args)


if __name__ == "__main__":
    main()
