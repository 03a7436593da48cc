"""On a GPU: precisions, clipping, overflow, layouts, pipelines, memory, and a resumed run."""

import itertools
import math

import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback
from lightning.pytorch.plugins import MixedPrecision
from torch.nn.utils import get_total_norm

from batchscope.callbacks.nonfinite import StopOnNonFinite
from batchscope.errors import NonFiniteError
from batchscope.models.recurrent import RNNCell, StackedLSTM, unroll
from tests.gpu.conftest import REHEARSAL, each_precision
from tests.support.recipes import sgd
from tests.support.runs import EVERY_4, SMALL, assert_alike, kill_9, record, results, run
from tests.support.spawned import TRAIN, end, spawn

pytestmark = pytest.mark.gpu
STEP = "batchscope.training.task.Task.training_step"
TOLERANCE = {"fp32": 1e-4, "tf32": 2e-2, "bf16": 8e-2, "fp16": 2e-2}  # of the largest value


class EachEpoch(Callback):
    """The memory that torch has taken from the device, and the loss of the last step, at the end of each epoch."""

    def __init__(self):
        self.reserved, self.losses = [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.last = outputs["loss"]

    def on_train_epoch_end(self, trainer, pl_module):
        self.losses.append(float(self.last))
        if pl_module.device.type == "cuda":
            self.reserved.append(torch.cuda.memory_reserved(pl_module.device))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_gradients_of_every_precision_are_checked(train, precision):
    trainer, _ = train(StopOnNonFinite(), precision=precision, limit_train_batches=3)
    assert trainer.global_step == 3
    spoil = LambdaCallback(
        on_before_backward=lambda trainer, module, loss: loss.register_hook(lambda gradient: gradient * math.nan)
    )
    with pytest.raises(NonFiniteError):
        train(spoil, StopOnNonFinite(), precision=precision, limit_train_batches=3)


def test_every_pipeline_trains_alike_and_takes_no_more_memory_with_time(train):
    callbacks = {pipeline: EachEpoch() for pipeline in ("memory", "device", "workers")}
    for pipeline, callback in callbacks.items():
        train(callback, data={"pipeline": pipeline, "num_workers": 1}, max_epochs=2 if REHEARSAL else 6)
        assert len(set(callback.reserved[1:])) <= 1, f"{pipeline}: {callback.reserved}"
    for first, second in itertools.pairwise(callbacks.values()):
        assert first.losses == pytest.approx(second.losses, rel=0.05)


@pytest.mark.parametrize("kind", ["rnn", "lstm", "stacked_lstm"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"] if REHEARSAL else list(TOLERANCE))
def test_the_fused_kernels_compute_what_the_readable_cells_do(kind, precision, device):
    if device.type == "cuda":
        for switch in (torch.backends.cuda.matmul, torch.backends.cudnn.rnn):
            switch.fp32_precision = "tf32" if precision == "tf32" else "ieee"
    torch.manual_seed(0)
    network = RNNCell(12, 32) if kind == "rnn" else StackedLSTM(1 if kind == "lstm" else 3, 12, 32, dropout=0.0)
    network.to(device)
    x = torch.randn(16, 20, 12, device=device)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    outputs = {}
    for backend in ("reference", "fused"):
        network.zero_grad()
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            if kind == "rnn":
                output = unroll(network, x, backend=backend)[0]
            else:
                network.backend = backend
                output = network(x)[0]
        output.float().square().sum().backward()
        outputs[backend] = [output.detach(), *(parameter.grad.clone() for parameter in network.parameters())]
    for readable, fast in zip(outputs["reference"], outputs["fused"], strict=True):
        largest = TOLERANCE[precision] * float(readable.abs().max())
        torch.testing.assert_close(fast.float(), readable.float(), rtol=0, atol=largest)


@each_precision
def test_gradients_are_clipped_at_every_precision(precision, train):
    norms = []

    def note(trainer, module, optimizer):
        gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
        if gradients:  # the gradients of the last update
            norms.append(float(get_total_norm(gradients)))

    train(LambdaCallback(on_before_zero_grad=note), precision=precision, gradient_clip_val=1e-3)
    finite = [norm for norm in norms if math.isfinite(norm)]  # the scaler's first scale may be too large
    assert len(finite) >= len(norms) / 2 > 0
    assert max(finite) <= 1e-3 * 1.01


@pytest.mark.usefixtures("cuda")
def test_a_first_overflow_of_the_scaler_leaves_the_weights_and_the_momentum_sound(train):
    weights = []

    def note(trainer, module, batch, batch_idx):
        weights.append([parameter.detach().clone() for parameter in module.parameters()])

    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**24, growth_interval=1)
    plugin = MixedPrecision("16-mixed", "cuda", scaler)
    trainer, task = train(
        LambdaCallback(on_train_batch_start=note),
        plugins=plugin,
        optimizer=sgd(lr=0.01, schedule="one_cycle"),
        max_epochs=4,
    )
    assert all(map(torch.equal, weights[0], weights[1])), "the first step overflows, and is skipped"
    assert not all(map(torch.equal, weights[0], weights[-1]))
    assert all(parameter.isfinite().all() for parameter in task.parameters())
    momentum = [state["momentum_buffer"] for state in trainer.optimizers[0].state.values()]
    assert momentum and all(buffer.isfinite().all() for buffer in momentum)
    convolutions = [weight for weight in weights[0] if weight.dim() == 4]
    assert all(weight.is_contiguous(memory_format=torch.channels_last) for weight in convolutions)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_network_trains_as_the_network_does(mode, cuda, train):
    """tests/training/test_compiling.py tests the same on a CPU."""
    eager, compiled = EachEpoch(), EachEpoch()
    train(eager, max_epochs=3)
    train(compiled, max_epochs=3, mode=mode)
    assert compiled.losses == pytest.approx(eager.losses, rel=0.05)


@pytest.mark.parametrize("model", ["cnn", "stacked_lstm", *["lstm_cell"] * (not REHEARSAL)])  # as the others, on a CPU
def test_a_killed_run_is_resumed_bit_for_bit(model, accelerator, tmp_path):
    """With deterministic kernels. cuDNN keeps the random state of its dropout to itself, so the LSTM is the readable one."""
    options = [*SMALL, f"trainer.accelerator={accelerator}", "trainer.deterministic=true", EVERY_4, "hydra.run.dir=out"]
    if model == "cnn":
        options = [word for word in options if not word.startswith(("model.", "data.delay"))] + ["data=digits"]
    options.append(f"model={model}")
    options += ["model.backend=reference"] if model == "stacked_lstm" else []
    uninterrupted = run(tmp_path / "whole", *options)
    assert uninterrupted.end() == 0, uninterrupted.complained
    assert run(tmp_path / "killed", *options, faults=[(STEP, 18, kill_9)]).end() == -9
    resumed = run(tmp_path / "killed", "resume=out")
    assert resumed.end() == 0, resumed.complained
    assert_alike(results(tmp_path / "killed" / "out"), results(tmp_path / "whole" / "out"))


@pytest.mark.usefixtures("cuda")
def test_a_run_out_of_memory_is_a_row_of_its_sweep(tmp_path, mnist_files):
    """1,536 images take some 400 GB, and no tensor among them has more elements than 32 bits can count."""
    options = ["experiment=throughput", "model=torchvision", "model.name=resnet152", "model.image_size=224"]
    options += ["data=mnist", f"data.root={mnist_files}", "trainer.accelerator=gpu", "data.batch_size=8,1536,16"]
    end(spawn(tmp_path, TRAIN, "-m", *options, f"hydra.sweep.dir={tmp_path}"))
    records = [record(path.parent) for path in tmp_path.rglob("run.json")]
    statuses = {run_record["config"]["data"]["batch_size"]: run_record["status"] for run_record in records}
    assert statuses == {8: "finished", 16: "finished", 1536: "out_of_memory"}
