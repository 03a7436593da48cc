"""The loop: a plan asks for runs and gets their records; what is kept, refused, or done once more."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from batchscope.errors import UserError
from batchscope.sweep import folder
from batchscope.sweep.plans import Plan
from tests.sweep.conftest import job


def test_a_plan_gets_the_records_of_what_it_asks_for(loop, tmp_path: Path) -> None:
    def plan() -> Plan[str]:
        one, two = yield [job(tmp_path, "a", 1, timed=False), job(tmp_path, "b", 2, timed=False, does="sys.exit(1)")]
        (three,) = yield [job(tmp_path, f"after-{one['throughput']['batch_size']}", timed=False)]
        return f"{two['status']}, {three['status']}"

    assert loop.run(plan()) == "failed, finished"
    assert (tmp_path / "after-1/run.json").exists()


def test_each_run_is_named_with_its_end_and_a_kept_one_is_not_run_again(do, tmp_path: Path, capfd) -> None:
    first = do("", "sys.exit(1)")
    said = capfd.readouterr()
    assert said.out == "\n— run a\n  0 s\n\n— run b\n"
    assert said.err == "  failed: ended with exit code 1 and said no more\n"
    assert do("", "sys.exit(1)") == first
    said = capfd.readouterr()
    assert "— run a — kept" in said.out
    assert f"to run it again with the sweep: mv {os.path.relpath(tmp_path / 'b')}" in said.err
    assert len((tmp_path / "pids").read_text().split()) == 2


@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize("lies", ["the run of another sweep", "a file"])
def test_a_run_that_is_refused_is_not_started_and_the_others_are(do, loop, timed, lies, tmp_path, capfd) -> None:
    other = tmp_path / "b" if lies == "a file" else tmp_path / "b/run.json"
    other.parent.mkdir(exist_ok=True)
    other.write_text(before := json.dumps({"schema": 3, "status": "finished", "config": {"seed": 7}}))
    records = do("list(visits)", "", "list(visits)", timed=timed)
    assert [record["status"] for record in records] == ["finished", "refused", "finished"]
    assert other.read_text() == before
    assert loop.refused
    assert capfd.readouterr().err.startswith("error: ")


REMOVED = ("import shutil; shutil.rmtree(folder); os._exit(0)", "list(visits)", "list(visits)")
KILL_A = (
    "[os.kill(int((folder.parent / 'pids').read_text().split()[0]), 9) for n in visits if len(record['taken']) == 1]"
)
NO_MEMORY = "record['status'] = 'out_of_memory' if asked['visited'] else 'finished'; list(visits)"
# What the runs do, whether they are visited side by side → how they end, and what is said.
OTHERS_GO_ON = {
    "one raises": (("list(visits)", "[1 / 0 for n in visits]"), True, "finished failed", "  failed: "),
    "one is killed": (
        ("list(visits)", "[len(record['taken']) == 2 and os.kill(os.getpid(), 9) for n in visits]"),
        True,
        "finished killed",
        "  killed: ",
    ),
    "one is killed while it waits": (("list(visits)", f"exec({KILL_A!r})"), True, "killed finished", "  killed: "),
    "a folder is removed": (REMOVED, True, "refused finished finished", "error: "),
    "a folder is removed before the next begins": (REMOVED, False, "refused finished finished", "error: "),
    "one lacks memory, and is done alone": (
        ("list(visits)", NO_MEMORY),
        True,
        "finished finished",
        "b ran out of memory beside other runs, and is done alone; what it left is in ",
    ),
    "the server is killed": (("os.kill(os.getppid(), 9); time.sleep(0.3)", ""), False, "finished finished", ""),
}


@pytest.mark.parametrize("name", OTHERS_GO_ON)
def test_what_happens_to_a_run_ends_no_other(do, loop, name: str, capfd) -> None:
    lines, timed, ends, said = OTHERS_GO_ON[name]
    assert " ".join(record["status"] for record in do(*lines, timed=timed)) == ends
    assert loop.refused is ("refused" in ends)
    assert said in capfd.readouterr().err


def test_a_run_without_memory_beside_others_is_not_kept_where_the_sweep_ends_meanwhile(do, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        do(f"[n for n in visits if os.kill({os.getpid()}, 15)]", "record['status'] = 'out_of_memory'", timed=True)
    assert not folder.has_ended(tmp_path / "b")
    assert json.loads((tmp_path / "b.aside/run.json").read_text())["status"] == "out_of_memory"


def test_what_a_run_prints_is_in_its_log_and_warnings_of_visited_runs_are_said_once(loop, do, tmp_path, capfd) -> None:
    says = "print('said'); print('warning: slow', file=sys.stderr); list(visits)"
    do(says, says, timed=True)
    assert capfd.readouterr().err == "warning: slow\n"
    loop.do([replace(job(tmp_path, "c", timed=False, does=says), logged=True)])
    assert (tmp_path / "c/log.txt").read_text().splitlines() == ["said", "warning: slow"]
    assert capfd.readouterr() == ("\n— run c\n  0 s\n", "")


def test_a_python_that_there_is_not_is_one_line(do) -> None:
    with pytest.raises(UserError, match=r"^no-python cannot be started: No such file"):
        do("", python="no-python", forks=False)
