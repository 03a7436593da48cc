"""One run, top to bottom: seed → data → model → callbacks → loggers → trainer → fit → test → record.

    python train.py model=cnn data=mnist data.batch_size=128

The command line is checked before torch is imported; that is why the heavy imports are inside `train`.
"""

import shlex
import sys
import time
from pathlib import Path
from typing import Any

from batchscope import command
from batchscope.errors import exit_on_user_error


def main() -> None:
    """The program; `command` says how a command line becomes calls of `train`."""
    exit_on_user_error(lambda: command.run(train))


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
    from batchscope.build import build, build_all, build_callbacks
    from batchscope.hardware.allocator import keep_freed_memory
    from batchscope.hardware.devices import describe
    from batchscope.record import RunRecord, optimized
    from batchscope.task import Task

    summary.quiet_libraries()
    if config["keep_freed_memory"]:
        keep_freed_memory()
    lightning.seed_everything(config["seed"], workers=True, verbose=False)
    data = build(config["data"], "data")
    data.check()
    data.prepare_data()
    model = build(config["model"], "model", spec=data.spec)
    name = summary.run_name(config, choices, data.name)
    choices = {group: choices[group] for group in ("model", "data", "optimizer", "trainer") if choices.get(group)}
    provenance = {"config": config, "choices": choices, "name": name, "dataset": data.name}
    task = Task(model, data.spec, build(config["optimizer"], "optimizer"), config["channels_last"], provenance)
    callbacks, flags = build_callbacks(config)
    loggers = build_all(summary.named_loggers(config["logger"], name), "logger")
    trainer = build(config["trainer"], "trainer", callbacks=callbacks, logger=loggers, **flags)

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
        checkpoints = summary.checkpoints(trainer, run_dir)
        record.add(
            dataset={
                "name": data.name,
                "fingerprint": data.fingerprint,
                "train_samples": len(data.tensors("train")[0]),
            },
            learning_rate=task.learning_rate,
            fit_seconds=round(time.perf_counter() - started, 3),
            epochs=trainer.current_epoch,
            steps=trainer.global_step,
            checkpoints=checkpoints,
            metrics=summary.scalars(trainer.callback_metrics),
            throughput=summary.throughput(callbacks),
        )
        if config["test"]:
            trainer.test(task, datamodule=data, ckpt_path="best" if "best" in checkpoints else None, verbose=False)
            record.add(metrics={**record.facts["metrics"], **summary.scalars(trainer.callback_metrics)})
        summary.log_hyperparameters(trainer, record.facts)
    if trainer.is_global_zero:
        summary.print_end(record.facts)
    return optimized(record.facts)


if __name__ == "__main__":
    main()
