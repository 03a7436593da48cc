"""ScriptRecord: measures a Trainer of anybody's script, and leaves the record of its run (`batchscope run`)."""

import contextlib
import os
import re
import sys
from itertools import takewhile
from multiprocessing import parent_process
from pathlib import Path
from typing import Any, cast

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from .._lightning import callbacks_of, fits_in_children, logged_step
from .._system import command_line
from ..callbacks._never_raise import never_raise
from ..callbacks._setting import samples_of_epoch
from ..callbacks.device import DeviceMonitor
from ..callbacks.throughput import ThroughputMonitor
from ..data.plain import PlainData
from ..errors import warn
from ..files import new_folder, numbered
from ..hardware.devices import cores_and_threads, describe
from ..records.read import read_if_there
from ..records.run_record import RunRecord, Status, close_open, ended_as, reason
from ..records.values import at, is_limit
from . import summary

_FLAG = re.compile(r"--?([A-Za-z][\w.-]*)")
_OPTION = re.compile(r"[+~]*([A-Za-z_][\w./@-]*)")  # as Hydra's


class ScriptRecord(Callback):
    """Adds the monitors that a Trainer does not have, and records each of its fits.

    Args:
        folder: of the first fit of the script, in whichever process; the second one has the folder `<folder>-2`.
    """

    def __init__(self, folder: Path):
        self.first_folder = self.folder = folder
        self._record: RunRecord | None = None

    @override
    @never_raise
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if trainer.barebones:
            warn("Trainer(barebones=True): nothing is measured")
            return
        own = callbacks_of(trainer)
        kinds = (DeviceMonitor, ThroughputMonitor)
        missing = [kind() for kind in kinds if not any(isinstance(one, kind) for one in own)]
        # Lightning is calling `setup` of these callbacks in their order, and comes to the new ones next.
        at = own.index(self) + 1
        own[at:at] = missing

    @override
    @never_raise
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.barebones:
            return
        first = trainer.is_global_zero
        place = trainer.strategy.broadcast(_claimed(self.first_folder) if first else self.first_folder)
        if isinstance(place, OSError):
            raise place
        self.folder = place
        script, datamodule = Path(sys.argv[0]).name, cast(Any, trainer).datamodule
        facts: dict[str, Any] = {
            "name": script,
            "command": command_line(["batchscope", "run", *sys.argv]),
            "overrides": sys.argv[1:],
            "choices": {"model": type(pl_module).__name__},
            "config": {
                "script": script,
                "data": {"arguments": arguments(sys.argv[1:])},
                "trainer": {
                    "accumulate_grad_batches": trainer.accumulate_grad_batches,
                    "precision": trainer.precision,
                    **({"limit_train_batches": limit} if is_limit(limit := trainer.limit_train_batches) else {}),
                },
            },
            "hardware": describe(trainer.strategy.root_device),
            "processes": trainer.world_size,
            "model": {"class": type(pl_module).__name__, "parameters": summary.parameters(pl_module)},
            "dataset": {"name": "a script's data" if datamodule is None else type(datamodule).__name__},
            **({"started_by": parent.pid} if (parent := parent_process()) else {}),
        }
        self._record = RunRecord(self.folder, enabled=first, **facts)
        self._record.__enter__()
        self._record.begin()

    @override
    @never_raise
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        record = self._record
        if record is None:
            return
        found = summary.callback_facts(trainer)
        # A schedule of accumulation sets it once an epoch begins.
        record.facts["config"]["trainer"]["accumulate_grad_batches"] = trainer.accumulate_grad_batches
        measured = found.get("throughput", {})
        size = measured.get("batch_size")
        if size and not measured.get("batch_size_varies"):  # a mean is no option
            config = record.facts["config"]
            given = config["data"]["arguments"]
            given = {k: v for k, v in given.items() if not (v == str(size) and _names_batch_size(k))}
            record.facts["config"] = {**config, "data": {"batch_size": size, "arguments": given}}
        fit = {"epochs": summary.whole_epochs(trainer), "steps": logged_step(trainer)}
        fit |= {"model": record.facts["model"] | {"parameters": summary.parameters(pl_module)}}
        fit |= {"hardware": record.facts["hardware"] | cores_and_threads()}
        samples = samples_of_epoch(trainer) or _samples_said(trainer)
        dataset = record.facts["dataset"] | ({"train_samples": samples} if samples else {})
        record.add(**found, **fit, metrics=summary.last_metrics(trainer), dataset=dataset)
        summary.write_steps(trainer, self.folder)
        record.__exit__(None, None, None)
        self._record = None
        if trainer.is_global_zero:
            print(f"files   {self.folder}", flush=True)

    @override
    @never_raise
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._record is not None:
            self._record.__exit__(type(exception), exception, exception.__traceback__)
            self._record = None
        elif fits_in_children(trainer):  # the record has begun there, where no callback hears of the exception
            said = str(exception).strip().rpartition("\n")[2]  # of a traceback the last line
            is_killed = getattr(exception, "signal_name", None) in ("SIGKILL", "SIGTERM", "SIGINT")
            ended: Status = "killed" if is_killed else ended_as(exception)
            ended = "out_of_memory" if said.partition(":")[0].endswith("MemoryError") else ended
            for folder in takewhile(Path.is_dir, numbered(self.first_folder)):
                if at(read_if_there(folder), "started_by") == os.getpid():  # others may still run
                    close_open(folder, ended, said or reason(exception))

    def disable(self) -> None:
        """Record nothing more; a run that has begun is recorded as failed by the exception that is being handled."""
        record, self._record = self._record, None
        if record is not None:
            with contextlib.suppress(Exception):
                record.__exit__(*sys.exc_info())


def _claimed(folder: Path) -> Path | OSError:
    """A new folder, or why there is none, which every rank has to know."""
    try:
        return new_folder(folder)
    except OSError as error:
        return error


def _samples_said(trainer: Trainer) -> int | None:
    """The training samples that a DataModule says it has, by `num_samples(split)`; None where it does not."""
    datamodule = cast(Any, trainer).datamodule
    if datamodule is not None and trainer.world_size == 1:  # with several, it may count those of a rank
        with contextlib.suppress(Exception):  # the name may mean anything
            return PlainData(datamodule).num_samples("train")
    return None


def _names_batch_size(flag: str) -> bool:
    return "batch" in flag or flag in ("b", "bs")


def arguments(words: list[str]) -> dict[str, str]:
    """A script's arguments with their values: `--lr=0.1`, `--lr 0.1` and `lr=0.1` as `lr: 0.1`, a switch as `true`.

    Words without a name are numbered: `word_1`.
    """
    found: dict[str, str] = {}
    flag = ""  # that the word before was, and which may have a value
    for word in words:
        name, is_pair, value = word.partition("=")
        before, flag = flag, ""
        if match := _FLAG.fullmatch(name):
            flag = "" if is_pair else match[1].replace("-", "_")
            found[match[1].replace("-", "_")] = value if is_pair else "true"
        elif before:
            found[before] = word
        elif is_pair and (match := _OPTION.fullmatch(name)):
            found[match[1]] = value
        else:
            found[f"word_{sum(key.startswith('word_') for key in found) + 1}"] = word
    return found
