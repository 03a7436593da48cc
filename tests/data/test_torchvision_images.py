"""The official files: read as they are, verified before a run, downloaded once, never replaced, and never silently stood in for."""

import errno
import multiprocessing
import os
import pickle
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torchvision import datasets

from batchscope import _system
from batchscope.data import torchvision_images as official
from batchscope.data.cifar10 import CIFAR10
from batchscope.data.mnist import MNIST, FashionMNIST
from batchscope.data.sequential_mnist import SequentialMNIST
from batchscope.data.torchvision_images import TorchvisionImages
from tests.data.support import Payload, prepared
from tests.support.command_lines import refusal
from tests.support.waiting import PATIENCE_S

RAW = Path("MNIST") / "raw"
NAMES = [Path(file).name for file in MNIST.files]
Small = Callable[[type[TorchvisionImages]], Path]


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Return every path at and below a folder with its size and modification time."""
    paths = (folder, *folder.rglob("*"))
    return {str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns) for path in paths}


def test_the_real_mnist_passes_is_split_55000_5000_10000_and_nothing_is_written(shared_data, tmp_path) -> None:
    (tmp_path / "MNIST").symlink_to(shared_data / "MNIST")
    before = snapshot(tmp_path)
    data = prepared(MNIST(root=str(tmp_path)))
    assert snapshot(tmp_path) == before
    assert data.name == "mnist"
    assert [len(data.tensors(split)[0]) for split in ("train", "val", "test")] == [55_000, 5_000, 10_000]
    assert data.tensors("train")[0].mean().item() == pytest.approx(0, abs=0.01)
    assert data.tensors("train")[0].std().item() == pytest.approx(1, abs=0.01)
    assert data.tensors("test")[1].bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


@pytest.mark.parametrize("kind", [MNIST, FashionMNIST, CIFAR10])
def test_images_are_the_official_ones_normalised(kind: Any, small_official: Small) -> None:
    root = str(small_official(kind))
    data = kind(root=root, num_val=50)
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (data.spec.mean, data.spec.std))
    for train, splits in ((False, ["test"]), (True, ["train", "val"])):
        x, y = (torch.cat(parts) for parts in zip(*map(data.load, splits), strict=True))
        loaded = ((x * std + mean) * 255).round().to(torch.uint8)
        official = kind.source(root, train=train)
        pixels = torch.as_tensor(official.data)
        channels_first = pixels[:, None] if pixels.dim() == 3 else pixels.permute(0, 3, 1, 2)
        if train:  # train and val are the two parts of a shuffled set
            assert torch.equal(loaded.unique(dim=0), channels_first.unique(dim=0))
        else:
            assert torch.equal(loaded, channels_first)
            assert y.tolist() == [*official.targets]
    few = kind(root=root, num_val=50, num_train=7, num_test=3)  # the first images of the full split
    for split, size in (("train", 7), ("val", 50), ("test", 3)):
        assert all(map(torch.equal, few.load(split), (tensor[:size] for tensor in data.load(split))))


def test_what_an_old_torchvision_has_processed_is_not_read(small_official: Small) -> None:
    root = small_official(MNIST)
    before = MNIST(root=str(root), num_val=50).load("test")
    (root / "MNIST" / "processed").mkdir()
    for name in ("training.pt", "test.pt"):
        torch.save(
            (torch.zeros(60, 28, 28, dtype=torch.uint8), torch.zeros(60).long()), root / "MNIST/processed" / name
        )
    assert all(map(torch.equal, MNIST(root=str(root), num_val=50).load("test"), before))


@pytest.mark.parametrize(
    ("sizes", "split", "reason"),
    [
        ({"num_val": 250}, "train", "num_val: got 250, takes fewer than the 250 training images"),
        ({"num_train": 201}, "train", "num_train: got 201, takes at most the 200 training images beside 50 of "),
        ({"num_test": 61}, "test", "num_test: got 61, takes at most the 60 test images"),
    ],
)
def test_more_images_than_there_are_are_one_line(sizes: dict, split: Any, reason: str, small_official: Small) -> None:
    data = MNIST(**{"root": str(small_official(MNIST)), "num_val": 50, **sizes})
    assert refusal(data.load, split).startswith(f"data.{reason}")


@pytest.mark.parametrize(("steps", "shape"), [("rows", (28, 28)), ("pixels", (784, 1))])
def test_sequential_mnist_reads_a_row_or_a_pixel_a_step_permuted_in_one_order(steps, shape, small_official) -> None:
    """The order of pixels is fixed by its first pixels: published results are comparable only in this order."""
    root = str(small_official(MNIST))
    images, labels = MNIST(root=root).load("test")
    data, permuted = (SequentialMNIST(root=root, steps=steps, permute=permute, seed=3) for permute in (False, True))
    x, y = data.load("test")
    assert data.spec.input_shape == shape
    assert torch.equal(x, images.view(60, *shape))
    assert torch.equal(y, labels)
    positions = {column.numpy().tobytes(): position for position, column in enumerate(images.flatten(1).T)}
    order = [positions[column.numpy().tobytes()] for column in permuted.load("test")[0].flatten(1).T]
    assert sorted(order) == list(range(784))
    assert order[:8] == [573, 773, 173, 195, 184, 456, 105, 290]
    assert (data.name, permuted.name) == (f"sequential-mnist-{steps}", f"sequential-mnist-{steps}-permuted")


WRONG = "is not the official file; delete it and run again to download it, or put the official file there"
UNREADABLE = "data.root: fashion-mnist in {root} cannot be read (…); delete it and run again"
DAMAGE: dict[str, tuple[type[TorchvisionImages], str, Callable[[bytes], bytes], str]] = {
    "truncated images": (MNIST, NAMES[2], lambda good: good[: len(good) // 2], WRONG),
    "labels a byte too long": (MNIST, NAMES[1], lambda good: good + b"\0", WRONG),
    "a flipped bit": (MNIST, NAMES[2], lambda good: good[:-1] + bytes([good[-1] ^ 1]), WRONG),
    "a pickle that runs code": (CIFAR10, "test_batch", lambda good: pickle.dumps(Payload()), WRONG),
    "zeros": (FashionMNIST, NAMES[1], lambda good: bytes(len(good)), UNREADABLE),
    "labels of no class": (
        FashionMNIST,
        NAMES[1],
        lambda good: good[:8] + bytes([200]) * 250,
        "data: fashion-mnist's train split is not what the spec says: it has the label 200, and the classes are 0 to 9",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_wrong_file_is_named_with_what_is_wrong_and_the_repair(name, small_official: Small, monkeypatch) -> None:
    kind, file, damage, reason = DAMAGE[name]
    root = small_official(kind)
    monkeypatch.chdir(root)
    (path,) = root.rglob(file)
    path.write_bytes(damage(path.read_bytes()))
    before = snapshot(root)
    reason = f"data.root: {path}: {reason}" if reason == WRONG else reason
    pattern = ".*".join(map(re.escape, reason.format(root=root).split("…")))
    assert re.fullmatch(pattern, line := refusal(prepared, kind(root=str(root), num_val=50))), line
    assert snapshot(root) == before


def test_a_root_that_cannot_hold_the_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "folder" / RAW / NAMES[0]).mkdir(parents=True)
    before = snapshot(tmp_path)
    for root, reason in {
        "file/data": " cannot be created: Not a directory",
        "folder": f"/{RAW / NAMES[0]}: {WRONG}",
    }.items():
        assert refusal(prepared, MNIST(root=str(tmp_path / root))) == f"data.root: {tmp_path}/{root}{reason}"
    assert snapshot(tmp_path) == before


@pytest.fixture
def no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No download succeeds; a few rendered digits stand in."""
    nowhere = (tmp_path / "nowhere").as_uri()
    monkeypatch.setattr(datasets.MNIST, "mirrors", [f"{nowhere}/"])
    monkeypatch.setattr(datasets.CIFAR10, "url", f"{nowhere}/{datasets.CIFAR10.filename}")
    monkeypatch.setattr(official, "STAND_IN_SIZES", {"train": 300, "test": 40})


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / RAW).mkdir(parents=True)
    os.mkfifo(tmp_path / RAW / NAMES[0])
    message = f"data.root: {tmp_path / RAW / NAMES[0]}: {WRONG}"
    assert refusal(prepared, MNIST(root=str(tmp_path))) == message


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(("kind", "offline"), [(MNIST, "error"), (CIFAR10, "digits")])
def test_what_cannot_be_downloaded_is_refused(kind: type[TorchvisionImages], offline: Any, tmp_path: Path) -> None:
    root = tmp_path / "data"
    message = refusal(kind(root=str(root), offline=offline).prepare_data)
    assert message.startswith(f"data.root: {kind.torchvision_name} is not in {root} and could not be downloaded (")
    digits = ", or data.offline=digits to train on rendered digits instead" if kind is not CIFAR10 else ""
    assert message.endswith(f"put its files there, write data.root=<folder> where they are{digits}")
    assert left_in(root) == []


@pytest.mark.parametrize(("kind", "offline"), [(MNIST, "error"), (CIFAR10, "digits")])
def test_without_a_run_missing_files_are_refused_where_no_digits_may_stand_in(
    kind: type[TorchvisionImages], offline: Any, tmp_path: Path
) -> None:
    data = kind(root=str(tmp_path), offline=offline)
    assert refusal(data.setup, "fit").startswith(
        f"data.root: {kind.torchvision_name} is not in {tmp_path} and prepare_data() has not "
    )


@pytest.mark.usefixtures("no_network")
def test_digits_that_stand_in_are_called_so_and_stay(small_official: Small, tmp_path: Path, capsys) -> None:
    data = MNIST(root=str(tmp_path / "data"), offline="digits", num_val=50)
    data.prepare_data()
    data.setup("fit")
    shutil.copytree(small_official(MNIST), data.root, dirs_exist_ok=True)  # another job has downloaded the files
    data.prepare_data()  # Lightning prepares again before every stage
    data.setup("test")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: NOT MNIST: this run trains on digits rendered on this machine, and is recorded as")
    assert f"mnist is not in {tmp_path / 'data'} and could not be downloaded" in line
    assert line.endswith("put its files there, or set data.offline=error to refuse instead.")
    assert data.name == "rendered-digits"
    shapes = [tuple(data.tensors(split)[0].shape) for split in ("train", "val", "test")]
    assert shapes == [(250, 1, 28, 28), (50, 1, 28, 28), (40, 1, 28, 28)]
    assert set(data.tensors("train")[1].tolist()) == set(range(10))
    clothes = FashionMNIST(root=str(tmp_path / "clothes"), offline="digits")
    clothes.prepare_data()
    assert clothes.spec.classes == ()
    rows = SequentialMNIST(root=str(tmp_path / "rows"), offline="digits")
    rows.prepare_data()
    assert rows.name == "sequential-mnist-rows-of-rendered-digits"


@pytest.fixture
def mirror(small_official: Small, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a small MNIST's files, from which torchvision downloads them one after the other."""
    folder = small_official(MNIST) / RAW

    def download(dataset: Any) -> None:
        shutil.copytree(folder, dataset.raw_folder, dirs_exist_ok=True)
        assert len([*folder.iterdir()]) == 4, "the connection broke"

    monkeypatch.setattr(datasets.MNIST, "download", download)
    return folder


def left_in(root: Path) -> list[str]:
    """List the files and empty folders below a root, without the empty lock, which may stay for the next job."""
    paths = [path for path in root.rglob("*") if not (path.name.endswith(".lock") and not path.stat().st_size)]
    return sorted(path.name for path in paths if path.is_file() or not any(path.iterdir()))


def test_missing_files_alone_are_downloaded_and_verified(mirror: Path, tmp_path: Path, capfd) -> None:
    data = MNIST(root=str(tmp_path / "data"), num_val=50)
    assert data.name == "rendered-digits"  # nothing official there yet
    data.check()
    assert not data.root.exists()
    for _ in range(2):  # the files exist the second time
        data = prepared(MNIST(root=str(data.root), num_val=50))
        assert (data.name, len(data.load("test")[0])) == ("mnist", 60)
        assert left_in(data.root) == sorted(NAMES)
    assert capfd.readouterr().out == f"downloading mnist to {data.root} …\n"
    missing, *present = (data.root / RAW / name for name in NAMES)
    missing.unlink()
    before = [path.stat().st_ino for path in present]
    MNIST(root=str(data.root)).prepare_data()
    assert left_in(data.root) == sorted(NAMES)
    assert [path.stat().st_ino for path in present] == before


def test_a_folder_without_locks_is_downloaded_to_with_a_warning(
    mirror: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    refused = OSError(errno.ENOLCK, "No locks available")
    monkeypatch.setattr(_system, "try_lock", Mock(side_effect=refused))
    MNIST(root=str(tmp_path / "data")).prepare_data()
    assert left_in(tmp_path / "data") == sorted(NAMES)
    line = f"warning: {tmp_path / 'data'} is on a file system without locks (No locks available): do not start a second"
    assert line in capsys.readouterr().err


def test_a_wrong_download_leaves_no_file_and_can_be_tried_again(mirror: Path, tmp_path: Path) -> None:
    root, file = tmp_path / "data", mirror / NAMES[-1]
    content = file.read_bytes()
    file.unlink()  # the connection breaks before it
    assert "could not be downloaded" in refusal(MNIST(root=str(root)).prepare_data)
    assert left_in(root) == []
    file.write_bytes(bytes(len(content)))
    assert "is not the official file" in refusal(MNIST(root=str(root)).prepare_data)
    assert left_in(root) == []
    file.write_bytes(content)
    MNIST(root=str(root)).prepare_data()
    assert left_in(root) == sorted(NAMES)


def test_what_a_killed_download_leaves_is_removed_by_the_next(mirror: Path, tmp_path: Path, monkeypatch) -> None:
    root = tmp_path / "data"

    def killed(dataset: Any) -> None:
        shutil.copytree(mirror, f"{dataset.root}-killed")  # the folder of a killed download
        raise OSError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(datasets.MNIST, "download", killed)
        refusal(MNIST(root=str(root)).prepare_data)
    (root / ".fashion-mnist-other").mkdir()  # of another dataset, whose download may be in progress
    assert left_in(root) == sorted([*NAMES, ".fashion-mnist-other"]) and not (root / RAW).exists()
    MNIST(root=str(root)).prepare_data()
    assert {path.name for path in root.iterdir()} == {"MNIST", ".mnist.lock", ".fashion-mnist-other"}


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="processes cannot be forked here")
def test_four_processes_that_start_on_one_empty_folder_download_once(mirror: Path, tmp_path: Path, capfd) -> None:
    forked = multiprocessing.get_context("fork")
    together = forked.Barrier(4)

    def prepare() -> None:
        together.wait(timeout=PATIENCE_S)
        data = prepared(MNIST(root=str(tmp_path / "data"), num_val=50))
        assert (data.name, len(data.load("train")[0])) == ("mnist", 200)

    jobs = [forked.Process(target=prepare) for _ in range(4)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(timeout=PATIENCE_S)
    assert [job.exitcode for job in jobs] == [0, 0, 0, 0]
    assert capfd.readouterr().out.count("downloading mnist to") == 1
    assert left_in(tmp_path / "data") == sorted(NAMES)


def test_a_server_that_says_nothing_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    monkeypatch.setattr(official, "DOWNLOAD_TIMEOUT_S", 0.1)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(datasets.MNIST, "mirrors", [f"http://127.0.0.1:{silent.getsockname()[1]}/"])
        assert "timed out" in refusal(MNIST(root=str(tmp_path)).prepare_data)
    assert socket.getdefaulttimeout() is None
