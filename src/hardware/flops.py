"""The FLOPs of a sample, from the operations that were recorded in updates of the training itself.

Matrix products, convolutions, attention and recurrent kernels count, a multiply-add as two. Element-wise operations and
the optimizer are left out. Causal attention counts as if nothing were masked. Activation checkpointing counts as
executed: recomputation is part of the backward pass.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..records.operations import OperationRow
from .flop_formulas import kind_of_product
from .operations import merge

_VARIES = 1.01  # between updates of as many samples: larger factors are sequences of other lengths, or another network


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of one training step, per sample."""

    forward: float  # everything up to the loss
    backward: float  # fewer than twice the forward pass, since the first layer passes no gradient on
    shares: dict[str, float] = field(default_factory=dict, compare=False)  # of the total, by kind of product

    @property
    def total(self) -> float:
        """Forward and backward, without the optimizer."""
        return self.forward + self.backward


class UncountableError(Exception):
    """The FLOPs of a step are not known. The message says why."""


def flops_of(operations: Iterable[OperationRow], samples: float) -> StepFlops:
    """The FLOPs of a sample in a step of so many.

    Raises:
        UncountableError: for a step without a product.
    """
    counted = [each for each in operations if each.flops and each.part in ("forward", "backward")]
    parts = {part: each.flops / samples for part, each in merge(counted, lambda each: each.part).items()}
    kinds = {kind: each.flops for kind, each in merge(counted, lambda each: kind_of_product(each.name)).items()}
    if not counted:
        raise UncountableError("its step has no matrix product, convolution or attention")
    shares = {kind: flops / sum(kinds.values()) for kind, flops in kinds.items()}
    return StepFlops(parts.get("forward", 0.0), parts.get("backward", 0.0), shares)


def flops_per_sample(steps: Sequence[tuple[Iterable[OperationRow], float]]) -> StepFlops:
    """Those of recorded updates, each with its samples: of those with the most, which leaves out a short last batch.

    Raises:
        UncountableError: where the updates differ, so that three of them say nothing about the others.
    """
    most = max(samples for _, samples in steps)
    found = [flops_of(operations, samples) for operations, samples in steps if samples == most]
    totals = [each.total for each in found]
    if max(totals) > _VARIES * min(totals):
        raise UncountableError("the recorded updates take different numbers of FLOPs a sample")
    return found[-1]
