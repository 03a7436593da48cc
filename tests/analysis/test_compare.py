"""A against B: which runs are matched, when B counts as slower, how often that is wrong, and what is printed."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from batchscope.analysis.compare import compare
from batchscope.errors import UserError
from batchscope.records.step_times import read_step_times, write_step_times
from tests.support.synthetic_runs import overlapped, write_run, write_steps, write_sweep

SHARES = (0.02, 0.03, 0.3, 0.5, 0.1, 0.05)  # of the parts of a step
ONLY_STEPS = (0.0,) * 6
FORBIDDEN = r"stretch|disturbed|\bturn|\brounds?\b|time was up|stall|whole fit|floor"


def noisy(step_ms, random, windows=8, noise=0.02, drift=0.0):
    """The steps of a run in windows; `drift` is a random walk's standard deviation from one window to the next."""
    walk = np.cumsum(drift * random.standard_normal((windows, 1)))[:, None]
    return step_ms * np.exp(walk + noise * random.standard_normal((windows, 10)))


def measured(folder, step_ms, batch_size=64, shares=SHARES, others=None, **facts):
    """A run with its steps; `others` is the share of the processor that other programs took."""
    steps = noisy(step_ms, np.random.default_rng(0)) if np.isscalar(step_ms) else step_ms
    write_run(folder, batch_size, float(np.median(steps)), **facts)
    write_steps(folder, steps, shares=shares)
    if others is not None:
        times, taken = read_step_times(folder), np.full(len(steps), others)
        write_step_times(folder, replace(times, others_share=taken, disturbed=taken > 0.1))
    return folder


def apart(folder, a_ms, b_ms, a=None, b=None):
    """Two separate runs with little noise."""
    return measured(folder / "a", a_ms, **(a or {})), measured(folder / "b", b_ms, **(b or {}))


def in_passes(folder, slowdown, random, passes=9, noise=0.03, a_shares=SHARES, shares=SHARES):
    """Two runs that shared passes: the machine is as slow as it is in each, for both."""
    machine = 10 * np.exp(np.cumsum(0.1 * random.standard_normal((passes, 1)), axis=0))
    for name, factor, parts in (("a", 1.0, a_shares), ("b", slowdown, shares)):
        steps = machine * factor * np.exp(noise * random.standard_normal((passes, 1)) + np.zeros((passes, 4)))
        write_run(folder / name, 64, float(np.median(steps)))
        write_steps(folder / name, steps, rounds=range(passes), shares=parts)
    return folder / "a", folder / "b"


def in_pairs(folder, slowdown, random, windows=1, pairs=9, shares=SHARES):
    """What `compare --rerun` leaves: new processes in each pass, which follow each other or alternate."""
    for number in range(pairs):
        machine = 10 * np.exp(0.2 * random.standard_normal() + 0.05 * random.standard_normal((windows, 1)))
        for name, factor in (("a", 1.0), ("b", slowdown)):
            process = np.exp(0.03 * random.standard_normal())
            steps = machine * factor * process * np.exp(0.03 * random.standard_normal((windows, 10)))
            place = folder / name / f"0-{number}"
            rerun = {"of": "x"} | ({"pair": number} if windows == 1 else {})
            write_run(place, 64, float(np.median(steps)), rerun=rerun)
            shared = range(number * windows, (number + 1) * windows) if windows > 1 else None
            write_steps(place, steps, rounds=shared, shares=shares)
    return folder / "a", folder / "b"


def rows(found):
    return {row.name: row for row in found.compared[0].rows}


# The verdict


@pytest.mark.parametrize(
    ("b_ms", "options", "code", "said"),
    [
        (16.0, {}, 3, r"B is slower: a sample takes 1.60 times as long \(1.1.*\), more than the 1.05 that is allowed."),
        (16.0, {"max_slowdown": 0.7}, 0, r"B is slower: .*; 1.7 is allowed."),
        (
            10.8,
            {},
            0,
            r"No difference shown: .* 1.08 times as long \(0.7.*\). compare --rerun shows smaller differences.",
        ),
        (6.2, {}, 0, "B is faster: a sample takes 0.62 times as long"),
    ],
)
def test_a_slowdown_that_is_shown_and_larger_than_allowed_is_exit_code_3(tmp_path, b_ms, options, code, said):
    found = compare(*apart(tmp_path, 10.0, b_ms), **options)
    assert found.exit_code == code
    assert re.match(said, found.headlines[0])
    assert rows(found)["samples_per_sec"].ratio.value == pytest.approx(10 / b_ms)


def test_a_shown_slowdown_below_the_limit_is_allowed(tmp_path):
    found = compare(*in_passes(tmp_path, 1.03, np.random.default_rng(0), noise=0.005))
    assert (found.compared[0].verdict, found.exit_code) == ("slower", 0)
    assert re.search(r"times as long \(1.0\d+ to 1.0\d+\); 1.05 is allowed.$", found.headlines[0])


def test_other_batch_sizes_are_judged_by_the_time_of_a_sample(tmp_path):
    found = compare(*apart(tmp_path, 10.0, 12.0, {"batch_size": 64}, {"batch_size": 128}))
    assert (found.compared[0].verdict, found.exit_code) == ("faster", 0)


@pytest.mark.parametrize("busy", ["a", "b"])
def test_on_a_busy_machine_there_is_no_verdict_but_what_to_do(tmp_path, busy):
    found = compare(*apart(tmp_path, 10.0, 40.0, **{busy: {"others": 0.4}}))
    assert found.exit_code == 0
    (line,) = found.headlines
    assert line.startswith(
        "The machine was busy: other programs took 40 % of the processor. No difference can be shown."
    )
    assert line.endswith("Close them, and measure both again (compare --rerun).")
    assert {row.verdict for row in found.compared[0].rows} <= {"busy", "below 2 % of the step"}


@pytest.mark.parametrize("left", ["nothing", "a damaged file"])
def test_without_single_steps_nothing_is_shown(tmp_path, left):
    a, b = apart(tmp_path, 10.0, 30.0)
    if left == "nothing":
        (b / "steps.npz").unlink()
    else:
        (b / "steps.npz").write_bytes(b"no archive")
    found = compare(a, b)
    assert (found.exit_code, found.compared[0].verdict) == (0, "noise unknown")
    assert found.headlines[0].startswith("No difference can be shown: the steps' noise is not known; compare")
    assert rows(found)["samples_per_sec"].ratio.value == pytest.approx(1 / 3, rel=0.05)
    assert [line.partition(":")[0] for line in found.warnings] == (["b"] if left != "nothing" else [])


# Runs apart, and in passes


def test_what_separate_runs_can_show_is_said_with_its_number_and_is_true(tmp_path):
    found = compare(*apart(tmp_path, 10.0, 12.0))
    said = " ".join(found.text.split())
    assert "Separate runs of the same thing are taken to differ by 10 %." in said
    least = float(re.search(r"A difference below (\d+) % cannot be shown by them", said)[1]) / 100
    verdicts = [
        compare(*apart(tmp_path / str(factor), 10.0, 10.0 * (1 + factor * least))).compared[0].verdict
        for factor in (0.95, 1.05)
    ]
    assert verdicts == ["no difference shown", "slower"]


def test_repeated_runs_on_both_sides_show_what_runs_differ_by(tmp_path):
    for kind, spread in (("calm", 0.01), ("wild", 0.15)):
        for name, ms in (("a", 10.0), ("b", 12.0)):
            for seed, factor in enumerate((1 - spread, 1.0, 1 + spread)):
                measured(tmp_path / kind / name / str(seed), ms * factor, seed=seed)
    calm, wild = ((tmp_path / kind / "a", tmp_path / kind / "b") for kind in ("calm", "wild"))
    assert (compare(*calm).exit_code, compare(*wild).exit_code) == (3, 0)
    assert "taken to differ" not in compare(*calm).text
    assert compare(calm[0], calm[1] / "0").exit_code == 0  # repeats on one side alone


def test_equal_numbers_of_passes_in_two_sweeps_are_no_shared_passes(tmp_path):
    for name in "xy":
        in_passes(tmp_path / name, 1.2, np.random.default_rng(0))
    assert compare(tmp_path / "x" / "a", tmp_path / "x" / "b").compared[0].passes == 9
    assert compare(tmp_path / "x" / "a", tmp_path / "y" / "b").compared[0].passes == 0


@pytest.mark.parametrize("windows", [1, 5], ids=["one after the other", "alternating"])
def test_a_pair_of_new_processes_is_a_pass_and_a_run_beside_them_is_left_out(tmp_path, windows):
    a, b = in_pairs(tmp_path, 1.2, np.random.default_rng(0), windows)
    measured(a / "alone", 100.0)
    found = compare(a, b)
    assert (found.compared[0].passes, found.exit_code) == (9, 3)
    assert found.compared[0].slowdown.value == pytest.approx(1.2, rel=0.05)
    assert "A and B were measured side by side, in 9 passes." in found.text


# How often it is wrong


def wandering(folder, random):
    """Separate runs of the same thing: each has its own speed, which drifts while it runs."""
    for name in "ab":
        steps = noisy(10 * np.exp(0.08 * random.standard_normal()), random, 12, 0.05, 0.02)
        measured(folder / name, steps, shares=ONLY_STEPS)
    return folder / "a", folder / "b"


KINDS = ("passes", "apart", "pairs, one after the other", "pairs, alternating")


def simulated(folder, kind, slowdown, count):
    """The verdicts on pairs of which one side is slower."""
    random, only = np.random.default_rng(1), {"shares": ONLY_STEPS}
    make = {
        "passes": lambda place: in_passes(place, slowdown, random, a_shares=ONLY_STEPS, **only),
        "pairs, one after the other": lambda place: in_pairs(place, slowdown, random, **only),
        "pairs, alternating": lambda place: in_pairs(place, slowdown, random, 4, **only),
        "apart": lambda place: wandering(place, random),
    }[kind]
    return [compare(*make(folder / str(number))).compared[0].verdict for number in range(count)]


OTHERS = [pytest.param(kind, 200, marks=pytest.mark.slow) for kind in ("passes", *KINDS[1:])]


@pytest.mark.parametrize(("kind", "count"), [("passes", 20), ("apart", 20), ("pairs, alternating", 40), *OTHERS])
def test_at_most_5_percent_of_unchanged_pairs_are_said_to_differ(tmp_path, kind, count):
    found = simulated(tmp_path, kind, 1.0, count)
    assert sum(verdict != "no difference shown" for verdict in found) <= 0.05 * count


@pytest.mark.parametrize(
    ("kind", "count"), [("passes", 10), *(pytest.param(kind, 20, marks=pytest.mark.slow) for kind in KINDS[2:])]
)
def test_20_percent_are_shown_in_9_passes(tmp_path, kind, count):
    assert simulated(tmp_path, kind, 1.2, count).count("slower") >= count - 1


def test_the_more_is_compared_the_wider_is_each_interval(tmp_path):
    for name in "ab":
        for number in range(10):
            measured(tmp_path / name / str(number), 10.0, 2**number)
    many, one = compare(tmp_path / "a", tmp_path / "b"), compare(tmp_path / "a" / "0", tmp_path / "b" / "0")
    assert len(many.compared) == 10
    assert many.compared[0].slowdown.high > 1.1 * one.compared[0].slowdown.high


# The parts of the step


def test_the_part_that_is_slower_is_named_and_the_others_are_not(tmp_path):
    shares = (0.02, 0.001, 0.3, 0.9, 0.1, 0.05)
    found = compare(
        *in_passes(tmp_path, 1.0, np.random.default_rng(0), a_shares=(0.02, 0.001, *SHARES[2:]), shares=shares)
    )
    assert rows(found)["backward"].verdict == "slower"
    assert rows(found)["step"].verdict == rows(found)["forward"].verdict == "no difference shown"
    assert (rows(found)["transfer"].ratio, rows(found)["transfer"].verdict) == (None, "below 2 % of the step")
    table = found.text.split("\n\n")[2].splitlines()
    assert [line.split("  ")[0] for line in map(str.strip, table[1:])] == ["samples/s", "backward, µs/sample"]


# What is matched, and what differs


def test_sweeps_are_matched_by_batch_size_and_settings(tmp_path):
    for n, size in enumerate((64, 128, 256)):
        for m, pipeline in enumerate(("memory", "device")):
            write_run(tmp_path / "a" / f"{n}{m}", size, 10.0, options={"data.pipeline": pipeline})
    options = {"trainer.precision": "bf16-mixed", "data.pipeline": "device"}
    write_run(tmp_path / "b" / "0", 128, 20.0, options=options)
    write_run(tmp_path / "b" / "1", 512, 20.0, options=options)
    found = compare(tmp_path / "a", tmp_path / "b")
    (compared,) = found.compared
    assert [run.name for run in (*compared.pair.a, *compared.pair.b)] == ["11", "0"]
    assert compared.pair.label == "cnn · device · batch size 128"
    assert found.differing["configuration"] == ["trainer.precision: 32-true → bf16-mixed"]
    assert found.warnings == ["A: nothing matches 00, 01, 10, 20, 21", "B: nothing matches 1"]


def test_nothing_that_matches_is_one_line(tmp_path):
    write_sweep(tmp_path / "a", [64, 128], overlapped(10, 0.01))
    write_sweep(tmp_path / "b", [256], overlapped(10, 0.01))
    write_run(tmp_path / "c", 64, status="out_of_memory", error="OutOfMemoryError")
    file = write_run(tmp_path / "d", 64) / "run.json"
    unmeasured = {"throughput": {"missing": {"bottleneck": "no batch was trained"}}}
    file.write_text(json.dumps(json.loads(file.read_text()) | unmeasured))
    for a, b, said in (
        ("a", "b", "no run of one folder matches one of the other.*A: nothing matches 0, 1"),
        ("a", "d", r"B, d: not measured \(no batch was trained\)"),
        ("c", "c", "A, c: not measured"),
        ("nowhere", "a", "no such folder"),
    ):
        with pytest.raises(UserError, match=said):
            compare(tmp_path / a, tmp_path / b)


def test_long_values_that_differ_at_their_end_are_said_to(tmp_path):
    for name in ("best", "last"):
        write_run(tmp_path / name, 64, 10.0, options={"model.weights": f"/data/{'x' * 80}/{name}.ckpt"})
    (line,) = compare(tmp_path / "best", tmp_path / "last").differing["configuration"]
    assert line.startswith("model.weights: /data/xx") and "best.ckpt → " in line and line.endswith("last.ckpt")


def test_what_differs_in_configuration_versions_and_hardware_is_said(tmp_path):
    a = {"hardware": {"cpu_cores": 2}}
    b = {"hardware": {"cpu_cores": 4}, "options": {"optimizer.lr": 0.1}, "versions": {"torch": "2.10.0"}}
    found = compare(*apart(tmp_path, 10.0, 10.0, a, b))
    assert found.differing == {
        "configuration": ["optimizer.lr: 0.004 → 0.1"],
        "versions": ["torch: 2.9.0 → 2.10.0"],
        "hardware": ["cpu_cores: 2 → 4"],
    }
    assert "   versions: torch: 2.9.0 → 2.10.0\n" in found.text


# What is printed


def printed(folder):
    """Many kinds of texts."""
    texts = [compare(*apart(folder / "1", 10.0, ms)).text for ms in (4.0, 10.0, 16.0)]
    texts.append(compare(*apart(folder / "2", 10.0, 10.0, {"others": 0.5}, {"model": "mlp", "batch_size": 7})).text)
    texts.append(compare(*in_pairs(folder / "3", 1.2, np.random.default_rng(0), 4)).text)
    for name in "ab":
        options = {"optimizer.betas": [0.1 + (name == "a")] * 20}
        for number, size in enumerate((64, 128)):
            write_run(folder / "4" / name / str(number), size, 10.0, options=options)
    write_run(folder / "4" / "a" / "7", 512, status="failed", error="reason " * 50)
    return [*texts, compare(folder / "4" / "a", folder / "4" / "b").text]


def test_every_line_fits_80_columns_the_answer_is_the_first_and_no_word_is_the_program_s_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text in printed(tmp_path / "x"):
        lines = [line for line in text.splitlines() if str(tmp_path) not in line]
        assert max(map(len, lines)) <= 80
        assert re.match(r"B is |No difference|The machine was busy|batch size", lines[0])
        assert not re.search(FORBIDDEN, text.replace(str(tmp_path), ""))


def test_each_pair_has_its_rows_below_its_label(tmp_path):
    for name, ms in (("a", 10.0), ("b", 20.0)):
        measured(tmp_path / name / "0", 10.0, 64)
        measured(tmp_path / name / "1", ms, 128)
    found = compare(tmp_path / "a", tmp_path / "b")
    assert found.headlines[0].startswith("batch size 128: B is slower: ")
    lines = found.text.split("\n\n")[2].splitlines()
    assert [line.split("  ")[0] for line in lines[1:4]] == ["batch size 64", "samples/s", "batch size 128"]


def test_json_has_every_ratio_with_its_interval_and_no_infinity(tmp_path):
    found = compare(*apart(tmp_path / "known", 10.0, 16.0)).as_json()
    (one,) = found["pairs"]
    assert (found["schema"], found["regression"], one["regression"], one["passes"]) == (2, True, True, 0)
    assert [row["name"] for row in one["rows"]][:2] == ["samples_per_sec", "step"]
    step = one["rows"][1]
    assert (step["a"], step["b"], step["ratio"]) == tuple(map(pytest.approx, (156.25, 250.0, 1.6), (2, 2, 0.01)))
    low, high = step["interval"]
    assert low < 1.6 < high
    write_run(tmp_path / "c", 64, 10.0)
    text = json.dumps(compare(tmp_path / "known" / "a", tmp_path / "c").as_json(), allow_nan=False)
    assert "interval" not in text
