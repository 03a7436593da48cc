"""`batchscope evaluate`: a checkpoint → its test metrics.

    batchscope evaluate ckpt=outputs/runs/<run>/checkpoints/best.ckpt
    batchscope evaluate ckpt=<file> data.root=../shared/data trainer.accelerator=cpu

The checkpoint names its model and data. Further options, as of batchscope train, change how the checkpoint is evaluated.
What a file alone cannot decide, such as a `data.root` other than `data`, has to be typed again (security.md in the documentation).
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError, did_you_mean
from ..options.groups import use_config_dir
from . import add_config_dir, command, command_parser

if TYPE_CHECKING:
    from ..inference.load import Trained


@command
def main() -> None:
    """The program: parse, evaluate, print."""
    parser = command_parser("evaluate", __doc__)
    parser.add_argument("overrides", nargs="*", metavar="option=value", help="ckpt=<file>, then any option to change")
    add_config_dir(parser)
    args = parser.parse_intermixed_args()
    use_config_dir(args.config_dir)
    overrides = args.overrides
    if renamed := [word for word in overrides if word.startswith("ckpt_path=")]:
        raise UserError(f"ckpt_path: is called ckpt here; write ckpt={renamed[0].removeprefix('ckpt_path=')}")
    paths = [word.removeprefix("ckpt=") for word in overrides if word.startswith("ckpt=")]
    keys = [word.partition("=")[0] for word in overrides]
    if not paths and (near := [key for key in keys if did_you_mean(key, ["ckpt"])]):
        raise UserError(f"{near[0]}: no such option.{did_you_mean(near[0], ['ckpt'])}")
    if len(paths) != 1 or not paths[0]:
        bare = [Path(word) for word in overrides if "=" not in word]
        found = [f"; write ckpt={path}" if path.is_file() else _nearby(path) for path in bare if path.exists()]
        example = found[0] if found and found[0] and not paths else ": ckpt=outputs/runs/<run>/checkpoints/best.ckpt"
        raise UserError(f"ckpt: takes the path of one checkpoint{example}")
    title, metrics = evaluate(Path(paths[0]), [word for word in overrides if not word.startswith("ckpt=")])
    print(title)
    for key, value in sorted(metrics.items()):
        print(f"{key:12} {value:.6f}")


def evaluate(path: Path, overrides: list[str]) -> tuple[str, dict[str, float]]:
    """Test a checkpoint on its own test set, or on that of another `data=`.

    Returns the run's name with the data evaluated on, and the test metrics.

    Raises:
        UserError: for a checkpoint that cannot be read or does not fit the model, and for a wrong option.
    """
    if not path.is_file():
        raise UserError(f"ckpt: got '{path}', which is not a file{_nearby(path)}")
    from ..inference.load import restore  # torch takes seconds to import

    return _test(restore(path, overrides, with_data=True))


def _nearby(path: Path) -> str:
    """The checkpoints that a path which is no file may stand for."""
    for name in ("checkpoints/best.ckpt", "best.ckpt", "checkpoints/last.ckpt", "last.ckpt"):
        if (path / name).is_file():
            return f"; write ckpt={path / name}"
    near = sorted(path.parent.glob("*.ckpt")) if path.parent.is_dir() else []
    return f"; in that folder: {', '.join(p.name for p in near)}" if near else ""


def _test(trained: "Trained") -> tuple[str, Any]:
    from lightning.pytorch.callbacks import LambdaCallback
    from lightning.pytorch.utilities.model_helpers import is_overridden

    from ..callbacks._batches import samples_in
    from ..data.plain import lightning_of
    from ..inference.load import trainer_for

    config, data = trained.config, trained.data
    if not is_overridden("test_step", trained.module):
        raise UserError(f"model: {type(trained.module).__name__} has no test_step, so there is nothing to evaluate")
    tested: list[int] = []  # the samples of each batch
    counter = LambdaCallback(on_test_batch_end=lambda *args: tested.append(samples_in(args[3])))
    trainer = trainer_for(trained, counter)
    data.prepare_data()
    metrics = trainer.test(trained.module, datamodule=lightning_of(data), verbose=False)
    if not metrics:
        raise UserError(
            f"trainer.limit_test_batches: got {config['trainer'].get('limit_test_batches')}, which tests no batch"
        )
    total, count = data.num_samples("test"), sum(tested)
    of = f" of {total:,}" if total is not None and count < total else ""  # by trainer.limit_test_batches
    return f"{trained.name}, tested on {data.name} ({count:,}{of} samples)", metrics[0]
