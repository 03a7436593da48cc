"""Recommendations that are known before: from steps whose time is a known function of the batch size."""

import numpy as np
import pytest

from batchscope.analysis.read import find
from batchscope.analysis.recommend import Analysis, recommend
from batchscope.analysis.table import shown_metrics
from tests.support.synthetic_runs import overlapped, serial, write_curve, write_run, write_steps, write_sweep


def recommendations(*folders):
    sweep = find(folders)
    return [recommend(Analysis(group), shown_metrics(sweep)) for group in sweep.groups]


def test_the_smallest_size_within_5_percent_of_the_fastest(tmp_path):
    write_sweep(tmp_path, [64, 128, 256, 512, 1024], overlapped(4, 0.05, 8), device="cuda")
    (found,) = recommendations(tmp_path)
    assert (found.batch_size, found.fastest, found.try_up_to, found.remarks) == (128, 1024, None, [])
    assert found.share_of_best == pytest.approx(0.997, abs=0.001)
    assert found.headline == "cnn: data.batch_size=128 reaches 19,900 samples/s, 99 % of the most (at 1,024)."


def test_a_size_that_ran_not_one_in_between(tmp_path):
    write_sweep(tmp_path, [10, 1000], overlapped(4, 0.05, 8))
    assert recommendations(tmp_path)[0].batch_size == 1000


def test_still_rising_names_where_the_fit_sees_the_knee(tmp_path):
    write_sweep(tmp_path, [16, 32, 64, 128, 256], serial(4, 0.1))  # the knee is at 760
    (found,) = recommendations(tmp_path)
    assert (found.batch_size, found.try_up_to) == (256, 1024)
    assert found.remarks[0].startswith("still rising at 256: try up to about 1,024 (by the fit")


def test_nothing_is_promised_beyond_8_times_what_ran(tmp_path):
    write_sweep(tmp_path, [16, 32, 64, 128, 256], serial(400, 0.1))
    (found,) = recommendations(tmp_path)
    assert found.try_up_to == 2048
    assert "not trusted" in found.remarks[0]


def test_without_a_fit_one_doubling_is_suggested(tmp_path):
    write_sweep(tmp_path, [16, 32], serial(40, 0.1))
    assert recommendations(tmp_path)[0].try_up_to == 64


def test_what_ran_out_of_memory_is_not_suggested_again(tmp_path):
    write_sweep(tmp_path, [16, 32, 64, 128, 256], serial(4, 0.1), device="cuda")
    write_run(tmp_path / "5", 512, device="cuda", status="out_of_memory", error="OutOfMemoryError: CUDA out of memory")
    (found,) = recommendations(tmp_path)
    assert (found.batch_size, found.try_up_to) == (256, None)
    assert found.remarks == ["still rising at 256, but 512 ran out of memory."]


def test_no_size_beyond_the_training_set_is_suggested(tmp_path):
    write_sweep(tmp_path, [16, 32, 64, 128, 256], serial(4, 0.1), train_samples=700)
    (found,) = recommendations(tmp_path)
    assert found.try_up_to == 700
    assert found.remarks == ["still rising at 256: try up to about 700 (the whole training set)."]


def test_nothing_larger_than_the_whole_training_set_is_suggested(tmp_path):
    write_sweep(tmp_path, [16, 32, 64, 128, 256], serial(4, 0.1), train_samples=256)
    (found,) = recommendations(tmp_path)
    assert (found.try_up_to, found.remarks) == (None, ["still rising at 256, which is the whole training set."])


def test_larger_is_not_faster_is_said(tmp_path):
    for n, (size, ms) in enumerate(((32, 10), (64, 12), (128, 20), (256, 60))):
        write_run(tmp_path / str(n), size, ms)
    (found,) = recommendations(tmp_path)
    assert (found.batch_size, found.try_up_to) == (128, None)
    assert found.remarks == ["larger is not faster: 256 reaches 67 % of 128."]


def test_memory_is_given_where_it_is_known(tmp_path):
    known = {"throughput": {"memory_peak_gib": 3.25}, "device": "cuda"}
    write_sweep(tmp_path / "a", [64, 128], serial(0, 1), **known, hardware={"device_memory_gib": 24.0})
    assert "it takes 3.25 of 24.0 GiB" in recommendations(tmp_path / "a")[0].headline
    write_sweep(tmp_path / "b", [64, 128], serial(0, 1), **known)
    assert "it takes 3.25 GiB" in recommendations(tmp_path / "b")[0].headline
    write_sweep(tmp_path / "c", [64, 128], serial(0, 1))
    assert "GiB" not in recommendations(tmp_path / "c")[0].headline


def test_throughput_that_costs_accuracy_says_so_in_the_first_line(tmp_path):
    write_run(tmp_path / "0", 64, 8.0, metrics={"test/acc": 0.989})
    write_run(tmp_path / "1", 512, 34.0, metrics={"test/acc": 0.971})
    (found,) = recommendations(tmp_path)
    assert found.headline.endswith(
        "; but it costs accuracy: test/acc 97.1 % where 64, 1.88× slower per sample, reaches 98.9 %."
    )


def test_a_difference_within_what_seeds_make_is_none(tmp_path):
    write_run(tmp_path / "0", 64, 8.0, metrics={"test/acc": 0.989})
    write_run(tmp_path / "1", 512, 34.0, metrics={"test/acc": 0.987})
    assert recommendations(tmp_path)[0].costs == ""


def test_runs_that_saw_unlike_numbers_of_samples_are_not_compared(tmp_path):
    write_run(tmp_path / "0", 64, 8.0, metrics={"test/acc": 0.6}, steps=25)
    write_run(tmp_path / "1", 512, 80.0, metrics={"test/acc": 0.9}, steps=25)
    assert recommendations(tmp_path)[0].costs == ""


def test_seeds_are_compared_by_their_median(tmp_path):
    for n, acc in enumerate((0.99, 0.99, 0.5)):
        write_run(tmp_path / str(n), 512, 34.0, seed=n, metrics={"test/acc": acc})
    write_run(tmp_path / "3", 64, 8.0, metrics={"test/acc": 0.99})
    assert recommendations(tmp_path)[0].costs == ""


def test_a_loss_is_better_when_it_is_lower(tmp_path):
    write_run(tmp_path / "0", 64, 8.0, metrics={"test/loss": 0.01})
    write_run(tmp_path / "1", 512, 34.0, metrics={"test/loss": 0.05})
    assert "test/loss 0.0500 where 64, 1.88× slower per sample, reaches 0.0100" in recommendations(tmp_path)[0].costs


def test_time_to_the_same_accuracy_is_said_where_curves_tell(tmp_path):
    write_curve(write_run(tmp_path / "0", 64, 8.0), [(100, 0.98), (200, 0.99)], 8.0)
    write_curve(write_run(tmp_path / "1", 512, 34.0), [(25, 0.9), (50, 0.97)], 34.0)
    assert (
        "64 reaches val/acc 97.0 % after 800 ms of training, 512 after 1.7 s." in recommendations(tmp_path)[0].remarks
    )


def test_one_size_alone_is_no_recommendation(tmp_path):
    write_sweep(tmp_path, [64], serial(4, 0.1))
    assert recommendations(tmp_path) == [None]


def known(ms, share):
    """A summary whose median step is known to a share of it."""
    return {"step_ms_interval": [ms / (1 + share), ms * (1 + share)]}


def sweep_with_intervals(folder, step_ms, share, **facts):
    for n, (size, ms) in enumerate(step_ms.items()):
        write_run(folder / str(n), size, ms, throughput={**known(ms, share), **facts})
    (found,) = recommendations(folder)
    return found


def test_sizes_of_which_no_difference_is_shown_are_equally_fast(tmp_path):
    steps = {32: 7.0, 64: 10.1, 128: 20.0, 256: 40.2}
    for n, (size, ms) in enumerate(steps.items()):
        write_run(tmp_path / str(n), size, ms, throughput={**known(ms, 0.02), "memory_peak_gib": 1 + size / 1000})
    (found,) = recommendations(tmp_path)
    assert (found.batch_size, found.equally_fast) == (64, [64, 128, 256])
    assert found.headline == (
        "cnn: 64 to 256 are equally fast here; data.batch_size=64 is taken, the least memory: 6,340 samples/s, "
        "1.06 of 16.0 GiB."
    )


def test_a_size_is_taken_only_if_it_is_known_to_be_within_5_percent(tmp_path):
    steps = {64: 10.3, 128: 20.0}  # 97 % of the most
    sharp = sweep_with_intervals(tmp_path / "sharp", steps, 0.01)
    assert (sharp.batch_size, sharp.equally_fast, sharp.remarks) == (64, [], [])
    assert sharp.headline == "cnn: data.batch_size=64 reaches 6,210 samples/s, 97 % of the most (at 128)."
    vague = sweep_with_intervals(tmp_path / "vague", steps, 0.05)
    assert vague.batch_size == 128
    assert vague.remarks[-1].startswith("64 may be as fast: its rate is 93 % to 102 % of the most")


def test_records_without_intervals_are_compared_by_their_rates(tmp_path):
    steps = {64: 10.3, 128: 20.0}
    found = sweep_with_intervals(tmp_path, steps, 0.05, step_ms_interval=None, updates=40)
    assert (found.batch_size, found.equally_fast) == (64, [])


@pytest.mark.parametrize("seed", range(5))
def test_sizes_that_took_turns_are_compared_within_rounds(tmp_path, seed):
    random = np.random.default_rng(seed)
    machine = np.exp(0.2 * random.standard_normal((8, 1)))  # a slow round is slow for all
    for n, (size, ms) in enumerate({32: 6.0, 64: 10.0, 128: 20.0, 256: 40.0}.items()):
        steps = ms * machine * np.exp(0.02 * random.standard_normal((8, 10)))
        write_run(tmp_path / str(n), size, float(np.median(steps)))
        write_steps(tmp_path / str(n), steps, rounds=range(8))
    (found,) = recommendations(tmp_path)
    assert found.batch_size == 64
