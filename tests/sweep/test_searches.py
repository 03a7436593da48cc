"""Plans that search: the batch size that fills a device, the time to a target, and the sizes that choose measures."""

import pytest

from batchscope.analysis.target import least_time_ratio
from batchscope.errors import UserError
from batchscope.options.check import check_config
from batchscope.options.compose import compose, without_hydra
from batchscope.sweep import choose_sweep
from batchscope.sweep.grow_batch import BatchSizeSearch
from batchscope.sweep.plans import Job, RunFailed, build_search
from tests.support.command_lines import composed, refusal
from tests.sweep.conftest import job, play

# --- find_batch_size -------------------------------------------------------------------------------------------------


def rate(samples_per_sec):
    return {"throughput": {"samples_per_sec": samples_per_sec}}


def device(floor, slope=1e-6, memory=2**40):
    """A device whose step takes floor + slope · batch seconds, with so much memory."""
    return lambda size: rate(size / (floor + slope * size)) if size <= memory else {"status": "out_of_memory"}


def search(folder, end, samples=None, timed=False, **options):
    """Search, and return the folders of the runs; `end` gives the end of a run by its size."""
    ran = []

    def do(trial):
        size = trial.config["data"]["batch_size"]
        ran.append(str(trial.run_dir.relative_to(folder)))
        assert trial.record_fields["overrides"][-1] == f"data.batch_size={size}"
        record = {"status": "finished", "dataset": {"train_samples": samples}, "throughput": {}, "config": trial.config}
        return {**record, **end(size)}

    trial = job(folder, ".", timed=timed)
    play(BatchSizeSearch(**options).plan(trial), do)
    return ran


@pytest.mark.parametrize(
    ("end", "options", "tried"),
    [
        (device(8e-6), {}, [8, 32, 128, 512, "again/64"]),  # the size that was left out below the answer
        (device(1.0, memory=300), {}, [8, 32, 128, 512, "again/256"]),  # where memory ends, the size below
        (device(1, 1, memory=4), {}, [8]),  # no size fits
        (device(0), {"start": 16}, [16, 64]),  # a larger batch is never faster
        (device(1e3, 1e-9), {"max_runs": 3}, [8, 32, 128, "again/64"]),  # it still rises
        (device(1.0), {"samples": 4000}, [8, 32, 128, 512, 2048, 4000]),  # the whole training set
        (device(1.0), {"samples": 1500}, [8, 32, 128, 512, 1500, "again/750"]),
        (device(1.0), {"samples": 512}, [8, 32, 128, 512, "again/256"]),
        (device(1.0), {"samples": 50, "start": 64}, [64]),  # what the first batch held
        (lambda size: {**rate(size), "processes": 4}, {"samples": 4000}, [8, 32, 128, 512, 1000]),  # a share each
    ],
)
def test_batches_grow_by_four_until_they_are_no_faster_or_do_not_fit(end, options, tried, tmp_path):
    assert search(tmp_path, end, **options) == [str(size) for size in tried]


def test_beside_other_programs_one_size_that_is_no_faster_ends_no_search(tmp_path):
    """A burst has slowed the size 32."""
    samples_per_sec = {8: 1000, 32: 900, 64: 2000, 128: 4000, 256: 6000, 512: 8000, 2048: 8000, 8192: 8000}

    def end(size):
        return {"throughput": {"samples_per_sec": samples_per_sec[size], "others_share": 0.3}}

    assert search(tmp_path, end) == ["8", "32", "128", "512", "2048", "8192", "again/256"]


@pytest.mark.parametrize(("status", "fitting"), [("failed", 8), ("refused", 8), ("killed", 0)])
def test_a_run_that_does_not_say_whether_the_batch_fits_ends_the_search(status, fitting, tmp_path):
    end = {"status": status, "error": "ValueError: a bug"}
    with pytest.raises(RunFailed, match="a bug"):
        search(tmp_path, lambda size: rate(size) if size <= fitting else end)


def test_a_larger_size_that_the_system_kills_does_not_fit(tmp_path):
    ran = search(tmp_path, lambda size: rate(size) if size <= 128 else {"status": "killed"})
    assert ran == ["8", "32", "128", "512", "again/256"]


UNMEASURED = {"throughput": {"missing": {"bottleneck": "of 2 updates none came after the warm-up of 5"}}}


def test_a_size_without_a_measured_step_is_the_last_one_and_is_told(tmp_path, capsys):
    grow = device(1.0)
    run_dirs = search(tmp_path, lambda size: grow(size) if size <= 128 else UNMEASURED, samples=600)
    assert run_dirs == ["8", "32", "128", "512", "again/256"]
    assert (
        capsys.readouterr().err == "  data.batch_size=512 has no rate: of 2 updates none came after the warm-up of 5\n"
    )


def test_a_search_whose_first_run_has_no_rate_says_why(tmp_path):
    with pytest.raises(UserError, match="search: needs the rate of a run, and .*8 has none: of 2 updates none came "):
        search(tmp_path, lambda size: UNMEASURED)


def rates(samples_per_sec_by_size):
    """A device with these samples/s, by size."""
    return lambda size: {"throughput": {"samples_per_sec": samples_per_sec_by_size[size]}}


MANY = rates({8: 50, 32: 60, 128: 70, 512: 80, 2048: 90, 4096: 95, 8192: 100, 32768: 104})


@pytest.mark.parametrize(
    ("end", "options", "again"),
    [
        (device(8e-6), {}, [8, 32, 64, 128, 512]),
        (device(0), {}, [8, 32]),
        (MANY, {}, [128, 512, 2048, 4096, 8192, 32768]),  # six at most
        (device(1.0, memory=300), {}, [8, 32, 128, 256]),
        (device(1.0), {"samples": 1500}, [8, 32, 128, 512, 750, 1500]),  # the whole training set
        (device(1.0), {"samples": 50, "start": 64}, []),  # a single size
        (device(1, 1, memory=4), {}, []),  # no size fits
    ],
)
def test_the_largest_sizes_are_measured_again_side_by_side(end, options, again, tmp_path, capsys):
    ran = search(tmp_path, end, timed=True, **options)
    assert [run_dir for run_dir in ran if run_dir.startswith("again")] == [f"again/{size}" for size in again]
    words = f"\n— measured again side by side: data.batch_size={','.join(map(str, again))}\n"
    assert capsys.readouterr().out == (words if again else "")
    alone = search(tmp_path, end, **options)  # where the runs cannot wait, what was left out alone
    assert [run_dir for run_dir in ran if run_dir in alone] == alone and len(ran) - len(again) <= len(alone)


# --- time_to_target --------------------------------------------------------------------------------------------------

WORDS = ["experiment=time_to_target", "target=0.9", "search.sizes=[16,64,256]", "search.rates=[1,2]"]


def searched(folder, end, *words):
    """The size and rate of each run of a search, and its limits: seconds of training and of the clock. The runs take no time.

    `end` says of a size and a learning rate how the run ends.
    """
    ran, limits = [], []

    def do(trial):
        size, lr = trial.config["data"]["batch_size"], trial.config["optimizer"]["lr"]
        stop = trial.config["callbacks"]["stop_at_target"]
        assert trial.record_fields["overrides"][-2:] == [f"data.batch_size={size}", f"optimizer.lr={lr:g}"]
        assert (stop["metric"], stop["value"]) == ("val/acc", 0.9)
        ran.append((size, lr))
        limits.append((stop["seconds"], stop["wall_seconds"]))
        return {"dataset": {"train_samples": 55_000}, "status": "finished", "seconds": 10.0, **end(size, lr)}

    config = composed(*WORDS, "optimizer.lr=0.01", *words)
    job = Job(folder, config, {"choices": {}, "overrides": WORDS}, "run 1")
    play(build_search(config).plan(job), do)
    return ran, limits


def test_the_middle_size_is_first_and_then_the_size_with_the_best_time(tmp_path):
    times = {16: 3.0, 64: 2.0, 256: 8.0}
    ran, limits = searched(tmp_path, lambda size, lr: {"time_to_target_s": times[size] / (100 * lr)})
    assert ran == [*((size, 0.01) for size in (64, 16, 256)), (64, 0.02), (16, 0.02), (256, 0.02)]
    assert limits[0][0] is None
    in_best_times = [limit / best for (limit, _), best in zip(limits[1:], (2.0, 2.0, 2.0, 1.0, 1.0), strict=True)]
    assert in_best_times == pytest.approx([1.05 * least_time_ratio(3)] * 5, rel=1e-3)


def test_a_run_is_ended_once_its_report_shows_that_it_is_not_the_first(tmp_path):
    """No run is ended earlier: it might still be the fastest."""
    _, limits = searched(tmp_path, lambda size, lr: {"time_to_target_s": 2.0})
    assert all(limit > 2.0 * least_time_ratio(3) for limit, _ in limits[1:])
    _, limits = searched(tmp_path, lambda size, lr: {"time_to_target_s": 2.0}, "search.sizes=[1,4,16,64,256]")
    assert all(limit > 2.0 * least_time_ratio(5) for limit, _ in limits[1:])


NO_MEMORY, NAN = (
    {"status": "out_of_memory"},
    {"status": "not_finite", "error": "the loss is nan"},
)


@pytest.mark.parametrize(
    ("end", "word", "ran"),
    [
        (NO_MEMORY, "search.rates=[1,2]", [(64, 0.01), (16, 0.01), (16, 0.02)]),  # nor anything larger
        (NAN, "search.rates=[1]", [(64, 0.01), (16, 0.01), (256, 0.01)]),  # a result
        ({"dataset": {"train_samples": 70}}, "search.rates=[1]", [(64, 0.01), (16, 0.01)]),  # no batch is larger
        ({"dataset": {"train_samples": 280}, "processes": 2}, "search.rates=[1]", [(64, 0.01), (16, 0.01)]),  # a share each
        ({"seconds": 115.0}, "search.minutes=2", [(64, 0.01), (16, 0.01)]),  # which are over
    ],
)  # fmt: skip
def test_which_runs_are_left_out(end, word, ran, tmp_path):
    assert searched(tmp_path, lambda size, lr: end if size >= 64 else {}, word)[0] == ran


def test_a_size_that_is_killed_does_not_fit_where_a_smaller_one_has_trained_and_its_time_counts(tmp_path, monkeypatch):
    clock = iter(range(0, 10**6, 100))  # what is asked before and after a run
    monkeypatch.setattr("batchscope.sweep.time_to_target.time.monotonic", lambda: next(clock))
    killed = lambda size, lr: {"status": "killed"} if size == 256 else {}
    ran, limits = searched(tmp_path, killed, "search.minutes=10")
    assert ran == [(64, 0.01), (16, 0.01), (256, 0.01), (64, 0.02), (16, 0.02)]
    assert limits[3][1] == 240.0  # half of what the ten and ten and a hundred seconds have left
    with pytest.raises(RunFailed):
        searched(tmp_path / "first", lambda size, lr: {"status": "killed"})


def test_without_a_best_time_a_run_gets_a_share_of_the_time_that_is_left(tmp_path):
    _, limits = searched(tmp_path, lambda size, lr: {"seconds": 60.0}, "search.minutes=10")
    assert limits == [(None, share) for share in (300.0, 270.0, 240.0, 210.0, 180.0, 300.0)]


def test_sizes_that_do_not_fit_take_no_share_of_the_time_and_are_not_counted_as_left_out(tmp_path, capsys):
    no_memory = lambda size, lr: NO_MEMORY if size == 64 else {}
    _, limits = searched(tmp_path, no_memory)
    assert [share for _, share in limits] == [450.0, 445.0, 880.0]  # of 900, 890 and 880 s: the last run gets all
    searched(tmp_path, lambda size, lr: {**no_memory(size, lr), "seconds": 100.0}, "search.minutes=2")
    assert capsys.readouterr().out == "\nsearch.minutes=2 are over: 1 of 3 runs are left out\n"


def test_options_that_follow_the_one_that_is_tried_follow_it_in_each_run(tmp_path):
    words = ["model=mlp", "data=digits", "optimizer.weight_decay=${optimizer.lr}"]
    composition = compose(words)
    record_fields = {"choices": {}, "overrides": words}
    job = Job(tmp_path, check_config(without_hydra(composition)), record_fields, "run 1", composition=composition)
    trial = job.below("a", {"optimizer.lr": 0.5}, "a").below("b", {"data.batch_size": 8}, "b")
    assert (trial.config["optimizer"]["lr"], trial.config["optimizer"]["weight_decay"]) == (0.5, 0.5)
    assert (trial.config["data"]["batch_size"], trial.run_dir) == (8, tmp_path / "a" / "b")
    assert job.config["optimizer"]["weight_decay"] == job.config["optimizer"]["lr"] != 0.5


def test_a_training_whose_rate_it_cannot_set_is_refused(monkeypatch):
    config = {key: value for key, value in composed(*WORDS).items() if key != "optimizer"}  # of a LightningModule
    assert refusal(build_search(config).check, config, set()).startswith(
        "experiment=time_to_target: needs search.sizes and"
    )
    monkeypatch.setattr("batchscope.sweep.time_to_target.lightning_module_of", lambda config: "Lit")
    original = composed(*WORDS)
    assert refusal(build_search(original).check, original, set()).startswith(
        "experiment=time_to_target: tries optimizer.lr, and Lit is a LightningModule, which has its own"
    )


def test_any_other_failure_ends_it(tmp_path):
    ends = iter([{"status": "failed", "error": "step 3: the disk is gone"}])
    with pytest.raises(RunFailed, match="step 3: the disk is gone"):
        searched(tmp_path, lambda size, lr: next(ends))


# --- choose ----------------------------------------------------------------------------------------------------------


def test_the_timed_run_keeps_the_users_experiment():
    words = choose_sweep.timed_overrides(["experiment=mnist_rows", "model=lstm_cell"])
    assert words[0] == "experiment=[mnist_rows,throughput]"
    assert words[-2:] == ["model=lstm_cell", "data.batch_size=8,32,128,512"]
    assert choose_sweep.timed_overrides(["data.batch_size=1,4"])[-1] == "data.batch_size=1,4"
    assert "hydra.sweeper.params=null" in words  # of an experiment that is a sweep


def measured(folder, monkeypatch, status=lambda size: "finished", typed=(), kinds=("cpu",), epochs=None):
    """Return the jobs that a measurement asks for."""
    requested = []

    def do(loop, jobs):
        requested.extend(jobs)
        return [{"status": status(job.config["data"]["batch_size"])} for job in jobs]

    monkeypatch.setattr(choose_sweep.Loop, "do", do)
    choose_sweep.measure_on_devices(
        choose_sweep.timed_overrides(["model=cnn", "data=digits", *typed]), kinds, folder, epochs
    )
    return requested


def test_each_size_is_a_timed_run_on_the_device_with_a_folder_of_its_own(tmp_path, monkeypatch):
    jobs = measured(tmp_path / "new", monkeypatch)
    assert [job.run_dir for job in jobs] == [tmp_path / "new/cpu" / str(n) for n in range(4)]
    assert [job.config["data"]["batch_size"] for job in jobs] == [8, 32, 128, 512]
    assert jobs[1].config["callbacks"]["until_known"]["seconds"] == 10
    assert jobs[1].record_fields["choices"]["model"] == "cnn"
    assert {"model=cnn", "data=digits", "data.batch_size=32"} < {*jobs[1].record_fields["overrides"]}
    assert (jobs[1].config["trainer"]["accelerator"], jobs[1].title) == ("cpu", "cpu, run 2 of 4: data.batch_size=32")


def test_a_length_that_is_typed_ends_no_timed_run_and_the_record_notes_the_epochs(tmp_path, monkeypatch):
    typed = ["trainer.max_epochs=3", "trainer.max_steps=4", 'trainer.max_time="00:00:00:01"']
    first, *_ = measured(tmp_path / "new", monkeypatch, typed=typed, epochs=3)
    lengths = [first.config["trainer"][f"max_{unit}"] for unit in ("epochs", "steps", "time")]
    assert (lengths, first.record_fields["asked_epochs"]) == ([-1, 10**9, None], 3)


def test_a_gpu_that_is_named_by_its_number_is_not_asked_of_the_cpu(tmp_path, monkeypatch):
    jobs = measured(tmp_path / "new", monkeypatch, typed=["trainer.devices=[1]"], kinds=("cpu", "cuda"))
    devices = [(job.config["trainer"]["accelerator"], job.config["trainer"]["devices"]) for job in jobs]
    assert devices == [("cpu", 1)] * 4 + [("gpu", [1])] * 4


def test_two_sizes_have_to_fit(tmp_path, monkeypatch):
    fits = lambda largest: lambda size: "finished" if size <= largest else "out_of_memory"
    assert len(measured(tmp_path / "a", monkeypatch, fits(32))) == 4
    with pytest.raises(UserError, match="fewer than two batch sizes were measured on cpu"):
        measured(tmp_path / "b", monkeypatch, fits(8))


def test_two_measurements_at_once_have_a_folder_each(tmp_path):
    measured_jobs = [choose_sweep.measure_on_devices([], [], tmp_path / "new") for _ in range(2)]
    assert measured_jobs == [[], []]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "new-2"]
