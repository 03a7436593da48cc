"""Which changes a diagnosis tries: those that exist, differ from what is set, and can have an effect here."""

from pathlib import Path
from typing import Any

import pytest

from batchscope.analysis.run import Run
from batchscope.options.check import check_config
from batchscope.options.compose import apply_overrides, check_command_line
from batchscope.sweep.changes import Machine, changes_to_try, fixed_options, folder_of, words_of

CPU = Machine(accelerators=("cpu",), devices=1, cores=4)


def config_of(*overrides: str) -> dict[str, Any]:
    return check_command_line(["experiment=diagnose", *overrides], multirun=False, run_dir="x")[0]


def baseline(device: str = "cpu", batch_size: int = 128, processes: int = 1, bottleneck: str = "compute") -> Run:
    record = {
        "status": "finished",
        "hardware": {"device": device},
        "dataset": {"train_samples": 55_000},
        "processes": processes,
        "throughput": {"batch_size": batch_size, "bottleneck": {"kind": bottleneck}},
    }
    return Run("baseline", Path("x"), record)


def tried(
    *overrides: str, run: Run | None = None, machine: Machine = CPU, factors: tuple[int, ...] = (2, 4)
) -> tuple[list[str], list[str]]:
    """The options that are tried, and the lines on what is left out."""
    fixed = fixed_options(overrides)
    config = config_of(*overrides)
    changes, left_out = changes_to_try(config, run or baseline(), machine, fixed, factors)
    for change in changes:  # each is a configuration that train.py takes
        assert check_config(apply_overrides(config, words_of(change))) != config
    return [" ".join(words_of(change)) for change in changes], left_out


def test_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    assert tried() == (
        [
            *("data.batch_size=256", "data.batch_size=512", "trainer.precision=bf16-mixed", "data.pipeline=workers"),
            *("channels_last=false", "keep_freed_memory=false"),
        ],
        [],
    )


def test_on_gpus() -> None:
    machine = Machine(accelerators=("cpu", "cuda"), devices=4, cores=16)
    found, _ = tried(run=baseline("cuda", bottleneck="host"), machine=machine)
    assert found == [
        *("data.batch_size=256", "data.batch_size=512"),
        *("trainer.precision=bf16-mixed", "trainer.precision=16-mixed"),
        *("data.pipeline=device", "data.pipeline=workers", "channels_last=false"),
        *("trainer.accelerator=cpu", "trainer.devices=4"),
    ]


@pytest.mark.parametrize("line", ["trainer.accelerator=cpu", "trainer=cpu"])
def test_what_the_user_has_set_stays_and_is_said(line: str) -> None:
    found, left_out = tried(line, "data.batch_size=64", machine=Machine(accelerators=("cpu", "cuda"), cores=4))
    assert not any("batch_size" in one or "accelerator" in one for one in found)
    assert left_out == [
        f"not tried: {change}: you have set {change.partition('=')[0]}"
        for change in ("data.batch_size=256", "data.batch_size=512", "trainer.accelerator=gpu")
    ]


def test_the_training_set_bounds_the_batch() -> None:
    found, _ = tried(run=baseline(batch_size=20_000))
    assert found[:2] == ["data.batch_size=40000", "data.batch_size=55000"]
    found, _ = tried(run=baseline(batch_size=55_000))
    assert not any("batch_size" in one for one in found)


BESIDE_A_GPU = Machine(accelerators=("cpu", "cuda"), cores=4)
WORKERS, SEQUENCE = "data.pipeline=workers", "model=stacked_lstm"
# What the configuration has, and how it was measured → a change that is tried, or one that is not (-).
OFFERED = [
    ("trainer.precision=32-true", {"machine": BESIDE_A_GPU}, "trainer.accelerator=gpu"),
    ("", {"run": baseline(batch_size=20_000, processes=2)}, "data.batch_size=27500"),
    ("", {"factors": (8,)}, "data.batch_size=1024"),
    ("", {"factors": ()}, "-data.batch_size"),
    ("trainer.accumulate_grad_batches=3", {"factors": (2,)}, "data.batch_size=384 trainer.accumulate_grad_batches=1"),
    ("trainer.precision=bf16-mixed", {}, "trainer.precision=32-true"),
    (WORKERS, {}, "data.num_workers=4"),
    (WORKERS, {}, "data.pipeline=memory"),
    (WORKERS, {"machine": Machine(cores=2)}, "-data.num_workers"),
    (SEQUENCE, {}, "-channels_last"),
    (SEQUENCE, {}, "-model.backend"),
    (f"{SEQUENCE} model.backend=reference", {}, "model.backend=fused"),
]


@pytest.mark.parametrize(("words", "how", "change"), OFFERED)
def test_a_change_is_tried_where_it_can_have_an_effect(words: str, how: dict[str, Any], change: str) -> None:
    how = {"run": baseline(), "machine": CPU, "factors": (2, 4)} | how
    changes, _ = changes_to_try(config_of(*words.split()), how["run"], how["machine"], set(), how["factors"])
    found = [" ".join(words_of(one)) for one in changes]
    if change.startswith("-"):
        assert not any(one.startswith(change[1:]) for one in found)
    else:
        assert change in found


def test_a_constant_update_is_divided_by_every_batch_that_is_tried() -> None:
    config = config_of("global_batch_size=384")
    changes, left_out = changes_to_try(config, baseline(), CPU, set(), (2, 3))
    assert changes[:1] == [{"data.batch_size": 384}]
    assert left_out[0].startswith("not tried: data.batch_size=256: global_batch_size: got 384, takes a multiple of 256")


def test_a_change_names_its_folder() -> None:
    assert folder_of({"data.batch_size": 256, "keep_freed_memory": False}) == "batch_size-256+keep_freed_memory-false"
