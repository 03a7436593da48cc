"""Which runs are found below some folders, the numbers of each, and which of them differ in batch size alone."""

import pytest

from batchscope.analysis.read import read_sweep
from tests.support.synthetic_runs import change_record, write_measured, write_rates, write_run, write_steps


def write(folder, sizes, first=0, **fields):
    return write_measured(folder, dict.fromkeys(sizes, 10.0), first=first, windows=0, **fields)


def test_runs_come_in_the_order_of_their_numbers_and_each_counts_once(tmp_path):
    write(tmp_path, range(1, 13))
    (tmp_path / ".submitit" / "1234").mkdir(parents=True)  # a launcher's record in a hidden folder is not a run
    (tmp_path / ".submitit" / "1234" / "run.json").touch()
    sweep = read_sweep([tmp_path])
    assert ([run.name for run in sweep.runs], sweep.notes) == ([str(n) for n in range(12)], [])
    again = read_sweep([tmp_path, tmp_path / "1"])  # with several folders, the names of runs begin with the folder
    assert [run.name for run in again.runs] == [f"{tmp_path.name}/{n}" for n in range(12)]


@pytest.mark.parametrize(
    ("content", "note"),
    [
        (b"[]", "2: cannot be read: it is not the record of a run"),
        (b'{"schema": "3\\n3"}', r"2: is of another version: its schema is '3\n3', and this one reads 3"),
        (b"{}", "2: left out: it has no config"),
        (b"\xff\xfe\x00", "2: cannot be read"),
    ],
)
def test_a_broken_record_is_a_note_and_the_rest_is_read(tmp_path, content, note):
    write(tmp_path, [32, 64])
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "run.json").write_bytes(content)
    sweep = read_sweep([tmp_path])
    assert (len(sweep.runs), len(sweep.notes), sweep.notes[0][: len(note)]) == (2, 1, note)


def test_values_of_the_wrong_kind_are_unknown_and_the_metrics_of_any_module_are_named_by_their_stage(tmp_path):
    wrong = {"samples_per_sec": [1], "step_ms_median": "fast", "parts_ms": [1], "mfu": True}
    fields = {"hardware": None, "metrics": 3, "seconds": "long", "versions": [], "dataset": "mnist"}
    change_record(write_run(tmp_path / "0", 64, 10.0), throughput=wrong, **fields)
    write_run(tmp_path / "1", metrics={"test_acc": 0.5, "val/loss": 1.0, "train_loss_epoch": 2.0, "f1": 3.0})
    run, second = read_sweep([tmp_path]).runs
    assert not {"samples_per_sec", "step_ms_median", "mfu", "seconds", "forward_ms_mean"} & run.values.keys()
    assert (run.metrics, run.device) == ({}, "")
    assert second.metrics == {"test/acc": 0.5, "val/loss": 1.0, "train/loss_epoch": 2.0, "f1": 3.0}


def test_accuracies_are_in_percent_in_the_runs_of_the_class_that_logs_them_so(tmp_path):
    logged = [("SimpleCNN", 0.987), ("Lit", 97.1), ("Lit", 0.9)]
    for number, (module, accuracy) in enumerate(logged):
        folder = write_run(tmp_path / str(number), 64, 10.0, metrics={"test/acc": accuracy})
        change_record(folder, model={"class": module})
    accuracies = [run.metrics["test/acc"] for run in read_sweep([tmp_path]).runs]
    assert accuracies == pytest.approx([0.987, 0.971, 0.009])


@pytest.mark.parametrize(
    ("facts", "rate", "update"),
    [
        # The rate is that of the median step, not of the mean step.
        ({"throughput": {"step_ms": 50.0, "samples_per_sec_mean": 1280.0}}, 6400, 64),
        # A step counts the samples of all accumulated batches, and of the batches of all processes.
        ({"options": {"trainer.accumulate_grad_batches": 4}}, 25600, 256),
        # Records of earlier runs may have the samples of an update as an option.
        ({"options": {"global_batch_size": 256}, "throughput": {"samples_per_sec": 25600.0}}, 25600, 256),
        ({"throughput": {"processes": 2}}, 12800, 128),
    ],
)
def test_the_samples_of_an_update_and_of_a_second(tmp_path, facts, rate, update):
    write_run(tmp_path / "0", 64, 10.0, **facts)
    (run,) = read_sweep([tmp_path]).runs
    assert run.values["samples_per_sec"] == pytest.approx(rate)
    assert run.values.get("samples_per_sec_mean") == facts.get("throughput", {}).get("samples_per_sec_mean")
    assert (run.batch_size, run.global_batch_size) == (64, update)
    assert run.values.get("global_batch_size", 64) == update
    updates = -(-55_000 // update)
    assert (run.samples_after(updates), run.samples_after(updates + 1)) == (55_000, 55_000 + update)


def test_the_samples_of_batches_that_vary_are_those_that_they_have_held(tmp_path):
    write_run(tmp_path / "0", 64, 10.0, train_samples=6000, throughput={"batch_size": 40, "batch_size_varies": True})
    (run,) = read_sweep([tmp_path]).runs
    assert (run.batch_size, run.samples_after(300)) == (64, 12_000)
    assert "global_batch_size" not in run.values


LR, RULE, SIZE = "optimizer.lr", "optimizer.lr_scaling", "data.batch_size"
TARGET = {"target": {"metric": "val/acc", "value": 0.9}}
SEARCHED = [{"options": {LR: rate, "target": 0.9}, **TARGET} for rate in (0.1, 0.2)]
RATES = [{"options": {LR: rate}} for rate in (0.1, 0.2)]
# The fields in which the runs differ beside the batch size; the factors; the labels of the groups.
GROUPS = {
    "no group has its own seed, folder or callbacks": (
        [{}, {"seed": 1, "options": {"data.root": "elsewhere", "callbacks.progress": None}}], [SIZE, "seed"], ["cnn"],
    ),
    "a label names what sets a group apart from most and no more": (
        [{}, {"device": "cuda"}, {"model": "mlp", "options": {"model.hidden_size": 256}}],
        ["model", "device", SIZE], ["cnn", "cnn · gpu", "mlp"],
    ),
    "words speak for themselves, numbers by their names": (
        [{}, {"options": {"trainer.precision": "bf16-mixed", "model.hidden_size": 64}}],
        ["model.hidden_size", "trainer.precision", SIZE],
        ["cnn · hidden_size 128 · 32-true", "cnn · hidden_size 64 · bf16-mixed"],
    ),
    "a learning rate of its own divides": (RATES, [LR, SIZE], ["cnn · lr 0.1", "cnn · lr 0.2"]),
    "those that a search for a target tries do not": (
        [*SEARCHED, *RATES], [LR, "target", SIZE], ["cnn · target 0.9", "cnn · lr 0.1", "cnn · lr 0.2"],
    ),
    "a rule for the learning rate divides, and is named where its word is not enough": (
        [{"options": {RULE: "auto"}}, {"options": {RULE: "none"}}, {"options": {RULE: "linear"}}], [RULE, SIZE],
        ["cnn · lr_scaling auto", "cnn · lr_scaling none", "cnn · linear"],
    ),
    "so is a value that says as little": (
        [{"options": {"compile": value}} for value in (False, "default")], ["compile", SIZE],
        ["cnn · compile false", "cnn · compile default"],
    ),
    "an option that some runs do not have divides": (
        [{}, {"options": {"optimizer.amsgrad": True}}], ["optimizer.amsgrad", SIZE], ["cnn", "cnn · amsgrad true"],
    ),
    "what is null is as what is not there": (
        [{}, {"options": {"optimizer.amsgrad": None}}, {"options": {"optimizer.amsgrad": True}}],
        ["optimizer.amsgrad", SIZE], ["cnn", "cnn · amsgrad true"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", GROUPS)
def test_groups(tmp_path, kind):
    runs, factors, labels = GROUPS[kind]
    for number, fields in enumerate(runs):
        write(tmp_path, [32, 64], first=2 * number, **fields)
    sweep = read_sweep([tmp_path])
    assert sweep.factors == factors
    assert [group.label for group in sweep.groups] == labels
    assert sum(len(group.runs) for group in sweep.groups) == 2 * len(runs)


@pytest.mark.parametrize(("widths", "name"), [((8, 8), "parameters"), ((100, 101), "hidden_size")])
def test_the_networks_of_a_script_are_told_apart_by_an_option_or_else_by_their_parameters(tmp_path, widths, name):
    for number, width in enumerate(widths):
        write(tmp_path, [32, 64], first=2 * number, options={"script": "theirs.py", "model.hidden_size": width})
        for folder in (2 * number, 2 * number + 1):
            change_record(tmp_path / str(folder), model={"parameters": 100 + number})
    assert [group.label for group in read_sweep([tmp_path]).groups] == [f"cnn · {name} {size}" for size in (100, 101)]


def test_a_fit_that_failed_before_its_lazy_layers_had_parameters_is_among_the_others_of_its_script(tmp_path):
    for number, (status, parameters) in enumerate((("finished", 5100), ("finished", 5100), ("failed", 0))):
        run = write_run(tmp_path / str(number), 32 * 2**number, status=status, options={"script": "theirs.py"})
        change_record(run, model={"parameters": parameters})
    assert [(group.label, len(group.runs)) for group in read_sweep([tmp_path]).groups] == [("cnn", 3)]


def test_a_learning_rate_that_grows_with_the_batch_divides_no_group(tmp_path):
    write(tmp_path, (32, 64, 128), options=lambda size: {LR: size / 1e4})
    sweep = read_sweep([tmp_path])
    assert (LR in sweep.factors, len(sweep.groups)) == (True, 1)


def test_the_precision_is_the_one_that_was_computed_in(tmp_path):
    for number, precision in enumerate(("bf16-mixed", "16-mixed", "bf16", "16")):
        fields = {"options": {"trainer.precision": precision}, "status": "failed" if number == 2 else "finished"}
        write_rates(tmp_path, {64: 3000}, first=number, **fields)
    sweep = read_sweep([tmp_path])
    assert (sweep.factors, [run.precision for run in sweep.runs]) == ([], ["bf16-mixed"] * 4)


def test_a_seed_of_the_data_alone_is_a_setting(tmp_path):
    for number in range(2):
        write_rates(tmp_path, {64: 3000}, first=number, options={"data.seed": number})
    write_rates(tmp_path, {64: 3000}, first=2, seed=2, options={"data.seed": 2})
    assert read_sweep([tmp_path]).factors == ["data.seed", "seed"]


def test_a_rule_for_the_learning_rate_does_not_grow_with_the_batch(tmp_path):
    """Two sweeps over different sizes, of which one scaled the learning rate by a rule, are two groups."""
    write(tmp_path, (32, 64), options={RULE: "none"})
    write(tmp_path, (128, 256), first=2, options={RULE: "auto"})
    assert [len(group.sizes) for group in read_sweep([tmp_path]).groups] == [2, 2]


@pytest.mark.parametrize(("asked", "size"), [(64, 64), (None, 61)])
def test_seeds_whose_batches_vary_have_one_size_and_it_is_the_one_that_was_asked_for(tmp_path, asked, size):
    for seed, mean in enumerate((61, 62, 60)):
        held = {"batch_size": mean, "batch_size_varies": True}
        options = {"data.batch_size": asked}
        write_run(tmp_path / str(seed), 64, 10.0, seed=seed, throughput=held, options=options)
    sweep = read_sweep([tmp_path])
    (group,) = sweep.groups
    assert ({size: len(runs) for size, runs in group.sizes.items()}, sweep.notes) == ({size: 3}, [])


def test_the_fits_of_a_script_whose_batches_vary_have_each_a_size_of_its_own(tmp_path):
    for number, mean in enumerate((31, 62, 125)):
        held = {"batch_size": mean, "batch_size_varies": True}
        change_record(write_run(tmp_path / str(number), 64, 10.0, throughput=held), config={"script": "theirs.py"})
    assert [list(group.sizes) for group in read_sweep([tmp_path]).groups] == [[31, 62, 125]]


def test_repeated_runs_of_a_size_give_their_median(tmp_path):
    for number, ms in enumerate((10.0, 11.0, 50.0)):
        write_run(tmp_path / str(number), 100, ms, seed=number)
    (group,) = read_sweep([tmp_path]).groups
    assert group.rates.rate(100) == pytest.approx(1e5 / 11)


def test_different_data_under_one_name_and_other_versions_of_torch_are_said(tmp_path):
    write(tmp_path, [32, 64])
    write(tmp_path, [32], first=2, dataset={"name": "rendered-digits"}, versions={"torch": "2.10.0"})
    assert read_sweep([tmp_path]).notes == [
        "the runs used several versions of torch: 2.10.0, 2.9.0",
        "data=mnist was not the same data in every run: mnist, rendered-digits",
    ]


def test_different_data_of_one_setting_and_seed_are_said(tmp_path):
    for number, (seed, fingerprint) in enumerate(((0, "a"), (0, "b"), (1, "unknown"), (1, "c"), (2, "d"))):
        dataset = {"name": "mnist", "fingerprint": fingerprint}
        write(tmp_path / fingerprint, [32 + number], first=number, seed=seed, dataset=dataset)
    notes = ["runs of one setting and seed had different data: their dataset.fingerprint differs"]
    assert read_sweep([tmp_path]).notes == notes
    assert read_sweep([tmp_path / name for name in ("a", "c", "unknown", "d")]).notes == []


@pytest.mark.parametrize("evidence", [None, 7, "two\nlines"])
def test_the_slow_rank_of_a_run_is_said_once_for_all_runs_that_have_one(tmp_path, evidence):
    slow = {"throughput": {"slow_rank": {"evidence": "rank 1 is slow"}}}
    write_run(tmp_path / "0", 32, 10.0, throughput={"slow_rank": {"evidence": evidence}})
    write_run(tmp_path / "1", 64, 10.0, **slow)
    assert read_sweep([tmp_path]).notes == ["1: rank 1 is slow"]
    write_run(tmp_path / "2", 128, 10.0, **slow)
    assert read_sweep([tmp_path]).notes == ["a rank was slow in 2 of 3 runs, as in 1: rank 1 is slow"]


def test_runs_with_another_quota_of_the_processor_are_no_repeats(tmp_path):
    for number, cores in enumerate((2, 2.5)):
        write(tmp_path, [32], first=number, hardware={"cpu_cores": cores})
    assert [group.label for group in read_sweep([tmp_path]).groups] == ["cnn · 2 cores", "cnn · 2.5 cores"]


def test_the_sizes_of_a_sweep_are_compared_at_equal_load(tmp_path):
    for number, (size, loaded) in enumerate({8: 2, 64: 6}.items()):  # passes under load, of twelve
        others = [0.5] * loaded + [0.0] * (12 - loaded)
        run = write_run(tmp_path / str(number), size, float(size))
        write_steps(run, [[size * (1 + 2 * share)] * 5 for share in others], rounds=range(12), others=others)
    assert read_sweep([tmp_path]).groups[0].rates.ratio(8, 64).value == pytest.approx(1, abs=0.1)
