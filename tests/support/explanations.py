"""Fabricated explanations of training steps."""

from batchscope.records.explanation import Cost, Explanation


def cost(module: str, part: str = "forward", name: str = "aten.mm", dtype: str = "fp32", **numbers: float) -> Cost:
    """The cost of one operation; numbers that are left out are 0."""
    return Cost(name, module, part, dtype, **numbers)


def explanation(*operations: Cost) -> Explanation:
    """A step of 10 s on a CPU."""
    return Explanation(
        title="cnn · mnist",
        device="cpu",
        device_name="Processor",
        precision="32-true",
        batch_size=64,
        step_seconds=10.0,
        between_seconds=0.0,
        steps=5,
        is_timed=True,
        operations=list(operations),
        threads=2,
    )
