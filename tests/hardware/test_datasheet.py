"""The datasheets of cards: dense peaks in plausible units, found by the exact name that torch reports, or by a short one."""

import pytest

from batchscope.errors import UserError
from batchscope.hardware.calibration import PRECISIONS
from batchscope.hardware.datasheet import card_names, datasheet, datasheets, find_card, find_cards

DENSE = (2, 4, 8, 14.5, 16, 30)  # fp16 ÷ fp32 of the generations: GeForce and P100, A10 to L40S, V100, H100, A100, B200
DEVICES = datasheets()


@pytest.mark.parametrize(
    ("name", "memory_and_watts"),
    [
        ("Tesla T4", (15, 70)),
        ("A100-SXM4-40GB", (40, 400)),  # the name that an old driver reports
        ("NVIDIA L4", (22.5, 72)),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),  # a slice of the card
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),  # another chip
        ("nvidia l4", None),
    ],
)
def test_a_card_is_found_by_the_exact_name_that_torch_reports(name, memory_and_watts):
    card = datasheet(name)
    assert (card and (card.memory_gib, card.tdp_w)) == memory_and_watts


@pytest.mark.parametrize(
    ("name", "full_name"),
    [
        ("T4", "Tesla T4"),
        ("a100", "A100-SXM4-80GB"),  # of several variants the commonest
        ("a100-40gb", "A100-SXM4-40GB"),
    ],
)
def test_a_user_finds_a_card_by_its_short_name(name, full_name):
    assert find_card(name).names[0] == full_name
    with pytest.raises(UserError, match="--devices: got 'mi300x', which is no known card.* Predicted are NVIDIA's t4"):
        find_card("mi300x")


def test_a_card_that_is_named_twice_is_found_once():
    assert find_cards("t4,h100,T4", "--cards") == [find_card("t4"), find_card("h100")]


def test_no_two_devices_have_the_same_name():
    names = [name for sheet in DEVICES for name in sheet.names]
    assert len(names) == len(set(names)) and len(card_names()) == len(set(card_names()))


@pytest.mark.parametrize("sheet", DEVICES, ids=lambda sheet: sheet.names[0])
def test_numbers_are_in_their_units_and_fit_each_other(sheet):
    """A wrong power of ten, or a sparse peak, is outside: also of the FLOPs for a byte."""
    peaks, bandwidth = sheet.flops_per_sec, sheet.memory_bytes_per_sec
    assert 8 <= sheet.memory_gib <= 512
    assert 5e10 < bandwidth < 1e13
    assert peaks and set(peaks) <= set(PRECISIONS)
    assert all(isinstance(peak, float) and 1e11 < peak < 1e16 for peak in peaks.values())
    assert 20 < max(peaks.values()) / bandwidth < 450
    assert 8 < peaks["fp32"] / bandwidth < 110
    assert 50 <= sheet.tdp_w <= 1500 and 3 <= sheet.l2_mib <= 256
    assert sheet.source["name"] and 2016 <= int(sheet.source["date"]) <= 2026
    assert 1200 <= sheet.clock_mhz <= 2700
    assert peaks["fp32"] == pytest.approx(2e6 * sheet.sms * sheet.cores_per_sm * sheet.clock_mhz, rel=0.02)
    order = [peaks[name] for name in ("fp64", "fp32", "tf32", "bf16") if name in peaks]
    assert order == sorted(order)
    assert peaks.get("bf16", peaks["fp16"]) == peaks["fp16"]
    assert peaks.get("bf16", 0) == pytest.approx(2 * peaks.get("tf32", 0), rel=0.02)  # in every generation
    assert min(abs(peaks["fp16"] / peaks["fp32"] - ratio) for ratio in DENSE) < 0.05 * peaks["fp16"] / peaks["fp32"]
