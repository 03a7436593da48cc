"""From which batch size on another device is faster, where that is known before."""

import pytest

from batchscope.analysis.crossover import crossovers
from batchscope.analysis.read import find
from batchscope.analysis.recommend import Analysis
from tests.support.synthetic_runs import overlapped, serial, write_run, write_sweep


def crossings(folder):
    return crossovers([Analysis(group) for group in find([folder]).groups])


def both(folder, sizes, cpu, gpu, **facts):
    write_sweep(folder, sizes, cpu, **facts)
    write_sweep(folder, sizes, gpu, first=len(sizes), device="cuda", **facts)


def test_a_measured_crossing_lies_between_the_sizes_that_bracket_it(tmp_path):
    both(tmp_path, [1, 8, 64, 512], serial(1, 0.1), overlapped(4, 0.001))
    (found,) = crossings(tmp_path)
    assert (found.kind, found.small, found.large, found.between) == ("measured", "cpu", "gpu", (8, 64))
    assert 8 < found.near < 64
    assert found.headline.startswith("cnn: gpu is faster than cpu from a batch size between 8 and 64 on")


def test_never_and_always(tmp_path):
    both(tmp_path, [1, 8, 64, 512], serial(10, 0.1), overlapped(4, 0.001))
    (found,) = crossings(tmp_path)
    assert (found.kind, found.large) == ("always", "gpu")
    assert "gpu is always faster than cpu, at every size that ran on both (1 to 512)" in found.headline


def test_a_crossing_beyond_what_ran_is_reported_as_extrapolated(tmp_path):
    both(tmp_path, [1, 2, 4, 8], serial(1, 0.1), overlapped(4, 0.001))  # they meet at 30
    (found,) = crossings(tmp_path)
    assert (found.kind, found.small, found.large) == ("extrapolated", "cpu", "gpu")
    assert found.near == pytest.approx(30, rel=0.1)
    assert "extrapolated, not measured: gpu would be faster above about" in found.headline


def test_beyond_8_times_what_ran_nothing_is_extrapolated(tmp_path):
    both(tmp_path, [1, 2, 4, 8], serial(1, 0.01), overlapped(40, 0.001))
    (found,) = crossings(tmp_path)
    assert (found.kind, found.large, found.small) == ("always", "cpu", "gpu")


def test_devices_that_alternate_in_being_faster_have_no_crossing(tmp_path):
    for n, (size, cpu, gpu) in enumerate(((8, 10, 11), (16, 21, 20), (32, 40, 41))):
        write_run(tmp_path / f"{n}", size, cpu)
        write_run(tmp_path / f"{n + 10}", size, gpu, device="cuda")
    assert [c.kind for c in crossings(tmp_path)] == ["unclear"]


def test_models_cross_on_their_own(tmp_path):
    both(tmp_path / "a", [1, 8, 64, 512], serial(1, 0.1), overlapped(4, 0.001))
    both(tmp_path / "b", [1, 8, 64, 512], serial(10, 0.1), overlapped(4, 0.001), model="mlp")
    assert [(c.base, c.kind) for c in crossings(tmp_path)] == [("cnn", "measured"), ("mlp", "always")]


def test_one_device_alone_crosses_nothing(tmp_path):
    write_sweep(tmp_path, [1, 8], serial(1, 0.1))
    assert crossings(tmp_path) == []
