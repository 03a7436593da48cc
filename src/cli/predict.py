"""`batchscope predict`: a checkpoint and samples → a table of the network's answers.

    batchscope predict ckpt=<run>/checkpoints/best.ckpt input=test data.root=<folder>
    batchscope predict ckpt=<run>/checkpoints/best.ckpt input=photos/ output=answers.csv
    batchscope predict ckpt=<run>/checkpoints/best.ckpt input=samples.npz output=answers.npz

input is test, val or predict (a split of the checkpoint's data), a folder of images, an image, or an .npz file with an
array x. output is a .csv file with one row a sample, or an .npz file with the raw outputs. A LightningModule answers by
its predict_step, which returns tensors with a row a sample.
Further options, as of batchscope evaluate, change how the network is run: trainer.accelerator=cpu.
"""

from pathlib import Path

from .._imports import quick_imports
from .arguments import CKPT, parse_words


def main() -> None:
    """The program: parse, predict, write, print."""
    options, overrides = parse_words("predict", __doc__, {"ckpt": CKPT, "input": "test", "output": None})
    checkpoint, output = Path(options["ckpt"]), Path(options.get("output", "predictions.csv"))
    with quick_imports():
        from ..inference.inputs import refuse_input
        from ..inference.load import restore
        from ..inference.predict import SPLITS, predict, refuse_output, write_predictions

    if options["input"] not in SPLITS:
        refuse_input(Path(options["input"]))
    trained = restore(checkpoint, overrides, with_data=options["input"] in SPLITS)
    refuse_output(output, trained)
    predictions = predict(trained, options["input"])
    if predictions.note:
        print(predictions.note)
    write_predictions(predictions, output)
    accuracy = f", {predictions.accuracy:.2%} right" if predictions.accuracy is not None else ""
    print(f"{trained.name}: {len(predictions.names):,} samples{accuracy} → {output}")
