"""Multi-device scaling of every model of the zoo: measured with two processes, predicted for up to 1,024 devices.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --only-report

Measured, with one thread for each process: the link between two processes (gloo's all-reduce of few and of many bytes), the
step of one process alone at several batch sizes, the step of each of two processes that train at the same time without
communication, and the step of the two under DistributedDataParallel. A step is forward, backward and AdamW on random inputs
in memory. The reported number is the median; the last three measurements alternate. `benchmarks/ring_model.py` predicts the
step under DDP from the others, and the steps of larger numbers of devices on stated links.
"""

import argparse
import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import machine, median, spread, write_result
from ring_model import Link, Prediction, batches_to_accumulate, predict, ring_ms, worthwhile
from scipy.optimize import nnls
from torch import distributed, multiprocessing, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from batchscope.data.spec import DataSpec
from batchscope.hardware.host_memory import keep_freed_memory
from batchscope.options.compose import check_command_line
from batchscope.training.build import build

IMAGE = DataSpec("image", (1, 28, 28), "class", 10)
MODELS = {
    "cnn": "model=cnn",
    "mlp": "model=mlp",
    "rnn_cell": "model=rnn_cell",
    "lstm_cell": "model=lstm_cell",
    "stacked_lstm": "model=stacked_lstm",
    "resnet18": "model=torchvision model.name=resnet18",
}
SIZES = (2, 8, 32, 128)
BATCH, IN_ALL = 64, 1024
ROUNDS = 7
# Nominal bandwidth in one direction, and the shortest time of a message; a real link is slower.
LINKS = {
    "1 Gbit/s Ethernet": Link(0.125e9, 0.05),
    "25 Gbit/s Ethernet": Link(3.125e9, 0.02),
    "400 Gbit/s InfiniBand": Link(50e9, 0.005),
}


def step_of(model: nn.Module, batch_size: int) -> Callable[[], None]:
    """A training step on images; the recurrent models read an image row by row."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    inputs, labels = torch.randn(batch_size, *IMAGE.input_shape), torch.randint(0, 10, (batch_size,))

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


def process(rank: int, port: int, out: str) -> None:
    """One of the two processes; rank 0 writes the results."""
    torch.set_num_threads(1)
    keep_freed_memory()
    distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    link = {}
    for count in (1, 2**20, 2**22, 2**24):  # float32
        tensor = torch.zeros(count)
        link[4 * count] = median_ms(lambda tensor=tensor: distributed.all_reduce(tensor), 1.0, both=True)
    models = {}
    for name, options in MODELS.items():
        models[name] = measured(options)
        if rank == 0:
            print(name, models[name], flush=True)
    if rank == 0:
        Path(out).write_text(json.dumps({"link": link, "models": models}))
    distributed.destroy_process_group()


def measured(options: str) -> dict[str, Any]:
    """All measurements of one model."""
    torch.manual_seed(0)
    model = build(check_command_line(options.split(), multirun=False)[0]["model"], "model", spec=IMAGE)
    alone = {size: median_ms(step_of(model, size), 0.6, both=False) for size in SIZES}
    own, shared = step_of(model, BATCH), step_of(DistributedDataParallel(model), BATCH)
    rounds = []
    for _ in range(ROUNDS):
        one = median_ms(own, 1.0, both=False)
        wall, processor = time.perf_counter(), time.process_time()
        two = median_ms(own, 1.0, both=True)
        core = (time.process_time() - processor) / (time.perf_counter() - wall)
        rounds.append({"alone": one, "beside": two, "together": median_ms(shared, 1.0, both=True), "core": core})
    gradients = sum(4 * parameter.numel() for parameter in model.parameters())
    return {"bytes": gradients, "alone": alone | {BATCH: median([r["alone"] for r in rounds])}, "rounds": rounds}


def measured_link(found: dict[str, float]) -> Link:
    """The link that explains the all-reduces: for two processes two messages, and all bytes sent once."""
    times = {int(size): ms for size, ms in found.items()}
    least, most = min(times), max(times)
    return Link(bytes_per_sec=1e3 * most / (times[most] - times[least]), latency_ms=times[least] / 2)


def step_time(alone: dict[str, float]) -> Callable[[float], float]:
    """The time of a step at any batch size: a constant and a time for each sample, by least squares of relative errors."""
    ms = np.array(list(alone.values()))
    sizes = np.array([float(size) for size in alone])
    (constant, of_sample), _ = nnls(np.stack([1 / ms, sizes / ms], axis=1), np.ones(len(ms)))
    return lambda size: float(constant + of_sample * size)


def compared(models: dict[str, Any], link: Link) -> str:
    """Two processes measured and predicted; a ratio is the median of the ratios within a round."""
    columns = ["model", "gradients", "alone", "beside another", "ring", "two under DDP", "predicted ÷ measured (range)"]
    columns += ["efficiency predicted", "measured"]
    lines = [f"| {' | '.join(columns)} |", "| --- | ---: | ---: | ---: | ---: | ---: | --- | ---: | ---: |"]
    for name, model in models.items():
        rounds, ring = model["rounds"], ring_ms(model["bytes"], 2, link)
        ratios = [(r["beside"] + ring) / r["together"] for r in rounds]
        alone, beside, together = (median([r[kind] for r in rounds]) for kind in ("alone", "beside", "together"))
        times = [f"{ms:.2f} ms" for ms in (alone, beside, ring, together)]
        cells = [name, f"{model['bytes'] / 1e6:.2f} MB", *times, f"{median(ratios):.2f} ({spread(ratios)})"]
        cells += [f"{median([r['alone'] / (r['beside'] + ring) for r in rounds]):.0%}"]
        cells += [f"{median([r['alone'] / r['together'] for r in rounds]):.0%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def predictions(models: dict[str, Any], **batch: float) -> str:
    """Scaling efficiency of every model on 64 devices, and the largest number of devices with one of 50 %, for each link."""
    lines = [f"| model | {' | '.join(f'{name}: on 64 | 50 % up to' for name in LINKS)} |"]
    lines.append(f"| --- |{' ---: |' * 2 * len(LINKS)}")
    for name, model in models.items():
        cells = []
        for link in LINKS.values():

            def of(devices: int, link: Link = link, model: dict[str, Any] = model) -> Prediction | None:
                return predict(step_time(model["alone"]), model["bytes"], devices, link, **batch)

            found, most = of(64), worthwhile(of)
            cells += [f"{found.efficiency:.0%}" if found else "", "all" if most >= 2**20 else f"{most:,}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def accumulated(models: dict[str, Any]) -> str:
    """Accumulated batches with which 64 devices reach an efficiency of 90 %."""
    lines = [f"| model | {' | '.join(LINKS)} |", f"| --- |{' ---: |' * len(LINKS)}"]
    for name, model in models.items():
        step = model["alone"][str(BATCH)]
        counts = [batches_to_accumulate(step, ring_ms(model["bytes"], 64, link), 0.9) for link in LINKS.values()]
        lines.append(f"| {name} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)


def page(found: dict[str, Any]) -> str:
    """results/scaling.md: every table below its question."""
    models, here = found["models"], measured_link(found["link"])
    core = median([one["core"] for model in models.values() for one in model["rounds"]])
    return f"""Two processes on one machine, a batch of {BATCH} for each, which used {core:.2f} of a core (median) while both trained. The
prediction is the step of each of two processes without communication (*beside another*) plus the ring. The link:
{here.bytes_per_sec / 1e9:.2f} GB/s, {1e3 * here.latency_ms:.0f} µs a message.

{compared(models, here)}

DDP's own hooks and copies, the wait for the slower process at every step, and gloo's threads, which need one of the two busy
cores, are in the measured step alone: the efficiencies below are upper bounds.

Predicted, a batch of {BATCH} for each device (weak scaling): the efficiency on 64 devices, and the largest number of devices
that reaches 50 %. Each device is as fast as one core of this machine, and has its own link.

{predictions(models, per_device=BATCH)}

Predicted, {IN_ALL:,} samples for all devices (strong scaling). The step at other batch sizes is a fit to the steps measured at
{", ".join(map(str, sorted({*SIZES, BATCH})))}.

{predictions(models, in_all=IN_ALL)}

The accumulated batches with which 64 devices reach an efficiency of 90 % at a batch of {BATCH}:

{accumulated(models)}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only-report", action="store_true", help="measure nothing; make the tables from results/scaling.json"
    )
    args = parser.parse_args()
    kept = Path(__file__).parent / "results" / "scaling.json"
    if not args.only_report:
        torch.set_num_threads(1)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        multiprocessing.spawn(process, (port, str(kept)), nprocs=2)
        kept.write_text(json.dumps(json.loads(kept.read_text()) | {"machine": machine()}))
    found = json.loads(kept.read_text())
    write_result("scaling", page(found), found)


if __name__ == "__main__":
    main()
