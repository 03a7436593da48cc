"""Task: what is measured of an evaluation counts every sample once, whichever batch and process it is in."""

import lightning
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from batchscope.optimizer import SGD
from batchscope.spec import DataSpec
from batchscope.task import Task

SPECS = {
    "class": DataSpec(kind="image", input_shape=(5,), target="class", num_outputs=3),
    "class per step": DataSpec(kind="sequence", input_shape=(4, 5), target="class_per_step", num_outputs=3),
    "value": DataSpec(kind="sequence", input_shape=(5,), target="value", num_outputs=1),
}
specs = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())


def batch(spec: DataSpec, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(size, *spec.input_shape, generator=generator)
    if spec.target == "value":
        return x, torch.randn(size, generator=generator)
    steps = spec.input_shape[:-1] if spec.target == "class_per_step" else ()
    return x, torch.randint(0, spec.num_outputs, (size, *steps), generator=generator)


def measured(spec: DataSpec, batches: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
    torch.manual_seed(0)
    task = Task(nn.Linear(5, spec.num_outputs), spec, SGD(lr=0.1))
    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
    return trainer.validate(task, DataLoader(batches, batch_size=None), verbose=False)[0]


@specs
def test_batches_of_different_sizes_count_by_their_samples(spec: DataSpec) -> None:
    parts = [batch(spec, 7), batch(spec, 2)]
    whole = tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))
    assert measured(spec, parts) == pytest.approx(measured(spec, [whole]), rel=1e-6)


@specs
def test_an_empty_batch_counts_for_nothing(spec: DataSpec) -> None:
    full, empty = batch(spec, 7), tuple(tensor[:0] for tensor in batch(spec, 1))
    assert measured(spec, [full, empty]) == measured(spec, [empty, full]) == measured(spec, [full])
