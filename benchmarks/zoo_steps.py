"""A training step of each model of the zoo by its config, on one batch of random numbers that repeats."""

from typing import Any

import torch

from batchscope.data.spec import DataSpec
from batchscope.options.compose import check_command_line
from batchscope.training.build import build
from batchscope.training.task import Task

MNIST = DataSpec("image", (1, 28, 28), "class", 10)
CIFAR = DataSpec("image", (3, 32, 32), "class", 10)
SPECS = {"torchvision": CIFAR}


def zoo_task(model: str, *options: str) -> Task:
    """The task of `model=<model>`, with further options of the model such as `model.backend=reference`."""
    spec = SPECS.get(model, MNIST)
    data = "cifar10" if spec is CIFAR else "digits"
    line = [f"model={model}", f"data={data}", *options, "optimizer.schedule=constant"]
    config = check_command_line(line, multirun=False)[0]
    return Task(build(config["model"], "model", spec=spec), spec, build(config["optimizer"], "optimizer"))


def zoo_batch(model: str, samples: int) -> Any:
    spec = SPECS.get(model, MNIST)
    return torch.randn(samples, *spec.input_shape), torch.randint(spec.num_outputs, (samples,))
