"""Workers of a DataLoader: what is pickled to them, their random seeds, their errors, and their signal handlers."""

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
from .._torch import is_allocation_error
from ..errors import DataError, UserError, in_one_line

# The folders of Python, of installed packages and of this package.
_LIBRARY_PATHS = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_LIBRARY_PATHS += (str(Path(__file__).parents[1]),)


class _Pickler(reduction.ForkingPickler):
    """A pickler that skips tensors and arrays: they can be pickled, and take long."""

    def reducer_override(self, obj: Any) -> Any:
        is_bulk = isinstance(obj, torch.Tensor | torch.UntypedStorage | numpy.ndarray)
        return (int, ()) if is_bulk else NotImplemented


def check_sendable(loader: DataLoader, without_workers: str = "data.num_workers=0") -> None:
    """Raise UserError if an object cannot be pickled to a DataLoader's workers; `without_workers` is the way around it.

    Forked workers inherit the dataset. Workers that are started by `spawn` or `forkserver` get it pickled.
    """
    context: Any = loader.multiprocessing_context or torch.multiprocessing
    if not loader.num_workers or context.get_start_method() == "fork":
        return
    for obj in (loader.dataset, loader.collate_fn, loader.worker_init_fn):
        try:
            with open(os.devnull, "wb") as null:
                _Pickler(null).dump(obj)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UserError(
                f"data: worker processes cannot be sent the data: {in_one_line(error)}; define functions and classes at their "
                f"module's top level, make other objects in __getitem__, or write {without_workers}"
            ) from error
        except Exception:  # noqa: BLE001, S112 - for example, a queue can be pickled only while a process starts
            continue


def raise_user_errors(batches: Any) -> Iterator[Any]:
    """Yield the batches of a DataLoader; raise those that are UserErrors, without the traceback that torch adds."""
    try:
        for batch in batches:
            if isinstance(batch, UserError):
                raise batch
            yield batch
    except (ConnectionError, EOFError) as error:  # a worker was killed, which torch may not have noticed yet
        raise RuntimeError("DataLoader worker (pid unknown) ended while it sent a batch") from error


def data_error(problem: str, error: Exception) -> Exception:
    """Return an error of a user's code or file as one line, which names the innermost frame of that code, or else of a
    library. A note has the traceback. Return a UserError, and a lack of memory, as it is.
    """
    if isinstance(error, UserError) or is_allocation_error(error):
        return error
    frames: list[traceback.FrameSummary] = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in frames if not frame.filename.startswith(_LIBRARY_PATHS)] or frames
    location = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    user_error = DataError(f"data: {problem}: {in_one_line(error)}{location}")
    user_error.add_note("".join(traceback.format_exception(error)))  # a worker's exception arrives without its cause
    return user_error


def share_memory(batch: Any) -> Any:
    """Move the tensors of a worker's batch to shared memory, if they are not there already.

    Otherwise the thread that sends the batch would move them. If the system then refuses the memory, the thread only
    prints a traceback, and the training process waits forever.
    """
    return tree_map_only(torch.Tensor, torch.Tensor.share_memory_, batch)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the generators of Python, numpy and torch on the CPU; outside of a worker, restore their states."""
    raised: BaseException | None = None
    with nullcontext() if get_worker_info() else isolate_rng(include_cuda=False):
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - after an exception isolate_rng restores nothing
            raised = error
    if raised is not None:
        raise raised


def start_worker(worker: int) -> None:
    """Initialize a worker: ignore the signals that the training process handles, and end with the training process.

    At a signal to all processes of a run, such as Ctrl-C or a job manager's SIGTERM, the training process finishes its
    step, which fails if a worker has ended. The training process itself ends its workers by SIGTERM. torch's workers
    watch their parent, which is the server under the start method `forkserver`: after the training process is killed,
    they would wait forever.
    """
    for signum in {*STOPPING, *signals_named("SIGUSR1")} - {signal.SIGTERM}:
        signal.signal(signum, lambda signum, frame: None)
    parent = parent_process()
    assert parent is not None, "a worker has a parent process"

    def end_with_parent() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    end_at_sigterm_of(parent.pid or 0)  # with code 0, because torch takes any other code for a failure of the worker
    threading.Thread(target=end_with_parent, daemon=True).start()
