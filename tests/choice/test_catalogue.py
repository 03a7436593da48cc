"""The devices by their names: short ones, those that torch reports, and unknown ones with the nearest known."""

import pytest

from batchscope.choice.catalogue import device_names, find_device, known_device
from batchscope.errors import UserError


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("t4", "Tesla T4"),
        ("T4", "Tesla T4"),
        ("a100", "A100-SXM4-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
        ("rtx 4090", "GeForce RTX 4090"),
        ("RTX-4090", "GeForce RTX 4090"),
        ("mi300x", "AMD Instinct MI300X"),
        ("m2-pro", "Apple M2 Pro"),
        ("tpu-v5e", "TPU v5e"),
        ("nvidia-tesla-t4", "Tesla T4"),
        ("geforce rtx4090", "GeForce RTX 4090"),
    ],
)
def test_a_device_is_found_by_its_short_and_by_its_whole_name(name, found):
    assert find_device(name).name == found


def test_every_short_name_is_a_device_in_si_units():
    for name in device_names():
        device = find_device(name)
        assert 8 * 2**30 <= device.memory_bytes <= 2**38
        assert device.clock_hz is None or device.clock_hz > 1e9
        assert device.l2_bytes is None or device.l2_bytes >= 2**20


def test_an_unknown_device_is_one_line_with_the_nearest_name():
    with pytest.raises(UserError, match="'h10' is no known device. Did you mean 'h100'"):
        find_device("h10")


def test_only_an_exact_name_is_taken_from_torch():
    assert known_device("NVIDIA L4").name == "L4"
    assert known_device("NVIDIA H100 80GB HBM3 MIG 3g.40gb") is None
