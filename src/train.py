"""One run, top to bottom: seed → data → model → callbacks → loggers → trainer → fit → test → record.

    python train.py model=cnn data=mnist data.batch_size=128

The command line is checked before torch is imported; that is why the heavy imports are inside `train`.
"""

import contextlib
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from batchscope.config import CONFIGS, check, check_command_line
from batchscope.errors import UserError, exit_on_user_error, report, reraise_in_hydra


def main() -> None:
    """The program: check the command line, then let Hydra run one job or a sweep of them."""
    exit_on_user_error(_main)


def _main() -> None:
    args = get_args_parser().parse_args()
    asks = (args.help, args.hydra_help, args.cfg, args.info, args.shell_completion, args.config_name, args.config_path)
    if not any(asks):
        _check_devices(check_command_line(args.overrides, args.multirun, args.config_dir))
    reraise_in_hydra()
    hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="train")(_job)()


def _check_devices(configs: list[dict[str, Any]]) -> None:
    """Before the first run of a sweep, see that every run has its device; only `gpu` and the like need torch for it."""
    for accelerator in {config["trainer"].get("accelerator", "auto") for config in configs} - {"auto", "cpu"}:
        from batchscope.hardware.devices import check_accelerator

        check_accelerator(accelerator)


def _job(config: DictConfig) -> float | None:
    """What Hydra calls for each run; a mistake found this late leaves no empty folder behind."""
    job = HydraConfig.get()
    run_dir = Path(job.runtime.output_dir)
    config.run_dir = os.path.relpath(run_dir)
    try:
        return train(check(config), run_dir, dict(job.runtime.choices), list(job.overrides.task))
    except UserError as error:
        report(error)
        with contextlib.suppress(OSError):  # not empty: the run had begun
            os.removedirs(run_dir)
        raise


def train(config: dict[str, Any], run_dir: Path, choices: dict[str, str], overrides: list[str]) -> float | None:
    """Train, test and record one model.

    Args:
        config: a checked, resolved configuration.
        run_dir: where the run leaves everything.
        choices: the option taken from each config group, by which people know the model and the data.
        overrides: what the command line said.

    Returns:
        The metric named by `optimized_metric`, or None where the run has no such metric.
    """
    import lightning

    from batchscope import summary
    from batchscope.build import build, build_all
    from batchscope.hardware.devices import describe
    from batchscope.record import RunRecord
    from batchscope.task import Task

    summary.quiet_libraries()
    lightning.seed_everything(config["seed"], workers=True, verbose=False)
    data = build(config["data"], "data")
    data.check()
    data.prepare_data()
    model = build(config["model"], "model", spec=data.spec)
    name = summary.run_name(config, choices, data.name)
    choices = {group: choices[group] for group in ("model", "data", "optimizer", "trainer") if choices.get(group)}
    provenance = {"config": config, "choices": choices, "name": name, "dataset": data.name}
    task = Task(model, data.spec, build(config["optimizer"], "optimizer"), config["channels_last"], provenance)
    loggers = build_all(summary.named_loggers(config["logger"], name), "logger")
    callbacks = build_all(config["callbacks"], "callbacks")
    trainer = build(config["trainer"], "trainer", callbacks=callbacks, logger=loggers)

    with RunRecord(
        run_dir,
        enabled=trainer.is_global_zero,
        name=name,
        command=shlex.join(["python", *sys.argv]),
        overrides=overrides,
        choices=choices,
        config=config,
        hardware=describe(trainer.strategy.root_device),
        model={"class": type(model).__name__, "parameters": sum(p.numel() for p in model.parameters())},
    ) as record:
        summary.print_start(record.facts, data.name)
        started = time.perf_counter()
        trainer.fit(task, datamodule=data)
        best = getattr(trainer.checkpoint_callback, "best_model_path", "") or None
        record.add(
            dataset={
                "name": data.name,
                "fingerprint": data.fingerprint,
                "train_samples": len(data.tensors("train")[0]),
            },
            fit_seconds=round(time.perf_counter() - started, 3),
            epochs=trainer.current_epoch,
            steps=trainer.global_step,
            checkpoints={"best": best, "last": getattr(trainer.checkpoint_callback, "last_model_path", "") or None},
            metrics=summary.scalars(trainer.callback_metrics),
        )
        if config["test"]:
            trainer.test(task, datamodule=data, ckpt_path="best" if best else None, verbose=False)
            record.add(metrics={**record.facts["metrics"], **summary.scalars(trainer.callback_metrics)})
        summary.log_hyperparameters(trainer, config, data.name, record.facts["metrics"])
    if trainer.is_global_zero:
        summary.print_end(record.facts)
    return record.facts["metrics"].get(config["optimized_metric"])


if __name__ == "__main__":
    main()
