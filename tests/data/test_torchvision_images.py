"""The official files: verified before a run, downloaded once, never replaced, and never silently stood in for."""

import gzip
import hashlib
import multiprocessing
import os
import pickle
import shutil
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torchvision import datasets

from batchscope.data import torchvision_images as official
from batchscope.data.cifar10 import CIFAR10
from batchscope.data.mnist import MNIST, FashionMNIST
from batchscope.data.sequential_mnist import SequentialMNIST
from batchscope.data.torchvision_images import ExpectedFile, TorchvisionImages
from batchscope.errors import UserError
from tests.support.waiting import PATIENCE_S

RAW = Path("MNIST") / "raw"
NAMES = [Path(file).name for file in MNIST.files]


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Every path below a folder, with its size and the time it was last written."""
    return {
        str(path.relative_to(folder)): (path.lstat().st_size, path.lstat().st_mtime_ns) for path in folder.rglob("*")
    }


def message_of(call: Callable[[], None]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def real_copy(shared_data: Path, tmp_path: Path) -> Callable[..., Path]:
    """Call it with the names of files to damage: it gives a root with copies of these and links to the others."""

    def copy(*damaged: str) -> Path:
        folder = tmp_path / "real" / RAW
        folder.mkdir(parents=True)
        for name in NAMES:
            if name in damaged:
                shutil.copyfile(shared_data / RAW / name, folder / name)
            else:
                (folder / name).symlink_to(shared_data / RAW / name)
        return tmp_path / "real"

    return copy


# --- files that are there --------------------------------------------------------------------------------------------


def test_the_real_files_pass_and_nothing_is_written(real_copy: Callable[..., Path]) -> None:
    data = MNIST(root=str(real_copy()))
    before = snapshot(data.root)
    data.check()
    data.prepare_data()
    data.load("test")
    assert snapshot(data.root) == before


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def lengthen(path: Path) -> None:
    with path.open("ab") as stream:
        stream.write(b"\0")


def flip_a_byte(path: Path) -> None:
    with path.open("r+b") as stream:
        stream.seek(path.stat().st_size // 2)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 1]))


def fill_with_200(path: Path) -> None:
    with path.open("r+b") as stream:
        stream.seek(8)
        stream.write(bytes([200]) * (path.stat().st_size - 8))


DAMAGE = {
    "truncated images": ("t10k-images-idx3-ubyte", halve, "its size is 3920008, expected 7840016"),
    "labels a byte too long": ("train-labels-idx1-ubyte", lengthen, "its size is 60009, expected 60008"),
    "a flipped bit in an image": ("t10k-images-idx3-ubyte", flip_a_byte, "its md5 is "),
}


@pytest.mark.parametrize(("name", "damage", "finding"), DAMAGE.values(), ids=DAMAGE)
def test_a_wrong_file_is_named_with_what_is_wrong_and_the_repair(
    name: str, damage: Callable[[Path], None], finding: str, real_copy: Callable[..., Path]
) -> None:
    root = real_copy(name)
    damage(root / RAW / name)
    before = snapshot(root)
    message = message_of(MNIST(root=str(root)).check)
    assert message.startswith(f"data.root: {root / RAW / name}: is damaged: {finding}")
    assert "delete it and run again to download it, or put the official file there" in message
    assert snapshot(root) == before


def test_a_folder_in_the_place_of_a_file_is_refused(tmp_path: Path) -> None:
    file = next(iter(MNIST.files))
    (tmp_path / file).mkdir(parents=True)
    assert str(tmp_path / file) in message_of(MNIST(root=str(tmp_path)).check)


def test_a_pickle_of_cifar10_that_was_changed_is_never_opened(
    small_official: Callable[..., Path], tmp_path: Path
) -> None:
    class Malicious:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "broken-into"),)

    root = small_official(CIFAR10)
    (root / datasets.CIFAR10.base_folder / "test_batch").write_bytes(pickle.dumps(Malicious()))
    data = CIFAR10(root=str(root), num_val=50)
    for call in (data.check, lambda: data.load("test")):
        message_of(call)
    assert not (tmp_path / "broken-into").exists()


def test_a_file_of_the_right_size_that_is_all_zeros_is_refused(small_official: Callable[..., Path]) -> None:
    """Nothing but the size is known of Fashion-MNIST's files; that is what an interrupted copy can leave behind."""
    root = small_official(FashionMNIST)
    path = root / "FashionMNIST" / "raw" / "train-labels-idx1-ubyte"
    path.write_bytes(bytes(path.stat().st_size))
    message = message_of(lambda: FashionMNIST(root=str(root), num_val=50).load("train"))
    assert message.startswith(f"data.root: fashion-mnist in {root} cannot be read")
    assert "delete it and run again" in message


def test_labels_out_of_range_are_refused_where_no_checksum_is_known(small_official: Callable[..., Path]) -> None:
    root = small_official(FashionMNIST)
    fill_with_200(root / "FashionMNIST" / "raw" / "train-labels-idx1-ubyte")
    message = message_of(lambda: FashionMNIST(root=str(root), num_val=50).setup("fit"))
    assert "train split has the label 200, and the classes are 0 to 9 (200 such labels)" in message


# --- where they are to be stored -------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_written_to_will_do_when_the_files_are_in_it(
    real_copy: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("read-only")

    data = MNIST(root=str(real_copy()))
    monkeypatch.setattr(official.os, "replace", refuse)
    monkeypatch.setattr(official, "wait_for_lock", refuse)
    monkeypatch.setattr(Path, "mkdir", refuse)
    data.check()
    data.prepare_data()
    assert data.name == "mnist"
    assert len(data.load("test")[0]) == 10_000


@pytest.mark.parametrize(("root", "why"), [("file/data", "Not a directory"), ("x" * 300, "File name too long")])
def test_a_root_that_cannot_be_a_folder_is_refused(root: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    data = MNIST(root=str(tmp_path / root))
    data.check()
    assert message_of(data.prepare_data) == f"data.root: {tmp_path}/{root} cannot be created: {why}"
    assert sorted(snapshot(tmp_path)) == ["file"]


# --- files that cannot be had ----------------------------------------------------------------------------------------


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mirrors at a port of this machine that nobody listens to."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    for kind in (datasets.MNIST, datasets.FashionMNIST):
        monkeypatch.setattr(kind, "mirrors", [f"http://127.0.0.1:{port}/"])
    monkeypatch.setattr(datasets.CIFAR10, "url", f"http://127.0.0.1:{port}/{datasets.CIFAR10.filename}")


@pytest.fixture
def small_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(official, "STAND_IN_SIZES", {"train": 300, "test": 40})


KINDS = {"mnist": MNIST, "sequential": SequentialMNIST, "fashion-mnist": FashionMNIST, "cifar10": CIFAR10}


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_offline_error_refuses_what_cannot_be_downloaded(kind: type[TorchvisionImages], tmp_path: Path) -> None:
    message = message_of(kind(root=str(tmp_path / "data"), offline="error").prepare_data)
    assert message.startswith(
        f"data.root: {kind.torchvision_name} is not in {tmp_path / 'data'} and could not be downlo"
    )
    assert "refused" in message
    digits = ", or data.offline=digits to train on rendered digits instead" if kind is not CIFAR10 else ""
    assert message.endswith(f"put its files there, write data.root=<folder> where they are{digits}")
    assert [name for name in snapshot(tmp_path / "data") if not name.endswith(".lock")] == []


@pytest.mark.usefixtures("no_network")
def test_digits_stand_in_only_for_images_of_their_shape(tmp_path: Path) -> None:
    message = message_of(CIFAR10(root=str(tmp_path), offline="digits").prepare_data)
    assert message.endswith("write data.root=<folder> where they are")


@pytest.mark.usefixtures("no_network", "small_stand_in")
def test_offline_digits_says_so_in_one_line_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    MNIST(root=str(tmp_path), offline="digits", num_val=50).prepare_data()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: NOT MNIST: this run trains on digits rendered on this machine, and is recorded as")
    assert f"mnist is not in {tmp_path} and could not be downloaded" in line
    assert "data.offline=error" in line


@pytest.mark.usefixtures("no_network", "small_stand_in")
def test_digits_that_stand_in_have_mnists_shape_and_a_name_of_their_own(tmp_path: Path) -> None:
    data = MNIST(root=str(tmp_path), offline="digits", num_val=50)
    data.prepare_data()
    data.setup("fit")
    data.setup("test")
    assert data.name == "rendered-digits"
    assert {split: tuple(data.tensors(split)[0].shape) for split in ("train", "val", "test")} == {
        "train": (250, *data.spec.input_shape),
        "val": (50, *data.spec.input_shape),
        "test": (40, *data.spec.input_shape),
    }
    assert set(data.tensors("train")[1].tolist()) == set(range(10))
    rows = SequentialMNIST(root=str(tmp_path), offline="digits")
    rows.prepare_data()
    assert rows.name == "sequential-mnist-rows-of-rendered-digits"


@pytest.mark.usefixtures("no_network", "small_stand_in")
def test_a_run_that_began_on_digits_stays_on_them(
    tmp_path: Path, small_official: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    data = MNIST(root=str(tmp_path / "data"), offline="digits", num_val=50)
    data.prepare_data()
    data.setup("fit")
    shutil.copytree(small_official(MNIST), data.root, dirs_exist_ok=True)  # another job has had more luck
    data.prepare_data()  # as Lightning asks again before every stage
    assert capsys.readouterr().err.count("NOT MNIST") == 1
    data.setup("test")
    assert data.name == "rendered-digits"
    assert len(data.tensors("test")[0]) == 40


# --- downloading -----------------------------------------------------------------------------------------------------


@pytest.fixture
def mirror(
    small_official: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Iterator[SimpleNamespace]:
    """A web server on this machine: the `folder` of a small MNIST's archives, and how often each was `served`.

    `capfd` keeps torchvision's bars out of the tests' output.
    """
    raw, folder, served = small_official(MNIST) / RAW, tmp_path / "mirror", Counter()
    folder.mkdir()
    for name in NAMES:
        (folder / f"{name}.gz").write_bytes(gzip.compress((raw / name).read_bytes()))

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            served[self.path] += self.command == "GET"

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    resources = [(path.name, hashlib.md5(path.read_bytes()).hexdigest()) for path in folder.iterdir()]
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(datasets.MNIST, "mirrors", [f"http://127.0.0.1:{server.server_port}/"])
    monkeypatch.setattr(datasets.MNIST, "resources", resources)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield SimpleNamespace(folder=folder, served=served)
    server.shutdown()
    thread.join()
    server.server_close()


def left_in(root: Path) -> list[str]:
    """The files and folders in a root, but for the lock, which is empty and may stay for the next job."""
    return sorted(name for name, (size, _) in snapshot(root).items() if not (name == ".mnist.lock" and size == 0))


WHOLE = sorted(["MNIST", str(RAW), *(str(RAW / name) for name in NAMES)])


def test_missing_files_are_downloaded_verified_and_nothing_else_is_left(
    mirror: SimpleNamespace, tmp_path: Path
) -> None:
    data = MNIST(root=str(tmp_path / "data"), num_val=50)
    assert data.name == "rendered-digits"  # nothing official there yet
    data.check()
    assert not data.root.exists()
    data.prepare_data()
    data.check()
    assert data.name == "mnist"
    assert left_in(data.root) == WHOLE
    assert len(data.load("test")[0]) == 60


def test_a_download_replaces_no_file_that_is_there(mirror: SimpleNamespace, tmp_path: Path) -> None:
    root = tmp_path / "data"
    MNIST(root=str(root)).prepare_data()
    once = mirror.served.copy()
    MNIST(root=str(root)).prepare_data()
    assert mirror.served == once
    missing, *others = NAMES
    (root / RAW / missing).unlink()
    before = {name: (root / RAW / name).stat().st_ino for name in others}
    MNIST(root=str(root)).prepare_data()
    assert left_in(root) == WHOLE
    assert {name: (root / RAW / name).stat().st_ino for name in others} == before


def test_a_download_that_dies_half_way_leaves_no_file_and_can_be_tried_again(
    mirror: SimpleNamespace, tmp_path: Path
) -> None:
    archive = mirror.folder / f"{NAMES[-1]}.gz"
    whole = archive.read_bytes()
    archive.write_bytes(whole[: len(whole) // 2])
    data = MNIST(root=str(tmp_path / "data"), offline="error")
    assert "could not be downloaded" in message_of(data.prepare_data)
    assert left_in(data.root) == []
    archive.write_bytes(whole)
    MNIST(root=str(data.root)).prepare_data()
    assert left_in(data.root) == WHOLE


def test_a_mirror_with_other_files_than_the_official_ones_is_refused(
    mirror: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {file: ExpectedFile(expected.size, "0" * 32) for file, expected in MNIST.files.items()}
    monkeypatch.setattr(MNIST, "files", files)
    assert "is damaged: its md5 is" in message_of(MNIST(root=str(tmp_path / "data")).prepare_data)
    assert left_in(tmp_path / "data") == []


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="processes cannot be forked here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forking while the mirror's thread runs
def test_four_processes_that_start_on_one_empty_folder_download_once(mirror: SimpleNamespace, tmp_path: Path) -> None:
    MNIST(root=str(tmp_path / "alone")).prepare_data()
    once = mirror.served.copy()
    root = tmp_path / "data"
    forked = multiprocessing.get_context("fork")
    together = forked.Barrier(4)

    def prepare() -> None:
        together.wait(timeout=PATIENCE_S)
        data = MNIST(root=str(root), num_val=50)
        data.check()
        data.prepare_data()
        assert data.name == "mnist"
        assert len(data.load("train")[0]) == 200

    jobs = [forked.Process(target=prepare) for _ in range(4)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(timeout=PATIENCE_S)
    assert [job.exitcode for job in jobs] == [0, 0, 0, 0]
    assert mirror.served == once + once
    assert left_in(root) == WHOLE
    MNIST(root=str(root)).check()


def test_a_server_that_says_nothing_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(official, "DOWNLOAD_TIMEOUT_S", 0.1)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(datasets.MNIST, "mirrors", [f"http://127.0.0.1:{silent.getsockname()[1]}/"])
        assert "timed out" in message_of(MNIST(root=str(tmp_path)).prepare_data)
    assert socket.getdefaulttimeout() is None
