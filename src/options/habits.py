"""Words that people type by habit, from lightning-hydra-template and Lightning: each is answered with what to write here.

A word that works here is not in the table; docs/commands.md lists those.
"""

from ..errors import UserError

_YAML = "write a YAML file with its `_target_` and `--config-dir=<folder>`; tensorboard, csv, wandb and mlflow are here"
# A word, and what to do instead; `*` stands for its value. A word stands for everything below it, and with `=value` for this
# value alone.
HABITS = {
    "ckpt_path": "write `resume=<run folder>` to train on, `init=<file>` to start from its weights, or `batchscope evaluate "
    "ckpt=<file>` to test a checkpoint",
    "run_dir": "is set by the run; write `hydra.run.dir=*` to choose its folder",
    "train": "a run always trains; `batchscope evaluate ckpt=<file>` tests a checkpoint without training",
    "task_name": "write `hydra.run.dir=outputs/runs/*` to name the run's folder, or `tags=[*]`",
    "hparams_search": "write `-m hydra/sweeper=optuna hydra.sweeper.n_trials=20 'optimizer.lr=interval(1e-4,1e-1)'`",
    "extras": "there is nothing like it; `tags=[…]` is an option, and `--cfg job` prints the configuration",
    "local": "there is no such group; `--config-dir=<folder>` adds YAML files of your own",
    "paths.data_dir": "write `data.root=*`",
    "paths.output_dir": "write `hydra.run.dir=*`",
    "paths.log_dir": "write `hydra.run.dir=<folder>`, and `hydra.sweep.dir=<folder>` with `-m`",
    "paths": "write `data.root=<folder>` for the data, and `hydra.run.dir=<folder>` for what a run writes",
    "experiment=example": "write `experiment=quickstart` for a first run",
    "debug=fdr": "write `trainer.fast_dev_run=true`, or `debug=default`",
    "debug=limit": "write `debug=default`, or `trainer.limit_train_batches=0.01`",
    "debug=overfit": "write `trainer.overfit_batches=3 trainer.max_epochs=20`",
    "debug=profiler": "every run is measured; write `callbacks=explain`, or `trainer.profiler=simple`",
    "logger=many_loggers": "write `logger=default`, or `logger=[tensorboard,csv,wandb]` for those that you want",
    "logger=neptune": _YAML,
    "logger=comet": _YAML,
    "callbacks=model_checkpoint": "every run keeps best.ckpt and last.ckpt; `callbacks.checkpoint` has the options",
    "callbacks=model_summary": "write `trainer.enable_model_summary=true`",
    "callbacks=rich_progress_bar": "every run has a progress bar; `callbacks.progress=null` leaves it out",
    "trainer=ddp_sim": "write `trainer=ddp trainer.accelerator=cpu trainer.devices=2`",
    "trainer.gpus": "write `trainer.accelerator=gpu trainer.devices=*`",
    "trainer.tpu_cores": "TPUs are not supported",
    "trainer.resume_from_checkpoint": "write `resume=<run folder>`",
    "trainer.default_root_dir": "write `hydra.run.dir=*`",
    "model.optimizer": "write `optimizer=adam` for another one, and `optimizer.lr=…` for its options",
    "model.scheduler": "write `optimizer.schedule=cosine`, or one_cycle, step, plateau, constant",
    "model.net": "write its options without net: `model.hidden_size=128`",
    "model.compile": "write `compile=*`",
    "model.lr": "write `optimizer.lr=*`",
    "data.data_dir": "write `data.root=*`",
    "data.train_val_test_split": "write `data.num_val=*`; what is left is trained on",
    "data.pin_memory": "batches are pinned where that helps",
}


def answer_to(option: str, value: str | None = None) -> str | None:
    """What to write instead of a word that is typed by habit; None for any other word. `value` is the option's, as typed."""
    parts = option.split(".")
    names = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    found = next((HABITS[name] for name in (f"{option}={value}", *names) if name in HABITS), None)
    return found.replace("*", value or "…").replace("`", "") if found else None


def habit(option: str, value: str | None = None) -> UserError | None:
    """The error for an option that is typed by habit, with what to write instead; None for any other option."""
    answer = answer_to(option, value)
    return UserError(f"{option}: {answer}") if answer else None
