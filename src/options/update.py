"""The option `global_batch_size`: how many batches an update takes so that it holds this many samples."""

from collections.abc import Mapping
from typing import Any

from ..errors import UserError


def ranks_asked(config: Mapping[str, Any]) -> int | None:
    """The processes that a configuration asks for; None where the machine decides."""
    devices, nodes = config["trainer"].get("devices"), config["trainer"].get("num_nodes") or 1
    count = len(devices) if isinstance(devices, list) else devices
    return count * nodes if isinstance(count, int) and count > 0 else None


def batches_of_update(config: Mapping[str, Any], ranks: int, finds_size: bool = False) -> int:
    """The batches that each of so many ranks accumulates for an update; of a search that `finds_size`, 2 for some number.

    UserError where `global_batch_size` is no multiple of a batch of all ranks, or something else decides, too.
    """
    asked, size = config.get("global_batch_size"), config["data"].get("batch_size")
    accumulated = config["trainer"].get("accumulate_grad_batches") or 1
    if asked is None:
        return accumulated
    if accumulated > 1:
        raise UserError(
            f"trainer.accumulate_grad_batches: got {accumulated}, and global_batch_size={asked} decides it; "
            "leave one out"
        )
    if size is None:
        raise UserError(f"global_batch_size: got {asked}, and the data have no data.batch_size to fill it with")
    if type(size) is not int or size < 1:
        raise UserError(f"data.batch_size: got {size!r}, takes a whole number of at least 1")
    _refuse_fewer(asked, ranks)
    if finds_size:
        return 2
    together = size * ranks
    if asked % together:
        nearest = max(1, round(asked / together)) * together
        each = f" on {ranks} devices" if ranks > 1 else ""
        raise UserError(
            f"global_batch_size: got {asked}, takes a multiple of {together} (data.batch_size={size}{each}), such as "
            f"{nearest}"
        )
    return asked // together


def largest_part(config: Mapping[str, Any], ranks: int, most: int) -> int:
    """The largest batch size of a rank, up to `most`, that `global_batch_size` is a multiple of; `most` without one."""
    if config.get("global_batch_size") is None:
        return most
    _refuse_fewer(config["global_batch_size"], ranks)
    whole = config["global_batch_size"] // ranks
    return next(size for size in range(min(most, whole), 0, -1) if whole % size == 0)


def _refuse_fewer(asked: int, ranks: int) -> None:
    if asked < ranks:
        raise UserError(f"global_batch_size: got {asked}, takes at least a sample for each of {ranks} devices")
