"""Change single expressions and statements of the code, and see whether the tests notice.

    python -m bench.robustness.mutants cover FOLDER [pytest's options]
    python -m bench.robustness.mutants run FOLDER [--group NAME ...] [--mutants 40] [--seed 0]

`cover` runs the tests, writes which test runs which line into FOLDER, and records the share of
statements in functions that run (`bench/results/coverage.jsonl`), without functions that numba
compiles. It needs the package `coverage`.

`run` draws mutants of each group of packages: an operator, a comparison, a constant or a condition
is changed, a returned value replaced by None, or a statement removed. It leaves messages,
annotations and defaults of parameters. Each mutant is put into a copy of the checkout, where the
tests that run its line get 60 s, the fastest first. A test that fails detects the mutant; a run
that takes longer does not. A line of a compiled function counts as run by the tests of the
functions that name it. `bench/results/mutants.jsonl` gets one line for each group, with the share
of detected mutants and those that survive.
"""

import argparse
import ast
import copy
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bench.harness import ROOT, check_code_is_committed, record
from bench.robustness.durations import Durations

GROUPS = {
    "kernels": ("kernels", "datasets"),
    "graph": ("gcnzc/graph", "gcnzc/sampling", "gcnzc/loader", "gcnzc/features", "gcnzc/models"),
    "interop": ("gcnzc/interop",),
    "network": ("gcnzc/exchange", "gcnzc/compress", "gcnzc/optim"),
    "train": ("gcnzc/train", "gcnzc/cli"),
}
COPIED = ("gcnzc", "kernels", "datasets", "bench", "tests", "docs", "pyproject.toml", "README.md")
LIMIT_S = 60
MOST_TESTS = 400  # of one mutant, which fit on a command line and into its time
DATA_FILE = "GCNZC_COVERAGE_FILE"

OTHER_OPERATOR: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


@dataclass(frozen=True)
class Mutant:
    """A replacement of the text of one node of a file's syntax tree."""

    path: str
    function: str
    node: ast.AST
    new: str

    @property
    def line(self) -> int:
        """The first line of the node."""
        return int(self.node.lineno)  # type: ignore[attr-defined]

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {ast.unparse(self.node)} -> {self.new}"

    def applied(self, source: str) -> str:
        """Return the source with the replacement."""
        lines = source.encode().splitlines(keepends=True)
        place: Any = self.node
        before = b"".join(lines[: place.lineno - 1]) + lines[place.lineno - 1][: place.col_offset]
        after = lines[place.end_lineno - 1][place.end_col_offset :]
        rest = b"".join(lines[place.end_lineno :])
        return (before + self.new.encode() + after + rest).decode()


def mutants_of(path: str) -> Iterator[Mutant]:
    """Yield all mutants of a file's functions."""
    for function in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(function, ast.FunctionDef):
            for statement in function.body:
                for node in code_in(statement):
                    for replaced, new in variants(node):
                        yield Mutant(path, function.name, replaced, new)


def code_in(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that a mutant may change: no messages, annotations or inner functions."""
    inner = (ast.FunctionDef, ast.Lambda, ast.ClassDef, ast.Raise, ast.Assert, ast.JoinedStr)
    if isinstance(node, inner):
        return
    yield node
    for name, field in ast.iter_fields(node):
        if name != "annotation":
            for child in field if isinstance(field, list) else [field]:
                if isinstance(child, ast.AST):
                    yield from code_in(child)


def variants(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Yield what may be replaced in a node, and the new text."""
    new: Any = copy.copy(node)
    match node:
        case ast.BinOp() | ast.BoolOp() if type(node.op) in OTHER_OPERATOR:
            new.op = OTHER_OPERATOR[type(node.op)]()
            yield node, f"({ast.unparse(new)})"
        case ast.Compare() if len(node.ops) == 1:
            new.ops = [OTHER_OPERATOR[type(node.ops[0])]()]
            yield node, f"({ast.unparse(new)})"
        case ast.Constant(value=bool()):
            yield node, str(not node.value)
        case ast.Constant(value=int() | float()):
            yield node, f"({node.value + 1})"
        case ast.If() | ast.While() | ast.IfExp():
            yield node.test, f"(not ({ast.unparse(node.test)}))"
        case ast.Return(value=ast.expr()) if ast.unparse(node.value) != "None":
            yield node, "return None"
        case ast.Expr(value=ast.Call()):
            yield node, "pass"
        case ast.AugAssign() | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield node, "pass"


class Lines:
    """Which tests run which lines, from the data that `cover` has written."""

    def __init__(self, folder: Path) -> None:
        from coverage import CoverageData

        data = CoverageData(str(folder / "coverage"))
        data.read()
        self.tests: dict[str, dict[int, list[str]]] = {}
        for measured in data.measured_files():
            path = Path(measured).resolve()
            if path.is_relative_to(ROOT):
                by_line = data.contexts_by_lineno(measured)
                kept = {line: [test for test in tests if test] for line, tests in by_line.items()}
                self.tests.setdefault(str(path.relative_to(ROOT)), {}).update(kept)
        self.seconds = json.loads((folder / "seconds.json").read_text())

    def of(self, mutant: Mutant) -> list[str]:
        """Return the tests that run a mutant's line, the fastest first."""
        tests = set(self.tests.get(mutant.path, {}).get(mutant.line, []))
        if not tests and mutant.function in compiled_functions():
            for path, lines in callers(mutant.function):
                for line in lines:
                    tests.update(self.tests.get(path, {}).get(line, []))
        return sorted(tests, key=lambda test: (self.seconds.get(test, LIMIT_S), test))


@cache
def sources() -> dict[str, ast.Module]:
    """Return the syntax trees of all files of the package, by their paths."""
    files = (path for top in ("gcnzc", "kernels", "datasets") for path in files_in(top))
    return {path: ast.parse((ROOT / path).read_text()) for path in files}


def files_in(folder: str) -> list[str]:
    """Return the Python files of a folder, without links."""
    found = sorted((ROOT / folder).rglob("*.py"))
    return [str(path.relative_to(ROOT)) for path in found if path == path.resolve()]


@cache
def compiled_functions() -> frozenset[str]:
    """Return the names of the functions that numba compiles."""
    return frozenset(
        node.name
        for tree in sources().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    )


@cache
def callers(name: str) -> list[tuple[str, list[int]]]:
    """Return the first lines of the functions that lead to a compiled function."""
    found, reached, new = [], {name}, {name}
    while new:
        names, new = new, set()
        for path, tree in sources().items():
            for node in ast.walk(tree):
                if not isinstance(node, ast.FunctionDef) or node.name in reached:
                    continue
                used = {getattr(part, "id", getattr(part, "attr", "")) for part in ast.walk(node)}
                if used & names:
                    found.append((path, [statement.lineno for statement in node.body]))
                    if node.name in compiled_functions():
                        new.add(node.name)
        reached |= new
    return found


@cache
def users(stem: str) -> frozenset[str]:
    """Return the names of a kernel's module and of those that import it, also through others."""
    found, new = {stem}, {stem}
    while new:
        pattern = re.compile(rf"^\s*(from|import)\b.*\b({'|'.join(new)})\b", re.MULTILINE)
        files = [path for path in files_in("kernels") if pattern.search((ROOT / path).read_text())]
        new = {Path(path).stem for path in files} - found
        found |= new
    return frozenset(found)


def run_group(group: str, lines: Lines, count: int, seed: int) -> None:
    """Draw mutants of a group, run their tests and record the share that they detect."""
    files = [path for folder in GROUPS[group] for path in files_in(folder)]
    everything = [mutant for path in files for mutant in mutants_of(path)]
    drawn = random.Random(f"{seed} {group}").sample(everything, count)
    outcomes: defaultdict[str, list[str]] = defaultdict(list)
    for number, mutant in enumerate(drawn, 1):
        tests = lines.of(mutant)
        outcome = outcome_of(mutant, tests) if tests else "without tests"
        outcomes[outcome].append(str(mutant))
        print(f"{group} {number}/{count}  {outcome}  {mutant}", flush=True)
    detected = len(outcomes["detected"])
    record(
        "mutants",
        {"group": group, "mutants": count, "seed": seed},
        detected=detected,
        share=round(detected / count, 3),
        survivors=outcomes["survives"],
        too_slow=outcomes["too slow"],
        without_tests=outcomes["without tests"],
    )


def outcome_of(mutant: Mutant, tests: list[str]) -> str:
    """Run the tests of a mutant in a copy of the checkout."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as parent:
        root = Path(parent) / "checkout"
        root.mkdir()
        for name in COPIED:
            subprocess.run(["cp", "-a", str(ROOT / name), str(root)], check=True)
        shared = ROOT.parent / "shared"
        if shared.exists():
            (Path(parent) / "shared").symlink_to(shared)
        path = root / mutant.path
        path.write_text(mutant.applied(path.read_text()))
        if mutant.path.startswith("kernels"):
            # numba does not see that a function changes which a cached function includes
            for stem in users(Path(mutant.path).stem):
                for compiled in root.rglob(f"{stem}.*.nb[ic]"):
                    compiled.unlink()
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        command += ["-p", "no:randomly", *tests[:MOST_TESTS]]
        environment = os.environ | {"PYTHONPATH": f"{root}:{root / 'tests'}"}
        # in a group of its own, whose workers are stopped with it
        process = subprocess.Popen(
            command,
            cwd=root,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            status = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            return "too slow"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return "survives" if status == 0 else "detected"


class Coverage:
    """A plugin of pytest that measures which test runs which line in each process."""

    def __init__(self) -> None:
        from coverage import Coverage as Measured

        source = [str(ROOT / name) for name in ("gcnzc", "kernels", "datasets")]
        self.measured = Measured(
            data_file=os.environ[DATA_FILE], data_suffix=True, source=source, config_file=False
        )
        self.measured.start()

    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        """Name the test that runs from here."""
        self.measured.switch_context(item.nodeid)

    def pytest_unconfigure(self) -> None:
        """Write the data of this process."""
        self.measured.stop()
        self.measured.save()


def pytest_configure(config: pytest.Config) -> None:
    """Measure in this process, if it runs tests."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(Coverage(), "coverage-by-test")


def cover(folder: Path, for_pytest: list[str]) -> int:
    """Run the tests and write which lines each of them runs."""
    from coverage import Coverage as Measured

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.environ[DATA_FILE] = str(folder / "coverage")
    durations = Durations()
    begin = time.perf_counter()
    status = pytest.main(["-p", "bench.robustness.mutants", *for_pytest], [durations])
    (folder / "seconds.json").write_text(json.dumps(durations.tests))
    Measured(data_file=str(folder / "coverage"), config_file=False).combine()
    covered = Lines(folder).tests
    statements = {path: statement_lines(tree) for path, tree in sources().items()}
    run = {path: len(lines & set(covered.get(path, {}))) for path, lines in statements.items()}
    record(
        "coverage",
        {"arguments": " ".join(for_pytest)},
        statements=sum(map(len, statements.values())),
        run=sum(run.values()),
        share=round(sum(run.values()) / sum(map(len, statements.values())), 4),
        elapsed_s=round(time.perf_counter() - begin, 1),
    )
    return int(status)


def statement_lines(tree: ast.Module) -> set[int]:
    """Return the lines on which statements of functions begin, without compiled functions."""
    return {
        statement.lineno
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and function.name not in compiled_functions()
        for statement in ast.walk(function)
        if isinstance(statement, ast.stmt)
        and statement is not function
        and not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
    }


def main() -> int:
    """Run the command that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=("cover", "run"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--group", nargs="+", choices=tuple(GROUPS), default=list(GROUPS))
    parser.add_argument("--mutants", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    options, for_pytest = parser.parse_known_args()
    check_code_is_committed()
    if options.command == "cover":
        return cover(options.folder, for_pytest)
    lines = Lines(options.folder)
    for group in options.group:
        run_group(group, lines, options.mutants, options.seed)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
