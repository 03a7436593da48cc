"""Task: an evaluation counts every sample once; gradients are clipped at every precision; batch norm has its samples."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import lightning
import numpy
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from batchscope._torch import lay_out_channels_last
from batchscope.data.adding import Adding
from batchscope.data.spec import PADDING, DataSpec
from batchscope.errors import UnfitError, UserError
from batchscope.models.cnn import SimpleCNN
from batchscope.models.torchvision import TorchvisionModel
from batchscope.training.objective import accuracy, for_loss, for_metrics, loss_function
from batchscope.training.task import Task
from batchscope.training.trial import check_output, first_output
from tests.support.own_data import Plain
from tests.support.recipes import adamw, sgd
from tests.support.third_party_modules import train

SPECS = {
    "class": DataSpec(kind="tensor", input_shape=(5,), target="class", num_outputs=3),
    "class per step": DataSpec(kind="sequence", input_shape=(4, 5), target="class_per_step", num_outputs=3),
    "class per pixel": DataSpec(kind="tensor", input_shape=(3, 4, 5), target="class_per_pixel", num_outputs=5),
    "labels": DataSpec(kind="tensor", input_shape=(5,), target="multilabel", num_outputs=3),
    "labels per pixel": DataSpec(kind="tensor", input_shape=(3, 4, 5), target="multilabel_per_pixel", num_outputs=2),
    "one logit": DataSpec(kind="tensor", input_shape=(5,), target="class", num_outputs=1),
    "one logit per step": DataSpec(kind="sequence", input_shape=(4, 5), target="class_per_step", num_outputs=1),
    "one logit per pixel": DataSpec(kind="tensor", input_shape=(3, 4, 5), target="class_per_pixel", num_outputs=1),
    "value": DataSpec(kind="sequence", input_shape=(5,), target="value", num_outputs=1),
    "vector": DataSpec(kind="tensor", input_shape=(5,), target="vector", num_outputs=3),
    "input": DataSpec(kind="tensor", input_shape=(4, 5), target="input"),
}
specs = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
pytestmark = pytest.mark.filterwarnings("ignore")


def batch(spec: DataSpec, size: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(size, *spec.input_shape, generator=generator)
    if spec.target == "input":
        return (x,)
    if spec.target in ("value", "vector"):
        return x, torch.randn(size, *spec.target_shape, generator=generator)
    return x, torch.randint(0, spec.num_classes, (size, *spec.target_shape), generator=generator)


class Steps(nn.Linear):
    """A linear layer on each step."""

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        return super().forward(x)


def network(spec: DataSpec) -> nn.Module:
    """A linear layer, of which the classes of pixels come first."""
    torch.manual_seed(0)
    if spec.target.endswith("_per_pixel"):
        return nn.Conv2d(3, spec.num_outputs, 1)
    return Steps(5, spec.output_shape[-1])


def measured(spec: DataSpec, batches: list[tuple[Tensor, ...]], net: Any = None, **options: Any) -> dict[str, float]:
    task = Task(net or network(spec), spec, sgd())
    off = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(accelerator="cpu", **off, **options)
    return trainer.validate(task, DataLoader(batches, batch_size=None), verbose=False)[0]


@specs
def test_batches_of_different_sizes_count_by_their_samples(spec: DataSpec) -> None:
    parts = [batch(spec, 7), batch(spec, 2)]
    whole = tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))
    assert measured(spec, parts) == pytest.approx(measured(spec, [whole]), rel=1e-6)


@pytest.mark.parametrize("name", SPECS)
def test_the_loss_is_that_of_the_target(name: str) -> None:
    spec = SPECS[name]
    x, y, _ = spec.parts(batch(spec, 7))
    output = network(spec)(x)
    if name.startswith(("labels", "one logit")):
        expected = nn.functional.binary_cross_entropy_with_logits(output.view(y.shape), y.float())
    elif name.startswith("class"):
        expected = nn.functional.cross_entropy(output.transpose(1, -1) if name == "class per step" else output, y)
    else:
        expected = nn.functional.mse_loss(output.view(y.shape), y)
    assert measured(spec, [batch(spec, 7)])["val/loss"] == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("name", ["class per pixel", "class per step"])
def test_a_batch_without_any_class_has_the_loss_0(name: str) -> None:
    spec = SPECS[name]
    output, y = torch.randn(2, *spec.output_shape, requires_grad=True), torch.full((2, *spec.target_shape), PADDING)
    nothing = loss_function("auto", spec)[1](*for_loss(spec, output, y))
    (gradient,) = torch.autograd.grad(nothing, output)
    assert nothing == 0
    assert not gradient.any()


@pytest.mark.parametrize(
    ("name", "dtype", "of_output"),
    [
        ("value", torch.float64, torch.float32),
        ("value", torch.float32, torch.float64),
        ("vector", torch.int64, torch.bfloat16),  # of trainer.precision=bf16-true, which leaves whole numbers
        ("input", torch.uint8, torch.float32),
        ("input", torch.int16, torch.float32),
    ],
)
def test_a_number_of_another_type_than_the_output_is_trained_on(name: str, dtype: Any, of_output: Any) -> None:
    spec = SPECS[name]
    x, y, _ = spec.parts(batch(spec, 7))
    output, y = network(spec)(x).to(of_output), (9 * y.abs()).to(dtype)
    loss = loss_function("auto", spec)[1](*for_loss(spec, output, y))
    loss.backward()
    expected = nn.functional.mse_loss(output.view(y.shape).float(), y.float())
    assert loss.dtype == of_output and loss.item() == pytest.approx(expected.item(), rel=1e-2)


def test_under_autocast_a_loss_by_name_has_its_target_in_float32() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_function("mse", SPECS["value"])[1](torch.ones(1, dtype=torch.bfloat16), torch.tensor([1.001]))
    assert loss.item() == pytest.approx(1e-6, rel=1e-2)


def test_whole_numbers_are_those_of_the_data_for_a_loss_of_ones_own() -> None:
    _, y = for_loss(SPECS["vector"], torch.ones(2, 3), torch.ones(2, 3).long())
    assert y.dtype == torch.int64


@pytest.mark.parametrize("shape", [(1, 1), (1,)])
def test_the_value_of_one_sample_keeps_its_batch(shape: tuple[int, ...]) -> None:
    output, y = for_loss(SPECS["value"], torch.ones(shape), torch.ones(1))
    assert output.shape == y.shape == (1,)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-true", torch.bfloat16), ("16-true", torch.float16)])
def test_an_evaluation_in_half_precision_counts_its_samples_exactly(precision: Any, dtype: torch.dtype) -> None:
    x, y = torch.eye(3).repeat(2_000, 1), torch.arange(3).repeat(2_000)
    y[:70] = 0  # 46 had another class
    metrics = measured(replace(SPECS["class"], input_shape=(3,)), [(x, y)] * 20, nn.Identity(), precision=precision)
    loss = nn.functional.cross_entropy(x.to(dtype), y).item()
    assert metrics == {"val/loss": pytest.approx(loss, rel=1e-6), "val/acc": pytest.approx(1 - 46 / 6_000, rel=1e-6)}


def test_an_accuracy_of_a_training_step_in_half_precision_is_exact() -> None:
    y = torch.tensor([[0, 0, 0, PADDING]])
    with HalfPrecision("bf16-true").forward_context():
        share_right = accuracy(replace(SPECS["class per step"], variable_length=True), torch.eye(4, 3)[None], y)
    assert share_right.item() == pytest.approx(1 / 3)


def test_a_loss_of_many_logits_in_half_precision_is_finite() -> None:
    spec = SPECS["one logit per pixel"]
    output, y = torch.zeros(128, 1, 32, 32, dtype=torch.float16), torch.zeros(128, 32, 32).long()
    assert loss_function("auto", spec)[1](*for_loss(spec, output, y)).item() == pytest.approx(0.6931, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "varies"),
    [("class", False), ("class per step", True), ("class per step", False), ("class per pixel", False)],
)
def test_what_has_no_class_counts_for_nothing_in_training_and_evaluation(name: str, varies: bool) -> None:
    spec = replace(SPECS[name], variable_length=varies, blank_class=1)
    (x, y), lengths = batch(spec, 7), (torch.full((7,), 4),) if spec.variable_length else ()
    if spec.has_padding:
        y[:, 2:] = PADDING
    metrics, output = measured(spec, [(x, y, *lengths)]), network(spec)(x)
    answers = output.movedim(1, -1) if name == "class per pixel" else output  # the classes last
    has_class = y != PADDING
    loss = nn.functional.cross_entropy(answers[has_class], y[has_class])
    right = (answers.argmax(-1) == y)[has_class & (y != 1)].float().mean()
    assert metrics == {"val/loss": pytest.approx(loss.item(), rel=1e-6), "val/acc": pytest.approx(right.item())}
    assert accuracy(spec, output, y).item() == pytest.approx(right.item())


@pytest.mark.parametrize("name", ["one logit per step", "one logit per pixel"])
def test_what_has_no_class_counts_for_nothing_where_there_is_one_logit(name: str) -> None:
    spec = replace(SPECS[name], variable_length=name == "one logit per step")
    (x, y), lengths = batch(spec, 7), (torch.full((7,), 4),) if spec.variable_length else ()
    y[:, 2:] = PADDING
    metrics, has_class = measured(spec, [(x, y, *lengths)]), y != PADDING
    logits, labels = network(spec)(x).view(y.shape)[has_class], y[has_class]
    loss = nn.functional.binary_cross_entropy_with_logits(logits, labels.float()).item()
    right = ((logits > 0) == labels).float().mean().item()
    assert metrics == {"val/loss": pytest.approx(loss, rel=1e-5), "val/acc": pytest.approx(right)}


@pytest.mark.parametrize("shape", [(2, 1), (2,)])
def test_a_network_may_answer_one_logit_without_a_dimension_for_it(shape: tuple[int, ...]) -> None:
    task = Task(nn.Linear(5, 1), SPECS["one logit"], sgd())
    check_output(task, torch.zeros(shape, requires_grad=True), torch.tensor([0, 1]))
    assert accuracy(task.spec, torch.tensor([1.0, 1.0]).view(shape), torch.tensor([0, 1])) == 0.5


@pytest.mark.parametrize(
    ("name", "blank", "is_kept"), [("class", None, True), ("class", 1, False), ("labels", None, False)]
)
def test_a_test_keeps_which_samples_were_right_where_each_has_one_class(
    name: str, blank: int | None, is_kept: bool
) -> None:
    spec = replace(SPECS[name], blank_class=blank)
    task, parts = Task(network(spec), spec, sgd()), [batch(spec, 7), batch(spec, 2)]
    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
    for _ in range(2):  # a second test begins anew
        trainer.test(task, DataLoader(parts, batch_size=None), verbose=False)
    expected = [(network(spec)(x).argmax(-1) == y).tolist() for x, y in parts] if is_kept else []
    assert [right.tolist() for right in task.test_correct] == expected


def test_a_task_knows_the_shape_that_its_network_computes_on() -> None:
    spec = DataSpec(kind="image", input_shape=(3, 32, 32), target="class", num_outputs=10)
    networks = [TorchvisionModel(spec, name="resnet18", image_size=64), SimpleCNN(spec)]
    assert [Task(network, spec, sgd()).input_shape for network in networks] == [(3, 64, 64), (3, 32, 32)]


def test_a_task_knows_which_of_its_metrics_are_means_over_samples() -> None:
    kind = torchmetrics.classification.MulticlassAccuracy
    own = {"mean_acc": kind(3), "micro_acc": kind(3, average="micro"), "error": torchmetrics.MeanAbsoluteError()}
    task = Task(network(SPECS["class"]), SPECS["class"], sgd(), metrics=own)
    assert task.sample_means == ["loss", "acc", "micro_acc", "error"]


class OfBytes(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float() / 255)


def test_a_task_knows_of_which_type_its_inputs_are() -> None:
    task, x = Task(OfBytes(5, 3), SPECS["class"], sgd()), torch.zeros(2, 5, dtype=torch.uint8)
    train(task, data=DataLoader([(x, torch.tensor([0, 1]))], batch_size=None), max_steps=1)
    assert task.input_dtype == "uint8"


def test_an_epoch_whose_last_batch_would_be_one_sample_trains_with_batch_norm() -> None:
    data = Adding(sequence_length=2, num_train=9, num_val=1, batch_size=4)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=2, barebones=True, use_distributed_sampler=False)
    trainer.fit(Task(model, data.spec, sgd()), datamodule=data)
    assert trainer.global_step == 4


def test_data_without_a_batch_size_leave_the_learning_rate_as_it_is_and_no_rule_is_recorded() -> None:
    spec = SPECS["value"]
    task = Task(nn.Linear(5, 1), spec, sgd(lr_scaling="auto", reference_batch_size=1))
    trainer = train(task, data=DataLoader([batch(spec, 2)], batch_size=None), max_steps=1)
    assert (trainer.optimizers[0].defaults["lr"], task.lr_scaling) == (0.1, None)


@pytest.mark.parametrize(
    ("name", "varies"), [("class per step", True), ("class per step", False), ("class per pixel", False)]
)
@pytest.mark.parametrize("counting", [1, 0])  # steps or rows of each sample of the first rank
def test_the_mean_of_two_ranks_is_that_of_the_steps_and_pixels_that_count(
    name: str, varies: bool, counting: int, monkeypatch
) -> None:
    spec = replace(SPECS[name], variable_length=varies, blank_class=1)
    x, y = batch(spec, 6)
    y[:3, counting:] = PADDING
    task = Task(network(spec), spec, sgd())
    task.is_tried, task.trainer = True, SimpleNamespace(world_size=1, train_dataloader=None)
    lengths = (torch.full((6,), 4),) if spec.variable_length else ()
    whole = task.training_step((x, y, *lengths), 0)
    counts: list[Tensor] = []  # of both ranks, which are known when they are asked again

    def add_up(own: Tensor) -> None:
        counts.append(own.clone())
        own.copy_(sum(counts[:2]))

    monkeypatch.setattr(torch.distributed, "all_reduce", add_up)
    task.trainer.world_size = 2
    ranks = [tuple(tensor[part] for tensor in (x, y, *lengths)) for part in (slice(3), slice(3, 6))]
    for _ in range(2):
        outputs = [task.training_step(rank_batch, 0) for rank_batch in ranks]
    for key in ("loss", "acc"):
        torch.testing.assert_close(sum(output[key] for output in outputs) / 2, whole[key])


class OwnLoss(Task):
    def loss(self, output: Any, y: Tensor) -> Tensor:
        return output.mean()


class Weighted(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        return (self.weight * output).mean()


class OwnSetup(Task):
    def setup(self, stage: str) -> None: ...


def test_the_layout_and_the_compilation_of_a_run_are_no_matter_of_a_subclass_and_its_setup(monkeypatch) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, mode, dynamic: compiled.append((mode, dynamic)))
    task = OwnSetup(nn.Conv2d(3, 5, 3, padding=1), SPECS["class per pixel"], sgd(), compile_mode="default")
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cpu")))
    task.prepare(trainer, batch_size=8, samples_per_update=8)
    assert task.model.weight.is_contiguous(memory_format=torch.channels_last)
    assert compiled == [("default", False)]
    spec = replace(SPECS["class per step"], variable_length=True)
    OwnSetup(network(spec), spec, sgd(), compile_mode="default").prepare(trainer, 8, 8)
    assert compiled[1:] == [("default", None)]  # not compiled anew for each length


class Centred(Task):
    """Its loss moves a centre, and draws from Python's and NumPy's generators."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.register_buffer("centre", torch.zeros(()))

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        self.centre += output.detach().mean() + random.random() + numpy.random.rand()
        return super().loss(output - self.centre, y)


def test_a_first_batch_that_is_tried_leaves_no_trace_in_the_loss_and_in_what_is_drawn() -> None:
    task = Centred(network(SPECS["class"]), SPECS["class"], sgd())
    x, y = batch(SPECS["class"], 7)
    before = random.getstate(), numpy.random.get_state()[1].tolist()
    first_output(task, x, y, None)
    assert task.centre == 0
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == before


@pytest.mark.parametrize("kind", ["a function", "a method of a subclass"])
def test_a_loss_of_the_user_is_a_mean_over_samples_whatever_they_count_elsewhere(kind: str) -> None:
    spec = SPECS["class per pixel"]
    (x, y), (x2, y2) = batch(spec, 6), batch(spec, 2)
    y2[:, 1:] = PADDING
    own = kind == "a function"
    task = (
        Task(network(spec), spec, sgd(), loss=lambda output, y: output.mean())
        if own
        else OwnLoss(network(spec), spec, sgd())
    )
    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
    metrics = trainer.validate(task, DataLoader([(x, y), (x2, y2)], batch_size=None), verbose=False)[0]
    with torch.no_grad():
        assert metrics["val/loss"] == pytest.approx(task.model(torch.cat([x, x2])).mean().item(), rel=1e-5)
    assert not task.has_named_loss


@pytest.mark.parametrize(("accumulated", "updates"), [(4, 2), (8, 1)])  # of four batches and of two; of all six
def test_the_last_update_of_an_epoch_is_the_mean_over_the_batches_that_it_has(accumulated: int, updates: int) -> None:
    spec, step_gradients = SPECS["value"], []
    batches = [batch(spec, 2)] * 6
    task = Task(network(spec), spec, sgd(lr=1e-9))

    def copy_gradients(trainer: lightning.Trainer, module: Task, optimizer: Any) -> None:
        step_gradients.append([p.grad.clone() for p in module.parameters()])

    watch = LambdaCallback(on_before_optimizer_step=copy_gradients)
    train(task, watch, data=DataLoader(batches, batch_size=None), max_epochs=1, accumulate_grad_batches=accumulated)
    x, y = batches[0]
    expected = torch.autograd.grad(task.loss(task(x), y), [*task.parameters()])
    assert len(step_gradients) == updates  # all with the same samples
    for gradients in step_gradients:
        torch.testing.assert_close(gradients, [*expected], rtol=1e-4, atol=1e-5)


def test_a_network_and_a_module_may_have_an_input_shape_of_another_meaning() -> None:
    model = network(SPECS["value"])
    model.input_shape = 784
    assert Task(model, SPECS["value"], sgd()).input_shape == (5,)


def test_several_loaders_of_a_stage_are_refused_before_training() -> None:
    data, task = (
        DataLoader([batch(SPECS["value"], 2)], batch_size=None),
        Task(network(SPECS["value"]), SPECS["value"], sgd()),
    )
    with pytest.raises(UserError, match=r"^data: has 2 val loaders, and a Task measures one set; join them by"):
        train(task, data=(data, [data, data]), max_epochs=1)


X, STEPS = torch.zeros(2, 5), replace(SPECS["class per step"], variable_length=True)
TEXTS = "the target of a batch is of the class list, takes a tensor"


@pytest.mark.parametrize(
    ("spec", "given", "message"),
    [
        (SPECS["class"], {"x": X}, "a batch is not what the spec says: it has the fields 'x', and the spec names 'x' and 'y'"),
        (SPECS["class"], [X, ["a", "b"]], TEXTS),
        (STEPS, [torch.zeros(2, 4, 5), ["a", "b"], torch.tensor([4, 4])], TEXTS),
    ],
)  # fmt: skip
def test_a_first_batch_that_is_not_what_the_spec_says_is_one_line(spec: DataSpec, given: Any, message: str) -> None:
    data = DataLoader([given], batch_size=None)
    for call in (lambda: train(Task(network(spec), spec, sgd()), data=data), lambda: measured(spec, [given])):
        with pytest.raises(UnfitError, match=f"^data: {message}$"):
            call()


CLIP = 0.01


def fit(recipe: Any, precision: str, steps: int = 3, init_scale: float = 2.0**10, **options: Any) -> tuple[Any, ...]:
    """Train on two samples; the weights and what the optimizer saw: the gradients of its steps."""
    torch.manual_seed(0)
    spec = SPECS["value"]
    task, step_gradients = Task(nn.Linear(5, 1), spec, recipe), []
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale) if precision == "16-mixed" else None
    # Lightning has no 16-mixed of its own on a CPU.
    how = {"plugins": [MixedPrecision(precision, "cpu", scaler)]} if scaler else {"precision": precision}

    def watch(trainer: lightning.Trainer, module: Task) -> None:
        (optimizer,) = trainer.optimizers
        optimizer.register_step_post_hook(lambda *_: step_gradients.append([p.grad.clone() for p in task.parameters()]))

    data = DataLoader([batch(spec, 2)] * steps, batch_size=None)
    train(task, LambdaCallback(on_train_start=watch), data=data, max_steps=steps, **how, **options)
    return [p.detach().clone() for p in task.parameters()], step_gradients, scaler


def norms(step_gradients: list[list[Tensor]]) -> list[float]:
    return [float(torch.nn.utils.get_total_norm(gradients)) for gradients in step_gradients]


@pytest.mark.parametrize("recipe", [sgd(), adamw()], ids=["sgd", "adamw"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_gradients_are_clipped_by_norm_or_value_at_every_precision(recipe: Any, precision: str) -> None:
    if precision != "16-mixed":  # there they are as the scaler left them
        assert min(norms(fit(recipe, precision)[1])) > CLIP
    assert norms(fit(recipe, precision, gradient_clip_val=CLIP)[1]) == pytest.approx([CLIP] * 3, rel=1e-3)
    step_gradients = fit(recipe, precision, gradient_clip_val=1e-3, gradient_clip_algorithm="value")[1]
    assert [max(float(g.abs().max()) for g in gradients) for gradients in step_gradients] == pytest.approx([1e-3] * 3)


@pytest.mark.parametrize("clip", [CLIP, 1e3])
def test_the_scale_of_the_loss_changes_nothing_of_a_clipped_update(clip: float) -> None:
    plain, scaled = (fit(adamw(), "16-mixed", init_scale=scale, gradient_clip_val=clip)[0] for scale in (1.0, 2.0**10))
    torch.testing.assert_close(plain, scaled, rtol=1e-3, atol=1e-5)


def test_an_overflow_leaves_the_clipped_update_out_and_lowers_the_scale() -> None:
    before, _, scaler = fit(adamw(), "16-mixed", steps=1, init_scale=2.0**40, gradient_clip_val=CLIP)
    torch.manual_seed(0)
    assert all(torch.equal(a, b) for a, b in zip(before, nn.Linear(5, 1).parameters(), strict=True))
    assert scaler.get_scale() == 2.0**39
    later = fit(adamw(), "16-mixed", steps=40, init_scale=2.0**40, gradient_clip_val=CLIP)[0]
    assert all(weights.isfinite().all() for weights in later)
    assert not torch.equal(later[0], before[0])


def test_the_learning_rate_is_that_of_the_samples_of_an_update_whatever_a_rank_says_of_its_data() -> None:
    data = Plain(batch_size=200)
    data.num_samples = lambda split: 38
    recipe = sgd(lr=0.1, lr_scaling="linear", reference_batch_size=76)
    task = Task(nn.Sequential(nn.Flatten(), nn.Linear(64, 4)), Plain.spec, recipe)
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=1, limit_val_batches=0, **off)
    task.prepare(trainer, batch_size=200, samples_per_update=76)
    trainer.fit(task, datamodule=data)
    assert trainer.optimizers[0].defaults["lr"] == pytest.approx(0.1)


def test_metrics_of_steps_with_one_logit_have_probabilities_too() -> None:
    spec = DataSpec("sequence", (3, 2), "class_per_step", 1, variable_length=True)
    output, y = torch.tensor([[[0.4], [0.3], [0.2]]]), torch.tensor([[1, 1, PADDING]])
    answers, targets = for_metrics(spec, output, y, torchmetrics.classification.BinaryF1Score())
    assert torch.equal(answers, torch.tensor([0.4, 0.3]).sigmoid())
    assert targets.tolist() == [1, 1] and not targets.is_floating_point()


def test_only_weights_of_four_dimensions_lie_channels_last() -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv3d(3, 8, 3))
    lay_out_channels_last(network)
    assert network[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert network[1].weight.is_contiguous()
