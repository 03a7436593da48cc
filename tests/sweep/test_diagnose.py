"""A diagnosis: its runs in their order, what its table says of them, and the command line that it ends with."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchscope.analysis.diagnose import find_findings, write_diagnosis
from batchscope.options.compose import check_command_line
from batchscope.records.run_record import plan
from batchscope.sweep import diagnose
from batchscope.sweep.changes import Machine
from batchscope.sweep.plans import Job, RunFailed
from batchscope.sweep.search import search_of
from tests.support.command_lines import answer
from tests.support.runs import run as forked
from tests.support.synthetic_runs import write_steps
from tests.sweep.conftest import play

WORDS = ["experiment=diagnose", "model=mlp", "data.num_workers=2"]
Rate = Callable[[dict[str, Any]], float | str]  # of a configuration: samples/s, or the status of a run that failed


class Diagnosed:
    """A diagnosis whose runs take no time."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, rate: Rate):
        self.folder, self.ran, self.titles, self.rate, self.end = folder, [], [], rate, None
        monkeypatch.setattr(diagnose, "this_machine", lambda device: Machine(cores=2))
        monkeypatch.setattr("sys.platform", "linux")

    def _do(self, job: Job) -> dict[str, Any]:
        self.ran.append(job.run_dir.name)
        self.titles.append(job.title)
        found = self.rate(job.config)
        if found == "signal":
            raise SystemExit(143)
        plan(job.run_dir, config=job.config, **job.facts)
        record = json.loads((job.run_dir / "run.json").read_text())
        record |= {"hardware": {"device": "cpu"}, "dataset": {"name": "mnist", "train_samples": 55_000}}
        record |= {"choices": {"model": "mlp"}, "started": f"2026-01-01T00:00:{len(self.ran):02d}"}
        if isinstance(found, str):
            record |= {"status": found, "error": "trainer: a reason"}
        else:
            size = record["config"]["data"]["batch_size"]
            throughput = {"samples_per_sec": found, "step_ms_median": 1e3 * size / found, "batch_size": size}
            record |= {"status": "finished", "throughput": throughput}
            noise = np.exp(0.01 * np.random.default_rng(0).standard_normal((8, 10)))
            write_steps(job.run_dir, 1e3 * size / found * noise)
        (job.run_dir / "run.json").write_text(json.dumps(record))
        return record

    def start(self) -> str:
        """Run it, as far as it goes; what its report says."""
        (config,) = check_command_line(WORDS, multirun=False, run_dir=str(self.folder / "0"))
        job = Job(self.folder / "0", config, {"choices": {"model": "mlp"}, "overrides": WORDS})
        try:
            play(diagnose.diagnose(job, search_of(config)), self._do)
        except (RunFailed, SystemExit) as end:
            self.end = end
        return write_diagnosis(self.folder)


def faster_with_a_larger_batch(config: dict[str, Any]) -> float:
    rate = 10.0 * config["data"]["batch_size"]
    return rate * (1.5 if config["trainer"]["precision"] == "bf16-mixed" else 1.0)


def test_a_baseline_each_change_the_two_best_together_and_the_baseline_again(tmp_path: Path, monkeypatch) -> None:
    diagnosed = Diagnosed(tmp_path, monkeypatch, faster_with_a_larger_batch)
    shown = diagnosed.start().splitlines()
    assert diagnosed.ran == [
        *("baseline", "batch_size-256", "batch_size-512", "precision-bf16-mixed", "pipeline-workers"),
        *("channels_last-false", "keep_freed_memory-false", "batch_size-512+precision-bf16-mixed", "baseline_again"),
    ]
    assert diagnosed.titles[:2] == ["run 1: baseline", "run 2 of at most 9: data.batch_size=256"]
    assert any(
        line.startswith("Recommended: data.batch_size=512 trainer.precision=bf16-mixed, 6.00 ") for line in shown
    )
    assert any(line.endswith(" … data.batch_size=512 trainer.precision=bf16-mixed") for line in shown)


def test_started_again_it_has_the_same_runs(tmp_path: Path, monkeypatch) -> None:
    """Although a baseline at the end that differs leaves no change that is shown to help."""

    def rate(config: dict[str, Any]) -> float:
        return 1e5 if config["run_dir"].endswith("again") else faster_with_a_larger_batch(config)

    diagnosed = Diagnosed(tmp_path, monkeypatch, rate)
    diagnosed.start()
    ran = list(diagnosed.ran)
    diagnosed.start()
    assert diagnosed.ran == [*ran, *ran] and any("+" in name for name in ran)


def test_interrupted_it_recommends_nothing(tmp_path: Path, monkeypatch) -> None:
    left = iter([100.0] * 7)
    said = Diagnosed(tmp_path, monkeypatch, lambda config: next(left, "signal")).start()
    assert (
        "Incomplete: 6 changes tried, and the baseline was not measured again after that, so no change is recommended."
    ) in " ".join(said.split())


def test_its_folder_is_reported_again_as_it_ended(tmp_path: Path, monkeypatch) -> None:
    said = Diagnosed(tmp_path, monkeypatch, faster_with_a_larger_batch).start()
    written = (tmp_path / "report/diagnosis.md").read_bytes()
    assert answer("report", tmp_path)[:2] == (0, f"{said}\n")
    assert (tmp_path / "report/diagnosis.md").read_bytes() == written
    assert [path.name for path in (tmp_path / "report").iterdir() if "sweep" in path.name] == []


def test_a_refused_change_is_a_result_and_the_others_go_on(tmp_path: Path, monkeypatch) -> None:
    def rate(config: dict[str, Any]) -> float | str:
        return "failed" if config["trainer"]["precision"] == "bf16-mixed" else 100.0

    diagnosed = Diagnosed(tmp_path, monkeypatch, rate)
    said = diagnosed.start()
    assert diagnosed.ran[-1] == "baseline_again"
    assert "refused: trainer: a reason" in said
    assert "No change helps: of 6 changes tried, none is shown to be faster than the" in said


def test_a_baseline_that_fails_ends_it(tmp_path: Path, monkeypatch) -> None:
    diagnosed = Diagnosed(tmp_path, monkeypatch, lambda config: "out_of_memory")
    assert "The baseline was not measured, so there is nothing to compare." in diagnosed.start()
    assert diagnosed.ran == ["baseline"]
    assert isinstance(diagnosed.end, RunFailed)  # which is exit code 1
    assert answer("report", tmp_path).code == 1


def test_what_the_user_has_set_is_left_out_and_said(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(f"{__name__}.WORDS", [*WORDS, "data.batch_size=128", "data.pipeline=memory"])
    diagnosed = Diagnosed(tmp_path, monkeypatch, lambda config: 100.0)
    said = diagnosed.start()
    assert not any("batch_size" in name or "pipeline" in name for name in diagnosed.ran)
    line = "not tried: data.pipeline=workers: you have set data.pipeline"
    for shown in (capsys.readouterr().out, said):  # when the changes are chosen, and below the table
        assert line in " ".join(shown.split())


@pytest.mark.slow
def test_a_real_diagnosis(tmp_path: Path) -> None:
    small = [*("data=adding", "model=rnn_cell", "data.num_train=400", "data.num_val=16", "data.num_test=16")]
    small += ["data.sequence_length=5", "callbacks.until_known.seconds=1", "hydra.sweep.dir=s"]
    small += ["trainer.accelerator=cpu", "callbacks.throughput.calibrate=false", "callbacks.progress=null"]
    small += ["trainer.precision=32-true", "data.pipeline=memory"]
    done = forked(tmp_path, "experiment=diagnose", *small, environ={"OMP_NUM_THREADS": "1"})
    assert done.end() == 0, done.complained
    assert "not tried: data.pipeline=workers: you have set data.pipeline" in done.said
    assert "÷ baseline" in done.said
    trials = find_findings(tmp_path / "s").trials
    assert [trial.role for trial in trials][:2] == ["baseline", "baseline_again"]
    assert {trial.run.status for trial in trials} == {"finished"}
