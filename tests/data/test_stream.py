"""StreamDataModule: its order, what resuming and ranks keep, and shards that cannot be read."""

import signal
import subprocess
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest
import torch
from torch import Tensor

from batchscope.data import stream
from batchscope.data.augment import Augment
from batchscope.errors import UserError
from tests.checkpointing.support import OUT, STEP
from tests.support.own_data import SIZES, TRUST, Shards, write_config, write_shards
from tests.support.runs import QUIET, Run, assert_alike, kill_9, ranks, record, results, run

SHORT = ["trainer.accelerator=cpu", "trainer.max_epochs=2", "model=mlp", "model.hidden_sizes=[8]", *QUIET]
NUM = sum(SIZES["train"])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with shards, and with `conf` for `data=own`."""
    folder = write_shards(tmp_path_factory.mktemp("shards"))
    write_config(folder, root=folder, known="true", shuffle_buffer=10)
    return folder


def line(root: Path, *options: str) -> list[str]:
    return [f"--config-dir={root / 'conf'}", "data=own", "data.batch_size=8", "data.num_workers=0", *SHORT, *options]


def loaded(root: Path, **options: Any) -> Shards:
    data = Shards(root=str(root), **{"batch_size": 8, "num_workers": 0, "shuffle_buffer": 10, **options})
    data.setup("fit")
    return data


def epoch_of(data: Shards, epoch: int = 0) -> list[Tensor]:
    """The inputs of each batch of an epoch."""
    loader = data.train_dataloader()
    loader.sampler.set_epoch(epoch)
    return [x for x, _ in loader]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


# --- the order -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle_buffer", [0, 10, 1_000])
def test_an_epoch_has_every_sample_once(root: Path, shuffle_buffer: int) -> None:
    stored = numpy.concatenate([numpy.load(file)["x"] for file in root.glob("train-*")])
    batches = epoch_of(loaded(root, shuffle_buffer=shuffle_buffer))
    assert [len(x) for x in batches] == [8] * 9 + [4]
    assert Counter(x.numpy().tobytes() for x in torch.cat(batches)) == Counter(x.tobytes() for x in stored)


def test_the_order_depends_on_seed_and_epoch(root: Path) -> None:
    orders = [epoch_of(loaded(root, seed=seed), epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert same(orders[0], epoch_of(loaded(root)))
    assert not any(same(one, other) for one in orders for other in orders if one is not other)


def test_a_buffer_shuffles_across_shards(root: Path) -> None:
    alone, mixed = (torch.cat(epoch_of(loaded(root, shuffle_buffer=size))) for size in (0, 1_000))
    assert not torch.equal(alone, mixed)


def test_the_stored_order_is_that_of_the_names_and_is_kept_in_validation(root: Path) -> None:
    stored = numpy.concatenate([numpy.load(root / f"val-{i}.npz")["x"] for i in range(2)])
    (batch,) = loaded(root).val_dataloader()
    assert numpy.array_equal(batch[0].numpy(), stored)


def test_workers_change_nothing_in_any_epoch(root: Path) -> None:
    alone, apart = loaded(root).train_dataloader(), loaded(root, num_workers=2).train_dataloader()
    for epoch in (0, 1):
        for loader in (alone, apart):
            loader.sampler.set_epoch(epoch)
        assert same([x for x, _ in alone], [x for x, _ in apart])


def test_the_batches_of_two_ranks_are_those_of_one(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = epoch_of(loaded(root, batch_size=10))
    shares, weights = [], []
    for rank in (0, 1):
        monkeypatch.setattr(stream, "rank_and_world_size", lambda rank=rank: (rank, 2))
        loader = loaded(root, batch_size=5).train_dataloader()
        shares.append([x for x, _ in loader])
        firsts = [loader.sampler.first_sample(batch) for batch in range(len(one))]
        assert firsts == [10 * batch + 5 * rank for batch in range(7)] + [70 + 3 * rank]
        weights.append([loader.sampler.weight(batch) for batch in range(len(one))])
    assert same([torch.cat(pair) for pair in zip(*shares, strict=True)], one)
    assert [len(share[-1]) for share in shares] == [3, 3]
    assert weights == [[1.0] * 8] * 2


def test_an_uneven_batch_is_weighted_by_the_samples_of_each_rank(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = []
    for rank in (0, 1, 2):
        monkeypatch.setattr(stream, "rank_and_world_size", lambda rank=rank: (rank, 3))
        loader = loaded(root, batch_size=8).train_dataloader()
        assert [len(x) for x, _ in loader][-1] == (2, 1, 1)[rank]  # of 76 = 3·24 + 4
        weights.append(loader.sampler.weight(3))
    assert weights == [1.5, 0.75, 0.75]


def test_a_rank_without_a_sample_evaluates_an_empty_batch(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "rank_and_world_size", lambda: (19, 20))
    ((x, y),) = loaded(root).val_dataloader()  # of 16 samples
    assert (tuple(x.shape), tuple(y.shape)) == ((0, 1, 8, 8), (0,))


def test_a_resumed_epoch_has_the_remaining_batches_and_decodes_no_other(root: Path) -> None:
    decoded = []

    class Counting(Shards):
        def decode(self, raw: Any) -> Any:
            decoded.append(raw)
            return super().decode(raw)

    whole = epoch_of(loaded(root), 1)
    data = Counting(root=str(root), batch_size=8, num_workers=0, shuffle_buffer=10)
    data.setup("fit")
    data.resume_at(1, 7)
    assert same(epoch_of(data, 1), whole[7:])
    assert len(decoded) == NUM - 7 * 8


def test_random_numbers_in_decode_are_seeded_by_sample_and_leave_those_of_the_model(root: Path) -> None:
    class Noisy(Shards):
        randomised = True

        def decode(self, raw: Any) -> Any:
            x, y = super().decode(raw)
            return x + torch.rand(()) + numpy.random.rand(), y

    def epoch(workers: int, resumed: int) -> list[Tensor]:
        data = Noisy(root=str(root), batch_size=8, num_workers=workers)
        data.setup("fit")
        data.resume_at(0, resumed)
        return epoch_of(data)

    torch.manual_seed(5)
    first = torch.rand(3)
    torch.manual_seed(5)
    whole = epoch(0, 0)
    assert torch.equal(torch.rand(3), first)
    assert same(epoch(2, 4), whole[4:])


# --- what is refused -------------------------------------------------------------------------------------------------


def refusal(data: Shards) -> str:
    with pytest.raises(UserError) as caught:
        data.setup("fit")
        for _ in data.train_dataloader():
            pass
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return write_shards(tmp_path / "own")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda content: content[:500], "cannot be read: BadZipFile: File is not a zip file"),
        (lambda content: content[:1000] + b"x" * 64 + content[1064:], "cannot be read: BadZipFile: Bad CRC-32"),
        (lambda content: b"", "is empty"),
    ],
    ids=["truncated", "damaged", "empty"],
)
def test_a_shard_that_cannot_be_read_is_one_line_with_its_name(own: Path, workers: int, damage: Any, said: str) -> None:
    shard = own / "train-2.npz"
    shard.write_bytes(damage(shard.read_bytes()))
    assert refusal(Shards(root=str(own), num_workers=workers)).startswith(f"data: shard {shard} of own-shards {said}")


@pytest.mark.slow
def test_a_shard_without_a_sample_is_one_line(own: Path) -> None:
    numpy.savez(own / "train-2.npz", x=numpy.zeros((0, 1, 8, 8)), y=numpy.zeros(0))
    assert (
        refusal(Shards(root=str(own), num_workers=0))
        == f"data: shard {own / 'train-2.npz'} of own-shards holds no sample"
    )


def test_a_shard_that_goes_missing_while_it_is_listed_is_one_line(own: Path) -> None:
    class Listed(Shards):
        def shards(self, split: str) -> list[Path]:
            return [*super().shards(split), own / "train-9.npz"]

    assert refusal(Listed(root=str(own))) == (
        f"data: shard {own / 'train-9.npz'} of own-shards cannot be read: No such file or directory"
    )


def test_no_shards_are_one_line(tmp_path: Path) -> None:
    assert refusal(Shards(root=str(tmp_path))) == "data: own-shards has no shards for its train split"


def test_a_mistake_in_decode_is_one_line_with_its_place(own: Path) -> None:
    class Wrong(Shards):
        def decode(self, raw: Any) -> Any:
            return raw[2]

    said = refusal(Wrong(root=str(own), num_workers=1, shuffle_buffer=0))
    assert " cannot be decoded: IndexError: tuple index out of range (test_stream.py:" in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x, y: (x[:, 1:], y), "its inputs have the shape (1, 7, 8), and the spec says (1, 8, 8)"),
        (lambda x, y: (x, y * 0 + 4), "it has the label 4, and the classes are 0 to 3"),
        (lambda x, y: (x, float(y)), "TypeError: its target is of torch.float64, and the spec says that it is a class"),
        (lambda x, y: {"x": x, "y": y}, "fits in no batch: KeyError: 0"),
        (lambda x, y: (x, "a"), "fits in no batch: "),
    ],
)
def test_a_sample_that_is_not_what_the_spec_says_is_one_line(own: Path, change: Any, said: str) -> None:
    class Other(Shards):
        def decode(self, raw: Any) -> Any:
            return change(*super().decode(raw))

    answer = refusal(Other(root=str(own), num_workers=0, batch_size=76))
    assert said in answer
    assert answer.startswith(f"data: a sample of {own}/train-")


@pytest.mark.parametrize(("said", "held"), [(75, "hold more"), (77, "hold 76")])
def test_a_number_of_samples_that_is_wrong_is_one_line(own: Path, said: int, held: str) -> None:
    class Wrong(Shards):
        def num_samples(self, split: str) -> int:
            return said

    assert refusal(Wrong(root=str(own), num_workers=0)) == (
        f"data: num_samples says that own-shards's train split has {said} samples, and its shards {held}"
    )


def test_fewer_samples_than_ranks_are_one_line(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "rank_and_world_size", lambda: (3, 80))
    assert refusal(Shards(root=str(own), num_workers=0)) == (
        "trainer.devices: 80 processes, and own-shards has 76 training samples"
    )


# --- the fingerprint -------------------------------------------------------------------------------------------------


def test_the_fingerprint_covers_names_sizes_and_both_ends_of_the_shards(own: Path) -> None:
    before = loaded(own).fingerprint
    assert loaded(own).fingerprint == before
    shard = own / "train-0.npz"
    content = shard.read_bytes()
    for changed in (content + b"x", b"x" + content[1:], content[:-1] + b"x"):
        shard.write_bytes(changed)
        assert loaded(own).fingerprint != before
    shard.write_bytes(content)
    shard.rename(own / "train-4.npz")
    assert loaded(own).fingerprint != before


# --- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unstopped(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unstopped")
    done = run(folder, *line(root, OUT), faults=[TRUST])
    assert done.end() == 0, done.complained
    return folder / "out"


def test_a_killed_run_that_is_resumed_ends_as_one_that_was_not(root: Path, unstopped: Path, tmp_path: Path) -> None:
    kill = (STEP, 15, kill_9)
    every_4 = "callbacks.checkpoint.every_n_steps=4"
    assert run(tmp_path, *line(root, OUT, every_4, "data.num_workers=2"), faults=[TRUST, kill]).end() == -9
    again = [f"--config-dir={root / 'conf'}", "resume=out", "data._target_=tests.support.own_data.Shards"]
    done = run(tmp_path, *again, f"data.root={root}", "data.num_workers=1", faults=[TRUST])
    assert done.end() == 0, done.complained
    assert record(tmp_path / "out")["resumed"][0]["step"] == 12
    assert_alike(results(tmp_path / "out"), results(unstopped))


def test_a_stream_of_unknown_length_is_trained_to_a_number_of_steps(
    root: Path, unstopped: Path, tmp_path: Path
) -> None:
    done = run(tmp_path, *line(root, OUT, "data.known=false", "trainer.max_steps=20"), faults=[TRUST])
    assert done.end() == 0, done.complained
    assert record(tmp_path / "out")["dataset"]["train_samples"] is None
    assert_alike(results(tmp_path / "out"), results(unstopped))


def test_an_unknown_length_and_a_schedule_that_ends_with_the_run_are_refused(root: Path, tmp_path: Path) -> None:
    done = run(tmp_path, *line(root, OUT, "data.known=false"), faults=[TRUST])
    assert done.end() == 1
    assert done.complained == (
        "error: optimizer.schedule: one_cycle ends with the run, and own-shards does not say how many samples it has: "
        "give trainer.max_steps, or optimizer.schedule=constant\n"
    )
    assert not list((tmp_path / "out").glob("run.json"))


def test_a_schedule_that_changes_after_epochs_takes_an_unknown_length(root: Path, tmp_path: Path) -> None:
    done = run(tmp_path, *line(root, OUT, "data.known=false", "optimizer.schedule=plateau"), faults=[TRUST])
    assert done.end() == 0, done.complained
    assert record(tmp_path / "out")["status"] == "finished"


def test_a_damaged_shard_ends_a_run_in_one_line(own: Path, tmp_path: Path) -> None:
    shard = own / "train-2.npz"
    shard.write_bytes(shard.read_bytes()[:500])
    done = run(tmp_path, *line(write_config(own, root=own, known="true").parent, "data.num_workers=2"), faults=[TRUST])
    assert done.end() == 1
    (said,) = (text for text in done.complained.splitlines() if not text.startswith("warning: "))
    assert said.startswith(
        f"error: data: shard {shard} of own-shards cannot be read: BadZipFile: File is not a zip file"
    )


def test_a_worker_that_is_killed_ends_a_run_in_one_line(root: Path, tmp_path: Path) -> None:
    class_ = "data._target_=tests.support.own_data.KilledWorker"
    done = run(tmp_path, *line(root, OUT, class_, "data.num_workers=1"), faults=[TRUST])
    assert done.end() == 1
    (said,) = (text for text in done.complained.splitlines() if not text.startswith("warning: "))
    assert said.startswith("error: data: DataLoader worker (pid")


def signal_all(number: int) -> None:
    """What Ctrl-C in a terminal, a closed terminal or a job manager does: the signal reaches the workers, too."""
    processes = (*psutil.Process().children(), psutil.Process())
    subprocess.run(["kill", f"-{number}", *(str(process.pid) for process in processes)], check=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes_keeps_a_checkpoint(
    root: Path, unstopped: Path, tmp_path: Path, number: signal.Signals
) -> None:
    words = line(root, OUT, "data.num_workers=2")
    stopped = run(tmp_path, *words, faults=[TRUST, (STEP, 13, partial(signal_all, number))])
    assert stopped.end() == 128 + number, stopped.complained
    again = [words[0], "resume=out", "data._target_=tests.support.own_data.Shards", f"data.root={root}"]
    done = run(tmp_path, *again, faults=[TRUST])
    assert done.end() == 0, done.complained
    assert record(tmp_path / "out")["resumed"][0]["step"] == 13
    assert_alike(results(tmp_path / "out"), results(unstopped))


@pytest.mark.slow
def test_two_ranks_of_unknown_length_end_as_one_process_with_twice_the_batch(root: Path, tmp_path: Path) -> None:
    common = ["data.known=false", "optimizer.schedule=constant", "optimizer=sgd"]
    done = run(tmp_path / "one", *line(root, OUT, *common, "data.batch_size=10"), faults=[TRUST])
    assert done.end() == 0, done.complained
    two = ranks(tmp_path / "two", *line(root, *common, "data.batch_size=5"), faults={0: [TRUST], 1: [TRUST]})
    assert [each.end() for each in two] == [0, 0], [each.complained for each in two]
    one, both = (results(folder / "out")["weights"] for folder in (tmp_path / "one", tmp_path / "two"))
    for name in one:
        torch.testing.assert_close(one[name], both[name])


@pytest.mark.slow
def test_a_damaged_shard_ends_all_ranks(own: Path, tmp_path: Path) -> None:
    shard = own / "train-2.npz"
    shard.write_bytes(shard.read_bytes()[:500])
    conf = write_config(own, root=own, known="true").parent
    both: list[Run] = ranks(tmp_path, *line(conf, "data.batch_size=5"), faults={0: [TRUST], 1: [TRUST]})
    assert [each.end() for each in both] == [1, 1]


@pytest.mark.parametrize("step", [10, 15])
@pytest.mark.slow
def test_a_stream_of_unknown_length_resumes_within_an_epoch_and_at_its_end(
    root: Path, unstopped: Path, tmp_path: Path, step: int
) -> None:
    words = line(root, OUT, "data.known=false", "trainer.max_steps=20", "callbacks.checkpoint.every_n_steps=1")
    assert run(tmp_path, *words, faults=[TRUST, (STEP, step + 1, kill_9)]).end() == -9
    again = [words[0], "resume=out", "data._target_=tests.support.own_data.Shards", f"data.root={root}"]
    done = run(tmp_path, *again, faults=[TRUST])
    assert done.end() == 0, done.complained
    assert record(tmp_path / "out")["resumed"][0]["step"] == step
    assert_alike(results(tmp_path / "out"), results(unstopped))


@pytest.mark.slow
def test_a_checkpoint_is_evaluated_on_its_shards(root: Path, unstopped: Path, tmp_path: Path) -> None:
    words = [f"ckpt={unstopped / 'checkpoints' / 'best.ckpt'}", f"data.root={root}"]
    words += ["data._target_=tests.support.own_data.Shards", "data.num_workers=1"]
    done = run(tmp_path, *words, faults=[TRUST], module="batchscope.evaluate")
    assert done.end() == 0, done.complained
    assert "tested on own-shards (12 samples)" in done.said
    assert f"{record(unstopped)['metrics']['test/acc']:.6f}" in done.said


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["trainer.accumulate_grad_batches=3"],
        ["trainer.val_check_interval=4"],
        ["trainer.limit_train_batches=5", "trainer.limit_val_batches=1"],
        ["+trainer.fast_dev_run=true"],
        ["data.batch_size=100"],
        ["data.augment.shift=1", "data.num_workers=2", "trainer.max_steps=12"],
        ["callbacks.prediction_images={_target_: batchscope.callbacks.prediction_images.PredictionImages}"],
    ],
)
def test_a_stream_takes_the_trainers_options(root: Path, tmp_path: Path, options: list[str]) -> None:
    words = ["data.known=false", "optimizer.schedule=constant", *options]
    done = run(tmp_path, *line(root, OUT, *words), faults=[TRUST])
    assert done.end() == 0, done.complained


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_every_start_method_of_workers_serves_the_same(
    root: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = loaded(root, num_workers=1, augment=Augment(shift=1))
    stream_loader = data.train_dataloader()
    stream_loader._loader.multiprocessing_context = method
    assert same([x for x, _ in stream_loader], epoch_of(loaded(root)))
