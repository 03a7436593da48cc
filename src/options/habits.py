"""Words that people type by habit, from lightning-hydra-template and Lightning: each is answered with what to write here.

A word that works here is not in the table; docs/commands.md lists those.
"""

# A word, and what to do instead; `*` stands for its value. A word stands for everything below it.
HABITS = {
    "ckpt_path": "write `resume=<run folder>` to train on, `init=<file>` to start from its weights, or `batchscope evaluate "
    "ckpt=<file>` to test a checkpoint",
    "run_dir": "is set by the run; write `hydra.run.dir=*` to choose its folder",
    "epochs": "write `trainer.max_epochs=*`",
    "train": "a run always trains; `batchscope evaluate ckpt=<file>` tests a checkpoint without training",
    "task_name": "write `hydra.run.dir=outputs/runs/*` to name the run's folder, or `tags=[*]`",
    "hparams_search": "write `-m hydra/sweeper=optuna hydra.sweeper.n_trials=20 'optimizer.lr=interval(1e-4,1e-1)'`",
    "extras": "there is nothing like it; `tags=[…]` is an option, and `--cfg job` prints the configuration",
    "paths.data_dir": "write `data.root=*`",
    "paths.output_dir": "write `hydra.run.dir=*`",
    "paths": "write `data.root=<folder>` for the data, and `hydra.run.dir=<folder>` for what a run writes",
    "trainer.gpus": "write `trainer.accelerator=gpu trainer.devices=*`",
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
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    found = next((HABITS[name] for name in names if name in HABITS), None)
    return found.replace("*", value or "…").replace("`", "") if found else None
