"""A number that is not finite ends the run: on a CPU with the weights from before the step, elsewhere late, with its step."""

from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import FSDPStrategy, SingleDeviceStrategy, Strategy
from torch import nn

from batchscope.callbacks import nonfinite
from batchscope.callbacks.nonfinite import StopOnNonFinite
from batchscope.checkpointing.callback import Checkpoints
from batchscope.errors import NonFiniteError
from tests.callbacks.support import monitoring
from tests.support.third_party_modules import Stranger, train


class ExtraParameter(nn.Module):
    """A module with a parameter of another kind: sparse, complex, of double or of half precision."""

    def __init__(self, **kind) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, **kind)

    def forward(self):
        weight = self.table.weight
        if weight.is_complex():
            return torch.view_as_real(weight.conj().resolve_conj()).sum()
        return self.table(torch.tensor([1, 1, 3])).sum().float()


class Breaking(Stranger):
    """Numbers are not finite in the steps `bad`: in the loss, in the gradient of the weight, or in that of `other`."""

    def __init__(self, *bad: int, where: str = "loss", other: nn.Module | None = None) -> None:
        super().__init__()
        self.bad, self.where, self.other = bad, where, other
        self.weights = []  # before each step
        self.layer.weight.register_hook(lambda gradient: gradient / (1 - self._breaks("gradient")))

    def _breaks(self, where: str) -> bool:
        return len(self.weights) in self.bad and self.where == where

    def training_step(self, batch, batch_idx: int):
        self.weights.append(self.layer.weight.detach().clone())
        loss = super().training_step(batch, batch_idx) * (float("nan") if self._breaks("loss") else 1)
        self.loss = loss if self.other is None else loss + self.other() / (1 - self._breaks("other"))
        return self.loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def unchanged(self) -> list[int]:
        """The steps that have not changed the weights."""
        pairs = zip(self.weights, [*self.weights[1:], self.layer.weight], strict=True)
        return [number for number, (before, after) in enumerate(pairs, start=1) if torch.equal(before, after)]


class Late(StopOnNonFinite):
    """A check that reads its flags some steps late, as on an accelerator, where this test runs on a CPU."""

    def on_train_start(self, trainer, pl_module) -> None:
        super().on_train_start(trainer, pl_module)
        self._is_late = True


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the flags of two steps together, two steps later."""
    monkeypatch.setattr(nonfinite, "READ_EVERY", {"cpu": 2})


def breaking_extra(**kind) -> Breaking:
    return Breaking(3, where="other", other=ExtraParameter(**kind))


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Breaking(3), "nan, the gradient of layer.weight is not finite"),
        (Breaking(7, where="gradient"), ".*, the gradient of layer.weight is not finite"),
        (breaking_extra(sparse=True), ".*, the gradient of other.table.weight is not finite"),
        (breaking_extra(dtype=torch.cfloat), ".*, the gradient of other.table.weight is not finite"),
        (breaking_extra(dtype=torch.float64), ".*, the gradient of other.table.weight is not finite"),
        (breaking_extra(dtype=torch.bfloat16), ".*, the gradient of other.table.weight is not finite"),
    ],
    ids=["the loss", "a gradient", "sparse", "complex", "of double precision", "of half precision"],
)
def test_a_number_that_is_not_finite_ends_the_run_with_the_weights_from_before(module, message) -> None:
    epoch, batch = divmod(module.bad[0] - 1, 5)
    where = rf"step {module.bad[0]} \(batch {batch} of epoch {epoch}, learning rate 0.01\): the loss is {message}"
    with pytest.raises(NonFiniteError, match=rf"^{where}\. The weights were left as they were$"):
        train(module, StopOnNonFinite())
    assert module.unchanged() == [*module.bad] == [len(module.weights)]


@pytest.mark.usefixtures("alone")
def test_the_check_is_in_no_recorded_step() -> None:
    recorded = []
    for callbacks in ([], [StopOnNonFinite()]):
        train(Stranger(), monitor := monitoring(record_operations=True), *callbacks)
        recorded.append([(row.name, row.part, row.calls) for row in monitor.operations.rows])
    assert recorded[0] == recorded[1] != []


def test_accumulated_gradients_are_checked_once_an_update_and_the_loss_is_that_of_its_last_batch() -> None:
    with pytest.raises(NonFiniteError, match=r"^step 2 \(batch 3 of epoch 0") as caught:
        train(module := Breaking(4, where="gradient"), StopOnNonFinite(), accumulate_grad_batches=2)
    assert f": the loss is {module.loss.item():.4g}, the gradient of" in str(caught.value)


def test_of_a_loss_with_several_elements_the_mean_is_told() -> None:
    class OfSamples(Breaking):
        automatic_optimization = False

        def training_step(self, batch, batch_idx: int) -> None:
            loss = super().training_step(batch, batch_idx) * torch.ones(4)
            self.manual_backward(loss, gradient=torch.ones(4))
            self.optimizers().step()

    with pytest.raises(
        NonFiniteError, match=r"^step 3 .*: the loss is nan, the gradient of layer.weight is not finite"
    ):
        train(OfSamples(3), StopOnNonFinite())


def test_a_step_that_is_heard_of_late_is_named_as_itself() -> None:
    bad = r"step 2 \(batch 1 of epoch 0, learning rate 0.01\): the loss or a gradient is not finite"
    with pytest.raises(NonFiniteError, match=rf"^{bad}\. The weights have this update, no checkpoint has$"):
        train(module := Breaking(2), Late())
    assert len(module.weights) == 4
    assert not module.layer.weight.isfinite().all()


def test_an_update_that_is_heard_of_late_is_in_no_checkpoint(tmp_path) -> None:
    options = {"default_root_dir": tmp_path, "enable_checkpointing": True}
    with pytest.raises(NonFiniteError, match=r"^step 2 "):  # before the checkpoint, although its flag is not due
        train(Breaking(2), Late(), Checkpoints(every_n_steps=2), **options)
    assert not list(tmp_path.rglob("*.ckpt"))


@pytest.mark.parametrize(("scaler", "is_checked"), [(None, True), (object(), False)])
def test_beside_a_gradient_scaler_nothing_is_checked(scaler, is_checked: bool) -> None:
    strategy = Mock(spec=SingleDeviceStrategy, root_device=torch.device("cpu"))
    precision = Mock(spec=MixedPrecision, scaler=scaler)
    (callback := StopOnNonFinite()).on_train_start(Mock(strategy=strategy, precision_plugin=precision), Stranger())
    assert callback._is_checked == is_checked


@pytest.mark.parametrize(("kind", "is_checked"), [(SingleDeviceStrategy, True), (FSDPStrategy, False)])
def test_where_a_strategy_shards_the_parameters_nothing_is_checked(kind: type[Strategy], is_checked: bool) -> None:
    strategy = Mock(spec=kind, root_device=torch.device("cpu"))
    (callback := StopOnNonFinite()).on_train_start(Mock(strategy=strategy), Stranger())
    assert callback._is_checked == is_checked
