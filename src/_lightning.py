"""What is private in Lightning and no other file owns, as read in lightning 2.6.6, and typed accessors.

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
# What Lightning calls of every callback in every batch.
_BATCH_HOOKS = (
    "on_train_batch_start", "on_before_backward", "on_after_backward", "on_before_optimizer_step",
    "on_before_zero_grad", "on_train_batch_end",
)  # fmt: skip


class Hooks(LambdaCallback):
    """Lightning's, of a class of its own: callbacks of a module's `configure_callbacks` replace those of their class."""


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """The trainer's callbacks, in the order in which they are called; the list itself."""
    return cast(Any, trainer).callbacks


def callback_of(trainer: Trainer, kind: type[_C]) -> _C | None:
    """The trainer's first callback of a class; None without one."""
    return next((one for one in callbacks_of(trainer) if isinstance(one, kind)), None)


def skip_empty_hooks(trainer: Trainer) -> Callable[[], None]:
    """Have Lightning skip the hooks of a batch that its own callbacks and ours do not define; returns a function that ends this.

    Lightning calls a callback's hook in a profiled context if it is callable, also the empty ones of Callback: some 2 µs
    each, 6 for each callback in each batch.
    """
    own = [
        each for each in callbacks_of(trainer) if type(each).__module__.partition(".")[0] in ("lightning", __package__)
    ]
    empty = [
        (callback, hook)
        for callback in own
        for hook in _BATCH_HOOKS
        if hook not in vars(callback) and getattr(type(callback), hook) is getattr(Callback, hook)
    ]
    for callback, hook in empty:
        setattr(callback, hook, None)

    def stop() -> None:
        for callback, hook in empty:
            if vars(callback).get(hook, hook) is None:
                delattr(callback, hook)

    return stop


def loggers_of_rank(trainer: Trainer) -> list[Logger]:
    """The loggers that write in this process: all of them on rank 0, none on the others."""
    return trainer.loggers if trainer.is_global_zero else []


def profiler_of(trainer: Trainer) -> Profiler:
    """The trainer's profiler."""
    return cast(Any, trainer).profiler


def skips_backward(trainer: Trainer) -> bool:
    """Whether this batch only updates the statistics of batch norms, as StochasticWeightAveraging has it in an epoch of its own."""
    return trainer.fit_loop._skip_backward


def is_fast_dev_run(trainer: Trainer) -> bool:
    """Whether the trainer only tries a few batches and writes nothing."""
    return bool(cast(Any, trainer).fast_dev_run)


def child_processes(trainer: Trainer) -> list[Popen[bytes]]:
    """The processes that Lightning has started for the other ranks; the list that its launcher has."""
    return getattr(trainer.strategy.launcher, "procs", [])


def fits_in_children(trainer: Trainer) -> bool:
    """Whether a fit runs in processes that Lightning spawns or forks, which call no `on_exception`."""
    return isinstance(trainer.strategy.launcher, _MultiProcessingLauncher)


def unwatched_processes(trainer: Trainer) -> list[Popen[bytes]]:
    """Those of `child_processes`, which Lightning's watcher has lost: it kills this process when one of its list fails."""
    watched = child_processes(trainer)
    processes = [*watched]
    watched.clear()
    if processes:
        trainer.strategy.launcher.procs = processes  # pyrefly: ignore[missing-attribute]
    return processes


class _Metrics(dict[str, Tensor]):
    """One that is missing is NaN."""

    def __missing__(self, name: str) -> Tensor:
        return torch.tensor(math.nan)


def expect_no_validation(trainer: Trainer) -> None:
    """Have no schedule and no early stopping of a module wait for a metric of a validation that the fit does not have.

    A module that asks for one by itself gets NaN.
    """
    if not trainer.enable_validation:
        if not fits_in_children(trainer):  # else Lightning pickles the metrics
            cast(Any, trainer)._logger_connector._callback_metrics = _Metrics(trainer.callback_metrics)
        for waiting in (*trainer.lr_scheduler_configs, *trainer.early_stopping_callbacks):
            waiting.strict = False


def compiler_context(module: LightningModule) -> dict[str, Any] | None:
    """What `from_compiled(torch.compile(module))` keeps in the module; None if the module is not compiled."""
    return getattr(module, "_compiler_ctx", None)


def forget_averages(trainer: Trainer) -> None:
    """Have a test of a checkpoint read its averaged weights, after a fit with WeightAveraging.

    The callback takes any checkpoint that is loaded after a fit for one to train on from, and loads the weights that were
    not averaged.
    """
    for callback in callbacks_of(trainer):
        if isinstance(callback, WeightAveraging):
            callback._average_model = None


def logged_step(trainer: Trainer) -> int:
    """The step at which Lightning logs now, the updates of the training so far; at the end of an epoch it logs at the one before."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def logged_in_training(trainer: Trainer) -> set[str]:
    """The names under which something has called `log` in this epoch of the training, as a logger gets them."""
    logged = (each for each in trainer.fit_loop.epoch_loop._results.result_metrics if not each.has_reset)
    found = (each.meta for each in logged if each.meta.logger)
    return {meta.forked_name(on_step) for meta in found for on_step in (True, False)}


def is_accumulating(trainer: Trainer) -> bool:
    """Whether the gradients of the last batch are kept for the next optimizer step."""
    return trainer.fit_loop.epoch_loop._should_accumulate()


def is_stopping(trainer: Trainer) -> bool:
    """Whether the fit ends with this batch because something has asked for it, and `min_epochs` and `min_steps` allow it."""
    return trainer.should_stop and trainer.fit_loop._can_stop_early


def has_to_stop(trainer: Trainer) -> bool:
    """Whether something has asked for the end, which a resumed run is to heed as well.

    Not where a Timer asks: it does so again in a resumed run, unless that has more time.
    """
    timers = (one for one in callbacks_of(trainer) if isinstance(one, Timer))
    is_over = any((one.time_remaining() or 1) <= 0 for one in timers)
    return trainer.should_stop and not is_over


def leave_out_wait(trainer: Trainer, seconds: float) -> None:
    """Have no Timer, `max_time` included, and no validation that is due by the clock count a wait of the training."""
    for timer in (each for each in callbacks_of(trainer) if isinstance(each, Timer)):
        if (start := timer._start_time[RunningStage.TRAINING]) is not None:
            timer._start_time[RunningStage.TRAINING] = start + seconds
    if cast(Any, trainer)._val_check_time_interval is not None:
        cast(Any, trainer)._last_val_time += seconds


def epoch_metrics(trainer: Trainer) -> dict[str, Tensor]:
    """The training's metrics as they are logged, and followed by callbacks and schedules, where the epoch ends with this batch."""
    return trainer.fit_loop.epoch_loop._results.metrics(on_step=False)["callback"]


def validates_next(trainer: Trainer) -> bool:
    """Whether a validation follows this batch. One that is due by the clock may begin all the same."""
    return trainer.fit_loop.epoch_loop._should_check_val_fx(cast(Any, trainer.fit_loop._data_fetcher))


def after_batch(trainer: Trainer, act: Callable[[], None]) -> None:
    """To be called in a callback's `on_train_batch_end`: act once Lightning is done with the batch, before what follows it.

    After the callbacks come the module's own hook of this name, and what the loggers get of the step. Of two acts, the
    one that was asked for last is the first.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    go_on = loop.on_advance_end

    def act_and_go_on(data_fetcher: Any) -> None:
        vars(loop).pop("on_advance_end", None)  # it is for this batch
        act()
        go_on(data_fetcher)

    loop.on_advance_end = act_and_go_on


def at_skipped_end(trainer: Trainer, act: Callable[[], None]) -> None:
    """Act also where an epoch ends because `on_train_batch_start` of the module returned -1.

    Lightning then calls nothing of a batch's end. To be called in `on_train_start`.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    vars(loop).pop("advance", None)  # of an earlier fit
    advance = loop.advance

    def advance_or_act(data_fetcher: Any) -> None:
        try:
            advance(data_fetcher)
        except StopIteration:
            act()
            raise

    loop.advance = advance_or_act


def leave_signals_alone(trainer: Trainer) -> None:
    """Have Lightning install no signal handlers; to be called in a `setup` hook.

    Its handlers call collective operations from within a signal, and it broadcasts before every batch, on the device,
    whether SIGTERM came.
    """
    cast(Any, trainer)._signal_connector.register_signal_handlers = lambda: None
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None


def validate_by_batches_alone(trainer: Trainer) -> None:
    """Have `trainer.val_check_batch` alone say when a validation follows a batch, and no number of epochs or time."""
    trainer.check_val_every_n_epoch = 1
    cast(Any, trainer)._val_check_time_interval = None


def resume_after_last_batch(trainer: Trainer, restore: Callable[[], None]) -> None:
    """Have `trainer.fit(ckpt_path=…)`, not yet called, continue after the last batch that the checkpoint's run trained.

    Lightning on its own skips what follows that batch: a validation, or the end of the epoch. `restore` is called after
    everything else has been restored, immediately before training continues.
    """
    trainer.fit_loop = _ResumedFitLoop(trainer, restore)


def on_restore_error(trainer: Trainer, explain: Callable[[Exception], Exception]) -> None:
    """Have `trainer.fit(ckpt_path=…)`, not yet called, raise what `explain` makes of a value that cannot be restored."""
    connector = cast(Any, trainer)._checkpoint_connector

    def explained(restore: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            try:
                restore(*args)
            except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
                raise explain(error) from error
            except RuntimeError as error:
                if type(error) is not RuntimeError:  # of the device
                    raise
                raise explain(error) from error  # of `load_state_dict`

        return call

    for name in ("_restore_modules_and_callbacks", "restore_training_state"):
        setattr(connector, name, explained(getattr(connector, name)))


class _ResumedFitLoop(_FitLoop):
    """The loop over epochs; the first epoch is the resumed one."""

    def __init__(self, trainer: Trainer, restore: Callable[[], None]):
        before = trainer.fit_loop
        super().__init__(trainer, before.min_epochs, before.max_epochs)
        self.epoch_loop = _ResumedEpochLoop(trainer, restore)

    @property
    @override
    def done(self) -> bool:
        # What follows the last batch remains to be done, also where no training step is left.
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
        cast(_ResumedEpochLoop, self.epoch_loop).was_skipped = batches.current.started < batches.current.ready
        for counter in (batches.total, batches.current):  # the batch is done
            counter.completed = counter.processed = counter.started = counter.ready
        for counter in (epochs.total, epochs.current):  # the epoch starts again, after its first batches
            counter.ready = counter.started = counter.processed = counter.completed
        if self._data_fetcher is not None and self._combined_loader_states_to_load:
            self._load_combined_loader_states()  # the schedule has asked for the number of steps, and so for the loaders
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
        before = trainer.fit_loop.epoch_loop
        super().__init__(trainer, before.min_steps, before.max_steps)
        self.restore = restore
        self.is_resuming_batch = True  # until what follows the last trained batch has been done
        self.has_trained = False  # whether a batch was trained in this process
        self.was_skipped = False  # whether that batch was not trained: nothing follows it (see `at_skipped_end`)

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
            if self.was_skipped:
                raise StopIteration
        else:
            self.has_trained = True
            super().advance(data_fetcher)


def _let_epoch_end_fail(module: LightningModule) -> None:
    """Have an exception of the module's next `on_train_epoch_end` be a warning: what it collected was in a process before."""
    own = module.on_train_epoch_end

    def tolerant() -> None:
        vars(module).pop("on_train_epoch_end", None)
        try:
            own()
        except Exception as error:  # noqa: BLE001 - of an epoch whose end the run before may have had
            name, why = type(module).__name__, in_one_line(error)
            rank_zero_warn(
                f"{name}.on_train_epoch_end is left out of the resumed epoch, of which it has no batch: {why}"
            )

    module.on_train_epoch_end = tolerant  # pyrefly: ignore[bad-assignment]


def by_keyword(serve: Callable[[], Any]) -> Any:
    """What a `predict_dataloader` serves to Lightning, whose loaders then have no positional arguments.

    To number its predictions Lightning builds each DataLoader anew, with a `batch_size` of its own: one given by position
    would be passed twice.
    """
    loaders = serve()
    for loader in loaders.flattened if isinstance(loaders, CombinedLoader) else tree_leaves(loaders):
        args, names = (getattr(loader, f"__pl_saved_{kind}", ()) for kind in ("args", "arg_names"))
        if args and len(args) == len(names):  # else its constructor takes any number of them
            vars(loader)["__pl_saved_kwargs"].update(zip(names, args, strict=True))
            vars(loader)["__pl_saved_args"] = ()
    return loaders


def has_begun(logger: WandbLogger) -> bool:
    """Whether a logger has its run."""
    return logger._experiment is not None


def prefixed(logger: TensorBoardLogger, keys: Sequence[str]) -> list[str]:
    """The names under which a logger writes `keys`: with the logger's prefix, if it has one."""
    return [f"{logger._prefix}{logger.LOGGER_JOIN_CHAR}{key}" if logger._prefix else key for key in keys]
