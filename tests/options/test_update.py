"""`global_batch_size`: how many batches an update takes, and what does not divide, before torch is imported."""

from typing import Any

import pytest

from batchscope.errors import UserError
from batchscope.options.command_lines import for_evaluation, for_explanation
from batchscope.options.compose import check_command_line
from batchscope.options.update import batches_of_update, largest_part


def config(*words: str) -> dict[str, Any]:
    return check_command_line([*words], multirun=False)[0]


@pytest.mark.parametrize(
    ("words", "ranks", "batches"),
    [
        (["global_batch_size=512", "data.batch_size=64"], 1, 8),
        (["global_batch_size=512", "data.batch_size=64", "trainer.devices=2"], 2, 4),
        (["global_batch_size=512", "data.batch_size=64", "trainer.devices=auto"], 8, 1),  # known when they are counted
        (["global_batch_size=64", "data.batch_size=64"], 1, 1),
        (["trainer.accumulate_grad_batches=3"], 2, 3),
        ([], 2, 1),
    ],
)
def test_an_update_takes_as_many_batches_as_fill_it(words: list[str], ranks: int, batches: int) -> None:
    assert batches_of_update(config(*words), ranks) == batches


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("100", "global_batch_size: got 100, takes a multiple of 64 (data.batch_size=64), such as 128"),
        ("10", "global_batch_size: got 10, takes a multiple of 64 (data.batch_size=64), such as 64"),
        (
            "192 trainer.devices=2",
            "global_batch_size: got 192, takes a multiple of 128 (data.batch_size=64 on 2 devices), such as 256",
        ),
        (
            "192 trainer.devices=2 trainer.num_nodes=2",
            "a multiple of 256 (data.batch_size=64 on 4 devices), such as 256",
        ),
        (
            "128 trainer.accumulate_grad_batches=2",
            "trainer.accumulate_grad_batches: got 2, and global_batch_size=128 decides it; leave one out",
        ),
        ("0", "global_batch_size: got 0, takes a whole number of at least 1 or null"),
        (
            "128 compile=reduce-overhead",
            "compile: reduce-overhead uses CUDA graphs, which overwrite accumulated gradients",
        ),
    ],
)
def test_what_does_not_divide_is_one_line(words: str, line: str) -> None:
    with pytest.raises(UserError) as error:
        config("data.batch_size=64", *f"global_batch_size={words}".split())
    assert line in str(error.value)


def test_each_run_of_a_sweep_divides_it() -> None:
    with pytest.raises(UserError, match="takes a multiple of 48"):
        check_command_line(["data.batch_size=32,48,64", "global_batch_size=128"], multirun=True)


def test_one_device_explains_its_share_of_an_update_and_an_evaluation_has_none() -> None:
    trained = config("global_batch_size=256", "trainer.devices=2")
    assert batches_of_update(for_explanation(trained), ranks=1) == batches_of_update(trained, ranks=2) == 1
    assert for_evaluation(trained)["global_batch_size"] is None


@pytest.mark.parametrize(("most", "found"), [(32, 32), (100, 64), (7, 4), (4096, 128)])
def test_the_largest_part_divides_the_share_of_a_rank(most: int, found: int) -> None:
    assert largest_part(config("global_batch_size=256"), 2, most) == found
    assert largest_part(config(), 2, most) == most
