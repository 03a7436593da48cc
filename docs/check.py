"""Check docs, docstrings and the comments of configs against the repository: links, paths, tests, dotted names and command lines.

    python docs/check.py

Prints each finding as `file:line: what is wrong`; the exit code is 1 if there is one. No command is run: train.py's
options are composed and checked, the flags of other programs are compared with their `add_argument` calls. A word with
`<run>`, `…`, `my_model` or a single capital letter is a placeholder and is not checked.
"""

import ast
import re
import shlex
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECT = ROOT / "examples" / "own-project"
FILES = ["*.md", "docs/**/*.md", "benchmarks/*.md", "examples/**/*.md", "train.py", "docs/*.py", "src/**/*.py"]
FILES += ["benchmarks/*.py", "examples/**/*.py", "configs/**/*.yaml", "pyproject.toml", "Makefile"]
PLACEHOLDER = re.compile(r"<|…|\.\.\.|\*|[{}\[\]]|(?<![a-z])my_|[=/][A-Z]\b(?![.-])")
PATH = re.compile(r"(?<!\]\()(?<![\w./<-])(?:src|docs|benchmarks|configs|tests|examples)/[^\s`'\",;:()|#]+")
PROGRAM = r"(?:[A-Z_]+=\S+ )*(?:python|torchrun|srun|make|batchscope[a-z-]*) "
IN_BACKTICKS = rf"`({PROGRAM}[^`]+)`()"
ON_ITS_OWN = rf"^(?: *(?=python )|\s*\$ | {{4,}})({PROGRAM}(?:\0\n|[^\n`])*)(?:\n *(error: ))?"
OURS = r"make|.*\.py|batchscope[\w.]*"
FLAGS = {"-m", "--multirun", "-v", "--verbose", "--help", "--cfg", "--config-dir"}
Findings = Iterator[tuple[int, str]]  # the position in the text, and what is wrong there


def main() -> int:
    """Check every source and print the findings; the exit code."""
    files = sorted({path for pattern in FILES for path in ROOT.glob(pattern)})
    with ProcessPoolExecutor() as pool:
        findings = [finding for found in pool.map(check_file, files) for finding in found]
    print("\n".join(findings) or f"{len(files)} files: links, paths and commands are right")
    return int(bool(findings))


def check_file(path: Path) -> list[str]:
    """The findings in one file, each once."""
    found = {}
    for first, text in texts(path):
        for at, what in (*check_links(path, text), *check_names(text), *check_commands(text)):
            found[f"{path.relative_to(ROOT)}:{first + text[:at].count(chr(10))}: {what}"] = None
    return list(found)


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """What people read of a file: each text with the number of its first line."""
    content = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield 1, content
    elif path.suffix == ".py":
        for node in ast.walk(ast.parse(content)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                yield node.body[0].lineno, text
    else:
        yield from ((n, line.partition("#")[2]) for n, line in enumerate(content.splitlines(), start=1))


def check_links(path: Path, text: str) -> Findings:
    """Relative links and images, with the headings that they name."""
    for link in re.finditer(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)", text):
        target = path.parent / link[1] if link[1] else path
        if not target.exists():
            yield link.start(), f"a link to {link[1]}, which does not exist"
        elif link[2]:
            headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            if link[2] not in {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}:
                yield link.start(), f"a link to #{link[2]}, which is no heading of {target.name}"


def check_names(text: str) -> Findings:
    """Paths from the repository's root, tests (`test_<file>.py::test_<name>`), and dotted names of batchscope."""
    for name in PATH.finditer(text):
        if not PLACEHOLDER.search(name[0]) and not (ROOT / name[0].rstrip(".")).exists():
            yield name.start(), f"{name[0].rstrip('.')} does not exist"
    for name in re.finditer(r"(?<![\w/])(?:tests/)?((?:\w+/)*test_\w+\.py)(?:::(\w+))?", text):
        tests = [] if PLACEHOLDER.search(name[0]) else [*ROOT.glob(f"**/tests/**/{name[1]}")]
        if not tests and not PLACEHOLDER.search(name[0]):
            yield name.start(), f"{name[1]} is not under tests/"
        elif tests and name[2] and not any(f"def {name[2]}(" in file.read_text(encoding="utf-8") for file in tests):
            yield name.start(), f"{name[2]} is no test in {name[1]}"
    for name in re.finditer(r"(?<![\w./-])batchscope(?:\.\w+)+", text):
        parent, _, last = name[0].rpartition(".")
        defined = any(re.search(rf"\b{last}\b", file.read_text(encoding="utf-8")) for file in sources(parent))
        if not defined and not sources(name[0]) and not PLACEHOLDER.search(name[0]):
            yield name.start(), f"{name[0]} is neither a module nor a name in one"


def sources(module: str) -> list[Path]:
    """The files of one of batchscope's modules, or of a package and its command."""
    place = ROOT.joinpath("src", *module.split(".")[1:])
    return [file for file in (place.with_suffix(".py"), place / "__init__.py", place / "__main__.py") if file.exists()]


def check_commands(text: str) -> Findings:
    """Commands in backticks or on lines of their own; one that is shown with an error must have one."""
    joined = text.replace("\\\n", "\0\n")  # the positions stay
    for found in (*re.finditer(IN_BACKTICKS, joined), *re.finditer(ON_ITS_OWN, joined, re.MULTILINE)):
        for command in re.split(r" (?:&&|\|\|?|[;>]) ", re.sub(r"<[^<>]*>", "<>", found[1].replace("\0", ""))):
            try:
                words = [word for word in shlex.split(command, comments=True) if not PLACEHOLDER.search(word)]
            except ValueError:  # an apostrophe: a sentence
                continue
            wrong = list(check_command(words))
            if found[2] and not wrong and "resume=" not in command and "--config-dir" not in command:
                yield found.start(1), f"{command}: is shown with an error, but is right"
            elif not found[2]:
                yield from ((found.start(1), what) for what in wrong)


def check_command(words: list[str]) -> Iterator[str]:
    """What is wrong with one command, if it starts a program of this repository."""
    program, rest = next(((w, words[n + 1 :]) for n, w in enumerate(words) if re.fullmatch(OURS, w)), ("", []))
    if program == "make" and rest and "=" not in rest[0]:
        if not re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE):
            yield f"make {rest[0]}: no such target"
    elif program == "batchscope" and rest[:1] in (["--help"], ["--version"]):
        return
    elif program == "batchscope" and rest:
        program, rest = f"batchscope.cli.{rest[0]}", rest[1:]
        if not sources(program):
            yield f"{program}: no such command"
    if program == "batchscope.cli.run":  # what follows the script is the script's
        rest = rest[: next((n for n, word in enumerate(rest) if word.endswith(".py")), len(rest))]
    if program in ("train.py", "batchscope.train", "batchscope.cli.train"):
        yield from check_train(rest)
    elif program.endswith(".py") or sources(program):
        yield from check_flags(program, rest)


def check_flags(program: str, words: list[str]) -> Iterator[str]:
    """The flags in the `add_argument` calls of a program and of the modules that it imports from this repository."""
    files = [ROOT / program] if program.endswith(".py") else [*sources(program), *sources(program.rpartition(".")[0])]
    for file in [file for file in files if file.exists()]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                place = file.parents[max(node.level, 1) - 1].joinpath(*(node.module or "").split("."))
                files += [
                    place.with_suffix(".py"),
                    place / "__init__.py",
                    *(place / f"{alias.name}.py" for alias in node.names),
                ]
    calls = re.findall(
        r"add_argument\([^)]*", "".join(file.read_text(encoding="utf-8") for file in files if file.exists())
    )
    known = {"-h", "--help", *re.findall(r"[\"'](--?[a-z][\w-]*)", "".join(calls))}
    for flag in (word.partition("=")[0] for word in words if word.startswith("-")):
        if files[0].exists() and flag not in known:
            yield f"{program} takes no {flag}, but {' '.join(sorted(known))}"


def check_train(words: list[str]) -> Iterator[str]:
    """The flags and options of a training command; an optional package may be missing, and a folder to resume from."""
    from batchscope.errors import UserError
    from batchscope.options.compose import check_command_line
    from batchscope.options.groups import use_config_dir

    flags = {word.partition("=")[0] for word in words if word.startswith("-")}
    yield from (f"train.py takes no {flag}" for flag in flags - FLAGS)
    overrides = [word for word in words if not word.startswith("-")]
    own = next((word.partition("=")[2] for word in words if word.startswith("--config-dir=")), "")
    if own:  # a command of a project of one's own
        if not (PROJECT / own).is_dir():  # that a page writes, and its test tries
            return
        sys.path += [str(PROJECT)] if str(PROJECT) not in sys.path else []
    if "--cfg" not in flags and not any(word.startswith("resume=") for word in overrides):
        try:
            use_config_dir(str(PROJECT / own) if own else None)
            check_command_line(overrides, multirun=bool(flags & {"-m", "--multirun"}))
        except UserError as error:
            if "pip install" not in str(error):
                yield f"train.py {shlex.join(overrides)}: {error}"


if __name__ == "__main__":
    sys.exit(main())
