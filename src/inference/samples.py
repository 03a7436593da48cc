"""Get inputs of a network for an export or a prediction, from its data or from its `example_input_array`."""

import inspect
from collections.abc import Mapping
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from lightning import LightningDataModule, LightningModule
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ..data.base import DataModule
from ..data.plain import Data, has_test, lightning_datamodule
from ..data.spec import LENGTHS, DataSpec, accepts_argument, forward_arguments
from ..errors import UserError
from ..options.signatures import live_signature
from ..training.trial import blamed
from .load import Trained, trainer_for

SPLITS = {"test": "test", "val": "validate", "predict": "predict"}  # Lightning's stage of each split
_NUM_COPIES = 8  # copies of a single sample
# The hooks of a transfer to a device in Lightning's order, with the arguments between batch and dataloader index.
_TRANSFER_HOOKS = {
    "on_before_batch_transfer": (),
    "transfer_batch_to_device": (torch.device("cpu"),),
    "on_after_batch_transfer": (),
}
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Samples(NamedTuple):
    """Inputs on the CPU in the form of `DataSpec.parts`, lengths if the network takes them, and their source."""

    inputs: Any
    lengths: Tensor | None
    of: str = "test samples"

    @property
    def named(self) -> dict[str, Tensor]:
        """The inputs by name; a single input, which the network gets by position, is `x`."""
        return forward_arguments(self.inputs if isinstance(self.inputs, Mapping) else {"x": self.inputs}, self.lengths)[
            1
        ]

    def __len__(self) -> int:
        return len(next(iter(self.named.values())))

    def repeated(self, size: int) -> "Samples":
        """Return `size` samples, cycling through them."""
        return self.rows(torch.arange(size) % len(self))

    def rows(self, index: slice | Tensor) -> "Samples":
        """Return the samples at an index, on the CPU."""
        inputs, lengths = tree_map_only(Tensor, lambda tensor: tensor[index].cpu(), (self.inputs, self.lengths))
        return Samples(inputs, lengths, self.of)


def samples_of(trained: Trained, max_samples: int) -> Samples:
    """Return inputs of the network: its `example_input_array`, or those of a batch, of the test set if there is one.

    Raises:
        UserError: if it is unknown which inputs the network takes from the batch.
    """
    if trained.example is not None:
        inputs = _forward_inputs(trained.example, trained.module, is_batch=False)
        return _try_samples(trained, Samples(inputs, None, "rows of example_input_array"), max_samples)
    batch, source = _first_batch(trained)
    samples = Samples(*batch_inputs(trained, batch), source)
    has_spec = trained.data_info.spec is not None
    return samples.rows(slice(max_samples)) if has_spec else _try_samples(trained, samples, max_samples)


def batch_inputs(trained: Trained, batch: Any, has_target: bool = True) -> tuple[Any, Tensor | None]:
    """Return the inputs and lengths that the network takes from a batch, as `DataSpec.parts` has them.

    The spec of the data determines them or, without one, the signature of `forward`. `has_target` as in `split_batch`.
    """
    spec = trained.data_info.spec
    if spec is None:
        return _forward_inputs(batch, trained.module), None
    x, _, lengths = split_batch(spec, batch, has_target)
    return x, lengths if accepts_argument(trained.network, LENGTHS) else None


def split_batch(spec: DataSpec, batch: Any, has_target: bool) -> tuple[Any, Any, Tensor | None]:
    """Return the result of `DataSpec.parts`. Without a target, a batch is inputs, or inputs and lengths."""
    if has_target:
        return spec.parts(batch)
    x, *rest = batch if isinstance(batch, list | tuple) else (batch,)
    lengths = rest[0] if rest else x.get(LENGTHS) if isinstance(x, Mapping) else None
    if isinstance(x, Mapping):
        x = {name: x[name] for name in spec.inputs}
        x = x if len(x) > 1 else x[spec.inputs[0]]
    return x, None, lengths if spec.variable_length else None


def _first_batch(trained: Trained) -> tuple[Any, str]:
    """Return the first batch of the test, validation or training set, the first of them that has one, and its name."""
    data, module = trained.data, lightning_datamodule(trained.data)
    data.prepare_data()
    module.trainer = trainer_for(trained)  # a `setup` may read it, as in Lightning
    splits = (split for split in ("test", "val") if has_split(data, split))
    served = ((_loaders(data, setup_stage(data, split), split), split) for split in splits)
    loaders, split = next(filter(itemgetter(0), served), None) or (_loaders(data, "fit", "train"), "train")
    batch = next(iter(loaders[0]))
    trained.module.trainer = module.trainer
    try:
        for hook, device in _TRANSFER_HOOKS.items():
            # As in Lightning; but a hook of the class, because an instance's augments for training.
            owner = module if is_overridden(hook, type(module), LightningDataModule) else trained.module
            with blamed("data", f"{hook} of {type(owner).__name__} fails"):
                batch = getattr(owner, hook)(batch, *device, 0)
    finally:
        trained.module.trainer = None
    return batch, f"{split} samples"


def setup_stage(data: Data, split: str) -> str:
    """Return the stage that sets a split up: in other datamodules, often only `fit` sets validation data up."""
    return "fit" if split == "val" and not isinstance(data, DataModule) else SPLITS[split]


def _loaders(data: Data, stage: str, split: str) -> list[Any]:
    """Return the loaders of a split that have a batch; a datamodule may return several, nested, or none."""
    data.setup(stage)
    nested = getattr(lightning_datamodule(data), f"{split}_dataloader")()
    loaders = nested.flattened if isinstance(nested, CombinedLoader) else tree_leaves(nested)
    return [loader for loader in loaders if loader is not None and sized_len(loader) != 0]


def _forward_inputs(batch: Any, module: LightningModule, is_batch: bool = True) -> Any:
    """Return the inputs that `forward` takes: the fields of a dict that it names, or the items of a tuple in order.

    Of a batch `forward` takes only as many items as it requires. If the first argument is the only one, return its
    value, and otherwise a dict of name → value.
    """
    parameters = live_signature(module.forward).parameters.values()
    positional = [parameter for parameter in parameters if parameter.kind in _POSITIONAL]
    names = [parameter.name for parameter in positional]
    if isinstance(batch, Mapping):
        inputs = {parameter.name: batch[parameter.name] for parameter in parameters if parameter.name in batch}
    else:
        items = batch if isinstance(batch, list | tuple) else (batch,)
        num_required = sum(parameter.default is parameter.empty for parameter in positional)
        inputs = dict(zip(names[: max(1, num_required)] if is_batch else names, items, strict=False))
    return inputs[names[0]] if names and [*inputs] == names[:1] else inputs


def _try_samples(trained: Trained, samples: Samples, max_samples: int) -> Samples:
    """Run `forward` on the first samples, several in any case, and return them. UserError if it does not take them."""
    name, leaves = type(trained.module).__name__, tree_leaves(samples.inputs)
    hint = "set self.example_input_array to what it takes, or give the data a spec"
    if not leaves or not all(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves):
        raise UserError(f"model: nobody knows which tensors forward of {name} takes of {samples.of}; {hint}")
    shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves)
    with blamed("model", f"forward of {name} does not take {shapes} of {samples.of}; {hint}"), torch.no_grad():
        samples = samples.rows(slice(max_samples))
        samples = samples if len(samples) > 1 else samples.repeated(_NUM_COPIES)  # an export needs more than one
        args, kwargs = forward_arguments(samples.inputs)
        trained.network.eval()(*args, **kwargs)
    return samples


def has_split(data: Data, split: str) -> bool:
    """Whether data have the samples of a split; has_test sets a test split up."""
    return has_test(data) if split == "test" else is_overridden(f"{split}_dataloader", lightning_datamodule(data))
