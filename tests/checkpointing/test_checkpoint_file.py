"""A checkpoint is written atomically, damage is found when it is read, and nothing in it is ever run."""

import errno
import os
import pickle
import resource
import zipfile
from pathlib import Path

import pytest
import torch

from batchscope.checkpointing.checkpoint_file import link_checkpoint, load_checkpoint, write_checkpoint
from batchscope.checkpointing.random_state import random_state
from batchscope.checkpointing.resume_point import find_resume_point
from batchscope.errors import UserError
from batchscope.files import WriteError, remove_leftovers
from tests.support.runs import EVERY_4, SMALL, last, record, run


def checkpoint(steps: int, **changed: object) -> dict:
    """A checkpoint as a run writes it after some steps of its first epoch."""
    loop_state = {
        "epoch": 0,
        "batches": steps,
        "steps": steps,
        "random": [random_state()],
        "gradients": {},
        "log_positions": {},
    }
    lightnings = {"epoch": 0, "global_step": steps, "pytorch-lightning_version": "2.6.6", "loops": {}, "callbacks": {}}
    whole = {
        "state_dict": {"weight": torch.arange(10_000.0)},
        "optimizer_states": [],
        "lr_schedulers": [],
        "batchscope": {"name": "a", "config": {}},
        "loop_state": loop_state,
        **lightnings,
    }
    return whole | changed


CHECKPOINT = checkpoint(3)
STEP = "batchscope.training.task.Task.training_step"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "last.ckpt"
    write_checkpoint(CHECKPOINT, path)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        load_checkpoint(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_was_written_is_read_and_nothing_else_is_left(path: Path) -> None:
    assert torch.equal(load_checkpoint(path)["state_dict"]["weight"], CHECKPOINT["state_dict"]["weight"])
    assert list(path.parent.iterdir()) == [path]


def test_torch_and_zip_programs_read_it_as_well(path: Path) -> None:
    assert torch.load(path, weights_only=True)["loop_state"]["steps"] == 3
    assert zipfile.ZipFile(path).testzip() is None


def test_every_flipped_bit_is_found(path: Path) -> None:
    whole = path.read_bytes()
    for place in [*range(0, len(whole), 997), len(whole) - 1, len(whole) - 90]:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        assert str(path) in refusal(path), f"byte {place}"


@pytest.mark.parametrize("share", [0, 0.0001, 0.5, 0.999, 0.99999])
def test_a_torn_file_is_found(path: Path, share: float) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    assert f"{path} is not a whole checkpoint" in refusal(path)


def test_a_file_of_zeros_as_a_lost_disk_leaves_it_is_found(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))
    assert f"{path} is not a whole checkpoint" in refusal(path)


def test_an_older_checkpoint_whose_loop_state_is_called_position_is_resumed_from(path: Path) -> None:
    state = CHECKPOINT["loop_state"]
    older = {key: value for key, value in state.items() if key != "log_positions"} | {"curves": {"csv/metrics.csv": 7}}
    write_checkpoint(without(CHECKPOINT, "loop_state") | {"position": older}, path)
    found = find_resume_point(path.parent)
    assert (found.steps, found.loop_state["log_positions"]) == (3, {"csv/metrics.csv": 7})


def test_a_bit_flipped_in_a_file_that_torch_alone_wrote_is_found(tmp_path: Path) -> None:
    path = tmp_path / "torch.ckpt"
    torch.save(CHECKPOINT, path)
    assert load_checkpoint(path)["loop_state"]["steps"] == 3
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert f"{path} is damaged" in refusal(path)


def test_the_newest_good_one_is_taken_and_damaged_newer_ones_are_named(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(checkpoint(9), path.with_name("newer.ckpt"))
    write_checkpoint(CHECKPOINT, path.with_name("newest.ckpt"))
    path.with_name("newest.ckpt").write_bytes(b"torn")
    assert find_resume_point(path.parent).steps == 9
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {path.with_name('newest.ckpt')} is not a whole checkpoint (4 bytes)")


def test_the_newest_one_is_that_of_the_last_step_whatever_the_times_of_the_files_say(path: Path) -> None:
    write_checkpoint(checkpoint(9), path.with_name("copied.ckpt"))
    os.utime(path.with_name("copied.ckpt"), (0, 0))
    assert find_resume_point(path.parent).path == path.with_name("copied.ckpt")


def without(node: dict, *names: str) -> dict:
    """A copy of nested dictionaries without the key at a path."""
    first, *rest = names
    return {k: without(v, *rest) if k == first else v for k, v in node.items() if rest or k != first}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (without(CHECKPOINT, "loop_state"), "cannot be resumed from: loop_state is missing"),
        (without(CHECKPOINT, "loop_state", "random"), "cannot be resumed from: loop_state.random is missing"),
        (without(CHECKPOINT, "optimizer_states"), "cannot be resumed from: optimizer_states is missing"),
        (checkpoint(3, loop_state=[]), "cannot be resumed from: loop_state is [], not a dictionary"),
        (checkpoint(-1), "cannot be resumed from: global_step is -1, not a count"),
        (checkpoint(3, global_step=True), "cannot be resumed from: global_step is True, not a count"),
        (checkpoint(3, global_step=4), "cannot be resumed from: loop_state.steps is 3, and global_step is 4"),
        (
            checkpoint(3, loop_state=CHECKPOINT["loop_state"] | {"random": [{"torch": torch.zeros(3)}]}),
            "cannot be resumed from: loop_state.random.0 is not the state of random generators",
        ),
        (
            checkpoint(3, loop_state=CHECKPOINT["loop_state"] | {"log_positions": {"csv/metrics.csv": -3}}),
            "cannot be resumed from: loop_state.log_positions.csv/metrics.csv is -3, not a count",
        ),
        (checkpoint(3, **{"pytorch-lightning_version": "x"}), "cannot be resumed from: InvalidVersion"),
        (checkpoint(3, batchscope="a"), "is not a checkpoint that batchscope wrote"),
        (checkpoint(3, batchscope={"name": "a", "config": None}), "is not a checkpoint that batchscope wrote"),
        (checkpoint(3, state_dict={"weight": 3}), "is not a checkpoint that batchscope wrote"),
        (checkpoint(3, state_dict={"weight": torch.eye(2).to_sparse()}), "is not a checkpoint that batchscope wrote"),
        (checkpoint(3, state_dict={"w": torch.eye(2, device="meta")}), "is not a checkpoint that batchscope wrote"),
        (checkpoint(2**63), "cannot be resumed from: global_step is 9223372036854775808, not a count"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_content_that_cannot_be_resumed_from_is_named_and_the_valid_checkpoint_beside_it_used(
    content: dict, said: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(content, path.with_name("strange.ckpt"))
    assert find_resume_point(path.parent).path == path
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {path.with_name('strange.ckpt')} {said}")
    assert line.endswith("resuming from last.ckpt instead")


@pytest.mark.parametrize("folder", ["a file", "read-only"])
def test_a_folder_that_takes_no_checkpoint_is_one_line_that_says_so(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    (tmp_path / "there").write_text("")
    path = tmp_path / ("there" if folder == "a file" else "folder") / "last.ckpt"
    if folder == "read-only":  # for root, too
        path.parent.mkdir()
        for name in ("open", "unlink"):
            monkeypatch.setattr(Path, name, refuse)
        for name in ("link", "replace"):
            monkeypatch.setattr(os, name, refuse)
    for write in (lambda: write_checkpoint(CHECKPOINT, path), lambda: link_checkpoint(tmp_path / "there", path)):
        with pytest.raises(WriteError, match=f"checkpoint: {path} .*cannot be written: ") as caught:
            write()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("force", ["0", "1"], ids=["as usual", "with pickles asked for in the environment"])
def test_a_payload_never_runs_whichever_way_a_checkpoint_is_read(
    force: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", force)

    class Payload:
        def __reduce__(self) -> tuple:
            return (Path.touch, (path.with_name("ran"),))

    torch.save({**CHECKPOINT, "loop_state": Payload()}, path, pickle_module=pickle)
    assert f"{path} holds more than tensors and plain values" in refusal(path)
    with pytest.raises(UserError, match="no checkpoint is valid"):
        find_resume_point(path.parent)
    assert not path.with_name("ran").exists()


@pytest.mark.parametrize("links", [True, False], ids=["a link", "a copy, where the file system has no links"])
def test_the_best_one_is_kept_when_the_last_one_goes_on(
    path: Path, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no links here")

    if not links:
        monkeypatch.setattr("os.link", refuse)
    best = path.with_name("best.ckpt")
    link_checkpoint(path, best)
    link_checkpoint(path, best)
    write_checkpoint(checkpoint(4), path)
    assert load_checkpoint(best)["loop_state"]["steps"] == 3
    assert sorted(p.name for p in path.parent.iterdir()) == ["best.ckpt", "last.ckpt"]


def test_only_half_written_checkpoints_are_removed(path: Path) -> None:
    for name in (".last.ckpt.77.tmp", ".best.ckpt.1.tmp", "notes.tmp", ".hidden"):
        path.with_name(name).write_text("")
    remove_leftovers(path.parent, "*.ckpt")
    assert sorted(p.name for p in path.parent.iterdir()) == [".hidden", "last.ckpt", "notes.tmp"]


def _fill_the_disk() -> None:
    """Have the system limit the size of this process's files from now on."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, 8_000))


def test_a_full_disk_is_one_line_with_the_bytes_needed_and_the_checkpoint_before_still_loads(tmp_path: Path) -> None:
    done = run(tmp_path, *SMALL, EVERY_4, "hydra.run.dir=out", faults=[(STEP, 6, _fill_the_disk)])
    assert done.end() == 1
    (line,) = done.complained.splitlines()
    size = (tmp_path / "out" / "checkpoints" / "last.ckpt").stat().st_size
    assert line.startswith("error: checkpoint: out/checkpoints/last.ckpt needs ")
    assert abs(int(line.split("needs ")[1].split(" bytes")[0].replace(",", "")) - size) < 2_000
    assert line.endswith("the checkpoint before it is kept: out/checkpoints/last.ckpt")
    assert last(tmp_path / "out")["loop_state"]["steps"] == 4
    assert record(tmp_path / "out")["status"] == "interrupted"
    assert [p.name for p in (tmp_path / "out" / "checkpoints").iterdir()] == ["last.ckpt"]


def test_a_checkpoint_is_written_as_often_as_is_asked_for(tmp_path: Path) -> None:
    often = ["callbacks.checkpoint.every_minutes=1e-9", "trainer.max_epochs=1", "hydra.run.dir=out"]
    assert run(tmp_path, *SMALL, *often, faults=[(STEP, 4, _end_badly)]).end() == 1
    assert last(tmp_path / "out")["loop_state"]["steps"] == 3


def _end_badly() -> None:
    raise RuntimeError("the training broke")
