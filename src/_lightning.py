"""Access to what is private in Lightning 2.6.6 and that no other file owns, and typed accessors.

Lightning sets some attributes of a Trainer at run time, so that type checkers do not see them. The accessors below name
the types of most of them. A new release of Lightning has to be compared with this file first.
"""

import math
from collections.abc import Callable, Sequence
from subprocess import Popen
from typing import Any, TypeVar, cast

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, LambdaCallback, Timer, WeightAveraging
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from .errors import in_one_line

_C = TypeVar("_C", bound=Callback)
# The hooks that Lightning calls on every callback in every batch.
_BATCH_HOOKS = (
    "on_train_batch_start", "on_before_backward", "on_after_backward", "on_before_optimizer_step",
    "on_before_zero_grad", "on_train_batch_end",
)  # fmt: skip


class Hooks(LambdaCallback):
    """A LambdaCallback of a separate class: callbacks of a module's `configure_callbacks` replace those of their class."""


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """Return the trainer's own list of callbacks, in the order in which Lightning calls them."""
    return cast(Any, trainer).callbacks


def callback_of(trainer: Trainer, kind: type[_C]) -> _C | None:
    """Return the trainer's first callback of a class, or None."""
    return next((callback for callback in callbacks_of(trainer) if isinstance(callback, kind)), None)


def skip_empty_hooks(trainer: Trainer) -> Callable[[], None]:
    """Have Lightning skip the batch hooks that its own callbacks and ours do not define; return a function that undoes this.

    Lightning calls each callable hook of a callback in a profiled context, the empty hooks of `Callback` included: about
    2 µs a hook, for 6 hooks of each callback in each batch.
    """
    empty_hooks = [
        (callback, hook)
        for callback in callbacks_of(trainer)
        if type(callback).__module__.partition(".")[0] in ("lightning", __package__)
        for hook in _BATCH_HOOKS
        if hook not in vars(callback) and getattr(type(callback), hook) is getattr(Callback, hook)
    ]
    for callback, hook in empty_hooks:
        setattr(callback, hook, None)

    def restore_hooks() -> None:
        for callback, hook in empty_hooks:
            if vars(callback).get(hook, hook) is None:
                delattr(callback, hook)

    return restore_hooks


def loggers_of_rank(trainer: Trainer) -> list[Logger]:
    """Return the loggers that write in this process: all loggers on rank 0, none on other ranks."""
    return trainer.loggers if trainer.is_global_zero else []


def profiler_of(trainer: Trainer) -> Profiler:
    """Return the trainer's profiler."""
    return cast(Any, trainer).profiler


def skips_backward(trainer: Trainer) -> bool:
    """Whether this batch only updates batch norm statistics, as in the extra epoch of StochasticWeightAveraging."""
    return trainer.fit_loop._skip_backward


def is_fast_dev_run(trainer: Trainer) -> bool:
    """Whether the trainer only tries a few batches and writes nothing."""
    return bool(cast(Any, trainer).fast_dev_run)


def child_processes(trainer: Trainer) -> list[Popen[bytes]]:
    """Return the launcher's own list of the processes that Lightning has started for the other ranks."""
    return getattr(trainer.strategy.launcher, "procs", [])


def fits_in_children(trainer: Trainer) -> bool:
    """Whether a fit runs in processes that Lightning spawns or forks, which call no `on_exception`."""
    return isinstance(trainer.strategy.launcher, _MultiProcessingLauncher)


def unwatched_processes(trainer: Trainer) -> list[Popen[bytes]]:
    """Take `child_processes` from Lightning's watcher, which kills this process if one of its list fails; return them."""
    watched_processes = child_processes(trainer)
    processes = [*watched_processes]
    watched_processes.clear()
    if processes:
        trainer.strategy.launcher.procs = processes  # pyrefly: ignore[missing-attribute]
    return processes


class _MetricsOrNaN(dict[str, Tensor]):
    """Metrics by name; a missing metric is NaN."""

    def __missing__(self, name: str) -> Tensor:
        return torch.tensor(math.nan)


def expect_no_validation(trainer: Trainer) -> None:
    """If the fit has no validation, let schedules and early stopping do without the validation metrics that they monitor.

    A module that reads such a metric itself gets NaN.
    """
    if not trainer.enable_validation:
        if not fits_in_children(trainer):  # else Lightning pickles the metrics
            cast(Any, trainer)._logger_connector._callback_metrics = _MetricsOrNaN(trainer.callback_metrics)
        for metric_reader in (*trainer.lr_scheduler_configs, *trainer.early_stopping_callbacks):
            metric_reader.strict = False


def compiler_context(module: LightningModule) -> dict[str, Any] | None:
    """Return what `from_compiled(torch.compile(module))` keeps in the module; None if the module is not compiled."""
    return getattr(module, "_compiler_ctx", None)


def forget_averages(trainer: Trainer) -> None:
    """Have a test of a checkpoint use its averaged weights, after a fit with WeightAveraging.

    After a fit, the callback treats every checkpoint that is loaded as one to resume from, and loads its current weights
    instead of the averaged ones.
    """
    for callback in callbacks_of(trainer):
        if isinstance(callback, WeightAveraging):
            callback._average_model = None


def logged_step(trainer: Trainer) -> int:
    """Return the step at which Lightning logs now: the updates so far. At an epoch's end Lightning logs at this step - 1."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def logged_in_training(trainer: Trainer) -> set[str]:
    """Return the names of the values that were logged in this epoch of the training, as loggers get them."""
    metrics = (metric for metric in trainer.fit_loop.epoch_loop._results.result_metrics if not metric.has_reset)
    metadata = (metric.meta for metric in metrics if metric.meta.logger)
    return {meta.forked_name(on_step) for meta in metadata for on_step in (True, False)}


def is_accumulating(trainer: Trainer) -> bool:
    """Whether the gradients of the last batch are kept for the next optimizer step."""
    return trainer.fit_loop.epoch_loop._should_accumulate()


def is_stopping(trainer: Trainer) -> bool:
    """Whether the fit ends with this batch because its end was requested, and `min_epochs` and `min_steps` allow it."""
    return trainer.should_stop and trainer.fit_loop._can_stop_early


def has_to_stop(trainer: Trainer) -> bool:
    """Whether the end of the fit was requested in a way that a resumed run has to honour, too.

    A Timer's request does not count: the Timer repeats it in a resumed run, unless that run has more time.
    """
    timers = (callback for callback in callbacks_of(trainer) if isinstance(callback, Timer))
    is_time_over = any((timer.time_remaining() or 1) <= 0 for timer in timers)
    return trainer.should_stop and not is_time_over


def exclude_wait(trainer: Trainer, seconds: float) -> None:
    """Exclude a wait from the time of every Timer, `max_time` included, and from that of validations by the clock."""
    for timer in (callback for callback in callbacks_of(trainer) if isinstance(callback, Timer)):
        if (start := timer._start_time[RunningStage.TRAINING]) is not None:
            timer._start_time[RunningStage.TRAINING] = start + seconds
    if cast(Any, trainer)._val_check_time_interval is not None:
        cast(Any, trainer)._last_val_time += seconds


def epoch_metrics(trainer: Trainer) -> dict[str, Tensor]:
    """Return the training metrics that Lightning logs, and callbacks and schedules read, if the epoch ends with this batch."""
    return trainer.fit_loop.epoch_loop._results.metrics(on_step=False)["callback"]


def validates_next(trainer: Trainer) -> bool:
    """Whether a validation follows this batch. After False, a validation by the clock may still become due and begin."""
    return trainer.fit_loop.epoch_loop._should_check_val_fx(cast(Any, trainer.fit_loop._data_fetcher))


def after_batch(trainer: Trainer, action: Callable[[], None]) -> None:
    """Call `action` once Lightning is done with the batch, before what follows it; for a callback's `on_train_batch_end`.

    After the callbacks' hooks come the module's own hook of this name, and what the loggers get of the step. Of two
    actions, the one that was passed last runs first.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    on_advance_end = loop.on_advance_end

    def act_and_end_advance(data_fetcher: Any) -> None:
        vars(loop).pop("on_advance_end", None)  # the action is for this batch alone
        action()
        on_advance_end(data_fetcher)

    loop.on_advance_end = act_and_end_advance


def on_epoch_skip(trainer: Trainer, action: Callable[[], None]) -> None:
    """Call `action` when `on_train_batch_start` of the module returns -1, which ends the epoch; for `on_train_start`.

    Lightning then calls no hook of the end of a batch.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    vars(loop).pop("advance", None)  # of an earlier fit
    advance = loop.advance

    def advance_or_act(data_fetcher: Any) -> None:
        try:
            advance(data_fetcher)
        except StopIteration:
            action()
            raise

    loop.advance = advance_or_act


def leave_signals_alone(trainer: Trainer) -> None:
    """Have Lightning install no signal handlers; to be called in a `setup` hook.

    Its handlers call collective operations from within a signal handler, and before every batch Lightning broadcasts, on
    the device, whether SIGTERM came.
    """
    cast(Any, trainer)._signal_connector.register_signal_handlers = lambda: None
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None


def validate_by_batches_alone(trainer: Trainer) -> None:
    """Have `trainer.val_check_batch` alone decide when a validation follows a batch, not epochs or the clock."""
    trainer.check_val_every_n_epoch = 1
    cast(Any, trainer)._val_check_time_interval = None


def resume_after_last_batch(trainer: Trainer, restore: Callable[[], None]) -> None:
    """Have a later `trainer.fit(ckpt_path=…)` continue after the last batch that was trained before the checkpoint.

    Lightning alone skips what follows that batch: a validation, or the end of the epoch. `restore` is called after
    everything else has been restored, immediately before training continues.
    """
    trainer.fit_loop = _ResumedFitLoop(trainer, restore)


def on_restore_error(trainer: Trainer, explain: Callable[[Exception], Exception]) -> None:
    """Have a later `trainer.fit(ckpt_path=…)` raise `explain(error)` if a value of the checkpoint cannot be restored."""
    connector = cast(Any, trainer)._checkpoint_connector

    def with_explanation(restore: Callable[..., None]) -> Callable[..., None]:
        def restore_or_explain(*args: Any) -> None:
            try:
                restore(*args)
            except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
                raise explain(error) from error
            except RuntimeError as error:
                if type(error) is not RuntimeError:  # an error of the device
                    raise
                raise explain(error) from error  # an error of `load_state_dict`

        return restore_or_explain

    for name in ("_restore_modules_and_callbacks", "restore_training_state"):
        setattr(connector, name, with_explanation(getattr(connector, name)))


class _ResumedFitLoop(_FitLoop):
    """The loop over epochs; the first epoch is the resumed one."""

    def __init__(self, trainer: Trainer, restore: Callable[[], None]):
        original_loop = trainer.fit_loop
        super().__init__(trainer, original_loop.min_epochs, original_loop.max_epochs)
        self.epoch_loop = _ResumedEpochLoop(trainer, restore)

    @property
    @override
    def done(self) -> bool:
        # What follows the last batch remains to be done, even if no training step is left.
        return not cast(_ResumedEpochLoop, self.epoch_loop).is_resuming_batch and super().done

    @override
    def on_advance_end(self) -> None:
        if not cast(_ResumedEpochLoop, self.epoch_loop).has_trained:
            _let_epoch_end_fail(self.trainer.lightning_module)
        super().on_advance_end()

    @override
    def load_state_dict(self, state_dict: dict, prefix: str = "") -> None:
        """Load the counters and disable Lightning's restart heuristics."""
        super().load_state_dict(state_dict, prefix)
        for loop in (self, self.epoch_loop, self.epoch_loop.val_loop, self.epoch_loop.automatic_optimization):
            loop._restarting = loop._loaded_from_state_dict = False
        batches, epochs = cast(Any, self.epoch_loop.batch_progress), cast(Any, self.epoch_progress)
        cast(_ResumedEpochLoop, self.epoch_loop).is_epoch_skipped = batches.current.started < batches.current.ready
        for counter in (batches.total, batches.current):  # the batch is done
            counter.completed = counter.processed = counter.started = counter.ready
        for counter in (epochs.total, epochs.current):  # the epoch starts again, after its first batches
            counter.ready = counter.started = counter.processed = counter.completed
        if self._data_fetcher is not None and self._combined_loader_states_to_load:
            self._load_combined_loader_states()  # a schedule has read the number of steps, which sets up the loaders
            iter(self._data_fetcher)

    @override
    def _load_combined_loader_states(self) -> None:
        """Load the positions of loaders with a `state_dict`; Lightning does so only by its restart heuristics."""
        states, self._combined_loader_states_to_load = self._combined_loader_states_to_load, []
        if self._combined_loader is not None:
            self._combined_loader._load_state_dicts(states)


class _ResumedEpochLoop(_TrainingEpochLoop):
    """The loop over the batches of an epoch, which starts after the last batch that was trained."""

    def __init__(self, trainer: Trainer, restore: Callable[[], None]):
        original_loop = trainer.fit_loop.epoch_loop
        super().__init__(trainer, original_loop.min_steps, original_loop.max_steps)
        self.restore = restore
        self.is_resuming_batch = True  # until what follows the last trained batch has been done
        self.has_trained = False  # whether a batch was trained in this process
        self.is_epoch_skipped = False  # whether the last batch was skipped with the rest of its epoch: nothing follows

    @property
    @override
    def done(self) -> bool:
        return not self.is_resuming_batch and super().done

    @override
    def reset(self) -> None:
        if not self.is_resuming_batch:  # the resumed epoch keeps its counters
            super().reset()

    @override
    def advance(self, data_fetcher: Any) -> None:
        if self.is_resuming_batch:  # the batch has been trained; `on_advance_end` does what follows it
            self.restore()
            self.is_resuming_batch = False
            if self.is_epoch_skipped:
                raise StopIteration
        else:
            self.has_trained = True
            super().advance(data_fetcher)


def _let_epoch_end_fail(module: LightningModule) -> None:
    """Turn an exception of the module's next `on_train_epoch_end` into a warning: the earlier process had its batches."""
    on_train_epoch_end = module.on_train_epoch_end

    def warn_on_failure() -> None:
        vars(module).pop("on_train_epoch_end", None)
        try:
            on_train_epoch_end()
        except Exception as error:  # noqa: BLE001 - the earlier process may have ended this epoch
            name, reason = type(module).__name__, in_one_line(error)
            rank_zero_warn(
                f"{name}.on_train_epoch_end is skipped in the resumed epoch, of which no batch ran in this process: {reason}"
            )

    module.on_train_epoch_end = warn_on_failure  # pyrefly: ignore[bad-assignment]


def pass_by_keyword(serve: Callable[[], Any]) -> Any:
    """Return the loaders of a `predict_dataloader`, with the arguments that Lightning saved of each as keyword arguments.

    To number its predictions Lightning rebuilds each DataLoader with a `batch_size` of its own. A `batch_size` that was
    given by position would be passed twice.
    """
    loaders = serve()
    for loader in loaders.flattened if isinstance(loaders, CombinedLoader) else tree_leaves(loaders):
        args, names = (getattr(loader, f"__pl_saved_{kind}", ()) for kind in ("args", "arg_names"))
        if args and len(args) == len(names):  # else the loader's constructor takes `*args`
            vars(loader)["__pl_saved_kwargs"].update(zip(names, args, strict=True))
            vars(loader)["__pl_saved_args"] = ()
    return loaders


def has_started_run(logger: WandbLogger) -> bool:
    """Whether a logger has started its run at W&B."""
    return logger._experiment is not None


def prefixed_keys(logger: TensorBoardLogger, keys: Sequence[str]) -> list[str]:
    """Return the names under which a logger writes `keys`: with the logger's prefix, if it has one."""
    return [f"{logger._prefix}{logger.LOGGER_JOIN_CHAR}{key}" if logger._prefix else key for key in keys]
