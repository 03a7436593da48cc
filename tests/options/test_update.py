"""`global_batch_size`: how many batches an update takes, and what does not divide, before torch is imported."""

import pytest

from batchscope.options.command_lines import for_evaluation, for_explanation
from batchscope.options.compose import check_command_line
from batchscope.options.update import batches_of_update, largest_part
from tests.support.command_lines import composed, refusal

OF_64 = "data.batch_size=64 global_batch_size="


@pytest.mark.parametrize(
    ("words", "ranks", "batches"),
    [
        (f"{OF_64}512", 1, 8),
        (f"{OF_64}512 trainer.devices=2", 2, 4),
        (f"{OF_64}512 trainer.devices=auto", 8, 1),  # known when they are counted
        (f"{OF_64}64", 1, 1),
        ("trainer.accumulate_grad_batches=3", 2, 3),
        ("", 2, 1),
    ],
)
def test_an_update_takes_as_many_batches_as_fill_it(words: str, ranks: int, batches: int) -> None:
    assert batches_of_update(composed(*words.split()), ranks) == batches


GOT = "global_batch_size: got {}, takes a multiple of {} (data.batch_size=64{}), such as {}"
REFUSED = {
    "100": GOT.format(100, 64, "", 128),
    "10": GOT.format(10, 64, "", 64),
    "192 trainer.devices=2": GOT.format(192, 128, " on 2 devices", 256),
    "192 trainer.devices=2 trainer.num_nodes=2": GOT.format(192, 256, " on 4 devices", 256),
    "128 trainer.accumulate_grad_batches=2": "trainer.accumulate_grad_batches: got 2, and global_batch_size=128 decides "
    "it; leave one out",
    "0": "global_batch_size: got 0, takes a whole number of at least 1 or null.",
    "128 compile=reduce-overhead": "compile: reduce-overhead uses CUDA graphs, which overwrite accumulated gradients",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_does_not_divide_is_one_line(words: str) -> None:
    assert refusal(composed, *f"{OF_64}{words}".split()).startswith(REFUSED[words])


def test_each_run_of_a_sweep_divides_it() -> None:
    said = refusal(check_command_line, ["data.batch_size=32,48,64", "global_batch_size=128"], multirun=True)
    assert "takes a multiple of 48" in said


def test_one_device_explains_its_share_of_an_update_and_an_evaluation_has_none() -> None:
    trained = composed("global_batch_size=256", "trainer.devices=2")
    assert batches_of_update(for_explanation(trained), ranks=1) == batches_of_update(trained, ranks=2) == 1
    assert for_evaluation(trained)["global_batch_size"] is None


@pytest.mark.parametrize(("most", "found"), [(32, 32), (100, 64), (7, 4), (4096, 128)])
def test_the_largest_part_divides_the_share_of_a_rank(most: int, found: int) -> None:
    assert largest_part(composed("global_batch_size=256"), 2, most) == found
    assert largest_part(composed(), 2, most) == most
