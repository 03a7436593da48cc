"""What workers that are started anew are sent: whether a dataset and a collate function can be, and what in them cannot.

Where workers are forked, they inherit these. Where they are started by `spawn` or `forkserver`, they get them pickled.
"""

import inspect
import io
import pickle
from multiprocessing import reduction
from pathlib import Path
from typing import Any

import numpy
import torch
from lightning import Trainer
from torch.utils.data import DataLoader

from ..errors import UserError

_BULK = (torch.Tensor, torch.UntypedStorage, numpy.ndarray)  # of which each can be sent
_TRAINER = "the Trainer, which a method of the data brings along: write a static method or a function in place of it"


def check_sendable(loader: DataLoader, alone: str = "data.num_workers=0") -> None:
    """Raise UserError if a DataLoader's workers are to be sent what cannot be pickled; it names the object.

    `alone` is what to write for no workers. Tensors and arrays are left out, so that this takes little time.
    """
    context: Any = loader.multiprocessing_context or torch.multiprocessing
    if not loader.num_workers or context.get_start_method() == "fork":
        return
    for sent in (loader.dataset, loader.collate_fn, loader.worker_init_fn):
        pickler = _Pickler()
        try:
            pickler.dump(sent)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            what = _TRAINER if pickler.has_trainer else _named(pickler.last)
            raise UserError(f"data: worker processes cannot be sent {what}, or write {alone}") from error
        except Exception:  # noqa: BLE001, S112 - such as a queue, which can be sent while a process is started, not before
            continue


class _Pickler(reduction.ForkingPickler):
    """Pickles into nothing. `last` is the object with which it began last: the one at fault, if it fails."""

    last: Any = None
    has_trainer = False

    def __init__(self) -> None:
        super().__init__(_Nowhere())

    def reducer_override(self, obj: Any) -> Any:
        self.last = obj
        self.has_trainer |= isinstance(obj, Trainer)
        return (int, ()) if isinstance(obj, _BULK) else NotImplemented


class _Nowhere(io.RawIOBase):
    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        return len(data)


def _named(thing: Any) -> str:
    """What cannot be sent, and what to do: `the function Own.make.<locals>.<lambda> (own.py:12): define it …`."""
    if inspect.isfunction(thing):
        place = f"{Path(thing.__code__.co_filename).name}:{thing.__code__.co_firstlineno}"
        return f"the function {thing.__qualname__} ({place}): define it with a name at its module's top level"
    if inspect.isclass(thing):
        return f"the class {thing.__module__}.{thing.__qualname__}: define it at its module's top level"
    kind = type(thing)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"an object of {name}: make it in __getitem__"
