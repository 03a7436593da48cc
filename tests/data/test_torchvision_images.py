"""The official files: verified before a run, downloaded once, never replaced, and never silently stood in for."""

import multiprocessing
import pickle
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torchvision import datasets

from batchscope.data import torchvision_images as official
from batchscope.data.cifar10 import CIFAR10
from batchscope.data.mnist import MNIST, FashionMNIST
from batchscope.data.sequential_mnist import SequentialMNIST
from batchscope.data.torchvision_images import ExpectedFile, TorchvisionImages
from tests.support.command_lines import refusal
from tests.support.waiting import PATIENCE_S

RAW = Path("MNIST") / "raw"
NAMES = [Path(file).name for file in MNIST.files]
Small = Callable[[type[TorchvisionImages]], Path]


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """A folder and every path below it, with its size and the time it was last written."""
    paths = (folder, *folder.rglob("*"))
    return {str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns) for path in paths}


def read(data: TorchvisionImages) -> None:
    """What a run does with data."""
    data.check()
    data.prepare_data()
    data.setup("fit")
    data.setup("test")


def test_the_real_files_pass_and_nothing_is_written(shared_data: Path, tmp_path: Path) -> None:
    (tmp_path / "MNIST").symlink_to(shared_data / "MNIST")
    before = snapshot(tmp_path)
    data = MNIST(root=str(tmp_path))
    read(data)
    assert data.name == "mnist"
    assert snapshot(tmp_path) == before


class Payload:
    def __reduce__(self) -> tuple:
        return (Path.touch, (Path("ran"),))


REPAIR = "delete it and run again to download it, or put the official file there"
UNREADABLE = "data.root: fashion-mnist in {root} cannot be read (…); delete it and run again"
# of nothing but Fashion-MNIST's sizes is anything known
DAMAGE: dict[str, tuple[type[TorchvisionImages], str, Callable[[bytes], bytes], str]] = {
    "truncated images": (MNIST, NAMES[2], lambda good: good[: len(good) // 2], "its size is 23528, expected 47056"),
    "labels a byte too long": (MNIST, NAMES[1], lambda good: good + b"\0", "its size is 259, expected 258"),
    "a flipped bit": (MNIST, NAMES[2], lambda good: good[:-1] + bytes([good[-1] ^ 1]), "its md5 is …"),
    "a pickle that runs code": (CIFAR10, "test_batch", lambda good: pickle.dumps(Payload()), "its md5 is …"),
    "zeros": (FashionMNIST, NAMES[1], lambda good: bytes(len(good)), UNREADABLE),
    "labels of no class": (
        FashionMNIST,
        NAMES[1],
        lambda good: good[:8] + bytes([200]) * 250,
        "data: sample 0 of fashion-mnist's train split has the label 200, and the classes are 0 to 9 (200 such labels)",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_wrong_file_is_named_with_what_is_wrong_and_the_repair(
    name: str, small_official: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, file, how, said = DAMAGE[name]
    root = small_official(kind)
    monkeypatch.chdir(root)
    (path,) = root.rglob(file)
    path.write_bytes(how(path.read_bytes()))
    before = snapshot(root)
    if said.startswith("its"):
        said = f"data.root: {path}: is damaged: {said}; {REPAIR}"
    pattern = ".*".join(map(re.escape, said.format(root=root).split("…")))
    assert re.fullmatch(pattern, line := refusal(read, kind(root=str(root), num_val=50))), line
    assert snapshot(root) == before


@pytest.mark.parametrize(
    ("root", "said"),
    [
        ("file/data", " cannot be created: Not a directory"),
        ("x" * 300, " cannot be created: File name too long"),
        ("folder", f"/{RAW / NAMES[0]}: cannot be read: Is a directory; {REPAIR}"),
    ],
)
def test_a_root_that_cannot_hold_the_files_is_refused(root: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "folder" / RAW / NAMES[0]).mkdir(parents=True)
    before = snapshot(tmp_path)
    assert refusal(read, MNIST(root=str(tmp_path / root))) == f"data.root: {tmp_path}/{root}{said}"
    assert snapshot(tmp_path) == before


@pytest.fixture
def no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be downloaded; few digits stand in."""
    nowhere = (tmp_path / "nowhere").as_uri()
    for kind in (datasets.MNIST, datasets.FashionMNIST):
        monkeypatch.setattr(kind, "mirrors", [f"{nowhere}/"])
    monkeypatch.setattr(datasets.CIFAR10, "url", f"{nowhere}/{datasets.CIFAR10.filename}")
    monkeypatch.setattr(official, "STAND_IN_SIZES", {"train": 300, "test": 40})


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    ("kind", "offline"),
    [(MNIST, "error"), (SequentialMNIST, "error"), (FashionMNIST, "error"), (CIFAR10, "error"), (CIFAR10, "digits")],
)
def test_what_cannot_be_downloaded_is_refused(kind: type[TorchvisionImages], offline: Any, tmp_path: Path) -> None:
    root = tmp_path / "data"
    message = refusal(kind(root=str(root), offline=offline).prepare_data)
    assert message.startswith(f"data.root: {kind.torchvision_name} is not in {root} and could not be downloaded (")
    digits = ", or data.offline=digits to train on rendered digits instead" if kind is not CIFAR10 else ""
    assert message.endswith(f"put its files there, write data.root=<folder> where they are{digits}")
    assert left_in(root) == []


@pytest.mark.usefixtures("no_network")
def test_digits_that_stand_in_are_called_so_and_stay(small_official: Small, tmp_path: Path, capsys) -> None:
    data = MNIST(root=str(tmp_path / "data"), offline="digits", num_val=50)
    data.prepare_data()
    data.setup("fit")
    shutil.copytree(small_official(MNIST), data.root, dirs_exist_ok=True)  # another job has had more luck
    data.prepare_data()  # as Lightning asks again before every stage
    data.setup("test")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: NOT MNIST: this run trains on digits rendered on this machine, and is recorded as")
    assert f"mnist is not in {tmp_path / 'data'} and could not be downloaded" in line
    assert line.endswith("put its files there, or set data.offline=error to refuse instead.")
    assert data.name == "rendered-digits"
    shapes = [tuple(data.tensors(split)[0].shape) for split in ("train", "val", "test")]
    assert shapes == [(250, 1, 28, 28), (50, 1, 28, 28), (40, 1, 28, 28)]
    assert set(data.tensors("train")[1].tolist()) == set(range(10))
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
    """The files and empty folders below a root, but for the lock, which is empty and may stay for the next job."""
    paths = [path for path in root.rglob("*") if not (path.name.endswith(".lock") and not path.stat().st_size)]
    return sorted(path.name for path in paths if path.is_file() or not any(path.iterdir()))


def test_missing_files_alone_are_downloaded_and_verified(mirror: Path, tmp_path: Path, capfd) -> None:
    data = MNIST(root=str(tmp_path / "data"), num_val=50)
    assert data.name == "rendered-digits"  # nothing official there yet
    data.check()
    assert not data.root.exists()
    for _ in range(2):  # the second time they are there
        data = MNIST(root=str(data.root), num_val=50)
        read(data)
        assert (data.name, len(data.load("test")[0])) == ("mnist", 60)
        assert left_in(data.root) == sorted(NAMES)
    assert capfd.readouterr().out == f"downloading mnist to {data.root} …\n"
    missing, *others = (data.root / RAW / name for name in NAMES)
    missing.unlink()
    before = [path.stat().st_ino for path in others]
    MNIST(root=str(data.root)).prepare_data()
    assert left_in(data.root) == sorted(NAMES)
    assert [path.stat().st_ino for path in others] == before


def test_a_download_that_is_not_the_official_one_leaves_no_file_and_can_be_tried_again(
    mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    root, expected = tmp_path / "data", MNIST.files
    (mirror / NAMES[-1]).rename(tmp_path / "late")
    assert "could not be downloaded" in refusal(MNIST(root=str(root)).prepare_data)
    assert left_in(root) == []
    (tmp_path / "late").rename(mirror / NAMES[-1])
    monkeypatch.setattr(MNIST, "files", {file: ExpectedFile(size, "0" * 32) for file, (size, _) in expected.items()})
    assert "is damaged: its md5 is" in refusal(MNIST(root=str(root)).prepare_data)
    assert left_in(root) == []
    monkeypatch.setattr(MNIST, "files", expected)
    MNIST(root=str(root)).prepare_data()
    assert left_in(root) == sorted(NAMES)


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="processes cannot be forked here")
def test_four_processes_that_start_on_one_empty_folder_download_once(mirror: Path, tmp_path: Path, capfd) -> None:
    forked = multiprocessing.get_context("fork")
    together = forked.Barrier(4)

    def prepare() -> None:
        together.wait(timeout=PATIENCE_S)
        data = MNIST(root=str(tmp_path / "data"), num_val=50)
        read(data)
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
