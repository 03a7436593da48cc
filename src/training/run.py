"""One run, top to bottom: seed, data, model, callbacks, trainer, fit, test, record."""

import shlex
import sys
import time
from pathlib import Path
from typing import Any


def train(config: dict[str, Any], run_dir: Path, choices: dict[str, str], overrides: list[str]) -> float | None:
    """Train, test and record one model; Ctrl-C, SIGTERM and SIGHUP end it in good order, and a resumed run goes on.

    Args:
        config: a checked, resolved configuration; `resume` in it says that `run_dir` holds a run to go on with.
        run_dir: where the run leaves everything.
        choices: the option taken from each config group, by which people know the model and the data.
        overrides: what the command line said.

    Returns:
        The metric named by `optimized_metric`, or None where the run has no such metric.
    """
    from ..checkpointing.graceful_shutdown import GracefulShutdown
    from ..records.read import optimized
    from ..records.run_record import close_open

    with GracefulShutdown(lambda number: close_open(run_dir, "interrupted", f"signal {number}")) as interrupts:
        record = _train(config, run_dir, choices, overrides, interrupts)
    return optimized(record)


def _train(
    config: dict[str, Any], run_dir: Path, choices: dict[str, str], overrides: list[str], interrupts: Any
) -> dict[str, Any]:
    """What `train` does, with `interrupts` listening; returns the record."""
    import lightning
    import torch

    from ..callbacks.learning_rate import LearningRateWatch
    from ..checkpointing.checkpoint_file import AtomicCheckpointIO
    from ..checkpointing.log_files import check_log_files, loggers_of_rank
    from ..checkpointing.restore import prepare_resume
    from ..checkpointing.resume import lock_run_dir
    from ..checkpointing.resume_point import checkpoint_folder, find_resume_point
    from ..distributed.agreement import Agreement, end_together
    from ..hardware.allocator import keep_freed_memory
    from ..hardware.devices import describe
    from ..options import trust
    from ..options.command_lines import program
    from ..records.run_record import RunRecord, versions
    from . import summary
    from .build import build, build_all, build_callbacks, places
    from .failures import explain_failures
    from .task import Task

    summary.quiet_libraries()
    torch.set_flush_denormal(config["flush_denormals"])  # before the threads that inherit it
    if config["keep_freed_memory"]:
        keep_freed_memory()
    lightning.seed_everything(config["seed"], workers=True, verbose=False)
    data = build(config["data"], "data")
    data.check()
    # Only to have Lightning refuse a wrong value before data is downloaded; the run's own trainer needs the data's name.
    build(config["trainer"], "trainer", logger=False, callbacks=[], enable_checkpointing=False)
    model = build(config["model"], "model", spec=data.spec)
    task = Task(model, data.spec, build(config["optimizer"], "optimizer"), config["channels_last"])
    data.check_batch(task.min_samples)
    data.prepare_data()
    name = summary.run_name(config, choices, data.name)
    choices = {group: choices[group] for group in ("model", "data", "optimizer", "trainer") if choices.get(group)}
    provenance = {"config": config, "choices": choices, "name": name, "dataset": data.name}
    task.provenance = provenance  # with the name of the data, which is known once they are prepared
    callbacks, flags = build_callbacks(config)
    loggers = build_all(summary.named_loggers(config["logger"], name), "logger")
    watch = LearningRateWatch()
    parts = {"callbacks": [*callbacks, interrupts, watch], "logger": loggers, "plugins": [AtomicCheckpointIO()]}
    parts["default_root_dir"] = config["trainer"].get("default_root_dir") or run_dir
    trainer = build(config["trainer"], "trainer", **parts, **flags)
    trust.refuse_outside(config, run_dir, places(config, loggers, trainer))
    device, first = trainer.strategy.root_device, trainer.is_global_zero
    option = "resume" if config.get("resume") else "hydra.run.dir"

    with (
        lock_run_dir(run_dir, enabled=first, option=option),
        RunRecord(
            run_dir,
            enabled=first,
            name=name,
            command=shlex.join([*program(), *sys.argv[1:]]),
            overrides=overrides,
            choices=choices,
            config=config,
            hardware=describe(device),
            processes=trainer.world_size,
            global_batch_size=data.batch_size * trainer.world_size,
            model={"class": type(model).__name__, "parameters": sum(p.numel() for p in model.parameters())},
        ) as record,
        explain_failures(config, device, first),
        end_together(trainer),
    ):
        if first:
            summary.print_start(record.facts, data.name)
        started = time.perf_counter()
        resumed = None
        if config.get("resume"):  # whether the run can go on is known before anything of it is changed
            resumed = find_resume_point(checkpoint_folder(trainer, run_dir), trainer, task, run_dir)
            data.setup("fit")
            resumed.check(trainer, data.fingerprint)
        check_log_files(loggers_of_rank(trainer), option)
        record.begin(resumed and resumed.facts(run_dir))
        provenance["run"] = record.facts["id"]
        data.setup("fit")
        dataset = {"name": data.name, "fingerprint": data.fingerprint, "train_samples": len(data.tensors("train")[0])}
        held = summary.hold_batch(data, dataset["train_samples"], trainer.world_size, first)
        record.add(dataset=dataset, **held)
        if held:
            name = provenance["name"] = summary.run_name(config, choices, data.name, data.batch_size)
            record.add(name=name)
            trainer.loggers = build_all(summary.named_loggers(config["logger"], name), "logger")
        provenance["fingerprint"] = dataset["fingerprint"]
        if resumed is not None:
            prepare_resume(trainer, data, resumed)
        shared = {"config": config, "dataset": dataset, "versions": versions(), "steps": resumed and resumed.steps or 0}
        trainer.callbacks.insert(0, Agreement(run_dir, lambda: shared))
        trainer.fit(task, datamodule=data, ckpt_path=resumed and resumed.path, weights_only=True)
        checkpoints = summary.checkpoints(trainer, run_dir)
        record.add(
            **summary.learning_rate(trainer, watch),
            fit_seconds=round(time.perf_counter() - started, 3),
            epochs=trainer.current_epoch,
            steps=trainer.global_step,
            checkpoints=checkpoints,
            metrics=summary.metrics(trainer),
            throughput=summary.throughput(callbacks),
            **summary.skipped(callbacks),
        )
        if config["test"]:
            best = "best" if "best" in checkpoints else None
            trainer.test(task, datamodule=data, ckpt_path=best, verbose=False, weights_only=True)
            record.add(metrics={**record.facts["metrics"], **summary.metrics(trainer)})
        summary.log_hyperparameters(trainer, record.facts)
    if first:
        summary.print_end(record.facts)
    return record.facts
