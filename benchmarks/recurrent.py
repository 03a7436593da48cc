"""Recurrent models against torch's own, and against the readable cells.

    python benchmarks/recurrent.py
    python benchmarks/recurrent.py --device cuda

A shape is (T, F, H, L, B): steps, features, hidden units, layers, batch. All variants take turns within a round; a ratio
is the median over rounds of the ratio within a round.

- Forward runs without gradients, as in validation. In forward+backward every step's output has a gradient, and none is
  small enough to be denormal.
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


def network(kind: str, shape: Shape, way: str) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """A network, and how to run it: `(B, T, F)` → `(B, T, H)`."""
    _, features, hidden, layers, _ = shape
    torch.manual_seed(0)
    if way == "torch":
        theirs = (nn.RNN if kind == "RNN" else nn.LSTM)(features, hidden, layers, batch_first=True)
        return theirs, lambda x: theirs(x)[0]
    ours = RNNCell(features, hidden) if kind == "RNN" else StackedLSTM(layers, features, hidden, dropout=0)
    if kind == "RNN":
        return ours, lambda x: unroll(ours, x, backend=way)[0]
    ours.backend = way
    return ours, lambda x: ours(x)[0]


def passes(kind: str, shape: Shape, way: str, device: str) -> dict[str, Callable[[], object]]:
    """The two timed functions of a variant."""
    length, features, hidden, _, batch = shape
    net, run = network(kind, shape, way)
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
    """Every variant of forward and of forward+backward, in turns."""
    ways = {"auto": "auto", "torch": "torch", "torch again": "torch", "reference": "reference"}
    work = {name: passes(kind, shape, way, device) for name, way in ways.items()}
    found = {}
    for what in PASSES:
        turns = {}
        for way, of in work.items():
            of[what]()  # warm-up
            turns[way] = partial(seconds, of[what], max(1, int(0.05 / seconds(of[what], 1))))
        found[what] = compare_variants(turns, rounds)
    return found


def row(kind: str, shape: Shape, of: Compared) -> list[str]:
    cells = [kind, ", ".join(map(str, shape)), *(f"{1e3 * of.median(way):.1f}" for way in ("auto", "torch"))]
    cells.append(of.ratio("torch", "auto"))
    return cells + [f"{median(of.ratios(*pair)):.2f}" for pair in (("torch", "torch again"), ("reference", "auto"))]


def main() -> None:
    args = arguments(__doc__, device=True).parse_args()
    cases, rounds = (SMALLEST, 2) if args.smallest else (CASES, ROUNDS)
    keep_freed_memory()
    found = {}
    for case in cases:
        found[case] = times(*case, args.device, rounds)
        print(*case, flush=True)
    head = ["network", "T, F, H, L, B", "auto", "torch's", "torch's ÷ auto (middle half)", "torch's ÷ itself"]
    head += ["reference ÷ auto"]
    tables = {what: rows(head, [row(*case, of[what]) for case, of in found.items()], words=2) for what in PASSES}
    text = "\n\n".join(f"**{what}**, ms\n\n{table}" for what, table in tables.items())
    data = {f"{kind} {shape}": {what: of[what].rounds for what in PASSES} for (kind, shape), of in found.items()}
    write_result("recurrent", text, {"seconds": data}, args)


if __name__ == "__main__":
    main()
