"""Which files the Checkpoints callback keeps, and what is in them."""

from pathlib import Path

import pytest
import torch

from tests.support.runs import last, record, run


def test_what_a_killed_run_left_half_written_is_removed(killed: Path) -> None:
    half = killed / "out" / "checkpoints" / ".last.ckpt.123.tmp"
    half.write_bytes(b"half")
    run(killed, "resume=out")
    assert sorted(p.name for p in half.parent.iterdir()) == ["best.ckpt", "last.ckpt"]


@pytest.mark.slow
def test_without_its_best_checkpoint_a_run_keeps_the_best_of_what_follows(killed: Path) -> None:
    (killed / "out" / "checkpoints" / "best.ckpt").unlink()
    done = run(killed, "resume=out")
    assert done.end() == 0, done.complained
    assert record(killed / "out")["checkpoints"]["best"] == "checkpoints/best.ckpt"


def test_what_is_saved_is_tensors_and_plain_values(interrupted: Path) -> None:
    def check(node: object, where: str) -> None:
        assert type(node) in (dict, list, tuple, int, float, str, bool, type(None), torch.Tensor) or hasattr(
            node, "move_to_end"
        ), f"{where} is a {type(node)}"
        children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list | tuple) else ()
        for key, child in children:
            check(child, f"{where}.{key}")

    check(last(interrupted / "out"), "checkpoint")
