"""Which sizes are shown to train worse than the best."""

from pathlib import Path

import pytest

from batchscope.analysis.quality import Quality, quality_of, training_words
from batchscope.analysis.read import find
from tests.support.synthetic_runs import write_measured


def quality(folder: Path, values: dict[int, list[float]], key: str = "test/acc", samples: int | None = 1000) -> Quality:
    """Of runs with these values; a run for each seed."""
    for seed in range(max(map(len, values.values()))):
        sizes = {size: 10.0 for size, found in values.items() if seed < len(found)}
        write_measured(
            folder, sizes, first=10 * seed, seed=seed, test_samples=samples, windows=1,
            metrics=lambda size, seed=seed: {key: values[size][seed]},
        )  # fmt: skip
    found = quality_of(find([folder]).groups[0].sizes, key)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("values", "as_good", "words"),
    [
        # One seed has the error of its samples: two errors of this difference are 2 points.
        ({8: [0.95], 64: [0.94], 512: [0.90]}, [8, 64], "5.0 points"),
        # Several seeds have the error that they show.
        ({8: [0.951, 0.949, 0.950], 64: [0.941, 0.939, 0.940]}, [8], "1.0 points"),
        ({8: [0.99, 0.91], 64: [0.98, 0.90]}, [8, 64], "1.0 points"),
        # A perfect accuracy is not without error.
        ({8: [1.0], 64: [0.998]}, [8, 64], "0.2 points"),
    ],
)
def test_a_size_is_worse_where_its_loss_is_more_than_noise(tmp_path: Path, values, as_good, words):
    found = quality(tmp_path, values)
    assert (found.best, found.as_good, found.seeds) == (8, as_good, max(map(len, values.values())))
    assert found.loss_words(max(values), 8) == words


def test_the_number_of_samples_is_that_of_a_run_with_the_metric(tmp_path: Path):
    write_measured(tmp_path, {8: 10.0}, status="interrupted", windows=1)
    write_measured(
        tmp_path, {8: 10.0, 64: 10.0}, first=1, windows=1, test_samples=1000, metrics=lambda size: {"test/acc": 0.9}
    )
    found = quality_of(find([tmp_path]).groups[0].sizes, "test/acc")
    assert found is not None and found.allowed is not None


@pytest.mark.parametrize(("key", "samples"), [("test/loss", 1000), ("test/acc", None)])
def test_the_noise_of_one_loss_and_of_an_unknown_number_of_samples_is_not_known(tmp_path: Path, key, samples):
    found = quality(tmp_path, {8: [0.1], 64: [0.5]}, key=key, samples=samples)
    assert (found.allowed, found.as_good) == (None, [8, 64])


def test_a_metric_without_direction_or_with_one_size_decides_nothing(tmp_path: Path):
    write_measured(tmp_path, {8: 10.0, 64: 10.0}, windows=1, metrics={"test/temperature": 1.0})
    sizes = find([tmp_path]).groups[0].sizes
    assert quality_of(sizes, "test/temperature") is None
    assert quality_of(sizes, "test/acc") is None


@pytest.mark.parametrize(("epochs", "words"), [(1, "1 epoch"), (3, "3 epochs"), ([1], "this training")])
def test_a_training_in_words(tmp_path: Path, epochs: object, words: str):
    from tests.support.synthetic_runs import change_record

    write_measured(tmp_path, {8: 10.0}, windows=1, metrics={"test/acc": 0.9})
    change_record(tmp_path / "0", epochs=epochs)
    assert training_words(find([tmp_path]).runs) == words
