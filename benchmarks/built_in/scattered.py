"""Built-in causes in the order of the traffic: strides, transposes, and values at any place of a large tensor."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import Ablation, Case, Parts
from .modules import Apply, Plain, same

SIDE = 4096  # of a matrix of 64 MB


def of_matrix(function: Callable[[Tensor], Tensor], in_order: Callable[[Tensor], Tensor]) -> Callable[..., Parts]:
    """A function of a 64 MB matrix, or one that does as much in the order in which the values lie."""

    def make(ordered: bool = False) -> Parts:
        return Plain(Apply(in_order if ordered else function)), same(torch.randn(SIDE, SIDE)), {}

    return make


def out_of_order(why: str, function: Callable[[Tensor], Tensor], in_order: Callable[[Tensor], Tensor]) -> Case:
    rows = Ablation("as much along the rows", {"ordered": True}, most=0.7)
    return Case(("memory",), why, of_matrix(function, in_order), rows)


class Picks(nn.Module):
    """Reads values or rows of a large tensor at places that are drawn once."""

    def __init__(self, pick: Callable[[Tensor, Tensor], Tensor], places: Tensor):
        super().__init__()
        self.scale, self.pick, self.places = nn.Parameter(torch.ones(())), pick, places

    def forward(self, x: Tensor) -> Tensor:
        return self.pick(x, self.places) * self.scale


def picks(pick: Callable[[Tensor, Tensor], Tensor], *places: int) -> Callable[..., Parts]:
    def make(ordered: bool = False) -> Parts:
        drawn = torch.randint(SIDE, places)
        if ordered:
            drawn = torch.arange(SIDE).view(-1, *[1] * (len(places) - 1)).expand(places).contiguous()
        return Plain(Picks(pick, drawn)), same(torch.randn(SIDE, SIDE)), {}

    return make


def bag(rows: int = 2**21, samples: int = 4096) -> Parts:
    network = nn.EmbeddingBag(rows, 64, sparse=True, _weight=torch.full((rows, 64), 0.1))
    return Plain(network), same(torch.randint(rows, (samples, 40))), {}


SCATTERED = {
    "cumsum across the rows, 64 MB": out_of_order(
        "each step goes to another row, 16 KiB further, and each value of a line is fetched again",
        lambda x: x.cumsum(0),
        lambda x: x.cumsum(1),
    ),
    "largest of columns, 64 MB": out_of_order(
        "as before, of which nothing but one row is written", lambda x: x.max(0)[0], lambda x: x.max(1)[0]
    ),
    "permuted copy, 64 MB": out_of_order(
        "the innermost dimension of the result is the outermost of its source",
        lambda x: x.view(64, 64, 64, 64).permute(3, 1, 2, 0).contiguous(),
        lambda x: x.view(64, 64, 64, 64).permute(1, 0, 2, 3).contiguous(),
    ),
    "sum of a matrix and its transpose, 64 MB": out_of_order(
        "one of the two is read across its rows", lambda x: x + x.t(), lambda x: x + x.flip(0)
    ),
    "gather across the rows, 64 MB": Case(
        ("memory",),
        "each value is in another row, at a place that is drawn",
        picks(lambda x, places: x.gather(0, places), SIDE, SIDE),
        Ablation("the places in order", {"ordered": True}, most=0.7),
    ),
    "bags of 40 rows, 512 MB": Case(
        ("memory",),
        "rows at random places of a table that no cache holds",
        bag,
        Ablation("as many rows of a table of 2 MB", {"rows": 8192}, most=0.8),
    ),
    "convolution after a transposed copy": Case(
        ("memory", "compute"),
        "a small product on rows that are first transposed",
        of_matrix(
            lambda x: F.linear(x.view(64, 64, 4096).transpose(0, 2).contiguous(), torch.ones(8, 64)),
            lambda x: F.linear(x.view(4096, 64, 64), torch.ones(8, 64)),
        ),
        Ablation("without the transpose", {"ordered": True}, most=1.0),
    ),
}
