"""Any classification network of torchvision with one output, by name: models that keep a large GPU busy.

Shapes: B images in a batch, C channels, H height, W width.
"""

import itertools
import pickle
from http.client import HTTPException
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

from ..data.spec import DataSpec
from ..errors import UserError, did_you_mean, in_one_line
from ..options.types import Choice, PositiveInt

NATIVE_SIZE = 224  # the image size that the networks were designed for
_SEVERAL_OUTPUTS = ("googlenet", "inception_v3")  # networks with auxiliary outputs in training


class TorchvisionModel(nn.Module):
    """A torchvision network whose first convolution and last layer fit the data; all but GoogLeNet and Inception.

    Args:
        spec: the spec of image data.
        name: a name of `torchvision.models.list_models`, for example `resnet18`.
        weights: the name of pretrained weights, which are downloaded; None: random weights.
        image_size: the height and width to which the model resizes images (bilinear). None: no resizing if the network
            can run on the images, and otherwise its native size: 224 (VGG and ViT on MNIST), or that of its weights.

    Raises:
        UserError: for an unknown name, weights that the network does not have, or images too small for it.
    """

    accepts = ("image",)

    def __init__(
        self,
        spec: DataSpec,
        name: Choice = "resnet18",
        weights: str | None = None,
        image_size: PositiveInt | None = None,
    ):
        super().__init__()
        names = [n for n in torchvision.models.list_models(torchvision.models) if n not in _SEVERAL_OUTPUTS]
        if name not in names:
            raise UserError(
                f"model.name: got '{name}', takes a network of torchvision with one output.{did_you_mean(name, names)}"
            )
        self.network = _build_network(name, weights, spec)
        self.image_size = image_size
        native_size = getattr(self.network, "image_size", NATIVE_SIZE)  # some weights of a ViT are for larger images
        if image_size is None:
            if not _can_run(self.network, spec.input_shape):
                self.image_size = native_size
        elif not _can_run(self.network, (spec.input_shape[0], image_size, image_size)):
            raise UserError(f"model.image_size: got {image_size}, which {name} cannot run on; it does on {native_size}")
        size = self.image_size
        self.input_shape = (spec.input_shape[0], size, size) if size else spec.input_shape  # after resizing

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores `(B, num_outputs)` for images `x: (B, C, H, W)`."""
        if self.image_size:
            x = nn.functional.interpolate(x, size=(self.image_size, self.image_size), mode="bilinear")
        return self.network(x)


def _build_network(name: str, weights: str | None, spec: DataSpec) -> nn.Module:
    try:
        if weights is not None:  # get_model would run code in the file, so that it is first read with weights_only=True
            entry: Any = torchvision.models.get_model_weights(name).verify(weights)
            entry.get_state_dict(check_hash=True, weights_only=True)
    except (KeyError, ValueError) as error:
        names = list(torchvision.models.get_model_weights(name).__members__)
        hint = did_you_mean(str(weights), names)
        raise UserError(f"model.weights: got '{weights}', takes {' or '.join(names)} for {name}.{hint}") from error
    except (OSError, HTTPException, EOFError, RuntimeError) as error:  # the last two: a truncated file
        raise UserError(f"model.weights: {weights} of {name} could not be downloaded: {in_one_line(error)}") from error
    except pickle.UnpicklingError as error:
        raise UserError(
            f"model.weights: the file of {weights} in {torch.hub.get_dir()} holds more than tensors; delete it and run "
            "again"
        ) from error
    network = torchvision.models.get_model(name, weights=weights)
    layers = [(path, layer) for path, layer in network.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    path, stem = next((path, layer) for path, layer in layers if isinstance(layer, nn.Conv2d))
    if stem.in_channels != spec.input_shape[0]:
        network.set_submodule(path, _resize_convolution(stem, spec.input_shape[0], stem.out_channels))
    path, head = layers[-1]  # a linear layer, or a 1×1 convolution as in SqueezeNet
    if isinstance(head, nn.Linear):
        network.set_submodule(path, nn.Linear(head.in_features, spec.num_outputs, bias=head.bias is not None))
    else:
        network.set_submodule(path, _resize_convolution(head, head.in_channels, spec.num_outputs))
    return network


def _can_run(network: nn.Module, shape: tuple[int, ...]) -> bool:
    """Whether the network can run on images `(C, H, W)`; tried on meta tensors, which take no memory."""
    state = {n: t.to("meta") for n, t in itertools.chain(network.named_parameters(), network.named_buffers())}
    try:
        torch.func.functional_call(network, state, torch.empty(2, *shape, device="meta"))
    except (RuntimeError, AssertionError, ValueError):  # for example a pooling window larger than its input
        return False
    return True


def _resize_convolution(layer: nn.Conv2d, in_channels: int, out_channels: int) -> nn.Conv2d:
    window: dict[str, Any] = {name: getattr(layer, name) for name in ("kernel_size", "stride", "padding", "dilation")}
    return nn.Conv2d(in_channels, out_channels, **window, bias=layer.bias is not None)
