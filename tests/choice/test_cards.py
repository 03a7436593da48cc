"""The cards by their names: short ones, those that torch reports, and unknown ones with the nearest known."""

import pytest

from batchscope.choice.cards import card_names, find_card
from batchscope.errors import UserError


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("T4", "Tesla T4"),
        ("a100", "A100-SXM4-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
        ("RTX-4090", "GeForce RTX 4090"),
        ("geforce rtx4090", "GeForce RTX 4090"),
        ("nvidia-tesla-t4", "Tesla T4"),
    ],
)
def test_a_card_is_found_by_its_short_and_by_its_whole_name(name, found):
    assert find_card(name).names[0] == found


def test_every_short_name_is_a_card_whose_datasheet_has_no_gaps():
    for name in card_names():
        card = find_card(name)
        assert card.kind == "cuda" and "fp32" in card.flops_per_sec
        assert all((card.sms, card.cores_per_sm, card.l2_mib, card.tdp_w))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("h10", "--devices: got 'h10', which is no known card. Did you mean 'h100'?"),
        ("mi300x", "--devices: got 'mi300x', which is no card of NVIDIA's, and no other maker's kernels"),
    ],
)
def test_what_is_no_card_is_one_line(name, said):
    with pytest.raises(UserError) as refused:
        find_card(name)
    assert str(refused.value).startswith(said)
