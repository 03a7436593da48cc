"""How many small seeded mistakes in src/ do the tests notice?

    python benchmarks/mutations.py --seed 0 --count 40        # of the commit of this checkout, by its tests
    python benchmarks/mutations.py OLD --suite NEW            # the mistakes drawn from OLD, made in NEW, by NEW's tests

A mutation changes one statement of a function: off by one, a dropped call, two swapped arguments, a negated condition, or
a factor that divides (a wrong unit). They are spread over all rooms of src/. All happens in a clone below outputs/mutations. The
suite runs once, with a probe at each statement that notes which test reaches it, also in processes that tests start. Then
each mutation is made, and the tests that reach it run until one fails, those of its room first. A failure counts if the
test passes without the mutation. The same command goes on where it was stopped. Some mutations change nothing that can be seen,
so no suite catches all: what counts is the same ones with two suites.
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
# To swap their arguments changes nothing, or is an error.
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
_current, _seen, _ends = ["", 0], set(), {}  # the running test and its process; what it has reached; all tests' ends


def statements(node: ast.AST, function: str = "", inside: bool = False) -> Iterator[tuple[str, list, ast.stmt]]:
    """Every statement of the functions below a node, with the function's name and the list that holds it."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for each in list(found) if isinstance(found := getattr(node, name, None), list) else []:
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from statements(each, f"{function}.{each.name}", not isinstance(each, ast.ClassDef))
            else:
                if inside and isinstance(each, ast.stmt):
                    yield function, found, each
                yield from statements(each, function, inside)


def expressions(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a statement, without the statements in it, text and annotations."""
    for name, value in ast.iter_fields(node):
        for each in value if isinstance(value, list) and name != "annotation" else [value]:
            if isinstance(each, ast.expr | ast.comprehension | ast.withitem | ast.keyword) and not isinstance(
                each, ast.JoinedStr
            ):
                yield each
                yield from expressions(each)


def changes(tree: ast.AST) -> Iterator[tuple[str, str, list, ast.stmt, Callable[[], None]]]:
    """Every mutation of a module: kind, function, list, statement, and what makes it."""
    for function, body, statement in statements(tree):
        found: list[tuple[str, Callable[[], None]]] = []
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            found.append((KINDS[1], lambda b=body, s=statement: b.__setitem__(b.index(s), ast.Pass())))
        for node in [statement, *expressions(statement)]:
            if isinstance(node, ast.If | ast.While | ast.IfExp):
                found.append((KINDS[3], lambda n=node: setattr(n, "test", ast.UnaryOp(ast.Not(), n.test))))
            elif isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARED:
                found.append((KINDS[0], lambda n=node: n.ops.__setitem__(0, COMPARED[type(n.ops[0])]())))
            elif isinstance(node, ast.Call) and _can_swap(node):
                found.append((KINDS[2], lambda n=node: n.args.__setitem__(slice(2), n.args[1::-1])))
            elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div) and _scales(node):
                other = ast.Div if isinstance(node.op, ast.Mult) else ast.Mult
                found.append((KINDS[4], lambda n=node, o=other: setattr(n, "op", o())))
            elif isinstance(node, ast.Slice | ast.Subscript) or _adds(node):
                for each in ast.iter_child_nodes(node):
                    if isinstance(each, ast.Constant) and type(each.value) is int:
                        found.append((KINDS[0], lambda n=each: setattr(n, "value", n.value + 1)))
        yield from ((kind, function, body, statement, apply) for kind, apply in found)


def _adds(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub)


def _can_swap(call: ast.Call) -> bool:
    first = {ast.dump(each) for each in call.args[:2] if not isinstance(each, ast.Starred)}
    return len(first) == 2 and ast.unparse(call.func) not in ALIKE


def _scales(node: ast.BinOp) -> bool:
    powers = (isinstance(side, ast.BinOp) and isinstance(side.op, ast.Pow) for side in (node.left, node.right))
    return any(powers) or any(getattr(side, "value", None) in SCALES for side in (node.left, node.right))


def mutated(path: Path, number: int) -> tuple[Mutation, str]:
    """What the mutation of this number does to a file, and the file's text with it."""
    tree = ast.parse(path.read_text())
    kind, function, body, statement, apply = list(changes(tree))[number]
    at, before = body.index(statement), ast.unparse(statement).splitlines()[0]
    apply()
    after = ast.unparse(body[at]).splitlines()[0]
    return {"kind": kind, "function": function[1:], "before": before, "after": after}, ast.unparse(tree)


def draw(source: Path, seed: int, count: int) -> list[Mutation]:
    """The first mutations of a seed: each room in its turn, and in each room each kind that it has."""
    rng, pools = random.Random(seed), {}
    for path in sorted(source.rglob("*.py")):
        name = path.relative_to(source)
        pool = pools.setdefault(name.parts[0] if len(name.parts) > 1 else "beside the rooms", [])
        pool += [(kind, str(name), number) for number, (kind, *_) in enumerate(changes(ast.parse(path.read_text())))]
    rooms, found = sorted(room for room, pool in pools.items() if pool), []
    for turn in range(count):
        room, wanted = rooms[turn % len(rooms)], KINDS[(turn + turn // len(rooms)) % len(KINDS)]
        choice = rng.choice([each for each in pools[room] if each[0] == wanted] or pools[room])
        pools[room].remove(choice)
        found.append({"room": room, "file": choice[1], **mutated(source / choice[1], choice[2])[0]})
    return found


def locate(source: Path, mutation: Mutation) -> int | None:
    """The number of a mutation in a source that may be another one; None where its statement is gone."""
    path, same = source / mutation["file"], ("kind", "function", "before", "after")
    count = len(list(changes(ast.parse(path.read_text())))) if path.exists() else 0
    matches = (n for n in range(count) if all(mutated(path, n)[0][key] == mutation[key] for key in same))
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
    found = subprocess.check_output(line, env=os.environ | environment, text=True, cwd=copy).strip()
    if found != str(copy / "src" / "__init__.py"):
        sys.exit(f"error: tests would import {found or 'nothing'}; it takes pip install -e '.[test]'")
    return copy


def run_tests(copy: Path, tests: list[str], limit_s: float | None = None) -> tuple[int | None, dict[str, list]]:
    """Run tests until one fails, or the whole suite; the exit code (None: the time limit), and each test's end."""
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
    """Run the suite with probes, and note in each mutation the tests that reach it; returns all tests' ends."""
    source = copy / "src"
    (copy.parent / "hits").write_text("")
    for name in {each["file"] for each in mutations if locate(source, each) is not None}:
        tree = ast.parse((source / name).read_text())
        sites = list(changes(tree))
        for number, each in enumerate(mutations):
            if each["file"] == name and (at := locate(source, each)) is not None:
                body, statement = sites[at][2:4]
                call = ast.parse(f"__import__('mutations').hit({number})").body[0]
                body.insert(next(n for n, found in enumerate(body) if found is statement), call)
        write(source / name, ast.unparse(tree))
    ends: dict[str, list] = {}
    for _ in range(3):  # again what has not passed: a busy machine fails tests, and may kill a suite
        (copy.parent / "passed").write_text(json.dumps([test for test, (_, passed) in ends.items() if passed]))
        ends |= run_tests(copy, [])[1]
    (copy.parent / "passed").unlink()
    for name in {each["file"] for each in mutations}:
        subprocess.run(["git", "checkout", "-q", "--", f"src/{name}"], cwd=copy, check=False)
    hits = {tuple(line.split("\t", 1)) for line in (copy.parent / "hits").read_text().splitlines()}
    for number, each in enumerate(mutations):
        each["tests"] = sorted(test for found, test in hits if found == str(number) and ends.get(test, (0, False))[1])
    return ends


def judge(copy: Path, mutation: Mutation, ends: dict[str, list], seconds: float) -> str:
    """Whether a mutation is caught; in `by` of the mutation, what has caught it."""
    path = copy / "src" / mutation["file"]
    if (number := locate(copy / "src", mutation)) is None:
        return "gone"
    order = sorted(
        mutation["tests"], key=lambda test: (not test.startswith(f"tests/{mutation['room']}/"), ends[test][0])
    )
    taken = list(itertools.accumulate(ends[test][0] for test in order))
    chosen = [test for test, sum_s in zip(order, taken, strict=True) if sum_s <= seconds] or order[:1]
    while chosen:
        original = path.read_text()
        try:
            write(path, mutated(path, number)[1])
            code, found = run_tests(copy, chosen, 120 + 5 * seconds)
            if code == 4:  # the names of tests depend on what was changed
                code, found = run_tests(copy, sorted({test.split("::")[0] for test in chosen}), 120 + 5 * seconds)
        finally:
            write(path, original)
        failed = [test for test, (_, passed) in found.items() if not passed]
        if code == 0:
            return "survived"
        if not failed or run_tests(copy, failed)[0] in (0, 4):
            mutation["by"] = failed[0] if failed else f"exit code {code}" if code is not None else "the time limit"
            return "caught"
        chosen = [test for test in chosen if test not in failed]  # this one fails without the mutation, too
    return "survived" if mutation["tests"] else "not reached"


def hit(number: int) -> None:
    """What a probe calls: note that the running test has reached this mutation's statement."""
    work = Path(__file__).parents[1]
    if _current[1] != os.getpid():  # a process that the test has started
        _current[:] = (work / "current").read_text(), os.getpid()
    if _current[0] and (number, _current[0]) not in _seen:
        _seen.add((number, _current[0]))
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
    """Leave out what has passed in an earlier run of the suite under probes."""
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
    kept = json.loads(out.read_text()) if out.exists() else {"ends": {}, "mutations": []}
    mutations = kept["mutations"] + draw(args.checkout / "src", args.seed, args.count)[len(kept["mutations"]) :]
    if new := [each for each in mutations if "tests" not in each]:
        kept = {"ends": kept["ends"] | probe(copy, new), "mutations": mutations}
        out.write_text(json.dumps(kept, indent=1))
    for each in mutations:
        if "result" not in each:
            each["result"] = judge(copy, each, kept["ends"], args.seconds)
            out.write_text(json.dumps(kept, indent=1))
        words = f"{each['kind']}, {each['file']}, {each['function']}: {each['before']} → {each['after']}"
        print(f"{each['result']:11} {words}", flush=True)
    print(f"\n| room | {' | '.join(RESULTS)} |\n| --- |{' ---: |' * len(RESULTS)}")
    for room in [*sorted({each["room"] for each in mutations}), "all rooms"]:
        found = [each["result"] for each in mutations if each["room"] == room or room == "all rooms"]
        print(f"| {room} | {' | '.join(str(found.count(result)) for result in RESULTS)} |")


if __name__ == "__main__":
    main()
