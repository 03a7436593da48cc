"""A against B: which runs are matched, what is said of them, and when B counts as slower."""

import json

import numpy as np
import pytest

from batchscope.analysis.compare import compare
from batchscope.errors import UserError
from tests.support.synthetic_runs import overlapped, write_run, write_steps, write_sweep

KNOWN = {"updates": 400, "step_ms_p10": 9.9, "step_ms_p90": 10.1}  # little spread


def pair(folder, a_ms, b_ms, a=None, b=None):
    """Two runs with little spread."""
    for name, ms, facts in (("a", a_ms, a), ("b", b_ms, b)):
        write_run(folder / name, **{"batch_size": 64, "step_ms": ms, "throughput": KNOWN, **(facts or {})})
    return folder / "a", folder / "b"


def turns(folder, slowdown, rounds=9, noise=0.02, parts=None):
    """Repeated runs of both sides in rounds, with their steps."""
    random = np.random.default_rng(3)
    for number in range(rounds):
        slow = np.exp(0.2 * random.standard_normal())
        for name, ms in (("a", 10.0), ("b", 10.0 * slowdown)):
            steps = ms * slow * np.exp(noise * random.standard_normal((2, 20)))
            place = folder / name / str(number)
            write_run(place, 64, float(np.median(steps)), turn={"of": "x", "round": number})
            write_steps(place, steps, **({"shares": parts} if parts and name == "b" else {}))
    return folder / "a", folder / "b"


def disturbed(folder, a, b):
    """Separate runs of 30 s on a machine that is slow now and then: steps in ms, and the share of slow stretches."""
    random = np.random.default_rng(5)
    for name, (ms, share) in (("a", a), ("b", b)):
        slow = np.where(random.permutation(20) < 20 * share, 1.3, 1.0)[:, None]
        steps = ms * slow * np.exp(0.02 * random.standard_normal((20, 30)))
        write_run(folder / name, 64, float(np.median(steps)))
        write_steps(folder / name, steps, probe_s=3e-4)
    return folder / "a", folder / "b"


def rows(found):
    return {row.name: row for row in found.compared[0].rows}


def test_the_same_speed_is_no_difference_shown(tmp_path):
    found = compare(*pair(tmp_path, 10.0, 10.1))
    assert (found.exit_code, found.regressions) == (0, [])
    assert rows(found)["step"].verdict == "no difference shown"
    assert found.headlines[0].startswith("no difference shown (interval 0.")


def test_a_slowdown_that_is_shown_and_larger_than_allowed_is_exit_code_3(tmp_path):
    found = compare(*pair(tmp_path, 10.0, 14.0))
    assert found.exit_code == 3
    assert found.headlines[0].startswith("B is 40.0 % slower than A (interval 1.")
    assert found.headlines[0].endswith("; 5 % is allowed.")
    assert rows(found)["step"].verdict == rows(found)["samples_per_sec"].verdict == "slower"
    assert compare(*pair(tmp_path, 10.0, 14.0), max_slowdown=0.5).exit_code == 0


def test_a_shown_slowdown_below_the_limit_is_allowed(tmp_path):
    found = compare(*turns(tmp_path, 1.04))
    assert found.compared[0].slowdown.low > 1
    assert found.exit_code == 0
    assert "slower than A" in found.headlines[0]


def test_an_estimate_beyond_the_limit_is_no_regression_while_the_interval_holds_1(tmp_path):
    assert compare(*pair(tmp_path, 10.0, 10.8)).exit_code == 0


def test_a_faster_run_is_said_to_be_faster(tmp_path):
    found = compare(*pair(tmp_path, 14.0, 10.0))
    assert found.exit_code == 0
    assert found.headlines[0].endswith("B is faster.")
    assert rows(found)["step"].verdict == rows(found)["samples_per_sec"].verdict == "faster"


def test_a_slowdown_of_10_percent_is_found_in_turns(tmp_path):
    found = compare(*turns(tmp_path, 1.1))
    assert found.exit_code == 3
    assert found.compared[0].turns == 9
    assert "In turns, 9 of each side: " in found.text


def test_a_slowdown_that_slow_moments_hide_is_found_in_the_fastest_steps(tmp_path):
    found = compare(*disturbed(tmp_path, (50.0, 0.8), (65.0, 0.4)))
    assert rows(found)["step"].verdict == "no difference shown"
    assert rows(found)["fastest_steps"].verdict == "slower"
    assert found.exit_code == 3
    assert found.as_json()["pairs"][0]["decided_by"] == "fastest_steps"
    assert "slower than A in its fastest 1 % of steps (interval 1." in found.headlines[0]
    assert "  fastest 1 % ms" in found.text


def some_faster(folder, ms, fast_ms, every):
    """A run of 30 s in which each n-th step is faster."""
    steps = np.exp(0.02 * np.random.default_rng(0).standard_normal((20, 30))) * ms
    steps[:, ::every] *= fast_ms / ms
    write_run(folder, 64, float(np.median(steps)))
    write_steps(folder, steps, probe_s=3e-4)


def test_a_slowdown_that_spares_the_fastest_steps_is_found_in_the_median(tmp_path):
    a, b = disturbed(tmp_path, (50.0, 0.0), (50.0, 0.0))
    some_faster(b, 80.0, 40.0, every=4)
    found = compare(a, b)
    assert rows(found)["fastest_steps"].verdict == "faster"
    assert (found.exit_code, found.headlines[0][:6]) == (3, "B is 5")
    assert found.as_json()["pairs"][0]["decided_by"] == "step"


def test_a_run_that_is_faster_but_for_its_fastest_steps_is_no_regression(tmp_path):
    a, b = disturbed(tmp_path, (50.0, 0.0), (65.0, 0.0))
    some_faster(a, 110.0, 50.0, every=20)
    found = compare(a, b)
    assert rows(found)["fastest_steps"].verdict == "slower"
    assert (found.exit_code, found.headlines[0].endswith("B is faster.")) == (0, True)


def test_runs_in_turns_are_decided_by_the_median_alone(tmp_path):
    found = compare(*turns(tmp_path, 1.1))
    assert "fastest_steps" not in rows(found)


def test_the_part_that_is_slower_is_named(tmp_path):
    found = compare(*turns(tmp_path, 1.0, parts=(0.02, 0.03, 0.3, 0.75, 0.1, 0.05)))
    verdicts = {name: row.verdict for name, row in rows(found).items()}
    assert verdicts["backward"] == "slower"
    assert verdicts["step"] == verdicts["forward"] == "no difference shown"
    assert "  backward" in found.text


def test_a_part_below_2_percent_of_the_step_is_not_compared(tmp_path):
    shares = (0.02, 0.001, 0.33, 0.5, 0.1, 0.05)
    found = compare(*pair(tmp_path, 10.0, 10.0, {"parts": shares}, {"parts": shares}))
    assert rows(found)["transfer"].verdict == "below 2 % of the step"


def test_the_more_is_compared_the_wider_is_each_interval(tmp_path):
    for name in "ab":
        write_sweep(tmp_path / "many" / name, [2**n for n in range(10)], overlapped(10, 0.01), throughput=KNOWN)
    many = compare(tmp_path / "many" / "a", tmp_path / "many" / "b")
    one = compare(*pair(tmp_path / "one", 10.0, 10.0))
    assert len(many.compared) == 10
    assert many.compared[0].slowdown.high > 1.02 * one.compared[0].slowdown.high


def test_sweeps_are_matched_by_batch_size_and_settings(tmp_path):
    for n, size in enumerate((64, 128, 256)):
        for m, pipeline in enumerate(("memory", "device")):
            write_run(tmp_path / "a" / f"{n}{m}", size, 10.0, options={"data.pipeline": pipeline}, throughput=KNOWN)
    options = {"trainer.precision": "bf16-mixed", "data.pipeline": "device"}
    write_run(tmp_path / "b" / "0", 128, 20.0, options=options, throughput=KNOWN)
    write_run(tmp_path / "b" / "1", 512, 20.0, options=options, throughput=KNOWN)
    found = compare(tmp_path / "a", tmp_path / "b")
    (compared,) = found.compared
    assert [run.name for run in (*compared.pair.a, *compared.pair.b)] == ["11", "0"]
    assert compared.pair.label == "cnn · device · batch size 128"
    assert found.differing["configuration"] == ["trainer.precision: 32-true → bf16-mixed"]
    assert "A: nothing matches 00, 01, 10, 20, 21" in found.warnings
    assert "B: nothing matches 1" in found.warnings


def test_a_run_matches_its_counterpart_in_a_sweep(tmp_path):
    write_sweep(tmp_path / "a", [64, 128], overlapped(10, 0.01))
    write_run(tmp_path / "b", 128, 10.0)
    (compared,) = compare(tmp_path / "a", tmp_path / "b").compared
    assert compared.pair.a[0].batch_size == 128


def test_nothing_that_matches_is_one_line(tmp_path):
    write_sweep(tmp_path / "a", [64, 128], overlapped(10, 0.01))
    write_sweep(tmp_path / "b", [256], overlapped(10, 0.01))
    with pytest.raises(UserError, match="no run of one folder matches one of the other.*A: nothing matches 0, 1"):
        compare(tmp_path / "a", tmp_path / "b")
    write_run(tmp_path / "c", 64, status="out_of_memory", error="OutOfMemoryError")
    file = write_run(tmp_path / "d", 64) / "run.json"
    unmeasured = {"throughput": {"missing": {"bottleneck": "no batch was trained"}}}
    file.write_text(json.dumps(json.loads(file.read_text()) | unmeasured))
    with pytest.raises(UserError, match=r"B, d: not measured \(no batch was trained\)"):
        compare(tmp_path / "a", tmp_path / "d")
    with pytest.raises(UserError, match="A, c: not measured"):
        compare(tmp_path / "c", tmp_path / "c")
    with pytest.raises(UserError, match="no runs in"):
        compare(tmp_path / "nowhere", tmp_path / "a")


def test_seeds_repeat_a_run(tmp_path):
    for name, ms in (("a", 10.0), ("b", 14.0)):
        for seed in range(3):
            write_run(tmp_path / name / str(seed), 64, ms + 0.1 * seed, seed=seed)
    found = compare(tmp_path / "a", tmp_path / "b")
    (compared,) = found.compared
    assert (len(compared.pair.a), len(compared.pair.b)) == (3, 3)
    assert found.exit_code == 3
    assert found.differing == {}


def test_what_differs_in_configuration_versions_and_hardware_is_said(tmp_path):
    a, b = pair(
        tmp_path,
        10.0,
        10.0,
        {"hardware": {"cpu_cores": 2}},
        {"hardware": {"cpu_cores": 4}, "options": {"optimizer.lr": 0.1}, "versions": {"torch": "2.10.0"}},
    )
    found = compare(a, b)
    assert found.differing == {
        "configuration": ["optimizer.lr: 0.004 → 0.1"],
        "versions": ["torch: 2.9.0 → 2.10.0"],
        "hardware": ["cpu_cores: 2 → 4"],
    }
    assert "versions       torch: 2.9.0 → 2.10.0" in found.text


def test_other_models_data_and_devices_are_compared_with_a_warning(tmp_path):
    found = compare(*pair(tmp_path, 10.0, 10.0, {"model": "cnn"}, {"model": "mlp", "device": "cuda"}))
    assert found.warnings[:2] == ["the models differ: cnn and mlp", "the devices differ: cpu and gpu"]


def test_other_batch_sizes_are_judged_by_the_time_of_a_sample(tmp_path):
    found = compare(*pair(tmp_path, 10.0, 14.0, {"batch_size": 64}, {"batch_size": 128}))
    assert rows(found)["step"].verdict == "slower"
    assert rows(found)["samples_per_sec"].verdict == "faster"
    assert found.exit_code == 0
    assert any("the batch sizes differ" in line for line in found.warnings)


def test_a_run_compared_with_itself_says_so(tmp_path):
    a, _ = pair(tmp_path, 10.0, 10.0)
    assert "a run is compared with itself" in compare(a, a).warnings


def test_one_step_only_has_no_interval_and_shows_nothing(tmp_path):
    found = compare(*pair(tmp_path, 10.0, 30.0, {"throughput": {"updates": 1}}, {"throughput": {"updates": 1}}))
    assert found.exit_code == 0
    assert rows(found)["step"].verdict == "spread unknown"
    assert "no difference can be shown" in found.headlines[0]


def test_no_label_of_a_pair_is_cut(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    for name in "ab":
        write_sweep(tmp_path / name, [64, 128], overlapped(10, 0.01), throughput=KNOWN)
    assert "batch size 128: step ms" in compare(tmp_path / "a", tmp_path / "b").text


def test_the_text_fits_80_columns(tmp_path):
    found = compare(*pair(tmp_path, 10.0, 14.0))
    table = found.text.split("\n\n")[2].splitlines()
    assert max(map(len, table)) <= 80


def test_json_has_every_ratio_and_no_infinity(tmp_path):
    found = compare(*pair(tmp_path, 10.0, 14.0, {"throughput": {"updates": 1}})).as_json()
    (one,) = found["pairs"]
    assert (found["schema"], found["regression"], one["regression"]) == (1, False, False)
    step = one["rows"][0]
    assert (step["name"], step["a"], step["b"], step["ratio"]) == ("step", *map(pytest.approx, (10.0, 14.0, 1.4)))
    assert "interval" not in step
    text = str(found)
    assert "inf" not in text.replace("information", "")
    assert "nan" not in text
