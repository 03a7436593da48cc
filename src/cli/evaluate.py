"""`batchscope evaluate`: a checkpoint → its test metrics.

    batchscope evaluate ckpt=outputs/runs/<run>/checkpoints/best.ckpt
    batchscope evaluate ckpt=<file> data.root=<folder> trainer.accelerator=cpu

The checkpoint names its model and data. Further options, as of batchscope train, change how the checkpoint is
evaluated. What a file alone cannot decide, such as a `data.root` other than `data`, has to be typed again (security.md
in the documentation).
"""

from pathlib import Path
from typing import Any

from .._imports import quick_imports
from ..errors import UserError
from .arguments import CKPT, parse_words


def main() -> None:
    """The program: parse, evaluate, print."""
    options, overrides = parse_words("evaluate", __doc__, {"ckpt": CKPT})
    title, metrics = evaluate(Path(options["ckpt"]), overrides)
    print(title)
    for key, value in sorted(metrics.items()):
        print(f"{key:12} {value:.6g}")


def evaluate(path: Path, overrides: list[str]) -> tuple[str, dict[str, Any]]:
    """Test a checkpoint on its own test set, or on that of another `data=`.

    Return a title, which has the names of the run and of the data, and the test metrics.

    Raises:
        UserError: for a checkpoint that cannot be read or does not fit the model, and for a wrong option.
    """
    with quick_imports():
        from lightning.pytorch.utilities.model_helpers import is_overridden

        from ..data.plain import has_test, lightning_datamodule
        from ..inference.load import restore, trainer_for

    trained = restore(path, overrides, with_data=True)
    config, data = trained.config, trained.data
    if not is_overridden("test_step", trained.module):
        raise UserError(f"model: {type(trained.module).__name__} has no test_step, so there is nothing to evaluate")
    trainer = lightning_datamodule(data).trainer = trainer_for(trained)  # as in a run
    data.prepare_data()
    if not has_test(data):
        raise UserError(f"data: {data.name} has no test set, so there is nothing to evaluate")
    metrics = trainer.test(trained.module, datamodule=lightning_datamodule(data), verbose=False)
    if not metrics:
        raise UserError(
            f"trainer.limit_test_batches: got {config['trainer'].get('limit_test_batches')}, which tests no batch"
        )
    merged = {key: value for loader_metrics in metrics for key, value in loader_metrics.items()}
    return f"{trained.name}, tested on {data.name}", merged
