"""Options that people type by habit, from lightning-hydra-template and Lightning, and what to write instead.

An option that works here is not in the table. docs/commands.md lists those that work, and shows the table.
"""

import re

from .._system import command_line
from .groups import COLLECTIONS, choices_of

# An option or a choice, and what to do instead. `*` stands for its value. A name also covers all options below it.
HABITS = {
    "ckpt_path": "write `resume=<run folder>` to train on, `init=<file>` to start from its weights, or `batchscope "
    "evaluate ckpt=<file>` to test a checkpoint",
    "run_dir": "is set by the run; write `hydra.run.dir=*` to choose its folder",
    "epochs": "write `trainer.max_epochs=*`",
    "train": "a run always trains; `batchscope evaluate ckpt=<file>` tests a checkpoint without training",
    "task_name": "write `hydra.run.dir=outputs/runs/*` to name the run's folder, or `tags=[*]`",
    "hparams_search": "write `-m hydra/sweeper=optuna hydra.sweeper.n_trials=20 hydra.sweeper.direction=minimize 'optimizer.lr=interval(1e-4,1e-1)'`; a "
    "folder hparams_search of your own is used by `-m --config-dir=<its parent> hparams_search=*`",
    "local": "write `--config-dir=conf experiment=*` with what this machine needs in conf/experiment",
    "extras.print_config": "write `--cfg job`, which prints the configuration and runs nothing",
    "extras.enforce_tags": "no run has to have tags; write `tags=[first]`",
    "extras": "there is nothing like it; `tags=[…]` is an option, and `--cfg job` prints the configuration",
    "paths.data_dir": "write `data.root=*`",
    "paths.output_dir": "write `hydra.run.dir=*`",
    "paths": "write `data.root=<folder>` for the data, and `hydra.run.dir=<folder>` for what a run writes",
    "debug=fdr": "write `trainer.fast_dev_run=true`",
    "debug=overfit": "write `trainer.overfit_batches=3 trainer.max_epochs=20`",
    "debug=limit": "write `trainer.limit_train_batches=10 trainer.limit_val_batches=3 trainer.limit_test_batches=3`",
    "debug=profiler": "write `trainer.profiler=simple`; where a step's time goes is among every run's last lines",
    "logger=many_loggers": "write `logger=wandb`, beside which TensorBoard and the CSV file stay",
    "callbacks=model_checkpoint": "checkpoints are kept anyway; `callbacks.checkpoint.monitor=val/acc` sets an option",
    "callbacks=model_summary": "write `trainer.enable_model_summary=true`",
    "callbacks=rich_progress_bar": "write `callbacks.progress._target_=lightning.pytorch.callbacks.RichProgressBar` after "
    "`pip install rich`",
    "callbacks.model_checkpoint.monitor": "write `callbacks.checkpoint.monitor=*`",
    "callbacks.model_checkpoint.mode": "write `callbacks.checkpoint.mode=*`",
    "callbacks.model_checkpoint.dirpath": "write `hydra.run.dir=*`, which moves the whole run",
    "callbacks.checkpoint.dirpath": "write `hydra.run.dir=*`, which moves the whole run",
    "callbacks.model_checkpoint": "write `callbacks.checkpoint` with monitor, mode, every_minutes or "
    "every_n_steps; the best and the last checkpoint are kept in any case",
    "trainer=ddp_sim": "write `trainer=ddp trainer.accelerator=cpu trainer.devices=2`",
    "trainer.gpus=0": "write `trainer=cpu`",
    "trainer.gpus": "write `trainer.accelerator=gpu trainer.devices=*`",
    "trainer.resume_from_checkpoint": "write `resume=<run folder>`",
    "model.optimizer": "write `optimizer=adam` for another one, and `optimizer.lr=…` for its options",
    "model.scheduler": "write `optimizer.schedule=cosine`, or one_cycle, step, constant",
    "model.net": "write its options without net: `model.hidden_size=128`",
    "model.compile": "write `compile=*`",
    "model.lr": "write `optimizer.lr=*`",
    "data.data_dir": "write `data.root=*`",
    "data.train_val_test_split": "write `data.num_val=5000`; what is left is trained on",
    "data.pin_memory": "batches are pinned where that helps",
}


def answer_to(option: str, value: str | None = None, section: str = "") -> str | None:
    """Return what to write instead of an option with this value, or of a choice (`debug=fdr`), typed by habit; else None.

    For an option of a callback or logger that is not chosen, or a value in the place of one, name its choice. `section`, which the
    configuration has, is no habit.
    """
    parts, depth = option.split("."), section.count(".") + 1 if section else 0
    names = (".".join(parts[:length]) for length in range(len(parts), depth, -1))
    if depth < 2 <= len(parts) and parts[0] in COLLECTIONS and parts[1] in choices_of(parts[0]):
        return f"write {parts[0]}={parts[1]} {'beside it' if value is None or len(parts) > 2 else 'in its place'}"
    answer = next((HABITS[name] for name in (f"{option}={value}", *names) if name in HABITS), "")
    answer = re.sub(r"[^\s`]*\*[^\s`]*", lambda word: _fill_in(word[0], value), answer)
    return answer.replace("`", "") or None


def _fill_in(word: str, value: str | None) -> str:
    """Return a word with the value in the place of `*`, as it is typed in a shell."""
    return command_line([word.replace("*", value)]) if value else word.replace("*", "…")
