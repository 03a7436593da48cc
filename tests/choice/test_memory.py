"""Memory by batch size: on the line of what was counted, with what a GPU adds."""

from batchscope.choice.catalogue import find_device
from batchscope.choice.memory import CONTEXT, CountedMemory, largest_batch, needed, usable

COUNTED = CountedMemory(1e9, {64: 64e6, 128: 128e6})
T4, MAC = find_device("t4"), find_device("m1")


def test_what_was_counted_grows_on_a_line():
    assert [COUNTED.at(size) for size in (64, 100, 1024)] == [1.064e9, 1.1e9, 2.024e9]
    assert CountedMemory(1e9, {64: 64e6}).at(128) == 1.128e9


def test_a_gpu_adds_its_context_and_rounding():
    found = needed(COUNTED, T4, 100)
    assert found.low == 1.1e9 + CONTEXT.low
    assert 1.1e9 + CONTEXT.middle < found.middle < found.high < 2.5e9


def test_other_devices_take_what_was_counted():
    assert needed(COUNTED, MAC, 100).middle == 1.1e9


def test_smaller_numbers_take_less():
    half = needed(COUNTED, MAC, 10_000, element=0.5)
    assert half.low == 6e9 and half.high == 11e9


def test_an_estimate_says_so_by_its_width():
    guess = CountedMemory(1e9, {64: 64e6}, is_counted=False)
    assert needed(guess, MAC, 6400).high - needed(guess, MAC, 6400).low > 6e9


def test_what_the_backward_pass_moves_is_added_for_a_moment():
    moving = CountedMemory(1e9, {64: 64e6}, moving={64: 48e6})
    assert (moving.at(128), moving.moving_at(128)) == (1.128e9, 96e6)
    found = needed(moving, MAC, 128)
    assert (found.low, found.middle, found.high) == (1.128e9, 1.160e9, 1.192e9)
    assert largest_batch(moving, T4) < largest_batch(CountedMemory(1e9, {64: 64e6}), T4)


def test_gradients_of_all_time_steps_at_once_are_within_the_interval():
    loop = CountedMemory(0.0, {64: 1.706e6}, moving={64: 1.655e6}, has_loop=True)  # of the rnn_cell, 100 time steps
    assert needed(loop, MAC, 64).middle < 3.71e6 < needed(loop, MAC, 64).high  # what a count of its tensors gave


def test_the_largest_batch_is_the_last_that_fits():
    largest = largest_batch(COUNTED, T4)
    assert needed(COUNTED, T4, largest).high <= usable(T4) < needed(COUNTED, T4, largest + 1).high


def test_a_model_that_does_not_fit_has_no_batch():
    assert largest_batch(CountedMemory(40e9, {1: 1e9}), T4) == 0
