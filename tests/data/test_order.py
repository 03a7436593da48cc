"""Batches: in an order that is a function of (seed, epoch) alone, whatever serves them, on however many processes."""

from itertools import chain, product
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from batchscope.data.order import DeterministicBatchSampler, epoch_seed
from tests.data.support import Recorder, loaded, numbers
from tests.support.command_lines import refusal
from tests.support.third_party_modules import train


def reference(num: int = 50, batch_size: int = 8, epoch: int = 0, seed: int = 0, world: int = 1, least: int = 1) -> Any:
    """The samples of each rank's batches: slices of one shuffled list. A too small remainder joins the last batch."""
    order = torch.randperm(num, generator=torch.Generator().manual_seed(epoch_seed(seed, epoch))).tolist()
    batches = [order[first : first + batch_size * world] for first in range(0, num, batch_size * world)]
    if len(batches) > 1 and len(batches[-1]) < world * least:
        batches[-2:] = [batches[-2] + batches[-1]]
    return [[numpy.array_split(batch, world)[rank].tolist() for batch in batches] for rank in range(world)]


@pytest.mark.parametrize(
    ("num", "batch_size"), [(1, 1), (3, 5), (10, 5), (11, 5), *((num, 8) for num in (11, 31, 32, 33, 35, 63, 65, 107))]
)
def test_each_rank_has_its_share_of_the_reference(num, batch_size, as_rank) -> None:
    for world, least, rank in product((1, 2, 3, 4), (1, 2), range(4)):
        if rank >= world:
            continue
        as_rank(rank, world)
        expected = reference(num, batch_size, 2, 1, world, least)
        share = expected[rank]
        batches = DeterministicBatchSampler(num, batch_size, shuffle=True, seed=1, min_samples=least)
        batches.set_epoch(2)
        order, indices = batches.order().tolist(), range(len(batches))
        assert list(batches) == [(2, batch) for batch in share]
        firsts = [batches.first_sample(number) for number in indices]
        assert [order[first : first + len(batch)] for first, batch in zip(firsts, share, strict=True)] == share
        sizes = [sum(map(len, parts)) for parts in zip(*expected, strict=True)]
        weights = [len(batch) * world / size for batch, size in zip(share, sizes, strict=True)]
        assert [batches.weight(number) for number in indices] == weights


def test_every_pair_of_seed_and_epoch_has_an_order_of_its_own_in_every_version() -> None:
    seeds = [0, 1, 2, 255, 256, 257, 1 << 24, (1 << 32) - 1]
    orders = {tuple(chain(*reference(epoch=epoch, seed=seed)[0])) for seed in seeds for epoch in range(5)}
    assert len(orders) == len(seeds) * 5
    assert reference(epoch=2, seed=3)[0][0] == [24, 22, 33, 46, 19, 47, 23, 49]


CASES: dict[str, dict[str, Any]] = {
    "an epoch of another seed": {"seed": 3, "epoch": 5},
    "a resume at the beginning": {},
    "a resume in the middle of an epoch": {"epoch": 2, "done": 3},
    "a resume at an epoch's end": {"epoch": 2, "done": 7},
    "a rest that batch norm could not be trained on": {"batch_size": 7, "least": 2, "epoch": 2, "done": 5},
    "one of two ranks": {"batch_size": 4, "world": 2},
}
PIPELINES = [("memory", 0), ("device", 0), ("workers", 0)]


@pytest.mark.parametrize(
    ("pipeline", "workers", "case"),
    [*((*pair, case) for case in CASES for pair in PIPELINES), ("workers", 2, "a resume in the middle of an epoch")],
)
def test_every_pipeline_serves_the_reference(pipeline, workers, case, as_rank) -> None:
    params = {"batch_size": 8, "epoch": 0, "seed": 0, "world": 1, "least": 1, **CASES[case]}
    batches_done = params.pop("done", 0)
    as_rank(params["world"] - 1, params["world"])
    options = {name: params[name] for name in ("batch_size", "seed")}
    data = numbers(pipeline=pipeline, num_workers=workers, **options)
    before = torch.get_rng_state()
    data.resume_at(params["epoch"], batches_done)
    norms = [nn.BatchNorm1d(1)] * (params["least"] - 1)
    batches = loaded(data, modules=lambda: norms).train_dataloader()
    next(iter(batches), None)  # an abandoned epoch changes nothing
    for start in (batches_done, 0):
        batches.batch_sampler.set_epoch(params["epoch"])
        expected, served = reference(**params)[-1], list(batches)
        assert [y.tolist() for _, y in served] == expected[start:]
        assert all(x.flatten(1).tolist() == [[2 * i, 2 * i + 1] for i in y] for x, y in served)
        assert len(batches) == len(expected)
        params["epoch"] += 1
    assert torch.equal(torch.get_rng_state(), before)  # the random state of the model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"overfit_batches": 2}])
@pytest.mark.parametrize("pipeline", ["memory", "workers"])
def test_lightning_tells_the_loader_which_epoch_it_is(pipeline, options) -> None:
    recorder, data = Recorder(), numbers(batch_size=8, pipeline=pipeline, num_workers=0, seed=6)
    train(recorder, data=data, max_epochs=3, use_distributed_sampler=False, limit_val_batches=0, **options)
    served = [[y.tolist() for _, y in batches] for batches in recorder.trained.values()]
    shuffled = [reference(epoch=epoch, seed=6)[0] for epoch in range(3)]
    assert served == ([[[*range(8)], [*range(8, 16)]]] * 3 if options else shuffled)


@pytest.mark.parametrize(
    ("shape", "batch_size", "expected"),
    [
        ((1, 28, 28), 8, 256),
        ((1, 28, 28), 300, 300),  # which training holds, too
        ((3, 32, 32), 8, 256),
        ((3, 224, 224), 8, 27),  # 16 MiB of what the network computes on
        ((3, 4000, 4000), 8, 8),
    ],
)
def test_evaluation_takes_batches_that_fill_a_device_and_not_its_memory(shape, batch_size, expected) -> None:
    data = loaded(numbers(batch_size=batch_size), input_shape=shape, is_of_zoo=True)
    assert data.val_dataloader().batch_sampler.batch_size == expected
    data.setup("test")
    assert data.test_dataloader().batch_sampler.batch_size == expected


def test_attributes_of_anybodys_module_that_mean_something_else_are_left_alone() -> None:
    data = loaded(numbers(batch_size=8), input_shape=784, is_of_zoo=True)
    assert data.val_dataloader().batch_sampler.batch_size == 256


class OfAnotherPackage(nn.modules.batchnorm._BatchNorm): ...


@pytest.mark.parametrize(("layer", "least"), [(nn.Linear(3, 3), 1), (nn.BatchNorm1d(3), 2), (OfAnotherPackage(3), 2)])
def test_no_batch_of_anybodys_module_with_batch_norm_is_one_sample(layer: nn.Module, least: int) -> None:
    data = loaded(numbers(batch_size=8), modules=nn.Sequential(layer).modules)
    assert data.train_dataloader().batch_sampler.min_samples == least


def test_too_few_samples_for_the_ranks_are_one_line(as_rank) -> None:
    as_rank(0, 51)
    for split, loader in (("training", "train_dataloader"), ("validation", "val_dataloader")):
        message = f"trainer.devices: 51 processes, and own has 50 {split} samples"
        assert refusal(getattr(loaded(numbers()), loader)) == message


def test_evaluation_samples_come_in_the_stored_order() -> None:
    batches = loaded(numbers(517, batch_size=8)).val_dataloader()
    for epoch in (0, 1):
        batches.batch_sampler.set_epoch(epoch)
        served = [y.tolist() for _, y in batches]
        assert [len(batch) for batch in served] == [256, 256, 5]
        assert [*chain(*served)] == [*range(517)]
