"""docs/check.py finds what is wrong in the docs, and nothing else."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SPEC = importlib.util.spec_from_file_location("check_docs", ROOT / "docs" / "check.py")
check_docs = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(check_docs)

PROGRAM = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--rounds", type=int)
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small repository: a Makefile, one module, one benchmark."""
    files = {
        "Makefile": "test:\n\techo\n",
        "src/cli/report.py": PROGRAM,
        "benchmarks/speed.py": PROGRAM,
        "docs/other.md": "# A heading, and more\n",
        "tests/data/test_there.py": "def test_of_one_thing() -> None: ...\n",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(check_docs, "ROOT", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("line", "finding"),
    [
        ("See [this](docs/gone.md).", "a link to docs/gone.md, which does not exist"),
        ("![a plot](gone.png)", "a link to gone.png"),
        ("See [this](docs/other.md#no-heading).", "a link to #no-heading, which is no heading of other.md"),
        ("It is in `src/gone.py`.", "src/gone.py does not exist"),
        ("By `data/test_gone.py`.", "data/test_gone.py is not under tests/"),
        ("By `data/test_there.py::test_gone`.", "test_gone is no test in data/test_there.py"),
        ("`batchscope.cli.gone` does it.", "batchscope.cli.gone is neither a module nor a name in one"),
        ("    make gone", "make gone: no such target"),
        ("Run `make gone ARGS=-x`.", "make gone: no such target"),
        ("    python benchmarks/gone.py", "benchmarks/gone.py does not exist"),
        ("    python benchmarks/speed.py --round 9", "benchmarks/speed.py takes no --round, but --help --rounds -h"),
        ("    python -m batchscope.cli.gone", "batchscope.cli.gone is neither a module nor a name in one"),
        ("    batchscope report --gone", "batchscope.cli.report takes no --gone"),
        ("`batchscope gone x` does it.", "batchscope.cli.gone: no such command"),
        ("    python train.py --gone", "train.py takes no --gone"),
        ("    python train.py data.batch_sise=8", "data.batch_sise: no such option. Did you mean 'batch_size'?"),
        ("    python train.py model=cnn,mlp", "model"),
        ("    python train.py -m model=cnn \\\n        data.batch_size=0,8", "data.batch_size: got 0"),
        ("A wrapped `python train.py\nmodel=gone` is one command.", "model=gone"),
        ("    $ python train.py data.batch_size=8\n    error: no", "is shown with an error, but is right"),
    ],
)
def test_a_mistake_is_found_with_its_line(line: str, finding: str, repository: Path) -> None:
    path = repository / "README.md"
    path.write_text(f"# Title\n\n{line}\n")
    (found,) = check_docs.check_file(path)
    assert found.startswith("README.md:3: ")
    assert finding in found


@pytest.mark.parametrize(
    "text",
    [
        "[a page](docs/other.md#a-heading-and-more), [a site](https://example.org/x), `docs/other.md`, src/cli/report.py.",
        "`src/models/my_model.py`, `src/<room>/x.py`, `configs/*.yaml`, `batchscope.cli.report`",
        "By `data/test_there.py`, `tests/data/test_there.py` and `test_there.py::test_of_one_thing`.",
        "    make test    # the default tests",
        "Of two things, make sure that one is right; batchscope measures it.",
        "    python benchmarks/speed.py --rounds 9 && batchscope report <sweep> --rounds=3 | tee out.txt",
        "    python train.py -m model=cnn,mlp data.batch_size=8,16 # a sweep",
        "    python train.py resume=<run folder> trainer.max_epochs=3",
        "`python train.py data.batch_size=N model=my_model …`",
        "    $ python train.py data.batch_sise=8\n    error: data.batch_sise: no such option",
        "    torchrun --nnodes=2 \\\n        train.py trainer=ddp trainer.devices=2",
    ],
)
def test_what_is_right_passes(text: str, repository: Path) -> None:
    path = repository / "README.md"
    path.write_text(f"# Title\n\n{text}\n")
    assert check_docs.check_file(path) == []


def test_docstrings_and_comments_are_read_and_code_is_not(repository: Path) -> None:
    (repository / "src" / "a.py").write_text('"""First.\n\nSee docs/gone.md.\n"""\n\nx = "docs/gone.md"\n')
    (repository / "a.yaml").write_text("a: 1\nb: 2 # as in docs/gone.md\n")
    assert check_docs.check_file(repository / "src" / "a.py") == ["src/a.py:3: docs/gone.md does not exist"]
    assert check_docs.check_file(repository / "a.yaml") == ["a.yaml:2: docs/gone.md does not exist"]
