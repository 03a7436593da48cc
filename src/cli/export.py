"""`batchscope export`: a checkpoint → a file that other programs run, checked against the network.

    batchscope export ckpt=<run>/checkpoints/best.ckpt format=torch_export
    batchscope export ckpt=<run>/checkpoints/best.ckpt format=onnx output=cnn.onnx data.root=<folder>

format is torch_export (a .pt2 file for torch.export.load, and for AOTInductor) or onnx (pip install 'batchscope[onnx]').
The exported network takes batches of any size, of sequences exactly as long as those it was exported with. It is run on
samples of the test set beside the network, or on copies of a LightningModule's example_input_array, and the largest
difference of an output is printed.
"""

from pathlib import Path

from .._imports import quick_imports
from .arguments import CKPT, parse_words

_SAMPLES = 64  # of the test set, on which the exported network is compared


def main() -> None:
    """The program: parse, export, check, print."""
    options, overrides = parse_words("export", __doc__, {"ckpt": CKPT, "format": None, "output": None})
    with quick_imports():
        from ..inference.export import FORMATS, check_output, export
        from ..inference.load import restore
        from ..inference.samples import samples_of

    form = options.get("format", "torch_export")
    path = Path(options.get("output", f"model{FORMATS.get(form, '')}"))
    check_output(form, path)
    trained = restore(Path(options["ckpt"]), overrides, with_data=True)
    samples = samples_of(trained, _SAMPLES)
    difference = export(trained, form, path, samples.named)
    checked = f"differs from the network by at most {difference:.2g} on {len(samples)} {samples.of}"
    print(f"{trained.name} → {path}: {checked}")
