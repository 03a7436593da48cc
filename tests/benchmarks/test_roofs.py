"""`benchmarks/roofs.py`: each layer does as many FLOPs as it says."""

import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import roofs


@pytest.mark.slow
def test_layers_do_as_many_flops_as_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofs, "random", lambda *shape: torch.empty(shape, device="meta"))
    monkeypatch.setattr(roofs, "BATCHES", (1, 8))
    for name, flops, inside, make in roofs.layers():
        with FlopCounterMode(display=False) as counter:
            make()()
        assert counter.get_total_flops() == flops, name
        assert 0 < inside <= 1


@pytest.mark.parametrize(("size", "inside"), [(1, 1 / 9), (2, 4 / 9)])
def test_taps_in_the_padding_are_told_apart(size: int, inside: float) -> None:
    shares = [share for name, _, share, _ in roofs.layers() if f"×{size}×{size} →" in name]
    assert shares == [pytest.approx(inside)] * len(shares) and shares
