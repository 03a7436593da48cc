"""FLOPs of the zoo's training steps on paper."""

from pathlib import Path

import torch
import yaml
from hydra.utils import instantiate
from torch import Tensor

from batchscope.data.spec import DataSpec
from batchscope.training.task import Task

MODELS = Path(__file__).parents[2] / "configs" / "model"
MNIST = DataSpec("image", (1, 28, 28), "class", 10)
CIFAR = DataSpec("image", (3, 32, 32), "class", 10)
ADDING = DataSpec("sequence", (60, 2), "value", 1)
COPY_MEMORY = DataSpec("sequence", (50, 10), "class_per_step", 9)
BATCH = 4


def linear(fan_in: int, fan_out: int) -> int:
    return 2 * fan_in * fan_out


def conv(size: int, c_in: int, c_out: int, kernel: int, groups: int = 1) -> int:
    return 2 * size * size * kernel * kernel * (c_in // groups) * c_out


def recurrent(
    steps: int, features: int, hidden: int, gates: int = 1, layers: int = 1, directions: int = 1
) -> tuple[int, int]:
    """Forward and backward FLOPs of stacked recurrent layers on an input that needs no gradient.

    A step multiplies its input and its state by a weight each. Backward, each weight gets a gradient at every step;
    so does the state but for the first one, which is zeros, and the input but for the first layer's.
    """
    forward = backward = 0
    for layer in range(layers):
        input_part = linear(features if layer == 0 else directions * hidden, gates * hidden)
        state_part = linear(hidden, gates * hidden)
        forward += directions * steps * (input_part + state_part)
        backward += directions * steps * (input_part + state_part)
        backward += directions * ((steps - 1) * state_part + (steps * input_part if layer else 0))
    return forward, backward


def with_head(cells: tuple[int, int], hidden: int, outputs: int, times: int = 1) -> tuple[int, int]:
    head = times * linear(hidden, outputs)
    return cells[0] + head, cells[1] + 2 * head


def chain(*layers: int) -> tuple[int, int]:
    """Layers one after another: backward, each takes twice its forward FLOPs, but the first passes no gradient on."""
    return sum(layers), 2 * sum(layers) - layers[0]


CNN = chain(conv(28, 1, 32, 3), conv(14, 32, 64, 3), linear(7 * 7 * 64, 128), linear(128, 10))
# conv 7×7/2 and 3×3/2 pooling: 32 → 16 → 8; then four stages, each but the first halving, with a 1×1 shortcut.
RESNET18 = chain(
    conv(16, 3, 64, 7),
    4 * conv(8, 64, 64, 3),
    *(
        conv(size, c // 2, c, 3) + 3 * conv(size, c, c, 3) + conv(size, c // 2, c, 1)
        for size, c in ((4, 128), (2, 256), (1, 512))
    ),
    linear(512, 10),
)
ZOO = {
    ("cnn", MNIST): CNN,
    ("mlp", MNIST): chain(linear(784, 512), linear(512, 256), linear(256, 10)),
    ("rnn_cell", MNIST): with_head(recurrent(28, 28, 128), 128, 10),
    ("rnn_cell", ADDING): with_head(recurrent(60, 2, 128), 128, 1),
    ("lstm_cell", ADDING): with_head(recurrent(60, 2, 128, gates=4), 128, 1),
    ("lstm_cell", COPY_MEMORY): with_head(recurrent(50, 10, 128, gates=4), 128, 9, times=50),
    ("stacked_lstm", MNIST): with_head(recurrent(28, 28, 128, gates=4, layers=2), 128, 10),
    ("torchvision", CIFAR): RESNET18,
}


def zoo_task(name: str, spec: DataSpec) -> tuple[Task, tuple[Tensor, Tensor]]:
    node = yaml.safe_load((MODELS / f"{name}.yaml").read_text())
    model = instantiate(node, _partial_=True, _convert_="all")(spec=spec)
    shape = {"class": (BATCH,), "value": (BATCH,), "class_per_step": (BATCH, spec.input_shape[0])}[spec.target]
    y = torch.zeros(shape) if spec.target == "value" else torch.zeros(shape, dtype=torch.long)
    return Task(model, spec, optimizer=None), (torch.randn(BATCH, *spec.input_shape), y)
