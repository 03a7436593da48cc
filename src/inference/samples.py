"""Inputs that a network takes, for what runs it outside of a training: out of its data, or of its own example."""

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
from ..data.plain import Data, has_test, lightning_of
from ..data.spec import LENGTHS, DataSpec, arguments, takes
from ..errors import UserError
from ..options.signatures import live_signature
from ..training.trial import blamed
from .load import Trained, trainer_for

SPLITS = {"test": "test", "val": "validate", "predict": "predict"}  # Lightning's stage of each split
_FEW = 8  # copies of a sample that is alone
# Of a transfer to a device, in Lightning's order: each hook, and what it takes between the batch and the number of its loader.
_TRANSFER = {
    "on_before_batch_transfer": (),
    "transfer_batch_to_device": (torch.device("cpu"),),
    "on_after_batch_transfer": (),
}
_IN_ORDER = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Samples(NamedTuple):
    """Inputs on the CPU as `DataSpec.parts` gives them, with the lengths that the network takes; and what they are."""

    inputs: Any
    lengths: Tensor | None
    of: str = "test samples"

    @property
    def named(self) -> dict[str, Tensor]:
        """Each input by its name; `x` for the one input of a network that gets it by position."""
        return arguments(self.inputs if isinstance(self.inputs, Mapping) else {"x": self.inputs}, self.lengths)[1]

    def __len__(self) -> int:
        return len(next(iter(self.named.values())))

    def repeated(self, size: int) -> "Samples":
        """So many samples, from the first on and again from the first on."""
        return self.rows(torch.arange(size) % len(self))

    def rows(self, index: slice | Tensor) -> "Samples":
        """Some of the samples, on the CPU."""
        inputs, lengths = tree_map_only(Tensor, lambda tensor: tensor[index].cpu(), (self.inputs, self.lengths))
        return Samples(inputs, lengths, self.of)


def samples_of(trained: Trained, most: int) -> Samples:
    """Some inputs of the network: its `example_input_array`, or those of a batch of its data, the test if there is one.

    Raises:
        UserError: where the batch does not say what the network takes of it.
    """
    if trained.example is not None:
        found, of = _arguments_in(trained.example, trained.module, is_batch=False), "rows of example_input_array"
        return _tried(trained, Samples(found, None, of), most)
    batch, of = _first_batch(trained)
    samples = Samples(*inputs_of(trained, batch), of)
    return _tried(trained, samples, most) if trained.known.spec is None else samples.rows(slice(most))


def inputs_of(trained: Trained, batch: Any, is_whole: bool = True) -> tuple[Any, Tensor | None]:
    """What the network takes of a batch: inputs and lengths as `DataSpec.parts` gives them, for `arguments`.

    The spec of the data says it or, without one, the signature of `forward`. `is_whole` as in `parts_of`.
    """
    spec = trained.known.spec
    if spec is None:
        return _arguments_in(batch, trained.module), None
    x, _, lengths = parts_of(spec, batch, is_whole)
    return x, lengths if takes(trained.network, LENGTHS) else None


def parts_of(spec: DataSpec, batch: Any, is_whole: bool) -> tuple[Any, Any, Tensor | None]:
    """As `DataSpec.parts`. Unless it `is_whole`, a batch has no target: it is inputs, or inputs and lengths."""
    if is_whole:
        return spec.parts(batch)
    x, *rest = batch if isinstance(batch, list | tuple) else (batch,)
    lengths = rest[0] if rest else x.get(LENGTHS) if isinstance(x, Mapping) else None
    if isinstance(x, Mapping):
        x = {name: x[name] for name in spec.inputs}
        x = x if len(x) > 1 else x[spec.inputs[0]]
    return x, None, lengths if spec.variable_length else None


def _first_batch(trained: Trained) -> tuple[Any, str]:
    """The first batch of the test, or of what the data have instead; and what its samples are."""
    data, module = trained.data, lightning_of(trained.data)
    data.prepare_data()
    module.trainer = trainer_for(trained)  # which a `setup` may ask, as in Lightning
    found = ((_loaders(data, stage_of(data, split), split), split) for split in ("test", "val") if serves(data, split))
    loaders, split = next(filter(itemgetter(0), found), None) or (_loaders(data, "fit", "train"), "train")
    batch = next(iter(loaders[0]))
    trained.module.trainer = module.trainer
    try:
        for hook, device in _TRANSFER.items():
            own = is_overridden(hook, type(module), LightningDataModule)  # of the class: augmentation is for training
            owner = module if own else trained.module  # as in Lightning
            with blamed("data", f"{hook} of {type(owner).__name__} fails"):
                batch = getattr(owner, hook)(batch, *device, 0)
    finally:
        trained.module.trainer = None
    return batch, f"{split} samples"


def stage_of(data: Data, split: str) -> str:
    """The stage that sets a split up: many a stranger's `setup` makes the validation for the fit alone."""
    return "fit" if split == "val" and not isinstance(data, DataModule) else SPLITS[split]


def _loaders(data: Data, stage: str, split: str) -> list[Any]:
    """Those of a split that have a batch, each by itself; a module may serve several, or none."""
    data.setup(stage)
    found = getattr(lightning_of(data), f"{split}_dataloader")()
    loaders = found.flattened if isinstance(found, CombinedLoader) else tree_leaves(found)
    return [loader for loader in loaders if loader is not None and sized_len(loader) != 0]


def _arguments_in(given: Any, module: LightningModule, is_batch: bool = True) -> Any:
    """What `forward` takes: the fields of a dict that it names, and the parts of a tuple by their order.

    Of a batch it takes as many parts as it requires. The first argument stands alone if it is the only one; others are by
    their names.
    """
    parameters = live_signature(module.forward).parameters.values()
    in_order = [one for one in parameters if one.kind in _IN_ORDER]
    names = [one.name for one in in_order]
    if isinstance(given, Mapping):
        found = {one.name: given[one.name] for one in parameters if one.name in given}
    else:
        parts = given if isinstance(given, list | tuple) else (given,)
        required = sum(one.default is one.empty for one in in_order)
        found = dict(zip(names[: max(1, required)] if is_batch else names, parts, strict=False))
    return found[names[0]] if names and [*found] == names[:1] else found


def _tried(trained: Trained, samples: Samples, most: int) -> Samples:
    """The first of some samples, which `forward` takes: at least a few of them. UserError where it does not."""
    name, leaves = type(trained.module).__name__, tree_leaves(samples.inputs)
    how = "set self.example_input_array to what it takes, or give the data a spec"
    if not leaves or not all(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves):
        raise UserError(f"model: nobody knows which tensors forward of {name} takes of {samples.of}; {how}")
    shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves)
    with blamed("model", f"forward of {name} does not take {shapes} of {samples.of}; {how}"), torch.no_grad():
        found = samples.rows(slice(most))
        found = found if len(found) > 1 else found.repeated(_FEW)  # any number of samples is tried with several
        args, named = arguments(found.inputs)
        trained.network.eval()(*args, **named)
    return found


def serves(data: Data, source: str) -> bool:
    """Whether data have the samples of a split; a test split of a DataModule is loaded."""
    if source == "test":
        return has_test(data)
    return is_overridden(f"{source}_dataloader", lightning_of(data))
