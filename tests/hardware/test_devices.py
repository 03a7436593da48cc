"""The devices of a machine: what a configuration may ask of them before a run begins."""

from types import SimpleNamespace

import pytest
import torch

from batchscope.errors import UserError
from batchscope.hardware import device_memory
from batchscope.hardware.device_memory import total_memory
from batchscope.hardware.devices import check_accelerator, check_computing, describe, device_name
from tests.support.mps import Mps


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> None:
    """An Apple GPU on macOS 13."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: (major, minor) <= (13, 3))


REFUSED = {
    "trainer.precision: got 64-true, and an Apple GPU has no float64": {"precision": "64-true"},
    "trainer.precision: got bf16-mixed, and an Apple GPU has bf16 from macOS 14 on": {"precision": "bf16-mixed"},
    "compile: got max-autotune, which takes CUDA graphs": {"compile": "max-autotune"},
}


def config(accelerator: str, compile: object = False, **trainer: object) -> dict:
    return {"trainer": {"accelerator": accelerator, **trainer}, "compile": compile}


@pytest.mark.parametrize("message", REFUSED)
@pytest.mark.parametrize("accelerator", ["auto", "gpu", "mps"])
def test_what_an_apple_gpu_lacks_is_refused_before_a_run(message: str, accelerator: str, mac) -> None:
    with pytest.raises(UserError, match=message):
        check_accelerator(config(accelerator, **REFUSED[message]))
    check_accelerator(config("cpu", **REFUSED[message]))


@pytest.mark.parametrize("given", [{}, {"precision": None}, {"precision": "16-mixed"}, {"compile": True}])
def test_what_an_apple_gpu_can_do_is_not(given: dict, mac) -> None:
    check_accelerator(config("mps", **given))


def test_newer_systems_have_bf16(mac, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: (major, minor) <= (15, 1))
    check_accelerator(config("auto", precision="bf16-mixed"))


def test_without_an_apple_gpu_nothing_of_it_is_asked() -> None:
    check_accelerator(config("auto", precision="64-true"))


def test_the_memory_of_an_apple_gpu_is_what_metal_recommends_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "mps", Mps().module())
    assert total_memory(torch.device("mps")) == 12 * 2**30
    assert describe(torch.device("mps"))["device_memory_gib"] == 12.0
    assert "device_memory_gib" not in describe(torch.device("cpu"))


def test_the_memory_of_the_host_is_what_its_container_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "host_memory", lambda: SimpleNamespace(total=8 * 2**30))
    assert describe(torch.device("cpu"))["memory_gib"] == 8.0


@pytest.mark.parametrize(("usable", "cores"), [(2.0, "2"), (2.5, "2.5")])
def test_the_cores_of_a_record_are_those_that_a_quota_leaves(usable: float, cores: str, monkeypatch) -> None:
    monkeypatch.setattr("batchscope.hardware.devices.usable_cores", lambda: usable)
    assert str(describe(torch.device("cpu"))["cpu_cores"]) == cores


def test_several_gpus_without_nccl_as_on_windows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    for accelerator, devices in (("gpu", 2), ("auto", 2), ("cuda", "auto")):
        with pytest.raises(UserError, match=f"trainer.devices: got {devices}, and torch has no NCCL here"):
            check_accelerator(config(accelerator, devices=devices))
    with pytest.raises(UserError, match="trainer.devices: got 3, and this machine has 2 GPUs"):
        check_accelerator(config("auto", devices=3))
    with pytest.raises(UserError, match=r"trainer.devices: got \[2\], and this machine has 2 GPUs, numbered from 0"):
        check_accelerator(config("gpu", devices=[2]))
    check_accelerator(config("gpu", devices=[1]))
    check_accelerator(config("cpu", devices=2))
    check_accelerator(config("gpu", devices=1))
    check_accelerator(config("gpu", devices=2, strategy={"process_group_backend": "gloo"}))


OLD = "The NVIDIA driver on your system is too old (found version 12020)."
NO_KERNEL = "CUDA error: no kernel image is available for execution on the device"


@pytest.mark.parametrize(
    ("name", "call", "cause"), [("cuda.get_device_name", device_name, OLD), ("zeros", check_computing, NO_KERNEL)]
)
def test_a_gpu_that_this_torch_cannot_use_is_one_line(name: str, call: object, cause: str, monkeypatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    module = torch.cuda if "." in name else torch
    monkeypatch.setattr(module, name.rpartition(".")[2], fail)
    error = RuntimeError(f"{cause}\nCompile with TORCH_USE_CUDA_DSA")
    message = f"^trainer.accelerator: torch {torch.__version__} cannot use this GPU: RuntimeError: {cause[:30]}.*; write trainer.acc"
    with pytest.raises(UserError, match=message.replace("+", r"\+").replace("(", r"\(")):
        call(torch.device("cuda", 0))
    error = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError):  # out of memory is reported with its own message
        call(torch.device("cuda", 0))
