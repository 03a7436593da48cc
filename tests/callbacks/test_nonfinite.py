"""A number that is not finite ends the run in its own step, with the weights from before it, or is left out."""

import pytest
import torch
from torch import nn

from batchscope.callbacks import nonfinite
from batchscope.callbacks._deferred_scalars import DeferredScalars
from batchscope.callbacks.nonfinite import StopOnNonFinite
from batchscope.errors import NonFiniteError, UserError
from tests.callbacks.support import monitoring
from tests.support.third_party_modules import Stranger, train


class Other(nn.Module):
    """A parameter of another kind, beside the layer."""

    def __init__(self, **kind) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, **kind)

    def forward(self):
        weight = self.table.weight
        if weight.is_complex():
            return torch.view_as_real(weight.conj().resolve_conj()).sum()
        return self.table(torch.tensor([1, 1, 3])).sum().float()


class Breaking(Stranger):
    """Whose numbers go bad in some steps: in the loss, in the gradient of the weight alone, or in those of `other`."""

    def __init__(self, *bad: int, where: str = "loss", fused: bool = False, other: nn.Module | None = None) -> None:
        super().__init__()
        self.bad, self.where, self.fused, self.other = bad, where, fused, other
        self.weights = []  # before each step
        self.layer.weight.register_hook(lambda gradient: gradient / (1 - self._breaks("gradient")))

    def _breaks(self, where: str) -> bool:
        return len(self.weights) in self.bad and self.where == where

    def training_step(self, batch, batch_idx: int):
        self.weights.append(self.layer.weight.detach().clone())
        loss = super().training_step(batch, batch_idx) * (float("nan") if self._breaks("loss") else 1)
        return loss if self.other is None else loss + self.other() / (1 - self._breaks("other"))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, fused=self.fused)

    def unchanged(self) -> list[int]:
        """The steps that have not changed the weights."""
        pairs = zip(self.weights, [*self.weights[1:], self.layer.weight], strict=True)
        return [number for number, (before, after) in enumerate(pairs, start=1) if torch.equal(before, after)]


class Late(StopOnNonFinite):
    """As on a device whose flags are read some steps late, which no test on a CPU can have otherwise."""

    def __init__(self, action="stop", leaves_out: bool = True, device: str = "cuda") -> None:
        super().__init__(action)
        self.leaves_out, self.device = leaves_out, device

    def on_train_start(self, trainer, pl_module) -> None:
        super().on_train_start(trainer, pl_module)
        self._device, self._leaves_out = self.device, self.leaves_out


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the flags of two steps together, two steps later."""

    class OnTheWay(DeferredScalars):
        asked = 0

        def ready(self) -> bool:
            self.asked += 1
            return self.asked > 1

    monkeypatch.setitem(nonfinite.READ_EVERY, "cuda", 2)
    monkeypatch.setattr(nonfinite, "DeferredScalars", OnTheWay)


def other(**kind) -> Breaking:
    return Breaking(3, where="other", other=Other(**kind))


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (Breaking(3), "nan, the gradient of layer.weight is not finite .of 2 of 2 parameters.; batch 2 of "),
        (Breaking(7, where="gradient"), ".*, the gradient of layer.weight is not finite; batch 1 of epoch 1, "),
        (other(sparse=True), ".*, the gradient of other.table.weight is not finite; "),
        (other(dtype=torch.cfloat), ".*, the gradient of other.table.weight is not finite; "),
        (other(dtype=torch.float64), ".*, the gradient of other.table.weight is not finite; "),
    ],
    ids=["the loss", "a gradient", "a sparse gradient", "a complex gradient", "a gradient of another precision"],
)
def test_a_number_that_is_not_finite_ends_the_run_with_the_weights_from_before(module, said) -> None:
    where = f"step {module.bad[0]}: the loss is {said}"
    with pytest.raises(NonFiniteError, match=f"^{where}.*learning rate 0.01. The weights were left as they were"):
        train(module, StopOnNonFinite())
    assert module.unchanged() == [*module.bad] == [len(module.weights)]


@pytest.mark.parametrize(
    ("callback", "fused", "bad"),
    [
        (StopOnNonFinite("skip"), False, [3, 4, 9]),
        (StopOnNonFinite("skip"), True, [3, 4, 9]),
        (Late("skip"), True, [3, 9]),
    ],
    ids=["one kernel a parameter", "fused", "fused, and the host does not know yet"],
)
def test_skipped_steps_leave_the_weights_alone_and_are_counted(callback, fused, bad) -> None:
    module = Breaking(*bad, fused=fused)
    trainer = train(module, callback)
    assert (callback.skipped, trainer.global_step, module.unchanged()) == (len(bad), 10, bad)
    assert callback.record_facts() == {"skipped_steps": len(bad)}
    assert not hasattr(trainer.optimizers[0], "found_inf")


@pytest.mark.usefixtures("alone")
def test_the_check_is_in_no_recorded_step() -> None:
    recorded = []
    for callbacks in ([], [StopOnNonFinite()]):
        train(Stranger(), monitor := monitoring(record_operations=True), *callbacks)
        recorded.append([(row.name, row.part, row.calls) for row in monitor.operations.rows])
    assert recorded[0] == recorded[1] != []


def test_accumulated_gradients_are_checked_once_an_update() -> None:
    train(Breaking(4, where="gradient"), callback := StopOnNonFinite("skip"), accumulate_grad_batches=2)
    assert callback.skipped == 1


@pytest.mark.parametrize(("device", "steps"), [("cuda", 4), ("mps", 5)])
def test_a_step_that_is_heard_of_late_is_named_as_itself(device: str, steps: int) -> None:
    module, weights = Breaking(2, fused=True), "The weights have this update, no checkpoint has$"
    bad = "step 2: the loss or a gradient is not finite; batch 1 of epoch 0"
    with pytest.raises(UserError, match=f"^{bad}.* {weights}"):
        train(module, Late(leaves_out=False, device=device))
    assert len(module.weights) == steps
    assert not module.layer.weight.isfinite().all()
    with pytest.raises(UserError, match=r"^step 2: "):
        train(module := Breaking(2, fused=True), Late())
    assert not hasattr(module.trainer.optimizers[0], "found_inf")  # nor after an exception


@pytest.mark.parametrize(
    ("device", "fused", "can"),
    [
        ("cpu", False, True),
        ("cuda", True, True),
        ("cuda", False, False),
        ("mps", True, False),
    ],
)
def test_skip_is_refused_where_it_would_need_a_wait_in_every_step(device, fused, can, monkeypatch) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], fused=fused)
    assert nonfinite._can_leave_out(device, [optimizer]) is can  # a device that this machine need not have
    monkeypatch.setattr(nonfinite, "_can_leave_out", lambda *args: can)
    if not can:
        with pytest.raises(UserError, match=r'^StopOnNonFinite\("skip"\): on cpu an update can be left out only by'):
            train(Breaking(3), StopOnNonFinite("skip"))
