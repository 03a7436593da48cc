"""A checkpoint → its test metrics.

    python -m batchscope.evaluate ckpt=outputs/runs/<run>/checkpoints/best.ckpt
    python -m batchscope.evaluate ckpt=<…> data.root=../shared/data trainer.accelerator=cpu

The checkpoint says which model and data it is of; further options change how it is evaluated, as in train.py.
"""

import argparse
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from batchscope.config import check, override
from batchscope.errors import UserError, exit_on_user_error, refuse_in_one_line


def main() -> None:
    """The program: parse, evaluate, print."""
    exit_on_user_error(_main)


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="option=value", help="ckpt=<file>, then any option to change")
    refuse_in_one_line(parser)
    overrides = parser.parse_args().overrides
    paths = [text.removeprefix("ckpt=") for text in overrides if text.startswith("ckpt=")]
    if len(paths) != 1 or not paths[0]:
        raise UserError("ckpt: takes the path of one checkpoint: ckpt=outputs/runs/<run>/checkpoints/best.ckpt")
    others = [text for text in overrides if not text.startswith("ckpt=")]
    name, metrics = evaluate(Path(paths[0]), others)
    print(name)
    for key, value in sorted(metrics.items()):
        print(f"{key:12} {value:.6f}")


def evaluate(path: Path, overrides: list[str]) -> tuple[str, dict[str, float]]:
    """Test a checkpoint on its own test set, or on that of another `data=`.

    Args:
        path: of the checkpoint.
        overrides: options to change, as on train.py's command line.

    Returns:
        The run's name with the data evaluated on, and the test metrics.

    Raises:
        UserError: for a checkpoint that cannot be read or does not fit the model, and for a wrong option.
    """
    from batchscope.checkpoint import load_checkpoint

    checkpoint = load_checkpoint(path)
    saved = checkpoint["batchscope"]
    # The device is this machine's choice, whatever the training ran on.
    trainer = {"trainer": {"accelerator": "auto", "devices": 1, "num_nodes": 1, "strategy": "auto"}}
    config = check(override(OmegaConf.merge(saved["config"], trainer), overrides))
    return _test(config, checkpoint, saved, path)


def _test(config: dict[str, Any], checkpoint: dict[str, Any], saved: dict[str, Any], path: Path) -> tuple[str, Any]:
    import lightning

    from batchscope import summary
    from batchscope.build import build
    from batchscope.hardware.devices import check_accelerator
    from batchscope.task import Task

    summary.quiet_libraries()
    check_accelerator(config["trainer"].get("accelerator", "auto"))
    lightning.seed_everything(config["seed"], workers=True, verbose=False)
    data = build(config["data"], "data")
    data.check()
    trainer = build(config["trainer"], "trainer", logger=False, callbacks=[], enable_checkpointing=False)
    data.prepare_data()
    model = build(config["model"], "model", spec=data.spec)
    task = Task(model, data.spec, build(config["optimizer"], "optimizer"), config["channels_last"])
    try:
        task.load_state_dict(checkpoint["state_dict"])
    except RuntimeError as error:
        first = str(error).splitlines()[1].strip() if "\n" in str(error) else str(error)
        raise UserError(
            f"ckpt: {path} holds the weights of {saved['name']}, which do not fit {type(model).__name__}: {first}"
        ) from error
    metrics = trainer.test(task, datamodule=data, verbose=False)[0]
    return f"{saved['name']}, tested on {data.name} ({len(data.tensors('test')[0]):,} samples)", metrics


if __name__ == "__main__":
    main()
