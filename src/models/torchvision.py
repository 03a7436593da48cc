"""Any classification network of torchvision with one output, by name, for models that keep a large GPU busy.

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
_SEVERAL_OUTPUTS = ("googlenet", "inception_v3")  # in training


class TorchvisionModel(nn.Module):
    """A torchvision network whose first convolution and last layer are fitted to the data; not GoogLeNet and Inception.

    Args:
        spec: of image data.
        name: as in `torchvision.models.list_models`, for example `resnet18`.
        weights: the name of pretrained weights, which are downloaded; None: random weights.
        image_size: the height and width to which the model resizes images (bilinear). None: unchanged if the network
            can run on them, and otherwise the size that it is made for: 224 (VGG and ViT on MNIST), or that of its weights.

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
        known = [one for one in torchvision.models.list_models(torchvision.models) if one not in _SEVERAL_OUTPUTS]
        if name not in known:
            raise UserError(
                f"model.name: got '{name}', takes a network of torchvision with one output.{did_you_mean(name, known)}"
            )
        self.network = _build(name, weights, spec)
        self.image_size = image_size
        native = getattr(self.network, "image_size", NATIVE_SIZE)  # weights of a ViT may be of larger images
        if image_size is None:
            if not _runs(self.network, spec.input_shape):
                self.image_size = native
        elif not _runs(self.network, (spec.input_shape[0], image_size, image_size)):
            raise UserError(f"model.image_size: got {image_size}, which {name} cannot run on; it does on {native}")
        size = self.image_size
        self.input_shape = (spec.input_shape[0], size, size) if size else spec.input_shape  # after resizing

    def forward(self, x: Tensor) -> Tensor:
        """Images `x: (B, C, H, W)` to class scores `(B, num_outputs)`."""
        if self.image_size:
            x = nn.functional.interpolate(x, size=(self.image_size, self.image_size), mode="bilinear")
        return self.network(x)


def _build(name: str, weights: str | None, spec: DataSpec) -> nn.Module:
    try:
        if weights is not None:  # torchvision runs the code in a file of weights, so that it is read without first
            named: Any = torchvision.models.get_model_weights(name).verify(weights)
            named.get_state_dict(check_hash=True, weights_only=True)
    except (KeyError, ValueError) as error:
        known = list(torchvision.models.get_model_weights(name).__members__)
        near = did_you_mean(str(weights), known)
        raise UserError(f"model.weights: got '{weights}', takes {' or '.join(known)} for {name}.{near}") from error
    except (OSError, HTTPException, EOFError, RuntimeError) as error:  # the last two of a file that was cut off
        raise UserError(f"model.weights: {weights} of {name} could not be downloaded: {in_one_line(error)}") from error
    except pickle.UnpicklingError as error:
        raise UserError(
            f"model.weights: the file of {weights} in {torch.hub.get_dir()} holds more than tensors; delete it and run "
            "again"
        ) from error
    network = torchvision.models.get_model(name, weights=weights)
    modules = [(path, each) for path, each in network.named_modules() if isinstance(each, nn.Linear | nn.Conv2d)]
    path, first = next((path, each) for path, each in modules if isinstance(each, nn.Conv2d))
    if first.in_channels != spec.input_shape[0]:
        network.set_submodule(path, _like(first, spec.input_shape[0], first.out_channels))
    path, last = modules[-1]  # the classifier: a linear layer, or a 1×1 convolution as in SqueezeNet
    if isinstance(last, nn.Linear):
        network.set_submodule(path, nn.Linear(last.in_features, spec.num_outputs, bias=last.bias is not None))
    else:
        network.set_submodule(path, _like(last, last.in_channels, spec.num_outputs))
    return network


def _runs(network: nn.Module, shape: tuple[int, ...]) -> bool:
    """Whether the network can run on images `(C, H, W)`; tried on meta tensors, which have no memory."""
    state = {n: t.to("meta") for n, t in itertools.chain(network.named_parameters(), network.named_buffers())}
    try:
        torch.func.functional_call(network, state, torch.empty(2, *shape, device="meta"))
    except (RuntimeError, AssertionError, ValueError):  # for example a pooling window larger than its input
        return False
    return True


def _like(old: nn.Conv2d, in_channels: int, out_channels: int) -> nn.Conv2d:
    window: dict[str, Any] = {n: getattr(old, n) for n in ("kernel_size", "stride", "padding", "dilation")}
    return nn.Conv2d(in_channels, out_channels, **window, bias=old.bias is not None)
