"""Multi-device scaling of every model of the zoo: measured with two processes, predicted for up to 1,024 devices.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --only-report

Measured, with one thread for each process: the link between two processes (gloo's all-reduce of few and of many bytes), the
step of one process alone at several batch sizes, the step of each of two processes that train at the same time without
communication, and the step of the two under DistributedDataParallel. A step is forward, backward and AdamW on random inputs
in memory. The reported number is the median; the last three measurements alternate.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import MNIST as IMAGE
from harness import RESULTS, arguments, machine, median, middle_half, rows, write_result
from scipy.optimize import nnls
from torch import distributed, multiprocessing, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from batchscope.hardware.host_memory import keep_freed_memory
from batchscope.options.compose import check_command_line
from batchscope.training.build import build

HALF = 0.5  # below this efficiency more than half of each further device is lost


@dataclass(frozen=True)
class Link:
    """The connection between two devices: bytes that a device sends in a second, and the time of an empty message."""

    bytes_per_sec: float
    latency_ms: float


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


def ring_ms(gradient_bytes: float, devices: int, link: Link) -> float:
    """Time of an all-reduce by a ring; nothing for one device."""
    sent = 2 * (devices - 1) / devices * gradient_bytes
    return 1e3 * sent / link.bytes_per_sec + 2 * (devices - 1) * link.latency_ms


def predict(
    step_ms: Callable[[float], float],
    gradient_bytes: float,
    devices: int,
    link: Link,
    *,
    per_device: float | None = None,
    in_all: float | None = None,
) -> float | None:
    """The scaling efficiency of several devices: their samples/s as a fraction of `devices` times those of one alone.

    Args:
        step_ms: from a batch size to the time of a step of one device.
        gradient_bytes: of one device.
        devices: how many.
        link: between two devices.
        per_device: samples of each device (weak scaling), or
        in_all: samples of all devices (strong scaling).

    Returns:
        None where a device would have less than one sample.
    """
    alone = in_all if per_device is None else per_device
    share = in_all / devices if per_device is None else per_device
    if share < 1:
        return None
    step = step_ms(share) + ring_ms(gradient_bytes, devices, link)
    return (share / step) / (alone / step_ms(alone))


def worthwhile(predict_for: Callable[[int], float | None], most: int = 2**20) -> int:
    """The largest power of two up to which doubling the devices keeps the efficiency at 50 % or more."""
    devices = 1
    while devices < most:
        found = predict_for(2 * devices)
        if found is None or found < HALF:
            break
        devices *= 2
    return devices


def batches_to_accumulate(step_ms: float, communication_ms: float, efficiency: float) -> int:
    """The batches of a step (`trainer.accumulate_grad_batches`) with which a run reaches an efficiency.

    With k batches, a fraction k · step / (k · step + communication) of the time is arithmetic.
    """
    wanted = efficiency / (1 - efficiency) * communication_ms / step_ms
    return max(1, int(-(-wanted // 1)))


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


def process(rank: int, port: int, out: str, smallest: bool) -> None:
    """One of the two processes; rank 0 writes the results."""
    torch.set_num_threads(1)
    keep_freed_memory()
    distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    link = {}
    for count in (1, 2**20, 2**22, 2**24):  # float32
        tensor = torch.zeros(count)
        link[4 * count] = median_ms(
            lambda tensor=tensor: distributed.all_reduce(tensor), 0.02 if smallest else 1.0, both=True
        )
    models = {}
    for name, options in list(MODELS.items())[: 1 if smallest else None]:
        models[name] = measured(options, 1 if smallest else ROUNDS, 0.02 if smallest else 1.0)
        if rank == 0:
            print(name, models[name], flush=True)
    if rank == 0:
        Path(out).write_text(json.dumps({"link": link, "models": models}))
    distributed.destroy_process_group()


def measured(options: str, count: int, seconds: float) -> dict[str, Any]:
    """All measurements of one model."""
    torch.manual_seed(0)
    model = build(check_command_line(options.split(), multirun=False)[0]["model"], "model", spec=IMAGE)
    alone = {size: median_ms(step_of(model, size), 0.6 * seconds, both=False) for size in SIZES}
    own, shared = step_of(model, BATCH), step_of(DistributedDataParallel(model), BATCH)
    rounds = []
    for _ in range(count):
        one = median_ms(own, seconds, both=False)
        wall, processor = time.perf_counter(), time.process_time()
        two = median_ms(own, seconds, both=True)
        core = (time.process_time() - processor) / (time.perf_counter() - wall)
        rounds.append({"alone": one, "beside": two, "together": median_ms(shared, seconds, both=True), "core": core})
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
    lines = []
    for name, model in models.items():
        rounds, ring = model["rounds"], ring_ms(model["bytes"], 2, link)
        ratios = [(r["beside"] + ring) / r["together"] for r in rounds]
        alone, beside, together = (median([r[kind] for r in rounds]) for kind in ("alone", "beside", "together"))
        cells = [name, f"{model['bytes'] / 1e6:.2f} MB", *(f"{ms:.2f} ms" for ms in (alone, beside, ring, together))]
        cells.append(f"{median(ratios):.2f} ({middle_half(ratios)})")
        cells.append(f"{median([r['alone'] / (r['beside'] + ring) for r in rounds]):.0%}")
        lines.append([*cells, f"{median([r['alone'] / r['together'] for r in rounds]):.0%}"])
    head = ["model", "gradients", "alone", "beside another", "ring", "two under DDP"]
    return rows([*head, "predicted ÷ measured (middle half)", "efficiency predicted", "measured"], lines)


def predictions(models: dict[str, Any], **batch: float) -> str:
    """Scaling efficiency of every model on 64 devices, and the largest number of devices with one of 50 %, for each link."""
    lines = []
    for name, model in models.items():
        cells = [name]
        for link in LINKS.values():

            def of(devices: int, link: Link = link, model: dict[str, Any] = model) -> float | None:
                return predict(step_time(model["alone"]), model["bytes"], devices, link, **batch)

            found, most = of(64), worthwhile(of)
            cells += [f"{found:.0%}" if found else "", "all" if most >= 2**20 else f"{most:,}"]
        lines.append(cells)
    return rows(["model", *(word for name in LINKS for word in (f"{name}: on 64", "50 % up to"))], lines)


def accumulated(models: dict[str, Any]) -> str:
    """Accumulated batches with which 64 devices reach an efficiency of 90 %."""
    lines = []
    for name, model in models.items():
        rings = [ring_ms(model["bytes"], 64, link) for link in LINKS.values()]
        lines.append([name, *(batches_to_accumulate(model["alone"][str(BATCH)], ring, 0.9) for ring in rings)])
    return rows(["model", *LINKS], lines)


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
    parser = arguments(__doc__)
    parser.add_argument("--only-report", action="store_true", help="make the tables from results/scaling.json")
    args = parser.parse_args()
    if args.only_report:
        found = json.loads((RESULTS / "scaling.json").read_text())
    else:
        torch.set_num_threads(1)
        with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
            free.bind(("127.0.0.1", 0))
            port, out = free.getsockname()[1], Path(folder) / "found.json"
            free.close()
            multiprocessing.spawn(process, (port, str(out), args.smallest), nprocs=2)
            found = json.loads(out.read_text()) | {"machine": machine()}
    write_result("scaling", page(found), found, args)


if __name__ == "__main__":
    main()
