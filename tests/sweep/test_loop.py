"""The loop: a plan asks for runs and gets their records; how runs are refused, visited side by side, and end."""

import itertools
import json
import os
import signal
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import psutil
import pytest

from batchscope import _system
from batchscope.analysis.groups import group_runs
from batchscope.analysis.run import Run
from batchscope.errors import UserError
from batchscope.records.read import read
from batchscope.sweep import folder, visits
from batchscope.sweep.passes import MIN_PASSES, SETTLED, Limits
from tests.support.marks import LINUX
from tests.sweep.conftest import TIMED, TRAINED, ended, job, running

slow = partial(pytest.param, marks=pytest.mark.slow)
WAIT, REMOVE = "list(visits)", "import shutil; shutil.rmtree(folder); os._exit(0)"


@pytest.mark.parametrize(("obstacle", "timed"), [("the run of another sweep", True), ("a file", False)])
def test_a_run_that_is_refused_is_not_started_and_the_others_are(do, loop, timed, obstacle, tmp_path, capfd):
    file = tmp_path / "b" if obstacle == "a file" else tmp_path / "b/run.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(before := json.dumps({"schema": 3, "status": "finished", "config": {"seed": 7}}))
    records = do(WAIT, "", WAIT, timed=timed)
    assert [record["status"] for record in records] == ["finished", "refused", "finished"]
    assert file.read_text() == before
    assert loop.has_refused
    assert capfd.readouterr().err.startswith("error: ")


KILL_SELF = "[len(record['taken']) == 2 and os.kill(os.getpid(), 9) for n in visits]"
PID_OF_A = "int((folder.parent / 'pids').read_text().split()[0])"
KILL_A = f"[os.kill({PID_OF_A}, 9) for n in visits if len(record['taken']) == 1]"
WARM_UP_AND_DIE = "visits and [sweep.tell({'ready': True}), sweep.hear(), os.kill(os.getpid(), 9)]"
EMPTY = "file.write_text('{}'); os._exit(0)"
AGAIN = "was killed beside others, and is done again alone"
NO_MEMORY = "record['status'] = 'out_of_memory'"
# The worker of a loader: it is stopped while its run waits, and outlives a kill of the run.
WORKER = "os.fork() or os.kill(os.getpid(), signal.SIGSTOP); "
# The actions of the runs, whether they are visited side by side → their statuses, and text in the output.
OTHERS_GO_ON = {
    "one raises": ([WAIT, "[1 / 0 for n in visits]"], True, "finished failed", "  failed: "),
    "one is killed": ([WAIT, KILL_SELF], True, "finished finished", AGAIN),
    "one is killed while it waits": ([WAIT, KILL_A], True, "finished finished", AGAIN),
    "one with a worker is killed while it waits": ([WORKER + WAIT, KILL_A], True, "finished finished", AGAIN),
    "a folder is removed": ([REMOVE, WAIT, WAIT], True, "refused finished finished", "error: "),
    "a folder is removed before the next begins": ([REMOVE, WAIT, WAIT], False, "refused finished finished", "error: "),
    "one is killed as it is set up": (
        [WAIT, "os.kill(os.getpid(), 9)", WAIT],
        True,
        "finished killed finished",
        "  killed",
    ),
    "one is killed as it warms up": ([WAIT, WARM_UP_AND_DIE, WAIT], True, "finished finished finished", AGAIN),
    "a record is emptied": ([WAIT, EMPTY, WAIT], True, "finished refused finished", "error: "),
    "one lacks memory": ([WAIT, NO_MEMORY], True, "finished out_of_memory", "  out of memory: "),
    "the server is killed": (["os.kill(os.getppid(), 9); time.sleep(0.3)", ""], False, "finished finished", ""),
}
RARE = ("one with a worker is killed while it waits", "the server is killed")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[LINUX, pytest.mark.slow] * (name in RARE)) for name in OTHERS_GO_ON],
)
def test_what_happens_to_a_run_ends_no_other(do, loop, name, capfd):
    lines, timed, ends, text = OTHERS_GO_ON[name]
    assert " ".join(record["status"] for record in do(*lines, timed=timed)) == ends
    assert loop.has_refused is ("refused" in ends)
    assert text in "".join(capfd.readouterr())


def test_where_all_runs_are_refused_none_is_prepared(loop, tmp_path, monkeypatch, capfd):
    def refuse(*_, **__):
        raise UserError("refused")

    monkeypatch.setattr(folder, "keep_or_plan", refuse)
    records = loop.do([job(tmp_path, name) for name in "ab"])
    assert [record["status"] for record in records] == ["refused", "refused"]
    assert "preparing" not in capfd.readouterr().out


def test_what_a_run_prints_is_in_its_log_and_warnings_of_visited_runs_are_said_once(loop, do, tmp_path, capfd):
    says = "print('said'); print('warning: slow', file=sys.stderr); list(visits)"
    do(says, says, timed=True)
    assert capfd.readouterr().err == "warning: slow\n"
    loop.do([job(tmp_path, "c", timed=False, does=says)])
    assert capfd.readouterr().out.startswith("\n— run c\nsaid\n")


@pytest.mark.parametrize("verbose", ["", "1"])
def test_what_an_earlier_start_has_printed_into_the_log_is_not_printed_again(verbose, do, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("BATCHSCOPE_VERBOSE", verbose)
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "log.txt").write_text("warning: an older one\n")
    do(*["print('warning: slow'); list(visits)"] * 2, timed=True)
    output = "".join(capfd.readouterr())
    assert output.count("warning: slow\n") == (2 if verbose else 1) and "older" not in output


def test_a_failed_run_names_the_log_that_it_has_printed_into_also_where_it_is_kept(do, capfd):
    for _ in range(2):
        do(WAIT, "1 / 0", timed=True)
        assert "  its output: " in capfd.readouterr().err


def test_a_run_whose_end_no_file_has_is_told_so(loop, capfd):
    loop.print_end({"status": "running"})  # the disk is full
    assert capfd.readouterr().err == "  running: its end could not be recorded\n"


def test_a_failed_run_that_is_kept_says_what_repeats_it_and_that_does(do, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    do("1 / 0")
    assert "rename" not in capfd.readouterr().err
    do("1 / 0")
    hint = "  not done again; to repeat it, rename a to a.aside\n"
    assert capfd.readouterr().err.endswith(hint)
    (tmp_path / "a").rename(tmp_path / "a.aside")
    assert do("")[0]["status"] == "finished"


LACKS_AND_FAILS = """tried = folder.parent / "tried"
if tried.exists():
    1 / 0
tried.touch()
record["status"] = "out_of_memory"
"""


def test_a_run_that_fails_when_it_is_done_again_alone_names_no_log_of_the_first_try(do, capfd):
    assert [record["status"] for record in do(WAIT, LACKS_AND_FAILS, timed=True)] == ["finished", "failed"]
    errors = capfd.readouterr().err
    assert "  failed: " in errors and "its output" not in errors


def test_a_run_that_has_ended_is_told_by_its_test(do, capfd):
    do("record['metrics'] = {'test/loss': 0.2, 'test/acc': 0.98, 'val/acc': 0.97}")
    assert capfd.readouterr().out == "\n— run a\n  test acc 98.0 % · 0 s\n"


def test_a_target_that_was_reached_in_an_unknown_time_is_said_to_be_reached(do, capfd):
    do("record['target'] = {'reached': True}")
    assert capfd.readouterr().out == "\n— run a\n  target reached · 0 s\n"


def test_a_python_that_there_is_not_is_one_line(do):
    with pytest.raises(UserError, match=r"^no-python cannot be started: No such file"):
        do("", python="no-python", may_fork=False)


# --- visits ----------------------------------------------------------------------------------------------------------


def test_runs_with_the_same_limits_share_passes_and_are_told_why_they_end(loop, tmp_path):
    jobs = [job(tmp_path, str(n), 8**n) for n in (1, 2, 3, 4)]
    for timed_job in jobs[::2]:
        timed_job.config["callbacks"] = {**TIMED, "until_known": {"min_passes": 12}}
    records = loop.do(jobs)
    assert [record["told"] for record in records] == [f"stop {SETTLED}"] * 4
    passes = [record["taken"] for record in records]
    assert passes[0] == passes[2] != passes[1] == passes[3]


def test_runs_of_so_many_seconds_have_the_fewest_passes_that_are_asked_for(tmp_path):
    timed_job = job(tmp_path, "a", callbacks={"until_known": {"seconds": 9, "min_passes": 30}})
    assert visits._visit_limits(replace(timed_job, seconds=6.0)) == Limits(seconds=6.0, min_passes=30, settles=False)


@pytest.fixture
def passes(monkeypatch):
    """Records the runs that would share passes, by the names of their folders (`a8 b8`), and ends them at once."""
    names_by_pass = []

    def noted(runs, *_, **__):
        names_by_pass.append(" ".join(run.job.run_dir.name for run in runs))
        for run in runs:
            run.end("stop ")

    monkeypatch.setattr(visits, "measure_in_passes", noted)
    return names_by_pass


def settings_of(folder, names, model=str, lr=lambda name: 0.1):
    """Jobs with names such as `a8` and `a8'` (model a, batch size 8, another seed), and the model and learning rate of each."""
    parts = [(name, name[0], int(name[1:].rstrip("'")), name.count("'")) for name in names.split()]
    return [
        job(folder, name, size, model={"_target_": model(letter)}, optimizer={"lr": lr(name)}, seed=seed)
        for name, letter, size, seed in parts
    ]


@pytest.mark.parametrize(
    ("names", "together"),
    [
        ("a1 b1 a2 b2 a4 b4", ["a1 a2 a4", "b1 b2 b4"]),
        ("a1 b1 b2 b4 b8 c1", ["b1 b2 b4 b8"]),  # a group of one run is done alone
        ("a1 a2 a4 a8 a16 b1", ["a1 a2 a4 a8"]),  # more than there is room for
        ("a1 a2 a4 a8 a16 a32", ["a1 a2 a4 a8", "a16 a32"]),
    ],
)
def test_runs_that_are_compared_share_passes_where_not_all_runs_do(
    names, together, loop, passes, tmp_path, monkeypatch
):
    monkeypatch.setattr(visits, "MAX_AT_ONCE", 4)
    records = loop.do(settings_of(tmp_path, names))
    assert passes == together
    assert [record["status"] for record in records] == ["finished"] * 6


def test_timing_that_is_asked_for_is_missed_where_each_group_has_one_run(loop, passes, tmp_path, capfd):
    for names, is_warned in (("a1 a2", False), ("b1 c1", True)):
        jobs = settings_of(tmp_path, names)
        for timed_job in jobs:
            timed_job.config["timing"] = True
        loop.do(jobs)
        assert ("warning: timing=true: not all runs" in capfd.readouterr().err) is is_warned


LEARNING_RATES = {
    "two at each size": (lambda name: 0.1 if "a" in name else 0.2, "0 1 0 1"),
    "one at each size": (lambda name: 0.1 * int(name[1]), "0 0 0 0"),
}


@pytest.mark.parametrize("name", LEARNING_RATES)
def test_passes_compare_the_runs_that_a_report_compares(name, tmp_path):
    lr, groups = LEARNING_RATES[name]
    jobs = settings_of(tmp_path, "a8 b8 a64 b64'", model=lambda letter: "cnn", lr=lr)
    numbers = {job: str(number) for number, group in enumerate(visits.group_jobs(jobs)) for job in group}
    assert " ".join(numbers[job] for job in jobs) == groups
    runs = [Run(member.run_dir.name, member.run_dir, ended(member, 10.0), number) for number, member in enumerate(jobs)]
    reported = {run.number: str(group.number) for group in group_runs(runs).groups for run in group.runs}
    assert [reported[number] for number in range(4)] == groups.split()


def test_runs_on_two_devices_share_no_passes(tmp_path):
    jobs = settings_of(tmp_path, "a8 b8 a64 b64", model=lambda letter: "cnn")
    for gpu_job in jobs[1::2]:
        gpu_job.config["trainer"]["accelerator"] = "gpu"
    assert [list(group) for group in visits.group_jobs(jobs)] == [jobs[::2], jobs[1::2]]


def test_runs_are_compared_as_those_of_the_whole_sweep_are_where_some_are_kept(loop, passes, tmp_path):
    """Of a8 and b64 alone, each learning rate would seem to belong to a size."""
    jobs = settings_of(tmp_path, "a8 b8 a64 b64", model=lambda letter: "cnn", lr=LEARNING_RATES["two at each size"][0])
    for kept_job in jobs[1:3]:
        ended(kept_job, 10.0)
    loop.do(jobs)
    assert passes == []


@pytest.mark.parametrize("has_room_for", ["training one", "one"])
def test_a_run_that_finds_less_than_a_quarter_of_the_memory_waits(loop, has_room_for, tmp_path, monkeypatch):
    """It is not started twice, and leaves nothing but its own folder."""
    quarter = 2**50
    free = iter([quarter, quarter - 1] if has_room_for == "training one" else [quarter - 1])
    memory = lambda: SimpleNamespace(total=4 * quarter, available=next(free, quarter))
    monkeypatch.setattr(visits, "host_memory", memory)
    records = loop.do([job(tmp_path, str(n), 8**n) for n in (1, 2)])
    assert [record["status"] for record in records] == ["finished"] * 2
    passes = [record["taken"] for record in records]
    assert min(passes[1]) > max(passes[0]) if has_room_for == "training one" else passes[1] == []  # the last is alone
    assert len((tmp_path / "pids").read_text().split()) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "pids"]


ON_DEVICE = "stand_in.DEVICE = {'free': %d * 2**30, 'total': 80 * 2**30, 'taken': %d * 2**30}; "


@pytest.mark.parametrize(
    ("free", "needed", "beside"),
    [(40, 4, True), (19, 4, False), (40, 25, False)],
    ids=["there is room", "less than a quarter is free", "no room for twice what the first one takes"],
)
def test_a_run_is_set_up_beside_others_where_the_device_has_memory_for_it(free, needed, beside, do):
    first, last = do(*[ON_DEVICE % (free, needed) + "list(visits)"] * 2, timed=True)
    assert (first["status"], last["status"]) == ("finished", "finished")
    assert bool(last["taken"]) is beside  # the last is alone where there is no room


def test_of_several_runs_as_many_are_set_up_as_there_is_memory_for(do, capfd, monkeypatch):
    monkeypatch.setattr(visits, "_SET_UP_AT_ONCE", 2)
    records = do(*[ON_DEVICE % (free, 9) + "list(visits)" for free in (25, 15, 25)], timed=True)
    assert [bool(record["taken"]) for record in records] == [True, True, False]
    assert "no memory for 1 more setting beside these runs: done afterwards\n" in capfd.readouterr().out


@pytest.mark.parametrize("sees", [ON_DEVICE % (40, 4), ""], ids=["of the device", "of the host"])
def test_runs_that_lack_memory_beside_others_are_done_again_alone(sees, do, tmp_path, capfd, monkeypatch):
    freed, opened = folder.mark_for_retry, []

    def free(run_dir):
        opened.extend(file.path for file in psutil.Process().open_files() if file.path == str(run_dir / "log.txt"))
        freed(run_dir)

    monkeypatch.setattr(folder, "mark_for_retry", free)
    first = "(folder.parent / f'{folder.name}.tried').exists() or (folder.parent / f'{folder.name}.tried').touch() or "
    lacks = sees + f"{first}record.update(status='out_of_memory')"
    records = do(sees + "list(visits)", lacks, lacks, timed=True)
    assert [record["status"] for record in records] == ["finished"] * 3
    assert [record["taken"] for record in records[1:]] == [[], []]
    assert len((tmp_path / "pids").read_text().split()) == 5
    output = capfd.readouterr().out
    assert output.count("found no memory beside others, and is done again alone") == 2
    assert opened == []  # Windows renames no folder in which a file is open


def test_a_training_that_lacks_memory_beside_others_goes_on_from_its_checkpoint(tmp_path):
    run_record = ended(job(tmp_path, "a"), 10.0, status="out_of_memory")
    run_dir = tmp_path / "a"
    (run_dir / "checkpoints").mkdir()
    (run_dir / "checkpoints" / "last.ckpt").touch()
    assert run_record["status"] == "out_of_memory"
    folder.mark_for_retry(run_dir)
    assert read(run_dir)["status"] in folder.UNFINISHED_STATUSES


def test_an_error_in_the_sweep_leaves_no_run_behind(loop, tmp_path, monkeypatch):
    monkeypatch.setattr(visits, "measure_in_passes", lambda *args, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loop.do([job(tmp_path, str(n), 8**n) for n in (1, 2)])
    assert len((tmp_path / "pids").read_text().split()) == 2
    assert running(tmp_path) == []


TURNS = "list(visits); record['began'] = time.time(); time.sleep(0.02); record['over'] = time.time()"


def trainings(folder, **values):
    """Jobs that train to their ends, one for each value of an option. Sizes are 8, unless `size` is the option."""
    (option, members), *rest = values.items()
    sizes = [8] * len(members) if option != "size" else members
    settings = [{} if option == "size" else {option: member} for member in members]
    return [
        job(folder, f"{option}{n}", size, callbacks=TRAINED, does=TURNS, **own_options, **dict(rest))
        for n, (size, own_options) in enumerate(zip(sizes, settings, strict=True))
    ]


def test_trainings_share_passes_and_then_go_on_to_their_ends_one_after_the_other(loop, tmp_path, capfd):
    records = loop.do(trainings(tmp_path, size=[8, 64, 512]))
    assert [record["told"] for record in records] == ["train"] * 3
    assert len(records[0]["taken"]) == MIN_PASSES
    assert records[0]["taken"] == records[1]["taken"] == records[2]["taken"]
    for before, after in itertools.pairwise(records):
        assert before["over"] <= after["began"]
    out = capfd.readouterr().out
    assert [f"\n— run size{n}\n  " in out for n in range(3)] == [True] * 3


ORPHAN = "import subprocess; record['orphan'] = subprocess.Popen(['sleep', '60'], start_new_session=True).pid"
READER = "import subprocess; subprocess.Popen(['cat'], stdout=subprocess.DEVNULL)"


@pytest.mark.parametrize("starts", [ORPHAN, pytest.param(READER, marks=pytest.mark.slow)])
def test_what_a_run_starts_neither_takes_the_sweeps_words_nor_outlives_the_run_for_it(starts, loop, tmp_path):
    jobs = trainings(tmp_path, size=[8, 64])
    for trained_job in jobs:
        trained_job.config["tags"] = f"{starts}; {TURNS}"
    records = loop.do(jobs)
    assert [record["told"] for record in records] == ["train"] * 2
    for pid in (record["orphan"] for record in records if starts == ORPHAN):
        os.kill(pid, signal.SIGKILL)  # it is alive: the sweep has not waited for it


@pytest.mark.parametrize(
    ("option", "values", "visited"),
    [
        ("seed", [0, 1, 0, 1], [True, False, True, False]),
        slow("optimizer", [{"lr": 0.1}, {"lr": 0.2}] * 2, [True, False, True, False]),
        slow("optimizer", [{"weight_decay": 0}, {"weight_decay": 0.1}] * 2, [True] * 4),
        ("model", [{"hidden_size": 1}, {"hidden_size": 2}] * 2, [True] * 4),
    ],
)
def test_of_trainings_with_the_same_speed_the_first_is_visited(option, values, visited, loop, tmp_path):
    jobs = trainings(tmp_path, **{option: values})
    for large_job in jobs[2:]:
        large_job.config["data"]["batch_size"] = 64
    records = loop.do(jobs)
    assert [bool(record["taken"]) for record in records] == visited
    assert all(record["status"] == "finished" for record in records)


def test_a_long_training_that_is_warm_last_is_left_out_of_the_passes_and_trains_last(loop, tmp_path, capfd):
    jobs = trainings(tmp_path, size=[8, 64, 512])
    jobs[1].config["tags"] = f"stand_in.FIT_S = 7200; {TURNS}"
    records = loop.do(jobs)
    assert [bool(record["taken"]) for record in records] == [True, False, True]
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith(("run size", "— run"))]
    assert lines[0].startswith("run size1 takes about 2.0 h: too long for other runs to wait for it")
    assert lines[-1] == "— run size1"


@pytest.mark.parametrize(("timing", "visited"), [("auto", [False, True, True]), (True, [True] * 3)])
def test_a_training_of_more_than_an_hour_is_not_waited_for_unless_that_is_asked(
    timing, visited, loop, tmp_path, capfd, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    jobs = trainings(tmp_path, size=[8, 64, 512], timing=timing)
    jobs[0].config["tags"] = f"stand_in.FIT_S = 7200; {TURNS}"
    records = loop.do(jobs)
    assert [bool(record["taken"]) for record in records] == visited
    message = "run size0 takes about 2.0 h: too long for other runs to wait for it; timing=true has them wait\n"
    out = capfd.readouterr().out
    assert (message in out) is (timing == "auto")
    assert ("  its output: size0/log.txt\n" in out) is (timing == "auto")


SUITED = {"callbacks": {"until_known": {"a": 1}, "throughput": {"a": 1}}, "trainer": {"devices": 1}}


@pytest.mark.parametrize(
    ("changed", "suited"),
    [
        ({}, True),
        ({"trainer": {"devices": 1, "accelerator": "cpu"}}, True),
        ({"trainer": {"devices": 2, "accelerator": "cpu"}}, False),
        ({"trainer": {"devices": 1, "accelerator": "mps"}}, False),
        ({"trainer": {"devices": 1, "max_time": {"seconds": 10}}}, True),
        ({"trainer": {"devices": 1, "fast_dev_run": True}}, False),
        ({"callbacks": {"until_known": None, "throughput": {"a": 1}}}, True),
        ({"callbacks": {"until_known": None, "throughput": {"a": 1}}, "timing": False}, False),
        ({"callbacks": {"until_known": None, "throughput": {"a": 1}}, "target": 0.9}, False),
        ({"callbacks": {"until_known": {"a": 1}, "throughput": None}}, False),
        ({"callbacks": None}, False),
    ],
)
def test_measured_runs_of_one_process_without_a_target_wait(changed, suited, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(_system, "DEV", tmp_path)
    assert visits.can_wait(SUITED | changed) is suited


@pytest.mark.parametrize(
    ("accelerator", "devices", "one_process", "suited"),
    [
        ("auto", ["cpu"], False, True),
        ("auto", ["cpu", "cuda"], False, True),
        ("gpu", ["cpu", "cuda"], False, True),
        ("gpu", ["cpu", "cuda"], True, False),
        ("cpu", ["cpu", "cuda"], True, True),
        ("auto", ["cpu", "mps"], False, False),
        ("gpu", ["cpu", "mps"], False, False),
        ("gpu", ["cpu"], False, False),
    ],
)
def test_runs_wait_on_a_cpu_and_on_a_cuda_device_that_takes_several_processes(
    accelerator, devices, one_process, suited, tmp_path, monkeypatch
):
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(_system, "DEV", tmp_path)
    monkeypatch.setattr("batchscope.hardware.devices.available", lambda: devices)
    monkeypatch.setattr("batchscope.hardware.nvml_readings.takes_one_process", lambda: one_process)
    assert visits.can_wait(SUITED | {"trainer": {"devices": 1, "accelerator": accelerator}}) is suited


@pytest.mark.parametrize(("fit_s", "seconds"), [(None, 0.2), (60.0, 0.2), (1.0, 0.05)])
def test_a_training_of_a_few_seconds_has_shorter_visits_and_so_as_many_as_others(fit_s, seconds):
    run, requests = object.__new__(visits.VisitedRun), []
    run.fit_s, run.process, run.handle_answer = fit_s, SimpleNamespace(ask=requests.append), lambda answer: answer
    run.visit(3, 0.2)
    assert requests == [f"go 3 {seconds}"]
