"""How many small seeded mistakes in src/ do the tests notice?

    python benchmarks/mutations.py --seed 0 --count 40        # of the commit of this checkout, by its tests
    python benchmarks/mutations.py OLD --suite NEW            # the mistakes drawn from OLD, made in NEW, by NEW's tests

A mutation changes one statement of a function: off by one, a dropped call, two swapped arguments, a negated condition, or
a factor that divides (a wrong unit). Mutations are spread over all rooms of src/, and made in a clone below outputs/mutations. The
suite runs once with a probe at each statement, which notes the tests that reach it, also in processes that tests start. Then
each mutation is made, and the tests that reach it run until one fails, those of its room first. A failure counts if the
test passes without the mutation. After an interruption, the same command continues. Some mutations have no visible effect, so
no suite catches all: compare two suites on the same mutations.
"""

import argparse
import ast
import contextlib
import importlib.util
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("off by one", "dropped call", "swapped arguments", "negated condition", "wrong unit")
WORK = ROOT / "outputs" / "mutations"
RESULTS = ("caught", "survived", "not reached", "gone")
SCALES = {24, 60, 100, 1000, 1024, 3600, 10**6, 10**9, 1e-3, 1e-6, 1e-9}
# Functions whose swapped arguments change nothing, or are an error.
ALIKE = {"max", "min", "zip", "isinstance", "getattr", "next"}
COMPARED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
SITE = """import sys
from pathlib import Path
for name, module in list(sys.modules.items()):
    if name.startswith("__editable___batchscope"):
        old = Path(module.MAPPING["batchscope"]).parent
        moved = {{key: str(Path({root!r}) / Path(path).relative_to(old)) for key, path in module.MAPPING.items()}}
        module.MAPPING.update(moved)
        module.NAMESPACES.update({{key: [moved[key]] for key in module.NAMESPACES}})
"""
Mutation = dict[str, Any]
_current, _reached, _ends = ["", 0], set(), {}  # the running test and its process; what it reached; all tests' ends


def statements(node: ast.AST, function: str = "", in_function: bool = False) -> Iterator[tuple[str, list, ast.stmt]]:
    """Every statement of the functions below a node, with the function's name and the list that holds the statement."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in list(nodes) if isinstance(nodes := getattr(node, name, None), list) else []:
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from statements(child, f"{function}.{child.name}", not isinstance(child, ast.ClassDef))
            else:
                if in_function and isinstance(child, ast.stmt):
                    yield function, nodes, child
                yield from statements(child, function, in_function)


def expressions(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a statement, without nested statements, f-strings and annotations."""
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) and name != "annotation" else [value]:
            if isinstance(child, ast.expr | ast.comprehension | ast.withitem | ast.keyword) and not isinstance(
                child, ast.JoinedStr
            ):
                yield child
                yield from expressions(child)


def changes(tree: ast.AST) -> Iterator[tuple[str, str, list, ast.stmt, Callable[[], None]]]:
    """Every mutation of a module: kind, function, list, statement, and the function that makes the mutation."""
    for function, body, statement in statements(tree):
        mutations: list[tuple[str, Callable[[], None]]] = []
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            mutations.append((KINDS[1], lambda b=body, s=statement: b.__setitem__(b.index(s), ast.Pass())))
        for node in [statement, *expressions(statement)]:
            if isinstance(node, ast.If | ast.While | ast.IfExp):
                mutations.append((KINDS[3], lambda n=node: setattr(n, "test", ast.UnaryOp(ast.Not(), n.test))))
            elif isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARED:
                mutations.append((KINDS[0], lambda n=node: n.ops.__setitem__(0, COMPARED[type(n.ops[0])]())))
            elif isinstance(node, ast.Call) and _can_swap(node):
                mutations.append((KINDS[2], lambda n=node: n.args.__setitem__(slice(2), n.args[1::-1])))
            elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div) and _scales(node):
                inverse = ast.Div if isinstance(node.op, ast.Mult) else ast.Mult
                mutations.append((KINDS[4], lambda n=node, o=inverse: setattr(n, "op", o())))
            elif isinstance(node, ast.Slice | ast.Subscript) or _adds(node):
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.Constant) and type(child.value) is int:
                        mutations.append((KINDS[0], lambda n=child: setattr(n, "value", n.value + 1)))
        yield from ((kind, function, body, statement, apply) for kind, apply in mutations)


def _adds(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub)


def _can_swap(call: ast.Call) -> bool:
    first = {ast.dump(argument) for argument in call.args[:2] if not isinstance(argument, ast.Starred)}
    return len(first) == 2 and ast.unparse(call.func) not in ALIKE


def _scales(node: ast.BinOp) -> bool:
    powers = (isinstance(side, ast.BinOp) and isinstance(side.op, ast.Pow) for side in (node.left, node.right))
    return any(powers) or any(getattr(side, "value", None) in SCALES for side in (node.left, node.right))


def mutated(path: Path, number: int) -> tuple[Mutation, str]:
    """Describe the mutation `number` of a file; returns its description and the mutated text."""
    tree = ast.parse(path.read_text())
    kind, function, body, statement, apply = list(changes(tree))[number]
    index, before = body.index(statement), ast.unparse(statement).splitlines()[0]
    apply()
    after = ast.unparse(body[index]).splitlines()[0]
    return {"kind": kind, "function": function[1:], "before": before, "after": after}, ast.unparse(tree)


def draw(source: Path, seed: int, count: int) -> list[Mutation]:
    """The first `count` mutations of a seed: the rooms take turns, and so do the kinds within a room."""
    rng, pools = random.Random(seed), {}
    for path in sorted(source.rglob("*.py")):
        name = path.relative_to(source)
        pool = pools.setdefault(name.parts[0] if len(name.parts) > 1 else "beside the rooms", [])
        pool += [(kind, str(name), number) for number, (kind, *_) in enumerate(changes(ast.parse(path.read_text())))]
    rooms, drawn = sorted(room for room, pool in pools.items() if pool), []
    for turn in range(count):
        room, wanted_kind = rooms[turn % len(rooms)], KINDS[(turn + turn // len(rooms)) % len(KINDS)]
        choice = rng.choice([candidate for candidate in pools[room] if candidate[0] == wanted_kind] or pools[room])
        pools[room].remove(choice)
        drawn.append({"room": room, "file": choice[1], **mutated(source / choice[1], choice[2])[0]})
    return drawn


def locate(source: Path, mutation: Mutation) -> int | None:
    """The number of a mutation in a source that may have changed; None if its statement is gone."""
    path, keys = source / mutation["file"], ("kind", "function", "before", "after")
    count = len(list(changes(ast.parse(path.read_text())))) if path.exists() else 0
    matches = (n for n in range(count) if all(mutated(path, n)[0][key] == mutation[key] for key in keys))
    return next(matches, None)


def write(path: Path, text: str) -> None:
    path.write_text(text)
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def commit_of(checkout: Path) -> str:
    return subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=checkout, text=True).strip()


def clone(checkout: Path, work: Path) -> Path:
    """A clone of a checkout's commit, from which this Python imports batchscope when `site` beside it is on its path."""
    copy, site = work / "copy", work / "site"
    shutil.rmtree(copy, ignore_errors=True)
    site.mkdir(parents=True, exist_ok=True)
    subprocess.run(["git", "clone", "-q", str(checkout), str(copy)], check=True)
    if (shared := checkout.resolve().parent / "shared").is_dir() and not (work / "shared").exists():
        (work / "shared").symlink_to(shared)  # the data of the tests
    shutil.copy(__file__, site / "mutations.py")
    (site / "sitecustomize.py").write_text(SITE.format(root=str(copy)))
    line, environment = [sys.executable, "-c", "import batchscope as b; print(b.__file__)"], {"PYTHONPATH": str(site)}
    imported = subprocess.check_output(line, env=os.environ | environment, text=True, cwd=copy).strip()
    if imported != str(copy / "src" / "__init__.py"):
        sys.exit(f"error: tests would import {imported or 'nothing'}; it takes pip install -e '.[test]'")
    return copy


def run_tests(copy: Path, tests: list[str], limit_s: float | None = None) -> tuple[int | None, dict[str, list]]:
    """Run `tests` until one fails, or the whole suite if empty; the exit code (None: the time limit), and each test's end."""
    work = copy.parent
    report, arguments = work / "report.jsonl", work / "arguments"
    report.unlink(missing_ok=True)
    (work / "current").write_text("")
    arguments.write_text("\n".join(tests))
    line = [sys.executable, "-m", "pytest", "-p", "mutations", "-rfE", "--tb=line", f"--basetemp={work / 'tmp'}"]
    line += ["-x", f"@{arguments}"] if tests else []
    with (work / "log").open("w") as log:
        environment = os.environ | {"PYTHONPATH": str(work / "site")}
        process = subprocess.Popen(line, cwd=copy, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    lines = report.read_text().splitlines() if report.exists() else []
    return code, {test: end for test, *end in map(json.loads, lines)}


def probe(copy: Path, mutations: list[Mutation]) -> dict[str, list]:
    """Run the suite with probes, and write the tests that reach a mutation into the mutation; returns all tests' ends."""
    source = copy / "src"
    (copy.parent / "hits").write_text("")
    for name in {mutation["file"] for mutation in mutations if locate(source, mutation) is not None}:
        tree = ast.parse((source / name).read_text())
        sites = list(changes(tree))
        for number, mutation in enumerate(mutations):
            if mutation["file"] == name and (index := locate(source, mutation)) is not None:
                body, statement = sites[index][2:4]
                call = ast.parse(f"__import__('mutations').hit({number})").body[0]
                body.insert(next(n for n, node in enumerate(body) if node is statement), call)
        write(source / name, ast.unparse(tree))
    ends: dict[str, list] = {}
    for _ in range(3):  # repeat tests that have not passed: on a busy machine tests fail, and a suite may be killed
        (copy.parent / "passed").write_text(json.dumps([test for test, (_, passed) in ends.items() if passed]))
        ends |= run_tests(copy, [])[1]
    (copy.parent / "passed").unlink()
    for name in {mutation["file"] for mutation in mutations}:
        subprocess.run(["git", "checkout", "-q", "--", f"src/{name}"], cwd=copy, check=False)
    hits = {tuple(line.split("\t", 1)) for line in (copy.parent / "hits").read_text().splitlines()}
    for number, mutation in enumerate(mutations):
        mutation["tests"] = sorted(test for n, test in hits if n == str(number) and ends.get(test, (0, False))[1])
    return ends


def judge(copy: Path, mutation: Mutation, ends: dict[str, list], seconds: float) -> str:
    """Whether the tests catch a mutation; its `by` becomes the test, exit code or time limit that shows it."""
    path = copy / "src" / mutation["file"]
    if (number := locate(copy / "src", mutation)) is None:
        return "gone"
    order = sorted(
        mutation["tests"], key=lambda test: (not test.startswith(f"tests/{mutation['room']}/"), ends[test][0])
    )
    elapsed = list(itertools.accumulate(ends[test][0] for test in order))
    selected = [test for test, sum_s in zip(order, elapsed, strict=True) if sum_s <= seconds] or order[:1]
    while selected:
        original = path.read_text()
        try:
            write(path, mutated(path, number)[1])
            code, results = run_tests(copy, selected, 120 + 5 * seconds)
            if code == 4:  # the mutation changed the names of tests
                code, results = run_tests(copy, sorted({test.split("::")[0] for test in selected}), 120 + 5 * seconds)
        finally:
            write(path, original)
        failed = [test for test, (_, passed) in results.items() if not passed]
        if code == 0:
            return "survived"
        if not failed or run_tests(copy, failed)[0] in (0, 4):
            mutation["by"] = failed[0] if failed else f"exit code {code}" if code is not None else "the time limit"
            return "caught"
        selected = [test for test in selected if test not in failed]  # these fail without the mutation, too
    return "survived" if mutation["tests"] else "not reached"


def hit(number: int) -> None:
    """Note that the running test has reached the statement of a mutation; the probes call this."""
    work = Path(__file__).parents[1]
    if _current[1] != os.getpid():  # a process that the test has started
        _current[:] = (work / "current").read_text(), os.getpid()
    if _current[0] and (number, _current[0]) not in _reached:
        _reached.add((number, _current[0]))
        with (work / "hits").open("a") as file:
            file.write(f"{number}\t{_current[0]}\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    _current[:] = nodeid, os.getpid()
    (Path(__file__).parents[1] / "current").write_text(nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    seconds, passed = _ends.get(report.nodeid, (0.0, True))
    _ends[report.nodeid] = round(seconds + report.duration, 3), passed and not report.failed
    if report.failed or report.when == "teardown":
        with (Path(__file__).parents[1] / "report.jsonl").open("a") as file:
            file.write(json.dumps([report.nodeid, *_ends[report.nodeid]]) + "\n")


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Leave out tests that have passed in an earlier run of the suite with probes."""
    if (file := Path(__file__).parents[1] / "passed").exists():
        passed = set(json.loads(file.read_text()))
        items[:] = [item for item in items if item.nodeid not in passed]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", nargs="?", type=Path, default=ROOT, help="what mutations are drawn from")
    parser.add_argument("--suite", type=Path, metavar="FOLDER", help="the checkout that they are made and tested in")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=300, help="of tests for each mutation")
    args = parser.parse_args()
    suite = args.suite or args.checkout
    copy, out = clone(suite, WORK), WORK / f"{commit_of(args.checkout)}-{commit_of(suite)}-{args.seed}.json"
    state = json.loads(out.read_text()) if out.exists() else {"ends": {}, "mutations": []}
    mutations = state["mutations"] + draw(args.checkout / "src", args.seed, args.count)[len(state["mutations"]) :]
    if new := [mutation for mutation in mutations if "tests" not in mutation]:
        state = {"ends": state["ends"] | probe(copy, new), "mutations": mutations}
        out.write_text(json.dumps(state, indent=1))
    for mutation in mutations:
        if "result" not in mutation:
            mutation["result"] = judge(copy, mutation, state["ends"], args.seconds)
            out.write_text(json.dumps(state, indent=1))
        words = f"{mutation['kind']}, {mutation['file']}, {mutation['function']}: {mutation['before']} → {mutation['after']}"
        print(f"{mutation['result']:11} {words}", flush=True)
    print(f"\n| room | {' | '.join(RESULTS)} |\n| --- |{' ---: |' * len(RESULTS)}")
    for room in [*sorted({mutation["room"] for mutation in mutations}), "all rooms"]:
        results = [mutation["result"] for mutation in mutations if mutation["room"] == room or room == "all rooms"]
        print(f"| {room} | {' | '.join(str(results.count(result)) for result in RESULTS)} |")


if __name__ == "__main__":
    main()
