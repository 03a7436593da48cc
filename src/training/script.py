"""ScriptRecord: measures a Trainer of a user's script, and writes the record of its run (`batchscope run`)."""

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
from ..callbacks._setting import count_epoch_samples
from ..callbacks.device import DeviceMonitor
from ..callbacks.throughput import ThroughputMonitor
from ..data.plain import PlainData
from ..errors import warn
from ..files import new_folder, numbered
from ..hardware.devices import cores_and_threads, describe
from ..records.read import read_or_empty
from ..records.run_record import RunRecord, Status, ended_as, error_text, record_missing_end
from ..records.values import at, is_limit
from . import summary

_FLAG = re.compile(r"--?([A-Za-z][\w.-]*)")
_BATCH_SIZE = re.compile(r"(^|[_.])(batch_?size|batch|bs|b)$")  # names of flags, such as `train_batch_size`
_OPTION = re.compile(r"[+~]*([A-Za-z_][\w./@-]*)")  # in Hydra's syntax


class ScriptRecord(Callback):
    """Adds the monitors that a Trainer lacks, and records each fit of the Trainer.

    Args:
        folder: the folder of the script's first fit, in whichever process; the second fit has the folder `<folder>-2`.
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
        callbacks = callbacks_of(trainer)
        kinds = (DeviceMonitor, ThroughputMonitor)
        missing = [kind() for kind in kinds if not any(isinstance(callback, kind) for callback in callbacks)]
        # Lightning is calling `setup` of these callbacks in their order, and comes to the new callbacks next.
        index = callbacks.index(self) + 1
        callbacks[index:index] = missing

    @override
    @never_raise
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.barebones:
            return
        is_first_rank = trainer.is_global_zero
        folder = trainer.strategy.broadcast(_make_folder(self.first_folder) if is_first_rank else self.first_folder)
        if isinstance(folder, OSError):
            raise folder
        self.folder = folder
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
        self._record = RunRecord(self.folder, enabled=is_first_rank, **facts)
        self._record.__enter__()
        self._record.begin()

    @override
    @never_raise
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        record = self._record
        if record is None:
            return
        callback_facts = summary.callback_facts(trainer)
        # A schedule of accumulation sets the number once an epoch begins.
        record.facts["config"]["trainer"]["accumulate_grad_batches"] = trainer.accumulate_grad_batches
        throughput = callback_facts.get("throughput", {})
        size = throughput.get("batch_size")
        if size and not throughput.get("batch_size_varies"):  # a mean batch size is no option
            config = record.facts["config"]
            words_by_name = config["data"]["arguments"]
            others = {k: v for k, v in words_by_name.items() if not (v == str(size) and _BATCH_SIZE.search(k))}
            record.facts["config"] = {**config, "data": {"batch_size": size, "arguments": others}}
        fit_facts = {"epochs": summary.full_epochs(trainer), "steps": logged_step(trainer)}
        fit_facts |= {"model": record.facts["model"] | {"parameters": summary.parameters(pl_module)}}
        fit_facts |= {"hardware": record.facts["hardware"] | cores_and_threads()}
        samples = count_epoch_samples(trainer) or _declared_samples(trainer)
        dataset = record.facts["dataset"] | ({"train_samples": samples} if samples else {})
        record.add(**callback_facts, **fit_facts, metrics=summary.last_metrics(trainer), dataset=dataset)
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
        elif fits_in_children(trainer):  # a child process has the record, and Lightning calls no `on_exception` there
            last_line = str(exception).strip().rpartition("\n")[2]  # the message may be a traceback
            is_killed = getattr(exception, "signal_name", None) in ("SIGKILL", "SIGTERM", "SIGINT")
            status: Status = "killed" if is_killed else ended_as(exception)
            status = "out_of_memory" if last_line.partition(":")[0].endswith("MemoryError") else status
            for folder in takewhile(Path.is_dir, numbered(self.first_folder)):
                if at(read_or_empty(folder), "started_by") == os.getpid():  # runs of other processes may go on
                    record_missing_end(folder, status, last_line or error_text(exception))

    def disable(self) -> None:
        """Record nothing more; a run that has begun is recorded as failed by the exception that is being handled."""
        record, self._record = self._record, None
        if record is not None:
            with contextlib.suppress(Exception):
                record.__exit__(*sys.exc_info())


def _make_folder(folder: Path) -> Path | OSError:
    """Make and return a new folder; return the OSError if that fails, because every rank has to raise it."""
    try:
        return new_folder(folder)
    except OSError as error:
        return error


def _declared_samples(trainer: Trainer) -> int | None:
    """Return the number of training samples by a datamodule's `num_samples(split)`; None if it has no such method."""
    datamodule = cast(Any, trainer).datamodule
    if datamodule is not None and trainer.world_size == 1:  # with several ranks it may count the samples of one rank
        with contextlib.suppress(Exception):  # a method of this name may do anything
            return PlainData(datamodule).num_samples("train")
    return None


def arguments(words: list[str]) -> dict[str, str]:
    """Parse a script's arguments: `--lr=0.1`, `--lr 0.1` and `lr=0.1` become `lr: 0.1`, a switch becomes `true`.

    Words without a name are numbered: `word_1`.
    """
    parsed: dict[str, str] = {}
    flag = ""  # a flag without `=`, whose value may be the next word
    for word in words:
        name, is_pair, value = word.partition("=")
        previous_flag, flag = flag, ""
        if match := _FLAG.fullmatch(name):
            flag = "" if is_pair else match[1].replace("-", "_")
            parsed[match[1].replace("-", "_")] = value if is_pair else "true"
        elif is_pair and (match := _OPTION.fullmatch(name)):
            parsed[match[1]] = value
        elif previous_flag:
            parsed[previous_flag] = word
        else:
            parsed[f"word_{sum(key.startswith('word_') for key in parsed) + 1}"] = word
    return parsed
