"""Processes that load samples: what they are sent, their random numbers, their errors, and the signals that they leave to the
training process.
"""

import os
import pickle
import random
import signal
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing import connection, parent_process, reduction
from pathlib import Path
from typing import Any

import numpy
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, get_worker_info

from .._system import STOPPING, end_at_sigterm_of, signals_named
from ..errors import DataError, UserError, in_one_line

# Where the code of Python, of installed packages and of this package lies.
_NOT_THEIRS = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_NOT_THEIRS += (str(Path(__file__).parents[1]),)


class _Pickler(reduction.ForkingPickler):
    """Leaves out tensors and arrays, which can be sent, so that it takes little time."""

    def reducer_override(self, obj: Any) -> Any:
        is_bulk = isinstance(obj, torch.Tensor | torch.UntypedStorage | numpy.ndarray)
        return (int, ()) if is_bulk else NotImplemented


def check_sendable(loader: DataLoader, alone: str = "data.num_workers=0") -> None:
    """Raise UserError if a DataLoader's workers are to be sent what cannot be pickled; `alone` is what to write for none.

    Where workers are forked, they inherit the dataset. Where they are started by `spawn` or `forkserver`, they get it pickled.
    """
    context: Any = loader.multiprocessing_context or torch.multiprocessing
    if not loader.num_workers or context.get_start_method() == "fork":
        return
    for sent in (loader.dataset, loader.collate_fn, loader.worker_init_fn):
        try:
            with open(os.devnull, "wb") as nowhere:
                _Pickler(nowhere).dump(sent)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UserError(
                f"data: worker processes cannot be sent the data: {in_one_line(error)}; define functions and classes at their "
                f"module's top level, make other objects in __getitem__, or write {alone}"
            ) from error
        except Exception:  # noqa: BLE001, S112 - such as a queue, which can be sent while a process is started, not before
            continue


def raised(items: Any) -> Iterator[Any]:
    """The items of a DataLoader; one that is a UserError is raised, without the traceback that torch would add to it."""
    try:
        for item in items:
            if isinstance(item, UserError):
                raise item
            yield item
    except (ConnectionError, EOFError) as error:  # torch may not see yet that the worker at the other end was killed
        raise RuntimeError("DataLoader worker (pid unknown) ended while it sent a batch") from error


def data_error(what: str, error: Exception) -> UserError:
    """The error of a user's code or file as one line, with the last place in that code, or else in a library; the traceback
    is a note of it.
    """
    if isinstance(error, UserError):
        return error
    frames = traceback.extract_tb(error.__traceback__)
    last = [frame for frame in frames if not frame.filename.startswith(_NOT_THEIRS)] or frames
    place = f" ({Path(last[-1].filename).name}:{last[-1].lineno})" if last else ""
    answer = DataError(f"data: {what}: {in_one_line(error)}{place}")
    answer.add_note("".join(traceback.format_exception(error)))  # a worker's exception arrives without its cause
    return answer


def share(batch: Any) -> Any:
    """A worker's batch with its tensors in shared memory, where some of them may be already.

    The thread that sends a batch would move them there. Where the system refuses, it prints a traceback, and the training
    process waits for ever.
    """
    return tree_map_only(torch.Tensor, torch.Tensor.share_memory_, batch)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the random numbers of Python, numpy and torch on the CPU; outside of a worker their states are restored."""
    failed: BaseException | None = None
    with nullcontext() if get_worker_info() else isolate_rng(include_cuda=False):
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - after which Lightning's would restore nothing
            failed = error
    if failed is not None:
        raise failed


def start_worker(worker: int) -> None:
    """What a worker does first: it leaves the signals of a run to the training process, and ends with it.

    At a signal to all processes of a run, such as Ctrl-C or a job manager's SIGTERM, the training process finishes its
    step, and a worker that has ended would make that fail. The training process itself ends its workers by SIGTERM. torch's workers watch their parent, which
    under the start method `forkserver` is the server: those of a killed training process would wait forever.
    """
    for number in {*STOPPING, *signals_named("SIGUSR1")} - {signal.SIGTERM}:
        signal.signal(number, lambda number, frame: None)
    parent = parent_process()
    assert parent is not None, "a worker has a parent process"

    def end_with_parent() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    end_at_sigterm_of(parent.pid or 0)  # with code 0: torch takes another one for a failure of the worker
    threading.Thread(target=end_with_parent, daemon=True).start()
