"""The FLOPs of a sample, from the operations that were recorded in updates of the training itself.

Matrix products, convolutions, attention and recurrent kernels count, a multiply-add as two. Element-wise operations and
the optimizer are left out. Causal attention counts as if nothing were masked. Activation checkpointing counts as
executed: recomputation is part of the backward pass.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from ..records.operations import OperationRow
from .flop_formulas import kind_of_product

_VARIES = 1.01  # between updates of as many samples: larger factors are sequences of other lengths, or another network
_SINGLE = ("fp32", "tf32")


class UncountableError(Exception):
    """The FLOPs of a step are not known. The message says why."""


def flops_per_sample(steps: Sequence[tuple[Iterable[OperationRow], float]]) -> tuple[float, dict[str, float]]:
    """The FLOPs of a sample, forward and backward, and the share of each kind of product in them: `matmul`, of float32 tensors;
    `matmul bf16` of others.

    Given recorded updates, each with its samples. Those of half of the most samples and more count, which leaves out a short
    last batch.

    Raises:
        UncountableError: for an update without a product, and where the updates differ, so that three of them say nothing
            about the others.
    """
    most, found = max(samples for _, samples in steps), []
    for operations, samples in ((operations, samples) for operations, samples in steps if 2 * samples >= most):
        kinds: defaultdict[str, float] = defaultdict(float)
        for each in operations:
            if each.flops and each.part in ("forward", "backward"):
                kind = kind_of_product(each.name)
                kinds[kind if each.dtype in _SINGLE else f"{kind} {each.dtype}"] += each.flops / samples
        if not kinds:
            raise UncountableError("its step has no matrix product, convolution or attention")
        found.append(kinds)
    totals = [sum(kinds.values()) for kinds in found]
    if max(totals) > _VARIES * min(totals):
        raise UncountableError("the recorded updates take different numbers of FLOPs a sample")
    return totals[-1], {kind: flops / totals[-1] for kind, flops in found[-1].items()}
