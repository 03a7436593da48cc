"""What an option is for is declared where the option is, and whoever treats options differently asks for it."""

from pathlib import Path
from typing import Any

import pytest

from batchscope.analysis.run import Run
from batchscope.options.groups import CONFIGS, load
from batchscope.options.purpose import only_observes, purpose_of
from batchscope.options.types import Purpose
from tests.support.command_lines import composed


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    own = "+callbacks.mine={_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: val/loss}"
    return composed("+trainer.max_time={hours: 1}", own, run_dir="out")


WATCHERS = ("nonfinite", "curves", "device", "throughput", "progress")
PURPOSES = {
    Purpose.RESULT: "seed channels_last flush_denormals model.hidden_size data.batch_size data.num_val optimizer.lr"
    " trainer.devices trainer.precision trainer.limit_val_batches model._target_ callbacks.checkpoint.monitor"
    " callbacks.checkpoint.mode callbacks.checkpoint._target_ callbacks.mine.patience callbacks.mine._target_"
    " nothing nothing.at.all .",
    Purpose.LENGTH: "trainer.limit_test_batches trainer.max_epochs trainer.max_steps trainer.max_time.hours"
    " trainer.min_steps",
    Purpose.SPEED: "trainer.accelerator trainer.profiler trainer.profiler.dirpath data.pipeline data.num_workers"
    " keep_freed_memory",
    Purpose.READ_FROM: "data.root data.offline resume",
    Purpose.WRITTEN_TO: "run_dir callbacks.checkpoint.dirpath callbacks.mine.dirpath logger.csv.save_dir"
    " trainer.default_root_dir",
    Purpose.OBSERVATION: "test optimized_metric search search.start logger logger.csv logger.csv.name"
    " logger.csv._target_ trainer.enable_progress_bar callbacks.checkpoint.every_minutes"
    " callbacks.checkpoint.every_n_steps "
    + " ".join(f"callbacks.{name}.{option}" for name in WATCHERS for option in ("_target_", "every_n_steps", "any")),
}


@pytest.mark.parametrize("purpose", PURPOSES)
def test_an_option_is_for_what_its_declaration_says(purpose: Purpose, config: dict[str, Any]) -> None:
    options = PURPOSES[purpose].split()
    assert {option: purpose_of(option, config) for option in options} == dict.fromkeys(options, purpose)


def test_what_is_only_observed_is_declared_by_every_installed_callback_but_the_checkpoints() -> None:
    nodes = load(CONFIGS / "callbacks" / "default.yaml")
    assert {name for name, node in nodes.items() if not only_observes(node["_target_"])} == {"checkpoint"}


OF_A_CALLBACK = [{"_target_": target} for target in (["x"], "os.system", "", ".", "batchscope.", "mine.Callback")]


@pytest.mark.parametrize("callbacks", [None, 5, {"a": []}, *({"a": node} for node in OF_A_CALLBACK)], ids=str)
def test_whatever_a_record_holds_an_unknown_option_changes_the_result(callbacks: Any) -> None:
    for option in ("callbacks", "callbacks.a", "callbacks.a.b", "callbacks.a._target_", "callbacks.a.b.c", ""):
        assert purpose_of(option, {"callbacks": callbacks}) is purpose_of(option, {}) is Purpose.RESULT


def test_a_report_leaves_out_places_and_observation_and_keeps_what_a_stranger_configures(
    config: dict[str, Any],
) -> None:
    mine = {"callbacks": {**config["callbacks"], "mine": {"_target_": "mine.Callback", "patience": 3}}}
    settings = Run("0", Path(), {"config": config | mine}).settings
    hidden = ("data.root", "data.seed", "run_dir", "test", "trainer.accelerator", "trainer.enable_progress_bar")
    assert not [key for key in settings if key.startswith((*hidden, "logger", "callbacks.throughput"))]
    assert (settings["callbacks.mine.patience"], settings["trainer.max_epochs"]) == (3, 2)
    assert "data.num_workers" in settings
