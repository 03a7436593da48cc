"""The datasheets of cards: dense peaks in plausible units, found by the exact name that torch reports."""

import dataclasses

import pytest
import torch
from lightning.fabric.utilities.throughput import _CUDA_FLOPS
from torch import nn

from batchscope._torch import float32_computed_as
from batchscope.hardware.calibration import PRECISIONS
from batchscope.hardware.datasheet import Datasheet, datasheet, datasheet_peak, datasheets

CARDS = list({card.names: card for card in datasheets().values()}.values())
each_card = pytest.mark.parametrize("card", CARDS, ids=lambda card: card.names[0])


@pytest.mark.parametrize(
    ("name", "memory_gib", "tdp_w"),
    [
        ("Tesla T4", 16, 70),
        ("NVIDIA A10", 24, 150),
        ("NVIDIA A100-SXM4-40GB", 40, 400),
        ("A100-SXM4-40GB", 40, 400),  # an old driver
        ("NVIDIA A100-SXM4-80GB", 80, 400),
        ("NVIDIA A100-PCIE-40GB", 40, 250),
        ("NVIDIA A100 80GB PCIe", 80, 300),
        ("NVIDIA L4", 24, 72),
        ("NVIDIA L40S", 48, 350),
        ("NVIDIA H100 80GB HBM3", 80, 700),
        ("NVIDIA H100 PCIe", 80, 350),
        ("NVIDIA H100 NVL", 94, 400),
        ("NVIDIA H200", 141, 700),
        ("NVIDIA H200 NVL", 141, 600),
        ("NVIDIA B200", 180, 1000),
        ("NVIDIA GeForce RTX 3090", 24, 350),
        ("NVIDIA GeForce RTX 4090", 24, 450),
        ("NVIDIA GeForce RTX 5090", 32, 575),
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
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",  # another chip
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA A10G",  # other clocks than the A10, and no datasheet
        "NVIDIA L40",
        "NVIDIA GH200 480GB",
        "NVIDIA H100",
        "NVIDIA NVIDIA L4",
        "nvidia l4",
        "AMD Instinct MI300X",
        "AMD EPYC",
        "",
    ],
)
def test_a_name_that_is_not_exactly_a_cards_has_no_datasheet(name):
    assert datasheet(name) is None
    assert datasheet_peak(name, "32-true") is None


def test_no_two_cards_have_the_same_name():
    assert sum(len(card.names) for card in CARDS) == len(datasheets())


@each_card
def test_units_are_bytes_flops_and_watts(card: Datasheet):
    assert 8 <= card.memory_gib <= 512
    assert 1e11 < card.memory_bytes_per_sec < 1e13
    assert set(card.flops_per_sec) <= set(PRECISIONS)
    assert all(isinstance(peak, float) and 1e11 < peak < 1e16 for peak in card.flops_per_sec.values())
    assert 50 <= card.tdp_w <= 1500 and 20 <= card.sms <= 200
    assert card.source["name"] and 2018 <= int(card.source["date"]) <= 2026


@each_card
def test_the_clock_that_the_fp32_peak_asks_for_exists(card: Datasheet):
    lanes = 64 if card.names[0].startswith(("A100", "Tesla T4")) else 128  # of a multiprocessor
    assert 1.2e9 < card.flops_per_sec["fp32"] / (2 * lanes * card.sms) < 2.7e9


@each_card
def test_fewer_bits_are_at_least_as_fast(card: Datasheet):
    peaks = card.flops_per_sec
    order = [peaks[name] for name in ("fp64", "fp32", "tf32", "bf16") if name in peaks]
    assert order == sorted(order)
    assert peaks.get("bf16", peaks["fp16"]) == peaks["fp16"]
    assert ("bf16" in peaks) == ("tf32" in peaks)
    if "tf32" in peaks:
        assert peaks["bf16"] == pytest.approx(2 * peaks["tf32"], rel=0.02)  # as the tensor cores of each generation do


@each_card
def test_half_precision_has_a_plausible_balance_of_arithmetic_and_memory(card: Datasheet):
    assert 50 < card.flops_per_sec["fp16"] / card.memory_bytes_per_sec < 450  # a sparse peak has up to 840


@pytest.mark.parametrize(
    ("names", "ratio"),
    [
        (["Tesla T4"], 8),
        (["A100-SXM4-40GB", "A100-SXM4-80GB", "A100-PCIE-40GB", "A100 80GB PCIe"], 16),
        (["A10", "L4", "L40S"], 4),
        (["GeForce RTX 3090", "GeForce RTX 4090", "GeForce RTX 5090"], 2),  # half the rate with float32 accumulation
        (["H100 80GB HBM3", "H100 PCIe", "H100 NVL", "H200", "H200 NVL"], 14.5),  # tensor cores have another clock
        (["B200"], 30),
    ],
)
def test_no_peak_is_a_sparse_one(names, ratio):
    for name in names:
        peaks = datasheets()[name].flops_per_sec
        assert peaks["fp16"] / peaks["fp32"] == pytest.approx(ratio, rel=0.05), name


LIGHTNINGS = {"fp32": torch.float32, "tf32": "tfloat32", "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize(
    ("name", "row", "precisions"),
    [
        ("Tesla T4", "t4", ["fp32", "fp16"]),
        ("A10", "a10g", ["fp32", "tf32", "bf16", "fp16"]),  # the A10's numbers, in the row of another card
        ("A100-SXM4-80GB", "a100", ["fp32", "tf32", "bf16", "fp16"]),
        ("L4", "l4", ["fp32", "tf32", "bf16", "fp16"]),
        ("GeForce RTX 3090", "rtx 3090", ["fp32", "tf32"]),  # bf16 and fp16 are those without tensor cores
        ("GeForce RTX 4090", "rtx 4090", ["fp32", "tf32"]),
        ("H100 80GB HBM3", "h100 sxm", ["fp32", "tf32", "bf16", "fp16"]),
        ("H100 PCIe", "h100 pcie", ["fp32", "tf32", "bf16", "fp16"]),
        ("H200", "h200 sxm1", ["fp32"]),  # the others are sparse
        ("H200 NVL", "h200 nvl1", ["fp32"]),
    ],
)
def test_peaks_agree_with_lightnings_table_where_that_is_right(name, row, precisions):
    for precision in precisions:
        stated = _CUDA_FLOPS[row][LIGHTNINGS[precision]]
        assert datasheets()[name].flops_per_sec[precision] == pytest.approx(stated, rel=0.01), precision


@pytest.mark.parametrize(
    ("precision", "peak"),
    [("bf16-mixed", 989.4e12), ("16-true", 989.4e12), ("64-true", 66.9e12), ("transformer-engine", None)],
)
def test_the_peak_is_that_of_the_precision(precision, peak):
    assert datasheet_peak("NVIDIA H100 80GB HBM3", precision) == peak


def test_a_precision_without_hardware_has_no_peak():
    assert datasheet_peak("Tesla T4", "bf16-true") is None
    assert datasheet_peak("Tesla T4", "16-mixed") == 65e12


@pytest.mark.parametrize(("form", "peak"), [("ieee", 66.9e12), ("tf32", 494.7e12)])
def test_torchs_switches_decide_between_fp32_and_tf32(form, peak):
    with float32_computed_as(form):
        assert datasheet_peak("NVIDIA H200", "32-true", nn.Linear(1, 1)) == peak


def test_facts_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        CARDS[0].sms = 1
