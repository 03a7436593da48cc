"""What Lightning's Trainer takes is taken; what it refuses stands in tests/cli/test_command_lines.py."""

from typing import get_args

import pytest
from lightning.fabric.plugins.precision import precision

from batchscope.options.nodes import check_node
from batchscope.options.signatures import signature_of
from batchscope.options.trainer import OBSERVERS, TRAINER, _Precision
from tests.support.command_lines import composed

TAKEN = [
    *("trainer.max_epochs=-1", "trainer.max_epochs=null", "trainer.max_epochs=0", "trainer.max_steps=-1"),
    *("trainer.limit_train_batches=0", "trainer.limit_train_batches=8", "trainer.limit_train_batches=0.5"),
    *("trainer.val_check_interval=1.0", "trainer.val_check_interval=5", "trainer.val_check_interval=00:00:10:00"),
    *("trainer.precision=bf16-mixed", "trainer.precision=32", "trainer.precision=null", "trainer.deterministic=warn"),
    *("trainer.gradient_clip_val=0", "trainer.profiler=simple", "trainer.fast_dev_run=true"),
    *("trainer.max_time={hours:1}", "trainer.fast_dev_run=3", "trainer.num_sanity_val_steps=-1"),
]


@pytest.mark.parametrize("override", TAKEN)
def test_a_value_that_lightning_takes_is_taken(override: str) -> None:
    composed(override)


def test_every_declared_option_is_one_of_the_trainer_of_today() -> None:
    assert set(TRAINER) <= set(signature_of("lightning.Trainer").parameters)


def test_the_precisions_are_those_of_the_lightning_of_today() -> None:
    theirs = (precision._PRECISION_INPUT_INT, precision._PRECISION_INPUT_STR, precision._PRECISION_INPUT_STR_ALIAS)
    assert set(get_args(_Precision)) == {value for literal in theirs for value in get_args(literal)}


def test_what_is_not_declared_is_left_to_the_trainer() -> None:
    check_node({"_target_": "lightning.Trainer", "strategy": "foo", "plugins": "foo"}, "trainer")


def test_the_callbacks_that_only_observe_are_those_of_the_lightning_of_today() -> None:
    for target in OBSERVERS:
        check_node({"_target_": target}, "callbacks.mine")
