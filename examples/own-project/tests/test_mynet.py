"""The model reads the data: pytest tests"""

from pathlib import Path

from mynet.data import SHAPES, Waves
from mynet.model import Net


def test_the_model_reads_a_batch_of_the_data(tmp_path: Path) -> None:
    data = Waves(root=str(tmp_path), batch_size=8, num_workers=0)
    data.prepare_data()
    data.setup("fit")
    x, y = next(iter(data.train_dataloader()))[:2]
    assert Net(data.spec)(x).shape == (8, len(SHAPES))
    assert set(y.tolist()) <= set(range(len(SHAPES)))
