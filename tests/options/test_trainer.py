"""What the trainer does not take is refused with all other wrong values, before torch is imported."""

from typing import get_args

import pytest
from lightning.fabric.plugins.precision import precision

from batchscope.errors import UserError
from batchscope.options.compose import check_command_line
from batchscope.options.nodes import check_node
from batchscope.options.signatures import parameters_of
from batchscope.options.trainer import OBSERVERS, TRAINER, _Precision

# override → what the answer must hold
REFUSED = {
    "trainer.max_epochs=-3": "trainer.max_epochs: got -3, takes a whole number of at least -1 or null.",
    "trainer.max_steps=-2": "trainer.max_steps: got -2, takes a whole number of at least -1.",
    "+trainer.min_epochs=-1": "at least 0",
    "trainer.limit_train_batches=1.5": "takes a whole number of at least 0 or a number from 0 to 1 or null.",
    "trainer.limit_val_batches=-1": "trainer.limit_val_batches: got -1",
    "trainer.val_check_interval=0": "a whole number of at least 1 or a number above 0, at most 1",
    "trainer.val_check_interval=0.0": "trainer.val_check_interval: got 0.0",
    "trainer.val_check_interval=-1": "trainer.val_check_interval: got -1",
    "+trainer.check_val_every_n_epoch=0": "at least 1",
    "trainer.gradient_clip_val=-1": "trainer.gradient_clip_val: got -1, takes a number of at least 0 or null.",
    "+trainer.gradient_clip_algorithm=foo": "takes norm or value or null",
    "trainer.precision=foo": "trainer.precision: got 'foo', takes 32-true, 16-true",
    "trainer.precision=bf16-mixt": "Did you mean 'bf16-mixed'?",
    "+trainer.log_every_n_steps=-1": "at least 0",
    "trainer.accumulate_grad_batches=0": "trainer.accumulate_grad_batches: got 0, takes a whole number of at least 1.",
    "trainer.num_sanity_val_steps=-2": "at least -1",
    "trainer.overfit_batches=1.5": "trainer.overfit_batches: got 1.5",
    "trainer.fast_dev_run=-1": "takes true or false or a whole number of at least 0.",
    "trainer.profiler=foo": "takes simple, advanced, pytorch, xla",
    "trainer.deterministic=worn": "Did you mean 'warn'?",
    "trainer.num_nodes=0": "trainer.num_nodes: got 0",
}
TAKEN = [
    *("trainer.max_epochs=-1", "trainer.max_epochs=null", "trainer.max_epochs=0", "trainer.max_steps=-1"),
    *("trainer.limit_train_batches=0", "trainer.limit_train_batches=8", "trainer.limit_train_batches=0.5"),
    *("trainer.val_check_interval=1.0", "trainer.val_check_interval=5", "trainer.val_check_interval=00:00:10:00"),
    *("trainer.precision=bf16-mixed", "trainer.precision=32", "trainer.precision=null", "trainer.deterministic=warn"),
    *("trainer.gradient_clip_val=0", "trainer.profiler=simple", "trainer.fast_dev_run=true"),
    *("trainer.max_time={hours:1}", "trainer.fast_dev_run=3", "trainer.num_sanity_val_steps=-1"),
]


@pytest.mark.parametrize("override", REFUSED)
def test_a_value_that_lightning_refuses_is_refused_first(override: str) -> None:
    with pytest.raises(UserError) as caught:
        check_command_line([override], multirun=False)
    assert REFUSED[override] in str(caught.value), str(caught.value)


@pytest.mark.parametrize("override", TAKEN)
def test_a_value_that_lightning_takes_is_taken(override: str) -> None:
    check_command_line([override], multirun=False)


def test_every_declared_option_is_one_of_the_trainer_of_today() -> None:
    assert set(TRAINER) <= set(parameters_of("lightning.Trainer"))


def test_the_precisions_are_those_of_the_lightning_of_today() -> None:
    theirs = (precision._PRECISION_INPUT_INT, precision._PRECISION_INPUT_STR, precision._PRECISION_INPUT_STR_ALIAS)
    assert set(get_args(_Precision)) == {value for literal in theirs for value in get_args(literal)}


def test_what_is_not_declared_is_left_to_the_trainer() -> None:
    check_node({"_target_": "lightning.Trainer", "strategy": "foo", "plugins": "foo"}, "trainer")


def test_the_callbacks_that_only_observe_are_those_of_the_lightning_of_today() -> None:
    for target in OBSERVERS:
        check_node({"_target_": target}, "callbacks.mine")
