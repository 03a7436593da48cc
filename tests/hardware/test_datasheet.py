"""The datasheets of cards: dense peaks in plausible units, found by the exact name that torch reports."""

import pytest

from batchscope.hardware.calibration import PRECISIONS
from batchscope.hardware.datasheet import Datasheet, by_short_name, datasheet, datasheets

DEVICES = list({sheet.names: sheet for sheet in datasheets().values()}.values())
CARDS = [sheet for sheet in DEVICES if sheet.kind == "cuda"]
each_device = pytest.mark.parametrize("sheet", DEVICES, ids=lambda sheet: sheet.names[0])
each_card = pytest.mark.parametrize("card", CARDS, ids=lambda card: card.names[0])


@pytest.mark.parametrize(
    ("name", "memory_gib", "tdp_w"),
    [
        ("Tesla T4", 16, 70),
        ("A100-SXM4-40GB", 40, 400),  # as an old driver reports it
        ("NVIDIA L4", 24, 72),
        ("NVIDIA H100 80GB HBM3", 80, 700),
        ("NVIDIA H200", 141, 700),
        ("NVIDIA GeForce RTX 4090", 24, 450),
    ],
)
def test_a_card_is_found_by_the_name_that_torch_reports(name, memory_gib, tdp_w):
    card = datasheet(name)
    assert card is not None
    assert (card.memory_gib, card.tdp_w) == (memory_gib, tdp_w)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",  # a slice
        "NVIDIA GeForce RTX 4090 Laptop GPU",  # another chip
        "NVIDIA A10G",  # other clocks than the A10, and no datasheet
        "NVIDIA NVIDIA L4",
        "nvidia l4",
        "AMD Instinct MI300X",
        "",
    ],
)
def test_a_name_that_is_not_exactly_a_cards_has_no_datasheet(name):
    assert datasheet(name) is None


def test_no_two_devices_have_the_same_name():
    assert sum(len(sheet.names) for sheet in DEVICES) == len(datasheets())
    assert sum(len(sheet.short) for sheet in DEVICES) == len(by_short_name())


def test_a_short_name_of_a_card_with_variants_is_that_of_the_commonest():
    commonest = {"a100": "A100-SXM4-80GB", "h100": "H100 80GB HBM3", "h200": "H200", "v100": "Tesla V100-SXM2-16GB"}
    assert {short: by_short_name()[short].names[0] for short in commonest} == commonest


@each_device
def test_units_are_bytes_flops_and_watts(sheet: Datasheet):
    """A wrong power of ten, or a sparse peak, is outside: also of the FLOPs for a byte."""
    assert 8 <= sheet.memory_gib <= 512
    assert 5e10 < sheet.memory_bytes_per_sec < 1e13
    assert sheet.flops_per_sec and set(sheet.flops_per_sec) <= set(PRECISIONS)
    assert all(isinstance(peak, float) and 1e11 < peak < 1e16 for peak in sheet.flops_per_sec.values())
    assert sheet.tdp_w is None or 50 <= sheet.tdp_w <= 1500
    assert sheet.sms is None or 8 <= sheet.sms <= 400
    assert sheet.clock_mhz is None or 1200 <= sheet.clock_mhz <= 2700
    assert sheet.l2_mib is None or 3 <= sheet.l2_mib <= 256
    assert 20 < max(sheet.flops_per_sec.values()) / sheet.memory_bytes_per_sec < (600 if sheet.kind == "tpu" else 450)
    assert 8 < sheet.flops_per_sec.get("fp32", 50 * sheet.memory_bytes_per_sec) / sheet.memory_bytes_per_sec < 110
    assert sheet.source["name"] and 2016 <= int(sheet.source["date"]) <= 2026


@each_card
def test_the_fp32_peak_is_that_of_the_lanes_at_the_boost_clock(card: Datasheet):
    assert card.sms and card.cores_per_sm and card.clock_mhz and card.l2_mib and card.tdp_w
    peak = 2e6 * card.sms * card.cores_per_sm * card.clock_mhz
    assert card.flops_per_sec["fp32"] == pytest.approx(peak, rel=0.02)


def test_what_apple_does_not_state_follows_from_the_cores():
    """128 lanes a GPU core; the clocks are those of the generation (1.28 to 1.68 GHz)."""
    for sheet in DEVICES:
        if sheet.kind == "mps":
            assert 1.25e9 < sheet.flops_per_sec["fp32"] / (2 * sheet.cores_per_sm * sheet.sms) < 1.7e9, sheet.names


@each_card
def test_fewer_bits_are_at_least_as_fast(card: Datasheet):
    peaks = card.flops_per_sec
    order = [peaks[name] for name in ("fp64", "fp32", "tf32", "bf16") if name in peaks]
    assert order == sorted(order)
    assert peaks.get("bf16", peaks["fp16"]) == peaks["fp16"]
    assert ("bf16" in peaks) == ("tf32" in peaks)
    if "tf32" in peaks:
        assert peaks["bf16"] == pytest.approx(2 * peaks["tf32"], rel=0.02)  # as the tensor cores of each generation do


@pytest.mark.parametrize(
    ("names", "ratio"),
    [
        (["Tesla T4", "Tesla V100-SXM2-16GB", "Tesla V100-PCIE-32GB"], 8),
        (["Tesla P100-PCIE-16GB"], 2),
        (["A100-SXM4-40GB", "A100-SXM4-80GB", "A100-PCIE-40GB", "A100 80GB PCIe"], 16),
        (["A10", "L4", "L40S"], 4),
        (["GeForce RTX 3060", "GeForce RTX 3090", "GeForce RTX 4070", "GeForce RTX 5090"], 2),  # float32 accumulation
        (["H100 80GB HBM3", "H100 PCIe", "H100 NVL", "H200", "H200 NVL"], 14.5),  # tensor cores have another clock
        (["B200"], 30),
    ],
)
def test_no_peak_is_a_sparse_one(names, ratio):
    for name in names:
        peaks = datasheets()[name].flops_per_sec
        assert peaks["fp16"] / peaks["fp32"] == pytest.approx(ratio, rel=0.05), name
