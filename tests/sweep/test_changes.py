"""Which changes a diagnosis tries: those that exist, differ from what is set, and can have an effect here."""

from pathlib import Path
from typing import Any

import pytest

from batchscope.analysis.run import Run
from batchscope.options.check import check_config
from batchscope.options.compose import apply_overrides, check_command_line
from batchscope.sweep.changes import Change, Machine, changes_to_try, fixed_options

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
    fixed = fixed_options(overrides, {"trainer": next((w[8:] for w in overrides if w.startswith("trainer=")), "")})
    config = config_of(*overrides)
    changes, left_out = changes_to_try(config, run or baseline(), machine, fixed, factors)
    for change in changes:  # each is a configuration that train.py takes
        assert check_config(apply_overrides(config, change.overrides)) != config
    return [" ".join(change.overrides) for change in changes], left_out


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


def test_a_cpu_beside_a_gpu_tries_the_gpu() -> None:
    found, left_out = tried("trainer.precision=32-true", machine=Machine(accelerators=("cpu", "cuda"), cores=4))
    assert "trainer.accelerator=gpu" in found
    assert left_out == [
        (
            "not tried, because you set trainer.precision: trainer.precision=bf16-mixed; "
            "to try a change, leave its option out"
        )
    ]


@pytest.mark.parametrize("line", ["trainer.accelerator=cpu", "trainer=cpu"])
def test_what_the_user_has_set_stays_and_is_said(line: str) -> None:
    found, left_out = tried(line, "data.batch_size=64", machine=Machine(accelerators=("cpu", "cuda"), cores=4))
    assert not any("batch_size" in one or "accelerator" in one for one in found)
    setter = line if line == "trainer=cpu" else "trainer.accelerator"
    assert left_out == [
        (
            f"not tried, because you set data.batch_size and {setter}: data.batch_size=256, data.batch_size=512, "
            "trainer.accelerator=gpu; to try a change, leave its option out"
        )
    ]


def test_the_training_set_bounds_the_batch() -> None:
    found, _ = tried(run=baseline(batch_size=20_000))
    assert found[:2] == ["data.batch_size=40000", "data.batch_size=55000"]
    found, left_out = tried(run=baseline(batch_size=55_000))
    assert not any("batch_size" in one for one in found)
    assert left_out == ["not tried: data.batch_size=220000: 55,000 is the whole training set of a device"]


def test_several_processes_share_the_training_set() -> None:
    found, _ = tried(run=baseline(batch_size=20_000, processes=2))
    assert found[0] == "data.batch_size=27500" and "data.batch_size" not in found[1]


def test_the_factors_are_an_option() -> None:
    assert tried(factors=(8,))[0][0] == "data.batch_size=1024"
    assert not any("batch_size" in one for one in tried(factors=())[0])


def test_accumulated_batches_are_tried_as_one() -> None:
    found, _ = tried("trainer.accumulate_grad_batches=3")
    assert "data.batch_size=384 trainer.accumulate_grad_batches=1" not in found  # the user has set it
    config = config_of("trainer.accumulate_grad_batches=3")
    changes, _ = changes_to_try(config, baseline(), CPU, {}, (2,))
    assert Change({"data.batch_size": 384, "trainer.accumulate_grad_batches": 1}) in changes


def test_a_precision_that_was_measured_to_be_slower_is_left_out() -> None:
    found, left_out = tried(machine=Machine(slow_formats={"bf16": 0.12}, cores=4))
    assert not any("precision" in one for one in found)
    assert left_out == [
        "not tried: trainer.precision=bf16-mixed: this cpu was measured to reach 0.120 of its float32 rate at it"
    ]


def test_a_mixed_precision_is_compared_with_the_full_one() -> None:
    changes, _ = changes_to_try(config_of("trainer.precision=bf16-mixed"), baseline(), CPU, {}, ())
    assert Change({"trainer.precision": "32-true"}) in changes


def test_more_workers_are_tried_where_workers_load_the_data() -> None:
    changes, _ = changes_to_try(config_of("data.pipeline=workers"), baseline(), CPU, {}, ())
    assert Change({"data.num_workers": 4}) in changes and Change({"data.pipeline": "memory"}) in changes
    changes, _ = changes_to_try(config_of("data.pipeline=workers"), baseline(), Machine(cores=2), {}, ())
    assert not any("data.num_workers" in change.options for change in changes)


def test_a_reference_backend_is_tried_as_the_fused_one_and_sequences_have_no_layout() -> None:
    found, left_out = tried("model=stacked_lstm")
    assert not any("channels_last" in one or "backend" in one for one in [*found, *left_out])
    changes, _ = changes_to_try(config_of("model=stacked_lstm", "model.backend=reference"), baseline(), CPU, {}, ())
    assert Change({"model.backend": "fused"}) in changes


def test_a_change_names_its_folder_and_joins_another() -> None:
    both = Change({"data.batch_size": 256}) | Change({"keep_freed_memory": False})
    assert both.overrides == ["data.batch_size=256", "keep_freed_memory=false"]
    assert both.folder == "batch_size-256+keep_freed_memory-false"
