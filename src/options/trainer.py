"""The values that Lightning's Trainer takes, where its signature says only their type.

Lightning checks some of them when the trainer is built, some when they are first used, and some never. Here they are
checked with all other options, before torch is imported. What is not listed is left to the trainer.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from .schema import check_value
from .types import Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt, Range

_CountOrEndless = Annotated[int, Range(-1)]  # -1: no limit
_BatchesOrShare = NonNegativeInt | Fraction
_PositiveShare = Annotated[float, Range(0, 1, open_low=True)]
_Precision = Literal[
    *("32-true", "16-true", "16-mixed", "bf16-true", "bf16-mixed", "64-true"),
    *("transformer-engine", "transformer-engine-float16", "32", "16", "bf16", "64", 32, 16, 64),
]
_VALUES: dict[str, Any] = {
    "num_nodes": PositiveInt,
    "precision": _Precision | None,
    "fast_dev_run": bool | NonNegativeInt,
    "max_epochs": _CountOrEndless | None,
    "min_epochs": NonNegativeInt | None,
    "max_steps": _CountOrEndless,
    "min_steps": NonNegativeInt | None,
    "limit_train_batches": _BatchesOrShare | None,
    "limit_val_batches": _BatchesOrShare | None,
    "limit_test_batches": _BatchesOrShare | None,
    "limit_predict_batches": _BatchesOrShare | None,
    "overfit_batches": _BatchesOrShare,
    "val_check_interval": PositiveInt | _PositiveShare | str | dict | None,  # a text is a time: DD:HH:MM:SS
    "check_val_every_n_epoch": PositiveInt | None,
    "num_sanity_val_steps": _CountOrEndless | None,
    "log_every_n_steps": NonNegativeInt | None,
    "accumulate_grad_batches": PositiveInt,
    "gradient_clip_val": NonNegativeFloat | None,
    "gradient_clip_algorithm": Literal["norm", "value"] | None,
    "deterministic": bool | Literal["warn"] | None,
    "profiler": Literal["simple", "advanced", "pytorch", "xla"] | dict | None,
    "reload_dataloaders_every_n_epochs": NonNegativeInt,
}


def check_trainer(options: Mapping[str, Any]) -> None:
    """Check a trainer's options.

    Args:
        options: the section `trainer`, resolved.

    Raises:
        UserError: for the first value that the trainer does not take.
    """
    for name, takes in _VALUES.items():
        if name in options:
            check_value(f"trainer.{name}", options[name], takes)
