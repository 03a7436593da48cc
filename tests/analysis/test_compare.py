"""A against B: which runs are compared, when B counts as slower, how often that is wrong, and what is printed."""

import re
from functools import partial

import numpy as np
import pytest

from batchscope.analysis import compare as module
from batchscope.errors import UserError
from batchscope.records.step_parts import PARTS
from tests.support.synthetic_runs import change_record, write_run, write_steps


def compare(a, b, **options):
    """The comparison. Its text begins with the headline, and its lines fit 80 columns."""
    comparison = module.Comparison(a, b, **options)
    assert comparison.text.startswith(comparison.headline[:40])
    assert max(len(line) for line in comparison.text.splitlines() if str(a.parent) not in line) <= 80
    return comparison


def run_of_steps(folder, steps, batch_size=64, rounds=None, others=float("nan"), **fields):
    """A run of these steps; `others` is the share of the processor that other programs took."""
    run = write_run(folder, batch_size, float(np.median(steps)), **fields)
    return write_steps(run, steps, rounds=rounds, others=others)


def quiet_run(folder, step_ms, batch_size=64, **fields):
    """A run of 8 windows with little noise."""
    steps = step_ms * np.exp(0.02 * np.random.default_rng(0).standard_normal((8, 10)))
    return run_of_steps(folder, steps, batch_size, **fields)


def separate_runs(folder, a_ms, b_ms, a=None, b=None):
    """Two separate runs with little noise."""
    return quiet_run(folder / "a", a_ms, **(a or {})), quiet_run(folder / "b", b_ms, **(b or {}))


def in_passes(folder, slowdown, random, noise=0.03):
    """Two runs that shared 9 passes: the drift of the machine is the same for both."""
    machine = 10 * np.exp(np.cumsum(0.1 * random.standard_normal((9, 1)), axis=0))
    for name, factor in (("a", 1.0), ("b", slowdown)):
        steps = machine * factor * np.exp(noise * random.standard_normal((9, 1)) + np.zeros((9, 4)))
        run_of_steps(folder / name, steps, rounds=range(9))
    return folder / "a", folder / "b"


def in_pairs(folder, slowdown, random, windows=1, beside="both"):
    """The runs of `compare --rerun`, new processes in each of 9 pairs: successive ones, or alternating in shared passes.

    `beside`: which runs were measured in passes; if not `both`, no pass is shared, as where memory is scarce.
    """
    for number in range(9):
        machine = 10 * np.exp(0.2 * random.standard_normal() + 0.05 * random.standard_normal((windows, 1)))
        for name, factor in (("a", 1.0), ("b", slowdown)):
            process = np.exp(0.03 * random.standard_normal())
            steps = machine * factor * process * np.exp(0.03 * random.standard_normal((windows, 10)))
            rerun, first = (
                {"of": "x", "pair": number},
                number * windows + (1000 if (name, beside) == ("b", "each") else 0),
            )
            passes = range(first, first + windows) if windows > 1 and beside in ("both", "each", name) else None
            run_of_steps(folder / name / f"0-{number}", steps, rounds=passes, rerun=rerun)
    return folder / "a", folder / "b"


LOAD_NOTE = "Measured beside other programs that took 40 % of the processor"
NO_DIFFERENCE = r"No difference shown: .* 1.08 times as long \(0.7.*\)\.$"


@pytest.mark.parametrize(
    ("b_ms", "facts", "options", "code", "verdict", "regex"),
    [
        (16.0, {}, {}, 3, "slower", r"B is slower: a sample takes 1.60 times as long \(1.1.*\), more than the 1.05"),
        (16.0, {}, {"max_slowdown": 0.7}, 0, "slower", "B is slower: .*; 1.7 is allowed."),
        (
            16.0,
            {},
            {"max_slowdown": 0.599},
            3,
            "slower",
            r".* 1.600 times as long .* more than the 1.599 that is allowed",
        ),
        (10.8, {}, {}, 0, "no difference shown", NO_DIFFERENCE),
        (6.2, {}, {}, 0, "faster", "B is faster: a sample takes 0.62 times as long"),
        (0.62, {}, {}, 0, "faster", r"B is faster: a sample takes 0.062 times as long \(0.0\d\d to 0.0\d\d\)"),
        (12.0, {"b": {"batch_size": 128}}, {}, 0, "faster", "B is faster: a sample takes 0.60 times as long"),
        # Other programs may have slowed a run by the share that they took.
        (
            16.0,
            {"b": {"others": 0.4}},
            {},
            0,
            "no difference shown",
            "No difference shown: a sample takes 1.60 times as",
        ),
        (40.0, {"b": {"others": 0.4}}, {}, 3, "slower", "B is slower: a sample takes 4.00 times as long"),
    ],
)
def test_a_slowdown_that_is_shown_and_not_allowed_is_exit_code_3(tmp_path, b_ms, facts, options, code, verdict, regex):
    comparison = compare(*separate_runs(tmp_path, 10.0, b_ms, **facts), **options)
    assert (comparison.exit_code, comparison.verdict) == (code, verdict)
    assert re.match(regex, comparison.headline)
    samples = 2 if "128" in str(facts) else 1
    assert comparison.rate.value == pytest.approx(samples * 10 / b_ms)
    assert (LOAD_NOTE in " ".join(comparison.text.split())) == ("others" in str(facts))


def test_a_shown_slowdown_below_the_limit_is_allowed(tmp_path):
    comparison = compare(*in_passes(tmp_path, 1.07, np.random.default_rng(0), noise=0.005), max_slowdown=0.1)
    assert (comparison.verdict, comparison.exit_code) == ("slower", 0)
    assert re.search(r"times as long \(1.0\d+ to 1.1\d*\); 1.1 is allowed.$", comparison.headline)


def test_without_single_steps_nothing_is_shown(tmp_path):
    a, b = separate_runs(tmp_path, 10.0, 30.0)
    (b / "steps.npz").write_bytes(b"no archive")
    comparison = compare(a, b)
    assert (comparison.exit_code, comparison.verdict) == (0, "noise unknown")
    assert comparison.headline.startswith(
        "No difference can be shown: the steps' noise is not known; to measure it, write compare --rerun."
    )
    assert comparison.rate.value == pytest.approx(1 / 3, rel=0.05)
    assert [line.partition(":")[0] for line in comparison.warnings] == ["b"]
    assert re.search(r"^samples/s +6,\d+ +2,\d+ +0\.3\d +noise unknown$", comparison.text, re.MULTILINE)


def test_what_separate_runs_can_show_is_said_with_its_number_and_is_true(tmp_path):
    text = " ".join(compare(*separate_runs(tmp_path, 10.0, 12.0)).text.split())
    assert "Separate runs of the same thing are taken to differ by 10 %." in text
    least = float(re.search(r"A difference below (\d+) % cannot be shown by them", text)[1]) / 100
    for factor, verdict in ((0.95, "no difference shown"), (1.05, "slower")):
        comparison = compare(*separate_runs(tmp_path / verdict, 10.0, 10.0 * (1 + factor * least)))
        assert comparison.verdict == verdict


def test_runs_of_a_script_are_repeated_by_what_started_them(tmp_path):
    a, b = separate_runs(tmp_path, 10.0, 10.0, a={"options": {"script": "theirs.py"}})
    for steps in (None, b / "steps.npz"):
        if steps:
            steps.unlink()
        text = " ".join(compare(a, b).text.split())
        assert "repeat both by batchscope run, in a folder for each." in text and "--rerun" not in text


def test_repeated_runs_on_both_sides_show_what_runs_differ_by(tmp_path):
    for kind, spread in (("calm", 0.01), ("wild", 0.15)):
        for name, ms in (("a", 10.0), ("b", 12.0)):
            for seed, factor in enumerate((1 - spread, 1.0, 1 + spread)):
                quiet_run(tmp_path / kind / name / str(seed), ms * factor, seed=seed)
    calm, wild = ((tmp_path / kind / "a", tmp_path / kind / "b") for kind in ("calm", "wild"))
    assert (compare(*calm).exit_code, compare(*wild).exit_code) == (3, 0)
    assert "taken to differ" not in compare(*calm).text
    assert compare(calm[0], calm[1] / "0").exit_code == 0  # repeats on one side alone


def test_equal_numbers_of_passes_in_two_sweeps_are_no_shared_passes(tmp_path):
    for name in "xy":
        in_passes(tmp_path / name, 1.2, np.random.default_rng(0))
    assert compare(tmp_path / "x" / "a", tmp_path / "x" / "b").passes == 9
    assert compare(tmp_path / "x" / "a", tmp_path / "y" / "b").passes == 0


def test_two_runs_of_one_sweep_differ_by_what_processes_of_the_same_thing_differ_by(tmp_path):
    random = np.random.default_rng(2)
    factors = np.exp(np.sqrt(2) * 0.01 * random.standard_normal(20))
    pairs = (in_passes(tmp_path / str(n), factor, random, noise=0.002) for n, factor in enumerate(factors))
    assert [compare(*pair).verdict for pair in pairs].count("no difference shown") >= 19


@pytest.mark.parametrize(
    ("windows", "beside"),
    [(1, "both"), (5, "both"), (5, "each"), (5, "a")],
    ids=["one after the other", "alternating", "in passes of their own", "one in passes of its own, and one alone"],
)
def test_a_pair_of_new_processes_is_a_pass_and_a_run_beside_them_is_left_out(tmp_path, windows, beside):
    a, b = in_pairs(tmp_path, 1.2, np.random.default_rng(0), windows=windows, beside=beside)
    quiet_run(a / "alone", 100.0)
    comparison = compare(a, b)
    assert (comparison.passes, comparison.exit_code) == (9, 3)
    assert comparison.slowdown.value == pytest.approx(1.2, rel=0.05)
    assert "A and B were measured side by side, in 9 passes." in comparison.text


def test_the_number_of_a_pair_that_has_shared_passes_changes_nothing(tmp_path):
    sides = in_pairs(tmp_path, 1.2, np.random.default_rng(0), windows=5)
    slowdown = compare(*sides).slowdown
    for run in tmp_path.glob("*/*"):
        change_record(run, rerun={"of": "x"})
    assert compare(*sides).slowdown == slowdown


KINDS = {"passes": in_passes, "successive pairs": in_pairs, "alternating pairs": partial(in_pairs, windows=4)}


@pytest.mark.parametrize(
    ("kind", "count"),
    [("passes", 10), ("alternating pairs", 5), *(pytest.param(kind, 100, marks=pytest.mark.slow) for kind in KINDS)],
)
def test_at_most_5_percent_of_unchanged_pairs_are_said_to_differ_and_20_percent_are_shown(tmp_path, kind, count):
    random = np.random.default_rng(1)
    for slowdown, verdict, number in ((1.0, "no difference shown", count), (1.2, "slower", -(-count // 10))):
        pairs = (KINDS[kind](tmp_path / f"{slowdown} {index}", slowdown, random) for index in range(number))
        verdicts = [compare(*pair).verdict for pair in pairs]
        assert verdicts.count(verdict) >= 0.95 * number


def test_the_parts_add_up_to_the_time_of_a_sample_that_is_compared(tmp_path):
    """The mean over all steps differs, because it includes short batches and disturbed windows."""
    for seed, share in enumerate((0.2, 0.4)):
        parts = (0.0, 0.0, share, 0.6 - share, 0.3, 0.1)
        quiet_run(tmp_path / "a" / str(seed), 10.0, seed=seed, parts=parts)
    mean = {"step_ms": 40.0, "samples_per_sec_mean": 1600.0, "parts_ms": {**dict.fromkeys(PARTS, 0.0), "forward": 40.0}}
    quiet_run(tmp_path / "b", 5.0, throughput=mean)
    diff = compare(tmp_path / "a", tmp_path / "b")
    assert [sum(us) for us in zip(*diff.parts.values(), strict=True)] == pytest.approx([1e6 / r for r in diff.rates])
    assert diff.verdict == "faster" and diff.parts["forward"] == pytest.approx([0.3 * 156, 78], rel=0.02)
    table = [re.split(r" {2,}", line.strip()) for line in diff.text.split("\n\n")[2].splitlines()]
    assert table[1][0] == "samples/s" and len(table[1]) == 6
    assert [row[0] for row in table[2:]] == [f"{part.replace('_', ' ')}, µs/sample" for part in PARTS]
    assert {len(row) for row in table[2:]} == {3}


@pytest.mark.parametrize(
    ("ms", "shown"),
    [
        ({"data_wait": 1.0, "transfer": 0.5, "forward": None}, ["data_wait", "transfer"]),
        ({"other": -1}, []),
        (None, []),
    ],
)
def test_each_part_that_both_runs_have_timed_is_shown(ms, shown, tmp_path):
    """On MPS some parts are not timed."""
    comparison = compare(*separate_runs(tmp_path, 10.0, 10.0, b={"throughput": {"parts_ms": ms}}))
    assert [*comparison.parts] == shown


def test_each_side_is_one_run_or_its_repeats_and_anything_else_is_one_line(tmp_path):
    for number, (size, pipeline) in enumerate(((64, "memory"), (64, "device"), (128, "device"))):
        write_run(tmp_path / "a" / str(number), size, 10.0, options={"data.pipeline": pipeline})
    write_run(tmp_path / "b", 64, 10.0)
    write_run(tmp_path / "c", 64, status="out_of_memory", error="OutOfMemoryError")
    change_record(write_run(tmp_path / "d", 64), throughput={"missing": {"bottleneck": "no batch was trained"}})
    for a, b, message in (
        ("a", "b", "A holds runs that differ in data.pipeline, data.batch_size; takes one run, or its repeats"),
        ("b", "a", "B holds runs that differ in"),
        ("b", "d", r"B, d: not measured \(no batch was trained\)"),
        ("c", "c", r"A, c: not measured \(out of memory\)"),
    ):
        with pytest.raises(UserError, match=f"^compare: {message}"):
            compare(tmp_path / a, tmp_path / b)


def test_repeats_on_machines_with_other_cores_are_compared(tmp_path):
    for seed, cores in enumerate((32, 64)):
        quiet_run(tmp_path / "a" / str(seed), 10.0, seed=seed, hardware={"cpu_cores": cores})
    quiet_run(tmp_path / "b", 16.0)
    assert compare(tmp_path / "a", tmp_path / "b").slowdown.value == pytest.approx(1.6, rel=0.01)


def test_what_differs_in_configuration_versions_and_hardware_is_said(tmp_path):
    weights = [f"/data/{'x' * 80}/{name}.ckpt" for name in ("best", "last")]
    a = {"hardware": {"cpu_cores": 2}, "options": {"model.weights": weights[0]}}
    b = {"hardware": {"cpu_cores": 4}, "options": {"optimizer.lr": 0.1, "model.weights": weights[1]}}
    comparison = compare(*separate_runs(tmp_path, 10.0, 16.0, a, b | {"versions": {"torch": "2.10.0"}}))
    (line,) = [text for text in comparison.differing["configuration"] if "weights" in text]
    assert line.startswith("model.weights: /data/xx") and "best.ckpt → " in line and line.endswith("last.ckpt")
    assert comparison.differing == {
        "configuration": [line, "optimizer.lr: 0.004 → 0.1"],
        "versions": ["torch: 2.9.0 → 2.10.0"],
        "hardware": ["cpu_cores: 2 → 4"],
    }
    assert "   versions: torch: 2.9.0 → 2.10.0\n" in comparison.text
