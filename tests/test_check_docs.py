"""docs/check.py finds mistakes in the docs; our own pages show on every change that it accepts correct ones."""

import importlib.util
from pathlib import Path

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
    "a.py": '"""First.\n\nSee docs/gone.md.\n"""\n\nx = "docs/gone.md"\n',
    "a.yaml": "a: 1\n\nb: docs/gone.md # as in docs/gone.md\n",
}


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


def test_each_mistake_is_found_with_its_line_in_docs_docstrings_and_comments(tmp_path: Path, monkeypatch) -> None:
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(check_docs, "ROOT", tmp_path)
    for line, finding in MISTAKES.items():
        (tmp_path / "README.md").write_text(f"# Title\n\n{line}\n")
        (message,) = check_docs.check_file(tmp_path / "README.md")
        assert message.startswith("README.md:3: ") and finding in message, line
    for name in ("a.py", "a.yaml"):
        assert check_docs.check_file(tmp_path / name) == [f"{name}:3: docs/gone.md does not exist"]
