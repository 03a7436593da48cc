"""docs/check.py finds what is wrong in the docs, and nothing else."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SPEC = importlib.util.spec_from_file_location("check_docs", ROOT / "docs" / "check.py")
check_docs = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(check_docs)

PROGRAM = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--rounds', type=int)\n"
FILES = {
    "Makefile": "test:\n\techo\n",
    "src/cli/report.py": PROGRAM,
    "benchmarks/speed.py": PROGRAM,
    "docs/other.md": "# A heading, and more\n",
    "tests/data/test_there.py": "def test_of_one_thing() -> None: ...\n",
}


@pytest.fixture
def readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The README of a small repository: a Makefile, one module, one benchmark."""
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(check_docs, "ROOT", tmp_path)
    return tmp_path / "README.md"


MISTAKES = {
    "See [this](docs/gone.md).": "a link to docs/gone.md, which does not exist",
    "See [this](docs/other.md#no-heading).": "a link to #no-heading, which is no heading of other.md",
    "It is in `src/gone.py`.": "src/gone.py does not exist",
    "By `data/test_gone.py`.": "data/test_gone.py is not under tests/",
    "`batchscope.cli.gone` does it.": "batchscope.cli.gone is neither a module nor a name in one",
    "Run `make gone ARGS=-x`.": "make gone: no such target",
    "    python benchmarks/speed.py --round 9": "benchmarks/speed.py takes no --round, but --help --rounds -h",
    "    batchscope report --gone": "batchscope.cli.report takes no --gone",
    "`batchscope gone x` does it.": "batchscope.cli.gone: no such command",
    "    python train.py data.batch_sise=8": "data.batch_sise: no such option. Did you mean 'batch_size'?",
    "    python train.py -m model=cnn \\\n        data.batch_size=0,8": "data.batch_size: got 0",
    "A wrapped `python train.py\nmodel=gone` is one command.": "model=gone",
    "    $ python train.py data.batch_size=8\n    error: no": "is shown with an error, but is right",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_found_with_its_line(line: str, readme: Path) -> None:
    readme.write_text(f"# Title\n\n{line}\n")
    (found,) = check_docs.check_file(readme)
    assert found.startswith("README.md:3: ")
    assert MISTAKES[line] in found


def test_docstrings_and_comments_are_read_and_code_is_not(readme: Path) -> None:
    code, config = readme.with_name("a.py"), readme.with_name("a.yaml")
    code.write_text('"""First.\n\nSee docs/gone.md.\n"""\n\nx = "docs/gone.md"\n')
    config.write_text("a: 1\nb: 2 # as in docs/gone.md\n")
    assert check_docs.check_file(code) == ["a.py:3: docs/gone.md does not exist"]
    assert check_docs.check_file(config) == ["a.yaml:2: docs/gone.md does not exist"]
