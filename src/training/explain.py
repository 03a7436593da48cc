"""Profiles some training steps of a configuration: no validation, no test, no logs and no checkpoints."""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning import Trainer

from .._lightning import Hooks, callbacks_of, expect_no_validation
from ..callbacks._setting import read_title
from ..callbacks.profile import OperationProfiler
from ..callbacks.throughput import ThroughputMonitor
from ..data.plain import lightning_datamodule, set_up_for_fit
from ..errors import UserError, in_one_line
from ..options.purpose import NO_END
from ..records.explanation import Explanation
from .build import NoLogger, build_all, build_data, build_model, build_trainer, lightning_module, refuse_own_loaders
from .failures import explain_failures
from .run import limit_batch_size, set_up_process
from .task import Task

WARMUP, STEPS = 10, 10  # updates that are not timed, and that are
_PATIENCE = 20  # the ratio of the batches after which the fit ends to those that are needed


def explain(
    config: dict[str, Any], choices: dict[str, str], folder: Path, names_data: bool = True
) -> tuple[Explanation, dict[str, bytes]]:
    """Train some updates; return the explanation, and the contents of its files by name.

    `config` is checked, and reduced by `for_explanation`. `choices` are for the title. `folder`, the folder of the files to
    come, is for errors. `names_data` says whether the user has chosen the data. UserError for a step that fails, and for
    steps that cannot be measured.
    """
    # A module or a callback may write files by itself.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary_dir:
        return _explain(config, choices, folder, names_data, Path(temporary_dir))


def _explain(
    config: dict[str, Any], choices: dict[str, str], folder: Path, names_data: bool, temporary_dir: Path
) -> tuple[Explanation, dict[str, bytes]]:
    devices, accelerator = config["trainer"]["devices"], config["trainer"].get("accelerator", "auto")
    gpus = [[index] for index in range(torch.cuda.device_count())] if accelerator in ("auto", "gpu", "cuda") else []
    # A record may name a GPU that this machine does not have.
    config = {**config, "trainer": config["trainer"] | {"devices": devices if devices in gpus else 1}}
    set_up_process(config)
    data = build_data(config)
    monitor = ThroughputMonitor(warmup_steps=WARMUP, verbose=False)
    profiler = OperationProfiler(steps=STEPS, stop=True, verbose=False)
    callbacks = [monitor, profiler, *build_all(config["callbacks"], "callbacks")]
    switches = {"enable_autolog_hparams": False, "max_steps": profiler.updates(monitor)}
    trainer = build_trainer(config, temporary_dir, callbacks, **switches)
    trainer.loggers = [NoLogger(str(temporary_dir))]
    model = build_model(config, data)
    if not names_data:
        refuse_own_loaders(model)
    data.prepare_data()
    set_up_for_fit(data, model, trainer)
    batch_sizes = limit_batch_size(data, data.num_samples("train"), 1, trainer.accumulate_grad_batches)
    module = lightning_module(model, data, config, {"choices": choices, "dataset": data.name})
    if isinstance(module, Task):
        module.prepare(trainer, data.batch_size, batch_sizes.get("global_batch_size"))
    if not module.automatic_optimization:  # `global_step` may then grow by several in a batch, or never
        trainer.fit_loop.epoch_loop.max_steps = NO_END
    max_batches = _PATIENCE * profiler.updates(monitor) * trainer.accumulate_grad_batches
    callbacks_of(trainer).append(
        Hooks(
            on_train_start=lambda trainer, module: expect_no_validation(trainer),
            on_train_batch_end=partial(_stop_after, max_batches),
        )
    )
    try:
        with explain_failures(config, folder, trainer):
            trainer.fit(module, datamodule=lightning_datamodule(data))
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"explain: a training step of {read_title(module)} fails: {in_one_line(error)}") from error
    if profiler.explanation is None:
        reason = monitor.summary.get("missing", {}).get("bottleneck") or getattr(profiler, "failure", None)
        raise UserError(f"explain: no step of {read_title(module)} could be measured{f': {reason}' if reason else ''}")
    return profiler.explanation, profiler.files


def _stop_after(max_batches: int, trainer: Trainer, *_: Any) -> None:
    """End a fit that has had too many batches, because Lightning counts no update or the profiler has failed."""
    trainer.should_stop |= trainer.fit_loop.epoch_loop.total_batch_idx >= max_batches
