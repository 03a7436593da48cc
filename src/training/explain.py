"""Some training steps of a configuration, taken apart: no validation, no test, nothing logged and nothing kept."""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning import Trainer

from .._lightning import Hooks, callbacks_of, expect_no_validation
from ..callbacks._setting import title_of
from ..callbacks.profile import OperationProfiler
from ..callbacks.throughput import ThroughputMonitor
from ..data.plain import lightning_of, set_up_for_fit
from ..errors import UserError, in_one_line
from ..options.purpose import NO_END
from ..records.explanation import Explanation
from .build import NoLogger, build_all, build_data, build_model, build_trainer, lightning_module, refuse_own_loaders
from .failures import explain_failures
from .run import limit_batch_size, set_up_process
from .task import Task

WARMUP, STEPS = 10, 10  # updates that are left out, and that are timed
_PATIENCE = 20  # times as many batches as are needed


def explain(
    config: dict[str, Any], choices: dict[str, str], place: Path, names_data: bool = True
) -> tuple[Explanation, dict[str, bytes]]:
    """Train some updates: the explanation, and the files that hold it.

    `config` is checked, and reduced by `for_explanation`; `choices` are for the title, and `place`, where it will lie,
    for errors; `names_data` says whether somebody has chosen the data. UserError for a step that fails, and for steps that
    cannot be measured.
    """
    # For what a module or a callback writes by itself.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as here:
        return _explain(config, choices, place, names_data, Path(here))


def _explain(
    config: dict[str, Any], choices: dict[str, str], place: Path, names_data: bool, here: Path
) -> tuple[Explanation, dict[str, bytes]]:
    named, kind = config["trainer"]["devices"], config["trainer"].get("accelerator", "auto")
    gpus = [[number] for number in range(torch.cuda.device_count())] if kind in ("auto", "gpu", "cuda") else []
    # A record may name a GPU that this machine does not have.
    config = {**config, "trainer": config["trainer"] | {"devices": named if named in gpus else 1}}
    set_up_process(config)
    data = build_data(config)
    monitor = ThroughputMonitor(warmup_steps=WARMUP, verbose=False)
    profiler = OperationProfiler(steps=STEPS, stop=True, verbose=False)
    callbacks = [monitor, profiler, *build_all(config["callbacks"], "callbacks")]
    switches = {"enable_autolog_hparams": False, "max_steps": profiler.updates(monitor)}
    trainer = build_trainer(config, here, callbacks, **switches)
    trainer.loggers = [NoLogger(str(here))]
    model = build_model(config, data)
    if not names_data:
        refuse_own_loaders(model)
    data.prepare_data()
    set_up_for_fit(data, model, trainer)
    batch = limit_batch_size(data, data.num_samples("train"), 1, trainer.accumulate_grad_batches)
    module = lightning_module(model, data, config, {"choices": choices, "dataset": data.name})
    if isinstance(module, Task):
        module.prepare(trainer, data.batch_size, batch.get("global_batch_size"))
    if not module.automatic_optimization:  # its global_step may grow by several in a batch, or never
        trainer.fit_loop.epoch_loop.max_steps = NO_END
    most = _PATIENCE * profiler.updates(monitor) * trainer.accumulate_grad_batches
    callbacks_of(trainer).append(
        Hooks(
            on_train_start=lambda trainer, module: expect_no_validation(trainer),
            on_train_batch_end=partial(_give_up, most),
        )
    )
    try:
        with explain_failures(config, place, trainer):
            trainer.fit(module, datamodule=lightning_of(data))
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"explain: a training step of {title_of(module)} fails: {in_one_line(error)}") from error
    if profiler.explanation is None:
        why = monitor.summary.get("missing", {}).get("bottleneck") or getattr(profiler, "failure", None)
        raise UserError(f"explain: no step of {title_of(module)} could be measured{f': {why}' if why else ''}")
    return profiler.explanation, profiler.files


def _give_up(most: int, trainer: Trainer, *_: Any) -> None:
    """End a training that has had more than enough batches: Lightning counts no update, or the profiler has failed."""
    trainer.should_stop |= trainer.fit_loop.epoch_loop.total_batch_idx >= most
