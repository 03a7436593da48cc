"""Who may import whom inside `src/`: an import that points upwards is named, wherever in a file it stands."""

import ast
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path

SRC = Path(__file__).resolve().parents[1] / "src"
# The modules beside the folders.
GROUND = {"errors", "files", "ranks", "_system", "_hydra", "_imports", "_lazy", "_lightning", "_torch", "random_state"}
# What a folder may import, besides itself and GROUND. Each line names only folders of the lines above it.
MAY_IMPORT: dict[str, set[str]] = {
    "options": set(),
    "records": {"options"},
    "data": {"options"},
    "models": {"options", "data"},
    "hardware": {"options", "records"},
    "distributed": set(),
    "callbacks": {"options", "records", "hardware", "distributed"},
    "checkpointing": {"options", "records", "distributed", "callbacks"},
    "training": {"options", "records", "data", "hardware", "distributed", "callbacks", "checkpointing"},
    "analysis": {"options", "records"},
    "choice": {"options", "records", "hardware", "analysis"},
    "sweep": {"options", "records", "hardware", "distributed", "checkpointing", "training", "analysis"},
}
MAY_IMPORT["inference"] = {*MAY_IMPORT} - {"choice"}
MAY_IMPORT["cli"] = {*MAY_IMPORT, "attached"}
# The programs, the public names, and what Lightning asks for callbacks.
PROGRAMS = {"train", "__main__", "__init__", "attached"}
# The modules of a folder that others may use, if they may not use all.
PARTS = {("models", "data"): {"data.spec"}}


def imported(path: Path) -> Iterator[str]:
    """The modules of this package that a file imports, as dotted names below `src/`."""
    package = ".".join(["batchscope", *path.relative_to(SRC).parts[:-1]])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            module = resolve_name("." * node.level + (node.module or ""), package)
            files = {alias.name: SRC.joinpath(*module.split(".")[1:], f"{alias.name}.py") for alias in node.names}
            names = [f"{module}.{name}" if file.is_file() else module for name, file in files.items()]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        yield from (name.removeprefix("batchscope.") for name in names if name.startswith("batchscope."))


def upwards(path: Path, target: str) -> Iterator[str]:
    """Yield the rules that an import breaks."""
    module = ".".join(path.relative_to(SRC).with_suffix("").parts)
    room, part = module.partition(".")[0], target.partition(".")[0]
    if module in PROGRAMS:
        return
    if part not in {*GROUND, *({room} | MAY_IMPORT[room] if room in MAY_IMPORT else ())}:
        yield f"{path} imports {target}: {room} may not import {part}"
    if target not in PARTS.get((room, part), {target}):
        yield f"{path} imports {target}: of {part} it may use {', '.join(PARTS[room, part])}"


def test_no_import_points_upwards_and_every_file_has_its_place() -> None:
    imports = {path: [*imported(path)] for path in SRC.rglob("*.py")}
    assert sum(map(len, imports.values())) > 500
    assert [wrong for path, targets in imports.items() for target in targets for wrong in upwards(path, target)] == []
    assert {path.parent.name for path in SRC.glob("*/__init__.py")} == {*MAY_IMPORT}
    assert {path.stem for path in SRC.glob("*.py")} <= GROUND | PROGRAMS
