"""A number that is not finite ends the run in its own step, with the weights from before it, or is left out."""

from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from batchscope.callbacks import nonfinite
from batchscope.callbacks._deferred_scalars import DeferredScalars
from batchscope.callbacks.nonfinite import StopOnNonFinite
from batchscope.errors import UserError
from tests.support.third_party_modules import Stranger, train


class Breaking(Stranger):
    """Whose numbers go bad in some steps: in the loss, or in the gradient of the weight alone."""

    def __init__(self, bad: tuple[int, ...] = (3,), where: str = "loss", fused: bool = False):
        super().__init__()
        self.bad, self.where, self.fused = bad, where, fused
        self.weights: list[Tensor] = []  # before each step
        self.layer.weight.register_hook(self._break_gradient)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.weights.append(self.layer.weight.detach().clone())
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if self.where == "loss" and self._breaks() else loss

    def _break_gradient(self, gradient: Tensor) -> Tensor:
        return gradient / 0 if self.where == "gradient" and self._breaks() else gradient

    def _breaks(self) -> bool:
        return len(self.weights) in self.bad

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=self.fused)


class Late(StopOnNonFinite):
    """As on a device whose flags are read some steps late."""

    def __init__(self, action: Any = "stop", leaves_out: bool = True, device: str = "cuda") -> None:
        super().__init__(action)
        self.leaves_out, self.device = leaves_out, device

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._device, self._leaves_out = self.device, self.leaves_out


class OnTheWay(DeferredScalars):
    """Numbers that have not arrived when they are first asked for."""

    asked = 0

    def ready(self) -> bool:
        self.asked += 1
        return self.asked > 1


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the flags of two steps together, two steps later."""
    monkeypatch.setitem(nonfinite.READ_EVERY, "cuda", 2)
    monkeypatch.setattr(nonfinite, "DeferredScalars", OnTheWay)


@pytest.mark.parametrize(
    ("where", "bad", "said"),
    [
        (
            "loss",
            3,
            "step 3: the loss is nan, the gradient of layer.weight is not finite .of 2 of 2 parameters.; batch 2 of ",
        ),
        ("gradient", 7, "step 7: the loss is .*, the gradient of layer.weight is not finite; batch 1 of epoch 1, "),
    ],
)
def test_a_number_that_is_not_finite_ends_the_run_with_the_weights_from_before(where: str, bad: int, said: str) -> None:
    module = Breaking(bad=(bad,), where=where)
    with pytest.raises(UserError, match=f"^{said}.*learning rate 0.01. The weights were left as they were"):
        train(module, StopOnNonFinite())
    assert torch.equal(module.layer.weight, module.weights[bad - 1])
    assert not torch.equal(module.weights[bad - 1], module.weights[bad - 2])


def left_out(module: Breaking) -> list[int]:
    """The steps that have not changed the weights."""
    pairs = zip(module.weights, [*module.weights[1:], module.layer.weight], strict=True)
    return [number for number, (before, after) in enumerate(pairs, start=1) if torch.equal(before, after)]


@pytest.mark.parametrize("fused", [False, True], ids=["one kernel a parameter", "fused"])
def test_skipped_steps_leave_the_weights_alone_and_are_counted(fused: bool) -> None:
    module, callback = Breaking(bad=(3, 4, 9), fused=fused), StopOnNonFinite("skip")
    trainer = train(module, callback)
    assert (callback.skipped, trainer.global_step, left_out(module)) == (3, 10, [3, 4, 9])


def test_a_fused_optimizer_leaves_bad_updates_out_while_the_host_does_not_know_yet() -> None:
    module, callback = Breaking(bad=(3, 9), fused=True), Late("skip")
    trainer = train(module, callback)
    assert (callback.skipped, left_out(module)) == (2, [3, 9])
    assert not hasattr(trainer.optimizers[0], "found_inf")


@pytest.mark.parametrize(("device", "steps"), [("cuda", 4), ("mps", 5)])
def test_a_step_that_is_heard_of_late_is_named_as_itself(device: str, steps: int) -> None:
    module = Breaking(bad=(2,))
    weights = "The weights have this update, no checkpoint has$"
    with pytest.raises(
        UserError, match=f"^step 2: the loss or a gradient is not finite; batch 1 of epoch 0.* {weights}"
    ):
        train(module, Late(leaves_out=False, device=device))
    assert len(module.weights) == steps
    assert not module.layer.weight.isfinite().all()


@pytest.mark.parametrize(
    ("device", "fused", "sharded", "can"),
    [
        ("cpu", False, True, True),
        ("cuda", True, False, True),
        ("cuda", True, True, False),
        ("cuda", False, False, False),
        ("mps", True, False, False),
    ],
)
def test_which_updates_can_be_left_out_without_a_wait(device: str, fused: bool, sharded: bool, can: bool) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], fused=fused)
    assert nonfinite._can_leave_out(device, [optimizer], sharded) is can


def test_skip_is_refused_where_it_would_need_a_wait_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nonfinite, "_can_leave_out", lambda *args: False)
    with pytest.raises(UserError, match=r'^StopOnNonFinite\("skip"\): on cpu an update can be left out only by'):
        train(Breaking(), StopOnNonFinite("skip"))


def test_accumulated_gradients_are_checked_once_an_update() -> None:
    module, callback = Breaking(bad=(4,), where="gradient"), StopOnNonFinite("skip")
    train(module, callback, accumulate_grad_batches=2)
    assert callback.skipped == 1


def test_what_a_fused_optimizer_was_told_is_gone_after_an_exception() -> None:
    module = Breaking(bad=(2,), fused=True)
    with pytest.raises(UserError, match=r"^step 2: "):
        train(module, Late())
    assert not hasattr(module.trainer.optimizers[0], "found_inf")


def test_the_shards_of_lightnings_own_strategy_are_checked_by_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nonfinite, "FSDPStrategy", SingleDeviceStrategy)
    flags: list[Tensor] = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda flag, op: flags.append(flag))
    train(Stranger(), StopOnNonFinite())
    assert len(flags) == 10


class Turning(Stranger):
    """Has a complex parameter, whose gradient breaks in the third step."""

    def __init__(self, breaks: bool, lazily: bool) -> None:
        super().__init__()
        self.phase, self.breaks = nn.Parameter(torch.ones(1, dtype=torch.cfloat)), breaks
        self.lazily = lazily

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        phase = self.phase.conj() if self.lazily else self.phase
        loss = super().training_step(batch, batch_idx) + torch.view_as_real(phase.resolve_conj()).sum()
        return loss / 0 if self.breaks and batch_idx == 2 else loss


@pytest.mark.parametrize("lazily", [False, True], ids=["plain", "conjugate"])
def test_complex_gradients_are_checked(lazily: bool) -> None:
    assert train(Turning(False, lazily), StopOnNonFinite()).global_step == 10
    with pytest.raises(UserError, match="the gradient of phase is not finite .of 3 of 3 param"):
        train(Turning(True, lazily), StopOnNonFinite())


class Looking(Stranger):
    """Looks rows up in a table, whose gradient is sparse; breaks in the third step."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.table, self.breaks = nn.Embedding(10, 4, sparse=True), breaks

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.layer(self.table(torch.tensor([1, 1, 3]))).square().mean()
        return loss / 0 if self.breaks and batch_idx == 2 else loss


def test_sparse_gradients_are_checked() -> None:
    assert train(Looking(breaks=False), StopOnNonFinite()).global_step == 10
    with pytest.raises(UserError, match="the loss is inf, the gradient of layer.weight is not finite .of 3 of 3 param"):
        train(Looking(breaks=True), StopOnNonFinite())


def test_parameters_of_several_precisions_are_checked() -> None:
    class Mixed(Breaking):
        def __init__(self) -> None:
            super().__init__(bad=())
            self.other = nn.Linear(4, 1).double()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) + (self.other(batch[0].double()) / 0).sum().float()

    with pytest.raises(UserError, match="step 1: the loss is .* the gradient of other.weight is not finite"):
        train(Mixed(), StopOnNonFinite())
