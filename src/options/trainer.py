"""The options of Lightning's classes, which cannot declare them: type and purpose, one row each.

Lightning checks some values of the Trainer when it is built, some when they are first used, and some never. By these
tables they are checked before torch is imported, as all options are. An option without a row is left to Lightning.
"""

from typing import Annotated, Any, Literal

from .types import Choice, Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt, Purpose, Range

_CountOrEndless = Annotated[int, Range(-1)]  # -1: no limit
_BatchesOrFraction = NonNegativeInt | Fraction
_PositiveFraction = Annotated[float, Range(0, 1, open_low=True)]
_Precision = Literal[
    "32-true", "16-true", "16-mixed", "bf16-true", "bf16-mixed", "64-true", "transformer-engine",
    "transformer-engine-float16", "32", "16", "bf16", "64", 32, 16, 64,
]  # fmt: skip
_Written = Annotated[str | None, Purpose.WRITTEN_TO]
_Observed = Annotated[bool | None, Purpose.OBSERVATION]

TRAINER: dict[str, Any] = {
    "accelerator": Annotated[Choice, Purpose.SPEED],
    "devices": Choice | int | list | None,
    "num_nodes": PositiveInt,
    "strategy": Choice | dict | None,
    "precision": _Precision | None,
    "deterministic": bool | Literal["warn"] | None,
    "fast_dev_run": bool | NonNegativeInt,
    "max_epochs": Annotated[_CountOrEndless | None, Purpose.LENGTH],
    "min_epochs": Annotated[NonNegativeInt | None, Purpose.LENGTH],
    "max_steps": Annotated[_CountOrEndless, Purpose.LENGTH],
    "min_steps": Annotated[NonNegativeInt | None, Purpose.LENGTH],
    "max_time": Annotated[Choice | dict | None, Purpose.LENGTH],
    "limit_train_batches": _BatchesOrFraction | None,
    "limit_val_batches": _BatchesOrFraction | None,
    "limit_test_batches": Annotated[_BatchesOrFraction | None, Purpose.LENGTH],
    "limit_predict_batches": Annotated[_BatchesOrFraction | None, Purpose.OBSERVATION],
    "overfit_batches": _BatchesOrFraction,
    "val_check_interval": PositiveInt | _PositiveFraction | Choice | dict | None,  # a text is a time: DD:HH:MM:SS
    "check_val_every_n_epoch": PositiveInt | None,
    "num_sanity_val_steps": Annotated[_CountOrEndless | None, Purpose.OBSERVATION],
    "accumulate_grad_batches": PositiveInt,
    "gradient_clip_val": NonNegativeFloat | None,
    "gradient_clip_algorithm": Literal["norm", "value"] | None,
    "reload_dataloaders_every_n_epochs": NonNegativeInt,
    "profiler": Annotated[Literal["simple", "advanced", "pytorch", "xla"] | dict | None, Purpose.SPEED],
    "default_root_dir": _Written,
    "logger": Annotated[object, Purpose.OBSERVATION],
    "log_every_n_steps": Annotated[NonNegativeInt | None, Purpose.OBSERVATION],
    "use_distributed_sampler": bool | None,
    "enable_checkpointing": _Observed,
    "enable_progress_bar": _Observed,
    "enable_model_summary": _Observed,
    "enable_autolog_hparams": _Observed,
}
# Options of every callback and every logger, whatever its class declares.
CALLBACK: dict[str, Any] = {"dirpath": _Written, "monitor": Choice | None}
LOGGER: dict[str, Any] = {
    "save_dir": _Written,
    **dict.fromkeys(("name", "version", "prefix", "sub_dir"), str | int | None),
}
# Lightning callbacks that only observe. Any other class declares it by `observes_only = True`.
OBSERVERS = frozenset(
    f"lightning.pytorch.callbacks.{name}"
    for name in ("DeviceStatsMonitor", "LearningRateMonitor", "ModelSummary", "RichModelSummary", "RichProgressBar",
                 "TQDMProgressBar")
)  # fmt: skip
