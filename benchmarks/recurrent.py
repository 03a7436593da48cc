"""The speed of recurrent models against torch's modules, and against the readable cells.

    python benchmarks/recurrent.py
    python benchmarks/recurrent.py --device cuda

A shape is (T, F, H, L, B): steps, features, hidden units, layers, batch. All variants take turns within a round; a ratio
is the median over rounds of the ratio within a round.

- Forward runs without gradients, as in validation. In forward+backward the output of every step has a gradient, and no
  gradient is small enough to be denormal.
- Freed memory is kept, as in train.py.
- torch's network runs twice in each round: the ratio of the two shows the noise of this machine.
"""

from collections.abc import Callable
from functools import partial

import torch
from harness import Compared, arguments, compare_variants, median, rows, write_result
from torch import Tensor, nn

from batchscope._system import keep_freed_memory
from batchscope.hardware.microbenchmarks import synchronized_time
from batchscope.models.recurrent import RNNCell, StackedLSTM, unroll

SHAPES = [
    (28, 28, 128, 2, 64),
    (28, 28, 128, 2, 256),
    (100, 2, 128, 1, 32),
    (784, 1, 128, 1, 64),
    (28, 28, 512, 1, 128),
    (200, 64, 256, 3, 16),
]
Shape = tuple[int, int, int, int, int]
# An RNNCell has one layer, whatever the shape says.
CASES = [("LSTM", shape) for shape in SHAPES] + [("RNN", (*shape[:3], 1, shape[4])) for shape in SHAPES]
SMALLEST = [("LSTM", (5, 4, 8, 2, 3)), ("RNN", (5, 4, 8, 1, 3))]
PASSES, ROUNDS = ("forward", "forward+backward"), 25


def network(kind: str, shape: Shape, backend: str) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """A network, and the function that runs it: `(B, T, F)` → `(B, T, H)`."""
    _, features, hidden, layers, _ = shape
    torch.manual_seed(0)
    if backend == "torch":
        torch_net = (nn.RNN if kind == "RNN" else nn.LSTM)(features, hidden, layers, batch_first=True)
        return torch_net, lambda x: torch_net(x)[0]
    net = RNNCell(features, hidden) if kind == "RNN" else StackedLSTM(layers, features, hidden, dropout=0)
    if kind == "RNN":
        return net, lambda x: unroll(net, x, backend=backend)[0]
    net.backend = backend
    return net, lambda x: net(x)[0]


def passes(kind: str, shape: Shape, backend: str, device: str) -> dict[str, Callable[[], object]]:
    """The two timed functions of a variant."""
    length, features, hidden, _, batch = shape
    net, run = network(kind, shape, backend)
    net.to(device)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch, length, features, generator=generator).to(device)
    gradient = torch.randn(batch, length, hidden, generator=generator).to(device)

    def forward() -> Tensor:
        with torch.no_grad():
            return run(x)

    def both() -> None:
        net.zero_grad()
        run(x).backward(gradient)

    return dict(zip(PASSES, (forward, both), strict=True))


def seconds(work: Callable[[], object], repeats: int) -> float:
    started = synchronized_time()
    for _ in range(repeats):
        work()
    return (synchronized_time() - started) / repeats


def times(kind: str, shape: Shape, device: str, rounds: int) -> dict[str, Compared]:
    """Measure every variant of forward and of forward+backward in turns."""
    backends = {"auto": "auto", "torch": "torch", "torch again": "torch", "reference": "reference"}
    work = {name: passes(kind, shape, backend, device) for name, backend in backends.items()}
    results = {}
    for mode in PASSES:
        turns = {}
        for name, functions in work.items():
            functions[mode]()  # warm-up
            turns[name] = partial(seconds, functions[mode], max(1, int(0.05 / seconds(functions[mode], 1))))
        results[mode] = compare_variants(turns, rounds)
    return results


def row(kind: str, shape: Shape, result: Compared) -> list[str]:
    cells = [kind, ", ".join(map(str, shape)), *(f"{1e3 * result.median(name):.1f}" for name in ("auto", "torch"))]
    cells.append(result.ratio("torch", "auto"))
    return cells + [f"{median(result.ratios(*pair)):.2f}" for pair in (("torch", "torch again"), ("reference", "auto"))]


def main() -> None:
    args = arguments(__doc__, device=True).parse_args()
    cases, rounds = (SMALLEST, 2) if args.smallest else (CASES, ROUNDS)
    keep_freed_memory()
    timed = {}
    for case in cases:
        timed[case] = times(*case, args.device, rounds)
        print(*case, flush=True)
    head = ["network", "T, F, H, L, B", "auto", "torch's", "torch's ÷ auto (middle half)", "torch's ÷ itself"]
    head += ["reference ÷ auto"]
    tables = {mode: rows(head, [row(*case, modes[mode]) for case, modes in timed.items()], words=2) for mode in PASSES}
    text = "\n\n".join(f"**{mode}**, ms\n\n{table}" for mode, table in tables.items())
    data = {f"{kind} {shape}": {mode: modes[mode].rounds for mode in PASSES} for (kind, shape), modes in timed.items()}
    write_result("recurrent", text, {"seconds": data}, args)


if __name__ == "__main__":
    main()
